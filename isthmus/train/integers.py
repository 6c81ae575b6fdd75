"""Named integer tensors as raw buffers and back, and rows of hidden states, both without padding."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.wan.packet import Buffer

IDS: Final = "ids"
LABELS: Final = "labels"
MASK: Final = "mask"
"""1 for a token, 0 for padding; other tensors of its shape cross without what they have at padding."""
_LENGTHS: Final = "lengths"
_TYPES: Final = ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<i8")
_MAX_ELEMENTS: Final = 2**24
_MAX_NUM_TENSORS: Final = 32


def pack_integers(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, object]], list[Buffer]]:
    """What a header says of integer tensors, and their bytes.

    Padding on the right crosses as lengths, and what equals the ids not at all.
    """
    mask = tensors.get(MASK)
    lengths = _right_padded_lengths(mask)
    valid = None if lengths is None or mask is None else mask.numpy().astype(bool)
    planes: dict[str, dict[str, object]] = {}
    buffers: list[Buffer] = []
    found = _LENGTHS if lengths is not None else MASK
    if mask is not None:
        planes[found], data = _lay_out(mask.numpy() if lengths is None else lengths, {})
        buffers.append(data)
    ids: NDArray[Any] | None = None
    for name in sorted(tensors, key=lambda name: name != IDS):
        if name == MASK:
            continue
        values = tensors[name].numpy()
        fill = _padding_value(values, valid)
        sent = values if fill is None or valid is None else values[valid]
        about: dict[str, object] = {"shape": list(values.shape), "fill": fill}
        if ids is not None and np.array_equal(sent, ids):
            planes[name] = about | {"like_ids": True}
            continue
        ids = sent if name == IDS else ids
        planes[name], data = _lay_out(sent, about)
        buffers.append(data)
    return planes, buffers


def unpack_integers(planes: object, buffers: Sequence[Buffer]) -> dict[str, Tensor]:
    """The tensors that `pack_integers` laid out, every field checked before memory is taken for it."""
    reader = _Reader(planes, buffers)
    found = {name: reader.read(name) for name in reader.names}
    mask = reader.mask()
    return found if mask is None else {**found, MASK: mask}


def narrow(values: NDArray[Any]) -> NDArray[Any]:
    """The same integers in the smallest type that holds them all."""
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for name in _TYPES:
        bounds = np.iinfo(name)
        if bounds.min <= least and most <= bounds.max:
            return values.astype(name)
    raise ValueError(f"integers from {least} to {most} do not fit into 64 bits")


def _lay_out(values: NDArray[Any], about: dict[str, object]) -> tuple[dict[str, object], Buffer]:
    """What a header says of numbers, and their bytes in the smallest type."""
    small = np.ascontiguousarray(narrow(values))
    # numpy has no view of bytes over an array without elements.
    data = small.tobytes() if small.size == 0 else small.reshape(-1).view(np.uint8).data
    return {"shape": list(values.shape), **about, "type": small.dtype.str}, data


class _Reader:
    """Reads planes from what a peer has sent."""

    def __init__(self, planes: object, buffers: Sequence[Buffer]) -> None:
        if not isinstance(planes, dict) or not all(isinstance(about, dict) for about in planes.values()):
            raise FrameError("a message whose header lists no integer tensors")
        if len(planes) > _MAX_NUM_TENSORS:
            raise FrameError(f"a message of {len(planes)} integer tensors is over the limit")
        self._planes: dict[str, dict[str, object]] = planes
        sent = [name for name, about in planes.items() if not about.get("like_ids")]
        if len(sent) != len(buffers):
            raise FrameError(f"a message of {len(sent)} integer tensors in {len(buffers)} buffers")
        if sum(math.prod(_shape(about)) for about in planes.values()) > _MAX_ELEMENTS:
            raise FrameError("a message with integer tensors that are over the limit together")
        self._buffers = dict(zip(sent, buffers, strict=True))
        self._valid = self._read_valid()

    @property
    def names(self) -> list[str]:
        """All but what only says where padding is."""
        return [name for name in self._planes if name not in (MASK, _LENGTHS)]

    def mask(self) -> Tensor | None:
        """1 for a token and 0 for padding, where there is any."""
        if self._valid is not None:
            return torch.from_numpy(self._valid.astype(np.int64))
        if MASK not in self._planes:
            return None
        mask = self.read(MASK)
        is_of_bits = torch.equal(mask, mask.bool().long())
        if not is_of_bits or list(mask.shape) != self._planes.get(IDS, {}).get("shape"):
            raise FrameError("a message whose mask does not say which of its ids are padding")
        return mask

    def read(self, name: str) -> Tensor:
        """A plane as a tensor, its padding put back."""
        about = self._planes[name]
        shape = _shape(about)
        values = self._values(IDS if about.get("like_ids") else name)
        match about.get("fill"):
            case None:
                whole = values
            case bool():
                raise FrameError(f"a message whose {name} is filled with no number")
            case int(fill):
                whole = self._filled(name, shape, values, fill)
            case _:
                raise FrameError(f"a message whose {name} is filled with no number")
        if whole.size != np.prod(shape):
            raise FrameError(f"a message whose {name} do not have the shape it says")
        return torch.from_numpy(whole.reshape(shape).astype(np.int64))

    def _filled(self, name: str, shape: tuple[int, ...], values: NDArray[Any], fill: int) -> NDArray[Any]:
        if self._valid is None or shape != self._valid.shape or len(values) != self._valid.sum():
            raise FrameError(f"a message whose {name} do not fit its lengths")
        if not -(2**63) <= fill < 2**63:
            raise FrameError(f"a message whose {name} are filled with a number over 64 bits")
        whole = np.full(shape, fill, dtype=np.int64)
        whole[self._valid] = values
        return whole

    def _values(self, name: str) -> NDArray[Any]:
        kind = self._planes[name].get("type") if name in self._buffers else None
        if kind not in _TYPES:
            raise FrameError(f"a message whose {name} are of no known type")
        view = memoryview(self._buffers[name])
        if view.nbytes % np.dtype(kind).itemsize:
            raise FrameError(f"a message whose {name} end within a number")
        return np.frombuffer(view, dtype=kind)

    def _read_valid(self) -> NDArray[np.bool_] | None:
        if _LENGTHS not in self._planes:
            return None
        lengths = self._values(_LENGTHS)
        num_rows, *rest = _shape(self._planes.get(IDS, {}))
        if len(rest) != 1 or len(lengths) != num_rows or (lengths < 0).any() or (lengths > rest[0]).any():
            raise FrameError("a message whose lengths do not fit its ids")
        valid: NDArray[np.bool_] = np.arange(rest[0]) < lengths.astype(np.int64)[:, None]
        return valid


def _shape(about: Mapping[str, object]) -> tuple[int, ...]:
    shape = about.get("shape")
    if not isinstance(shape, list) or not 1 <= len(shape) <= 2:
        raise FrameError("a message with a tensor of no known shape")
    if not all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in shape):
        raise FrameError("a message with a tensor of no known shape")
    return tuple(shape)


def _right_padded_lengths(mask: Tensor | None) -> NDArray[Any] | None:
    if mask is None:
        return None
    lengths = mask.sum(1)
    is_right_padded = torch.equal(mask, (torch.arange(mask.shape[1]) < lengths[:, None]).to(mask.dtype))
    return lengths.numpy() if is_right_padded else None


def _padding_value(values: NDArray[Any], valid: NDArray[np.bool_] | None) -> int | None:
    """The number at all padding, or None where there is no one such number."""
    if valid is None or values.shape != valid.shape or valid.all():
        return None
    padding = values[~valid]
    return int(padding[0]) if (padding == padding[0]).all() else None


def mask_of(ids_BT: Tensor, mask_BT: Tensor | None, *, keeps_padding: bool) -> Tensor:
    """1 for what counts as a token, 0 for padding; where that is kept, all counts."""
    return torch.ones_like(ids_BT) if mask_BT is None or keeps_padding else mask_BT


def valid_rows(mask_BT: Tensor | None, *, without: Collection[int] = ()) -> Tensor | None:
    """The numbers of the rows that cross, on the host; None where all do.

    Sequences in `without` do not cross; a mask is needed to leave them out.
    """
    if mask_BT is None or (not without and bool(mask_BT.all())):
        return None
    crosses = mask_BT.bool()
    if without:
        crosses = crosses.clone()
        crosses[list(without)] = False
    return crosses.flatten().nonzero().squeeze(1)


def target_ids(integers: Mapping[str, Tensor]) -> Tensor:
    """The token ids that a decoder is to say, below zero at padding."""
    labels = integers.get(LABELS)
    if labels is None or labels.ndim != 2:
        raise FrameError("a micro-batch without the target that its decoder is to say")
    return labels


def said_before(integers: Mapping[str, Tensor]) -> Tensor:
    """The token before each one of the target: what stands at a place knows nothing of the one to come."""
    return torch.nn.functional.pad(target_ids(integers)[:, :-1], (1, 0)).clamp(min=0)


def drop_padding(x_BTD: Tensor, index_N: Tensor | None) -> Tensor:
    """The rows that cross, of shape (rows, width); a view where all do."""
    rows = x_BTD.flatten(0, -2)
    return rows if index_N is None else rows[index_N.to(rows.device)]


def restore_padding(rows_ND: Tensor, index_N: Tensor | None, *, shape: tuple[int, ...]) -> Tensor:
    """The rows at their places among zeros; a view where all crossed."""
    num_rows = torch.Size(shape[:-1]).numel() if index_N is None else len(index_N)
    if tuple(rows_ND.shape) != (num_rows, shape[-1]):
        raise FrameError(f"what crossed has shape {tuple(rows_ND.shape)}, which does not fit {shape}")
    if index_N is None:
        return rows_ND.view(shape)
    whole = rows_ND.new_zeros(shape)
    whole.flatten(0, -2)[index_N.to(rows_ND.device)] = rows_ND
    return whole
