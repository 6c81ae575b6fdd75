"""Goes through the settings of a pipeline and finds the best partition under each.

Analytic throughout: `T = Σ(tf+tb) + 2Σ(λ+s) + (m-1)·P` with P the slowest stage or line, where a stage of R
ranks works in `ceil(m/R)` rounds. The simulator then has the last word on the best of what is found here.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Protocol

import numpy as np

from isthmus.plan.scenario import HopLoad
from isthmus.plan.search.partition import Partition, best_partitions, measure, refined
from isthmus.plan.search.walks import Offer, Passage, Problem, Table

# What is so much slower than the best, by the analytic bound, is no runner-up worth telling of.
_SPREAD: Final = 1.5
_NUM_PER_SETTING: Final = 6
# Of more clouds than this there are so many sets that a little exactness is given for a lot of time.
_NUM_FEW_CLOUDS: Final = 5
_SLACK: Final = 0.01
_NARROW_SPREAD: Final = 1.1
# Times that differ by less are one.
_SAME: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """A cloud under one setting: tables (a, b) over the layers from a to before b, times of one rank."""

    forward_s: Table
    backward_s: Table
    update_s: Table
    held: Table
    """Micro-batches that the memory of one rank holds in flight; 0 where the layers alone are too much."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """One way to run a pipeline: micro-batches, and a level of sparing memory, which costs time."""

    num_microbatches: int
    level: int = 0


class Supply(Protocol):
    """The clouds by number, and what they and the links between them take."""

    @property
    def num_ranks(self) -> Sequence[int]:
        """Of each cloud."""

    @property
    def pairs(self) -> Collection[tuple[int, int]]:
        """The clouds that may follow each other, since a link joins them."""

    def table(self, cloud: int, setting: Setting) -> StageTable:
        """What a cloud takes for any of its possible stages."""

    @property
    def num_frozen(self) -> int:
        """Layers from the first on through which nothing goes back."""

    def hop(self, pair: tuple[int, int], setting: Setting, *, has_gradient: bool = True) -> HopLoad | None:
        """What a micro-batch sends from one cloud to the next, as strongly coded as is allowed.

        None where there can be no such cut.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A partition under a setting."""

    setting: Setting
    partition: Partition
    problem: Problem

    @property
    def key(self) -> tuple[Setting, tuple[int, ...], tuple[int, ...]]:
        """What it is known by."""
        return self.setting, self.partition.clouds, self.partition.stops

    @property
    def refined(self) -> "Found":
        """With the best cut for the same clouds in the same order."""
        return replace(self, partition=refined(self.problem, self.partition))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What is fixed beforehand."""

    in_row: bool = False
    """Whether the clouds are the stages, in the order in which they are given."""
    stops: tuple[int, ...] | None = None
    """Where the layers of each stage end; only for clouds in a row."""
    cuts: frozenset[int] | None = None
    """Where a cut is possible at all; None for anywhere."""
    uses_all: bool = False
    has_narrow_windows: bool = False
    """Whether windows are those of 1F1B."""


def search(
    supply: Supply,
    *,
    microbatches: Sequence[int],
    num_levels: int,
    first_level: int = 0,
    constraints: Constraints = Constraints(),  # noqa: B008 it is frozen
    keeps_every_set: bool = False,
) -> list[Found]:
    """All that is worth a closer look, best first; with `keeps_every_set` one for each set of clouds."""
    levels = range(first_level, num_levels)
    found: list[Found] = []
    # Many small micro-batches are likely best, and the sooner the best is found the more is cut off.
    for number in sorted(microbatches, reverse=True):
        best_s = min((one.partition.step_s for one in found), default=math.inf)
        spread = _SPREAD if len(supply.num_ranks) <= _NUM_FEW_CLOUDS else _NARROW_SPREAD
        cutoff_s = math.inf if keeps_every_set else best_s * spread
        found += _under(supply, number, levels, constraints, cutoff_s, keeps_every_set)
    return sorted(found, key=lambda one: (one.partition.step_s, one.setting, one.partition.clouds))


def _under(
    supply: Supply,
    num_microbatches: int,
    levels: range,
    constraints: Constraints,
    cutoff_s: float,
    keeps_every_set: bool,
) -> Iterator[Found]:
    """From the level that spares no memory on, until memory is not what holds a step up."""
    unbound_s: float | None = None
    num_clouds = len(supply.num_ranks)
    num_found = num_clouds << num_clouds if keeps_every_set else _NUM_PER_SETTING
    slack = 0.0 if num_clouds <= _NUM_FEW_CLOUDS else _SLACK
    for level in levels:
        setting = Setting(num_microbatches=num_microbatches, level=level)
        problem = build_problem(supply, setting, constraints)
        partitions = best_partitions(problem, slack=slack, cutoff_s=cutoff_s, num_found=num_found)
        for one in partitions:
            yield Found(setting=setting, partition=one, problem=problem)
        if level == levels[-1]:
            return
        if unbound_s is None:
            roomy = without_memory(supply, setting, constraints, num_levels=levels.stop)
            unbound = best_partitions(roomy, slack=slack, cutoff_s=cutoff_s)
            unbound_s = unbound[0].step_s if unbound else math.inf
        # More sparing costs time, so nothing beats what memory does not bind.
        if unbound_s == math.inf or (partitions and partitions[0].step_s <= unbound_s * (1 + _SAME + slack)):
            return


def build_problem(supply: Supply, setting: Setting, constraints: Constraints) -> Problem:
    """What is to be partitioned under a setting."""
    tables = [supply.table(cloud, setting) for cloud in range(len(supply.num_ranks))]
    return _problem(supply, [setting], constraints, tables)


