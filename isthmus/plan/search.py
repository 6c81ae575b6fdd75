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
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import numpy as np

from isthmus.job import Job
from isthmus.plan.candidates import Candidate, Placement, candidates, neighbours, simulated
from isthmus.plan.job_facts import MemoryOptions, run_order
from isthmus.plan.memory import Sharding
from isthmus.plan.plan import PipelineSettings, Plan
from isthmus.plan.space import CloudOrder, Stops, all_orders
from isthmus.plan.study import LOSSES, Clouds, Setting, Study

Progress = Callable[[str], None]
Key = tuple[float, float]
"""What is to be least, and then the time."""
Tried = tuple[Candidate, Plan]
"""A candidate that was simulated, and its plan."""

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
    needs_price: bool = False
    """Whether pipelines without a known price are left out."""
    order: tuple[str, ...] = ()
    """The clouds as a run takes them by itself, which is the order of one of several equals."""

    @classmethod
    def of(cls, job: Job) -> "Aim":
        """The aim of a job: with a deadline the price is to be least, else the time."""
        limits = job.limits
        return cls(
            deadline_s=limits.deadline_s or math.inf,
            budget_usd=limits.budget_usd or math.inf,
            by_price=limits.deadline_s is not None,
            needs_price=limits.counts_money,
            order=run_order(job.used()),
        )

    def key(self, total_s: float, total_usd: float | None) -> Key:
        """What is to be least."""
        return (total_usd or 0.0, total_s) if self.by_price else (total_s, total_s)

    def allows(self, total_s: float, total_usd: float | None) -> bool:
        """Whether a run is within time and budget."""
        return total_s <= self.deadline_s and (total_usd or 0.0) <= self.budget_usd

    def pick(self, plans: Sequence[Plan]) -> Plan:
        """The best, or one that is nearly as good and has less loss, costs less or is simpler."""
        cheap = _nearly_least(plans, lambda one: self.key(*one.totals)[0])
        near = _nearly_least(cheap, lambda one: one.estimate.total_s)
        best = min(near, key=lambda one: (*_rank(one)[:2], one.totals[1] or 0.0, *_rank(one)[2:]))
        most_usd = (best.totals[1] or 0.0) * (1 + NEARLY)
        alike = [
            one for one in near if _rank(one)[:4] == _rank(best)[:4] and (one.totals[1] or 0.0) <= most_usd
        ]
        return min(alike, key=lambda one: (one.clouds != self.order, one is not best, *_rank(one)))

    def pick_tried(self, tried: Sequence[Tried], job: Job) -> Tried | None:
        """The best of what was simulated and keeps to the limits, None where nothing does."""
        most = LOSSES[job.limits.codec_loss]
        allowed = [one for one in tried if one[1].loss <= most and self.allows(*one[1].totals)]
        if not allowed:
            return None
        best = self.pick([plan for _, plan in allowed])
        return next(one for one in allowed if one[1] is best)


def _rank(plan: Plan) -> tuple[float, ...]:
    """What one of several equals is chosen by, beside its price."""
    return plan.loss, plan.lossiness, len(plan.memory_words), len(plan.stages), plan.estimate.total_s


def _nearly_least(plans: Sequence[Plan], figure: Callable[[Plan], float]) -> list[Plan]:
    least = min(map(figure, plans))
    return [one for one in plans if figure(one) <= least * (1 + NEARLY)]


@dataclass(slots=True, kw_only=True)
class _Cuts:
    """The cuts of an order by their bounds, the least first, and the next to look at."""

    order: CloudOrder
    keys: list[Key]
    rows: Stops
    next: int = 0

    @property
    def placement(self) -> Placement:
        return placement_of(self.order, self.rows[self.next])


def placement_of(order: CloudOrder, row: Stops) -> Placement:
    """An order of clouds with one of its cuts."""
    stops = tuple(int(one) for one in row)
    return Placement(study=order.study, setting=order.setting, clouds=order.clouds, stops=stops)


