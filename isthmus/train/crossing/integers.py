"""A micro-batch's integers as raw buffers and back: the smallest types, and no padding, without loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.model.boundary import Batch
from isthmus.wan.packet import Buffer

_PLANES: Final = ("ids", "position_ids", "token_type_ids", "labels")
_TYPES: Final = ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<i8")
_MAX_ELEMENTS: Final = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A micro-batch laid out for a packet: a part of its header, and some of its buffers."""

    header: dict[str, object]
    buffers: tuple[Buffer, ...]


def pack_batch(batch: Batch) -> Packed:
    """Lay a micro-batch out; padding on the right crosses as lengths, and labels equal to ids not at all."""
    lengths = _right_padded_lengths(batch.mask)
    valid = None if lengths is None or batch.mask is None else batch.mask.numpy().astype(bool)
    packer = _Packer(valid=valid)
    if lengths is not None:
        packer.add("lengths", lengths)
    elif batch.mask is not None:
        packer.add("mask", batch.mask.numpy())
    for name in _PLANES:
        plane: Tensor | None = getattr(batch, name)
        if plane is not None:
            packer.add_plane(name, plane.numpy())
    header = {"num_targets": batch.num_targets, "planes": packer.planes}
    return Packed(header=header, buffers=tuple(packer.buffers))


def unpack_batch(header: Mapping[str, object], buffers: Sequence[Buffer]) -> Batch:
    """The micro-batch that `pack_batch` laid out, every field checked before memory is taken for it."""
    reader = _Reader(header.get("planes"), buffers)
    num_targets = header.get("num_targets")
    ids = reader.read("ids")
    if ids is None or ids.ndim != 2 or not isinstance(num_targets, int) or num_targets < 0:
        raise FrameError("a micro-batch without ids or number of targets")
    return Batch(
        ids=ids,
        num_targets=num_targets,
        mask=reader.mask(),
        position_ids=reader.read("position_ids"),
        token_type_ids=reader.read("token_type_ids"),
        labels=reader.read("labels"),
    )


def narrow(values: NDArray[Any]) -> NDArray[Any]:
    """The same integers in the smallest type that holds them all."""
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for name in _TYPES:
        bounds = np.iinfo(name)
        if bounds.min <= least and most <= bounds.max:
            return values.astype(name)
    raise ValueError(f"integers from {least} to {most} do not fit into 64 bits")


class _Packer:
    """Collects planes: what the header says of each, and the bytes that it needs."""

    def __init__(self, *, valid: NDArray[np.bool_] | None) -> None:
        self.planes: dict[str, dict[str, object]] = {}
        self.buffers: list[Buffer] = []
        self._valid = valid
        self._ids: NDArray[Any] | None = None

    def add_plane(self, name: str, values: NDArray[Any]) -> None:
        """Add numbers that belong to tokens, without those at padding where they are all the same."""
        fill = _padding_value(values, self._valid)
        sent = values if fill is None or self._valid is None else values[self._valid]
        about: dict[str, object] = {"shape": list(values.shape), "fill": fill}
        if name == "ids":
            self._ids = sent
        elif self._ids is not None and np.array_equal(sent, self._ids):
            self.planes[name] = about | {"like_ids": True}
            return
        self.add(name, sent, about)

    def add(self, name: str, values: NDArray[Any], about: Mapping[str, object] | None = None) -> None:
        """Add numbers as they are."""
        small = np.ascontiguousarray(narrow(values))
        self.planes[name] = {"shape": list(values.shape), **(about or {}), "type": small.dtype.str}
        # numpy has no view of bytes over an array without elements.
        self.buffers.append(small.tobytes() if small.size == 0 else small.reshape(-1).view(np.uint8).data)


class _Reader:
    """Reads planes from what a peer has sent."""

    def __init__(self, planes: object, buffers: Sequence[Buffer]) -> None:
        if not isinstance(planes, dict) or not all(isinstance(about, dict) for about in planes.values()):
            raise FrameError("a micro-batch whose header lists no planes")
        self._planes: dict[str, dict[str, object]] = planes
        sent = [name for name, about in planes.items() if not about.get("like_ids")]
        if len(sent) != len(buffers):
            raise FrameError(f"a micro-batch of {len(sent)} planes in {len(buffers)} buffers")
        self._buffers = dict(zip(sent, buffers, strict=True))
        self._valid = self._read_valid()

    def mask(self) -> Tensor | None:
        """1 for a token and 0 for padding, where there is any."""
        return self.read("mask") if self._valid is None else torch.from_numpy(self._valid.astype(np.int64))

    def read(self, name: str) -> Tensor | None:
        """A plane as a tensor, its padding put back; None where there is none."""
        if name not in self._planes:
            return None
        about = self._planes[name]
        shape = _shape(about)
        values = self._values("ids" if about.get("like_ids") else name)
        match about.get("fill"):
            case None:
                whole = values
            case bool():
                raise FrameError(f"a micro-batch whose {name} are filled with no number")
            case int(fill):
                whole = self._filled(name, shape, values, fill)
            case _:
                raise FrameError(f"a micro-batch whose {name} are filled with no number")
        if whole.size != np.prod(shape):
            raise FrameError(f"a micro-batch whose {name} do not have the shape it says")
        return torch.from_numpy(whole.reshape(shape).astype(np.int64))

    def _filled(self, name: str, shape: tuple[int, ...], values: NDArray[Any], fill: int) -> NDArray[Any]:
        if self._valid is None or shape != self._valid.shape or len(values) != self._valid.sum():
            raise FrameError(f"a micro-batch whose {name} do not fit its lengths")
        if not -(2**63) <= fill < 2**63:
            raise FrameError(f"a micro-batch whose {name} are filled with a number over 64 bits")
        whole = np.full(shape, fill, dtype=np.int64)
        whole[self._valid] = values
        return whole

    def _values(self, name: str) -> NDArray[Any]:
        kind = self._planes[name].get("type") if name in self._buffers else None
        if kind not in _TYPES:
            raise FrameError(f"a micro-batch whose {name} are of no known type")
        view = memoryview(self._buffers[name])
        if view.nbytes % np.dtype(kind).itemsize:
            raise FrameError(f"a micro-batch whose {name} end within a number")
        return np.frombuffer(view, dtype=kind)

    def _read_valid(self) -> NDArray[np.bool_] | None:
        if "lengths" not in self._planes:
            return None
        lengths = self._values("lengths")
        num_rows, *rest = _shape(self._planes.get("ids", {}))
        if len(rest) != 1 or len(lengths) != num_rows or (lengths < 0).any() or (lengths > rest[0]).any():
            raise FrameError("a micro-batch whose lengths do not fit its ids")
        valid: NDArray[np.bool_] = np.arange(rest[0]) < lengths.astype(np.int64)[:, None]
        return valid


def _shape(about: Mapping[str, object]) -> tuple[int, ...]:
    shape = about.get("shape")
    if not isinstance(shape, list) or not 1 <= len(shape) <= 2:
        raise FrameError("a micro-batch with a plane of no known shape")
    num_elements = 1
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= _MAX_ELEMENTS:
            raise FrameError("a micro-batch with a plane of no known shape")
        num_elements *= size
    if num_elements > _MAX_ELEMENTS:
        raise FrameError(f"a micro-batch with a plane of {num_elements} numbers is over the limit")
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
