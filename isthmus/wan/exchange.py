"""The side of a link's end that users see: threads put and take packets, and wait.

One lock guards what they share with the event loop; it is held for microseconds, or for the copy of one
chunk.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.errors import LinkError
from isthmus.plan.types import Priority
from isthmus.wan.heartbeat import Heartbeat
from isthmus.wan.inbox import LinkInbox
from isthmus.wan.outbox import Flight, Outbox
from isthmus.wan.packet import Abort, Close, Packet, check_stream_name, pack, wire_bytes

CONTROL_LANE = 0
EXPRESS_LANE = 1
FIRST_STRIPE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How a link behaves; `bandwidth_bps` and `rtt_s` are first guesses that measurement replaces."""

    num_stripes: int = 4
    """Without stripes no packet crosses, and only the control connection is opened."""
    heartbeat_timeout_s: float = 30.0
    stream_window_bytes: int = 64 * 1024 * 1024
    bandwidth_bps: float | None = None
    rtt_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounters:
    """A link's figures at one moment; of each stream the bytes on the line."""

    sent: Mapping[str, int]
    received: Mapping[str, int]
    rtt_s: float | None
    clock_offset_s: float | None
    reconnects: int
    queued_bytes: int


class Exchange:
    """Outbox, inbox, heartbeat and the failure that ends them, behind one condition.

    `wake` is called, from any thread, when the event loop may have something to do.
    """

    def __init__(self, settings: LinkSettings, *, peer: str, wake: Callable[[], None]) -> None:
        timeout_s = settings.heartbeat_timeout_s
        self.failure: LinkError | None = None
        self.heartbeat = Heartbeat(interval_s=min(timeout_s / 8, 1.0), timeout_s=timeout_s)
        self.last_word: Abort | Close | None = None
        self._peer = peer
        self._tell_loop = wake
        self._changed = threading.Condition()
        self._flight = Flight(bandwidth_bps=settings.bandwidth_bps, rtt_s=settings.rtt_s)
        self._outbox = Outbox(self._flight, stream_window_bytes=settings.stream_window_bytes)
        self._inbox = LinkInbox()
        self._ack_due = False
        self._is_up = False
        self._num_opened: Counter[int] = Counter()

    def send(
        self,
        stream: str,
        packet: Packet,
        *,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> int:
        """Queue a packet and give its bytes on the line; waits while its stream's window is full.

        Its buffers must not change any more.
        """
        check_stream_name(stream)
        body = pack(packet)
        with self._changed:
            self._wait(
                lambda: self._outbox.has_room(stream, body.num_bytes), timeout_s, f"to send on {stream!r}"
            )
            self._outbox.put(stream, body, priority)
        self._tell_loop()
        return wire_bytes(body.num_bytes)

    def receive(self, stream: str, *, timeout_s: float | None = None) -> Packet:
        """The stream's next packet; waits for it."""
        return self.receive_any((stream,), timeout_s=timeout_s)[1]

    def receive_any(self, streams: Sequence[str], *, timeout_s: float | None = None) -> tuple[str, Packet]:
        """The next packet of the first stream that has one; what has come is given even after a failure."""
        names = [check_stream_name(stream) for stream in streams]
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or any(map(self._inbox.has, names)), timeout_s
            )
            name = next(filter(self._inbox.has, names), None)
            if name is None:
                raise self.failure or TimeoutError(f"waited {timeout_s} s for {', '.join(names)}")
            self._ack_due = True
            packet = self._inbox.take(name)
        self._tell_loop()
        return name, packet

    def wait_ready(self, *, timeout_s: float | None = None) -> None:
        """Wait until the peer is there."""
        with self._changed:
            self._wait(lambda: self._is_up, timeout_s, f"for {self._peer}")

    def wait_empty(self, *, timeout_s: float | None = None) -> None:
        """Wait until the peer has acknowledged everything, or can no longer do so."""
        with self._changed:
            try:
                self._wait(lambda: self._outbox.empty, timeout_s, f"for {self._peer} to take what was sent")
            except LinkError:
                return

    def raise_if_failed(self) -> None:
        """Raise what has ended this link, if anything has."""
        if self.failure is not None:
            raise self.failure

    def counters(self) -> LinkCounters:
        """What was sent and received so far, and the state of the line."""
        with self._changed:
            return LinkCounters(
                sent=dict(self._outbox.sent_bytes),
                received=dict(self._inbox.received_bytes),
                rtt_s=self.heartbeat.rtt_s,
                clock_offset_s=self.heartbeat.offset_s,
                reconnects=sum(count - 1 for count in self._num_opened.values()),
                queued_bytes=self._outbox.queued_bytes,
            )

    def fail(self, error: LinkError, *, last_word: Abort | Close | None = None) -> None:
        """End the link for all threads, with a last word to the peer if one is due; only the first counts."""
        with self._changed:
            if self.failure is None:
                # In this order: a thread that sees the failure without the lock must find the last word.
                self.last_word = last_word
                self.failure = error
                self._changed.notify_all()
        self._tell_loop()

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        if not self._changed.wait_for(lambda: self.failure is not None or ready(), timeout_s):
            raise TimeoutError(f"waited {timeout_s} s {what}")
        self.raise_if_failed()
