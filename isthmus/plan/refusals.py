"""What a plan must keep to, and the one sentence where none does: what binds, and the nearest way out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.codec import BottleneckSpec
from isthmus.plan.candidates import Partition, candidates, planned_stages
from isthmus.plan.codecs import Loss
from isthmus.plan.costs import Precision
from isthmus.plan.job_facts import frozen_bottleneck
from isthmus.plan.plan import Estimate, Form, Plan, PlannedStage
from isthmus.plan.scenario import Policy
from isthmus.plan.space import Space
from isthmus.plan.stage_tables import MAX_MICROBATCHES, ModelSupply, Setting, divisors
from isthmus.plan.study import LOSSES, Study
from isthmus.units import format_bytes, format_duration, join_words, shorten

# Memory is searched in steps of this factor, up to so many times what there is.
_MEMORY_STEP: Final = 1.05
_MOST_MEMORY: Final = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A pipeline that fits: its stages, and the memory options that make it fit."""

    stages: tuple[PlannedStage, ...]
    savers: tuple[str, ...]


def keep_mild(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """The plans that cost no more quality than the job allows, or a sentence where none does."""
    mild = [one for one in plans if one.loss <= LOSSES[job.limits.codec_loss]]
    if not mild:
        raise _too_lossy(plans)
    return mild


def keep_priced(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """The plans whose price is known where money counts, if any is; or what is missing for a budget."""
    if not job.limits.counts_money:
        return list(plans)
    _check_prices(plans, job)
    return [one for one in plans if one.estimate.total_usd is not None] or list(plans)


def excess(plan: Plan, job: Job) -> float:
    """By what share a plan goes beyond the job's deadline or budget; 0 where it keeps both."""
    deadline_s, budget_usd = job.limits.deadline_s or math.inf, job.limits.budget_usd or math.inf
    estimate = plan.estimate
    return max(0.0, estimate.total_s / deadline_s - 1, (estimate.total_usd or 0.0) / budget_usd - 1)


def keep_limits(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """The plans within all limits, or the limit that leaves none."""
    limits = job.limits
    mild = keep_priced(keep_mild(plans, job), job)
    in_time = [one for one in mild if one.estimate.total_s <= (limits.deadline_s or math.inf)]
    if not in_time:
        raise _too_slow(mild, limits.deadline_s or math.inf)
    affordable = [
        one for one in in_time if (one.estimate.total_usd or 0.0) <= (limits.budget_usd or math.inf)
    ]
    if not affordable:
        raise _too_dear(in_time, limits.budget_usd or math.inf, has_deadline=limits.deadline_s is not None)
    return affordable


def nothing_fits(study: Study) -> UserError:
    """Why no pipeline and no single cloud holds the model, and what would help."""
    if study.terms.constraints.uses_all and not _has_row(study):
        return UserError(
            "the links do not join the clouds in a row, which a pipeline needs",
            hint="give each cloud a [[link]] to the next, or name the clouds to use in strategy.clouds",
        )
    study = study.in_lock_step or study
    factor, plan = _least_memory(study)
    if plan is None and study.supply.num_frozen:
        bottlenecks = [link for link in study.job.link if isinstance(link.boundary, BottleneckSpec)]
        if bottlenecks:
            return frozen_bottleneck(bottlenecks[0])
    if plan is None:
        return UserError(
            "the model does not fit, however much memory there is: a cut or a micro-batch is not possible",
            hint="check strategy.layers, strategy.clouds and strategy.microbatches",
        )
    worst = max(plan.stages, key=lambda stage: stage.memory_bytes / (stage.capacity_bytes or math.inf))
    share = study.job.limits.memory_share
    spared = f"even with {join_words(plan.savers)}" if plan.savers else "with what it may spare"
    usable = int(share * (worst.capacity_bytes or 0))
    return UserError(
        f"nothing fits: {spared}, a rank of {worst.cloud!r} needs {_gib(worst.memory_bytes)} for its "
        f"{worst.holds}, and limits.memory_share leaves it {_gib(usable)}",
        hint=_way_out(study, plan, factor),
    )


def _way_out(study: Study, plan: Fit, factor: float) -> str:
    ways = []
    if _lock_step_fits(study):
        ways.append('set strategy.policy to "lock-step": such ranks can share out all of a stage')
    if study.step.precision is Precision.FLOAT32 and _fits(study, _in_bfloat16(study)):
        ways.append('set train.precision to "bfloat16"')
    full = 1 / study.job.limits.memory_share
    if factor <= full:
        ways.append(f"set limits.memory_share to {math.ceil(100 * factor / full) / 100:g}")
    if wanted := _devices_wanted(study, plan):
        ways.append(f"{join_words(wanted)} would do")
    return "; or ".join(ways)


def _devices_wanted(study: Study, plan: Fit) -> list[str]:
    """The memory of those clouds whose stage does not fit."""
    share = study.job.limits.memory_share
    return [
        f"devices of {_gib(math.ceil(one.memory_bytes / share))} in {one.cloud!r}"
        for one in plan.stages
        if one.memory_bytes > share * (one.capacity_bytes or math.inf)
    ]


def _lock_step_fits(study: Study) -> bool:
    """Whether the job's policy is in the way: ranks in lock-step can share out all of a stage."""
    if study.terms.policy.keeps_order:
        return False
    changed = study.of(study.job, policy=Policy.LOCK_STEP)
    return _fits(changed, changed.supply)


def _least_memory(study: Study) -> tuple[float, Fit | None]:
    """The least factor on all memory under which something fits, and what that is."""
    low, high = 0, math.ceil(math.log(_MOST_MEMORY) / math.log(_MEMORY_STEP))
    if _first(study, _with_memory(study, _MEMORY_STEP**high)) is None:
        return math.inf, None
    while low < high:
        middle = (low + high) // 2
        if _first(study, _with_memory(study, _MEMORY_STEP**middle)) is None:
            low = middle + 1
        else:
            high = middle
    factor = _MEMORY_STEP**high
    return factor, _first(study, _with_memory(study, factor))


def _first(study: Study, supply: ModelSupply) -> Fit | None:
    """Anything that fits with the smallest micro-batches and every memory option."""
    space = Space(supply=supply, terms=study.terms)
    strict = [number for number, one in enumerate(supply.levels) if one.sparing.recompute]
    settings = [
        Setting(num_microbatches=number, level=level)
        for number in _most_microbatches(study)
        for level in strict
    ]
    for group in (group for setting in settings for group in space.groups(setting)):
        if not math.isfinite(group.slowest_s(fits=True)):
            continue
        total_s, _, slowest_s = group.bounds(group.stops, fits=True)
        row = int(np.lexsort((slowest_s, total_s))[0])
        if math.isfinite(total_s[row]):
            stops = tuple(int(one) for one in group.stops[row])
            partition = Partition(
                supply=supply, terms=study.terms, setting=group.setting, clouds=group.clouds, stops=stops
            )
            savers = supply.levels[group.setting.level].words(partition.facts)
            if ways := candidates(partition):
                return Fit(stages=planned_stages(ways[0]), savers=savers)
    return None


def fits(study: Study) -> bool:
    """Whether any pipeline of the job fits."""
    return _fits(study, study.supply)


def _most_microbatches(study: Study) -> list[int]:
    """As many as can be; and as many as ranks in lock-step can have."""
    if (given := study.strategy.microbatches) is not None:
        return [given]
    possible = [one for one in divisors(study.step.num_sequences) if one <= MAX_MICROBATCHES]
    in_step = [one for one in possible if one % math.lcm(*study.supply.num_ranks) == 0]
    return sorted({*possible[-1:], *in_step[-1:]})


def _fits(study: Study, supply: ModelSupply) -> bool:
    return _first(study, supply) is not None


def _with_memory(study: Study, factor: float) -> ModelSupply:
    supply = study.supply
    return supply.without_cache(memory_share=supply.memory_share * factor)


def _in_bfloat16(study: Study) -> ModelSupply:
    step = replace(study.step, precision=Precision.BFLOAT16)
    return study.supply.without_cache(step=step)


def _has_row(study: Study) -> bool:
    """Whether a walk over the links meets every cloud once."""
    num_clouds, pairs = len(study.clouds), set(study.supply.pairs)
    if study.terms.constraints.in_row:
        return all((one, one + 1) in pairs for one in range(num_clouds - 1))
    walks: list[tuple[int, ...]] = [(start,) for start in range(num_clouds)]
    for _ in range(num_clouds - 1):
        ends = {(frozenset(walk), walk[-1]): walk for walk in walks}
        walks = [
            (*walk, other)
            for walk in ends.values()
            for other in range(num_clouds)
            if other not in walk and (walk[-1], other) in pairs
        ]
    return bool(walks)


def unpriced_budget(study: Study) -> UserError:
    """What is missing for a budget."""
    return _no_price(next(cloud.name for cloud in study.clouds if cloud.usd_per_hour is None))


def _check_prices(plans: Sequence[Plan], job: Job) -> None:
    if job.limits.budget_usd is None or any(one.estimate.total_usd is not None for one in plans):
        return
    raise _no_price(next(stage.cloud for one in plans for stage in one.stages if stage.usd_per_hour is None))


def _no_price(cloud: str) -> UserError:
    return UserError(
        f"limits.budget_usd is set, but the price of cloud {cloud!r} is not known",
        hint=f"set cloud.{cloud}.usd_per_hour",
    )


def _too_lossy(plans: Sequence[Plan]) -> UserError:
    mildest = min(one.loss for one in plans)
    return UserError(
        "every plan costs more quality than limits.codec_loss allows; "
        f"the mildest costs {mildest.name.lower()}",
        hint=f'set limits.codec_loss to "{mildest.name.lower()}"'
        + (", or strategy.inner_steps to 1" if _is_data(plans) else ""),
    )


def _is_data(plans: Sequence[Plan]) -> bool:
    return all(one.form is Form.DATA and one.loss > Loss.NONE for one in plans)


def _too_slow(plans: Sequence[Plan], deadline_s: float) -> UserError:
    fastest = min(plans, key=lambda one: one.estimate.total_s).estimate
    total_s = _up(fastest.total_s)
    return UserError(
        f"the fastest plan takes {format_duration(total_s)}, longer than limits.deadline of "
        f"{format_duration(deadline_s)}; it is limited by the {fastest.limiting}",
        hint=f'set limits.deadline to "{format_duration(total_s)}" or more'
        + _or_fewer_steps(fastest, (fastest.total_s - deadline_s) / fastest.step_s),
    )


def _too_dear(plans: Sequence[Plan], budget_usd: float, *, has_deadline: bool) -> UserError:
    cheapest = min((one.estimate for one in plans), key=lambda one: one.total_usd or 0.0)
    usd = _up(cheapest.total_usd or 0.0)
    within = " within limits.deadline" if has_deadline else ""
    return UserError(
        f"the cheapest plan{within} costs ${usd:g}, more than limits.budget_usd of ${budget_usd:g}",
        hint=f"set limits.budget_usd to {usd:g} or more"
        + _or_fewer_steps(
            cheapest, ((cheapest.total_usd or 0.0) - budget_usd) / (cheapest.usd_per_step or math.inf)
        ),
    )


def _or_fewer_steps(estimate: Estimate, num_too_many: float) -> str:
    """Steps are left out at the end, behind the warm-up of bottlenecks, of which something must follow."""
    number = math.floor(estimate.num_steps - num_too_many)
    return f", or train.steps to {number} or less" if number > estimate.num_warmup_steps else ""


def _up(value: float) -> float:
    """To three digits, and never less."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    scale = 10.0**digits
    return math.ceil(round(value * scale, 6)) / scale


def _gib(num_bytes: int) -> str:
    return format_bytes(int(shorten(num_bytes)))
