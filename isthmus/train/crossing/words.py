"""The words around a step that leaders of stages say to each other, as packets; all of them URGENT.

    tally        up     loss, norms, times and coding errors of a step, from this stage on
    verdict      down   the norm over all stages, windows, codecs, whether to save
    evaluated    up     loss of an evaluation

Numbers that may not be finite travel as float64, since JSON has no word for them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from isthmus.errors import FrameError
from isthmus.plan.ladder import Pair
from isthmus.plan.window import Hop
from isthmus.train.crossing.coded import read_count
from isthmus.train.crossing.cut import read_pair, texts_of
from isthmus.wan.packet import Packet

TALLY: Final = "tally"
VERDICT: Final = "verdict"
EVALUATED: Final = "evaluated"
_ELEMENT_BYTES: Final = frozenset((0, 2, 4))


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
    hops: tuple[Hop, ...] = ()
    travel_s: float = 0.0
    """The shortest way of an activation to this stage."""
    coding_s: float = 0.0
    """Of an activation that came to this stage, and of its gradient that left, at this end of their cut."""
    cosines: tuple[Cosines, ...] = ()
    """Of the cuts behind this stage."""
    element_bytes: tuple[int, ...] = ()
    """Of a number that crosses raw, at the cuts behind this stage; 0 where nothing has crossed yet."""
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


def pack_tally(tally: Tally) -> Packet:
    """A tally as a packet."""
    hops = [
        value for hop in tally.hops for value in (hop.forward_s, hop.backward_s, hop.latency_s, hop.coding_s)
    ]
    cosines = [value for one in tally.cosines for value in (one.forward, one.backward)]
    rows: Sequence[Sequence[float]] = (
        (tally.loss_sum, tally.travel_s, tally.coding_s, tally.gradient_cosine),
        tally.squared_norms,
        tally.busy_s,
        hops,
        cosines,
        tally.element_bytes,
    )
    return Packet({"step": tally.step}, [np.asarray(row, dtype=np.float64).data for row in rows])


def unpack_tally(packet: Packet) -> Tally:
    """A tally from a packet."""
    ends, norms, busy_s, hops, cosines, element_bytes = _rows(packet, 6)
    if len(ends) != 4 or len(hops) % 4 or len(cosines) % 2:
        raise FrameError("a tally of the wrong size")
    if not _ELEMENT_BYTES.issuperset(element_bytes):
        raise FrameError("a tally of numbers of no known size")
    return Tally(
        step=read_count(packet.header, "step"),
        loss_sum=ends[0],
        travel_s=ends[1],
        coding_s=ends[2],
        squared_norms=norms,
        busy_s=busy_s,
        hops=tuple(
            Hop(forward_s=forward_s, backward_s=backward_s, latency_s=latency_s, coding_s=coding_s)
            for forward_s, backward_s, latency_s, coding_s in zip(*[iter(hops)] * 4, strict=True)
        ),
        cosines=tuple(
            Cosines(forward=forward, backward=backward)
            for forward, backward in zip(cosines[::2], cosines[1::2], strict=True)
        ),
        element_bytes=tuple(map(int, element_bytes)),
        gradient_cosine=ends[3],
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
        step=read_count(packet.header, "step"),
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
        read_count(packet.header, key) for key in ("step", "num_correct", "num_targets")
    )
    return Evaluated(
        step=step,
        loss_sum=loss_sum,
        num_correct=num_correct,
        num_targets=num_targets,
        is_plain=packet.header.get("is_plain") is True,
    )


def _number(packet: Packet) -> float:
    (row,) = _rows(packet, 1)
    if len(row) != 1:
        raise FrameError("a packet with other numbers than it should have")
    return row[0]


def _rows(packet: Packet, num_rows: int) -> list[tuple[float, ...]]:
    if len(packet.buffers) != num_rows or any(memoryview(one).nbytes % 8 for one in packet.buffers):
        raise FrameError("a packet with other numbers than it should have")
    return [tuple(np.frombuffer(buffer, dtype=np.float64).tolist()) for buffer in packet.buffers]
