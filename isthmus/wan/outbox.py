"""The sending half of a link, without input or output: packets in, chunks out, by priority and window."""

from collections import Counter, deque
from dataclasses import dataclass, field

from isthmus.errors import FrameError
from isthmus.plan.types import Priority
from isthmus.wan.inbox import Room, cost_bytes
from isthmus.wan.packet import MAX_CHUNK_BYTES, Ack, Body, encode_chunk, wire_bytes

GAIN = 2.0
MIN_CHUNK_BYTES = 16 * 1024
MIN_WINDOW_BYTES = 4 * MIN_CHUNK_BYTES
MAX_WINDOW_BYTES = 512 * 1024 * 1024
CHUNK_DURATION_S = 0.008
# Acknowledgements are gathered and threads wake late; without this slack a short pipe would run dry.
SLACK_S = 0.01
MEMORY_S = 10.0


class Extreme:
    """The largest value of the last seconds, in two halves so that old values fade."""

    def __init__(self, memory_s: float) -> None:
        self._half_s = memory_s / 2
        self._turned_s = 0.0
        self._old: float | None = None
        self._new: float | None = None

    @property
    def value(self) -> float | None:
        """The largest, or None before the first."""
        return max((v for v in (self._old, self._new) if v is not None), default=None)

    def add(self, value: float, *, now_s: float) -> None:
        if self._new is None or now_s - self._turned_s > self._half_s:
            self._old, self._new, self._turned_s = self._new, value, now_s
        else:
            self._new = max(self._new, value)


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """What was known when a chunk left, so that its acknowledgement gives a rate."""

    num_bytes: int
    delivered_bytes: int
    delivered_s: float
    idle: bool


