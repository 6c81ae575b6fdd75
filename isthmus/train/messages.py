"""What stages tell each other, as packets: micro-batches, gradients, and the words at the end of a step.

    forward, evaluation   down   the integers of a micro-batch, and what crosses the cut      NORMAL
    backward              up     the gradient of what crossed                                 NORMAL
    tally                 up     loss, norms and times of a step, from this stage on          URGENT
    verdict               down   the norm over all stages, windows, whether to save           URGENT
    evaluated             up     loss of an evaluation                                        URGENT

Tensors cross as their bytes, without the rows of padding. Numbers that may not be finite travel as float64,
since JSON has no word for them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.model.boundary import Batch
from isthmus.plan.types import Arrived, Pass, Send
from isthmus.plan.window import Hop
from isthmus.train.integers import pack_batch, unpack_batch
from isthmus.wan.packet import Buffer, Packet

TALLY: Final = "tally"
VERDICT: Final = "verdict"
EVALUATED: Final = "evaluated"

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_NUM_DIMENSIONS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A micro-batch between stages: integers on the host, what crosses on the device.

    `num_step_targets` are the targets of the whole step.
    """

    batch: Batch
    num_step_targets: int
    crossing: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a step gave in this stage and all behind it; times are in seconds, per stage from this one on."""

    step: int
    loss_sum: float
    squared_norms: tuple[float, ...]
    busy_s: tuple[float, ...]
    hops: tuple[Hop, ...]
    travel_s: float
    """The shortest way of an activation to this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the first stage concludes from the tallies of all."""

    step: int
    norm: float
    windows: tuple[int, ...]
    save: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The evaluation of the weights that a step starts from."""

    step: int
    loss_sum: float
    num_correct: int
    num_targets: int

    @property
    def loss(self) -> float:
        """Per target."""
        return self.loss_sum / max(self.num_targets, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of what crossed; with a mask, the rows of padding stay behind."""

    values: Tensor
    mask: Tensor | None


def pack_microbatch(
    microbatch: Microbatch, *, about: Send, sent_s: float, keeps_padding: bool = False
) -> Packet:
    """The integers of a micro-batch, and what crosses the cut, both on the host."""
    if microbatch.crossing is None:
        raise ValueError("a micro-batch leaves a stage with what crosses the cut")
    packed = pack_batch(microbatch.batch)
    mask = None if keeps_padding else microbatch.batch.mask
    crossing = drop_padding(microbatch.crossing, mask)
    header = {
        **_address(about, sent_s),
        **packed.header,
        "num_step_targets": microbatch.num_step_targets,
        "crossing": _describe(crossing),
    }
    return Packet(header, (*packed.buffers, _bytes_of(crossing)))


def unpack_microbatch(packet: Packet, *, width: int) -> Microbatch:
    """A micro-batch whose crossing fits its ids, of shape (batch, tokens, width)."""
    batch = unpack_batch(packet.header, packet.buffers[:-1])
    rows = _tensor(packet.header.get("crossing"), packet.buffers[-1:])
    return Microbatch(
        batch=batch,
        num_step_targets=_count(packet.header, "num_step_targets"),
        crossing=restore_padding(rows, batch.mask, shape=(*batch.ids.shape, width)),
    )


def pack_gradient(gradient: Gradient, *, about: Send, sent_s: float) -> Packet:
    """The gradient of what crossed, on the host."""
    rows = drop_padding(gradient.values, gradient.mask)
    return Packet({**_address(about, sent_s), "crossing": _describe(rows)}, (_bytes_of(rows),))


def unpack_gradient(packet: Packet) -> Tensor:
    """A gradient without its padding; whoever sent the activation knows where that is."""
    return _tensor(packet.header.get("crossing"), packet.buffers)


def drop_padding(x_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:  # noqa: N803
    """Only the rows of tokens, of shape (tokens of all, width), if anything is padded."""
    return x_BTD if mask_BT is None else x_BTD[mask_BT.bool()]


def restore_padding(rows: Tensor, mask_BT: Tensor | None, *, shape: tuple[int, ...]) -> Tensor:  # noqa: N803
    """The rows at their places among zeros, unless the padding has crossed too."""
    if tuple(rows.shape) == shape:
        return rows
    if mask_BT is None or tuple(rows.shape) != (int(mask_BT.sum()), shape[-1]):
        raise FrameError(f"what crossed has shape {tuple(rows.shape)}, which does not fit {shape}")
    whole = rows.new_zeros(shape)
    whole[mask_BT.bool()] = rows
    return whole


def read_address(packet: Packet, kind: Pass) -> Arrived:
    """What has arrived, as the scheduler is told."""
    header = packet.header
    return Arrived(kind=kind, step=_count(header, "step"), microbatch=_count(header, "microbatch"))


def read_sent_s(packet: Packet) -> float:
    """When it was sent, by the sender's clock."""
    sent_s = packet.header.get("sent_s")
    if not isinstance(sent_s, float):
        raise FrameError("a packet that does not say when it was sent")
    return sent_s


def pack_tally(tally: Tally) -> Packet:
    """A tally as a packet."""
    hops = [value for hop in tally.hops for value in (hop.forward_s, hop.backward_s, hop.latency_s)]
    rows: Sequence[Sequence[float]] = (
        (tally.loss_sum, tally.travel_s),
        tally.squared_norms,
        tally.busy_s,
        hops,
    )
    return Packet({"step": tally.step}, [np.asarray(row, dtype=np.float64).data for row in rows])


def unpack_tally(packet: Packet) -> Tally:
    """A tally from a packet."""
    ends, norms, busy_s, hops = _rows(packet, 4)
    if len(ends) != 2 or len(hops) % 3:
        raise FrameError("a tally of the wrong size")
    return Tally(
        step=_count(packet.header, "step"),
        loss_sum=ends[0],
        travel_s=ends[1],
        squared_norms=norms,
        busy_s=busy_s,
        hops=tuple(
            Hop(forward_s=forward_s, backward_s=backward_s, latency_s=latency_s)
            for forward_s, backward_s, latency_s in zip(hops[::3], hops[1::3], hops[2::3], strict=True)
        ),
    )


def pack_verdict(verdict: Verdict) -> Packet:
    """A verdict as a packet."""
    header = {"step": verdict.step, "windows": list(verdict.windows), "save": verdict.save}
    return Packet(header, [np.asarray([verdict.norm], dtype=np.float64).data])


def unpack_verdict(packet: Packet) -> Verdict:
    """A verdict from a packet."""
    norm = _number(packet)
    windows = packet.header.get("windows")
    if not isinstance(windows, list) or not all(isinstance(one, int) and one >= 1 for one in windows):
        raise FrameError("a verdict without windows")
    save = packet.header.get("save") is True
    return Verdict(step=_count(packet.header, "step"), norm=norm, windows=tuple(windows), save=save)


def pack_evaluated(found: Evaluated) -> Packet:
    """The result of an evaluation as a packet."""
    header = {"step": found.step, "num_correct": found.num_correct, "num_targets": found.num_targets}
    return Packet(header, [np.asarray([found.loss_sum], dtype=np.float64).data])


def unpack_evaluated(packet: Packet) -> Evaluated:
    """The result of an evaluation from a packet."""
    loss_sum = _number(packet)
    step, num_correct, num_targets = (
        _count(packet.header, key) for key in ("step", "num_correct", "num_targets")
    )
    return Evaluated(step=step, loss_sum=loss_sum, num_correct=num_correct, num_targets=num_targets)


def _address(about: Send, sent_s: float) -> dict[str, object]:
    return {"step": about.step, "microbatch": about.microbatch, "sent_s": sent_s}


def _describe(tensor: Tensor) -> list[object]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _tensor(about: object, buffers: Sequence[Buffer]) -> Tensor:
    match about:
        case [str(kind), list(shape)] if kind in _DTYPES and len(shape) <= _MAX_NUM_DIMENSIONS:
            dtype = _DTYPES[kind]
        case _:
            raise FrameError(f"no tensor is described by {str(about)[:100]}")
    if len(buffers) != 1 or not all(type(size) is int and size > 0 for size in shape):
        raise FrameError(f"a tensor of shape {shape} in {len(buffers)} buffers")
    if math.prod(shape) * dtype.itemsize != memoryview(buffers[0]).nbytes:
        raise FrameError(f"a tensor of shape {shape} in {memoryview(buffers[0]).nbytes} bytes")
    return torch.frombuffer(buffers[0], dtype=dtype).view(shape)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = flat.numpy()
    return array.data


def _count(header: Mapping[str, object], key: str) -> int:
    value = header.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FrameError(f"a packet whose {key} is no count")
    return value


def _number(packet: Packet) -> float:
    (row,) = _rows(packet, 1)
    if len(row) != 1:
        raise FrameError("a packet with other numbers than it should have")
    return row[0]


def _rows(packet: Packet, num_rows: int) -> list[tuple[float, ...]]:
    if len(packet.buffers) != num_rows or any(memoryview(one).nbytes % 8 for one in packet.buffers):
        raise FrameError("a packet with other numbers than it should have")
    return [tuple(np.frombuffer(buffer, dtype=np.float64).tolist()) for buffer in packet.buffers]
