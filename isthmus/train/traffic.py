"""What one stage exchanges with the stage before it and the one behind it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from torch import Tensor

from isthmus.events import Span
from isthmus.plan.types import Arrived, Event, Pass, Send
from isthmus.train.courier import Courier, Mailbox
from isthmus.train.device import Device
from isthmus.train.messages import (
    EVALUATED,
    TALLY,
    VERDICT,
    Evaluated,
    Gradient,
    Microbatch,
    pack_evaluated,
    pack_gradient,
    pack_microbatch,
    read_address,
    read_sent_s,
    unpack_evaluated,
    unpack_gradient,
    unpack_microbatch,
)
from isthmus.train.settlement import Settlement
from isthmus.wan.link import Link
from isthmus.wan.outbox import Priority
from isthmus.wan.packet import Packet


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Something that a pass needs, with its content on the device."""

    arrived: Arrived
    content: Microbatch | Tensor


class Traffic:
    """Turns tensors into packets and back on the couriers' threads, and notes how long the way was."""

    def __init__(
        self,
        *,
        cloud: str,
        up: Link | None,
        down: Link | None,
        events: "Mailbox[Event | Delivery]",
        settlement: Settlement,
        device: Device,
        width: int,
        keeps_padding: bool,
        on_span: Callable[[Span], None],
        on_evaluated: Callable[[Evaluated], None],
    ) -> None:
        self._cloud = cloud
        self._events = events
        self._settlement = settlement
        self._device = device
        self._width = width
        self._keeps_padding = keeps_padding
        self._on_span = on_span
        self._on_evaluated = on_evaluated
        self._shortest_s: dict[Pass, float] = {}
        self._passed_on: Mailbox[Evaluated] = Mailbox()
        self.up = None if up is None else self._courier_up(up)
        self.down = None if down is None else self._courier_down(down)

    def send(self, send: Send, content: Microbatch | Gradient, *, then: Callable[[], None]) -> None:
        """Send an activation to the stage behind or a gradient to the one before, off this thread."""
        courier = self.up if send.kind is Pass.BACKWARD else self.down
        if courier is None:
            raise ValueError(f"{send} has no receiver")
        courier.send(send.kind.value, lambda: self._pack(send, content), then=then)

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

    def shortest_travel_s(self, kind: Pass) -> float:
        """The shortest way, in seconds, of what came in this turn; 0 if nothing did."""
        return self._shortest_s.get(kind, 0.0)

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

    def _pack(self, send: Send, content: Microbatch | Gradient) -> Packet:
        if isinstance(content, Gradient):
            mask = None if self._keeps_padding else content.mask
            gradient = Gradient(values=self._device.to_host(content.values), mask=mask)
            return pack_gradient(gradient, about=send, sent_s=time.time())
        crossing = None if content.crossing is None else self._device.to_host(content.crossing)
        return pack_microbatch(
            replace(content, crossing=crossing),
            about=send,
            sent_s=time.time(),
            keeps_padding=self._keeps_padding,
        )

    def _courier_up(self, link: Link) -> Courier:
        receivers = {
            VERDICT: self._settlement.on_verdict,
            Pass.FORWARD.value: lambda packet: self._on_microbatch(packet, Pass.FORWARD, link),
            Pass.EVALUATION.value: lambda packet: self._on_microbatch(packet, Pass.EVALUATION, link),
        }
        return Courier(link, receivers=receivers, on_failure=self._fail)

    def _courier_down(self, link: Link) -> Courier:
        receivers = {
            TALLY: self._settlement.on_tally,
            Pass.BACKWARD.value: lambda packet: self._on_gradient(packet, link),
            EVALUATED: self._on_evaluation,
        }
        return Courier(link, receivers=receivers, on_failure=self._fail)

    def _fail(self, error: BaseException) -> None:
        self._events.fail(error)
        self._passed_on.fail(error)
        self._settlement.fail(error)

    def _on_evaluation(self, packet: Packet) -> None:
        found = unpack_evaluated(packet)
        self.evaluated(found)
        self._passed_on.put(found)

    def _on_microbatch(self, packet: Packet, kind: Pass, link: Link) -> None:
        arrived = read_address(packet, kind)
        self._note_travel(packet, arrived, link)
        found = unpack_microbatch(packet, width=self._width)
        crossing = None if found.crossing is None else self._device.from_host(found.crossing)
        content = replace(found, crossing=crossing)
        self._events.put(Delivery(arrived=arrived, content=content))

    def _on_gradient(self, packet: Packet, link: Link) -> None:
        arrived = read_address(packet, Pass.BACKWARD)
        self._note_travel(packet, arrived, link)
        gradient = self._device.from_host(unpack_gradient(packet))
        self._events.put(Delivery(arrived=arrived, content=gradient))

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
