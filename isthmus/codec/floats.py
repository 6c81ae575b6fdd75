"""Formats that keep every element as a floating-point number."""

from collections.abc import Iterator

import torch
from torch import Tensor

from isthmus.codec.base import CodedMessage, Payload, Stateless, flat_bytes, from_bytes


class Plain(Stateless):
    """Elements as they are."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:  # noqa: ARG002 others do
        """The bytes of the matrix, not copied where it is contiguous."""
        return (flat_bytes(x_ND.to(self._dtype)),)

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:  # noqa: ARG002 others do
        """The matrix, over the bytes of its part."""
        return from_bytes(next(parts), self._dtype).view(shape)


class HalfPrecision(Stateless):
    """Elements in one of the 16-bit types; what is finite stays finite."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:  # noqa: ARG002 others do
        """The matrix cast; finite values beyond the type's range become its largest."""
        half_ND = x_ND.to(self._dtype)
        limit = torch.finfo(self._dtype).max
        if _may_exceed(x_ND, limit):
            is_lost_ND = half_ND.isinf() & x_ND.isfinite()
            half_ND = torch.where(is_lost_ND, half_ND.clamp(-limit, limit), half_ND)
        return (flat_bytes(half_ND),)

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:  # noqa: ARG002 others do
        """The matrix in float32."""
        return from_bytes(next(parts), self._dtype).view(shape).to(torch.float32)


def _may_exceed(x_ND: Tensor, limit: float) -> bool:
    """Only the host can be asked without waiting for it; elsewhere the answer is yes."""
    if x_ND.device.type != "cpu":
        return True
    return x_ND.numel() > 0 and not (float(x_ND.amax()) <= limit and float(x_ND.amin()) >= -limit)
