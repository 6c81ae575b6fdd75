"""What one stage exchanges with the stage before it and the one behind it."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import Tensor

from isthmus.errors import FrameError
from isthmus.events import Span
from isthmus.plan.ladder import Pair
from isthmus.plan.types import Arrived, Event, Pass, Send
from isthmus.train.bench import Volume
from isthmus.train.courier import Courier, Mailbox
from isthmus.train.crossing import DownCut, UpCut
from isthmus.train.cut import CodeState, SavedCuts
from isthmus.train.device import Mark
from isthmus.train.messages import (
    BACKWARD,
    BEGIN,
    EVALUATED,
    FORWARD,
    TALLY,
    VERDICT,
    Evaluated,
    Gradient,
    Microbatch,
    pack_begin,
    pack_evaluated,
    read_address,
    read_sent_s,
    unpack_begin,
    unpack_evaluated,
    unpack_verdict,
)
from isthmus.train.settlement import Seen, Settlement
from isthmus.wan.link import Link
from isthmus.wan.outbox import Priority
from isthmus.wan.packet import Packet


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Something that a pass needs, with its content on the device."""

    arrived: Arrived
    content: Microbatch | Tensor


class Traffic:
    """Hands what leaves to the couriers and what arrives to the worker, and notes how long the way was.

    Tensors become packets and tensors again on the couriers' threads. A stage learns the codecs of a step
    from the verdict on the one before. What arrives ahead of that verdict waits for it.
    """

    def __init__(
        self,
        *,
        cloud: str,
        index: int,
        up: Link | None,
        down: Link | None,
        up_cut: UpCut | None,
        down_cut: DownCut | None,
        events: "Mailbox[Event | Delivery]",
        settlement: Settlement,
        on_span: Callable[[Span], None],
        on_evaluated: Callable[[Evaluated], None],
    ) -> None:
        self._cloud = cloud
        self._index = index
        self._events = events
        self._settlement = settlement
        self._on_span = on_span
        self._on_evaluated = on_evaluated
        self._shortest_s: dict[Pass, float] = {}
        self._passed_on: Mailbox[Evaluated] = Mailbox()
        self._beginnings: Mailbox[dict[str, Tensor]] = Mailbox()
        self._early: deque[Packet] = deque()
        self._volume = Volume()
        self._known_step: int | None = None
        self._up_state: CodeState | None = None
        self.up_cut = up_cut
        self.down_cut = down_cut
        self.up = None if up is None or up_cut is None else self._courier_up(up, up_cut)
        self.down = None if down is None or down_cut is None else self._courier_down(down, down_cut)

    # What leaves.

    def send(
        self, send: Send, content: Microbatch | Gradient, *, after: Mark, then: Callable[[], None]
    ) -> None:
        """Send an activation to the stage behind or a gradient to the one before, off this thread."""
        up_cut, down_cut = self.up_cut, self.down_cut
        if isinstance(content, Gradient) and self.up is not None and up_cut is not None:
            self.up.send(BACKWARD, lambda: up_cut.pack(content, about=send, after=after), then=then)
        elif isinstance(content, Microbatch) and self.down is not None and down_cut is not None:
            self.down.send(FORWARD, lambda: down_cut.pack(content, about=send, after=after), then=then)
        else:
            raise ValueError(f"{send} has no receiver")

    def send_beginning(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the stage behind what its half of a bottleneck begins with."""
        if self.down is None:
            raise ValueError("a bottleneck begins without a receiver")
        on_host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        self.down.send(BEGIN, lambda: pack_begin(on_host))

    def take_beginning(self) -> dict[str, Tensor]:
        """What this stage's half of a bottleneck begins with; waits for it."""
        return self._beginnings.take()

    def evaluated(self, found: Evaluated) -> None:
        """Pass the result of an evaluation on to the first stage."""
        if self.up is None:
            self._on_evaluated(found)
        else:
            self.up.send(EVALUATED, lambda: pack_evaluated(found), priority=Priority.URGENT)

    def await_evaluations(self, count: int) -> None:
        """Wait until this many evaluations have come from the stages behind and gone on."""
        if self.down is not None:
            for _ in range(count):
                self._passed_on.take()

    # Codes, from one step to the next.

    def switch_down(self, codecs: tuple[Pair, ...], *, step: int) -> None:
        """Let these codecs of all cuts hold for what leaves downwards from a step on."""
        if codecs and self.down_cut is not None:
            self.down_cut.book.switch(codecs[self._index], step=step)

    def saved_cuts(self, step: int) -> SavedCuts:
        """The codes at the start of a step: after the verdict that says to save, before the step begins."""
        down, down_cut = None, self.down_cut
        if self.down is not None and down_cut is not None:
            # Behind what is still to be coded, which where all is frozen nobody has waited for.
            down = self.down.call(lambda: down_cut.book.state(step))
        return SavedCuts(up=self._up_state, down=down)

    def restore(self, cuts: SavedCuts, *, step: int) -> None:
        """Go on at a step with the codes that were saved there."""
        if cuts.up is not None and self.up_cut is not None:
            self.up_cut.book.restore(cuts.up, step=step)
        if cuts.down is not None and self.down_cut is not None:
            self.down_cut.book.restore(cuts.down, step=step)

    # What was measured.

    def seen(self) -> Seen:
        """What was measured of both cuts in this turn."""
        up, down = self.up_cut, self.down_cut
        return Seen(
            gradient_travel_s=self.shortest_travel_s(Pass.BACKWARD),
            activation_cosine=math.nan if down is None else down.lowest_cosine(),
            gradient_cosine=(lambda: math.nan) if up is None else up.lowest_cosine,
        )

    def take_volume(self) -> Volume:
        """What has left this stage since this was last asked."""
        now = Volume()
        for cut in (self.up_cut, self.down_cut):
            if cut is not None:
                now += cut.bench.volume
        before, self._volume = self._volume, now
        return now - before

    def shortest_travel_s(self, kind: Pass) -> float | None:
        """The shortest way, in seconds, of what came in this turn; None if nothing did."""
        return self._shortest_s.get(kind)

    def forget_travels(self) -> None:
        """Begin to measure anew."""
        self._shortest_s.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what is left and end the threads; after an error nobody may wait for a peer any more."""
        for courier in (self.up, self.down):
            if courier is not None and error is None:
                courier.close()
            elif courier is not None:
                courier.abandon()

    # What arrives, on the couriers' threads.

    def _courier_up(self, link: Link, cut: UpCut) -> Courier:
        receivers = {
            VERDICT: lambda packet: self._on_verdict(packet, cut),
            FORWARD: lambda packet: self._on_microbatch(packet, cut, link),
            BEGIN: lambda packet: self._beginnings.put(unpack_begin(packet)),
        }
        return Courier(link, receivers=receivers, on_failure=self._fail)

    def _courier_down(self, link: Link, cut: DownCut) -> Courier:
        receivers = {
            TALLY: self._settlement.on_tally,
            BACKWARD: lambda packet: self._on_gradient(packet, cut, link),
            EVALUATED: self._on_evaluation,
        }
        return Courier(link, receivers=receivers, on_failure=self._fail)

    def _fail(self, error: BaseException) -> None:
        self._events.fail(error)
        self._passed_on.fail(error)
        self._beginnings.fail(error)
        self._settlement.fail(error)

    def _on_evaluation(self, packet: Packet) -> None:
        found = unpack_evaluated(packet)
        self.evaluated(found)
        self._passed_on.put(found)

    def _on_verdict(self, packet: Packet, cut: UpCut) -> None:
        verdict = unpack_verdict(packet)
        following = verdict.step + 1
        if verdict.codecs:
            if len(verdict.codecs) < self._index:
                raise FrameError("a verdict that lacks the codecs of some cuts")
            cut.book.switch(verdict.codecs[self._index - 1], step=following)
        if verdict.save:
            self._up_state = cut.book.state(following)
        self._settlement.on_verdict(verdict)
        self._known_step = following
        early, self._early = self._early, deque()
        for one in early:
            self._deliver_microbatch(one, cut)

    def _on_microbatch(self, packet: Packet, cut: UpCut, link: Link) -> None:
        arrived = read_address(packet, FORWARD)
        self._note_travel(packet, arrived, link)
        self._deliver_microbatch(packet, cut)

    def _deliver_microbatch(self, packet: Packet, cut: UpCut) -> None:
        arrived = read_address(packet, FORWARD)
        if self._known_step is None:
            self._known_step = arrived.step
        if arrived.step > self._known_step:
            self._early.append(packet)
        else:
            self._events.put(Delivery(arrived=arrived, content=cut.unpack(packet, arrived)))

    def _on_gradient(self, packet: Packet, cut: DownCut, link: Link) -> None:
        arrived = read_address(packet, BACKWARD)
        self._note_travel(packet, arrived, link)
        self._events.put(Delivery(arrived=arrived, content=cut.unpack(packet, arrived)))

    def _note_travel(self, packet: Packet, arrived: Arrived, link: Link) -> None:
        now_s = time.time()
        sent_s = min(now_s, read_sent_s(packet) - (link.counters().clock_offset_s or 0.0))
        shortest_s = self._shortest_s.get(arrived.kind, now_s - sent_s)
        self._shortest_s[arrived.kind] = min(shortest_s, now_s - sent_s)
        self._on_span(
            Span(
                track=f"{link.peer.cloud}→{self._cloud}",
                name=f"{arrived.kind.value} {arrived.step}.{arrived.microbatch}",
                kind="transfer",
                start_s=sent_s,
                end_s=now_s,
                num_bytes=packet.payload_bytes,
            )
        )
