"""The best pipelines of a job: which memory options and policies are searched, and one of several as good."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from isthmus.job import Job
from isthmus.plan.costs.memory import Sharding
from isthmus.plan.search.best_first import NEARLY, Aim, BestFirst, Progress, Space, Tried
from isthmus.plan.search.candidates import Candidate
from isthmus.plan.search.choice import PipelineSettings, Plan
from isthmus.plan.search.sparing import Sparing
from isthmus.plan.search.study import LOSSES, Study
from isthmus.plan.search.supply import MAX_MICROBATCHES, Setting, microbatch_choices


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
        has_mild = best is not None and best.plan.sparing in mild_sparings(ready)
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


def mild_sparings(ready: Study) -> set[Sparing]:
    """Memory options without a last resort."""
    return {one.sparing for one in ready.supply.levels if not one.is_last_resort}