class Flight:
    """Bytes under way and the window that bounds them."""

    def __init__(self, *, bandwidth_bps: float | None = None, rtt_s: float | None = None) -> None:
        self.in_flight_bytes = 0
        self._delivered_bytes = 0
        self._delivered_s = 0.0
        self._idle_until_bytes = 0
        self._rate = Extreme(MEMORY_S)
        self._negative_rtt = Extreme(3 * MEMORY_S)
        self._start_bytes_per_s = (bandwidth_bps or 50e6) / 8
        self._start_rtt_s = 0.05 if rtt_s is None else rtt_s

    @property
    def rate_bytes_per_s(self) -> float:
        """The delivery rate that was reached lately, before that the one hoped for."""
        return self._rate.value or self._start_bytes_per_s

    @property
    def rtt_s(self) -> float:
        """The shortest round trip lately, before that the one hoped for."""
        value = self._negative_rtt.value
        return self._start_rtt_s if value is None else -value

    @property
    def window_bytes(self) -> int:
        """How many bytes may be under way."""
        wanted = GAIN * self.rate_bytes_per_s * (self.rtt_s + SLACK_S)
        return int(min(max(wanted, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES))

    def chunk_bytes(self, num_lanes: int, max_bytes: int) -> int:
        """A size that occupies the line for a few milliseconds, so that what is urgent soon gets its turn.

        Small enough, too, for each lane to have several under way: one in service, others on their way.
        """
        wanted = min(self.rate_bytes_per_s * CHUNK_DURATION_S, self.window_bytes / (4 * max(num_lanes, 1)))
        return int(min(max(wanted, MIN_CHUNK_BYTES), max_bytes))

    def observe_rtt(self, rtt_s: float, *, now_s: float) -> None:
        """Take a measured round trip in."""
        self._negative_rtt.add(-rtt_s, now_s=now_s)

    def idle(self) -> None:
        """There is nothing to send: rates measured with what is under way now say little about the line."""
        self._idle_until_bytes = self._delivered_bytes + self.in_flight_bytes

    def departed(self, num_bytes: int, *, now_s: float) -> FlightRecord:
        """A chunk leaves."""
        if not self.in_flight_bytes:
            self._delivered_s = now_s
        self.in_flight_bytes += num_bytes
        idle = self._delivered_bytes < self._idle_until_bytes
        return FlightRecord(num_bytes, self._delivered_bytes, self._delivered_s, idle)

    def arrived(self, departure: FlightRecord, *, now_s: float) -> None:
        """A chunk was acknowledged."""
        self.in_flight_bytes -= departure.num_bytes
        self._delivered_bytes += departure.num_bytes
        self._delivered_s = now_s
        elapsed_s = now_s - departure.delivered_s
        if elapsed_s <= 0:
            return
        rate = (self._delivered_bytes - departure.delivered_bytes) / elapsed_s
        if not departure.idle or rate > self.rate_bytes_per_s:
            self._rate.add(rate, now_s=now_s)

    def dropped(self, departure: FlightRecord) -> None:
        """A chunk was lost with its connection."""
        self.in_flight_bytes -= departure.num_bytes


@dataclass(slots=True)
class _Outgoing:
    """One stream as its sender sees it; `costs_bytes` are of the packets that were not consumed yet."""

    next_packet: int = 0
    put_bytes: int = 0
    consumed_bytes: int = 0
    costs_bytes: deque[int] = field(default_factory=deque)

    @property
    def outstanding_bytes(self) -> int:
        return self.put_bytes - self.consumed_bytes


@dataclass(slots=True)
class _Queued:
    """A packet of which `offset` bytes have been cut into chunks."""

    stream: str
    packet: int
    priority: Priority
    body: Body
    offset: int = 0


@dataclass(slots=True, eq=False)
class _Piece:
    """A chunk without acknowledgement yet; it keeps its packet's memory alive until then."""

    sequence: int
    offset: int
    num_bytes: int
    queued: _Queued
    lane: int = field(init=False)
    departure: FlightRecord = field(init=False)

    def encode(self) -> bytes:
        queued = self.queued
        return encode_chunk(
            sequence=self.sequence,
            stream=queued.stream,
            packet=queued.packet,
            packet_bytes=queued.body.num_bytes,
            offset=self.offset,
            pieces=queued.body.slice(self.offset, self.offset + self.num_bytes),
        )


@dataclass(slots=True)
class _Lane:
    """A connection: what it carries without acknowledgement, and when it last got one."""

    is_express: bool
    progress_s: float
    carried_bytes: int = 0


class Outbox:
    """Orders packets by priority, cuts them into chunks and keeps each chunk until it was acknowledged."""

    def __init__(self, flight: Flight, *, stream_window_bytes: int, room: Room | None = None) -> None:
        self.flight = flight
        self._stream_window_bytes = stream_window_bytes
        self._room = room or Room()
        self._streams: dict[str, _Outgoing] = {}
        self._queues: tuple[deque[_Queued], ...] = tuple(deque() for _ in Priority)
        self._lost: deque[_Piece] = deque()
        self._under_way: dict[int, _Piece] = {}
        self._lanes: dict[int, _Lane] = {}
        self._next_sequence = 0
        self.sent_bytes: Counter[str] = Counter()
        """What each stream has cost on the line, with headers, encryption and whatever was sent twice."""

    @property
    def empty(self) -> bool:
        """True when everything put was acknowledged."""
        return not (self._under_way or self._lost or any(self._queues))

    @property
    def queued_bytes(self) -> int:
        """What was put and has not departed."""
        return sum(queued.body.num_bytes - queued.offset for queue in self._queues for queued in queue)

    def has_room(self, stream: str, num_bytes: int) -> bool:
        """Whether a packet of that size may be put now: into an idle stream, or within its window.

        In any case the receiver must have room for it.
        """
        outstanding_bytes = self._streams.setdefault(stream, _Outgoing()).outstanding_bytes
        cost = cost_bytes(num_bytes)
        is_within = not outstanding_bytes or outstanding_bytes + cost <= self._stream_window_bytes
        return is_within and self._room.fits(cost, stream_bytes=outstanding_bytes)

    def put(self, stream: str, body: Body, priority: Priority) -> None:
        outgoing = self._streams.setdefault(stream, _Outgoing())
        self._queues[priority].append(_Queued(stream, outgoing.next_packet, priority, body))
        cost = cost_bytes(body.num_bytes)
        outgoing.next_packet += 1
        outgoing.put_bytes += cost
        outgoing.costs_bytes.append(cost)
        self._room.add(cost)

    def open_lane(self, lane: int, *, is_express: bool = False, now_s: float) -> None:
        """A connection is there to carry chunks; an express lane takes nothing but what is urgent."""
        self._lanes[lane] = _Lane(is_express, now_s)

    def close_lane(self, lane: int) -> None:
        """A connection has ended: what it carried without acknowledgement is sent again, before the rest."""
        self._lanes.pop(lane, None)
        lost = [item for item in self._under_way.values() if item.lane == lane]
        for item in lost:
            del self._under_way[item.sequence]
            self.flight.dropped(item.departure)
        self._lost.extend(lost)

    def stalled_since_s(self, lane: int) -> float | None:
        """When the lane last made progress, if it carries anything now."""
        state = self._lanes.get(lane)
        return state.progress_s if state is not None and state.carried_bytes else None

    def next_frame(self, lane: int, *, now_s: float) -> bytes | None:
        """The next chunk for this lane as bytes, if there is one that may depart now."""
        state = self._lanes[lane]
        last = self._lowest_priority(state)
        for priority in Priority:
            if priority > last:
                return None
            if (piece := self._lost_piece(priority) or self._fresh_piece(priority)) is not None:
                return self._depart(piece, lane, state, now_s)
        self.flight.idle()
        return None

    def acknowledge(self, ack: Ack, *, now_s: float) -> None:
        """Forget what has come, and take back the room that was consumed."""
        if ack.cumulative > self._next_sequence or any(high >= self._next_sequence for _, high in ack.ranges):
            raise FrameError("an acknowledgement of chunks that were never sent")
        # Range by range: to look for every chunk in all ranges costs a third of the rate over four stripes.
        came = [one for one in self._under_way if one < ack.cumulative]
        for low, high in ack.ranges:
            came += [one for one in range(low, high + 1) if one in self._under_way]
        for sequence in came:
            item = self._under_way.pop(sequence)
            self.flight.arrived(item.departure, now_s=now_s)
            if item.lane in self._lanes:
                self._lanes[item.lane].carried_bytes -= item.num_bytes
                self._lanes[item.lane].progress_s = now_s
        if self._lost:
            # A chunk may be acknowledged after its connection was given up and before it was sent again.
            self._lost = deque(item for item in self._lost if not _covers(ack, item.sequence))
        for stream, consumed_bytes in ack.consumed_bytes:
            self._consume(stream, consumed_bytes)

    def _consume(self, stream: str, consumed_bytes: int) -> None:
        outgoing = self._streams.get(stream)
        if outgoing is None or consumed_bytes > outgoing.put_bytes:
            raise FrameError(f"the peer consumed more of {stream!r} than was sent")
        while outgoing.costs_bytes and outgoing.consumed_bytes + outgoing.costs_bytes[0] <= consumed_bytes:
            cost = outgoing.costs_bytes.popleft()
            outgoing.consumed_bytes += cost
            self._room.remove(cost)

    @property
    def _num_stripes(self) -> int:
        return max(sum(not lane.is_express for lane in self._lanes.values()), 1)

    def _lowest_priority(self, lane: _Lane) -> Priority:
        """The least important traffic that the window has room for on this lane."""
        window_bytes, in_flight_bytes = self.flight.window_bytes, self.flight.in_flight_bytes
        # No connection may gather more than its share: others would starve, and packets would wait for it.
        share_bytes = window_bytes / self._num_stripes
        if lane.is_express or in_flight_bytes >= window_bytes or lane.carried_bytes >= share_bytes:
            return Priority.URGENT
        # Half of the window is one bandwidth-delay product: background fills the pipe but builds no queue.
        return Priority.NORMAL if 2 * in_flight_bytes >= window_bytes else Priority.BACKGROUND

    def _lost_piece(self, priority: Priority) -> _Piece | None:
        for item in self._lost:
            if item.queued.priority == priority:
                self._lost.remove(item)
                return item
        return None

    def _fresh_piece(self, priority: Priority) -> _Piece | None:
        queue = self._queues[priority]
        if not queue:
            return None
        queued = queue[0]
        offset = queued.offset
        wanted_bytes = self.flight.chunk_bytes(self._num_stripes, MAX_CHUNK_BYTES)
        queued.offset = min(offset + wanted_bytes, queued.body.num_bytes)
        if queued.offset == queued.body.num_bytes:
            queue.popleft()
        self._next_sequence += 1
        return _Piece(self._next_sequence - 1, offset, queued.offset - offset, queued)

    def _depart(self, piece: _Piece, lane: int, state: _Lane, now_s: float) -> bytes:
        piece.lane, piece.departure = lane, self.flight.departed(piece.num_bytes, now_s=now_s)
        self._under_way[piece.sequence] = piece
        if not state.carried_bytes:
            state.progress_s = now_s
        state.carried_bytes += piece.num_bytes
        frame = piece.encode()
        self.sent_bytes[piece.queued.stream] += wire_bytes(len(frame))
        return frame


def _covers(ack: Ack, sequence: int) -> bool:
    return sequence < ack.cumulative or any(low <= sequence <= high for low, high in ack.ranges)
