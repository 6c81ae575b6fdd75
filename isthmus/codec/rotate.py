"""Rows rotated by Hadamard matrices with fixed random signs: one large element becomes many small ones."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from isthmus.codec.base import CodedMessage, Coder, Payload, Wrapping, flat_bytes, from_bytes

LARGEST_BLOCK: Final = 256
"""The most elements that are rotated together."""

_RIGHT_SIZE: Final = 32
"""A block is a matrix of rows of 32: H(256) = H(8) ⊗ H(32), two small products in place of a large one."""

_SIGNS_SEED: Final = 1893


class RotationCoder(Wrapping):
    """Blocks of each row are rotated; what is not finite spreads over its block."""

    def __init__(self, *, rest: Coder) -> None:
        super().__init__(rest=rest)
        self._signs = Signs()
        self._matrices: dict[int, Tensor] = {}

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The parts of the rotated matrix."""
        signs_D = self._signs.on(x_ND.device, x_ND.shape[1])
        return self._rest.encode(self._rotate(x_ND * signs_D), message)

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The matrix rotated back; the rotation is its own inverse, but for the signs."""
        y_ND = self._rest.decode(parts, shape, message)
        return self._rotate(y_ND).mul_(self._signs.on(y_ND.device, y_ND.shape[1]))

    def _rotate(self, x_ND: Tensor) -> Tensor:
        pieces = []
        start = 0
        for block, num_blocks in split_width(x_ND.shape[1]):
            piece = x_ND[:, start : start + num_blocks * block]
            pieces.append(self._rotate_blocks(piece, block))
            start += num_blocks * block
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _rotate_blocks(self, x_ND: Tensor, block: int) -> Tensor:
        right = min(block, _RIGHT_SIZE)
        turned = x_ND.reshape(-1, right) @ self._matrix(right, x_ND)
        if block > right:
            turned = self._matrix(block // right, x_ND) @ turned.view(-1, block // right, right)
        return turned.view(x_ND.shape)

    def _matrix(self, size: int, like: Tensor) -> Tensor:
        if size not in self._matrices:
            self._matrices[size] = hadamard(size).to(like.device)
        return self._matrices[size]


class Signs:
    """The fixed signs, kept on the device where they are wanted."""

    def __init__(self) -> None:
        self._signs = torch.empty(0)

    def on(self, device: torch.device, width: int) -> Tensor:
        """One for each column."""
        if self._signs.numel() < width:
            self._signs = fixed_signs(width).to(device)
        return self._signs[:width]


def split_width(width: int) -> list[tuple[int, int]]:
    """Blocks of a row as (size, how many): as many of 256 as fit, then smaller powers of two."""
    sizes = [LARGEST_BLOCK >> shift for shift in range(LARGEST_BLOCK.bit_length())]
    blocks = []
    for size in sizes:
        if width >= size:
            blocks.append((size, width // size))
            width %= size
    return blocks


def hadamard(size: int) -> Tensor:
    """The orthonormal, symmetric Hadamard matrix of a power of two."""
    matrix: Tensor = torch.ones(1, 1)
    for _ in range(size.bit_length() - 1):
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix.mul_(size**-0.5)


def fixed_signs(num_signs: int) -> Tensor:
    """The first of an endless row of +1 and -1, the same on every machine and for every version of torch."""
    words = np.random.PCG64(_SIGNS_SEED).random_raw(num_signs)
    return torch.from_numpy((words & 1).astype(np.float32)).mul_(2).sub_(1)


class CenterCoder(Wrapping):
    """The mean in bfloat16, then the parts of what is left."""

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """One part more than what is left has; a column that is not finite keeps what it has."""
        if len(x_ND) == 0:
            return (x_ND.new_empty(0, dtype=torch.uint8), *self._rest.encode(x_ND, message))
        mean_D = x_ND.mean(0).to(torch.bfloat16).nan_to_num(0.0, 0.0, 0.0)
        return (flat_bytes(mean_D), *self._rest.encode(x_ND - mean_D.to(torch.float32), message))

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The matrix with its mean back."""
        mean_D = from_bytes(next(parts), torch.bfloat16).to(torch.float32)
        y_ND = self._rest.decode(parts, shape, message)
        return y_ND + mean_D if len(y_ND) else y_ND
