"""What the two sides of a link's end share: user threads put and take packets, the event loop moves frames.

One lock guards it all; it is held for microseconds, or for the copy of one chunk.
"""

import threading
import time
from collections.abc import Callable

from isthmus.errors import LinkError
from isthmus.plan.types import Priority
from isthmus.wan.flight import Flight, LinkCounters
from isthmus.wan.heartbeat import Heartbeat
from isthmus.wan.inbox import LinkInbox
from isthmus.wan.outbox import Outbox
from isthmus.wan.packet import Abort, Ack, Chunk, Close, ControlFrame, Packet, Ping, Pong, pack

CONTROL_LANE = 0
EXPRESS_LANE = 1
FIRST_STRIPE = 2


class Exchange:
    """Outbox, inbox, heartbeat and the failure that ends them, behind one condition."""

    def __init__(self, *, flight: Flight, stream_window_bytes: int, heartbeat: Heartbeat) -> None:
        self.failure: LinkError | None = None
        self.heartbeat = heartbeat
        self.last_word: Abort | Close | None = None
        self._changed = threading.Condition()
        self._flight = flight
        self._outbox = Outbox(flight, stream_window_bytes=stream_window_bytes)
        self._inbox = LinkInbox()
        self._ack_due = False
        self._is_up = False
        self._num_opened: dict[int, int] = {}

    # For user threads.

    def put(self, stream: str, packet: Packet, priority: Priority, timeout_s: float | None) -> int:
        """Queue a packet once its stream has room; gives its size in bytes."""
        body = pack(packet)
        with self._changed:
            self._wait(
                lambda: self._outbox.has_room(stream, body.num_bytes), timeout_s, f"to send on {stream!r}"
            )
            self._outbox.put(stream, body, priority, now_s=time.monotonic())
        return body.num_bytes

    def take(self, streams: tuple[str, ...], timeout_s: float | None) -> tuple[str, Packet]:
        """The next packet of the first stream that has one; what has come is given even after a failure."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or self._first_with_packet(streams) is not None, timeout_s
            )
            stream = self._first_with_packet(streams)
            if stream is None:
                raise self.failure or TimeoutError(f"waited {timeout_s} s for {', '.join(streams)}")
            self._ack_due = True
            return stream, self._inbox.take(stream)

    def _first_with_packet(self, streams: tuple[str, ...]) -> str | None:
        return next((stream for stream in streams if self._inbox.has(stream)), None)

    def wait_up(self, timeout_s: float | None, what: str) -> None:
        """Wait until the control connection is open."""
        with self._changed:
            self._wait(lambda: self._is_up, timeout_s, what)

    def wait_empty(self, timeout_s: float | None, what: str) -> None:
        """Wait until the peer has acknowledged everything, or can no longer do so."""
        with self._changed:
            try:
                self._wait(lambda: self._outbox.empty, timeout_s, what)
            except LinkError:
                return

    def counters(self) -> LinkCounters:
        """What was sent and received so far, and the state of the line."""
        with self._changed:
            return LinkCounters(
                sent=self._outbox.counters(),
                received=self._inbox.counters(),
                rtt_s=self.heartbeat.clock.rtt_s,
                clock_offset_s=self.heartbeat.clock.offset_s,
                reconnects=sum(count - 1 for count in self._num_opened.values()),
                queued_bytes=self._outbox.queued_bytes,
                in_flight_bytes=self._flight.in_flight_bytes,
            )

    def fail(self, error: LinkError, *, last_word: Abort | Close | None = None) -> bool:
        """End it for all threads; False if it had ended before."""
        with self._changed:
            if self.failure is not None:
                return False
            # In this order, since a thread that sees the failure without the lock must find the last word.
            self.last_word = last_word
            self.failure = error
            self._changed.notify_all()
            return True

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        if not self._changed.wait_for(lambda: self.failure is not None or ready(), timeout_s):
            raise TimeoutError(f"waited {timeout_s} s {what}")
        if self.failure is not None:
            raise self.failure

    # For the event loop.

    def opened(self, lane: int) -> None:
        """A connection is open."""
        with self._changed:
            self._num_opened[lane] = self._num_opened.get(lane, 0) + 1
            if lane == CONTROL_LANE:
                self._is_up = True
                self._ack_due = True
                self._inbox.repeat_consumed()
                self._changed.notify_all()
            else:
                self._outbox.open_lane(lane, is_express=lane == EXPRESS_LANE, now_s=time.monotonic())

    def closed(self, lane: int) -> None:
        """A connection has ended; what it carried must be sent again."""
        with self._changed:
            if lane == CONTROL_LANE:
                self._is_up = False
            else:
                self._outbox.close_lane(lane)

    def next_chunk(self, lane: int) -> bytes | None:
        with self._changed:
            return self._outbox.next_frame(lane, now_s=time.monotonic())

    def next_control(self) -> list[ControlFrame]:
        """All that the control connection has to say now."""
        frames: list[ControlFrame] = []
        with self._changed:
            if self._ack_due:
                self._ack_due = False
                frames.append(self._inbox.ack())
        frames += self.heartbeat.due()
        if self.last_word is not None:
            frames.append(self.last_word)
        return frames

    def stalled_s(self, lane: int) -> float:
        """For how long a lane that carries something has made no progress."""
        with self._changed:
            since_s = self._outbox.stalled_since_s(lane)
        return 0.0 if since_s is None else time.monotonic() - since_s

    def on_chunk(self, chunk: Chunk, frame_bytes: int) -> None:
        """A chunk has come."""
        with self._changed:
            self._ack_due = True
            if self._inbox.put(chunk, frame_bytes):
                self._changed.notify_all()

    def on_ack(self, ack: Ack) -> None:
        """The peer has acknowledged chunks or consumed packets."""
        with self._changed:
            self._outbox.acknowledge(ack, now_s=time.monotonic())
            self._changed.notify_all()

    def on_heartbeat(self, frame: Ping | Pong, received_ns: int) -> None:
        """The peer wants a sign of life, or has given one."""
        rtt_s = self.heartbeat.take(frame, received_ns=received_ns)
        if rtt_s is not None:
            with self._changed:
                self._flight.observe_rtt(rtt_s, now_s=time.monotonic())
