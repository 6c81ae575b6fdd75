"""Shortest walks through the clouds under a cap on the pace: stages and passages as edges of a graph.

Walks are built from the last stage to the first, since what a stage must keep in flight grows with all that
lies behind it: a walk that is shorter from some stage on is better for every stage before it, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a cloud takes for the layers from `a` to before `b`, as tables (a, b)."""

    once_s: Table
    """One micro-batch forward and backward; infinite where the cloud cannot hold the layers."""
    pace_s: Table
    """All that its busiest rank does in a step, but for that one micro-batch."""
    held: Table
    """How many micro-batches all its ranks together can keep in flight."""
    num_ranks: int = 1

    def turns(self, num_microbatches: int, window: float = math.inf) -> Table:
        """How often a step fills all that is in flight, less the first time; 0 where it is not needed.

        No rank keeps more than `window`.
        """
        turns = num_microbatches / np.clip(self.held, 1.0, window * self.num_ranks) - 1
        return np.where(np.isfinite(self.once_s) & (turns > 0), turns, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What it takes to cross from one cloud to another: there and back once, and all others of a step."""

    once_s: float
    pace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Clouds by number, and the passages between those that may follow each other."""

    offers: Sequence[Offer]
    passages: Mapping[tuple[int, int], Passage]
    num_microbatches: int
    uses_all: bool = False
    """Whether every cloud must have a stage."""
    in_row: bool = False
    """Whether stages must keep the order of the clouds."""
    num_frozen: int = 0
    """Behind up to so many layers nothing goes back: a cut there takes its passage from `one_way`."""
    one_way: Mapping[tuple[int, int], Passage] = field(default_factory=dict)
    has_narrow_windows: bool = False
    """Whether a rank keeps no more in flight than there are stages from its own on, as 1F1B has it."""
    _turns: dict[tuple[int, float], Table] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def window(self, num_left: int) -> float:
        """The most that a rank keeps in flight with so many stages from its own on; the last never waits."""
        return num_left if self.has_narrow_windows and num_left > 1 else math.inf

    def turns(self, cloud: int, *, num_left: int) -> Table:
        """How often a step fills what a cloud may keep in flight with so many stages from it on."""
        key = cloud, self.window(num_left)
        if key not in self._turns:
            self._turns[key] = self.offers[cloud].turns(self.num_microbatches, key[1])
        return self._turns[key]

    def passage(self, pair: tuple[int, int], stop: int) -> Passage:
        """Between these clouds, where the first one's layers end at `stop`."""
        return (self.one_way if stop <= self.num_frozen else self.passages)[pair]

    @property
    def num_layers(self) -> int:
        """How many layers there are to place."""
        return int(self.offers[0].once_s.shape[0]) - 1


Route = list[tuple[int, int]]
"""Stages in order: the number of the cloud, and where its layers end."""

Key = tuple[int, ...]
"""By which a walk is known: the first of its clouds, and the set of all where that is not given with it."""


class Walks(Protocol):
    """All shortest walks under one cap, each known by its key."""

    @classmethod
    def under(cls, problem: Problem, cap_s: float) -> Self:
        """Find the walks whose every pace keeps to the cap."""

    def lengths(self) -> Mapping[Key, float]:
        """The length of the shortest whole walk of every key that has one."""

    def route(self, key: Key) -> Route:
        """The stages of that walk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """What is left of a problem under a cap: infinite where a pace is beyond it.

    `limits_s` is how long a micro-batch may stay in flight, None where any time will do: the window is too
    small for longer; it is by cloud, and by the stages that are left from it on where that matters. Both
    tables are (b, a), since numpy is fastest at minima over any axis but the last. `hops_s` is (cloud, next
    cloud, b).
    """

    stages_s: Sequence[Table]
    limits_s: Sequence[Sequence[Table | None]]
    hops_s: Table

    @classmethod
    def under(cls, problem: Problem, cap_s: float) -> Self:
        stages_s = [np.where(one.pace_s <= cap_s, one.once_s, np.inf).T.copy() for one in problem.offers]
        hops_s = np.full((len(stages_s), len(stages_s), problem.num_layers + 1), np.inf)
        ends = slice(0, problem.num_frozen + 1), slice(problem.num_frozen + 1, None)
        for where, passages in zip(ends, (problem.one_way, problem.passages), strict=True):
            for pair, passage in passages.items():
                if passage.pace_s <= cap_s:
                    hops_s[(*pair, where)] = passage.once_s
        most = len(problem.offers) if problem.has_narrow_windows else 1
        limits_s = [
            [_limits(problem.turns(cloud, num_left=number + 1), cap_s) for number in range(most)]
            for cloud in range(len(problem.offers))
        ]
        return cls(stages_s=stages_s, limits_s=limits_s, hops_s=hops_s)

    def first(self, cloud: int, behind_s: Table, *, num_left: int) -> Table:
        """Lengths (…, b, a) with the layers from a to b at this cloud, and `behind_s` (…, b) behind them."""
        lengths_s = self.stages_s[cloud] + behind_s[..., None]
        limits_s = self.limits_s[cloud]
        limit_s = limits_s[min(num_left, len(limits_s)) - 1]
        return lengths_s if limit_s is None else np.where(lengths_s <= limit_s, lengths_s, np.inf)

    def shortest(self, cloud: int, behind_s: Table, *, num_left: int) -> Table:
        """The least of these lengths over b; one row of `behind_s` after the other, which the cache holds."""
        return np.array([self.first(cloud, one, num_left=num_left).min(axis=0) for one in behind_s])


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWalks:
    """Walks in any order, known by their first cloud and the set of all as a bit mask: `[set, first, a]`."""

    edges: _Edges
    uses_all: bool
    lengths_s: Table

    @classmethod
    def under(cls, problem: Problem, cap_s: float) -> Self:
        """Find the walks whose every pace keeps to the cap, set after set by size."""
        edges = _Edges.under(problem, cap_s)
        num_clouds = len(problem.offers)
        lengths_s = np.full((1 << num_clouds, num_clouds, problem.num_layers + 1), np.inf)
        for cloud in range(num_clouds):
            lengths_s[1 << cloud, cloud] = edges.first(cloud, _end(problem), num_left=1).min(axis=-2)
        for size, same_size in enumerate(_sets_by_size(num_clouds)[2:], start=2):
            for cloud in range(num_clouds):
                sets = same_size[same_size >> cloud & 1 == 1]
                behind_s = (lengths_s[sets ^ (1 << cloud)] + edges.hops_s[cloud]).min(axis=1)
                lengths_s[sets, cloud] = edges.shortest(cloud, behind_s, num_left=size)
        return cls(edges=edges, uses_all=problem.uses_all, lengths_s=lengths_s)

    def lengths(self) -> Mapping[Key, float]:
        """The length of the shortest whole walk of every set of clouds, from each that it can begin at."""
        whole_s = self.lengths_s[:, :, 0]
        least = len(whole_s) - 1 if self.uses_all else 0
        found = zip(*np.nonzero(np.isfinite(whole_s)), strict=True)
        return {(int(first), int(one)): float(whole_s[one, first]) for one, first in found if one >= least}

    def route(self, key: Key) -> Route:
        """The stages of the shortest walk of a set of clouds from the first on."""
        num_layers = self.lengths_s.shape[2] - 1
        (cloud, clouds), start = key, 0
        route: Route = []
        while clouds != 1 << cloud:
            num_left = clouds.bit_count()
            clouds ^= 1 << cloud
            behind_s = self.lengths_s[clouds] + self.edges.hops_s[cloud]
            following, stop = _least(self.edges.first(cloud, behind_s, num_left=num_left)[..., start])
            route.append((cloud, stop))
            cloud, start = following, stop
        return [*route, (cloud, num_layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWalks:
    """Walks that keep the order of the clouds but may skip some, known by the first: `lengths[first, a]`.

    The row behind the last cloud stands for the end of a walk. Where some may be skipped, narrow windows
    count as if none were.
    """

    edges: _Edges
    uses_all: bool
    lengths_s: Table

    @classmethod
    def under(cls, problem: Problem, cap_s: float) -> Self:
        """Find the walks whose every pace keeps to the cap, from the last cloud to the first."""
        num_clouds = len(problem.offers)
        lengths_s = np.full((num_clouds + 1, problem.num_layers + 1), np.inf)
        lengths_s[num_clouds] = _end(problem)
        walks = cls(edges=_Edges.under(problem, cap_s), uses_all=problem.uses_all, lengths_s=lengths_s)
        for cloud in reversed(range(num_clouds)):
            behind_s = walks._behind(cloud).min(axis=0)
            first_s = walks.edges.first(cloud, behind_s, num_left=num_clouds - cloud)
            lengths_s[cloud] = first_s.min(axis=-2)
        return walks

    def lengths(self) -> Mapping[Key, float]:
        """The length of the shortest whole walk that starts at each cloud."""
        whole_s = self.lengths_s[:-1, 0]
        allowed = [0] if self.uses_all else range(len(whole_s))
        return {(one,): float(whole_s[one]) for one in allowed if math.isfinite(whole_s[one])}

    def route(self, key: Key) -> Route:
        """The stages of the shortest walk that starts at a cloud."""
        end = self.lengths_s.shape[0] - 1
        (cloud,), start = key, 0
        route: Route = []
        while cloud < end:
            first_s = self.edges.first(cloud, self._behind(cloud), num_left=end - cloud)
            row, stop = _least(first_s[..., start])
            route.append((cloud, stop))
            cloud, start = cloud + 1 + row, stop
        return route

    def _behind(self, cloud: int) -> Table:
        """Lengths (later cloud or end, b) behind a cloud."""
        behind_s = self.lengths_s[cloud + 1 :].copy()
        behind_s[:-1] += self.edges.hops_s[cloud, cloud + 1 :]
        if self.uses_all:
            behind_s[1:] = np.inf
        return behind_s


def _end(problem: Problem) -> Table:
    """Nothing lies behind the last layer, and no walk ends before it."""
    end_s = np.full(problem.num_layers + 1, np.inf)
    end_s[-1] = 0.0
    return end_s


def _limits(turns: Table, cap_s: float) -> Table | None:
    """With h in flight, m take `m/h` as long as one stays: all but the first keep to the cap."""
    if not turns.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(turns > 0, cap_s / turns, np.inf).T.copy()


def _sets_by_size(num_clouds: int) -> list[NDArray[np.int64]]:
    """All sets of clouds as bit masks, those of the same size together."""
    every = np.arange(1 << num_clouds)
    sizes = sum(every >> cloud & 1 for cloud in range(num_clouds))
    return [every[sizes == size] for size in range(num_clouds + 1)]


def _least(values: Table) -> tuple[int, int]:
    row, column = np.unravel_index(values.argmin(), values.shape)
    return int(row), int(column)
