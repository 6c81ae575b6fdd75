"""A virtual clock: calls in the order of their times, and work at a pace that faults change."""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any


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
    """From `start_s` to `end_s` everything takes `factor` times as long; infinity is a standstill."""

    start_s: float
    end_s: float
    factor: float


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
