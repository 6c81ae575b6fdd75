"""What a plan must keep to, and the one sentence where none does: what binds, and the nearest way out."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.codec import BottleneckSpec
from isthmus.plan.candidates import candidates, planned_stages
from isthmus.plan.codecs import Loss
from isthmus.plan.costs import Precision
from isthmus.plan.job_facts import frozen_bottleneck
from isthmus.plan.plan import Estimate, Form, Plan, PlannedStage
from isthmus.plan.scenario import Policy
from isthmus.plan.search import placement_of
from isthmus.plan.space import all_orders
from isthmus.plan.study import LOSSES, Setting, Study, divisors, study
from isthmus.units import format_bytes, format_duration, join_words

# Memory is searched in steps of this factor, up to so many times what there is.
_MEMORY_STEP: Final = 1.05
_MOST_MEMORY: Final = 2.0**30

Fit = Sequence[tuple[PlannedStage, tuple[str, ...]]]
"""Stages with the memory that they need, and the memory options of each in words."""


def _keep_loss(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """The plans that cost no more quality than the job allows, or a sentence where none does."""
    allowed = [one for one in plans if one.loss <= LOSSES[job.limits.codec_loss]]
    if not allowed:
        least = min(one.loss for one in plans).name.lower()
        is_data = all(one.form is Form.DATA and one.loss > Loss.NONE for one in plans)
        raise UserError(
            f"every plan costs more quality than limits.codec_loss allows; the least lossy costs {least}",
            hint=f'set limits.codec_loss to "{least}"'
            + (", or strategy.inner_steps to 1" if is_data else ""),
        )
    return allowed


def _keep_priced(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """The plans whose price is known where money counts, if any is; or what is missing for a budget."""
    if not job.limits.counts_money:
        return list(plans)
    priced = [one for one in plans if one.estimate.total_usd is not None]
    if not priced and job.limits.budget_usd is not None:
        stages = (stage for one in plans for stage in one.stages)
        raise unpriced_budget(next(one.cloud for one in stages if one.usd_per_hour is None))
    return priced or list(plans)


def unpriced_budget(cloud: str) -> UserError:
    """What is missing for a budget."""
    return UserError(
        f"limits.budget_usd is set, but the price of cloud {cloud!r} is not known",
        hint=f"set cloud.{cloud}.usd_per_hour",
    )


def excess(plan: Plan, job: Job) -> float:
    """The share by which a plan goes beyond the job's deadline or budget; 0 where it keeps both."""
    deadline_s, budget_usd = job.limits.deadline_s or math.inf, job.limits.budget_usd or math.inf
    total_s, total_usd = plan.totals
    return max(0.0, total_s / deadline_s - 1, (total_usd or 0.0) / budget_usd - 1)


def keep_limits(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """The plans within all limits, or the limit that leaves none."""
    limits = job.limits
    allowed = _keep_priced(_keep_loss(plans, job), job)
    in_time = [one for one in allowed if one.estimate.total_s <= (limits.deadline_s or math.inf)]
    if not in_time:
        raise _too_slow(allowed, limits.deadline_s or math.inf)
    affordable = [
        one for one in in_time if (one.estimate.total_usd or 0.0) <= (limits.budget_usd or math.inf)
    ]
    if not affordable:
        raise _too_dear(in_time, limits.budget_usd or math.inf, has_deadline=limits.deadline_s is not None)
    return affordable


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
    """Round up to three digits."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    scale = 10.0**digits
    return math.ceil(round(value * scale, 6)) / scale


def no_room(
    study: Study,
    fit: Fit,
    *,
    claim: str = "nothing fits",
    cause: str | None = None,
    ways: Sequence[str] = (),
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
        sizes = [f"{math.ceil(10 * one.memory_bytes / share / 2**30) / 10:g} GiB" for one in small]
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


def nothing_fits(study: Study) -> UserError:
    """Why no pipeline and no single cloud holds the model, and what would help."""
    if study.sizes.start > 1 and not _has_row(study):
        return UserError(
            "the links do not join the clouds in a row, which a pipeline needs",
            hint="give each cloud a [[link]] to the next, or name the clouds to use in strategy.clouds",
        )
    study = study.in_lock_step or study
    fit = _least_memory(study)
    if fit is None:
        bottlenecks = [link for link in study.job.link if isinstance(link.boundary, BottleneckSpec)]
        if bottlenecks and study.num_frozen:
            return frozen_bottleneck(bottlenecks[0])
        return UserError(
            "the model does not fit, however much memory there is: a cut or a micro-batch is not possible",
            hint="check strategy.layers, strategy.clouds and strategy.microbatches",
        )
    ways = []
    if not study.policy.keeps_order and fits(_with_policy(study, Policy.LOCK_STEP)):
        ways.append('set strategy.policy to "lock-step": with one schedule, ranks can shard all of a stage')
    if study.step.precision is Precision.FLOAT32 and fits(
        study.but(step=replace(study.step, precision=Precision.BFLOAT16))
    ):
        ways.append('set train.precision to "bfloat16"')
    return no_room(study, fit, ways=ways)


def fits(study: Study) -> bool:
    """Whether any pipeline of the job fits."""
    return _first(study) is not None


def _with_policy(ready: Study, policy: Policy) -> Study:
    return study(ready.job, policy=policy, source=ready.source)


def _least_memory(study: Study) -> Fit | None:
    """What fits with the least factor on all memory; None where nothing fits with any."""

    def with_factor(exponent: int) -> Fit | None:
        return _first(study.but(memory_share=study.memory_share * _MEMORY_STEP**exponent))

    low, high = 0, math.ceil(math.log(_MOST_MEMORY) / math.log(_MEMORY_STEP))
    best = with_factor(high)
    while best is not None and low < high:
        middle = (low + high) // 2
        found = with_factor(middle)
        low, high, best = (middle + 1, high, best) if found is None else (low, middle, found)
    return best


def _first(study: Study) -> Fit | None:
    """Anything that fits with the smallest micro-batches and every memory option."""
    settings = (
        Setting(num_microbatches=number, memory=memory)
        for number in _most_microbatches(study)
        for memory in study.levels
        if memory.recompute
    )
    for order in (order for setting in settings for order in all_orders(study, setting)):
        if not math.isfinite(order.slowest_s(fits=True)):
            continue
        total_s, _, slowest_s = order.bounds(order.stops, fits=True)
        row = int(np.lexsort((slowest_s, total_s))[0])
        if math.isfinite(total_s[row]) and (ways := candidates(placement_of(order, order.stops[row]))):
            return [(one, ways[0].placement.memory_words) for one in planned_stages(ways[0])]
    return None


def _most_microbatches(study: Study) -> list[int]:
    """The most micro-batches that can be, and the most that ranks with one schedule can have."""
    if (given := study.strategy.microbatches) is not None:
        return [given]
    possible = divisors(study.step.num_sequences)
    common = math.lcm(*(one.num_ranks for one in study.clouds))
    return sorted({*possible[-1:], *[one for one in possible if one % common == 0][-1:]})


def _has_row(study: Study) -> bool:
    """Whether a walk over the links meets every cloud once."""
    num_clouds = len(study.clouds)
    if study.is_in_row:
        return all((one, one + 1) in study.links for one in range(num_clouds - 1))
    walks: list[tuple[int, ...]] = [(start,) for start in range(num_clouds)]
    for _ in range(num_clouds - 1):
        ends = {(frozenset(walk), walk[-1]): walk for walk in walks}
        walks = [
            (*walk, other)
            for walk in ends.values()
            for other in range(num_clouds)
            if other not in walk and (walk[-1], other) in study.links
        ]
    return bool(walks)
