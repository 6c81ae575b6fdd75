"""The receiving half of a link, without input or output: chunks in, packets out, duplicates dropped."""

import os
from bisect import bisect
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from isthmus.errors import FrameError, LinkError
from isthmus.units import format_bytes
from isthmus.wan.packet import MAX_NUM_RANGES, MAX_NUM_STREAMS, Ack, Chunk, Packet, unpack, wire_bytes

MAX_NUM_OUT_OF_ORDER = 65_536

BUDGET_BYTES: Final = 512 * 1024**2
LARGE_BYTES: Final = 256 * 1024**2
SMALL_BYTES: Final = 64 * 1024
# Python objects of a packet: without them, packets of no bytes could fill the memory.
OVERHEAD_BYTES: Final = 512


def cost_bytes(packet_bytes: int) -> int:
    """The bytes for which a packet of that size counts."""
    return packet_bytes + OVERHEAD_BYTES


class Room:
    """Counts what is buffered, in costs."""

    def __init__(self, *, budget_bytes: int = BUDGET_BYTES, large_bytes: int = LARGE_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._large_bytes = large_bytes
        self._buffered_bytes = 0
        self._num_large = 0

    def fits(self, num_bytes: int, *, stream_bytes: int) -> bool:
        """Whether a sender may add a packet to a stream of which `stream_bytes` are buffered."""
        if num_bytes > self._large_bytes:
            return not self._num_large
        is_small = stream_bytes + num_bytes <= SMALL_BYTES
        return is_small or self._buffered_bytes + num_bytes <= self._budget_bytes

    def is_fair(self, num_bytes: int, *, num_streams: int) -> bool:
        """Whether a sender that obeys `fits` can have added a packet, whatever the order of arrival."""
        if num_bytes > self._large_bytes:
            return not self._num_large
        return self._buffered_bytes + num_bytes <= self._budget_bytes + num_streams * SMALL_BYTES

    def add(self, num_bytes: int, *, sign: int = 1) -> None:
        """Count a packet that is buffered from now on."""
        if num_bytes > self._large_bytes:
            self._num_large += sign
        else:
            self._buffered_bytes += sign * num_bytes

    def remove(self, num_bytes: int) -> None:
        """Count a packet that is buffered no longer."""
        self.add(num_bytes, sign=-1)


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


class LinkInbox:
    """Puts chunks together; duplicates are dropped, gaps wait, and what is buffered is bounded.

    A packet of more than `max_packet_bytes`, half of this machine's memory unless given, ends the link.
    """

    def __init__(self, *, room: Room | None = None, max_packet_bytes: int | None = None) -> None:
        self.received = Received()
        self._room = room or Room()
        self._max_packet_bytes = max_packet_bytes or _half_of_memory_bytes()
        self._streams: dict[str, _Incoming] = {}
        self._news: set[str] = set()
        self.received_bytes: Counter[str] = Counter()
        """What each stream has cost on the line."""

    def put(self, chunk: Chunk, frame_bytes: int) -> bool:
        """Take a chunk; True if a packet has become deliverable."""
        stream = self._stream(chunk.stream)
        self.received_bytes[chunk.stream] += wire_bytes(frame_bytes)
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
        return unpack(body)

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
