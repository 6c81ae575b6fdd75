"""From a job to the best way to run it: everything is compared by formula, and the best is simulated.

study the job → search pipelines, copies, generators → keep the limits → simulate the best → choose
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from isthmus.errors import UserError
from isthmus.job import (
    AutoStrategy,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    Job,
    PipelineStrategy,
)
from isthmus.plan.assess import assess, assess_simulated, simulated_once, simulated_work
from isthmus.plan.choice import Form, Plan, RunnerUp
from isthmus.plan.data_plans import data_plans
from isthmus.plan.generator_plans import generator_plans
from isthmus.plan.limits import keep_limits, nothing_fits
from isthmus.plan.search import search
from isthmus.plan.study import LOSSES, Study, study
from isthmus.plan.supply import microbatch_choices
from isthmus.units import format_duration

Progress = Callable[[str], None]

_MAX_MICROBATCHES: Final = 4096
# Passes to simulate, in all: about half a second, and more where one plan has many. Work is bounded and not
# time, so that plans are the same everywhere.
_SIMULATED_PASSES: Final = 10_000
_MANY_SIMULATED_PASSES: Final = 24_000
_NUM_SIMULATED: Final = 4
# Plans nearly as good as the best make way for a simpler one.
_NEARLY: Final = 0.02
_MAX_ASSESSED: Final = 400
_MAX_RUNNERS_UP: Final = 6


def plan(
    job: Job, *, runnable_only: bool = False, is_quick: bool = False, progress: Progress = lambda _: None
) -> Plan:
    """The best plan within the job's limits, or one sentence on what is in the way of any.

    With `runnable_only` it spares memory only in ways that workers know; `is_quick` simulates only the best.
    """
    progress("reading the job")
    ready = study(job, runnable_only=runnable_only)
    plans = _candidates(ready, progress)
    if not plans:
        raise nothing_fits(ready)
    allowed = keep_limits(plans, job)
    simulated = _simulate_best(allowed, job, progress, is_quick=is_quick)
    best = _pick(keep_limits(simulated, job), job)
    if not is_quick and simulated_work(best) <= _SIMULATED_PASSES:
        best = assess_simulated(best)
    runners_up = _runners_up(best, simulated, allowed, plans, job)
    return replace(
        best,
        reason=_reason(best, runners_up),
        runners_up=runners_up,
        num_tried=len(plans),
    )


def _candidates(ready: Study, progress: Progress) -> list[Plan]:
    match ready.job.strategy:
        case GeneratorDiscriminatorStrategy() as strategy:
            progress("weighing generators against the discriminator")
            return list(generator_plans(ready, strategy))
        case DataStrategy():
            progress("weighing copies of the model")
            return list(data_plans(ready)) or _refuse_copies(ready)
        case PipelineStrategy():
            return list(_pipelines(ready, progress))
        case AutoStrategy():
            pipelines = list(_pipelines(ready, progress))
            progress("weighing copies of the model")
            return [*pipelines, *data_plans(ready)]


def _pipelines(ready: Study, progress: Progress) -> Iterator[Plan]:
    strategy = ready.job.strategy
    given = strategy.microbatches if isinstance(strategy, PipelineStrategy) else None
    numbers = microbatch_choices(
        ready.step.num_sequences,
        given=given,
        most=_MAX_MICROBATCHES,
        num_ranks=min(cloud.num_ranks for cloud in ready.clouds),
    )
    limits = ready.job.limits
    progress(f"cutting the model for {len(numbers)} numbers of micro-batches")
    found = search(
        ready.supply,
        microbatches=numbers,
        num_levels=len(ready.supply.levels),
        constraints=ready.terms.constraints,
        keeps_every_set=limits.budget_usd is not None or limits.deadline_s is not None,
    )
    yield from (assess(one, ready.supply, ready.terms) for one in found[:_MAX_ASSESSED])


def _refuse_copies(ready: Study) -> list[Plan]:
    if len(ready.clouds) < 2:
        raise UserError(
            "data parallel between clouds needs two clouds", hint="add a [[cloud]] and a [[link]]"
        )
    raise UserError(
        "the whole model fits on fewer than two linked clouds, and data parallel needs it on every one",
        hint='set strategy.kind to "pipeline", which gives each cloud some of the layers',
    )


def _simulate_best(plans: Sequence[Plan], job: Job, progress: Progress, *, is_quick: bool) -> list[Plan]:
    """The best by formula with the simulator's times, as many as the work allows, and one at the least."""
    done: list[Plan] = []
    work = 0
    for one in sorted(plans, key=lambda one: _cost(one, job)):
        work += simulated_work(one)
        most = _SIMULATED_PASSES if len(done) >= _NUM_SIMULATED else _MANY_SIMULATED_PASSES
        if done and (is_quick or work > most):
            break
        progress(f"simulating plan {len(done) + 1}")
        done.append(simulated_once(one))
    return done


