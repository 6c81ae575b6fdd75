"""What a link has counted."""

from dataclasses import dataclass, replace


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
        """A snapshot."""
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
