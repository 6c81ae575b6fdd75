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

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.job import (
    AutoStrategy,
    CloudSpec,
    CodecSpecs,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    Job,
    LinkSpec,
    PipelineStrategy,
    parse_codec,
)
from isthmus.plan.candidates import least_passes, simulate_step
from isthmus.plan.codecs import Loss
from isthmus.plan.costs import CostSource, nothing_measured
from isthmus.plan.job_facts import check_cuts, frozen_notes, links_along
from isthmus.plan.memory import Sharding
from isthmus.plan.plan import (
    NEARLY,
    Aim,
    DataSettings,
    Form,
    PipelineSettings,
    Plan,
    RunnerUp,
    excess,
    keep_limits,
    planned_changes,
    split_bubble,
    unpriced_budget,
)
from isthmus.plan.replicated import INNER_STEPS, data_plans, generator_plans
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

Timed = Callable[[Scenario], float]


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
        RunnerUp(
            form=one.form,
            what=one.what,
            estimate=one.estimate,
            memory_share=one.memory_share,
            why=_why(one, best, job),
            memory_words=one.memory_words,
        )
        for one in others
    )
    return replace(
        best,
        notes=(*best.notes, *filter(None, [ready.model.note]), *_notes(best, ready)),
        reason=_reason(best, runners_up),
        runners_up=runners_up,
        num_tried=num_tried,
    )


def _best_of(plans: Sequence[Plan], job: Job) -> tuple[Plan, list[Plan], int]:
    """The best of plans that have no simulator yet, by formula, and the best of each other set of clouds."""
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
    """The best of other orders of clouds, simulated and explained, and of data parallel by formula."""
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
        f"saves for at most {save.overhead:.2g} of the time, with no more than "
        f"{format_duration(save.every_s)} and a step of work to lose"
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
            yield f"without the traffic of {ends}, whose price is not known: set link.{ends}.usd_per_gib"


def _why(other: Plan, best: Plan, job: Job) -> str:
    """Why a plan lost."""
    limits, mine, its = job.limits, best.estimate, other.estimate
    if isinstance(job.strategy, AutoStrategy) and other.form is Form.DATA:
        gain = 1 - its.total_s / mine.total_s
        faster = f"would be {gain:.0%} faster by formula, but " if gain > NEARLY else ""
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
    return f"{slower:.0%} slower{over}: {_cause(other)}"


def _dearer(usd: float, least_usd: float) -> str:
    if usd <= least_usd * (1 + NEARLY):
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


def explained(plan: Plan) -> Plan:
    """The same plan with what limits it, and its bubble by cause, each simulated without that cause."""
    if plan.scenario is None:
        return plan
    timed = functools.cache(lambda scenario: simulate_step(scenario).step_s)
    step_s = plan.estimate.step_s
    no_bytes = _without_bytes(plan.scenario)
    no_bytes_s = timed(no_bytes) if plan.links else step_s
    no_wan_s = timed(_without_latency(no_bytes)) if plan.links else step_s
    bubble = split_bubble(
        step_s,
        [stage.busy_s for stage in plan.stages],
        latency_s=max(0.0, no_bytes_s - no_wan_s),
        bandwidth_s=max(0.0, step_s - no_bytes_s),
    )
    found = reliefs(plan.scenario, timed)
    estimate = replace(plan.estimate, bubble=bubble, reliefs=found, limiting=limiting(found))
    return replace(plan, estimate=estimate)


def limiting(found: Mapping[str, float]) -> str:
    """What would bring most, and what would bring nearly as much."""
    (first, most), *others = found.items()
    near = [what for what, share in others[:1] if share >= _NEARLY_AS_MUCH * most]
    return " and the ".join([first, *near])


def reliefs(scenario: Scenario, timed: Timed) -> dict[str, float]:
    """The share by which an unlimited supply of each resource would shorten a step, the most first."""
    step_s = timed(scenario)
    found = {what: max(0.0, 1 - timed(other) / step_s) for what, other in _relieved(scenario)}
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


# What a plan would gain from one thing changed: the same clouds in the same roles, planned again with it.

