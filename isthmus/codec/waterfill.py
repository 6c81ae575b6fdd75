"""Bits where the variance is: reverse water-filling, and integers whose width differs by column.

Columns are whitened: divided by their standard deviation, which both ends know with the basis. A row then
needs one scale, a byte that counts quarters of an octave. No bits are spent on a column that matters little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

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
