"""Which cloud takes which layers, and in what order the clouds stand along the pipeline.

A step takes `Σ once + max pace`: every stage and every hop is passed once from end to end, and the slowest
of them sets the pace of all that follows; so does a stage whose memory holds too few micro-batches to fill
the round trip behind it. The least such time is found exactly. Under a cap on the pace only the sum is left,
and that is a shortest walk through (clouds used, first of them, layers placed). Caps are tried by bisection:
no cap of a range gives less than its lower end and the sum under its upper end, so ranges fall out whole.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from isthmus.plan.search.walks import Key, Passage, Problem, Route, RowWalks, SetWalks, Table, Walks

# Sets of clouds are enumerated up to here; a pipeline over some of more clouds keeps the order of the job.
MAX_ANY_ORDER: Final = 10
# Sums of the same layers in another order differ in their last bits.
_SAME: Final = 1e-9
_NEXT_TO_NOTHING: Final = 0.002

Passages = Mapping[tuple[int, int], Passage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages in order: the number of the cloud of each, and where its layers end."""

    clouds: tuple[int, ...]
    stops: tuple[int, ...]
    once_s: float
    pace_s: float

    @property
    def step_s(self) -> float:
        """The time of a step."""
        return self.once_s + self.pace_s

    @property
    def ranges(self) -> tuple[range, ...]:
        """The layers of each stage."""
        return tuple(range(start, stop) for start, stop in pairwise((0, *self.stops)))


def best_partitions(
    problem: Problem,
    *,
    tolerance: float = 0.001,
    slack: float = 0.0,
    cutoff_s: float = math.inf,
    num_found: int = 1,
) -> list[Partition]:
    """The best partition first, then the best found for other sets and first clouds, up to `num_found`.

    The first is exact up to the relative `slack`; where memory bounds what is in flight, up to `tolerance`.
    There is none where every step takes `cutoff_s` or more.
    """
    caps_s = _caps(problem, tolerance)
    if not len(caps_s):
        return []
    search = _CapSearch(problem, caps_s)
    search.run(slack=slack, cutoff_s=cutoff_s)
    found = sorted(search.best(num_found), key=lambda one: (one.step_s, one.clouds, one.stops))
    return found if found and found[0].step_s < cutoff_s else []


def refined(problem: Problem, partition: Partition) -> Partition:
    """The best cut for the same clouds in the same order, and an equal one where that is nearly as good.

    What was found beside the best is found for the sake of its clouds; it may have a better cut.
    """
    if len(partition.clouds) < 2:
        return partition
    found = best_partitions(_row(problem, partition.clouds, problem.passages, problem.one_way))
    best = _in_row(problem, partition.clouds, found[0]) if found else partition
    return balanced(problem, min(best, partition, key=lambda one: one.step_s))


def balanced(problem: Problem, partition: Partition) -> Partition:
    """The same clouds in the same order with stages as equal as can be, where that costs next to nothing.

    Where a line or memory sets the pace, many cuts are as good as each other by formula; an equal one suffers
    least if compute turns out slower than it was thought to be.
    """
    if len(partition.clouds) < 2:
        return partition
    # A cut behind frozen layers stays one: what goes back or not weighs more than what is equal.
    passages, one_way = (
        {
            pair: Passage(once_s=problem.passage(pair, stop).once_s, pace_s=0.0)
            for pair, stop in zip(pairwise(partition.clouds), partition.stops, strict=False)
            if (stop <= problem.num_frozen) == is_one_way
        }
        for is_one_way in (False, True)
    )
    found = best_partitions(_row(problem, partition.clouds, passages, one_way))
    if not found:
        return partition
    equal = _in_row(problem, partition.clouds, found[0])
    return equal if equal.step_s <= partition.step_s * (1 + _NEXT_TO_NOTHING) else partition


def _row(problem: Problem, clouds: Sequence[int], passages: Passages, one_way: Passages) -> Problem:
    """These clouds as stages in this order."""
    pairs = list(enumerate(pairwise(clouds)))
    return replace(
        problem,
        offers=[problem.offers[cloud] for cloud in clouds],
        passages={(stage, stage + 1): passages[pair] for stage, pair in pairs if pair in passages},
        one_way={(stage, stage + 1): one_way[pair] for stage, pair in pairs if pair in one_way},
        uses_all=True,
        in_row=True,
    )


def _in_row(problem: Problem, clouds: Sequence[int], found: Partition) -> Partition:
    return measure(problem, list(zip(clouds, found.stops, strict=True)))


