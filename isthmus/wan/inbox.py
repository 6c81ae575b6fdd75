"""The receiving half of a link, without input or output: chunks in, packets out, each once and in order."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from isthmus.errors import FrameError
from isthmus.wan.counters import StreamCounters
from isthmus.wan.frames import MAX_NUM_RANGES, MAX_NUM_STREAMS, Ack, Chunk, wire_bytes
from isthmus.wan.packet import MAX_PACKET_BYTES, Packet, unpack

MAX_NUM_OUT_OF_ORDER = 65_536
MAX_HELD_BYTES = 4 * MAX_PACKET_BYTES


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
    """A packet of which chunks are still to come."""

    def __init__(self, num_bytes: int) -> None:
        # Memory that is reserved but not written costs nothing: a peer that only announces cannot exhaust us.
        self.body = np.empty(num_bytes, dtype=np.uint8).data
        self.missing_bytes = num_bytes

    def place(self, chunk: Chunk) -> None:
        if chunk.packet_bytes != self.body.nbytes or chunk.payload.nbytes > self.missing_bytes:
            raise FrameError(f"chunks of packet {chunk.packet} of {chunk.stream!r} contradict each other")
        self.body[chunk.offset : chunk.offset + chunk.payload.nbytes] = chunk.payload
        self.missing_bytes -= chunk.payload.nbytes


@dataclass(slots=True)
class _Incoming:
    """One stream: packets under way, and whole ones that wait for their turn or for the user."""

    next_packet: int = 0
    partial: dict[int, _Partial] = field(default_factory=dict)
    whole: dict[int, memoryview] = field(default_factory=dict)
    deliverable: deque[memoryview] = field(default_factory=deque)
    held_bytes: int = 0
    consumed_bytes: int = 0
    counters: StreamCounters = field(default_factory=StreamCounters)


class Inbox:
    """Puts chunks together; duplicates are dropped, gaps wait, and what is held is bounded per stream."""

    def __init__(self) -> None:
        self.received = Received()
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
        stream.held_bytes -= body.nbytes
        stream.consumed_bytes += body.nbytes
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
        if stream.held_bytes and stream.held_bytes + chunk.packet_bytes > MAX_PACKET_BYTES:
            raise FrameError(f"stream {chunk.stream!r} is over its window")
        if sum(one.held_bytes for one in self._streams.values()) + chunk.packet_bytes > MAX_HELD_BYTES:
            raise FrameError("the streams of this link hold too much together")
        stream.held_bytes += chunk.packet_bytes
        partial = _Partial(chunk.packet_bytes)
        stream.partial[chunk.packet] = partial
        return partial

    def _release(self, stream: _Incoming) -> bool:
        before = stream.next_packet
        while stream.next_packet in stream.whole:
            stream.deliverable.append(stream.whole.pop(stream.next_packet))
            stream.next_packet += 1
        return stream.next_packet > before
