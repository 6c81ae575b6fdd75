"""From a job to the best way to run it: searches and simulates what a run can follow, and tells what lost.

study the job → search pipelines → keep the limits → explain the best and the runners-up

What limits a pipeline is the bottleneck resource, whose unlimited supply would shorten a step the most. Each
is made unlimited by itself, everywhere at once, and the step simulated again:

    bandwidth      messages and their coding take no time on any line
    round trip     nothing is under way, nor handled
    compute        passes and updates take no time at any cloud
    room           every stage may keep as many micro-batches in flight as it likes

The place that is named with it is the one that has least of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from isthmus.errors import UserError
from isthmus.job import DataStrategy, GeneratorDiscriminatorStrategy, Job
from isthmus.job.sections import AutoStrategy
from isthmus.plan.candidates import least_passes, simulate_step
from isthmus.plan.codecs import Loss
from isthmus.plan.costs import CostSource, nothing_measured
from isthmus.plan.job_facts import check_cuts, frozen_notes, links_along
from isthmus.plan.plan import (
    NEARLY,
    Aim,
    Form,
    Plan,
    excess,
    keep_limits,
    unpriced_budget,
)
from isthmus.plan.replicated import data_plans, generator_plans
from isthmus.plan.scenario import HopTimes, Scenario, expected, next_windows
from isthmus.plan.search import Progress, Search, nothing_fits
from isthmus.plan.study import Study, study
from isthmus.units import format_bytes, format_duration, shorten

# Passes to simulate for the runners-up that are shown; those of very large plans are left out.
_RUNNER_UP_PASSES: Final = 48_000
# A plan is simulated about so often to be explained.
_NUM_EXPLAINING: Final = 6
_MAX_RUNNERS_UP: Final = 6
_VERBS: Final = ("takes", "costs", "has", "would")
_NO_LINE_BPS: Final = 1e15
# Times that are nothing would make windows that are anything.
_NEXT_TO_NOTHING: Final = 1e-6
# A resource that would bring this share of the most is named too.
_NEARLY_AS_MUCH: Final = 0.7


def plan(
    job: Job,
    *,
    is_quick: bool = False,
    progress: Progress = lambda _: None,
    source: CostSource = nothing_measured,
) -> Plan:
    """Choose the best plan within the job's limits, or say in one sentence what is in the way of any.

    The source measures the costs of the model where torch is installed. With `is_quick` the same plan is
    chosen, and no runners-up are told of.
    """
    progress("reading the job")
    ready = study(job, source=source)
    match job.strategy:
        case GeneratorDiscriminatorStrategy() as strategy:
            best, others, num_tried = _best_of(generator_plans(ready, strategy), job)
        case DataStrategy():
            best, others, num_tried = _best_of(data_plans(ready), job)
        case _:
            found, best = _best_pipeline(ready, progress)
            best = explained(best)
            others = [] if is_quick else _losers(ready, found, best, progress)
            num_tried = found.num_bounded
    runners_up = tuple(
        replace(one, reason=_why(one, best, job), scenario=None, warmup_scenario=None) for one in others
    )
    return replace(
        best,
        notes=(*best.notes, *filter(None, [ready.model.note]), *_notes(best, ready)),
        reason=_reason(best, runners_up),
        runners_up=runners_up,
        num_tried=num_tried,
    )


def _best_of(plans: Sequence[Plan], job: Job) -> tuple[Plan, list[Plan], int]:
    """The best of plans that are simulated already, and the best of each other set of clouds."""
    best = Aim.of(job).pick(keep_limits(plans, job))
    return best, _first_of_each(plans, best, job), len(plans)


def _first_of_each(plans: Sequence[Plan], best: Plan, job: Job) -> list[Plan]:
    """The best plan of each form and order of clouds, but for those of the best of all."""
    chosen: dict[tuple[Form, tuple[str, ...]], Plan] = {}
    for one in sorted(plans, key=lambda one: _rank(one, job)):
        chosen.setdefault((one.form, one.clouds), one)
    chosen.pop((best.form, best.clouds), None)
    return list(chosen.values())[:_MAX_RUNNERS_UP]


def _best_pipeline(ready: Study, progress: Progress) -> tuple[Search, Plan]:
    """The best pipeline within the limits, simulated; or why there is none."""
    job, aim = ready.job, Aim.of(ready.job)
    found = Search(ready, aim, progress)
    if found.best is None and aim.needs_price and not found.has_priced:
        if job.limits.budget_usd is not None and found.orders:
            raise unpriced_budget(next(one.name for one in ready.clouds if one.usd_per_hour is None))
        found = Search(ready, replace(aim, by_price=False, needs_price=False), progress)
    if (best := found.best) is not None:
        return found, best[1]
    raise _refusal(ready, found, progress)


def _refusal(ready: Study, found: Search, progress: Progress) -> Exception:
    """What is in the way: memory, loss, time or money."""
    limits = ready.job.limits
    nearest = [plan for _, plan in found.tried]
    fastest = Aim(needs_price=limits.counts_money and found.has_priced)
    cheapest = replace(fastest, by_price=True, deadline_s=limits.deadline_s or math.inf)
    for aim in (fastest, cheapest):
        free = Search(ready, aim, progress)
        best = free.best
        nearest += [explained(best[1])] if best is not None else [plan for _, plan in free.tried]
    if not nearest:
        return nothing_fits(ready)
    try:
        keep_limits(nearest, ready.job)
    except UserError as error:
        return error
    raise AssertionError("a plan is within the limits, and was not found")


def _losers(ready: Study, found: Search, best: Plan, progress: Progress) -> list[Plan]:
    """The best of other orders of clouds, simulated and explained, and of data parallel."""
    progress("simulating the runners-up")
    replicated: list[Plan] = []
    if isinstance(ready.job.strategy, AutoStrategy):
        resorts = ready.is_last_resort(best.memory_options)
        every = [one for one in data_plans(ready) if resorts or not ready.is_last_resort(one.memory_options)]
        replicated = _first_of_each(every, best, ready.job)[:1]
    others: list[Plan] = []
    work = 0
    for one in found.others(best, _MAX_RUNNERS_UP):
        work += 0 if one.scenario is None else _NUM_EXPLAINING * least_passes(one.scenario)
        if len(others) + len(replicated) == _MAX_RUNNERS_UP or work > _RUNNER_UP_PASSES:
            break
        others.append(explained(one))
    return sorted([*others, *replicated], key=lambda one: _rank(one, ready.job))


def _rank(plan: Plan, job: Job) -> tuple[bool, float, float, float]:
    """Plans within the limits first; by cost, which is not to be compared where only one has a price."""
    aim = Aim.of(job)
    is_unknown = aim.by_price and plan.estimate.total_usd is None
    return is_unknown, excess(plan, job), *aim.key(*plan.totals)


def _notes(best: Plan, ready: Study) -> Iterator[str]:
    """What is to be said of the cuts of a plan, unless they cannot be, of saves, and of its price."""
    save = ready.job.checkpoint
    yield (
        f"saving takes at most {100 * save.overhead:.2g}% of the time; a crash loses at most the work of "
        f"{format_duration(save.every_s)} and a step"
    )
    layers = tuple(range(*one.layers) for one in best.stages if one.layers is not None)
    if len(layers) == len(best.stages):
        check_cuts(
            links_along(ready.job, best.clouds),
            layers,
            num_frozen=ready.num_frozen,
            hidden_width=ready.model.width,
            num_steps=ready.step.num_steps,
        )
        yield from frozen_notes(ready.job, best.clouds, layers)
    if (warmup := best.estimate.warmup) is not None:
        first = "step crosses" if warmup.num_steps == 1 else f"{warmup.num_steps} steps cross"
        size = format_bytes(int(shorten(warmup.wan_bytes)))
        yield f"the first {first} raw: {_short(warmup.step_s)} and {size} a step"
    for link in best.links:
        if best.estimate.usd_per_step is not None and link.usd_per_gib is None:
            ends = "-".join(link.between)
            yield f"the price leaves out the traffic of {ends}: set link.{ends}.usd_per_gib"


def _why(other: Plan, best: Plan, job: Job) -> str:
    """Why a plan lost."""
    limits, mine, its = job.limits, best.estimate, other.estimate
    if isinstance(job.strategy, AutoStrategy) and other.form is Form.DATA:
        gain = 1 - its.total_s / mine.total_s
        faster = f"would be {gain:.0%} faster, but " if gain > NEARLY else ""
        return f'{faster}strategy.kind = "auto" runs pipelines: set it to "data" for this'
    if other.loss > Loss[limits.codec_loss.upper()]:
        return f'costs {other.loss.name.lower()} quality, more than limits.codec_loss = "{limits.codec_loss}"'
    if limits.deadline_s is not None and its.total_s > limits.deadline_s:
        return f"takes {_short(its.total_s)}, longer than limits.deadline"
    if limits.counts_money and its.total_usd is None and mine.total_usd is not None:
        unpriced = next(stage.cloud for stage in other.stages if stage.usd_per_hour is None)
        return f"has no known price, for want of that of {unpriced}"
    if limits.budget_usd is not None and (its.total_usd or 0.0) > limits.budget_usd:
        return f"costs ${shorten(its.total_usd or 0.0):,}, more than limits.budget_usd"
    if limits.deadline_s is not None and its.total_usd is not None and mine.total_usd is not None:
        return _dearer(its.total_usd, mine.total_usd)
    slower = its.total_s / mine.total_s - 1
    if slower < NEARLY:
        return "no faster, and dearer or less simple"
    over = " over the run" if mine.warmup is not None or its.warmup is not None else ""
    return f"{slower:.0%} slower{over}: limited by the {its.limiting}"


def _dearer(usd: float, least_usd: float) -> str:
    if usd <= least_usd * (1 + NEARLY):
        return "no cheaper, and slower or less simple"
    return f"costs {usd / least_usd - 1:.0%} more" if least_usd else f"costs ${shorten(usd):,} more"


def _reason(best: Plan, runners_up: Sequence[Plan]) -> str:
    start = (
        f"{best.form.value}: {_short(best.estimate.step_s)} a step, limited by the {best.estimate.limiting}"
    )
    if not runners_up:
        return start
    other = runners_up[0]
    why = other.reason.partition(":")[0]
    verb = "" if why.startswith(_VERBS) else "is "
    return f"{start}; the next best, {other.what.partition(';')[0]}, {verb}{why}"


def _short(seconds: float) -> str:
    return format_duration(shorten(seconds))


def explained(plan: Plan) -> Plan:
    """The same plan with what limits it."""
    if plan.scenario is None:
        return plan
    found = reliefs(plan.scenario)
    return replace(plan, estimate=replace(plan.estimate, reliefs=found, limiting=limiting(found)))


def limiting(found: Mapping[str, float]) -> str:
    """What would bring most, and what would bring nearly as much."""
    (first, most), *others = found.items()
    near = [what for what, share in others[:1] if share >= _NEARLY_AS_MUCH * most]
    return " and the ".join([first, *near])


def reliefs(scenario: Scenario) -> dict[str, float]:
    """The share by which an unlimited supply of each resource would shorten a step, the most first."""
    step_s = simulate_step(scenario).step_s
    found = {what: max(0.0, 1 - simulate_step(other).step_s / step_s) for what, other in _relieved(scenario)}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _relieved(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Each resource with the place that has least of it, and the scenario with an unlimited supply."""
    slowest = max(scenario.stages, key=lambda stage: stage.interval_s).cloud
    yield f"compute of {slowest}", _without_compute(scenario)
    links = [f"{one.cloud}-{other.cloud}" for one, other in pairwise(scenario.stages)]
    if hops := dict(zip(links, scenario.hops, strict=True)):
        longest = max(links, key=lambda one: float(max(HopTimes.of(hops[one])[:2])))
        yield f"bandwidth of {longest}", _without_bytes(scenario)
        farthest = max(links, key=lambda one: hops[one].line.delay_s)
        yield f"round trip of {farthest}", _without_latency(scenario)
    if scenario.max_in_flight is not None or scenario.windows is not None:
        roomy = replace(scenario, windows=None, max_in_flight=None)
        measured = expected(scenario)
        wanted = next_windows(scenario, measured)
        own = scenario.windows or next_windows(scenario, measured, max_in_flight=scenario.max_in_flight)
        shares = [size / most for size, most in zip(own, wanted, strict=True)]
        yield f"room in flight at {scenario.stages[shares.index(min(shares))].cloud}", roomy


def _without_bytes(scenario: Scenario) -> Scenario:
    lines = (replace(hop.line, down_bps=_NO_LINE_BPS, up_bps=_NO_LINE_BPS) for hop in scenario.hops)
    hops = (
        replace(hop, line=line, forward_coding_s=0.0, backward_coding_s=0.0)
        for hop, line in zip(scenario.hops, lines, strict=True)
    )
    return replace(scenario, hops=tuple(hops))


def _without_latency(scenario: Scenario) -> Scenario:
    lines = (replace(hop.line, latency_s=0.0, jitter_s=0.0, handling_s=0.0) for hop in scenario.hops)
    hops = (replace(hop, line=line) for hop, line in zip(scenario.hops, lines, strict=True))
    return replace(scenario, hops=tuple(hops))


def _without_compute(scenario: Scenario) -> Scenario:
    tiny = _NEXT_TO_NOTHING
    stages = (
        replace(one, forward_s=tiny * one.forward_s, backward_s=tiny * one.backward_s, update_s=0.0)
        for one in scenario.stages
    )
    return replace(scenario, stages=tuple(stages))
