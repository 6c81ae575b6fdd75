"""Rotation and integers by one kernel each way; the bytes are those of the coders it stands in for."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from isthmus.codec.base import Coder, Message, Payload, Stateless, flat_bytes, from_bytes
from isthmus.codec.kernels import BLOCK, decode_kernel, encode_kernel
from isthmus.codec.rotation import Signs

_PROGRAM_ELEMENTS: Final = 1024
_NUM_WARPS: Final = 1
"""A program is small enough that one warp holds it in registers, and never waits for another."""


class FusedIntegerCoder(Stateless):
    """Codes of 8 or 4 bits in groups that divide a block; widths not made of whole blocks go to `plain`."""

    def __init__(self, *, bits: int, group: int, rotates: bool, is_stochastic: bool, plain: Coder) -> None:
        self._bits = bits
        self._group = group
        self._program_rows = _PROGRAM_ELEMENTS // (BLOCK * 8 // bits)
        self._signs = Signs() if rotates else None
        self._is_stochastic = is_stochastic
        self._plain = plain

    def encode(self, x_ND: Tensor, message: Message) -> Payload:
        """Two parts: the scales of all groups, row by row, and the packed codes."""
        num_rows, width = x_ND.shape
        if not self._is_whole(width):
            return self._plain.encode(x_ND, message)
        scales = x_ND.new_empty(num_rows * width // self._group, dtype=torch.int16)
        codes = x_ND.new_empty(num_rows * width * self._bits // 8, dtype=torch.int8)
        seed = message.seed if self._is_stochastic else None
        with torch.accelerator.device_index(x_ND.device.index):
            encode_kernel[self._grid(num_rows, width)](
                x_ND.contiguous(), self._signs_of(x_ND.device, width), scales, codes, num_rows, width, seed,
                BITS=self._bits, GROUP=self._group, R=self._program_rows, num_warps=_NUM_WARPS,
            )  # fmt: skip
        return (flat_bytes(scales), flat_bytes(codes))

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: Message) -> Tensor:
        """The matrix, within float32's rounding of what the coders it stands in for make of the parts."""
        num_rows, width = shape
        if not self._is_whole(width):
            return self._plain.decode(parts, shape, message)
        scales, codes = from_bytes(next(parts), torch.int16), next(parts).view(torch.int8)
        x_ND = codes.new_empty(shape, dtype=torch.float32)
        with torch.accelerator.device_index(x_ND.device.index):
            decode_kernel[self._grid(num_rows, width)](
                scales, codes, self._signs_of(x_ND.device, width), x_ND, num_rows, width,
                BITS=self._bits, GROUP=self._group, R=self._program_rows, num_warps=_NUM_WARPS,
            )  # fmt: skip
        return x_ND

    def _is_whole(self, width: int) -> bool:
        """Elements that share a byte lie in different blocks."""
        return width % (BLOCK * 8 // self._bits) == 0

    def _grid(self, num_rows: int, width: int) -> tuple[int, int]:
        return -(-num_rows // self._program_rows), width * self._bits // 8 // BLOCK

    def _signs_of(self, device: torch.device, width: int) -> Tensor | None:
        return None if self._signs is None else self._signs.on(device, width)
