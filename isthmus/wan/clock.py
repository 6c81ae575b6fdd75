"""The other cloud's clock, so that spans of different clouds can be laid on one time axis."""

from collections import deque

from isthmus.wan.frames import Pong

NUM_SAMPLES_KEPT = 32


class PeerClock:
    """Round trip and clock offset from pings; the sample with the shortest round trip is the most exact."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=NUM_SAMPLES_KEPT)
        self.num_samples = 0

    def observe(self, pong: Pong, *, received_ns: int) -> float | None:
        """Take an answer in and give its round trip; one that contradicts itself is not believed."""
        waited_ns = received_ns - pong.sent_ns
        rtt_s = (waited_ns - (pong.answered_ns - pong.received_ns)) / 1e9
        if waited_ns < 0 or not 0 <= rtt_s <= waited_ns / 1e9:
            return None
        offset_s = (pong.received_ns - pong.sent_ns + pong.answered_ns - received_ns) / 2e9
        self._samples.append((rtt_s, offset_s))
        self.num_samples += 1
        return rtt_s

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
