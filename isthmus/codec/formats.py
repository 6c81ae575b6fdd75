"""Formats, which make bytes of a matrix: floating-point numbers, and integers of 8, 4 and 2 bits.

Of integers, each group of a row's elements has a scale of its own, in bf16. A group that holds NaN or Inf has
the scale NaN, and its codes say what stood where: 0 something finite, which arrives as 0; 1 NaN; 2 +Inf;
3 -Inf.
"""

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.codec.base import CodedMessage, Coder, Payload, flat_bytes, from_bytes
from isthmus.job.codec_steps import Integers, num_groups


class FloatCoder(Coder):
    """Elements as they are, or in one of the 16-bit types; what is finite stays finite."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:  # noqa: ARG002 others do
        """The matrix cast; finite values beyond the type's range become its largest."""
        cast_ND = x_ND.to(self._dtype)
        limit = torch.finfo(self._dtype).max
        if _may_exceed(x_ND, limit):
            is_lost_ND = cast_ND.isinf() & x_ND.isfinite()
            cast_ND = torch.where(is_lost_ND, cast_ND.clamp(-limit, limit), cast_ND)
        return (flat_bytes(cast_ND),)

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:  # noqa: ARG002 others do
        """The matrix; of float32, over the bytes of its part."""
        return from_bytes(next(parts), self._dtype).view(shape).to(torch.float32)


def _may_exceed(x_ND: Tensor, limit: float) -> bool:
    """Only the host can be asked without waiting for it; elsewhere the answer is yes."""
    if x_ND.numel() == 0 or limit >= torch.finfo(x_ND.dtype).max:
        return False
    return x_ND.device.type != "cpu" or not (float(x_ND.amax()) <= limit and float(x_ND.amin()) >= -limit)


class IntegerCoder(Coder):
    """Scales, then codes."""

    def __init__(self, integers: Integers) -> None:
        self._bits = integers.bits
        self._group = integers.group
        self._is_stochastic = integers.is_stochastic
        self._quantiser = LloydMax() if integers.bits == 2 else Uniform(integers.bits)
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