class BestFirst:
    """The search itself: a queue of all that might be, by its bound."""

    def __init__(
        self, study: Study, aim: Aim, *, levels: Sequence[MemoryOptions], max_stages: float = math.inf
    ) -> None:
        self._study = study
        self._aim = aim
        self._levels = tuple(levels)
        self._max_stages = max_stages
        self._tickets = count()
        self._queue: list[tuple[Key, int, object]] = []
        self._opened: set[Setting] = set()
        self._waiting: list[tuple[Key, Candidate]] = []
        self._work = 0.0
        self.orders: dict[Clouds, list[tuple[Key, CloudOrder]]] = {}
        """All that was looked at, by order of clouds."""
        self.tried: list[Tried] = []
        self.best: Key = (math.inf, math.inf)
        self.num_bounded = 0
        """Cuts that have a bound."""
        for number in study.microbatch_choices() if levels else ():
            self._open(Setting(num_microbatches=number, memory=levels[0]))

    def run(self, progress: Progress) -> None:
        """Look at the least, again and again, until nothing that is left can be better."""
        progress("weighing pipelines")
        while self._queue and self._queue[0][0] < self.best:
            is_found = math.isfinite(self.best[0])
            if self._work > MAX_PASSES * (1 if is_found else _PATIENCE):
                break
            _, _, node = heapq.heappop(self._queue)
            match node:
                case Setting():
                    self._open(node)
                case CloudOrder():
                    self._cut(node)
                case _Cuts():
                    self._code(node)
                case Candidate():
                    progress(f"simulating plan {len(self.tried) + 1}")
                    self._simulate(node)
        self._waiting += [(key, one) for key, _, one in self._queue if isinstance(one, Candidate)]
        self._climb()
        best = self._aim.pick_tried(self.tried, self._study.job)
        if best is not None:
            self._try_alternatives(best[0])

    def _climb(self) -> None:
        """Change the codecs of the best plans link by link, as long as that makes a better one."""
        climbed: set[int] = set()
        while self._work <= MAX_PASSES:
            ranked = sorted(self.tried, key=lambda one: self._order_of(one[1]))[:_NUM_CLIMBED]
            start = next((one for one, _ in ranked if id(one) not in climbed), None)
            if start is None:
                return
            climbed.add(id(start))
            for one in neighbours(start):
                self._work += _PASSES_PER_CANDIDATE
                if self._work <= MAX_PASSES:
                    totals = one.least_totals()
                    if self._aim.allows(*totals) and self._aim.key(*totals) < self.best:
                        self._simulate(one)

    def _order_of(self, plan: Plan) -> tuple[bool, Key]:
        return not self._aim.allows(*plan.totals), self._aim.key(*plan.totals)

    def _try_alternatives(self, best: Candidate) -> None:
        """Simulate what is simpler than the best and nearly as good by its bound, until one holds."""
        bar = self.best[0] * (1 + NEARLY)
        listed = self._promising(self._study.run_order)
        if listed is not None and len(listed.placement.clouds) == len(best.placement.clouds):
            self._waiting.append((self._aim.key(*listed.least_totals()), listed))
        better = [(one.simplicity, key, number, one) for number, (key, one) in enumerate(self._waiting)]
        better = sorted(one for one in better if one[0] < best.simplicity and one[1][0] <= bar)
        for *_, one in better[:_NUM_ALTERNATIVES]:
            plan = self._simulate(one)
            if self._aim.allows(*plan.totals) and self._aim.key(*plan.totals)[0] <= bar:
                return

    def best_of(self, clouds: Clouds) -> Plan | None:
        """The best plan known for an order of clouds, simulated now if none was; None where none fits."""
        known = [plan for one, plan in self.tried if one.placement.clouds == clouds]
        if known:
            return min(known, key=lambda one: self._aim.key(*one.totals))
        promising = self._promising(clouds)
        return None if promising is None else simulated(promising)[0]

    def _promising(self, clouds: Clouds) -> Candidate | None:
        """The candidate with the least bound of an order of clouds, None where none fits."""
        for _, order in sorted(self.orders.get(clouds, ()), key=lambda one: one[0]):
            cuts = self._sorted(order, fits=True)
            if ways := [] if cuts is None else candidates(cuts.placement):
                return min(ways, key=lambda one: self._aim.key(*one.least_totals()))
        return None

    def _push(self, key: Key, node: object) -> None:
        heapq.heappush(self._queue, (key, next(self._tickets), node))

    def _open(self, setting: Setting) -> None:
        """Queue all orders of clouds under a setting, or under the next level where there are none."""
        if setting in self._opened:
            return
        self._opened.add(setting)
        orders = [one for one in all_orders(self._study, setting) if len(one.clouds) <= self._max_stages]
        for order in orders:
            step_s = order.least_step_s()
            if math.isfinite(step_s):
                usd = order.least_usd(step_s)
                totals = order.num_steps * step_s, None if usd is None else order.num_steps * usd
                key = self._aim.key(*totals)
                self.orders.setdefault(order.clouds, []).append((key, order))
                if self._aim.allows(*totals) and not (self._aim.needs_price and usd is None):
                    self._push(key, order)
        if not orders:
            for later in self._next_levels(setting):
                self._open(later)

    def _next_levels(self, setting: Setting) -> list[Setting]:
        """The same micro-batches with the next memory options, if there are any."""
        later = self._levels[self._levels.index(setting.memory) + 1 :]
        return [replace(setting, memory=one) for one in later[:1]]

    def _cut(self, order: CloudOrder) -> None:
        """Bound all cuts of an order; where memory makes them slower, look at the next memory options too."""
        cuts = self._sorted(order, fits=True)
        if cuts is not None:
            self._push(cuts.keys[0], cuts)
            if not order.is_bound_by_memory(order.stops):
                return
        roomy = self._sorted(order, fits=False)
        if roomy is not None and (cuts is None or roomy.keys[0][0] < cuts.keys[0][0] * (1 - 1e-6)):
            for later in self._next_levels(order.setting):
                self._push(roomy.keys[0], later)

    def _sorted(self, order: CloudOrder, *, fits: bool) -> _Cuts | None:
        """The cuts of an order by their bounds, None where none fits; of equal ones the most even first."""
        rows = order.stops
        total_s, usd, slowest_s = order.bounds(rows, fits=fits)
        self._work += rows.size / _CUTS_PER_PASS
        self.num_bounded += len(rows) if fits else 0
        is_possible = np.isfinite(total_s)
        if not is_possible.any():
            return None
        rows, total_s = rows[is_possible], total_s[is_possible]
        usd, slowest_s = usd[is_possible], slowest_s[is_possible]
        least = usd if self._aim.by_price else total_s
        scale = max(float(least.min()), 1e-30)
        ranked = np.lexsort((slowest_s, np.round(total_s / total_s.min(), 9), np.round(least / scale, 9)))
        keys = [self._aim.key(float(total_s[one]), float(usd[one])) for one in ranked[:_MOST_CUTS]]
        return _Cuts(order=order, keys=keys, rows=rows[ranked[:_MOST_CUTS]])

    def _code(self, cuts: _Cuts) -> None:
        """Put the next cut into the queue with each of its codecs, and the cuts behind it."""
        for one in candidates(cuts.placement):
            totals = one.least_totals()
            self._work += _PASSES_PER_CANDIDATE
            if self._aim.allows(*totals):
                self._push(self._aim.key(*totals), one)
        cuts.next += 1
        if cuts.next < len(cuts.keys):
            self._push(cuts.keys[cuts.next], cuts)

    def _simulate(self, candidate: Candidate) -> Plan:
        plan, num_passes = simulated(candidate)
        self._work += num_passes
        self.tried.append((candidate, plan))
        if self._aim.allows(*plan.totals):
            self.best = min(self.best, self._aim.key(*plan.totals))
        return plan


