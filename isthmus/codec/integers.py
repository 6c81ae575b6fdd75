"""Formats of 8, 4 and 2 bits: each group of a row's elements has a scale of its own, in bf16.

A group that holds NaN or Inf has the scale NaN, and its codes say what stood where: 0 something finite, which
arrives as 0; 1 NaN; 2 +Inf; 3 -Inf.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.codec.base import CodedMessage, Payload, Stateless, flat_bytes, from_bytes
from isthmus.job.codec_steps import Integers, num_groups


class IntegerCoder(Stateless):
    """Scales, then codes."""

    def __init__(self, integers: Integers) -> None:
        self._bits = integers.bits
        self._group = integers.group
        self._is_stochastic = integers.is_stochastic
        self._quantiser = quantiser(integers.bits)
        self._scale_dtype = torch.float32 if self._group is None else torch.bfloat16

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """Two parts: the scales of all groups, row by row, and the packed codes."""
        rows = x_ND.reshape(self._layout(x_ND.shape))
        if rows.numel() == 0:
            return (_no_bytes(x_ND), _no_bytes(x_ND))
        groups = _groups(rows, self._group)
        scale_NG = _joined([self._quantiser.scale(group) for group in groups])
        # Inf - Inf is NaN, and anything finite loses nothing.
        scale_NG = scale_NG.add_(scale_NG - scale_NG).to(self._scale_dtype)
        codes = self._codes(groups, scale_NG.to(torch.float32), message)
        return (flat_bytes(scale_NG), flat_bytes(pack_codes(codes, self._bits)))

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:  # noqa: ARG002 others do
        """The matrix, every element within its group's scale times the largest code."""
        num_rows, width = self._layout(shape)
        scales, codes = next(parts), next(parts)
        if num_rows * width == 0:
            return codes.new_zeros(shape, dtype=torch.float32)
        scale_NG = from_bytes(scales, self._scale_dtype).to(torch.float32).view(num_rows, -1)
        x_ND = unpack_codes(codes.view(num_rows, -1), self._bits, width=width)
        groups = _groups(x_ND, self._group)
        for group, scale_NG1 in zip(groups, _scales_of(groups, scale_NG), strict=True):
            marks = group.clone() if _may_be_marked(scale_NG1) else None
            self._quantiser.restore_(group, scale_NG1)
            if marks is not None:
                group.copy_(torch.where(scale_NG1.isnan(), _unmark(marks), group))
        return x_ND.reshape(shape)

    def _layout(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """One scale for all is one group that is one long row."""
        if self._group is not None:
            return shape[0], shape[1]
        return min(1, shape[0]), shape[0] * shape[1]

    def _codes(self, groups: list[Tensor], scale_NG: Tensor, message: CodedMessage) -> Tensor:
        generator = message.generator(scale_NG.device) if self._is_stochastic else None
        coded = []
        for group, scale_NG1 in zip(groups, _scales_of(groups, scale_NG), strict=True):
            codes = self._quantiser.codes(group, scale_NG1, generator)
            if _may_be_marked(scale_NG1):
                codes = torch.where(scale_NG1.isnan(), _mark(group), codes)
            coded.append(codes.flatten(1))
        return _joined(coded)


def _groups(x_ND: Tensor, group: int | None) -> list[Tensor]:
    """Views of shape (rows, groups, elements): the whole groups of each row, and the short one at its end."""
    width = x_ND.shape[1]
    if group is None or width <= group:
        return [x_ND.unsqueeze(1)]
    num_whole = width // group
    whole = x_ND[:, : num_whole * group].view(-1, num_whole, group)
    if num_whole == num_groups(width, group):
        return [whole]
    return [whole, x_ND[:, num_whole * group :].unsqueeze(1)]


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _scales_of(groups: list[Tensor], scale_NG: Tensor) -> Iterator[Tensor]:
    sizes = [group.shape[1] for group in groups]
    return (scale.unsqueeze(2) for scale in torch.split(scale_NG, sizes, dim=1))


def _may_be_marked(scale_NG1: Tensor) -> bool:
    """Only the host can be asked without waiting for it; elsewhere the answer is yes."""
    return scale_NG1.device.type != "cpu" or bool(scale_NG1.isnan().any())


def _mark(x_NGE: Tensor) -> Tensor:
    return x_NGE.isnan() + 2.0 * x_NGE.isposinf() + 3.0 * x_NGE.isneginf()


def _unmark(codes: Tensor) -> Tensor:
    values = torch.where(codes == 1, math.nan, 0.0)
    values = torch.where(codes == 2, math.inf, values)
    return torch.where(codes == 3, -math.inf, values)


def _no_bytes(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8)


LEAST_SCALE: Final = 2.0**-120
"""A group of zeros has it too: its reciprocal is still finite."""

HEADROOM: Final = 1 + 2.0**-8 + 2.0**-12
"""Keeps the largest element within the last code, however bf16 rounds the scale and noise the element."""

_NOISE_STEP: Final = 2.0**-16
_NOISE_PER_WORD: Final = 4


class Quantiser(Protocol):
    """Scales, codes and values of groups; x and codes have shape (rows, groups, elements)."""

    def scale(self, x_NGE: Tensor) -> Tensor:
        """The scale of each group, not finite where the group is not."""
        ...

    def codes(self, x_NGE: Tensor, scale_NG1: Tensor, generator: torch.Generator | None) -> Tensor:
        """The code of each element, as a float."""
        ...

    def restore_(self, codes_NGE: Tensor, scale_NG1: Tensor) -> None:
        """Make values of codes, in place."""
        ...


class Uniform:
    """Evenly spaced levels up to the largest element; nearest, or given a generator at random.

    At random is unbiased: x between two levels goes to the upper one as often as it is near it.
    """

    def __init__(self, bits: int) -> None:
        self._last = 2 ** (bits - 1) - 1

    def scale(self, x_NGE: Tensor) -> Tensor:
        """The distance of two levels."""
        # Two reductions read the elements twice but write nothing; absolute values would have to be stored.
        largest_NG = torch.maximum(x_NGE.amax(dim=2), x_NGE.amin(dim=2).neg_())
        return largest_NG.mul_(HEADROOM / self._last).clamp_min_(LEAST_SCALE)

    def codes(self, x_NGE: Tensor, scale_NG1: Tensor, generator: torch.Generator | None) -> Tensor:
        """Whole numbers within ±(2^(bits-1) - 1)."""
        codes_NGE = x_NGE * scale_NG1.reciprocal()
        if generator is not None:
            codes_NGE.add_(_noise(codes_NGE, generator), alpha=_NOISE_STEP)
        return codes_NGE.round_()

    def restore_(self, codes_NGE: Tensor, scale_NG1: Tensor) -> None:
        """Codes times scale."""
        codes_NGE.mul_(scale_NG1)


class LloydMax:
    """Four levels at the places that lose least of a Gaussian; the scale is the root mean square.

    Figures: Max, "Quantizing for minimum distortion" (1960), table I, N = 4; relative squared error 0.1175.
    """

    _INNER: Final = 0.4528
    _OUTER: Final = 1.5104
    _BETWEEN: Final = 0.9816

    def scale(self, x_NGE: Tensor) -> Tensor:
        """The root mean square, without squares that overflow."""
        largest_NG1 = x_NGE.abs().amax(dim=2, keepdim=True).clamp_min_(LEAST_SCALE)
        share_NG = (x_NGE / largest_NG1).square_().mean(dim=2)
        return share_NG.sqrt_().mul_(largest_NG1.squeeze(2))

    def codes(self, x_NGE: Tensor, scale_NG1: Tensor, generator: torch.Generator | None) -> Tensor:  # noqa: ARG002 others do
        """0 to 3, from the lowest level to the highest."""
        unit_NGE = x_NGE * scale_NG1.clamp_min(LEAST_SCALE).reciprocal_()
        above_NGE = (unit_NGE > -self._BETWEEN).to(torch.float32)
        return above_NGE.add_(unit_NGE > 0).add_(unit_NGE > self._BETWEEN)

    def restore_(self, codes_NGE: Tensor, scale_NG1: Tensor) -> None:
        """Levels times scale."""
        # -1.5, -0.5, 0.5 and 1.5 go to the levels by the odd cubic through them, which needs no look-up.
        bend = (self._OUTER / 1.5 - self._INNER / 0.5) / 2
        slope = self._INNER / 0.5 - bend / 4
        codes_NGE.sub_(1.5)
        codes_NGE.mul_(codes_NGE.square().mul_(bend).add_(slope)).mul_(scale_NG1)


def quantiser(bits: int) -> Quantiser:
    """The levels that codes of this many bits stand for."""
    return LloydMax() if bits == 2 else Uniform(bits)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Whole numbers from -2^15 to 2^15 - 1; four to a draw, since drawing is what takes the time."""
    words = torch.empty(math.ceil(like.numel() / _NOISE_PER_WORD), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[: like.numel()].view(like.shape).to(torch.float32)


def pack_codes(codes_ND: Tensor, bits: int) -> Tensor:
    """Codes of 8, 4 or 2 bits, held as floats, in rows of bytes.

    Those of 8 and 4 bits are signed, those of 2 bits go from 0 to 3. A byte holds elements that lie half a
    row, or a quarter, apart: so both sides are contiguous, and floats are joined before they become integers.
    """
    if bits == 8:
        return codes_ND.to(torch.int8).view(torch.uint8)
    lanes = _lanes(codes_ND, 8 // bits)
    joined = lanes[0] if len(lanes) == 1 else torch.add(lanes[0], lanes[1], alpha=2**bits)
    for index, lane in enumerate(lanes[2:], start=2):
        joined.add_(lane, alpha=2 ** (index * bits))
    if bits == 4:
        return joined.to(torch.int8).view(torch.uint8)
    return joined.to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, *, width: int) -> Tensor:
    """Rows of codes as float32, from rows of bytes; any byte stands for some codes."""
    if bits == 8:
        return packed.view(torch.int8).to(torch.float32)
    num_lanes = 8 // bits
    codes_ND = packed.new_empty(packed.shape[0], num_lanes * packed.shape[1], dtype=torch.float32)
    for index, lane in enumerate(codes_ND.chunk(num_lanes, dim=1)):
        lane.copy_(_signed_lane(packed, index) if bits == 4 else (packed >> (index * bits)) & 3)
    return codes_ND[:, :width]


def pack_bits(bits_NB: Tensor) -> Tensor:
    """Rows of booleans in rows of bytes, the first of eight in the lowest bit."""
    padded = functional.pad(bits_NB.to(torch.uint8), (0, -bits_NB.shape[1] % 8))
    places = torch.arange(8, dtype=torch.uint8, device=bits_NB.device)
    num_rows, num_bits = padded.shape
    return torch.sum(padded.view(num_rows, num_bits // 8, 8) << places, dim=2, dtype=torch.uint8)


def unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """Rows of zeros and ones, as uint8."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(2) >> places) & 1).flatten(1)[:, :num_bits]


def pack_indices(index_NK: Tensor, bits: int) -> Tensor:
    """Rows of indices in rows of bytes, the lowest bit first."""
    places = torch.arange(bits, device=index_NK.device)
    return pack_bits(((index_NK.unsqueeze(2) >> places) & 1).flatten(1))


def unpack_indices(packed: Tensor, bits: int, *, num_indices: int) -> Tensor:
    """Rows of indices, as int64."""
    places = torch.arange(bits, device=packed.device)
    bits_NKB = unpack_bits(packed, num_indices * bits).reshape(-1, num_indices, bits)
    return torch.sum(bits_NKB.to(torch.int64) << places, dim=2)


def _lanes(codes_ND: Tensor, num_lanes: int) -> tuple[Tensor, ...]:
    missing = -codes_ND.shape[1] % num_lanes
    padded = functional.pad(codes_ND, (0, missing)) if missing else codes_ND
    return padded.chunk(num_lanes, dim=1)


def _signed_lane(packed: Tensor, index: int) -> Tensor:
    # A byte is low + 16 * high with both from -8 to 7; 8 more make the low one a plain remainder.
    shifted = packed.view(torch.int8) + 8
    return shifted >> 4 if index else (shifted & 15) - 8


MAX_BITS: Final = 8
STEPS: Final = (0.0, 1.59577, 0.99569, 0.60182, 0.33861, 0.18879, 0.10418, 0.05689, 0.03077)
"""The best step of a uniform quantiser of 0 to 8 bits, for a Gaussian of unit variance."""
ERRORS: Final = (1.0, 0.36338, 0.11885, 0.040638, 0.011864, 3.526e-3, 1.0429e-3, 3.0458e-4, 8.7707e-5)
"""The mean squared error that it leaves; it falls ever more slowly, so that the greedy choice is the best."""

# One or two bits are best spent around zero; with more, a level at zero keeps small what is small.
_MOST_BITS_AROUND_ZERO: Final = 2
_UNIT_CODE: Final = 127
_CODES_PER_OCTAVE: Final = 4
_NOT_FINITE: Final = 255
# Rows with a large entry lose less when the scale grows and all steps with it: by 1, 1.4, 2 or 3.4.
_SCALE_TRIALS: Final = (0, 2, 4, 7)


def allot_bits(variances: Sequence[float], *, num_bits: int) -> tuple[int, ...]:
    """Share `num_bits` among columns, 0 to 8 each, so that the sum of their squared errors is least."""
    if not 0 <= num_bits <= MAX_BITS * len(variances):
        raise ValueError(f"{num_bits} bits for {len(variances)} columns of at most {MAX_BITS}")
    # By bit first, so that among equals a column gets its first bit before another its second.
    gains = [
        (variance * (ERRORS[bit] - ERRORS[bit + 1]), column)
        for bit in range(MAX_BITS)
        for column, variance in enumerate(variances)
    ]
    bits = [0] * len(variances)
    for _, column in sorted(gains, key=lambda gain: -gain[0])[:num_bits]:
        bits[column] += 1
    return tuple(bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnCode:
    """Integers of given widths for whitened rows, whose codes lie one behind the other in K bytes a row.

    A code lies in one byte or reaches into the next, so few exact products of small floats pack a row.
    """

    variance_R: Tensor
    """What errors of the columns weigh."""
    step_R: Tensor
    num_levels_R: Tensor
    middle_R: Tensor
    """Where level 0 lies, in steps: at zero, or half a step above it."""
    place_R: Tensor
    """2 to the power of the bit, within its byte, at which a column's code begins."""
    byte_RK: Tensor
    """1 at the byte in which a column's code begins."""
    next_byte_RK: Tensor
    scale_of_code: Tensor

    def encode(self, y_NR: Tensor, noise_NR: Tensor | None = None) -> Tensor:
        """The bytes of whitened rows: all scales, then all codes; noise in [0, 1) rounds at random."""
        scale_code_N = self._scale_codes(y_NR)
        code_NR = self._levels(y_NR, scale_code_N, noise_NR) + (self.num_levels_R / 2).floor()
        return torch.cat([scale_code_N, self._pack(code_NR).flatten()])

    def decode(self, packed: Tensor, *, num_rows: int) -> Tensor:
        """Whitened rows from their bytes; a row that was not finite comes back as NaN."""
        scale_code_N = packed[:num_rows]
        packed_NK = packed[num_rows:].view(num_rows, self.byte_RK.shape[1])
        level_NR = self._unpack(packed_NK) - (self.num_levels_R / 2).floor()
        return self._values(level_NR, scale_code_N)

    def _scale_codes(self, y_NR: Tensor) -> Tensor:
        mean_square_N = y_NR.square().mean(dim=1)
        nearest_N = _UNIT_CODE + (_CODES_PER_OCTAVE / 2 * mean_square_N.log2()).round()
        trial_TN = torch.stack([nearest_N + more for more in _SCALE_TRIALS])
        code_TN = trial_TN.nan_to_num(nan=0).clamp(0, _NOT_FINITE - 1).to(torch.uint8)
        error_TN = torch.stack([self._error(y_NR, code_N) for code_N in code_TN])
        best_N = code_TN.gather(0, error_TN.nan_to_num(nan=0).argmin(dim=0, keepdim=True))[0]
        return torch.where(mean_square_N.isfinite(), best_N, _NOT_FINITE)

    def _error(self, y_NR: Tensor, scale_code_N: Tensor) -> Tensor:
        lost_NR = self._values(self._levels(y_NR, scale_code_N, None), scale_code_N).sub_(y_NR)
        return lost_NR.square_() @ self.variance_R

    def _levels(self, y_NR: Tensor, scale_code_N: Tensor, noise_NR: Tensor | None) -> Tensor:
        """The nearest level, counted from zero."""
        level_NR = (y_NR / self._steps(scale_code_N)).add_(0.5 - self.middle_R)
        if noise_NR is not None:
            level_NR.add_(noise_NR - 0.5)
        half_R = (self.num_levels_R / 2).floor()
        # Columns without bits divide by zero, and rows that are not finite have no levels.
        return level_NR.floor_().nan_to_num_(nan=0).clamp_(-half_R, (half_R - 1).clamp(min=0))

    def _values(self, level_NR: Tensor, scale_code_N: Tensor) -> Tensor:
        return level_NR.add_(self.middle_R).mul_(self._steps(scale_code_N))

    def _steps(self, scale_code_N: Tensor) -> Tensor:
        return self.step_R * self.scale_of_code[scale_code_N.long()].unsqueeze(1)

    def _pack(self, code_NR: Tensor) -> Tensor:
        placed_NR = code_NR * self.place_R
        over_NR = (placed_NR / 256).floor_()
        return ((placed_NR - 256 * over_NR) @ self.byte_RK + over_NR @ self.next_byte_RK).to(torch.uint8)

    def _unpack(self, packed_NK: Tensor) -> Tensor:
        two_bytes_NR = packed_NK.float() @ (self.byte_RK + 256 * self.next_byte_RK).T
        return (two_bytes_NR / self.place_R).floor_().remainder_(self.num_levels_R)


def column_code(bits: Sequence[int], deviation_R: Tensor) -> ColumnCode:
    """The code that gives each column its bits; on the device of the columns' standard deviations."""
    device, num_columns = deviation_R.device, len(bits)
    starts = [0, *accumulate(bits)]
    byte_RK = torch.zeros(num_columns, -(-starts[-1] // 8) + 1)
    byte_RK[range(num_columns), [start // 8 for start in starts[:-1]]] = 1
    scales = [2.0 ** ((code - _UNIT_CODE) / _CODES_PER_OCTAVE) for code in range(1, _NOT_FINITE)]
    return ColumnCode(
        variance_R=deviation_R.square(),
        step_R=torch.tensor([STEPS[count] for count in bits], device=device),
        num_levels_R=torch.tensor([2.0**count for count in bits], device=device),
        middle_R=torch.tensor([0.5 * (count <= _MOST_BITS_AROUND_ZERO) for count in bits], device=device),
        place_R=torch.tensor([2.0 ** (start % 8) for start in starts[:-1]], device=device),
        byte_RK=byte_RK[:, :-1].to(device),
        next_byte_RK=byte_RK.roll(1, dims=1)[:, :-1].to(device),
        scale_of_code=torch.tensor([0.0, *scales, float("nan")], device=device),
    )
