"""What the two sides of a link's end share: user threads put and take packets, the event loop moves frames.

One lock guards it all; it is held for microseconds, or for the copy of one chunk.
"""

import asyncio
import os
import threading
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from isthmus.errors import FrameError, LinkError
from isthmus.events import steady_ns
from isthmus.plan.types import Priority
from isthmus.units import format_bytes
from isthmus.wan.flight import Flight, LinkCounters, PeerClock, Room, StreamCounters, cost_bytes
from isthmus.wan.frames import (
    MAX_NUM_RANGES,
    MAX_NUM_STREAMS,
    Abort,
    Ack,
    Chunk,
    Close,
    Packet,
    Ping,
    Pong,
    pack,
    unpack,
    wire_bytes,
)
from isthmus.wan.outbox import Outbox

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for threads that have no event loop."""

    def __init__(self, *, name: str = "isthmus-wan", loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine; the future holds its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called on the loop, soon; nothing happens once the loop has ended."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run a coroutine to its end."""
        return self.submit(coroutine).result(timeout_s)

    def close(self) -> None:
        """End the loop and its thread; whatever still runs is cancelled."""
        if self.loop.is_closed():
            return
        self.run(_cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


MAX_NUM_OUT_OF_ORDER = 65_536


class Received:
    """The set of sequence numbers that have come: all below `cumulative`, and those beyond."""

    def __init__(self) -> None:
        self.cumulative = 0
        self._beyond: set[int] = set()

    def __contains__(self, sequence: int) -> bool:
        return sequence < self.cumulative or sequence in self._beyond

    def add(self, sequence: int) -> None:
        """Note a number that has come."""
        self._beyond.add(sequence)
        while self.cumulative in self._beyond:
            self._beyond.remove(self.cumulative)
            self.cumulative += 1

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The numbers beyond `cumulative` as inclusive ranges, the lowest first."""
        ranges: list[tuple[int, int]] = []
        for sequence in sorted(self._beyond):
            if ranges and ranges[-1][1] == sequence - 1:
                ranges[-1] = (ranges[-1][0], sequence)
            else:
                ranges.append((sequence, sequence))
        return tuple(ranges[:MAX_NUM_RANGES])


class _Partial:
    """A packet of which chunks are still to come; each byte is written once."""

    def __init__(self, num_bytes: int) -> None:
        # Memory that is reserved but not written costs nothing: a peer that only announces cannot exhaust us.
        self.body = np.empty(num_bytes, dtype=np.uint8).data
        self.missing_bytes = num_bytes
        # Where written bytes begin and end, ascending: 0, 10, 20, 30 are bytes 0 to 9 and 20 to 29.
        self._edges: list[int] = []

    def place(self, chunk: Chunk) -> None:
        """Write a chunk; FrameError if another has written any of its bytes."""
        start, end = chunk.offset, chunk.offset + chunk.payload.nbytes
        index = bisect(self._edges, start)
        is_free = index % 2 == 0 and (index == len(self._edges) or end <= self._edges[index])
        if chunk.packet_bytes != self.body.nbytes or not is_free:
            raise FrameError(f"chunks of packet {chunk.packet} of {chunk.stream!r} contradict each other")
        self._mark(start, end, index)
        self.body[start:end] = chunk.payload
        self.missing_bytes -= end - start

    def _mark(self, start: int, end: int, index: int) -> None:
        """Note a range that lies in the gap before the edge at `index`, joined with its neighbours."""
        low, high, edges = index, index, [start, end]
        if index and self._edges[index - 1] == start:
            low, edges = index - 1, edges[1:]
        if index < len(self._edges) and self._edges[index] == end:
            high, edges = index + 1, edges[:-1]
        self._edges[low:high] = edges
        if len(self._edges) > 2 * MAX_NUM_OUT_OF_ORDER:
            raise FrameError("a packet whose chunks leave too many gaps")


@dataclass(slots=True)
class _Incoming:
    """One stream: packets under way, and whole ones that wait for their turn or for the user."""

    next_packet: int = 0
    partial: dict[int, _Partial] = field(default_factory=dict)
    whole: dict[int, memoryview] = field(default_factory=dict)
    deliverable: deque[memoryview] = field(default_factory=deque)
    consumed_bytes: int = 0
    counters: StreamCounters = field(default_factory=StreamCounters)


class Inbox:
    """Puts chunks together; duplicates are dropped, gaps wait, and what is buffered is bounded.

    A packet of more than `max_packet_bytes`, half of this machine's memory unless given, ends the link.
    """

    def __init__(self, *, room: Room | None = None, max_packet_bytes: int | None = None) -> None:
        self.received = Received()
        self._room = room or Room()
        self._max_packet_bytes = max_packet_bytes or _half_of_memory_bytes()
        self._streams: dict[str, _Incoming] = {}
        self._news: set[str] = set()

    def put(self, chunk: Chunk, frame_bytes: int) -> bool:
        """Take a chunk; True if a packet has become deliverable."""
        stream = self._stream(chunk.stream)
        stream.counters.wire_bytes += wire_bytes(frame_bytes)
        if chunk.sequence in self.received:
            return False
        if chunk.sequence - self.received.cumulative > MAX_NUM_OUT_OF_ORDER:
            raise FrameError(f"chunk {chunk.sequence} is far ahead of {self.received.cumulative}")
        partial = stream.partial.get(chunk.packet) or self._open(stream, chunk)
        partial.place(chunk)
        self.received.add(chunk.sequence)
        if partial.missing_bytes:
            return False
        stream.whole[chunk.packet] = stream.partial.pop(chunk.packet).body
        return self._release(stream)

    def has(self, name: str) -> bool:
        """Whether the stream's next packet has come."""
        return bool(self._stream(name).deliverable)

    def take(self, name: str) -> Packet:
        """The stream's next packet; its bytes are credited back to the sender."""
        stream = self._stream(name)
        body = stream.deliverable.popleft()
        self._room.remove(cost_bytes(body.nbytes))
        stream.consumed_bytes += cost_bytes(body.nbytes)
        self._news.add(name)
        packet = unpack(body)
        stream.counters.packets += 1
        stream.counters.payload_bytes += packet.payload_bytes
        return packet

    def ack(self) -> Ack:
        """What has come, and what was consumed since the last acknowledgement."""
        news = sorted(self._news)[:MAX_NUM_STREAMS]
        self._news.difference_update(news)
        return Ack(
            self.received.cumulative,
            self.received.ranges(),
            tuple((name, self._streams[name].consumed_bytes) for name in news),
        )

    def repeat_consumed(self) -> None:
        """Say again what was consumed, since the connection that said it last was lost."""
        self._news.update(name for name, stream in self._streams.items() if stream.consumed_bytes)

    def counters(self) -> dict[str, StreamCounters]:
        """Per stream, what has come."""
        return {name: stream.counters.copy() for name, stream in self._streams.items()}

    def _stream(self, name: str) -> _Incoming:
        if name not in self._streams and len(self._streams) >= MAX_NUM_STREAMS:
            raise FrameError(f"more than {MAX_NUM_STREAMS} streams on one link")
        return self._streams.setdefault(name, _Incoming())

    def _open(self, stream: _Incoming, chunk: Chunk) -> _Partial:
        if chunk.packet < stream.next_packet or chunk.packet in stream.whole:
            raise FrameError(f"packet {chunk.packet} of {chunk.stream!r} comes a second time")
        cost = cost_bytes(chunk.packet_bytes)
        if not self._room.is_fair(cost, num_streams=len(self._streams)):
            raise FrameError(f"packet {chunk.packet} of {chunk.stream!r} is beyond what this link may buffer")
        partial = self._allocate(chunk.packet_bytes)
        self._room.add(cost)
        stream.partial[chunk.packet] = partial
        return partial

    def _allocate(self, num_bytes: int) -> _Partial:
        if num_bytes <= self._max_packet_bytes:
            try:
                return _Partial(num_bytes)
            except MemoryError:
                pass
        raise LinkError(
            f"a message of {format_bytes(num_bytes)} does not fit into the memory of this machine",
            hint="make it smaller, such as by more micro-batches",
        )

    def _release(self, stream: _Incoming) -> bool:
        before = stream.next_packet
        while stream.next_packet in stream.whole:
            stream.deliverable.append(stream.whole.pop(stream.next_packet))
            stream.next_packet += 1
        return stream.next_packet > before


def _half_of_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


CONTROL_LANE = 0
EXPRESS_LANE = 1
FIRST_STRIPE = 2

MANY_SAMPLES = 32
MAX_NUM_UNANSWERED = 64

ControlFrame = Ping | Pong | Ack | Abort | Close


class Exchange:
    """Outbox, inbox, clock and the failure that ends them, behind one condition."""

    def __init__(self, *, flight: Flight, stream_window_bytes: int, ping_interval_s: float) -> None:
        self.failure: LinkError | None = None
        self.clock = PeerClock()
        self.last_word: Abort | Close | None = None
        self._changed = threading.Condition()
        self._flight = flight
        self._outbox = Outbox(flight, stream_window_bytes=stream_window_bytes)
        self._inbox = Inbox()
        self._ping_interval_s = ping_interval_s
        self._pinged_s = 0.0
        self._unanswered: deque[tuple[Ping, int]] = deque(maxlen=MAX_NUM_UNANSWERED)
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
        """Wait until the control connection stands."""
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
                rtt_s=self.clock.rtt_s,
                clock_offset_s=self.clock.offset_s,
                reconnects=sum(count - 1 for count in self._num_opened.values()),
                queued_bytes=self._outbox.queued_bytes,
                in_flight_bytes=self._flight.in_flight_bytes,
            )

    def fail(self, error: LinkError, *, last_word: Abort | Close | None = None) -> bool:
        """End it for all threads; False if it had ended before."""
        with self._changed:
            if self.failure is not None:
                return False
            # In this order, for whoever sees the failure without the lock must find the word.
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
        """A connection stands."""
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
        """A connection is gone; what it carried must go again."""
        with self._changed:
            if lane == CONTROL_LANE:
                self._is_up = False
            else:
                self._outbox.close_lane(lane)

    def next_chunk(self, lane: int) -> bytes | None:
        """The next chunk for a lane."""
        with self._changed:
            return self._outbox.next_frame(lane, now_s=time.monotonic())

    def next_control(self) -> list[ControlFrame]:
        """All that the control connection has to say now."""
        frames: list[ControlFrame] = []
        with self._changed:
            if self._ack_due:
                self._ack_due = False
                frames.append(self._inbox.ack())
        while self._unanswered:
            ping, received_ns = self._unanswered.pop()
            frames.append(Pong(ping.sent_ns, received_ns, steady_ns()))
        if time.monotonic() - self._pinged_s >= self.ping_interval_s:
            self._pinged_s = time.monotonic()
            frames.append(Ping(steady_ns()))
        if self.last_word is not None:
            frames.append(self.last_word)
        return frames

    @property
    def ping_interval_s(self) -> float:
        """Short while the clock offset is still rough."""
        return 0.1 if self.clock.num_samples < MANY_SAMPLES else self._ping_interval_s

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

    def on_ping(self, ping: Ping, received_ns: int) -> None:
        """The peer wants a sign of life."""
        self._unanswered.append((ping, received_ns))

    def on_pong(self, pong: Pong, received_ns: int) -> None:
        """The peer has given one."""
        rtt_s = self.clock.observe(pong, received_ns=received_ns)
        if rtt_s is not None:
            with self._changed:
                self._flight.observe_rtt(rtt_s, now_s=time.monotonic())
