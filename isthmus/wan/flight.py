"""What is under way on a link: counters, what the receiver may hold, the flight window."""

from dataclasses import dataclass, replace
from typing import Final


@dataclass(slots=True)
class StreamCounters:
    """One stream in one direction.

    Wire bytes hold headers, encryption and whatever was sent twice; `queued_s` is summed over packets, from
    `send` to the last chunk's departure.
    """

    packets: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    queued_s: float = 0.0

    def copy(self) -> "StreamCounters":
        return replace(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounters:
    """A link's figures at one moment."""

    sent: dict[str, StreamCounters]
    received: dict[str, StreamCounters]
    rtt_s: float | None
    clock_offset_s: float | None
    reconnects: int
    queued_bytes: int
    in_flight_bytes: int


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

    def add(self, num_bytes: int) -> None:
        """Count a packet that is buffered from now on."""
        self._count(num_bytes, 1)

    def remove(self, num_bytes: int) -> None:
        """Count a packet that is buffered no longer."""
        self._count(num_bytes, -1)

    def _count(self, num_bytes: int, sign: int) -> None:
        if num_bytes > self._large_bytes:
            self._num_large += sign
        else:
            self._buffered_bytes += sign * num_bytes


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
