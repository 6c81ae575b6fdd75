"""A link that hands packets over within one process, for what is measured without a line."""

import queue
from collections.abc import Callable, Sequence
from typing import Any

from isthmus.wan.exchange import LinkCounters
from isthmus.wan.packet import Packet, pack, wire_bytes

OnSend = Callable[[str, Packet], None]
Queue = queue.SimpleQueue[tuple[str, Packet] | BaseException]


def _ignore(_stream: str, _packet: Packet) -> None:
    return


class QueueEnd:
    """One end of the link, as a wire sees it; `on_send` is called with every packet that leaves."""

    def __init__(self, inward: Queue, outward: Queue, on_send: OnSend) -> None:
        self._inward = inward
        self._outward = outward
        self._on_send = on_send
        self.on_state: Any = None

    def send(self, stream: str, packet: Packet, **_priority: Any) -> int:
        """Hand a packet over; gives the bytes that a line would carry."""
        self._on_send(stream, packet)
        self._outward.put((stream, packet))
        return wire_bytes(pack(packet).num_bytes)

    def receive_any(self, _streams: Sequence[str], *, timeout_s: float | None = None) -> tuple[str, Packet]:
        """The next packet; raises with what the other end has failed."""
        try:
            item = self._inward.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(item, BaseException):
            raise item
        return item

    def fail(self, error: BaseException) -> None:
        """Let the other end raise this instead of waiting for ever."""
        self._outward.put(error)

    def counters(self) -> LinkCounters:
        """The state of a line that takes no time."""
        return LinkCounters(
            sent={},
            received={},
            rtt_s=0.0,
            clock_offset_s=0.0,
            reconnects=0,
            queued_bytes=0,
        )


def queue_link(first: OnSend = _ignore, second: OnSend = _ignore) -> tuple[Any, Any]:
    """Both ends, given what to call with the packets that leave each; a wire takes them for links."""
    there: Queue = queue.SimpleQueue()
    back: Queue = queue.SimpleQueue()
    return QueueEnd(back, there, first), QueueEnd(there, back, second)
