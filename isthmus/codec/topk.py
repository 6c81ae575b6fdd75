"""The largest elements of each row, and where they stood."""

from collections.abc import Iterator

import torch
from torch import Tensor

from isthmus.codec.base import CodedMessage, Coder, Memory, Payload, Wrapping, flat_bytes
from isthmus.codec.integers import pack_bits, pack_indices, unpack_bits, unpack_indices
from isthmus.errors import FrameError
from isthmus.job.codec_steps import index_bits, index_bytes, is_bitmap, num_kept


class TopKCoder(Wrapping):
    """Indices, then what becomes of the elements kept; NaN and Inf count as the largest of all."""

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
        return _spread(self._rest.decode(parts, (num_rows, kept), message), index_NK, shape)


class SameIndicesCoder(Wrapping):
    """A gradient's elements where those of its activation were kept: their places need not cross again."""

    def __init__(self, *, memory: Memory, rest: Coder) -> None:
        super().__init__(rest=rest)
        self._memory = memory

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The parts of the matrix of shape (rows, kept)."""
        return self._rest.encode(x_ND.gather(1, self._index(message, x_ND.shape[0])), message)

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The elements at the places of the activation's, among zeros."""
        index_NK = self._index(message, shape[0])
        return _spread(self._rest.decode(parts, (shape[0], index_NK.shape[1]), message), index_NK, shape)

    def _index(self, message: CodedMessage, num_rows: int) -> Tensor:
        index_NK = self._memory.find(message)
        if index_NK.shape[0] != num_rows:
            raise FrameError(f"a gradient of {num_rows} rows of an activation of {index_NK.shape[0]}")
        return index_NK


def _spread(values_NK: Tensor, index_NK: Tensor, shape: tuple[int, int]) -> Tensor:
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
