"""What one rank of a stage exchanges with the ranks of the stage before it and of the one behind it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from torch import Tensor

from isthmus.errors import FrameError
from isthmus.events import Span
from isthmus.plan.ladder import Pair
from isthmus.plan.routing import Routing
from isthmus.plan.types import Arrived, Event, Pass, Send
from isthmus.train.crossing.bench import Bench, Volume
from isthmus.train.crossing.courier import Courier, Mailbox
from isthmus.train.crossing.cut import SavedCuts
from isthmus.train.crossing.ends import DownCut, UpCut
from isthmus.train.crossing.messages import (
    BACKWARD,
    BEGIN,
    FORWARD,
    Gradient,
    Microbatch,
    pack_begin,
    unpack_begin,
)
from isthmus.train.crossing.settlement import Seen, Settlement
from isthmus.train.crossing.ways import DownWay, Travels, UpWay
from isthmus.train.crossing.words import (
    EVALUATED,
    TALLY,
    VERDICT,
    Evaluated,
    Tally,
    Verdict,
    pack_evaluated,
    unpack_evaluated,
    unpack_verdict,
)
from isthmus.train.device import Mark
from isthmus.wan.link import Link
from isthmus.wan.outbox import Priority
from isthmus.wan.packet import Packet


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Something that a pass needs, with its content on the device."""

    arrived: Arrived
    content: Microbatch | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """This rank's ends of its links, by the rank at the other end, each with its end of the cut."""

    up: Mapping[int, tuple[Link, UpCut]]
    down: Mapping[int, tuple[Link, DownCut]]


