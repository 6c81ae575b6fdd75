"""Steps that make smaller or better-behaved matrices of a matrix: rotate, center, topk, svd, feedback."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from isthmus.codec.base import CodedMessage, Coder, Memory, Payload, WrappingCoder, flat_bytes, from_bytes
from isthmus.codec.formats import pack_bits, pack_indices, unpack_bits, unpack_indices
from isthmus.errors import FrameError, UserError
from isthmus.job.codec_steps import index_bits, index_bytes, is_bitmap, num_kept, svd_rank

LARGEST_BLOCK: Final = 256
"""The most elements that are rotated together."""

_RIGHT_SIZE: Final = 32
"""A block is a matrix of rows of 32: H(256) = H(8) ⊗ H(32), two small products in place of a large one."""

_SIGNS_SEED: Final = 1893
_SVD_ROUNDS: Final = 2
_SVD_ROUNDS_FROM_NOTHING: Final = 3


class RotationCoder(WrappingCoder):
    """Rotates blocks of each row by Hadamard matrices with fixed random signs.

    One large element becomes many small ones; what is not finite spreads over its block.
    """

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
        blocks = split_width(x_ND.shape[1])
        pieces = torch.split(x_ND, [size * num for size, num in blocks], dim=1)
        turned = [self._rotate_blocks(piece, size) for piece, (size, _) in zip(pieces, blocks, strict=True)]
        return turned[0] if len(turned) == 1 else torch.cat(turned, dim=1)

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
    """The fixed signs, kept on the device that uses them."""

    def __init__(self) -> None:
        self._signs = torch.empty(0)

    def on(self, device: torch.device, width: int) -> Tensor:
        """One for each column."""
        if self._signs.numel() < width:
            self._signs = fixed_signs(width).to(device)
        return self._signs[:width]


def split_width(width: int) -> list[tuple[int, int]]:
    """Blocks of a row as (size, how many): as many of 256 as fit, then smaller powers of two."""
    smaller = [2**bit for bit in reversed(range(LARGEST_BLOCK.bit_length() - 1)) if width & 2**bit]
    whole = [(LARGEST_BLOCK, width // LARGEST_BLOCK)] if width >= LARGEST_BLOCK else []
    return whole + [(size, 1) for size in smaller]


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


class CenterCoder(WrappingCoder):
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


class TopKCoder(WrappingCoder):
    """Indices of the largest elements of each row, then the elements; NaN and Inf count as the largest."""

    def __init__(self, ratio: float, *, memory: Memory, rest: Coder) -> None:
        super().__init__(rest=rest)
        self._ratio = ratio
        self._memory = memory

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The places of the elements kept, and the parts of the matrix of shape (rows, kept)."""
        width = x_ND.shape[1]
        kept = num_kept(self._ratio, width)
        index_NK = x_ND.abs().topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
        self._memory.keep(message, index_NK)
        places = flat_bytes(_pack_places(index_NK, width))
        return (places, *self._rest.encode(x_ND.gather(1, index_NK), message))

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The elements kept, at their places among zeros."""
        num_rows, width = shape
        kept = num_kept(self._ratio, width)
        index_NK = _unpack_places(next(parts), num_rows, kept, width)
        self._memory.keep(message, index_NK)
        return _scatter(self._rest.decode(parts, (num_rows, kept), message), index_NK, shape)


class FollowingCoder(WrappingCoder):
    """A gradient by what its activation has left at both ends, which so need not cross again.

    That is where elements were kept, as integers of shape (rows, kept), or a basis of shape (width, rank).
    """

    def __init__(self, *, memory: Memory, rest: Coder) -> None:
        super().__init__(rest=rest)
        self._memory = memory

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The parts of the elements at those places, or of the coordinates in that basis."""
        kept = self._find(message, len(x_ND))
        return self._rest.encode(x_ND @ kept if kept.is_floating_point() else x_ND.gather(1, kept), message)

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The elements among zeros, or the coordinates brought back."""
        kept = self._find(message, shape[0])
        narrow_NK = self._rest.decode(parts, (shape[0], kept.shape[1]), message)
        return narrow_NK @ kept.T if kept.is_floating_point() else _scatter(narrow_NK, kept, shape)

    def _find(self, message: CodedMessage, num_rows: int) -> Tensor:
        kept = self._memory.find(message)
        if not kept.is_floating_point() and len(kept) != num_rows:
            raise FrameError(f"a gradient of {num_rows} rows of an activation of {len(kept)}")
        return kept


def _scatter(values_NK: Tensor, index_NK: Tensor, shape: tuple[int, int]) -> Tensor:
    return values_NK.new_zeros(shape).scatter_(1, index_NK, values_NK)


def _pack_places(index_NK: Tensor, width: int) -> Tensor:
    num_rows, kept = index_NK.shape
    if not is_bitmap(kept, width):
        return pack_indices(index_NK, index_bits(width))
    is_kept_ND = torch.zeros(num_rows, width, dtype=torch.bool, device=index_NK.device)
    return pack_bits(is_kept_ND.scatter_(1, index_NK, True))


def _unpack_places(part: Tensor, num_rows: int, kept: int, width: int) -> Tensor:
    """Indices within the row, whatever the bytes."""
    packed = part.view(num_rows, index_bytes(kept, width))
    if not is_bitmap(kept, width):
        return unpack_indices(packed, index_bits(width), num_indices=kept).clamp_(max=width - 1)
    is_kept_ND = unpack_bits(packed, width).to(torch.int64)
    # The nth bit set goes to column n; bits that are not set, or are too many, to a column that is cut off.
    column_ND = torch.where(is_kept_ND == 1, is_kept_ND.cumsum(dim=1) - 1, kept).clamp_(max=kept)
    index_NK = torch.zeros(num_rows, kept + 1, dtype=torch.int64, device=part.device)
    places_ND = torch.arange(width, device=part.device).expand(num_rows, width)
    return index_NK.scatter_(1, column_ND, places_ND)[:, :kept]


class SvdCoder(WrappingCoder):
    """Left factor Q (orthonormal), then right factor XᵀQ, each with a row per direction.

    They are found by subspace iteration. A matrix that two factors would not make smaller crosses whole. Only
    the sender has state: the directions of its last message, from which the next one starts. One element that
    is not finite makes all of them NaN.
    """

    state_names = ("basis",)

    def __init__(self, ratio: float, *, rest: Coder) -> None:
        super().__init__(rest=rest)
        self._ratio = ratio

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The parts of the left factor, and those of the right one."""
        rank = svd_rank(self._ratio, *x_ND.shape)
        if rank is None:
            return self._rest.encode(x_ND, message)
        left_NK, right_DK = self._factors(x_ND, rank, message)
        left = self._rest.encode(left_NK.T.contiguous(), message)
        return (*left, *self._rest.encode(right_DK.T.contiguous(), message.sub(1)))

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The product of the factors."""
        num_rows, width = shape
        rank = svd_rank(self._ratio, num_rows, width)
        if rank is None:
            return self._rest.decode(parts, shape, message)
        left_KN = self._rest.decode(parts, (rank, num_rows), message)
        right_KD = self._rest.decode(parts, (rank, width), message.sub(1))
        return left_KN.T @ right_KD

    def _factors(self, x_ND: Tensor, rank: int, message: CodedMessage) -> tuple[Tensor, Tensor]:
        start_DK = self._start(x_ND, rank, message)
        num_rounds = _SVD_ROUNDS if self._state else _SVD_ROUNDS_FROM_NOTHING
        basis_DK = start_DK
        for _ in range(num_rounds - 1):
            basis_DK = _orthonormal(x_ND.T @ (x_ND @ basis_DK))
        left_NK = _orthonormal(x_ND @ basis_DK)
        right_DK = x_ND.T @ left_NK
        if message.learns:
            # What is not finite must not reach the messages after it.
            is_finite = right_DK.isfinite().all()
            self._state["basis"] = torch.where(is_finite, _orthonormal(right_DK), start_DK)
        return left_NK, right_DK

    def _start(self, x_ND: Tensor, rank: int, message: CodedMessage) -> Tensor:
        """The first directions of the last message, and random ones where it had fewer."""
        generator = message.generator(x_ND.device)
        start_DK = torch.randn(x_ND.shape[1], rank, generator=generator, device=x_ND.device)
        for last_DK in self._state.values():
            start_DK[:, : last_DK.shape[1]] = last_DK[:, :rank].to(x_ND.device)
        return start_DK


def _orthonormal(y_NK: Tensor) -> Tensor:
    factor: Tensor = torch.linalg.qr(y_NK).Q
    return factor


class FeedbackCoder(WrappingCoder):
    """Adds what one message lost to the next, so that nothing is lost for good.

    All training messages have one shape.
    """

    state_names = ("residual",)

    def __init__(self, decay: float, *, rest: Coder) -> None:
        super().__init__(rest=rest)
        self._decay = decay

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The rows with what the message before has lost; in evaluation as they are."""
        if not message.learns:
            return self._rest.encode(x_ND, message)
        whole_ND = x_ND.float() + self._owed(x_ND)
        payload = self._rest.encode(whole_ND, message)
        lost_ND = whole_ND - self._rest.decode(iter(payload), (x_ND.shape[0], x_ND.shape[1]), message)
        # What is not finite has crossed as such; to add it again would spoil every later message.
        self._state["residual"] = torch.where(lost_ND.isfinite(), lost_ND, 0)
        return payload

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The rows as the coders behind decode them."""
        return self._rest.decode(parts, shape, message)

    def _owed(self, x_ND: Tensor) -> Tensor:
        residual_ND = self._state.get("residual")
        if residual_ND is None:
            return x_ND.new_zeros((), dtype=torch.float32)
        if residual_ND.shape != x_ND.shape:
            raise UserError(
                f"feedback needs messages of one shape: this one has {len(x_ND)} rows, the one before had "
                f"{len(residual_ND)}",
                hint="leave feedback out of the link's codec, or make all micro-batches equally long",
            )
        return self._decay * residual_ND.to(x_ND.device)
