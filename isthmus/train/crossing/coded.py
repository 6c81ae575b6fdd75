"""Rows of a tensor as bytes on the host, as they are or coded, and what a header says of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.wan.packet import Buffer

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_NUM_DIMENSIONS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """The parts of a payload, flat bytes in their order; `dtype` is that of the rows, `codec` its text."""

    codec: str
    dtype: torch.dtype
    num_rows: int
    parts: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        return sum(part.numel() for part in self.parts)

    def describe(self) -> list[object]:
        """What a header says of it."""
        return [self.codec, _NAMES[self.dtype], self.num_rows, len(self.parts)]

    def buffers(self) -> tuple[Buffer, ...]:
        """The bytes, without a copy."""
        return tuple(map(as_buffer, self.parts))


def read_coded(about: object, buffers: Sequence[Buffer]) -> tuple[Coded, Sequence[Buffer]]:
    """What a header describes, from the last of the buffers, and the buffers before it."""
    match about:
        case [str(codec), str(kind), int(num_rows), int(num_parts)] if kind in _DTYPES:
            first = len(buffers) - num_parts
            if num_rows >= 0 and 0 <= first <= len(buffers):
                parts = tuple(map(as_bytes, buffers[first:]))
                coded = Coded(codec=codec, dtype=_DTYPES[kind], num_rows=num_rows, parts=parts)
                return coded, buffers[:first]
    raise FrameError(f"nothing that crosses is described by {str(about)[:100]}")


def raw_rows(coded: Coded, *, width: int) -> Tensor:
    """The rows that crossed as they are; a view of the bytes."""
    if len(coded.parts) != 1 or coded.num_bytes != coded.num_rows * width * coded.dtype.itemsize:
        raise FrameError(
            f"{coded.num_rows} rows of {width} numbers do not come in {len(coded.parts)} parts "
            f"of {coded.num_bytes} bytes together"
        )
    return coded.parts[0].view(coded.dtype).view(coded.num_rows, width)


def describe_tensor(tensor: Tensor) -> list[object]:
    """What a header says of a tensor that crosses by itself."""
    return [_NAMES[tensor.dtype], list(tensor.shape)]


def read_tensor(about: object, buffer: Buffer) -> Tensor:
    """The tensor that a header describes, its size checked."""
    match about:
        case [str(kind), list(shape)] if kind in _DTYPES and len(shape) <= _MAX_NUM_DIMENSIONS:
            dtype = _DTYPES[kind]
        case _:
            raise FrameError(f"no tensor is described by {str(about)[:100]}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise FrameError(f"a tensor of shape {shape}")
    part = as_bytes(buffer)
    if math.prod(shape) * dtype.itemsize != part.numel():
        raise FrameError(f"a tensor of shape {shape} in {part.numel()} bytes")
    return part.view(dtype).view(shape)


def read_count(header: Mapping[str, object], key: str) -> int:
    """A number of a header that counts something."""
    value = header.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FrameError(f"a packet whose {key} is no count")
    return value


def as_bytes(buffer: Buffer) -> Tensor:
    """A view of a buffer as bytes."""
    if memoryview(buffer).nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def as_buffer(part: Tensor) -> Buffer:
    """A view of bytes on the host as a buffer."""
    if part.numel() == 0:
        return b""
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = part.numpy()
    return array.data