_INT4: Final = CodecSpecs(
    forward=parse_codec("rotate | int4"), backward=parse_codec("rotate | int4(stochastic)")
)
_NEXT_LOSS: Final = {"none": "slight", "slight": "some"}
_ROOMY: Final = {"memory_bytes": 2**60}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change, and the share by which time and, if they are known, dollars per token would change."""

    what: str
    step_change: float
    usd_change: float | None


def levers(
    job: Job, chosen: Plan, *, progress: Progress = lambda _: None, source: CostSource = nothing_measured
) -> tuple[Lever, ...]:
    """Every change that is possible, the greatest gain first."""
    fixed = _as_planned(job, chosen)
    before, found = plan(fixed, is_quick=True, source=source).estimate, []
    for what, changed in _changes(fixed, chosen):
        progress(f"trying {what}")
        try:
            after = plan(changed, is_quick=True, source=source).estimate
        except UserError:
            # A change that does not fit, for example without recompute, is no lever.
            continue
        usd = before.usd_per_million_tokens, after.usd_per_million_tokens
        usd_change = None if not usd[0] or usd[1] is None else usd[1] / usd[0] - 1
        step_change = before.tokens_per_s / after.tokens_per_s - 1
        found.append(Lever(what=what, step_change=step_change, usd_change=usd_change))
    return tuple(sorted(found, key=lambda one: one.step_change))


def _as_planned(job: Job, plan: Plan) -> Job:
    """The job with the planned clouds in their order and no other limits than memory and quality."""
    own: DataStrategy | GeneratorDiscriminatorStrategy | PipelineStrategy
    match plan.settings, job.strategy:
        case DataSettings(), _:
            own = DataStrategy.model_validate(planned_changes(job, plan).strategy)
        case _, GeneratorDiscriminatorStrategy() as strategy:
            own = strategy.model_copy(update={"discriminator_cloud": plan.clouds[-1]})
        case settings, strategy:
            own = strategy if isinstance(strategy, PipelineStrategy) else PipelineStrategy(kind="pipeline")
            policy = settings.policy.value if isinstance(settings, PipelineSettings) else "auto"
            own = own.model_copy(update={"clouds": plan.clouds, "policy": policy})
    if job.limits.counts_money:
        # Time alone might ask for less lossy ones.
        job = _with_links(job, lambda link: {"codec": _planned_codecs(link, plan)})
    return _with(job, "limits", deadline_s=None, budget_usd=None).model_copy(
        update={
            "strategy": own,
            "cloud": tuple(cloud for cloud in job.cloud if cloud.name in plan.clouds),
            "link": tuple(link for link in job.link if set(link.between) <= set(plan.clouds)),
        }
    )


def _changes(job: Job, plan: Plan) -> Iterator[tuple[str, Job]]:
    """Every change of the job that may be a lever."""
    train, strategy = job.train, job.strategy
    if plan.form is not Form.ALONE:
        coded = job
        if plan.form is Form.PIPELINE:
            # With codecs that stay, or a wider line would be spent on less lossy ones.
            coded = _with_links(job, lambda link: {"codec": _planned_codecs(link, plan)})
            yield "half the round trip", _with_links(coded, _halved_round_trip)
            yield from _pipeline_changes(job, plan)
        yield "twice the bandwidth", _with_links(coded, _doubled_bandwidth)
    if isinstance(strategy, DataStrategy):
        yield from _sync_changes(job, strategy)
    if isinstance(strategy, GeneratorDiscriminatorStrategy):
        for name in plan.clouds[:-1]:
            yield f"strategy.discriminator_cloud = {name}", _with(job, "strategy", discriminator_cloud=name)
    if train.recompute:
        yield "recompute off", _with(job, "train", recompute=False)
    if train.precision == "float32":
        yield "train.precision = bfloat16", _with(job, "train", precision="bfloat16")
    yield "twice the batch, per token", _with(job, "train", batch_tokens=2 * train.batch_tokens)
    if "recompute" in plan.memory_words and not train.recompute:
        yield "memory without end", _with_clouds(job, plan.clouds, lambda _: _ROOMY)
    for names in _cloud_groups(plan):
        yield f"twice the ranks at {' and '.join(names)}", _with_clouds(job, names, _doubled_ranks)


def _pipeline_changes(job: Job, plan: Plan) -> Iterator[tuple[str, Job]]:
    if any(link.codec != _INT4 for link in job.link):
        yield "int4 on every link", _with_links(job, lambda _: {"codec": _INT4})
    loss = _NEXT_LOSS.get(job.limits.codec_loss)
    if loss is not None and any("auto" in (link.codec.forward, link.codec.backward) for link in job.link):
        yield f'limits.codec_loss = "{loss}"', _with(job, "limits", codec_loss=loss)
    if isinstance(settings := plan.settings, PipelineSettings):
        if settings.max_in_flight is not None:
            windows = tuple(stage.window + 2 for stage in plan.stages)
            wider = _with(job, "strategy", windows=windows, max_in_flight=None)
            yield "memory for two more in flight", _with_clouds(wider, plan.clouds, lambda _: _ROOMY)
        doubled = 2 * settings.num_microbatches
        if settings.microbatch_sequences % 2 == 0:
            yield f"{doubled} micro-batches", _with(job, "strategy", microbatches=doubled)


def _sync_changes(job: Job, strategy: DataStrategy) -> Iterator[tuple[str, Job]]:
    """Other synchronisation, within the range that is published."""
    least, most = INNER_STEPS[0], min(INNER_STEPS[-1], job.train.steps)
    inner_steps, bits = strategy.inner_steps or 1, strategy.bits or 32
    if inner_steps == 1:
        # Only then does anyone wait for a round trip.
        yield "half the round trip", _with_links(job, _halved_round_trip)
        rare = _with(job, "strategy", inner_steps=least, fragments=None, bits=None)
        yield f"strategy.inner_steps = {least}", rare
    for number in (inner_steps // 2, 2 * inner_steps):
        if least <= number <= most:
            yield f"strategy.inner_steps = {number}", _with(job, "strategy", inner_steps=number)
    if bits > (16 if inner_steps == 1 else 4):
        yield f"strategy.bits = {bits // 2}", _with(job, "strategy", bits=bits // 2)


def _cloud_groups(plan: Plan) -> list[tuple[str, ...]]:
    """The clouds that would grow together: all copies, fully sharded stages, either role, or one stage."""
    if plan.form is Form.GENERATOR_DISCRIMINATOR:
        return [plan.clouds[:-1], plan.clouds[-1:]]
    if plan.form is Form.DATA or any(stage.sharding is Sharding.FULL for stage in plan.stages):
        return [plan.clouds]
    return [(max(plan.stages, key=lambda stage: stage.busy_s).cloud,)]


def _with(job: Job, section: str, **changes: Any) -> Job:
    return job.model_copy(update={section: getattr(job, section).model_copy(update=changes)})


def _with_links(job: Job, change: Callable[[LinkSpec], dict[str, Any]]) -> Job:
    return job.model_copy(update={"link": tuple(one.model_copy(update=change(one)) for one in job.link)})


def _with_clouds(job: Job, names: Collection[str], change: Callable[[CloudSpec], dict[str, Any]]) -> Job:
    clouds = (one.model_copy(update=change(one)) if one.name in names else one for one in job.cloud)
    return job.model_copy(update={"cloud": tuple(clouds)})


def _planned_codecs(link: LinkSpec, plan: Plan) -> CodecSpecs:
    for planned in plan.links:
        if set(planned.between) == set(link.between):
            forward, backward = parse_codec(planned.forward_codec), parse_codec(planned.backward_codec)
            return CodecSpecs(forward=forward, backward=backward)
    return link.codec


def _doubled_bandwidth(link: LinkSpec) -> dict[str, Any]:
    return {"bandwidth_bps": tuple(2 * one for one in link.bandwidth_bps or ())}


def _halved_round_trip(link: LinkSpec) -> dict[str, Any]:
    return {"rtt_s": (link.rtt_s or 0.0) / 2}


def _doubled_ranks(cloud: CloudSpec) -> dict[str, Any]:
    price = cloud.usd_per_hour
    return {"ranks": 2 * cloud.ranks, "usd_per_hour": None if price is None else 2 * price}
