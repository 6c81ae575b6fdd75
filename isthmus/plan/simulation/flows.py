"""Messages on one direction of a line: shared fairly, in order within a stream, then under way.

The head of every stream gets an equal part of the bandwidth at each moment (processor sharing). It is
computed exactly and without small steps: a virtual clock counts the bytes that each head has got since the
line was last idle, so a head ends when that clock passes its size, whoever else comes and goes.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Final

from isthmus.plan.simulation.clockwork import Clock, Pace, Slowdown

# Heads that end together but for the last bits of their sums end together.
_SAME_SHARE: Final = 1e-12

Then = Callable[[], None]


class FairQueue:
    """Jobs of so many bytes that share a rate in equal parts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rate = 0.0
        self._each_bytes = 0.0
        self._counted_s = 0.0
        self._jobs: list[tuple[float, int, Then]] = []
        self._number = count()
        self._version = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._jobs

    def add(self, num_bytes: float, then: Then) -> None:
        """Begin a job; `then` follows when it is done."""
        self._count()
        heapq.heappush(self._jobs, (self._each_bytes + num_bytes, next(self._number), then))
        self._expect()

    def set_rate(self, bytes_per_s: float) -> None:
        """Go on at another rate."""
        if bytes_per_s != self._rate:
            self._count()
            self._rate = bytes_per_s
            self._expect()

    def _count(self) -> None:
        now_s = self._clock.now_s
        if not self._jobs:
            self._each_bytes = 0.0
        elif now_s > self._counted_s:
            self._each_bytes += (now_s - self._counted_s) * self._rate / len(self._jobs)
        self._counted_s = now_s

    def _expect(self) -> None:
        self._version += 1
        if self._jobs and self._rate:
            left_bytes = max(0.0, self._jobs[0][0] - self._each_bytes)
            end_s = self._clock.now_s + left_bytes * len(self._jobs) / self._rate
            self._clock.at(end_s, self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._count()
        jobs = self._jobs
        self._each_bytes = jobs[0][0]
        ended = []
        while jobs and jobs[0][0] <= self._each_bytes * (1 + _SAME_SHARE):
            ended.append(heapq.heappop(jobs)[2])
        self._expect()
        for then in ended:
            then()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Nothing leaves the line from `start_s` to `end_s`; what it loses is sent again and travels again."""

    start_s: float
    end_s: float
    loses: bool


@dataclass(slots=True)
class _Stream:
    """Messages of one pair of ranks, of which the first is on the line."""

    waiting: deque[tuple[int, Then]] = field(default_factory=deque)
    arrival_s: float = 0.0


class Flow:
    """One direction of a line; a background takes what messages leave, and `share` of the line at least."""

    def __init__(
        self,
        clock: Clock,
        *,
        bandwidth_bps: float,
        delay_s: float,
        latency_s: float = 0.0,
        jitter_s: float = 0.0,
        seed: str = "",
        slowdowns: Iterable[Slowdown] = (),
        outages: Iterable[Outage] = (),
        share: float = 0.0,
    ) -> None:
        self.num_bytes = 0
        """What has crossed, without the background."""
        self.background_bytes = 0
        self._clock = clock
        self._bytes_per_s = bandwidth_bps / 8
        self.latency_s = latency_s
        """The part of the delay that the line itself takes."""
        self._delay_s = delay_s
        self._jitter_s = jitter_s
        self._random = Random(seed)  # noqa: S311 - jitter is no secret
        self._outages = sorted(outages, key=lambda one: one.start_s)
        self._share = share
        self._speed = 1.0
        self._streams: dict[Hashable, _Stream] = {}
        self._messages = FairQueue(clock)
        self._background = FairQueue(clock)
        standstills = [Slowdown(start_s=o.start_s, end_s=o.end_s, factor=math.inf) for o in self._outages]
        for time_s, speed in Pace([*slowdowns, *standstills]).changes:
            clock.at(time_s, self._change_speed, speed)
        self._divide()

    def send(self, stream: Hashable, num_bytes: int, *, sent: Then, arrived: Then) -> None:
        """Send a message behind those of its stream; `sent` follows when the line has taken all of it."""
        queue = self._streams.get(stream)
        if queue is None:
            queue = self._streams[stream] = _Stream()

        def on_sent() -> None:
            self.num_bytes += num_bytes
            queue.waiting.popleft()
            if queue.waiting:
                self._messages.add(*queue.waiting[0])
            else:
                self._divide()
            queue.arrival_s = max(queue.arrival_s, self.arrival_s(self._draw_latency_s()))
            self._clock.at(queue.arrival_s, arrived)
            sent()

        queue.waiting.append((num_bytes, on_sent))
        if len(queue.waiting) == 1:
            self._messages.add(num_bytes, on_sent)
            self._divide()

    def send_in_background(self, num_bytes: int, *, arrived: Then) -> None:
        """Send something that may wait."""

        def on_sent() -> None:
            self.background_bytes += num_bytes
            self._divide()
            self._clock.at(self.arrival_s(self._delay_s), arrived)

        self._background.add(num_bytes, on_sent)
        self._divide()

    def whisper(self, arrived: Then) -> None:
        """Send something urgent that is too small to count."""
        self._clock.at(self.arrival_s(self._delay_s), arrived)

    def arrival_s(self, latency_s: float) -> float:
        """When something arrives that leaves now."""
        leaves_s = self._clock.now_s
        for outage in self._outages:
            if outage.start_s <= leaves_s + latency_s and leaves_s < outage.end_s:
                leaves_s = outage.end_s if outage.loses else max(leaves_s, outage.end_s - latency_s)
        return leaves_s + latency_s

    def _draw_latency_s(self) -> float:
        return self._delay_s + (self._random.uniform(0.0, self._jitter_s) if self._jitter_s else 0.0)

    def _change_speed(self, speed: float) -> None:
        self._speed = speed
        self._divide()

    def _divide(self) -> None:
        """Share the line between messages and background; without a background messages have all of it."""
        rate = self._bytes_per_s * self._speed
        if self._background.is_idle:
            self._messages.set_rate(rate)
        elif self._messages.is_idle:
            self._background.set_rate(rate)
        else:
            self._background.set_rate(rate * self._share if self._share else 0.0)
            self._messages.set_rate(rate * (1 - self._share))
