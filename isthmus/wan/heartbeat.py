"""Heartbeats between two ends: one codec, `Ping` and `Pong`, for links, gateways and the ranks of a cloud.

Each end pings at an interval and answers the pings of the other. Round trip and clock offset follow from
the answers, and a peer that is silent for longer than a time-out is lost. Links carry heartbeats among their
other frames; a `Channel` carries them over a plain stream, for registrations and for ranks of a cloud.
"""

import asyncio
import time
from collections import deque

from isthmus.errors import FrameError
from isthmus.events import steady_ns
from isthmus.wan.packet import ControlFrame, Frame, Ping, Pong, decode, encode

# The longest reason of an abort, if JSON escapes all of it, and more.
MAX_LINE_BYTES = 32 * 1024

_NUM_SAMPLES_KEPT = 32
_MAX_NUM_UNANSWERED = 64
# While the clock offset is still rough.
_FIRST_INTERVAL_S = 0.1


class Heartbeat:
    """Says which heartbeats are due, and for how long the peer has been silent since it was first heard.

    Round trip and clock offset follow from pings; the sample with the shortest round trip is the most exact.
    """

    def __init__(self, *, interval_s: float, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._interval_s = interval_s
        self._heard_s: float | None = None
        self._pinged_s = 0.0
        self._unanswered: deque[tuple[Ping, int]] = deque(maxlen=_MAX_NUM_UNANSWERED)
        self._samples: deque[tuple[float, float]] = deque(maxlen=_NUM_SAMPLES_KEPT)

    @property
    def interval_s(self) -> float:
        """The time between two pings; short while there are few samples."""
        is_rough = len(self._samples) < _NUM_SAMPLES_KEPT
        return min(self._interval_s, _FIRST_INTERVAL_S) if is_rough else self._interval_s

    @property
    def silent_s(self) -> float:
        """For how long nothing was heard of a peer that was heard before."""
        return 0.0 if self._heard_s is None else time.monotonic() - self._heard_s

    @property
    def is_lost(self) -> bool:
        """Whether the peer has been silent for too long."""
        return self.silent_s > self.timeout_s

    @property
    def rtt_s(self) -> float | None:
        """The shortest of the latest round trips."""
        return min(self._samples)[0] if self._samples else None

    @property
    def offset_s(self) -> float | None:
        """What to add to our clock to get the peer's."""
        return min(self._samples)[1] if self._samples else None

    @property
    def rtts_s(self) -> list[float]:
        """The latest round trips, oldest first."""
        return [rtt_s for rtt_s, _ in self._samples]

    def heard(self) -> None:
        """Note a sign of life."""
        self._heard_s = time.monotonic()

    def take(self, frame: Ping | Pong, *, received_ns: int) -> float | None:
        """Take a heartbeat in; gives the round trip of an answer that does not contradict itself."""
        if isinstance(frame, Ping):
            self._unanswered.append((frame, received_ns))
            return None
        waited_ns = received_ns - frame.sent_ns
        rtt_s = (waited_ns - (frame.answered_ns - frame.received_ns)) / 1e9
        if not 0 <= rtt_s <= waited_ns / 1e9:
            return None
        self._samples.append(
            (rtt_s, (frame.received_ns - frame.sent_ns + frame.answered_ns - received_ns) / 2e9)
        )
        return rtt_s

    def due(self) -> list[Ping | Pong]:
        """The heartbeats to send now."""
        frames: list[Ping | Pong] = []
        while self._unanswered:
            ping, received_ns = self._unanswered.pop()
            frames.append(Pong(ping.sent_ns, received_ns, steady_ns()))
        if time.monotonic() - self._pinged_s >= self.interval_s:
            self._pinged_s = time.monotonic()
            frames.append(Ping(steady_ns()))
        return frames


class Channel:
    """Control frames over a stream, one a line; reading sends and answers heartbeats.

    The stream's reader must limit its lines to MAX_LINE_BYTES.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heartbeat: Heartbeat
    ) -> None:
        self.heartbeat = heartbeat
        self._reader = reader
        self._writer = writer
        heartbeat.heard()

    @property
    def host(self) -> str:
        """The address of the peer."""
        return str((self._writer.get_extra_info("peername") or ("a peer that has left",))[0])

    def write(self, frame: ControlFrame) -> None:
        """Send a frame; what ended a connection is told to the reader."""
        self._writer.write(encode(frame) + b"\n")

    async def read(self) -> Frame:
        """The next frame that is no heartbeat; TimeoutError if the peer is silent, OSError at the end."""
        while True:
            for due in self.heartbeat.due():
                self.write(due)
            try:
                async with asyncio.timeout(self.heartbeat.interval_s):
                    frame = await self._next()
            except TimeoutError:
                if self.heartbeat.is_lost:
                    raise TimeoutError(f"it has been silent for {self.heartbeat.timeout_s:g} s") from None
                continue
            self.heartbeat.heard()
            if not isinstance(frame, Ping | Pong):
                return frame
            self.heartbeat.take(frame, received_ns=steady_ns())

    async def _next(self) -> Frame:
        try:
            line = await self._reader.readline()
        except ValueError:
            raise FrameError(f"a line is longer than {MAX_LINE_BYTES} bytes") from None
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection has ended")
        return decode(line)

    def close(self) -> None:
        """End the connection behind what was written."""
        self._writer.close()
