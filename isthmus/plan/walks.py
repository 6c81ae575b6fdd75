"""Enumerates the walks of a pipeline through the clouds: orders of clouds along links, and cuts of layers.

Up to four clouds every order of every subset and every cut is enumerated. Beyond that a beam extends walks
cloud by cloud: under a cap on the time of a stage each cloud takes as many layers as keep to it, the walks
with the least time per layer are kept, and every cut near those that are found is enumerated.
"""

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from isthmus.plan.step_time import Mask, Table

Stops = NDArray[np.int64]
"""Rows of where the layers of each stage end."""

MAX_ENUMERATED: Final = 4
"""Clouds whose orders and cuts are all enumerated."""
_BEAM_WIDTH: Final = 24
_NUM_HALVINGS: Final = 9
_CAPS: Final = (1.0, 1.02, 1.05, 1.1, 1.16, 1.25, 1.4, 1.7, 2.2)
# Of so few stages a beam has all cuts, of more those near the ones that it finds.
_MAX_ALL_CUTS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the job fixes of a pipeline."""

    in_row: bool = False
    """Whether the clouds are the stages, in the order in which they are given."""
    stops: tuple[int, ...] | None = None
    """Where the layers of each stage end; only for clouds in a row."""
    cuts: frozenset[int] | None = None
    """Where a cut is possible at all; None for anywhere."""
    uses_all: bool = False

    def sizes(self, num_clouds: int) -> range:
        """How many stages there may be."""
        return range(num_clouds if self.uses_all or self.in_row else 1, num_clouds + 1)


def all_orders(
    num_clouds: int, pairs: Collection[tuple[int, int]], constraints: Constraints
) -> Iterator[tuple[int, ...]]:
    """Every walk along the links that meets no cloud twice, the shortest first."""
    if constraints.in_row:
        walks: Iterator[tuple[int, ...]] = iter([tuple(range(num_clouds))])
    else:
        walks = (
            one for size in constraints.sizes(num_clouds) for one in permutations(range(num_clouds), size)
        )
    return (one for one in walks if all(pair in pairs for pair in pairwise(one)))


@functools.lru_cache(maxsize=64)
def all_cuts(num_layers: int, num_stages: int, constraints: Constraints) -> Stops:
    """Every way to cut the layers into stages, one row each."""
    if constraints.stops is not None:
        return np.array([constraints.stops])
    allowed = range(1, num_layers) if constraints.cuts is None else sorted(constraints.cuts)
    found = list(combinations(allowed, num_stages - 1))
    inner = np.array(found, dtype=np.int64).reshape(len(found), num_stages - 1)
    return np.hstack([inner, np.full((len(found), 1), num_layers)])


def least_slowest_s(stages_s: Sequence[Table]) -> float:
    """The least time of the slowest stage over all cuts; tables (a, b), infinite where no stage can be."""
    best_s = stages_s[0][0]
    for stage_s in stages_s[1:]:
        best_s = np.maximum(best_s[:, None], stage_s).min(axis=0)
    return float(best_s[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """Walks of many clouds: `stages_s` is what each cloud takes for the layers (a, b) in a step."""

    stages_s: Sequence[Table]
    once_s: Sequence[Table]
    """What one micro-batch takes at each cloud."""
    hops_s: Mapping[tuple[int, int], float]
    """What it takes there and back between two clouds."""
    lines_s: Mapping[tuple[int, int], float]
    """How long all messages of a step are on the line between two clouds, in the slower direction."""
    constraints: Constraints

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return len(self.stages_s[0]) - 1

    def walks(self) -> dict[tuple[int, ...], Stops]:
        """Orders that were found, each with the cuts that are worth a bound."""
        found: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for cap_s in self._caps_s():
            for order, stops in self._under(cap_s):
                found.setdefault(order, set()).add(stops)
        return {order: self._near(stops) for order, stops in found.items()}

    def _caps_s(self) -> Sequence[float]:
        """The least cap under which any walk places all layers, and some above it."""
        finite_s = [one[np.isfinite(one)] for one in self.stages_s]
        finite_s += [np.array([one]) for one in self.lines_s.values() if one > 0]
        least_s = min((float(one.min()) for one in finite_s if one.size), default=0.0)
        most_s = max((float(one.max()) for one in finite_s if one.size), default=0.0)
        if least_s <= 0 or not any(self._under(most_s)):
            return ()
        for _ in range(_NUM_HALVINGS):
            middle_s = math.sqrt(least_s * most_s)
            least_s, most_s = (least_s, middle_s) if any(self._under(middle_s)) else (middle_s, most_s)
        return [most_s * one for one in _CAPS]

    def _under(self, cap_s: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        ends = [self._furthest(one <= cap_s) for one in self.stages_s]
        states: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = [(0.0, (), ())]
        num_clouds = len(self.stages_s)
        sizes = self.constraints.sizes(num_clouds)
        for depth in range(num_clouds):
            grown = []
            for once_s, order, stops in states:
                for cloud, stop, added_s in self._next(
                    order, stops, ends, cap_s, num_left=sizes.start - depth - 1
                ):
                    grown.append((once_s + added_s, (*order, cloud), (*stops, stop)))
            yield from (
                (order, stops)
                for _, order, stops in grown
                if stops[-1] == self.num_layers and len(order) in sizes
            )
            rest = [one for one in grown if one[2][-1] < self.num_layers]
            states = sorted(rest, key=lambda one: (one[0] / one[2][-1], one[1]))[:_BEAM_WIDTH]

    def _next(
        self,
        order: tuple[int, ...],
        stops: tuple[int, ...],
        ends: Sequence[Stops],
        cap_s: float,
        *,
        num_left: int,
    ) -> Iterator[tuple[int, int, float]]:
        start = stops[-1] if stops else 0
        clouds = [len(order)] if self.constraints.in_row else range(len(self.stages_s))
        for cloud in clouds:
            if cloud in order or (order and self.lines_s.get((order[-1], cloud), math.inf) > cap_s):
                continue
            # Every cloud that is still to come needs a layer.
            stop = min(int(ends[cloud][start]), self.num_layers - max(0, num_left))
            if stop > start and math.isfinite(self.stages_s[cloud][start, stop]):
                hop_s = self.hops_s[order[-1], cloud] if order else 0.0
                yield cloud, stop, hop_s + float(self.once_s[cloud][start, stop])

    def _furthest(self, fits: Mask) -> Stops:
        """For each first layer, the last end that fits; 0 where none does."""
        stops = np.arange(self.num_layers + 1)
        return np.asarray(np.where(fits, stops[None, :], 0).max(axis=1))

    def _near(self, found: Collection[tuple[int, ...]]) -> Stops:
        """The cuts that were found, and those with one end or two neighbouring ends moved."""
        num_stages = len(next(iter(found)))
        if num_stages <= _MAX_ALL_CUTS or self.constraints.stops is not None:
            return all_cuts(self.num_layers, num_stages, self.constraints)
        moves = [(0,) * num_stages]
        for index, size, wide in product(range(num_stages - 1), (-3, -2, -1, 1, 2, 3), (1, 2)):
            ends = range(index, min(index + wide, num_stages - 1))
            moves.append(tuple(size if one in ends else 0 for one in range(num_stages)))
        rows = np.unique(np.concatenate([np.array(one) + np.array(moves) for one in sorted(found)]), axis=0)
        is_cut = (np.diff(rows, axis=1, prepend=0) > 0).all(axis=1)
        if self.constraints.cuts is not None:
            is_cut &= np.isin(rows[:, :-1], sorted(self.constraints.cuts)).all(axis=1)
        return np.asarray(rows[is_cut])
