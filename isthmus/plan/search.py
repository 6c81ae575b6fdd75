"""Finds the best pipelines by branch and bound.

All that might be the best is queued by its lower bound. The first of the queue is looked at more closely,
until nothing in the queue can be better than the best that was simulated:

    micro-batches and memory options ──► orders of clouds ──► cuts ──► codecs ──► simulated

Memory options beyond the first are tried where memory makes a step longer. Work is bounded and not time, so
that plans are the same on every machine.

The best pipelines of a job: which memory options and policies are searched, and one of several as good.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import numpy as np

from isthmus.job import Job
from isthmus.plan.candidates import Candidate, Partition, candidates, neighbours, simulated
from isthmus.plan.job_facts import MemoryOptions
from isthmus.plan.memory import Sharding
from isthmus.plan.plan import PipelineSettings, Plan
from isthmus.plan.scenario import Scenario
from isthmus.plan.space import Group, Space, is_bound_by_memory
from isthmus.plan.stage_tables import MAX_MICROBATCHES, Setting, microbatch_choices
from isthmus.plan.step_time import scenario_bound_s
from isthmus.plan.study import LOSSES, Study
from isthmus.plan.walks import Stops

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
            cuts = self._sorted(group, fits=True)
            if ways := [] if cuts is None else candidates(cuts.partition):
                return simulated(min(ways, key=self._bound))[0]
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
        if has_cuts is not None and not is_bound_by_memory(group, rows):
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


@dataclass(kw_only=True)
class Pipelines:
    """All that was searched for one aim: plans that were simulated, and orders that lost."""

    searches: list[BestFirst] = field(default_factory=list)

    @property
    def tried(self) -> list[Tried]:
        """All that was simulated; of last resorts only what has fewer stages than anything else."""
        every = [one for search in self.searches for one in search.tried]
        fewest = min((len(one.plan.stages) for one in every if not _is_last_resort(one)), default=math.inf)
        return [one for one in every if not _is_last_resort(one) or len(one.plan.stages) < fewest]

    @property
    def num_bounded(self) -> int:
        """Cuts that were weighed by their bound."""
        return sum(one.num_bounded for one in self.searches)

    @property
    def fits(self) -> bool:
        """Whether any pipeline fits."""
        return bool(self.tried) or any(one.groups for one in self.searches)

    @property
    def has_priced(self) -> bool:
        """Whether the price of any pipeline that may fit is known."""
        groups = (group for one in self.searches for each in one.groups.values() for _, group in each)
        return any(
            group.usd_per_s is not None and math.isfinite(group.slowest_s(fits=True)) for group in groups
        )

    def others(self, best: Plan, most: int) -> Iterator[Plan]:
        """The best plan of each other order of clouds, the most promising first."""
        ranked = sorted(
            (min(key for key, _ in groups), number, clouds)
            for number, search in enumerate(self.searches)
            for clouds, groups in search.groups.items()
        )
        seen = {best.clouds}
        for _, number, clouds in ranked:
            plan = self.searches[number].best_of(clouds) if len(seen) <= 2 * most else None
            if plan is not None and plan.clouds not in seen:
                seen.add(plan.clouds)
                yield plan


def aim_of(job: Job) -> Aim:
    """With a deadline the price is to be least, else the time."""
    limits = job.limits
    return Aim(
        deadline_s=limits.deadline_s or math.inf,
        budget_usd=limits.budget_usd or math.inf,
        by_price=limits.deadline_s is not None,
    )


def find(ready: Study, aim: Aim, progress: Progress, *, needs_price: bool) -> Pipelines:
    """Search for the aim; where the price is to be least, then for the fastest of what is nearly as cheap."""
    found = Pipelines()
    _find(found, ready, aim, progress, needs_price=needs_price)
    best = pick_tried(found.tried, ready.job, aim) if aim.by_price else None
    if best is not None and best.plan.estimate.total_usd is not None:
        enough_usd = min(aim.budget_usd, best.plan.estimate.total_usd * (1 + NEARLY))
        fast = replace(aim, by_price=False, budget_usd=enough_usd)
        _find(found, ready, fast, progress, needs_price=needs_price)
    return found


def _find(found: Pipelines, ready: Study, aim: Aim, progress: Progress, *, needs_price: bool) -> None:
    """Search under the job's policy, and where memory binds, fully sharded stages with one schedule too."""
    mild = [number for number, one in enumerate(ready.supply.levels) if not one.is_last_resort]
    _search(found, ready, aim, progress, needs_price=needs_price, levels=mild)
    fewest = _fewest_stages(ready)
    _add_last_resorts(found, ready, aim, progress, needs_price=needs_price, fewest=fewest)
    best = pick_tried(found.tried, ready.job, aim)
    is_bound = math.isinf(fewest) if best is None else _is_bound(best.plan)
    alike = ready.in_lock_step if is_bound else None
    if alike is not None:
        has_mild = best is not None and best.plan.sparing in mild_options(ready)
        full = [
            number
            for number, one in enumerate(alike.supply.levels)
            if one.sharing is Sharding.FULL and not (has_mild and one.is_last_resort)
        ]
        _search(found, alike, aim, progress, needs_price=needs_price, levels=full)


