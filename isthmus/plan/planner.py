"""From a job to the best way to run it: everything is compared by formula, and the best is simulated.

study the job → search pipelines, copies, generators → keep the limits → simulate the best → choose
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from isthmus.job import (
    AutoStrategy,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    Job,
    PipelineStrategy,
)
from isthmus.plan.cuts import check_cuts, frozen_notes, links_along
from isthmus.plan.replicated.data import data_plans
from isthmus.plan.replicated.generator import generator_plans
from isthmus.plan.search.assess import assess_simulated, simulated_once, simulated_work
from isthmus.plan.search.choice import Form, Plan, RunnerUp, Warmup
from isthmus.plan.search.limits import excess, keep_limits, keep_mild, keep_priced, nothing_fits
from isthmus.plan.search.pipelines import Progress, mild_sparings, pipelines
from isthmus.plan.search.study import LOSSES, Study, study
from isthmus.units import format_bytes, format_duration, shorten

# Passes to simulate, in all: about half a second, and more where one plan has many. Work is bounded and not
# time, so that plans are the same everywhere.
_SIMULATED_PASSES: Final = 10_000
_FEW_SIMULATED_PASSES: Final = 2_000
_MANY_SIMULATED_PASSES: Final = 24_000
_NUM_SIMULATED: Final = 4
# Plans nearly as good as the best make way for a simpler one.
_NEARLY: Final = 0.02
_MAX_RUNNERS_UP: Final = 6
_VERBS: Final = ("takes", "costs", "has")


def plan(job: Job, *, is_quick: bool = False, progress: Progress = lambda _: None) -> Plan:
    """The best plan within the job's limits, or one sentence on what is in the way of any.

    With `is_quick` only the best few are simulated.
    """
    progress("reading the job")
    ready = study(job)
    plans = _candidates(ready, progress)
    if not plans:
        raise nothing_fits(ready)
    allowed = keep_priced(keep_mild(plans, job), job)
    simulated = _simulate_best(allowed, job, progress, is_quick=is_quick)
    if all(excess(one, job) for one in simulated):
        simulated += _simulate_some(_last_hopes(allowed))
    best = _pick(keep_limits(simulated, job), job)
    if not is_quick:
        progress("simulating the runners-up")
        simulated += _simulate_some(_others(best, (simulated, allowed, plans), job))
        # By formula some may have looked slower than they are.
        best = _pick(keep_limits(simulated, job), job)
    others = _others(best, (simulated, allowed, plans), job)
    if not is_quick and simulated_work(best) <= _SIMULATED_PASSES:
        best = assess_simulated(best)
    runners_up = tuple(_runner_up(one, best, job) for one in others)
    return replace(
        best,
        notes=(*best.notes, *_cut_notes(best, ready)),
        reason=_reason(best, runners_up),
        runners_up=runners_up,
        num_tried=len(plans),
    )


def _cut_notes(best: Plan, ready: Study) -> Iterator[str]:
    """What is to be said of the cuts of a plan, unless they cannot be."""
    layers = tuple(range(*one.layers) for one in best.stages if one.layers is not None)
    if len(layers) == len(best.stages):
        check_cuts(
            links_along(ready.job, best.clouds),
            layers,
            num_frozen=ready.supply.num_frozen,
            hidden_width=ready.model.width,
            num_steps=ready.step.num_steps,
        )
        yield from frozen_notes(ready.job, best.clouds, layers)
    if best.estimate.warmup is not None:
        yield _warmup_note(best.estimate.warmup)
    if best.estimate.usd_per_step is not None:
        yield from _price_notes(best)


def _price_notes(best: Plan) -> Iterator[str]:
    """What is left out of the price."""
    for link in best.links:
        if link.usd_per_gib is None:
            ends = "-".join(link.between)
            yield f"without the traffic of {ends}, whose price is not known: set link.{ends}.usd_per_gib"


def _warmup_note(warmup: Warmup) -> str:
    first = "step crosses" if warmup.num_steps == 1 else f"{warmup.num_steps} steps cross"
    size = format_bytes(int(shorten(warmup.wan_bytes)))
    return f"the first {first} raw: {_short(warmup.step_s)} and {size} a step"


def _candidates(ready: Study, progress: Progress) -> list[Plan]:
    match ready.job.strategy:
        case GeneratorDiscriminatorStrategy() as strategy:
            progress("weighing generators against the discriminator")
            return generator_plans(ready, strategy)
        case DataStrategy():
            progress("weighing copies of the model")
            return data_plans(ready)
        case PipelineStrategy():
            return pipelines(ready, progress)
        case AutoStrategy():
            found = pipelines(ready, progress)
            progress("weighing copies of the model")
            return _milder([*found, *data_plans(ready)], ready)


def _milder(plans: Sequence[Plan], ready: Study) -> list[Plan]:
    """Without copies of the model that fit only by a last resort, where something else fits without one."""
    mild = mild_sparings(ready)
    has_mild = any(one.sparing in mild for one in plans)
    return [one for one in plans if one.form is not Form.DATA or one.sparing in mild or not has_mild]


def _simulate_best(plans: Sequence[Plan], job: Job, progress: Progress, *, is_quick: bool) -> list[Plan]:
    """The best by formula with the simulator's times, as many as the work allows, and one at the least.

    Limits are for these times, so what is a little beyond them by formula is simulated too.
    """
    done: list[Plan] = []
    work = 0
    for one in sorted(plans, key=lambda one: (excess(one, job), *_rank(one, job))):
        work += simulated_work(one)
        most = _SIMULATED_PASSES if len(done) >= _NUM_SIMULATED else _MANY_SIMULATED_PASSES
        if done and work > (_FEW_SIMULATED_PASSES if is_quick else most):
            break
        progress(f"simulating plan {len(done) + 1}")
        done.append(simulated_once(one))
    return done


def _pick(plans: Sequence[Plan], job: Job) -> Plan:
    """The best, or one that is nearly as good and milder, cheaper or simpler."""
    cheap = _nearly_least(plans, lambda one: _cost(one, job))
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
    return [one for one in plans if figure(one) <= least * (1 + _NEARLY)]


def _cost(plan: Plan, job: Job) -> float:
    """What is to be least of a run: money where there is a deadline, else time."""
    usd = plan.estimate.total_usd
    return plan.estimate.total_s if job.limits.deadline_s is None or usd is None else usd


def _rank(plan: Plan, job: Job) -> tuple[bool, float, float]:
    """By cost, which is not to be compared where only one has a price; then by time."""
    is_unknown = job.limits.deadline_s is not None and plan.estimate.total_usd is None
    return is_unknown, _cost(plan, job), plan.estimate.total_s


def _last_hopes(plans: Sequence[Plan]) -> list[Plan]:
    """The cheapest and the fastest, for formulas may have taken others to be within the limits."""
    cheapest = min(plans, key=lambda one: one.estimate.total_usd or 0.0)
    return [cheapest, min(plans, key=lambda one: one.estimate.total_s)]


def _simulate_some(plans: Sequence[Plan]) -> list[Plan]:
    """Those that are not simulated yet, as many as the work allows."""
    done: list[Plan] = []
    work = 0
    for one in plans:
        work += 0 if one.estimate.is_simulated else simulated_work(one)
        if one.scenario is not None and not one.estimate.is_simulated and work <= _SIMULATED_PASSES:
            done.append(simulated_once(one))
    return done


def _others(best: Plan, groups: Sequence[Sequence[Plan]], job: Job) -> list[Plan]:
    """The best of each other form and set of clouds; earlier groups, such as what was simulated, go first."""
    chosen: dict[tuple[Form, tuple[str, ...]], Plan] = {}
    for group in groups:
        for one in sorted(group, key=lambda one: _rank(one, job)):
            chosen.setdefault((one.form, one.clouds), one)
    chosen.pop((best.form, best.clouds), None)
    others = sorted(chosen.values(), key=lambda one: _rank(one, job))
    every_form = {one.form: one for one in reversed(others)}
    first = [one for one in others if one in every_form.values()]
    rest = [one for one in others if one not in first]
    return sorted([*first, *rest][:_MAX_RUNNERS_UP], key=lambda one: _rank(one, job))


def _runner_up(one: Plan, best: Plan, job: Job) -> RunnerUp:
    return RunnerUp(
        form=one.form,
        what=one.what,
        estimate=one.estimate,
        memory_share=one.memory_share,
        why=_why(one, best, job),
        savers=one.savers,
    )


def _why(other: Plan, best: Plan, job: Job) -> str:
    """Why a plan lost."""
    limits, mine, its = job.limits, best.estimate, other.estimate
    if other.loss > LOSSES[limits.codec_loss]:
        return f'costs {other.loss.name.lower()} quality, more than limits.codec_loss = "{limits.codec_loss}"'
    if limits.deadline_s is not None and its.total_s > limits.deadline_s:
        return f"takes {_short(its.total_s)}, longer than limits.deadline"
    if limits.counts_money and its.total_usd is None and mine.total_usd is not None:
        return f"has no known price, for want of that of {_unpriced(other)}"
    if limits.budget_usd is not None and (its.total_usd or 0.0) > limits.budget_usd:
        return f"costs ${shorten(its.total_usd or 0.0):,}, more than limits.budget_usd"
    if limits.deadline_s is not None and its.total_usd is not None and mine.total_usd is not None:
        return _dearer(its.total_usd, mine.total_usd)
    slower = its.total_s / mine.total_s - 1
    if slower < _NEARLY:
        return "no faster, and dearer or less simple"
    over = " over the run" if mine.warmup is not None or its.warmup is not None else ""
    return f"{slower:.0%} slower{over}: {_cause(other)}"


def _unpriced(plan: Plan) -> str:
    return next(stage.cloud for stage in plan.stages if stage.usd_per_hour is None)


def _dearer(usd: float, least_usd: float) -> str:
    if usd <= least_usd * (1 + _NEARLY):
        return "no cheaper, and slower or less simple"
    return f"costs {usd / least_usd - 1:.0%} more" if least_usd else f"costs ${shorten(usd):,} more"


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
    why = other.why.partition(":")[0]
    verb = "" if why.startswith(_VERBS) else "is "
    return f"{start}; the next best, {other.what.partition(';')[0]}, {verb}{why}"


def _short(seconds: float) -> str:
    return format_duration(shorten(seconds))
