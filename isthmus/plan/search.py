"""Finds the best pipelines by branch and bound.

All that might be the best is queued by its lower bound. The first of the queue is looked at more closely,
until nothing in the queue can be better than the best that was simulated:

    micro-batches and memory options ──► orders of clouds ──► cuts ──► codecs ──► simulated

Up to four clouds every order of every subset and every cut is enumerated. Beyond that a beam extends orders
cloud by cloud: under a cap on the time of a stage each cloud takes as many layers as keep to it, the orders
with the least time per layer are kept, and every cut near those that are found is enumerated. Memory options
beyond the first are tried where memory makes a step longer. Work is bounded and not time, so that plans are
the same on every machine.
"""

import functools
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, count, pairwise, permutations, product
from typing import Final

import numpy as np

from isthmus.errors import UserError
from isthmus.job.codec import BottleneckSpec
from isthmus.plan.candidates import Candidate, Stops, candidates, planned_stages, simulated
from isthmus.plan.codecs import RAW_PAIR, Loss
from isthmus.plan.costs import Precision
from isthmus.plan.job_facts import frozen_bottleneck
from isthmus.plan.plan import NEARLY, Aim, Key, Plan, PlannedStage
from isthmus.plan.scenario import HopTimes, Mask, Policy, StageTimes, Table, step_bound_s
from isthmus.plan.study import CloudOrder, Clouds, MemoryOptions, Setting, Study, study
from isthmus.units import format_bytes, join_words

Progress = Callable[[str], None]
Tried = tuple[Candidate, Plan]
"""A candidate that was simulated, and its plan."""

_GIB: Final = 2**30
_NO_CAP: Final = 2.0**40
# Clouds whose orders and cuts are all enumerated.
_MAX_ENUMERATED: Final = 4
_BEAM_WIDTH: Final = 24
_NUM_HALVINGS: Final = 9
_CAPS: Final = (1.0, 1.02, 1.05, 1.1, 1.16, 1.25, 1.4, 1.7, 2.2)
# Of so few stages a beam has all cuts, of more those near the ones that it finds.
_MAX_ALL_CUTS: Final = 2

# Passes to simulate for one search, about half a second, and what other work counts for.
MAX_PASSES: Final = 16_000
_PASSES_PER_CANDIDATE: Final = 24
_CUTS_PER_PASS: Final = 100
# Without anything within the limits the search takes so many times the work.
_PATIENCE: Final = 4
_NUM_SIMPLER: Final = 12
_NUM_CLIMBED: Final = 4
# Cuts of one order that are looked at more closely, at most.
_MOST_CUTS: Final = 512
_NONE: Final[Key] = (math.inf, math.inf)


def all_orders(study: Study, setting: Setting) -> Iterator[CloudOrder]:
    """Every order of clouds along the links under a setting, the shortest first, or those of a beam."""
    num_clouds, is_in_row = len(study.clouds), study.is_in_row
    if num_clouds <= _MAX_ENUMERATED or is_in_row:
        every = (one for size in study.sizes for one in permutations(range(num_clouds), size))
        for clouds in [tuple(range(num_clouds))] if is_in_row else every:
            is_joined = all(pair in study.links for pair in pairwise(clouds))
            if is_joined and (len(clouds) <= _MAX_ENUMERATED or study.stops is not None):
                yield CloudOrder(study=study, setting=setting, clouds=clouds)
    if num_clouds > _MAX_ENUMERATED and study.stops is None:
        for clouds, stops in _Beam.of(study, setting).walks().items():
            yield CloudOrder(study=study, setting=setting, clouds=clouds, found_stops=stops)


@functools.lru_cache(maxsize=64)
def all_cuts(num_layers: int, num_stages: int, allowed: frozenset[int] | None) -> Stops:
    """Every way to cut the layers into stages, one row each."""
    found = list(combinations(range(1, num_layers) if allowed is None else sorted(allowed), num_stages - 1))
    inner = np.array(found, dtype=np.int64).reshape(len(found), num_stages - 1)
    return np.hstack([inner, np.full((len(found), 1), num_layers)])