def measure(problem: Problem, route: Route) -> Partition:
    """What a route through the clouds comes to."""
    starts = [0, *(stop for _, stop in route)]
    stages = [
        (problem.offers[cloud], (start, stop)) for (cloud, stop), start in zip(route, starts, strict=False)
    ]
    hops = [problem.passage((first, second), stop) for (first, stop), (second, _) in pairwise(route)]
    hops_s = [hop.once_s for hop in hops]
    behind_s = 0.0
    paces_s = [hop.pace_s for hop in hops]
    behind = zip(reversed(stages), (0.0, *reversed(hops_s)), strict=True)
    for num_left, ((offer, layers), hop_s) in enumerate(behind, start=1):
        behind_s += hop_s + float(offer.once_s[layers])
        held = min(max(1.0, float(offer.held[layers])), problem.window(num_left) * offer.num_ranks)
        turns = problem.num_microbatches / held - 1
        paces_s += [float(offer.pace_s[layers]), max(0.0, turns * behind_s)]
    return Partition(
        clouds=tuple(cloud for cloud, _ in route),
        stops=tuple(stop for _, stop in route),
        once_s=behind_s,
        pace_s=max(paces_s),
    )


class _CapSearch:
    """Tries caps on the pace, the most promising range of them first."""

    def __init__(self, problem: Problem, caps_s: Table) -> None:
        self._problem = problem
        self._caps_s = caps_s
        is_row = problem.in_row or len(problem.offers) > MAX_ANY_ORDER
        self._kind: type[Walks] = RowWalks if is_row else SetWalks
        self._walks: dict[int, Walks] = {}
        self._lengths_s: dict[int, Mapping[Key, float]] = {}
        self._best_s = math.inf

    def run(self, *, slack: float, cutoff_s: float) -> None:
        """Try caps until no other can be better."""
        last = len(self._caps_s) - 1
        ranges = [(self._bound(0, last), 0, last)]
        while ranges:
            bound_s, low, high = heapq.heappop(ranges)
            if not bound_s < min(self._best_s * (1 - slack), cutoff_s):
                return
            if low < high:
                middle = (low + high) // 2
                for half in ((low, middle), (middle + 1, high)):
                    heapq.heappush(ranges, (self._bound(*half), *half))

    def best(self, num_found: int) -> Iterator[Partition]:
        """The best partition of each of the best keys."""
        found: dict[Key, tuple[float, int]] = {}
        for index, lengths_s in self._lengths_s.items():
            for key, length_s in lengths_s.items():
                new = (length_s + float(self._caps_s[index]), index)
                found[key] = min(found.get(key, new), new)
        for key, (_, index) in heapq.nsmallest(num_found, found.items(), key=lambda item: item[1]):
            yield measure(self._problem, self._walks[index].route(key))

    def _bound(self, low: int, high: int) -> float:
        """No cap from `low` to `high` gives a shorter step than this."""
        if high not in self._walks:
            cap_s = float(self._caps_s[high])
            self._walks[high] = self._kind.under(self._problem, cap_s)
            self._lengths_s[high] = self._walks[high].lengths()
            self._best_s = min([self._best_s, *(one + cap_s for one in self._lengths_s[high].values())])
        return min(self._lengths_s[high].values(), default=math.inf) + float(self._caps_s[low])


def _caps(problem: Problem, tolerance: float) -> Table:
    """Every pace that a stage or a passage may have, and a fine scale where memory may set another."""
    of_stages = [one.pace_s[np.isfinite(one.once_s)] for one in problem.offers]
    passages = [*problem.passages.values(), *problem.one_way.values()]
    of_passages = np.array([one.pace_s for one in passages], dtype=np.float64)
    every = np.unique(np.concatenate([*of_stages, of_passages, _scale(problem, tolerance)]))
    every = every[np.isfinite(every)]
    is_last_of_its_like = np.append(every[1:] > every[:-1] * (1 + _SAME), np.ones(1, dtype=bool))
    return np.asarray(every[is_last_of_its_like[: len(every)]])


def _scale(problem: Problem, tolerance: float) -> Table:
    # The narrowest window that matters, since the last stage waits for none.
    turns = max(float(problem.turns(cloud, num_left=2).max()) for cloud in range(len(problem.offers)))
    if not turns:
        return np.empty(0)
    stages_s = [one.once_s[np.isfinite(one.once_s)] for one in problem.offers]
    most_s = sum(float(one.max(initial=0.0)) for one in stages_s)
    most_s += sum(one.once_s for one in problem.passages.values() if math.isfinite(one.once_s))
    least_s = min(float(one.min(initial=most_s)) for one in stages_s) * tolerance
    num_marks = math.ceil(math.log(turns * most_s / least_s) / math.log1p(tolerance)) + 1
    return np.asarray(least_s * (1 + tolerance) ** np.arange(num_marks + 1))
