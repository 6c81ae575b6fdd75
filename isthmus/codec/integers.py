"""Formats of 8, 4 and 2 bits: each group of a row's elements has a scale of its own, in bf16.

A group that holds NaN or Inf has the scale NaN, and its codes say what stood where: 0 something finite, which
arrives as 0; 1 NaN; 2 +Inf; 3 -Inf.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from isthmus.codec.base import Message, Payload, Stateless, flat_bytes, from_bytes
from isthmus.codec.packing import pack_codes, unpack_codes
from isthmus.codec.quantisers import quantiser
from isthmus.job.codec_sizes import num_groups
from isthmus.job.codec_steps import Integers


class IntegerCoder(Stateless):
    """Scales, then codes."""

    def __init__(self, integers: Integers) -> None:
        self._bits = integers.bits
        self._group = integers.group
        self._is_stochastic = integers.is_stochastic
        self._quantiser = quantiser(integers.bits)
        self._scale_dtype = torch.float32 if self._group is None else torch.bfloat16

    def encode(self, x_ND: Tensor, message: Message) -> Payload:
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

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: Message) -> Tensor:  # noqa: ARG002 others do
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

    def _codes(self, groups: list[Tensor], scale_NG: Tensor, message: Message) -> Tensor:
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