def without_memory(supply: Supply, setting: Setting, constraints: Constraints, *, num_levels: int) -> Problem:
    """The same as if memory were no limit: a bound on every level from this one on.

    Passes only take longer on later levels, but ranks that share a stage out may send fewer bytes.
    """
    tables = [supply.table(cloud, setting) for cloud in range(len(supply.num_ranks))]
    roomy = [
        StageTable(
            forward_s=one.forward_s,
            backward_s=one.backward_s,
            update_s=one.update_s,
            held=np.full_like(one.held, np.inf),
        )
        for one in tables
    ]
    later = [replace(setting, level=level) for level in range(setting.level, num_levels)]
    return _problem(supply, later, constraints, roomy)


def passage(hop: HopLoad, num_microbatches: int, num_ranks: tuple[int, int] = (1, 1)) -> Passage:
    """A hop as the partition sees it: there and back once, then its slower direction.

    All ranks of a stage end their first pass at the same time, and share the line for what they send.
    """
    forward_s = 8 * hop.forward_bytes / hop.line.down_bps
    backward_s = 8 * hop.backward_bytes / hop.line.up_bps
    num_down, num_up = (min(one, num_microbatches) for one in num_ranks)
    coding_s = hop.forward_coding_s + hop.backward_coding_s
    return Passage(
        once_s=hop.delays_s + num_down * forward_s + num_up * backward_s + coding_s,
        pace_s=max((num_microbatches - num_down) * forward_s, (num_microbatches - num_up) * backward_s),
    )


def measure_with(
    problem: Problem, partition: Partition, hops: Sequence[HopLoad], num_ranks: Sequence[int]
) -> Partition:
    """The same partition over other hops, such as with milder codecs; `num_ranks` is of each stage."""
    passages = {
        pair: passage(hop, problem.num_microbatches, ranks)
        for pair, hop, ranks in zip(pairwise(partition.clouds), hops, pairwise(num_ranks), strict=True)
    }
    changed = replace(problem, passages=passages, num_frozen=0, one_way={})
    return measure(changed, list(zip(partition.clouds, partition.stops, strict=True)))


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [one for one in range(1, number + 1) if number % one == 0]


def _problem(
    supply: Supply, settings: Sequence[Setting], constraints: Constraints, tables: Sequence[StageTable]
) -> Problem:
    """With these tables, and every passage as under that of the settings which has the least."""
    num_microbatches = settings[0].num_microbatches
    allowed = _allowed(constraints, tables[0].forward_s.shape[0] - 1, len(tables))
    offers = [
        _offer(table, supply.num_ranks[cloud], num_microbatches, allowed[cloud])
        for cloud, table in enumerate(tables)
    ]
    pairs = set(pairwise(range(len(tables)))) if constraints.in_row else set(supply.pairs)
    pairs &= set(supply.pairs)
    return Problem(
        offers=offers,
        passages=_passages(supply, settings, pairs, has_gradient=True),
        num_microbatches=num_microbatches,
        uses_all=constraints.uses_all or constraints.in_row,
        in_row=constraints.in_row,
        num_frozen=supply.num_frozen,
        one_way=_passages(supply, settings, pairs, has_gradient=False) if supply.num_frozen else {},
        has_narrow_windows=constraints.has_narrow_windows,
    )


def _passages(
    supply: Supply, settings: Sequence[Setting], pairs: Collection[tuple[int, int]], *, has_gradient: bool
) -> dict[tuple[int, int], Passage]:
    found = {}
    for pair in sorted(pairs):
        hops = [supply.hop(pair, setting, has_gradient=has_gradient) for setting in settings]
        ranks = supply.num_ranks[pair[0]], supply.num_ranks[pair[1]]
        possible = [passage(hop, settings[0].num_microbatches, ranks) for hop in hops if hop is not None]
        if possible:
            found[pair] = min(possible, key=lambda one: (one.pace_s, one.once_s))
    return found


def _offer(table: StageTable, num_ranks: int, num_microbatches: int, allowed: Table) -> Offer:
    pass_s = table.forward_s + table.backward_s
    rounds = math.ceil(num_microbatches / num_ranks)
    pace_s = (rounds - 1) * pass_s + table.update_s
    is_possible = (table.held >= 1) & (allowed > 0)
    return Offer(
        num_ranks=num_ranks,
        once_s=np.where(is_possible, pass_s, np.inf),
        pace_s=np.where(is_possible, pace_s, np.inf),
        held=num_ranks * table.held,
    )


def _allowed(constraints: Constraints, num_layers: int, num_clouds: int) -> list[Table]:
    """For each cloud, where 1 a stage may hold the layers from a to before b."""
    starts, stops = np.arange(num_layers + 1)[:, None], np.arange(num_layers + 1)[None, :]
    may_cut = np.ones(num_layers + 1, dtype=bool)
    if constraints.cuts is not None:
        may_cut[:] = False
        may_cut[[0, num_layers, *constraints.cuts]] = True
    anywhere = np.where((stops > starts) & may_cut[:, None] & may_cut[None, :], 1.0, 0.0)
    if constraints.stops is None:
        return [anywhere] * num_clouds
    return [_only(anywhere, *layers) for layers in pairwise((0, *constraints.stops))]


def _only(anywhere: Table, start: int, stop: int) -> Table:
    table = np.zeros_like(anywhere)
    table[start, stop] = anywhere[start, stop]
    return table