@dataclass(kw_only=True)
class Pipelines:
    """All that was searched for one aim: plans that were simulated, and orders that lost."""

    study: Study
    aim: Aim
    progress: Progress
    searches: list[BestFirst] = field(default_factory=list)

    @property
    def tried(self) -> list[Tried]:
        """All that was simulated; of last resorts only what has fewer stages than anything else."""
        every = [one for search in self.searches for one in search.tried]
        usual = [len(plan.stages) for _, plan in every if not self._is_last_resort(plan)]
        fewest = min(usual, default=math.inf)
        return [one for one in every if not self._is_last_resort(one[1]) or len(one[1].stages) < fewest]

    @property
    def best(self) -> Tried | None:
        """The best within the limits, None where nothing is."""
        return self.aim.pick_tried(self.tried, self.study.job)

    @property
    def num_bounded(self) -> int:
        """Cuts that were weighed by their bound."""
        return sum(one.num_bounded for one in self.searches)

    @property
    def orders(self) -> Iterator[CloudOrder]:
        """All orders of clouds that may fit."""
        return (order for one in self.searches for each in one.orders.values() for _, order in each)

    @property
    def has_priced(self) -> bool:
        """Whether the price of any pipeline that may fit is known."""
        usd_per_s = self.study.usd_per_s
        return any(
            usd_per_s(one.clouds) is not None and math.isfinite(one.slowest_s(fits=True))
            for one in self.orders
        )

    def others(self, best: Plan, most: int) -> Iterator[Plan]:
        """The best plan of each other order of clouds, the most promising first."""
        ranked = sorted(
            (min(key for key, _ in orders), number, clouds)
            for number, search in enumerate(self.searches)
            for clouds, orders in search.orders.items()
        )
        seen = {best.clouds}
        for _, number, clouds in ranked:
            plan = self.searches[number].best_of(clouds) if len(seen) <= 2 * most else None
            if plan is not None and plan.clouds not in seen:
                seen.add(plan.clouds)
                yield plan

    def search(self, aim: Aim) -> None:
        """Search under the job's policy, and where memory binds, with fully sharded stages too."""
        study = self.study
        usual = [one for one in study.levels if not study.is_last_resort(one)]
        self._search(study, aim, usual)
        fewest = _fewest_stages(study, usual)
        if fewest > study.sizes.start:
            # The optimizer on the host or in 8 bits, only where nothing else fits, or where fewer stages do.
            resorts = [one for one in study.levels if study.is_last_resort(one)]
            self._search(study, aim, resorts, max_stages=fewest - 1)
        best = aim.pick_tried(self.tried, study.job)
        is_bound = math.isinf(fewest) if best is None else _is_bound(best[1])
        alike = study.in_lock_step if is_bound else None
        if alike is not None:
            has_usual = best is not None and not self._is_last_resort(best[1])
            full = [
                one
                for one in alike.levels
                if one.sharding is Sharding.FULL and not (has_usual and alike.is_last_resort(one))
            ]
            self._search(alike, aim, full)

    def _search(
        self, study: Study, aim: Aim, levels: Sequence[MemoryOptions], *, max_stages: float = math.inf
    ) -> None:
        search = BestFirst(study, aim, levels=levels, max_stages=max_stages)
        search.run(self.progress)
        self.searches.append(search)

    def _is_last_resort(self, plan: Plan) -> bool:
        return self.study.is_last_resort(plan.memory_options)


def find(study: Study, aim: Aim, progress: Progress) -> Pipelines:
    """Search for the aim; where the price is to be least, then for the fastest of what is nearly as cheap."""
    found = Pipelines(study=study, aim=aim, progress=progress)
    found.search(aim)
    best = found.best if aim.by_price else None
    if best is not None and best[1].estimate.total_usd is not None:
        enough_usd = min(aim.budget_usd, best[1].estimate.total_usd * (1 + NEARLY))
        found.search(replace(aim, by_price=False, budget_usd=enough_usd))
    return found


def _fewest_stages(study: Study, levels: Sequence[MemoryOptions]) -> float:
    """The fewest stages that fit with these memory options."""
    number = max(study.microbatch_choices())
    for size in study.sizes:
        for memory in reversed(levels):
            orders = all_orders(study, Setting(num_microbatches=number, memory=memory))
            if any(len(one.clouds) == size and math.isfinite(one.slowest_s(fits=True)) for one in orders):
                return size
    return math.inf


def _is_bound(plan: Plan) -> bool:
    """Whether more memory would make it faster."""
    caps = plan.settings.max_in_flight if isinstance(plan.settings, PipelineSettings) else None
    return caps is not None or plan.memory_options.recompute
