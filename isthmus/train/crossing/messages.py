"""What stages tell each other, as packets: micro-batches, gradients, and the words around a step.

    forward      down   the integers of a micro-batch, and what crosses the cut; evaluations too     NORMAL
    backward     up     the gradient of what crossed                                                 NORMAL
    begin        down   what a bottleneck begins with, once                                          NORMAL
    tally        up     loss, norms, times and coding errors of a step, from this stage on           URGENT
    verdict      down   the norm over all stages, windows, codecs, whether to save                   URGENT
    evaluated    up     loss of an evaluation                                                        URGENT

Activations of training and of evaluation share one stream: what codecs learn from them depends on the order.
Numbers that may not be finite travel as float64, since JSON has no word for them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.model.boundary import Batch
from isthmus.plan.ladder import Pair
from isthmus.plan.types import Arrived, Pass, Send
from isthmus.plan.window import Hop
from isthmus.train.crossing.coded import (
    Coded,
    as_buffer,
    describe_tensor,
    flat_bytes,
    read_coded,
    read_tensor,
)
from isthmus.train.crossing.cut import read_pair, texts_of
from isthmus.train.crossing.integers import pack_batch, unpack_batch
from isthmus.wan.packet import Packet

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
BEGIN: Final = "begin"
TALLY: Final = "tally"
VERDICT: Final = "verdict"
EVALUATED: Final = "evaluated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A micro-batch between stages: integers on the host, what crosses on the device.

    `num_step_targets` are the targets of the whole step. The activations of the sequences in `held` are in
    the cache of the first trained stage; where that is all of them, nothing crosses.
    """

    batch: Batch
    num_step_targets: int
    crossing: Tensor | None = None
    held: tuple[int, ...] = ()

    @property
    def is_held(self) -> bool:
        """Whether there is nothing to compute below the first trained stage."""
        return len(self.held) == len(self.batch.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of what crossed; with a mask, the rows of padding stay behind."""

    values: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosines:
    """The lowest cosine of what crossed a cut, each way, to what was decoded; NaN where none was measured."""

    forward: float = math.nan
    backward: float = math.nan


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
    cosines: tuple[Cosines, ...] = ()
    """Of the cuts behind this stage."""
    gradient_cosine: float = math.nan
    """The lowest cosine of what this stage sent to the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the first stage concludes from the tallies of all."""

    step: int
    norm: float
    windows: tuple[int, ...]
    save: bool
    codecs: tuple[Pair, ...] = ()
    """Of all cuts, from the next step on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The evaluation of the weights that a step starts from; plain if everything crossed raw for it."""

    step: int
    loss_sum: float
    num_correct: int
    num_targets: int
    is_plain: bool = False

    @property
    def loss(self) -> float:
        """Per target."""
        return self.loss_sum / max(self.num_targets, 1)


def pack_microbatch(microbatch: Microbatch, coded: Coded | None, *, about: Send, sent_s: float) -> Packet:
    """The integers of a micro-batch, and what crosses the cut, if anything does."""
    packed = pack_batch(microbatch.batch)
    header = {
        **_address(about, sent_s),
        **packed.header,
        "evaluation": about.kind is Pass.EVALUATION,
        "num_step_targets": microbatch.num_step_targets,
        "held": list(microbatch.held),
        "crossing": None if coded is None else coded.describe(),
    }
    return Packet(header, (*packed.buffers, *(coded.buffers() if coded is not None else ())))


def unpack_microbatch(packet: Packet) -> tuple[Microbatch, Coded | None]:
    """The integers of a micro-batch, and what crossed, as it came."""
    about, coded, buffers = packet.header.get("crossing"), None, packet.buffers
    if about is not None:
        coded, buffers = read_coded(about, buffers)
    batch = unpack_batch(packet.header, buffers)
    found = Microbatch(
        batch=batch,
        num_step_targets=_count(packet.header, "num_step_targets"),
        held=_held(packet.header.get("held"), num_sequences=len(batch.ids)),
    )
    if (coded is None) != found.is_held:
        raise FrameError("a micro-batch without what crosses, or with what is held already")
    return found, coded


def pack_gradient(coded: Coded, *, about: Send, sent_s: float) -> Packet:
    """The gradient of what crossed."""
    return Packet({**_address(about, sent_s), "crossing": coded.describe()}, coded.buffers())


def unpack_gradient(packet: Packet) -> Coded:
    """A gradient as it came; whoever sent the activation knows its shape."""
    coded, rest = read_coded(packet.header.get("crossing"), packet.buffers)
    if rest:
        raise FrameError("a gradient with buffers that it does not speak of")
    return coded


def pack_begin(tensors: Mapping[str, Tensor]) -> Packet:
    """What a bottleneck begins with: tensors by name, on the host."""
    header = {"tensors": {name: describe_tensor(tensor) for name, tensor in tensors.items()}}
    return Packet(header, [as_buffer(flat_bytes(tensor)) for tensor in tensors.values()])


def unpack_begin(packet: Packet) -> dict[str, Tensor]:
    """The tensors by name."""
    about = packet.header.get("tensors")
    if not isinstance(about, dict) or len(about) != len(packet.buffers):
        raise FrameError("a bottleneck that begins with other tensors than it says")
    return {
        name: read_tensor(one, buffer)
        for (name, one), buffer in zip(about.items(), packet.buffers, strict=True)
    }


def read_address(packet: Packet, stream: str) -> Arrived:
    """What has arrived, as the scheduler is told."""
    header = packet.header
    kind = Pass.BACKWARD
    if stream == FORWARD:
        kind = Pass.EVALUATION if header.get("evaluation") is True else Pass.FORWARD
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
    cosines = [value for one in tally.cosines for value in (one.forward, one.backward)]
    rows: Sequence[Sequence[float]] = (
        (tally.loss_sum, tally.travel_s, tally.gradient_cosine),
        tally.squared_norms,
        tally.busy_s,
        hops,
        cosines,
    )
    return Packet({"step": tally.step}, [np.asarray(row, dtype=np.float64).data for row in rows])


def unpack_tally(packet: Packet) -> Tally:
    """A tally from a packet."""
    ends, norms, busy_s, hops, cosines = _rows(packet, 5)
    if len(ends) != 3 or len(hops) % 3 or len(cosines) % 2:
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
        cosines=tuple(
            Cosines(forward=forward, backward=backward)
            for forward, backward in zip(cosines[::2], cosines[1::2], strict=True)
        ),
        gradient_cosine=ends[2],
    )


def pack_verdict(verdict: Verdict) -> Packet:
    """A verdict as a packet."""
    header = {
        "step": verdict.step,
        "windows": list(verdict.windows),
        "save": verdict.save,
        "codecs": [list(texts_of(pair)) for pair in verdict.codecs],
    }
    return Packet(header, [np.asarray([verdict.norm], dtype=np.float64).data])


def unpack_verdict(packet: Packet) -> Verdict:
    """A verdict from a packet."""
    norm = _number(packet)
    windows = packet.header.get("windows")
    if not isinstance(windows, list) or not all(isinstance(one, int) and one >= 1 for one in windows):
        raise FrameError("a verdict without windows")
    codecs = packet.header.get("codecs")
    if not isinstance(codecs, list):
        raise FrameError("a verdict without codecs")
    return Verdict(
        step=_count(packet.header, "step"),
        norm=norm,
        windows=tuple(windows),
        save=packet.header.get("save") is True,
        codecs=tuple(map(read_pair, codecs)),
    )


def verdict_to_words(verdict: Verdict) -> dict[str, object]:
    """A verdict as plain values, for the ranks of one cloud."""
    return {**pack_verdict(verdict).header, "norm": verdict.norm}


def verdict_from_words(words: Mapping[str, object]) -> Verdict:
    """The verdict that `verdict_to_words` gave."""
    header = dict(words)
    norm = np.asarray([header.pop("norm")], dtype=np.float64)
    return unpack_verdict(Packet(header, [norm.data]))


def pack_evaluated(found: Evaluated) -> Packet:
    """The result of an evaluation as a packet."""
    header = {
        "step": found.step,
        "num_correct": found.num_correct,
        "num_targets": found.num_targets,
        "is_plain": found.is_plain,
    }
    return Packet(header, [np.asarray([found.loss_sum], dtype=np.float64).data])


def unpack_evaluated(packet: Packet) -> Evaluated:
    """The result of an evaluation from a packet."""
    loss_sum = _number(packet)
    step, num_correct, num_targets = (
        _count(packet.header, key) for key in ("step", "num_correct", "num_targets")
    )
    return Evaluated(
        step=step,
        loss_sum=loss_sum,
        num_correct=num_correct,
        num_targets=num_targets,
        is_plain=packet.header.get("is_plain") is True,
    )


def _address(about: Send, sent_s: float) -> dict[str, object]:
    return {"step": about.step, "microbatch": about.microbatch, "sent_s": sent_s}


def _held(found: object, *, num_sequences: int) -> tuple[int, ...]:
    is_list = isinstance(found, list) and all(type(one) is int for one in found)
    if not isinstance(found, list) or not is_list or not set(found) <= set(range(num_sequences)):
        raise FrameError("a micro-batch that does not say which of its sequences are held")
    return tuple(sorted(set(found)))


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
