"""The clock of the simulator, and the lines between clouds with their faults and routes.

Messages on one direction of a line share it fairly, in order within a stream. The head of every stream gets
an equal part of the bandwidth at each moment (processor sharing). It is computed exactly and without small
steps: a virtual clock counts the bytes that each head has got since the line was last idle, so a head ends
when that clock passes its size, whichever heads come and go.
"""

import heapq
import math
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, count, pairwise
from random import Random
from typing import Any, Final

from isthmus.job.faults import CloudFault, CloudFaultKind, Fault, FaultKind
from isthmus.plan.scenario import Line
from isthmus.plan.types import Arrived, Carried, Event, Joined


class Clock:
    """Makes calls when their time has come; what comes from outside goes before what ends at that time.

    A worker sees all that arrived while it computed before it chooses what to compute next.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._pending: list[tuple[float, bool, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()
        self._is_stopped = False

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make this call at that time."""
        heapq.heappush(self._pending, (time_s, False, next(self._number), call, arguments))

    def at_end(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make this call at that time, after all others of that time."""
        heapq.heappush(self._pending, (time_s, True, next(self._number), call, arguments))

    def stop(self) -> None:
        """Make no more calls."""
        self._is_stopped = True

    def run(self) -> None:
        """Make calls until none is left."""
        pending = self._pending
        while pending and not self._is_stopped:
            self.now_s, _, _, call, arguments = heapq.heappop(pending)
            call(*arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """From `start_s` to `end_s` everything takes `factor` times as long; infinity is an outage.

    What an outage `loses` is sent again and travels again.
    """

    start_s: float
    end_s: float
    factor: float = math.inf
    loses: bool = False


class Pace:
    """How fast work goes on at each time: 1 is as planned, 0 is not at all."""

    def __init__(self, slowdowns: Iterable[Slowdown] = ()) -> None:
        known = tuple(slowdowns)
        edges = sorted({edge_s for one in known for edge_s in (one.start_s, one.end_s)})
        self.changes = tuple((edge_s, _speed(known, edge_s)) for edge_s in edges)
        """When the speed changes, and to what."""
        self._edges = edges

    def end_s(self, start_s: float, work_s: float) -> float:
        """When work ends that takes `work_s` as planned."""
        if not self._edges:
            return start_s + work_s
        place = bisect_right(self._edges, start_s)
        if place == len(self._edges):
            return start_s + work_s
        speed = self.changes[place - 1][1] if place else 1.0
        for edge_s, next_speed in self.changes[place:]:
            done_s = (edge_s - start_s) * speed
            if done_s >= work_s:
                break
            start_s, work_s, speed = edge_s, work_s - done_s, next_speed
        return start_s + work_s / speed


def _speed(slowdowns: Iterable[Slowdown], time_s: float) -> float:
    speed = 1.0
    for one in slowdowns:
        if one.start_s <= time_s < one.end_s:
            speed /= one.factor
    return speed


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
        line: Line,
        bandwidth_bps: float,
        *,
        seed: str = "",
        slowdowns: Iterable[Slowdown] = (),
        share: float = 0.0,
    ) -> None:
        self.num_bytes = 0
        """What has crossed, without the background."""
        self.background_bytes = 0
        self.line = line
        self._clock = clock
        self._bytes_per_s = bandwidth_bps / 8
        self._delay_s = line.delay_s
        self._random = Random(seed)  # noqa: S311 - jitter is no secret
        slowdowns = sorted(slowdowns, key=lambda one: one.start_s)
        self._outages = [one for one in slowdowns if one.factor == math.inf]
        self._share = share
        self._speed = 1.0
        self._streams: defaultdict[Hashable, _Stream] = defaultdict(_Stream)
        self._messages = FairQueue(clock)
        self._background = FairQueue(clock)
        for time_s, speed in Pace(slowdowns).changes:
            clock.at(time_s, self._change_speed, speed)
        self._divide()

    def send(self, stream: Hashable, num_bytes: int, *, sent: Then, arrived: Then) -> None:
        """Send a message behind those of its stream; `sent` follows when the line has taken all of it."""
        queue = self._streams[stream]

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
        jitter_s = self.line.jitter_s
        return self._delay_s + (self._random.uniform(0.0, jitter_s) if jitter_s else 0.0)

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
            self._background.set_rate(rate * self._share)
            self._messages.set_rate(rate * (1 - self._share))


Disturbance = Fault | CloudFault

# A connection that was cut is opened again: TCP, TLS, then the link's own handshake.
_RECONNECT_ROUND_TRIPS: Final = 3
# A frozen process computes this many times slower.
_FROZEN: Final = 1e9


def open_flows(
    clock: Clock,
    lines: Mapping[tuple[str, str], Line],
    *,
    seed: int,
    faults: Sequence[Disturbance] = (),
    share: float = 0.0,
) -> dict[tuple[str, str], Flow]:
    """Both directions of all lines, by sender and receiver; a background gets `share` of each at least."""
    flows = {}
    for index, ((first, second), line) in enumerate(lines.items()):
        on_line = faults_between(faults, first, second)
        slowdowns = _slowdowns(one for one in on_line if one.kind is FaultKind.SLOW_DOWN)
        ways = ((first, second, line.down_bps, "down"), (second, first, line.up_bps, "up"))
        for sender, receiver, bandwidth_bps, name in ways:
            flows[sender, receiver] = Flow(
                clock,
                line,
                bandwidth_bps,
                seed=f"{seed}/{index}/{name}",
                slowdowns=[*slowdowns, *outages_of(on_line, latency_s=line.latency_s)],
                share=share,
            )
    return flows


def faults_between(faults: Iterable[Disturbance], first: str, second: str) -> list[Fault]:
    """The faults of one line."""
    return [one for one in faults if isinstance(one, Fault) and set(one.between) == {first, second}]


def pace_of(faults: Iterable[Disturbance], cloud: str) -> Pace:
    """How fast a cloud computes at each time."""
    on_cloud = (one for one in faults if isinstance(one, CloudFault) and one.cloud == cloud)
    slow = [one for one in on_cloud if one.kind in (CloudFaultKind.SLOW, CloudFaultKind.FREEZE)]
    return Pace(_slowdowns(replace(one, factor=_FROZEN) if one.factor == 1 else one for one in slow))


def _slowdowns(faults: Iterable[Disturbance]) -> list[Slowdown]:
    return [
        Slowdown(start_s=fault.at_s, end_s=fault.at_s + fault.duration_s, factor=fault.factor)
        for fault in faults
    ]


def outages_of(faults: Iterable[Fault], *, latency_s: float) -> list[Slowdown]:
    """When a line carries nothing; corruption costs one connection of several, which is not counted."""
    reconnect_s = _RECONNECT_ROUND_TRIPS * 2 * latency_s
    outages = []
    for fault in faults:
        end_s = fault.at_s + fault.duration_s
        if fault.kind is FaultKind.CUT:
            outages.append(Slowdown(start_s=fault.at_s, end_s=end_s + reconnect_s, loses=True))
        elif fault.kind is FaultKind.BLACKHOLE:
            outages.append(Slowdown(start_s=fault.at_s, end_s=end_s))
    return outages


class Way:
    """The clouds that a message passes on its way, and what wires measure between its ends."""

    def __init__(self, clouds: Sequence[str], flows: Mapping[tuple[str, str], Flow]) -> None:
        self.clouds = clouds
        self.track = f"{clouds[0]}→{clouds[-1]}"
        self.flows = [flows[hop] for hop in pairwise(clouds)]
        self._rtt_s = 2 * sum(flow.line.latency_s for flow in self.flows)
        self._facts: dict[tuple[float, int], Carried] = {}

    def facts(self, coding_s: float, num_bytes: int) -> Carried:
        """What a wire measures, which is the same for most messages."""
        known = self._facts.get((coding_s, num_bytes))
        if known is None:
            known = Carried(coding_s=coding_s, rtt_s=self._rtt_s, num_bytes=num_bytes)
            self._facts[coding_s, num_bytes] = known
        return known


class Sight:
    """Routes messages over the fewest lines, and counts the sessions of each pair of clouds.

    What was sent in one session does not arrive in the next: a link drops it.
    """

    def __init__(self, lines: Iterable[tuple[str, str]], flows: Mapping[tuple[str, str], Flow]) -> None:
        self._flows = flows
        self._ways: dict[tuple[str, str], Way] = {}
        self._neighbours: defaultdict[str, list[str]] = defaultdict(list)
        for first, second in lines:
            self._neighbours[first].append(second)
            self._neighbours[second].append(first)
        self._sessions: Counter[frozenset[str]] = Counter()
        self._causes: Counter[frozenset[str]] = Counter()

    def way(self, sender: str, receiver: str) -> Way:
        """The lines from one cloud to another, none inside a cloud."""
        known = self._ways.get((sender, receiver))
        if known is None:
            known = self._ways[sender, receiver] = Way(self._search(sender, receiver), self._flows)
        return known

    def routes_through(self, cloud: str, clouds: Sequence[str]) -> list[tuple[str, str]]:
        """The pairs of other clouds whose messages this one passes on."""
        return [pair for pair in combinations(clouds, 2) if cloud in self.way(*pair).clouds[1:-1]]

    def session(self, one: str, other: str) -> int:
        """The number of the session between two clouds."""
        return self._sessions[frozenset((one, other))] if self._sessions else 0

    def part(self, one: str, other: str) -> bool:
        """Count one more cause why two clouds do not reach each other; True for the first."""
        pair = frozenset((one, other))
        self._sessions[pair] += 1
        self._causes[pair] += 1
        return self._causes[pair] == 1

    def rejoin(self, one: str, other: str) -> bool:
        """Count one cause less; True where two clouds reach each other again, in a new session."""
        pair = frozenset((one, other))
        self._sessions[pair] += 1
        self._causes[pair] -= 1
        return not self._causes[pair]

    def are_parted(self, one: str, other: str) -> bool:
        """Whether two clouds have given each other up."""
        return bool(self._causes) and self._causes[frozenset((one, other))] > 0

    def silences(
        self, clouds: Sequence[str], outages: Mapping[tuple[str, str], Sequence[Slowdown]]
    ) -> Iterator[tuple[str, str, float, float]]:
        """From when to when no message gets from one cloud of a pair to the other, for each pair."""
        for one, other in combinations(clouds, 2):
            on_route = [
                outage
                for first, second in pairwise(self.way(one, other).clouds)
                for outage in outages.get((first, second)) or outages.get((second, first)) or ()
            ]
            for start_s, end_s in _merged(on_route):
                yield one, other, start_s, end_s

    def _search(self, sender: str, receiver: str) -> tuple[str, ...]:
        routes: dict[str, tuple[str, ...]] = {sender: (sender,)}
        queue = deque([sender])
        while queue and receiver not in routes:
            cloud = queue.popleft()
            for near in self._neighbours[cloud]:
                if near not in routes:
                    routes[near] = (*routes[cloud], near)
                    queue.append(near)
        if receiver not in routes:
            raise ValueError(f"no line joins {sender} and {receiver}")
        return routes[receiver]


def tells_of(event: Event, cloud: str) -> bool:
    """Whether a cloud is there by this event, or has sent it."""
    match event:
        case Arrived(message=message):
            return message.sender.cloud == cloud
        case Joined(member=member):
            return member.cloud == cloud
        case _:
            return False


def _merged(outages: Iterable[Slowdown]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for outage in sorted(outages, key=lambda one: one.start_s):
        if merged and outage.start_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], outage.end_s)
        else:
            merged.append((outage.start_s, outage.end_s))
    return merged
