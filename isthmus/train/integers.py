"""Named integer tensors as raw buffers and back, and rows of hidden states, both without padding."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.wan.packet import Buffer

IDS: Final = "ids"
LABELS: Final = "labels"
MASK: Final = "mask"
"""1 for a token, 0 for padding on the right; other tensors cross without what they have there."""
_LENGTHS: Final = "lengths"
_MAX_ELEMENTS: Final = 2**24
_MAX_NUM_TENSORS: Final = 32

_Array = NDArray[Any]
_Type = Literal["|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<i8"]
_Size = Annotated[int, Field(ge=0, le=_MAX_ELEMENTS)]


class _Plane(BaseModel):
    """What a header says of a tensor; a peer has written it, so that every field is checked."""

    model_config = ConfigDict(strict=True, frozen=True)

    shape: Annotated[list[_Size], Field(min_length=1, max_length=2)]
    fill: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """The number at padding, which does not cross; None where the whole tensor does."""
    like_ids: bool = False
    """Whether what crosses equals that of the ids, so that it has no buffer."""
    type: _Type = "|u1"


_Planes: Final = TypeAdapter(Annotated[dict[str, _Plane], Field(max_length=_MAX_NUM_TENSORS)])


def pack_integers(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, object]], list[Buffer]]:
    """What a header says of integer tensors, and their bytes.

    Padding crosses as the lengths of the sequences, and what equals the ids not at all.
    """
    planes: dict[str, dict[str, object]] = {}
    buffers: list[Buffer] = []

    def lay_out(name: str, values: _Array, **about: object) -> None:
        small = np.ascontiguousarray(narrow(values))
        planes[name] = {"shape": list(values.shape), **about, "type": small.dtype.str}
        # numpy has no view of bytes over an array without elements.
        buffers.append(small.reshape(-1).view(np.uint8).data if small.size else b"")

    valid: NDArray[np.bool_] | None = None
    if MASK in tensors:
        valid = tensors[MASK].numpy().astype(bool)
        lengths = valid.sum(1)
        if not np.array_equal(valid, _valid(lengths, valid.shape[1])):
            raise ValueError("a mask of other padding than that on the right")
        lay_out(_LENGTHS, lengths)
    ids: _Array | None = None
    for name in sorted(tensors.keys() - {MASK}, key=lambda name: (name != IDS, name)):
        values = tensors[name].numpy()
        fill = _padding_value(values, valid)
        sent = values if fill is None or valid is None else values[valid]
        if ids is not None and np.array_equal(sent, ids):
            planes[name] = {"shape": list(values.shape), "fill": fill, "like_ids": True}
            continue
        ids = sent if name == IDS else ids
        lay_out(name, sent, shape=list(values.shape), fill=fill)
    return planes, buffers


def unpack_integers(planes: object, buffers: Sequence[Buffer]) -> dict[str, Tensor]:
    """The tensors that `pack_integers` laid out, every field checked before memory is taken for it."""
    try:
        every = _Planes.validate_python(planes)
    except ValidationError as error:
        raise FrameError(
            f"a message whose header lists no integer tensors: {error.errors()[0]['msg']}"
        ) from None
    sent = [name for name, one in every.items() if not one.like_ids]
    if len(sent) != len(buffers):
        raise FrameError(f"a message of {len(sent)} integer tensors in {len(buffers)} buffers")
    if sum(math.prod(one.shape) for one in every.values()) > _MAX_ELEMENTS:
        raise FrameError("a message with integer tensors that are over the limit together")
    arrays = {name: _read(name, every[name], one) for name, one in zip(sent, buffers, strict=True)}
    lengths, valid = arrays.get(_LENGTHS), None
    if lengths is not None:
        num_rows, *rest = every[IDS].shape if IDS in every else [0]
        if len(rest) != 1 or len(lengths) != num_rows or (lengths < 0).any() or (lengths > rest[0]).any():
            raise FrameError("a message whose lengths do not fit its ids")
        valid = _valid(lengths, rest[0])
    found = {
        name: _whole(name, one, arrays.get(IDS if one.like_ids else name), valid)
        for name, one in every.items()
        if name != _LENGTHS
    }
    if MASK in found:
        raise FrameError("a message with a mask, where the lengths say what is padding")
    return found if valid is None else {**found, MASK: torch.from_numpy(valid.astype(np.int64))}


def narrow(values: _Array) -> _Array:
    """The same integers in the smallest type that holds them all."""
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for name in get_args(_Type):
        bounds = np.iinfo(name)
        if bounds.min <= least and most <= bounds.max:
            return values.astype(name)
    raise ValueError(f"integers from {least} to {most} do not fit into 64 bits")


def _read(name: str, about: _Plane, buffer: Buffer) -> _Array:
    try:
        return np.frombuffer(memoryview(buffer), dtype=about.type)
    except ValueError as error:
        raise FrameError(f"a message whose {name} end within a number") from error


def _whole(name: str, about: _Plane, values: _Array | None, valid: NDArray[np.bool_] | None) -> Tensor:
    """A tensor with its padding put back."""
    shape = tuple(about.shape)
    is_padded = about.fill is not None
    num_due = math.prod(shape) if valid is None or not is_padded else int(valid.sum())
    if values is None or values.size != num_due or (is_padded and (valid is None or valid.shape != shape)):
        raise FrameError(f"a message whose {name} do not have the shape it says")
    if about.fill is None or valid is None:
        return torch.from_numpy(values.reshape(shape).astype(np.int64))
    whole = np.full(shape, about.fill, dtype=np.int64)
    whole[valid] = values
    return torch.from_numpy(whole)


def _valid(lengths: _Array, num_tokens: int) -> NDArray[np.bool_]:
    valid: NDArray[np.bool_] = np.arange(num_tokens) < lengths.astype(np.int64)[:, None]
    return valid


def _padding_value(values: _Array, valid: NDArray[np.bool_] | None) -> int | None:
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