class Traffic:
    """Hands what leaves to the couriers and what arrives to the worker.

    Tensors become packets and tensors again on the couriers' threads. Micro-batches go from rank to rank as
    the routing says; words go between leaders.
    """

    def __init__(
        self,
        *,
        cloud: str,
        index: int,
        rank: int,
        ends: Ends,
        routing: Routing,
        events: "Mailbox[Event | Delivery]",
        settlement: Settlement,
        on_span: Callable[[Span], None],
        on_evaluated: Callable[[Evaluated], None],
    ) -> None:
        self._index = index
        self._routing = routing
        self._events = events
        self._settlement = settlement
        self._on_evaluated = on_evaluated
        self._travels = Travels(cloud=cloud, on_span=on_span)
        self._passed_on: Mailbox[Evaluated] = Mailbox()
        self._beginnings: Mailbox[dict[str, Tensor]] = Mailbox()
        self._volume = Volume()
        self._ups = {peer: self._open_up(*end) for peer, end in ends.up.items()}
        self._downs = {peer: self._open_down(*end) for peer, end in ends.down.items()}
        is_leader = rank == 0
        self._up = self._ups[0].courier if is_leader and self._ups else None
        self._down = self._downs[0].courier if is_leader and self._downs else None

    # What leaves.

    def send(
        self, send: Send, content: Microbatch | Gradient, *, after: Mark, then: Callable[[], None]
    ) -> None:
        """Send an activation to the stage behind or a gradient to the one before, off this thread."""
        if isinstance(content, Gradient):
            up = self._ups[self._peer(self._index - 1, send)]
            up.courier.send(BACKWARD, lambda: up.cut.pack(content, about=send, after=after), then=then)
        else:
            down = self._downs[self._peer(self._index + 1, send)]
            down.courier.send(FORWARD, lambda: down.cut.pack(content, about=send, after=after), then=then)

    def send_beginning(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the stage behind what its half of a bottleneck begins with."""
        if self._down is None:
            raise ValueError("a bottleneck begins without a receiver")
        on_host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        self._down.send(BEGIN, lambda: pack_begin(on_host))

    def take_beginning(self) -> dict[str, Tensor]:
        """What this stage's half of a bottleneck begins with; waits for it."""
        return self._beginnings.take()

    def evaluated(self, found: Evaluated) -> None:
        """Pass the result of an evaluation on to the first stage."""
        if self._up is None:
            self._on_evaluated(found)
        else:
            self._up.send(EVALUATED, lambda: pack_evaluated(found), priority=Priority.URGENT)

    def await_evaluations(self, count: int) -> None:
        """Wait until this many evaluations have come from the stages behind and gone on."""
        if self._down is not None:
            for _ in range(count):
                self._passed_on.take()

    # From one step to the next.

    def begin(self, step: int) -> None:
        """Take in what comes from the first step on."""
        for up in self._ups.values():
            up.know(step)

    def settle(self, own: Tally) -> tuple[Tally, Verdict]:
        """Settle a step with the other stages; gives what this one knows of all, and the verdict."""
        if self._routing.num_ranks[self._index] > 1:
            self._await_gradients(own.step)
        shortest_s = self._travels.take(own.step)
        seen = Seen(
            gradient_travel_s=shortest_s.get(Pass.BACKWARD),
            coding_s=_longest_coding_s(down.cut.bench for down in self._downs.values()),
            element_bytes=max((down.cut.bench.element_bytes for down in self._downs.values()), default=0),
            activation_cosine=_lowest(down.cut.lowest_cosine() for down in self._downs.values()),
            gradient_cosine=lambda: _lowest(up.cut.lowest_cosine() for up in self._ups.values()),
        )
        own = replace(
            own,
            travel_s=shortest_s.get(Pass.FORWARD, 0.0),
            coding_s=_longest_coding_s(up.cut.bench for up in self._ups.values()),
        )
        return self._settlement.settle(own, seen=seen, up=self._up, down=self._down)

    def follow(self, verdict: Verdict) -> None:
        """Let the codecs of a verdict hold from the next step on; where it saves, keep the codes."""
        step = verdict.step + 1
        if verdict.codecs and len(verdict.codecs) < self._index + bool(self._downs):
            raise FrameError("a verdict that lacks the codecs of some cuts")
        for down in self._downs.values():
            if verdict.codecs:
                down.cut.book.switch(verdict.codecs[self._index], step=step)
        pair: Pair | None = verdict.codecs[self._index - 1] if verdict.codecs and self._ups else None
        for up in self._ups.values():
            up.know(step, pair, save=verdict.save)

    def saved_cuts(self, step: int) -> SavedCuts:
        """The codes at the start of a step: after the verdict that says to save, before the step begins."""
        return SavedCuts(
            up={peer: up.state for peer, up in self._ups.items() if up.state is not None},
            down={peer: down.state(step) for peer, down in self._downs.items()},
        )

    def restore(self, cuts: SavedCuts, *, step: int) -> None:
        """Go on at a step with the codes that were saved there."""
        for peer, code in cuts.up.items():
            if peer in self._ups:
                self._ups[peer].cut.book.restore(code, step=step)
        for peer, code in cuts.down.items():
            if peer in self._downs:
                self._downs[peer].cut.book.restore(code, step=step)

    @property
    def up_cuts(self) -> tuple[UpCut, ...]:
        """This rank's ends of the cut before its stage."""
        return tuple(up.cut for up in self._ups.values())

    def take_volume(self) -> Volume:
        """What has left this stage since this was last asked."""
        now = Volume()
        for bench in self._benches():
            now += bench.volume
        before, self._volume = self._volume, now
        return now - before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what is left and end the threads; after an error nobody may wait for a peer any more."""
        for courier in self._couriers():
            if error is None:
                courier.close()
            else:
                courier.abandon()

    # What arrives, on the couriers' threads.

    def _open_up(self, link: Link, cut: UpCut) -> UpWay:
        return UpWay(
            link,
            cut,
            travels=self._travels,
            receivers={
                VERDICT: lambda packet: self._settlement.on_verdict(unpack_verdict(packet)),
                BEGIN: lambda packet: self._beginnings.put(unpack_begin(packet)),
            },
            deliver=self._deliver,
            on_failure=self._fail,
        )

    def _open_down(self, link: Link, cut: DownCut) -> DownWay:
        return DownWay(
            link,
            cut,
            travels=self._travels,
            receivers={TALLY: self._settlement.on_tally, EVALUATED: self._on_evaluation},
            deliver=self._deliver,
            on_failure=self._fail,
        )

    def _await_gradients(self, step: int) -> None:
        """Wait until every gradient of a step is coded, and so measured, if that is done at all."""
        for up in self._ups.values():
            if not up.cut.book.at(step).gradient.is_raw:
                up.courier.call(lambda: None)

    def _couriers(self) -> Iterator[Courier]:
        yield from (up.courier for up in self._ups.values())
        yield from (down.courier for down in self._downs.values())

    def _benches(self) -> Iterator[Bench]:
        yield from (up.cut.bench for up in self._ups.values())
        yield from (down.cut.bench for down in self._downs.values())

    def _peer(self, stage: int, send: Send) -> int:
        return self._routing.rank(
            stage,
            step=send.step,
            microbatch=send.microbatch,
            is_evaluation=send.kind is Pass.EVALUATION,
        )

    def _deliver(self, arrived: Arrived, content: Microbatch | Tensor) -> None:
        self._events.put(Delivery(arrived=arrived, content=content))

    def _fail(self, error: BaseException) -> None:
        self._events.fail(error)
        self._passed_on.fail(error)
        self._beginnings.fail(error)
        self._settlement.fail(error)

    def _on_evaluation(self, packet: Packet) -> None:
        found = unpack_evaluated(packet)
        self.evaluated(found)
        self._passed_on.put(found)


def _longest_coding_s(benches: Iterable[Bench]) -> float:
    return max((bench.take_coding_s() for bench in benches), default=0.0)


def _lowest(cosines: Iterable[float]) -> float:
    return min((one for one in cosines if not math.isnan(one)), default=math.nan)