def cuts_of(order: CloudOrder) -> Stops:
    """The cuts of an order, one row each: those given, those that a beam found, or all."""
    if order.found_stops is not None:
        return order.found_stops
    if order.study.stops is not None:
        return np.array([order.study.stops])
    model = order.study.model
    rows = all_cuts(model.num_layers, len(order.clouds), model.cuts)
    for cut, link in enumerate(order.links):
        if link.ends_encoder:
            rows = rows[rows[:, cut] == model.num_encoder_layers]
    return rows


def _spots(rows: Stops) -> Iterator[tuple[Stops, Stops]]:
    """Of each stage the first layer and the one behind the last, for every row."""
    return zip(np.hstack([np.zeros((len(rows), 1), dtype=np.int64), rows[:, :-1]]).T, rows.T, strict=True)


def least_worst(order: CloudOrder, tables: Sequence[Table]) -> float:
    """The least, over all cuts, of the greatest figure of a stage; infinite where no cut is possible."""
    study = order.study
    tables, num_frozen = list(tables), study.num_frozen
    for cut in range(len(order.clouds) - 1):
        both_ways, one_way = _hops(order, cut)
        if both_ways is None:
            return math.inf
        if num_frozen and one_way is None:
            tables[cut] = np.where(np.arange(len(tables[cut])) <= num_frozen, np.inf, tables[cut])
    if order.found_stops is not None or study.stops is not None or study.model.cuts is not None:
        return float(_worst(cuts_of(order), tables).min(initial=math.inf))
    best = tables[0][0]
    for table in tables[1:]:
        best = np.maximum(best[:, None], table).min(axis=0)
    return float(best[-1])


def least_share(order: CloudOrder) -> float:
    """The least share that an order needs of what it may fill of any memory: up to 1 where it fits."""
    tables = [order.study.needed_share(cloud, order.setting) for cloud in order.clouds]
    return least_worst(order, tables) / order.study.memory_share


def _worst(rows: Stops, tables: Sequence[Table]) -> Table:
    """The greatest figure of a stage, for every row."""
    return np.asarray(np.max([one[spot] for one, spot in zip(tables, _spots(rows), strict=True)], axis=0))