def _pick(plans: Sequence[Plan], job: Job) -> Plan:
    """The best, or one that is nearly as good and milder, cheaper or simpler."""
    least = min(_cost(one, job) for one in plans)
    near = [one for one in plans if _cost(one, job) <= least * (1 + _NEARLY)]
    return min(
        near,
        key=lambda one: (
            one.loss,
            one.estimate.usd_per_step or 0.0,
            len(one.savers),
            len(one.stages),
            _cost(one, job),
        ),
    )


def _cost(plan: Plan, job: Job) -> float:
    """What is to be least: money where there is a deadline, else time."""
    usd = plan.estimate.usd_per_step
    return plan.estimate.step_s if job.limits.deadline_s is None or usd is None else usd


def _runners_up(
    best: Plan, simulated: Sequence[Plan], allowed: Sequence[Plan], plans: Sequence[Plan], job: Job
) -> tuple[RunnerUp, ...]:
    """The best of each other form and set of clouds, what was simulated first."""
    chosen: dict[tuple[Form, tuple[str, ...]], Plan] = {}
    for group in (simulated, allowed, plans):
        for one in sorted(group, key=lambda one: _cost(one, job)):
            chosen.setdefault((one.form, one.clouds), one)
    chosen.pop((best.form, best.clouds), None)
    others = sorted(chosen.values(), key=lambda one: _cost(one, job))
    every_form = {one.form: one for one in reversed(others)}
    first = [one for one in others if one in every_form.values()]
    rest = [one for one in others if one not in first]
    return tuple(
        RunnerUp(
            form=one.form,
            what=one.what,
            estimate=one.estimate,
            memory_share=one.memory_share,
            why=_why(one, best, job),
        )
        for one in sorted([*first, *rest][:_MAX_RUNNERS_UP], key=lambda one: _cost(one, job))
    )


def _why(other: Plan, best: Plan, job: Job) -> str:
    """Why a plan lost."""
    limits, mine, its = job.limits, best.estimate, other.estimate
    if other.loss > LOSSES[limits.codec_loss]:
        return f'costs {other.loss.name.lower()} quality, more than limits.codec_loss = "{limits.codec_loss}"'
    if limits.deadline_s is not None and its.total_s > limits.deadline_s:
        return f"takes {_short(its.total_s)}, longer than limits.deadline"
    if limits.budget_usd is not None and (its.total_usd or 0.0) > limits.budget_usd:
        return f"costs ${its.total_usd:,.0f}, more than limits.budget_usd"
    if limits.deadline_s is not None and its.usd_per_step is not None and mine.usd_per_step:
        return f"costs {its.usd_per_step / mine.usd_per_step - 1:+.0%} as much more"
    slower = its.step_s / mine.step_s - 1
    if slower < _NEARLY:
        return "no faster, and dearer or less simple"
    return f"{slower:.0%} slower: {_cause(other)}"


def _cause(plan: Plan) -> str:
    bubble = plan.estimate.bubble
    shares = {
        "waits for bandwidth": bubble.bandwidth,
        "waits for round trips": bubble.latency,
        "goes into filling the pipeline": bubble.fill,
        "is lost to unequal stages": bubble.imbalance,
    }
    cause, share = max(shares.items(), key=lambda item: item[1])
    if share < 0.1:
        return f"limited by the {plan.estimate.limiting}"
    return f"{share:.0%} of the step {cause}"


def _reason(best: Plan, runners_up: Sequence[RunnerUp]) -> str:
    start = (
        f"{best.form.value}: {_short(best.estimate.step_s)} a step, limited by the {best.estimate.limiting}"
    )
    if not runners_up:
        return start
    other = runners_up[0]
    return f"{start}; the next best, {other.what.partition(';')[0]}, is {other.why.partition(':')[0]}"


def _short(seconds: float) -> str:
    return format_duration(float(f"{seconds:.3g}"))
