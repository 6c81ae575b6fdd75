"""Finds the best pipelines by branch and bound.

All that might be the best is queued by its lower bound. The first of the queue is looked at more closely,
until nothing in the queue can be better than the best that was simulated:

    micro-batches and memory options ──► orders of clouds ──► cuts ──► codecs ──► simulated

Memory options beyond the first are tried where memory makes a step longer. Work is bounded and not time, so
that plans are the same on every machine.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, pairwise
from typing import Final

import numpy as np

from isthmus.plan.codec_choice import Figures, allowed_pairs
from isthmus.plan.ladder import RAW_PAIR, Crossing
from isthmus.plan.scenario import Scenario
from isthmus.plan.search.bound import HopTimes, StageTimes, scenario_bound_s, step_bound_s
from isthmus.plan.search.candidates import Candidate, Partition, Terms, candidates, neighbours, simulated
from isthmus.plan.search.choice import Plan
from isthmus.plan.search.supply import ModelSupply, Setting
from isthmus.plan.search.walks import (
    MAX_ENUMERATED,
    Beam,
    Mask,
    Stops,
    Table,
    all_cuts,
    all_orders,
    least_slowest_s,
)

Progress = Callable[[str], None]
Key = tuple[float, float]
"""What is to be least, and then the time."""

_GIB: Final = 2**30
_NO_CAP: Final = 2.0**40
# Passes to simulate for one search, about half a second, and what other work counts for.
MAX_PASSES: Final = 16_000
_PASSES_PER_CANDIDATE: Final = 24
_CUTS_PER_PASS: Final = 100
# Without anything within the limits the search takes so many times the work.
_PATIENCE: Final = 4
NEARLY: Final = 0.01
"""Plans nearly as good as the best make way for one with less loss, fewer memory options or fewer stages."""
_NUM_ALTERNATIVES: Final = 12
_NUM_CLIMBED: Final = 4
# Cuts of one order that are looked at more closely, at most.
_MOST_CUTS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What a plan must keep to, and whether its price or its time is to be least."""

    deadline_s: float = math.inf
    budget_usd: float = math.inf
    by_price: bool = False

    def key(self, total_s: float, total_usd: float | None) -> Key:
        """What is to be least."""
        return (total_usd or 0.0, total_s) if self.by_price else (total_s, total_s)

    def allows(self, total_s: float, total_usd: float | None) -> bool:
        """Whether a run is within time and budget."""
        return total_s <= self.deadline_s and (total_usd or 0.0) <= self.budget_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class _HopSpace:
    """A hop with any codec that is allowed: no less time, no fewer bytes."""

    times: HopTimes
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Space:
    """The pipelines of a job under one policy: orders, cuts, and what each takes at least."""

    supply: ModelSupply
    terms: Terms
    _hops: dict[tuple[tuple[int, int], Crossing], _HopSpace] = field(default_factory=dict)

    @property
    def num_clouds(self) -> int:
        """All that may take part."""
        return len(self.supply.clouds)

    def rounds(self, cloud: int, setting: Setting) -> int:
        """Micro-batches of the busiest rank of a cloud."""
        return -(-setting.num_microbatches // self.supply.num_ranks[cloud])

    def groups(self, setting: Setting) -> Iterator["Group"]:
        """All orders of clouds under a setting, each with its cuts."""
        if self.num_clouds <= MAX_ENUMERATED or self.terms.constraints.in_row:
            for order in all_orders(self.num_clouds, self.supply.pairs, self.terms.constraints):
                if len(order) <= MAX_ENUMERATED or self.terms.constraints.stops is not None:
                    yield Group(space=self, setting=setting, clouds=order)
        if self.num_clouds > MAX_ENUMERATED and self.terms.constraints.stops is None:
            for order, stops in self._beam(setting).walks().items():
                yield Group(space=self, setting=setting, clouds=order, given_stops=stops)

    def can_be(self, setting: Setting, size: int) -> bool:
        """Whether any pipeline of so many stages fits under a setting."""
        groups = (one for one in self.groups(setting) if len(one.clouds) == size)
        return any(math.isfinite(one.slowest_s(fits=True)) for one in groups)

    def stages_s(self, cloud: int, setting: Setting, *, fits: bool) -> Table:
        """What a cloud computes in a step for the layers (a, b); infinite without layers or memory."""
        table = self.supply.table(cloud, setting)
        step_s = self.rounds(cloud, setting) * (table.forward_s + table.backward_s)
        return np.where((table.held >= 1) | (not fits), step_s, np.inf) + _no_layers(len(step_s))

    def hop(
        self, order: Sequence[int], index: int, setting: Setting, *, has_gradient: bool
    ) -> _HopSpace | None:
        """The hop behind a stage with any codec that is allowed, None where there can be no cut."""
        pair = order[index], order[index + 1]
        if not self.supply.can_cross(pair, setting, has_gradient=has_gradient):
            return None
        element_bytes = self.supply.element_bytes(order[: index + 2], setting)[index]
        crossing = self.supply.crossing(pair, setting, has_gradient=has_gradient, element_bytes=element_bytes)
        if (pair, crossing) not in self._hops:
            self._hops[pair, crossing] = self._any_hop(pair, crossing)
        return self._hops[pair, crossing]

    def _any_hop(self, pair: tuple[int, int], crossing: Crossing) -> _HopSpace:
        line = self.supply.links[pair].line
        link = self.terms.links[frozenset(self.supply.clouds[one].name for one in pair)]
        figures = Figures(interval_s=0.0, down_bps=line.down_bps, up_bps=line.up_bps)
        codecs = allowed_pairs(crossing, figures, rungs=link.rungs, bounds=link.bounds)
        hops = [self.supply.coded_hop(pair, crossing, one) for one in codecs]
        return _HopSpace(
            times=HopTimes.least([HopTimes.of(one) for one in hops]),
            num_bytes=min(one.forward_bytes + one.backward_bytes for one in hops),
        )

    def _beam(self, setting: Setting) -> Beam:
        clouds = range(self.num_clouds)
        tables = [self.supply.table(cloud, setting) for cloud in clouds]
        hops = {pair: self.hop(pair, 0, setting, has_gradient=True) for pair in sorted(self.supply.pairs)}
        return Beam(
            stages_s=[self.stages_s(cloud, setting, fits=True) for cloud in clouds],
            once_s=[one.forward_s + one.backward_s for one in tables],
            hops_s={
                pair: float(one.times.there_s + one.times.back_s)
                for pair, one in hops.items()
                if one is not None
            },
            lines_s={
                pair: setting.num_microbatches * float(np.maximum(one.times.down_s, one.times.up_s))
                for pair, one in hops.items()
                if one is not None
            },
            constraints=self.terms.constraints,
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """One order of clouds under one setting, with all its cuts."""

    space: Space
    setting: Setting
    clouds: tuple[int, ...]
    given_stops: Stops | None = None

    @property
    def stops(self) -> Stops:
        """The cuts, one row each."""
        if self.given_stops is not None:
            return self.given_stops
        num_layers = len(self.space.supply.table(self.clouds[0], self.setting).held) - 1
        return all_cuts(num_layers, len(self.clouds), self.space.terms.constraints)

    @property
    def usd_per_s(self) -> float | None:
        """What its clouds cost, None where that is not known."""
        prices = [self.space.supply.clouds[cloud].usd_per_hour for cloud in self.clouds]
        return None if None in prices else sum(one or 0.0 for one in prices) / 3600

    @cached_property
    def hops(self) -> list[tuple[_HopSpace | None, _HopSpace | None]]:
        """Each hop with a gradient and without."""
        return [
            (
                self.space.hop(self.clouds, index, self.setting, has_gradient=True),
                self.space.hop(self.clouds, index, self.setting, has_gradient=False)
                if self.space.supply.num_frozen
                else None,
            )
            for index in range(len(self.clouds) - 1)
        ]

    def slowest_s(self, *, fits: bool) -> float:
        """The least time of the slowest stage over all cuts; infinite where none fits."""
        if any(one is None and other is None for one, other in self.hops):
            return math.inf
        if self.given_stops is None and self.space.terms.constraints.stops is None:
            stages_s = [self.space.stages_s(cloud, self.setting, fits=fits) for cloud in self.clouds]
            if self.space.terms.constraints.cuts is None:
                return least_slowest_s(stages_s)
        rows = self.stops
        each = zip(self.clouds, _starts(rows).T, rows.T, strict=True)
        slowest_s = [self.space.stages_s(cloud, self.setting, fits=fits)[a, b] for cloud, a, b in each]
        return float(np.maximum.reduce(slowest_s).min(initial=math.inf))

    def least_step_s(self) -> float:
        """The bound of the cuts that are given, or one without cuts: the slowest stage, and every line."""
        if self.given_stops is not None:
            total_s, _, _ = self.bounds(self.given_stops, fits=True)
            return float(total_s.min(initial=math.inf)) / self.num_steps
        found_s = [self.slowest_s(fits=False)]
        both = [[one for one in pair if one is not None] for pair in self.hops]
        if all(both):
            hops = [HopTimes.least([one.times for one in pair]) for pair in both]
            once_s = sum(float(one.there_s + one.back_s) for one in hops)
            more = self.setting.num_microbatches - 1
            found_s += [once_s + more * float(np.maximum(one.down_s, one.up_s)) for one in hops]
        return max(found_s)

    def least_usd(self, step_s: float) -> float | None:
        """What a step costs at least if it takes so long."""
        rate = self.usd_per_s
        if rate is None:
            return None
        return rate * step_s + sum(
            min(one.num_bytes for one in pair if one is not None) * self._usd_per_byte(index)
            for index, pair in enumerate(self.hops)
        )

    def bounds(self, rows: Stops, *, fits: bool) -> tuple[Table, Table, Table]:
        """The least time of a run for every cut, infinite where none fits; its price; its slowest stage."""
        stages, is_possible = self._stages(rows, fits=fits)
        hops, usd = [], np.zeros(len(rows))
        for index, pair in enumerate(self.hops):
            goes_back = rows[:, index] > self.space.supply.num_frozen
            there = [one for one in pair if one is not None]
            both, one_way = pair[0] or there[0], pair[1] or there[0]
            is_possible &= np.where(goes_back, pair[0] is not None, pair[1] is not None)
            hops.append(both.times.where(goes_back, one_way.times))
            usd += np.where(goes_back, both.num_bytes, one_way.num_bytes) * self._usd_per_byte(index)
        total_s = self.num_steps * self._step_s(stages, hops)
        if num_first := self.space.supply.num_warmup_steps(self.clouds):
            total_s += num_first * self._step_s(stages, self._first_hops(hops))
        total_usd = self.num_steps * usd + (self.usd_per_s or 0.0) * total_s
        slowest_s = np.maximum.reduce([one.pass_s / one.num_ranks for one in stages])
        return np.where(is_possible, total_s, np.inf), total_usd, slowest_s

    @property
    def num_steps(self) -> int:
        """Steps behind the warm-up of bottlenecks."""
        supply = self.space.supply
        return supply.step.num_steps - supply.num_warmup_steps(self.clouds)

    def _step_s(self, stages: Sequence[StageTimes], hops: Sequence[HopTimes]) -> Table:
        number, policy = self.setting.num_microbatches, self.space.terms.policy
        return step_bound_s(stages, hops, num_microbatches=number, policy=policy)

    def _first_hops(self, hops: Sequence[HopTimes]) -> list[HopTimes]:
        """The same before bottlenecks begin, when hidden states cross raw."""
        before, links = self.space.supply.before_bottlenecks, self.space.supply.links
        element_bytes = before.element_bytes(self.clouds, self.setting)
        found = []
        for pair, hop, num_bytes in zip(pairwise(self.clouds), hops, element_bytes, strict=True):
            crossing = before.crossing(pair, self.setting, has_gradient=True, element_bytes=num_bytes)
            raw = HopTimes.of(before.coded_hop(pair, crossing, RAW_PAIR))
            found.append(hop if links[pair].bottleneck is None else raw)
        return found

    def _usd_per_byte(self, index: int) -> float:
        """Of all micro-batches of a step over one hop."""
        pair = self.clouds[index : index + 2]
        link = self.space.terms.links[frozenset(self.space.supply.clouds[one].name for one in pair)]
        return self.setting.num_microbatches * (link.usd_per_gib or 0.0) / _GIB

    def _stages(self, rows: Stops, *, fits: bool) -> tuple[list[StageTimes], Mask]:
        supply, terms = self.space.supply, self.space.terms
        given = terms.windows or terms.max_in_flight
        stages, is_possible = [], np.ones(len(rows), dtype=bool)
        for index, (cloud, start, stop) in enumerate(zip(self.clouds, _starts(rows).T, rows.T, strict=True)):
            table = supply.table(cloud, self.setting)
            cap = given[index] if isinstance(given, tuple) else given
            held = table.held[start, stop] if fits else np.full(len(rows), np.inf)
            is_possible &= held >= 1
            is_trained = (stop > supply.num_frozen) | (index == len(self.clouds) - 1)
            stages.append(
                StageTimes(
                    forward_s=table.forward_s[start, stop],
                    backward_s=np.where(is_trained, table.backward_s[start, stop], 0.0),
                    update_s=table.update_s[start, stop],
                    cap=np.minimum(held, cap or _NO_CAP),
                    num_ranks=supply.num_ranks[cloud],
                    is_trained=is_trained,
                )
            )
        return stages, is_possible


@dataclass(slots=True, kw_only=True)
class _Cuts:
    """The cuts of a group by their bounds, the least first, and the next to look at."""

    group: Group
    keys: list[Key]
    rows: Stops
    next: int = 0

    @property
    def partition(self) -> Partition:
        space = self.group.space
        return Partition(
            supply=space.supply,
            terms=space.terms,
            setting=self.group.setting,
            clouds=self.group.clouds,
            stops=tuple(int(one) for one in self.rows[self.next]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A candidate that was simulated."""

    candidate: Candidate
    plan: Plan


class BestFirst:
    """The search itself: a queue of all that might be, by its bound."""

    def __init__(
        self,
        space: Space,
        aim: Aim,
        *,
        numbers: Sequence[int],
        levels: Sequence[int],
        max_stages: int | None = None,
        needs_price: bool = False,
    ) -> None:
        self._space = space
        self._aim = aim
        self._levels = tuple(levels)
        self._needs_price = needs_price
        self._max_stages = max_stages or space.num_clouds
        self._tickets = count()
        self._queue: list[tuple[Key, int, object]] = []
        self._opened: set[Setting] = set()
        self._waiting: list[tuple[Key, Candidate]] = []
        self._work = 0.0
        self.groups: dict[tuple[int, ...], list[tuple[Key, Group]]] = {}
        """All that was looked at, by order of clouds."""
        self.tried: list[Tried] = []
        self.best: Key = (math.inf, math.inf)
        self.num_bounded = 0
        """Cuts that have a bound."""
        if levels:
            for number in numbers:
                self._open(Setting(num_microbatches=number, level=levels[0]))

    def run(self, progress: Progress = lambda _: None) -> None:
        """Look at the least, again and again, until nothing that is left can be better."""
        while self._queue and self._queue[0][0] < self.best:
            is_found = math.isfinite(self.best[0])
            if self._work > MAX_PASSES * (1 if is_found else _PATIENCE):
                break
            _, _, node = heapq.heappop(self._queue)
            match node:
                case Setting():
                    self._open(node)
                case Group():
                    self._cut(node)
                case _Cuts():
                    self._code(node)
                case Candidate():
                    progress(f"simulating plan {len(self.tried) + 1}")
                    self._simulate(node)
        self._waiting += [(key, one) for key, _, one in self._queue if isinstance(one, Candidate)]
        self._climb()

    def _climb(self) -> None:
        """Change the codecs of the best plans link by link, as long as that makes a better one."""
        climbed: set[int] = set()
        while self._work <= MAX_PASSES:
            ranked = sorted(self.tried, key=lambda one: self._key_of(one.plan))[:_NUM_CLIMBED]
            start = next((one for one in ranked if id(one) not in climbed), None)
            if start is None:
                return
            climbed.add(id(start))
            for one in neighbours(start.candidate):
                self._work += _PASSES_PER_CANDIDATE
                if self._work <= MAX_PASSES and self._is_allowed(one) and self._bound(one) < self.best:
                    self._simulate(one)

    def _key_of(self, plan: Plan) -> tuple[bool, Key]:
        totals = plan.estimate.total_s, plan.estimate.total_usd
        return not self._aim.allows(*totals), self._aim.key(*totals)

    def try_alternatives(self, rank: Callable[[Candidate], tuple[float, ...]], best: Candidate) -> None:
        """Simulate what ranks before the best and is nearly as good by its bound, until one holds."""
        bar = self.best[0] * (1 + NEARLY)
        better = [(rank(one), key, number, one) for number, (key, one) in enumerate(self._waiting)]
        better = sorted(one for one in better if one[0] < rank(best) and one[1][0] <= bar)
        for *_, one in better[:_NUM_ALTERNATIVES]:
            self._simulate(one)
            estimate = self.tried[-1].plan.estimate
            totals = estimate.total_s, estimate.total_usd
            if self._aim.allows(*totals) and self._aim.key(*totals)[0] <= bar:
                return

    def best_of(self, clouds: tuple[int, ...]) -> Plan | None:
        """The best plan known for an order of clouds, simulated now if none was; None where none fits."""
        known = [one.plan for one in self.tried if one.candidate.partition.clouds == clouds]
        if known:
            return min(known, key=lambda one: self._aim.key(one.estimate.total_s, one.estimate.total_usd))
        for _, group in sorted(self.groups[clouds], key=lambda one: one[0]):
            if (cuts := self._sorted(group, fits=True)) is not None:
                ways = [(self._bound(one), one) for one in candidates(cuts.partition)]
                return simulated(min(ways, key=lambda one: one[0])[1])[0]
        return None

    def _push(self, key: Key, node: object) -> None:
        heapq.heappush(self._queue, (key, next(self._tickets), node))

    def _open(self, setting: Setting) -> None:
        """Queue all orders of clouds under a setting, or under the next level where there are none."""
        if setting in self._opened:
            return
        self._opened.add(setting)
        groups = [one for one in self._space.groups(setting) if len(one.clouds) <= self._max_stages]
        for group in groups:
            step_s = group.least_step_s()
            if math.isfinite(step_s):
                key, is_allowed = self._key(group, step_s, group.least_usd(step_s))
                self.groups.setdefault(group.clouds, []).append((key, group))
                if is_allowed and not (self._needs_price and group.usd_per_s is None):
                    self._push(key, group)
        if not groups:
            for later in self._next_levels(setting):
                self._open(later)

    def _next_levels(self, setting: Setting) -> list[Setting]:
        """The same micro-batches with the next memory options, if there are any."""
        later = self._levels[self._levels.index(setting.level) + 1 :]
        return [Setting(num_microbatches=setting.num_microbatches, level=one) for one in later[:1]]

    def _cut(self, group: Group) -> None:
        """Bound all cuts of a group; where memory makes them slower, look at the next memory options too."""
        cuts = self._sorted(group, fits=True)
        roomy = self._sorted(group, fits=False, has_cuts=cuts)
        if cuts is not None:
            self._push(cuts.keys[0], cuts)
        if roomy is not None and (cuts is None or roomy.keys[0][0] < cuts.keys[0][0] * (1 - 1e-6)):
            for later in self._next_levels(group.setting):
                self._push(roomy.keys[0], later)

    def _sorted(self, group: Group, *, fits: bool, has_cuts: _Cuts | None = None) -> _Cuts | None:
        """The cuts of a group by their bounds, None where none fits; of equal ones the most even first."""
        rows = group.stops
        if has_cuts is not None and not _is_bound_by_memory(group, rows):
            return has_cuts
        total_s, usd, slowest_s = group.bounds(rows, fits=fits)
        self._work += rows.size / _CUTS_PER_PASS
        self.num_bounded += len(rows) if fits else 0
        is_possible = np.isfinite(total_s)
        if not is_possible.any():
            return None
        rows, total_s = rows[is_possible], total_s[is_possible]
        usd, slowest_s = usd[is_possible], slowest_s[is_possible]
        least = usd if self._aim.by_price else total_s
        scale = max(float(least.min()), 1e-30)
        order = np.lexsort((slowest_s, np.round(total_s / total_s.min(), 9), np.round(least / scale, 9)))
        keys = [self._aim.key(float(total_s[one]), float(usd[one])) for one in order[:_MOST_CUTS]]
        return _Cuts(group=group, keys=keys, rows=rows[order[:_MOST_CUTS]])

    def _code(self, cuts: _Cuts) -> None:
        """Put the next cut into the queue with each of its codecs, and the cuts behind it."""
        for one in candidates(cuts.partition):
            key = self._bound(one)
            self._work += _PASSES_PER_CANDIDATE
            if self._is_allowed(one):
                self._push(key, one)
        cuts.next += 1
        if cuts.next < len(cuts.keys):
            self._push(cuts.keys[cuts.next], cuts)

    def _simulate(self, candidate: Candidate) -> None:
        plan, num_passes = simulated(candidate)
        self._work += num_passes
        estimate = plan.estimate
        self.tried.append(Tried(candidate=candidate, plan=plan))
        if self._aim.allows(estimate.total_s, estimate.total_usd):
            self.best = min(self.best, self._aim.key(estimate.total_s, estimate.total_usd))

    def _key(self, group: Group, step_s: float, usd: float | None) -> tuple[Key, bool]:
        totals = group.num_steps * step_s, None if usd is None else group.num_steps * usd
        return self._aim.key(*totals), self._aim.allows(*totals)

    def _bound(self, candidate: Candidate) -> Key:
        return self._aim.key(*_least_totals(candidate))

    def _is_allowed(self, candidate: Candidate) -> bool:
        return self._aim.allows(*_least_totals(candidate))


def _least_totals(candidate: Candidate) -> tuple[float, float | None]:
    """The least time and price of a run."""
    num_steps = candidate.partition.supply.step.num_steps - candidate.num_warmup_steps
    total_s = num_steps * scenario_bound_s(candidate.scenario)
    num_bytes = _usd_of_traffic(candidate, candidate.scenario) * num_steps
    if candidate.warmup is not None:
        total_s += candidate.num_warmup_steps * scenario_bound_s(candidate.warmup)
        num_bytes += candidate.num_warmup_steps * _usd_of_traffic(candidate, candidate.warmup)
    prices = [one.usd_per_hour for one in candidate.partition.facts]
    if None in prices:
        return total_s, None
    return total_s, sum(one or 0.0 for one in prices) / 3600 * total_s + num_bytes


def _usd_of_traffic(candidate: Candidate, scenario: Scenario) -> float:
    hops = zip(scenario.hops, candidate.partition.link_terms, strict=True)
    each = sum((hop.forward_bytes + hop.backward_bytes) * (link.usd_per_gib or 0.0) for hop, link in hops)
    return float(scenario.num_microbatches * each / _GIB)


def _is_bound_by_memory(group: Group, rows: Stops) -> bool:
    """Whether some stage has less memory than all its micro-batches would take."""
    supply, setting = group.space.supply, group.setting
    each = zip(group.clouds, _starts(rows).T, rows.T, strict=True)
    return any(
        bool((supply.table(cloud, setting).held[a, b] < group.space.rounds(cloud, setting)).any())
        for cloud, a, b in each
    )


def _starts(rows: Stops) -> Stops:
    return np.hstack([np.zeros((len(rows), 1), dtype=np.int64), rows[:, :-1]])


def _no_layers(size: int) -> Table:
    """Infinite where a stage would have no layer."""
    return np.where(np.tri(size, dtype=bool), np.inf, 0.0)