def _stages_s(study: Study, cloud: int, setting: Setting, *, fits: bool) -> Table:
    """What a cloud computes in a step for the layers (a, b); infinite without layers or memory."""
    table = study.table(cloud, setting)
    rounds = -(-setting.num_microbatches // study.clouds[cloud].num_ranks)
    step_s = rounds * (table.forward_s + table.backward_s)
    has_none = np.tri(len(step_s), dtype=bool)
    return np.where(has_none | (fits & (study.num_fitting(cloud, setting) < 1)), np.inf, step_s)


def _hops(order: CloudOrder, cut: int) -> tuple[HopTimes | None, HopTimes | None]:
    """The hop behind a stage with any codec that is allowed, with a gradient and without.

    It takes no less time and no fewer bytes than with any; None where there can be no cut.
    """
    study, setting, pair = order.study, order.setting, (order.clouds[cut], order.clouds[cut + 1])

    def least(has_gradient: bool) -> HopTimes | None:
        if not study.can_cross(pair, setting, has_gradient=has_gradient):
            return None
        crossing = order.crossing(cut, has_gradient=has_gradient)

        def of_any() -> HopTimes:
            allowed = study.links[pair].options(crossing)
            return HopTimes.least([HopTimes.of(order.hop(cut, crossing, one.pair)) for one in allowed])

        return study.once(("hop", pair, crossing), of_any)

    return least(True), least(False) if study.num_frozen else None


def _least_totals(order: CloudOrder) -> tuple[float, float | None]:
    """The least time and price of a run: of what a beam found, or by the slowest stage and every line."""
    study, setting = order.study, order.setting
    rate, num_steps = study.usd_per_s(order.clouds), study.step.num_steps - order.num_warmup_steps
    if order.found_stops is not None:
        every = bounds(order, order.found_stops, fits=True)[:2]
        least_s, least_usd = (float(one.min(initial=math.inf)) for one in every)
        return least_s, None if rate is None else least_usd
    stages_s = [_stages_s(study, cloud, setting, fits=False) for cloud in order.clouds]
    step_s, usd = least_worst(order, stages_s), 0.0
    for cut in range(len(order.clouds) - 1):
        both = [one for one in _hops(order, cut) if one is not None]
        if both:
            hop, more = HopTimes.least(both), setting.num_microbatches - 1
            step_s = max(step_s, float(hop.there_s + hop.back_s + more * np.maximum(hop.down_s, hop.up_s)))
            usd += float(hop.num_bytes) * _usd_per_byte(order, cut)
    return num_steps * step_s, None if rate is None else num_steps * (rate * step_s + usd)


def _usd_per_byte(order: CloudOrder, cut: int) -> float:
    """The price of a byte in all micro-batches of a step over one hop."""
    return order.setting.num_microbatches * (order.links[cut].usd_per_gib or 0.0) / _GIB


def bounds(order: CloudOrder, rows: Stops, *, fits: bool) -> tuple[Table, Table, Table]:
    """The least time of a run for every cut, infinite where none fits; its price; its slowest stage."""
    study, setting, num_first = order.study, order.setting, order.num_warmup_steps
    stages, is_possible = _stages(order, rows, fits=fits)
    hops, raw, usd = list[HopTimes](), list[HopTimes](), np.zeros(len(rows))
    for cut in range(len(order.clouds) - 1):
        both_ways, one_way = _hops(order, cut)
        if both_ways is None:
            raise ValueError("no cut is possible, so none has a bound")
        goes_back = rows[:, cut] > study.num_frozen
        is_possible &= goes_back | (one_way is not None)
        hops.append(both_ways.where(goes_back, one_way or both_ways))
        usd += hops[-1].num_bytes * _usd_per_byte(order, cut)
        raw.append(hops[-1])
        if num_first and order.links[cut].bottleneck is not None:
            crossing = order.crossing(cut, has_gradient=True, is_warmup=True)
            raw[-1] = HopTimes.of(order.hop(cut, crossing, RAW_PAIR))

    def bound_s(hops: Sequence[HopTimes]) -> Table:
        return step_bound_s(stages, hops, num_microbatches=setting.num_microbatches, policy=order.policy)

    num_steps = study.step.num_steps - num_first
    total_s = num_steps * bound_s(hops) + (num_first * bound_s(raw) if num_first else 0.0)
    total_usd = num_steps * usd + (study.usd_per_s(order.clouds) or 0.0) * total_s
    slowest_s = np.maximum.reduce([one.pass_s / one.num_ranks for one in stages])
    return np.where(is_possible, total_s, np.inf), total_usd, slowest_s


def _stages(order: CloudOrder, rows: Stops, *, fits: bool) -> tuple[list[StageTimes], Mask]:
    """The stages of every row, and which rows memory holds."""
    study, given = order.study, order.study.strategy.windows or order.study.strategy.max_in_flight
    stages, is_possible = [], np.ones(len(rows), dtype=bool)
    for index, (cloud, spot) in enumerate(zip(order.clouds, _spots(rows), strict=True)):
        cap = given[index] if isinstance(given, tuple) else given
        fitting = study.num_fitting(cloud, order.setting)[spot] if fits else np.full(len(rows), np.inf)
        is_possible &= fitting >= 1
        is_trained = (rows[:, index] > study.num_frozen) | (index == len(order.clouds) - 1)
        forward_s, backward_s, update_s = (one[spot] for one in study.table(cloud, order.setting))
        stages.append(
            StageTimes(
                forward_s=forward_s,
                backward_s=np.where(is_trained, backward_s, 0.0),
                update_s=update_s,
                cap=np.minimum(fitting, cap or _NO_CAP),
                is_trained=is_trained,
                num_ranks=study.clouds[cloud].num_ranks,
            )
        )
    return stages, is_possible


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beam:
    """Orders of many clouds, by the time in a step that each cloud takes for the layers (a, b)."""

    study: Study
    stages: Sequence[Table]
    once: Sequence[Table]
    """What one micro-batch takes at each cloud."""
    hops: Mapping[tuple[int, int], float]
    """What it takes there and back between two clouds."""
    lines: Mapping[tuple[int, int], float]
    """How long all messages of a step are on the line between two clouds, in the slower direction."""

    @classmethod
    def of(cls, study: Study, setting: Setting) -> "_Beam":
        clouds = range(len(study.clouds))
        each = ((pair, CloudOrder(study=study, setting=setting, clouds=pair)) for pair in sorted(study.links))
        hops = {pair: hop for pair, order in each if (hop := _hops(order, 0)[0]) is not None}
        tables, number = [study.table(cloud, setting) for cloud in clouds], setting.num_microbatches
        return cls(
            study=study,
            stages=[_stages_s(study, cloud, setting, fits=True) for cloud in clouds],
            once=[one.forward_s + one.backward_s for one in tables],
            hops={pair: float(one.there_s + one.back_s) for pair, one in hops.items()},
            lines={pair: number * float(np.maximum(one.down_s, one.up_s)) for pair, one in hops.items()},
        )

    def walks(self) -> dict[Clouds, Stops]:
        """Orders that were found, each with the cuts that are worth a bound."""
        found: dict[Clouds, set[tuple[int, ...]]] = {}
        for cap in self._caps():
            for clouds, stops in self._under(cap):
                found.setdefault(clouds, set()).add(stops)
        return {clouds: self._near(stops) for clouds, stops in found.items()}

    def _caps(self) -> Sequence[float]:
        """The least cap under which any order places all layers, and some above it."""
        finite = np.concatenate([one[np.isfinite(one)] for one in self.stages] + [[*self.lines.values()]])
        finite = finite[finite > 0]
        if not finite.size or not any(self._under(most := float(finite.max()))):
            return ()
        least = float(finite.min())
        for _ in range(_NUM_HALVINGS):
            middle = math.sqrt(least * most)
            least, most = (least, middle) if any(self._under(middle)) else (middle, most)
        return [most * one for one in _CAPS]

    def _under(self, cap: float) -> Iterator[tuple[Clouds, tuple[int, ...]]]:
        num_layers, sizes = self.study.model.num_layers, self.study.sizes
        # For each first layer, the last end that keeps to the cap; 0 where none does.
        places = np.arange(num_layers + 1)
        ends = [np.where(one <= cap, places[None, :], 0).max(axis=1) for one in self.stages]
        states: list[tuple[float, Clouds, tuple[int, ...]]] = [(0.0, (), ())]
        for depth in range(len(self.stages)):
            num_left = sizes.start - depth - 1
            grown = [
                (once + added, (*clouds, cloud), (*stops, stop))
                for once, clouds, stops in states
                for cloud, stop, added in self._next(clouds, stops, ends, cap, num_left=num_left)
            ]
            for _, clouds, stops in grown:
                if stops[-1] == num_layers and len(clouds) in sizes:
                    yield clouds, stops
            rest = [one for one in grown if one[2][-1] < num_layers]
            states = sorted(rest, key=lambda one: (one[0] / one[2][-1], one[1]))[:_BEAM_WIDTH]

    def _next(
        self, order: Clouds, stops: tuple[int, ...], ends: Sequence[Stops], cap: float, *, num_left: int
    ) -> Iterator[tuple[int, int, float]]:
        start = stops[-1] if stops else 0
        for cloud in [len(order)] if self.study.is_in_row else range(len(self.stages)):
            if cloud in order or (order and self.lines.get((order[-1], cloud), math.inf) > cap):
                continue
            # Every cloud that is still to come needs a layer.
            stop = min(int(ends[cloud][start]), self.study.model.num_layers - max(0, num_left))
            if stop > start and math.isfinite(self.stages[cloud][start, stop]):
                hop = self.hops[order[-1], cloud] if order else 0.0
                yield cloud, stop, hop + float(self.once[cloud][start, stop])

    def _near(self, found: Collection[tuple[int, ...]]) -> Stops:
        """The cuts that were found, and those with one end or two neighbouring ends moved."""
        num_stages, allowed = len(next(iter(found))), self.study.model.cuts
        if num_stages <= _MAX_ALL_CUTS:
            return all_cuts(self.study.model.num_layers, num_stages, allowed)
        moves = [(0,) * num_stages]
        for index, size, wide in product(range(num_stages - 1), (-3, -2, -1, 1, 2, 3), (1, 2)):
            ends = range(index, min(index + wide, num_stages - 1))
            moves.append(tuple(size if one in ends else 0 for one in range(num_stages)))
        rows = np.unique(np.concatenate([np.array(one) + np.array(moves) for one in sorted(found)]), axis=0)
        is_cut = (np.diff(rows, axis=1, prepend=0) > 0).all(axis=1)
        if allowed is not None:
            is_cut &= np.isin(rows[:, :-1], sorted(allowed)).all(axis=1)
        return np.asarray(rows[is_cut])


class Search:
    """All that was searched for one aim: plans that were simulated, and orders that lost.

    Where the price is to be least, the fastest of what is nearly as cheap is searched for behind it.
    """

    def __init__(self, study: Study, aim: Aim, progress: Progress) -> None:
        self.study, self.aim = study, aim
        self.orders: dict[Clouds, list[tuple[Key, CloudOrder]]] = {}
        """All that was looked at, by order of clouds."""
        self.tried: list[Tried] = []
        self.num_bounded = 0
        """Cuts that have a bound."""
        self._progress = progress
        self._is_tight = False
        self._explore(aim)
        best = self.best if aim.by_price else None
        if best is not None and best[1].estimate.total_usd is not None:
            enough_usd = min(aim.budget_usd, best[1].estimate.total_usd * (1 + NEARLY))
            self._explore(replace(aim, by_price=False, budget_usd=enough_usd))

    @property
    def best(self) -> Tried | None:
        """The best of what was simulated and keeps to the limits, None where nothing does."""
        return self._pick(self.aim)

    @property
    def has_priced(self) -> bool:
        """Whether the price of any pipeline that may fit is known."""
        every = (order for each in self.orders.values() for _, order in each)
        return any(self.study.usd_per_s(one.clouds) is not None and least_share(one) <= 1 for one in every)

    def others(self, best: Plan, most: int) -> Iterator[Plan]:
        """The best plan of each other order of clouds, the most promising first."""
        ranked = sorted((min(key for key, _ in each), clouds) for clouds, each in self.orders.items())
        for _, clouds in ranked[: 2 * most]:
            plan = self._best_of(clouds)
            if plan is not None and plan.clouds != best.clouds:
                yield plan

    @functools.cached_property
    def _fewest(self) -> float:
        """The fewest stages that fit without a last resort: the optimizer on the host or in 8 bits.

        Last resorts are taken only where nothing else fits, or where fewer stages do.
        """
        number, fewest = max(self.study.microbatch_choices(Policy.LOCK_STEP)), math.inf
        for memory in reversed([*chain(*self._groups(are_resorts=False))]):
            if memory.recompute and fewest > self.study.sizes.start:
                orders = all_orders(self.study, Setting(num_microbatches=number, memory=memory))
                fewest = min([fewest, *(len(one.clouds) for one in orders if least_share(one) <= 1)])
        return fewest

    def _explore(self, aim: Aim) -> None:
        """Look at the least, again and again, until nothing that is left can be better."""
        self._aim, self._tickets, self._opened = aim, count(), set[Setting]()
        self._waiting: list[tuple[Key, int, Candidate]] = []
        """Candidates that were not simulated."""
        totals = [plan.totals for _, plan in self.tried]
        self._least = min((aim.key(*one) for one in totals if aim.allows(*one)), default=_NONE)
        for levels in self._groups(are_resorts=False):
            self._weigh(levels)
        if self._fewest > self.study.sizes.start:
            for levels in self._groups(are_resorts=True):
                self._weigh(levels)
        self._climb()
        if (best := self._pick(aim)) is not None:
            self._try_simpler(best[0])

    def _groups(self, *, are_resorts: bool) -> Iterator[Sequence[MemoryOptions]]:
        """Memory options to try; those of ranks with one schedule come last, and only where memory binds."""
        for levels in (self.study.levels, self.study.synchronous_levels):
            own = [one for one in levels if self.study.is_last_resort(one) is are_resorts]
            if own and (levels is self.study.levels or self._is_tight):
                yield own

    def _weigh(self, levels: Sequence[MemoryOptions]) -> None:
        """Search with some memory options, each opened behind the one before."""
        self._work = 0.0
        self._queue: list[tuple[Key, int, object]] = []
        for number in self.study.microbatch_choices(self.study.policy_under(levels[0])):
            self._open(Setting(num_microbatches=number, memory=levels[0]))
        self._progress("weighing pipelines")
        while self._queue and self._queue[0][0] < self._least:
            if self._work > MAX_PASSES * (1 if self._least < _NONE else _PATIENCE):
                break
            _, _, node = heapq.heappop(self._queue)
            match node:
                case Setting():
                    self._open(node)
                case CloudOrder():
                    self._cut(node)
                case (CloudOrder() as order, np.ndarray() as row):
                    self._code(order, row)
                case Candidate():
                    self._simulate(node)
        self._waiting += [(key, at, one) for key, at, one in self._queue if isinstance(one, Candidate)]

    def _open(self, setting: Setting) -> None:
        """Queue all orders of clouds under a setting, or under the next level where there are none."""
        if setting in self._opened:
            return
        self._opened.add(setting)
        most = self._fewest - 1 if self.study.is_last_resort(setting.memory) else math.inf
        orders = [one for one in all_orders(self.study, setting) if len(one.clouds) <= most]
        for order in orders:
            totals = _least_totals(order)
            if math.isfinite(totals[0]):
                key = self._aim.key(*totals)
                if self._aim is self.aim:
                    self.orders.setdefault(order.clouds, []).append((key, order))
                if self._aim.allows(*totals) and not (self._aim.needs_price and totals[1] is None):
                    self._push(key, order)
        if not orders:
            for later in self._next_levels(setting):
                self._open(later)

    def _push(self, key: Key, node: object) -> None:
        heapq.heappush(self._queue, (key, next(self._tickets), node))

    def _next_levels(self, setting: Setting) -> list[Setting]:
        """The same micro-batches with the next memory options, if there are any, since memory binds."""
        self._is_tight = True
        study, memory = self.study, setting.memory
        levels = study.levels if memory in study.levels else study.synchronous_levels
        later = levels[levels.index(memory) + 1 :][:1]
        is_resort = study.is_last_resort(memory)
        return [replace(setting, memory=one) for one in later if study.is_last_resort(one) is is_resort]

    def _cut(self, order: CloudOrder) -> None:
        """Bound all cuts of an order; where memory makes them slower, look at the next memory options too."""
        cuts, roomy = (self._ranked(order, fits=fits) for fits in (True, False))
        for key, row in cuts:
            self._push(key, (order, row))
        if roomy and (not cuts or roomy[0][0][0] < cuts[0][0][0] * (1 - 1e-6)):
            for later in self._next_levels(order.setting):
                self._push(roomy[0][0], later)

    def _ranked(self, order: CloudOrder, *, fits: bool) -> list[tuple[Key, Stops]]:
        """The cuts of an order by their bounds; of equal ones the most even first."""
        rows = cuts_of(order)
        total_s, usd, slowest_s = bounds(order, rows, fits=fits)
        self._work += rows.size / _CUTS_PER_PASS
        self.num_bounded += len(rows) if fits else 0
        least = usd if self._aim.by_price else total_s
        possible = np.flatnonzero(np.isfinite(total_s))
        if not possible.size:
            return []
        scales = [max(float(one[possible].min()), 1e-30) for one in (total_s, least)]
        order_by = (
            slowest_s,
            *(np.round(one / scale, 9) for one, scale in zip((total_s, least), scales, strict=True)),
        )
        ranked = possible[np.lexsort([one[possible] for one in order_by])][:_MOST_CUTS]
        return [(self._aim.key(float(total_s[one]), float(usd[one])), rows[one]) for one in ranked]

    def _code(self, order: CloudOrder, row: Stops) -> None:
        """Queue a cut with each of its codecs."""
        for one in candidates(order, tuple(map(int, row))):
            self._work += _PASSES_PER_CANDIDATE
            totals = one.least_totals()
            if self._aim.allows(*totals):
                self._push(self._aim.key(*totals), one)

    def _simulate(self, candidate: Candidate) -> Plan:
        self._progress(f"simulating plan {len(self.tried) + 1}")
        plan, num_passes = simulated(candidate)
        self._work += num_passes
        self.tried.append((candidate, plan))
        if self._aim.allows(*plan.totals):
            self._least = min(self._least, self._aim.key(*plan.totals))
        return plan

    def _climb(self) -> None:
        """Change the codecs of the best plans link by link, as long as that makes a better one."""
        climbed = set[int]()
        while self._work <= MAX_PASSES:
            allowed = [one for one in self.tried if self._aim.allows(*one[1].totals)]
            best = sorted(allowed, key=lambda one: self._aim.key(*one[1].totals))[:_NUM_CLIMBED]
            start = next((one for one, _ in best if id(one) not in climbed), None)
            if start is None:
                return
            climbed.add(id(start))
            for one in start.with_codecs():
                self._work += _PASSES_PER_CANDIDATE
                if self._work > MAX_PASSES:
                    return
                totals = one.least_totals()
                if self._aim.allows(*totals) and self._aim.key(*totals) < self._least:
                    self._simulate(one)

    def _try_simpler(self, best: Candidate) -> None:
        """Simulate what is simpler than the best and nearly as good by its bound, until one holds."""
        bar = self._least[0] * (1 + NEARLY)
        listed = self._promising(self.study.run_order)
        if listed is not None and len(listed.order.clouds) == len(best.order.clouds):
            self._waiting.append((self._aim.key(*listed.least_totals()), 0, listed))
        better = [one for one in self._waiting if one[2].simplicity < best.simplicity and one[0][0] <= bar]
        for *_, one in sorted(better, key=lambda one: (one[2].simplicity, *one[:2]))[:_NUM_SIMPLER]:
            plan = self._simulate(one)
            if self._aim.allows(*plan.totals) and self._aim.key(*plan.totals)[0] <= bar:
                return

    def _pick(self, aim: Aim) -> Tried | None:
        most = Loss[self.study.job.limits.codec_loss.upper()]
        allowed = [one for one in self.tried if one[1].loss <= most and aim.allows(*one[1].totals)]
        best = aim.pick([plan for _, plan in allowed]) if allowed else None
        return next((one for one in allowed if one[1] is best), None)

    def _best_of(self, clouds: Clouds) -> Plan | None:
        """The best plan known for an order of clouds, simulated now if none was; None where none fits."""
        known = [plan for one, plan in self.tried if one.order.clouds == clouds]
        if known:
            return min(known, key=lambda one: self.aim.key(*one.totals))
        promising = self._promising(clouds)
        return None if promising is None else simulated(promising)[0]

    def _promising(self, clouds: Clouds) -> Candidate | None:
        """The candidate with the least bound of an order of clouds, None where none fits."""
        known = [order for _, order in sorted(self.orders.get(clouds, ()), key=lambda one: one[0])]
        numbers = dict.fromkeys(one.setting.num_microbatches for one in known)
        # What was not looked at needs more memory options than all that was.
        levels = chain(*self._groups(are_resorts=False), *self._groups(are_resorts=True))
        later = (Setting(num_microbatches=number, memory=one) for one, number in product(levels, numbers))
        for order in chain(known, (replace(known[0], setting=one) for one in later)):
            if self.study.is_last_resort(order.setting.memory) and len(clouds) >= self._fewest:
                break
            for _, row in self._ranked(order, fits=True)[:1] if least_share(order) <= 1 else ():
                if ways := candidates(order, tuple(map(int, row))):
                    return min(ways, key=lambda one: self._aim.key(*one.least_totals()))
        return None


# What is in the way where nothing fits.

_MEMORY_STEP: Final = 1.05
_ROUNDING: Final = 1e-6

Fit = Sequence[tuple[PlannedStage, tuple[str, ...]]]
"""Stages with the memory that they need, and the memory options of each in words."""


def no_room(
    study: Study, fit: Fit, *, claim: str = "nothing fits", cause: str | None = None, ways: Sequence[str] = ()
) -> UserError:
    """What is in the way: the stage that lacks the greatest share of its memory, unless there is a cause.

    `fit` is what would need least memory; `ways` are further ways out, known to work.
    """
    share, found = study.job.limits.memory_share, list(ways)
    if fit:
        wanted_share = math.ceil(100 * max(one.memory_share for one, _ in fit)) / 100
        found += [f"set limits.memory_share to {wanted_share:g}"] if wanted_share <= 1 else []
        small = [one for one, _ in fit if one.memory_share > share]
        # Rounded up, so that what is asked for is enough.
        sizes = [f"{math.ceil(10 * one.memory_bytes / share / _GIB) / 10:g} GiB" for one in small]
        wanted = [f"devices of {size} in {one.cloud!r}" for size, one in zip(sizes, small, strict=True)]
        found += [f"{join_words(wanted)} would do"] if wanted else []
    if cause is None:
        worst, words = max(fit, key=lambda one: one[0].memory_share)
        start = f"even with {join_words(words)}, " if words else ""
        usable = int(share * (worst.capacity_bytes or 0))
        cause = (
            f"{start}a rank of {worst.cloud!r} needs {format_bytes(worst.memory_bytes)} for {worst.holds}, "
            f"and limits.memory_share leaves it {format_bytes(usable)}"
        )
    return UserError(f"{claim}: {cause}", hint="; or ".join(found))


def nothing_fits(ready: Study) -> UserError:
    """Why no pipeline and no single cloud holds the model, and what would help."""
    orders = list(_lean_orders(ready))
    if ready.sizes.start > 1 and not orders:
        return UserError(
            "the links do not join the clouds in a row, which a pipeline needs",
            hint="give each cloud a [[link]] to the next, or name the clouds to use in strategy.clouds",
        )
    fit = _least_memory(ready, orders)
    if not fit:
        bottlenecks = [link for link in ready.job.link if isinstance(link.boundary, BottleneckSpec)]
        if bottlenecks and ready.num_frozen:
            return frozen_bottleneck(bottlenecks[0])
        return UserError(
            "the model does not fit, however much memory there is: a cut or a micro-batch is not possible",
            hint="check strategy.layers, strategy.clouds and strategy.microbatches",
        )
    ways = []
    if not ready.policy.keeps_order and not ready.synchronous_levels:
        own = ready.strategy.model_copy(update={"policy": Policy.LOCK_STEP.value})
        if fits(study(ready.job.model_copy(update={"strategy": own}), source=ready.source)):
            ways.append(
                'set strategy.policy to "lock-step": with one schedule, ranks can shard all of a stage'
            )
    if ready.step.precision is Precision.FLOAT32:
        narrow = ready.but(step=replace(ready.step, precision=Precision.BFLOAT16))
        ways += ['set train.precision to "bfloat16"'] if fits(narrow) else []
    return no_room(ready, fit, ways=ways)


def fits(study: Study) -> bool:
    """Whether any pipeline of the job fits."""
    fit = _least_memory(study, _lean_orders(study))
    return bool(fit) and all(one.memory_share <= study.memory_share for one, _ in fit)


def _lean_orders(ready: Study) -> Iterator[CloudOrder]:
    """Every order of clouds, or those of a beam, as if memory bound nothing, with what needs least of it."""
    roomy, levels = ready.but(memory_share=math.inf), (*ready.levels, *ready.synchronous_levels)
    numbers = {max(ready.microbatch_choices(policy)) for policy in (ready.policy, Policy.LOCK_STEP)}
    for number, memory in product(sorted(numbers), levels):
        if memory.recompute:
            for order in all_orders(roomy, Setting(num_microbatches=number, memory=memory)):
                yield replace(order, study=ready)


def _least_memory(ready: Study, orders: Iterable[CloudOrder]) -> Fit:
    """The pipeline that needs the least share of the memory of any cloud; nothing where there is none."""
    shares = ((ready.memory_share * least_share(one), one) for one in orders)
    share, order = min(shares, key=lambda one: one[0], default=(math.inf, None))
    if order is None or share == math.inf:
        return ()
    rows, ways = cuts_of(order), list[Candidate]()
    needed = _worst(rows, [ready.needed_share(cloud, order.setting) for cloud in order.clouds])
    total_s, _, _ = bounds(order, rows, fits=False)
    row = rows[np.lexsort((total_s, np.where(np.isfinite(total_s), needed, np.inf)))[0]]
    while not ways:
        tight = replace(order, study=ready.but(memory_share=share * (1 + _ROUNDING)))
        ways = candidates(tight, tuple(map(int, row)))
        # What codecs keep comes on top.
        share *= _MEMORY_STEP
    return [(one, order.memory_words) for one in planned_stages(ways[0])]
