"""How the elements that share a scale become integers: evenly spaced levels, or those best for a Gaussian."""

import math
from typing import Final, Protocol

import torch
from torch import Tensor

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