def _search(
    found: Pipelines,
    ready: Study,
    aim: Aim,
    progress: Progress,
    *,
    needs_price: bool,
    levels: Sequence[int],
    max_stages: int | None = None,
) -> None:
    progress("weighing pipelines")
    search = BestFirst(
        Space(supply=ready.supply, terms=ready.terms),
        aim,
        numbers=_numbers(ready),
        levels=levels,
        max_stages=max_stages,
        needs_price=needs_price,
    )
    search.run(progress)
    best = pick_tried(search.tried, ready.job, aim)
    if best is not None:
        search.try_alternatives(_simplicity, best.candidate)
    found.searches.append(search)


def _add_last_resorts(
    found: Pipelines, ready: Study, aim: Aim, progress: Progress, *, needs_price: bool, fewest: float
) -> None:
    """The optimizer on the host or in 8 bits, only where nothing else fits, or where fewer stages do."""
    levels = ready.supply.levels
    resorts = [number for number, one in enumerate(levels) if one.is_last_resort]
    num_clouds = len(ready.clouds)
    least = ready.terms.constraints.sizes(num_clouds).start
    if not resorts or fewest <= least:
        return
    most = num_clouds if math.isinf(fewest) else int(fewest) - 1
    _search(found, ready, aim, progress, needs_price=needs_price, levels=resorts, max_stages=most)


def _fewest_stages(ready: Study) -> float:
    """The fewest stages that fit without a last resort."""
    space = Space(supply=ready.supply, terms=ready.terms)
    number = max(_numbers(ready))
    for size in ready.terms.constraints.sizes(space.num_clouds):
        for level, one in reversed(list(enumerate(ready.supply.levels))):
            if not one.is_last_resort and space.can_be(Setting(num_microbatches=number, level=level), size):
                return size
    return math.inf


def _numbers(ready: Study) -> list[int]:
    """Numbers of micro-batches to try."""
    ranks = [cloud.num_ranks for cloud in ready.clouds]
    return microbatch_choices(
        ready.step.num_sequences,
        given=ready.strategy.microbatches,
        most=MAX_MICROBATCHES,
        num_ranks=min(ranks),
        multiple_of=math.lcm(*ranks) if ready.terms.policy.keeps_order else 1,
    )


def pick_tried(tried: Sequence[Tried], job: Job, aim: Aim) -> Tried | None:
    """The best of what was simulated and keeps to the limits, None where nothing does."""
    allowed = [
        one
        for one in tried
        if one.plan.loss <= LOSSES[job.limits.codec_loss]
        and aim.allows(one.plan.estimate.total_s, one.plan.estimate.total_usd)
    ]
    plans = [one.plan for one in allowed]
    if not plans:
        return None
    best = pick(plans, aim)
    return next(one for one in allowed if one.plan is best)


def pick(plans: Sequence[Plan], aim: Aim) -> Plan:
    """The best, or one that is nearly as good and has less loss, costs less or is simpler."""
    cheap = _nearly_least(plans, lambda one: aim.key(one.estimate.total_s, one.estimate.total_usd)[0])
    return min(
        _nearly_least(cheap, lambda one: one.estimate.total_s),
        key=lambda one: (
            one.loss,
            one.strength,
            one.estimate.total_usd or 0.0,
            len(one.savers),
            len(one.stages),
            one.estimate.total_s,
        ),
    )


def _nearly_least(plans: Sequence[Plan], figure: Callable[[Plan], float]) -> list[Plan]:
    least = min(map(figure, plans))
    return [one for one in plans if figure(one) <= least * (1 + NEARLY)]


def _is_last_resort(one: Tried) -> bool:
    partition = one.candidate.partition
    return partition.supply.levels[partition.setting.level].is_last_resort


def _simplicity(candidate: Candidate) -> tuple[float, ...]:
    """What one of several equals is chosen by, as far as it is known before a simulation."""
    level = candidate.partition.supply.levels[candidate.partition.setting.level]
    return (*candidate.mildness, len(level.words(candidate.partition.facts)), len(candidate.partition.clouds))


def _is_bound(plan: Plan) -> bool:
    """Whether more memory would make it faster."""
    caps = plan.settings.max_in_flight if isinstance(plan.settings, PipelineSettings) else None
    return caps is not None or plan.sparing.recompute


def mild_options(ready: Study) -> set[MemoryOptions]:
    """Memory options without a last resort."""
    return {one.sparing for one in ready.supply.levels if not one.is_last_resort}
