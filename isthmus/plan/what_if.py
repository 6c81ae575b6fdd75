"""What a plan would gain from one thing changed: the same clouds in the same roles, planned again with it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.job import (
    CloudSpec,
    CodecSpecs,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    Job,
    LinkSpec,
    PipelineStrategy,
    parse_codec,
)
from isthmus.plan.costs import CostSource, nothing_measured
from isthmus.plan.memory import Sharding
from isthmus.plan.plan import DataSettings, Form, PipelineSettings, Plan
from isthmus.plan.planner import plan as make_plan
from isthmus.plan.replicated.replicas import INNER_STEPS

_INT4: Final = CodecSpecs(
    forward=parse_codec("rotate | int4"), backward=parse_codec("rotate | int4(stochastic)")
)
_NEXT_LOSS: Final = {"none": "slight", "slight": "some"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change, and the share by which time and, if they are known, dollars per token would change."""

    what: str
    step_change: float
    usd_change: float | None


def levers(
    job: Job,
    plan: Plan,
    *,
    progress: Callable[[str], None] = lambda _: None,
    source: CostSource = nothing_measured,
) -> tuple[Lever, ...]:
    """Every change that is possible, the greatest gain first."""
    fixed = _as_planned(job, plan)
    base = make_plan(fixed, is_quick=True, source=source)
    found = []
    for what, changed in _changes(fixed, plan):
        progress(f"trying {what}")
        try:
            other = make_plan(changed, is_quick=True, source=source)
        except UserError:
            # Such as a recompute that is switched off and does not fit: no lever.
            continue
        found.append(_lever(what, base, other))
    return tuple(sorted(found, key=lambda one: one.step_change))


def _lever(what: str, base: Plan, other: Plan) -> Lever:
    before_usd, after_usd = (one.estimate.usd_per_million_tokens for one in (base, other))
    return Lever(
        what=what,
        step_change=base.estimate.tokens_per_s / other.estimate.tokens_per_s - 1,
        usd_change=None if not before_usd or after_usd is None else after_usd / before_usd - 1,
    )


def _as_planned(job: Job, plan: Plan) -> Job:
    """The job with the planned clouds in their order and no other limits than memory and quality."""
    names = plan.clouds
    if job.limits.counts_money:
        # Time alone might ask for milder ones.
        job = _with_links(job, lambda link: {"codec": _planned_codecs(link, plan)})
    return job.model_copy(
        update={
            "strategy": _planned_strategy(job, plan),
            "cloud": tuple(cloud for cloud in job.cloud if cloud.name in names),
            "link": tuple(link for link in job.link if set(link.between) <= set(names)),
            "limits": job.limits.model_copy(update={"deadline_s": None, "budget_usd": None}),
        }
    )


def _planned_strategy(
    job: Job, plan: Plan
) -> PipelineStrategy | DataStrategy | GeneratorDiscriminatorStrategy:
    match plan.settings, job.strategy:
        case DataSettings(inner_steps=steps, num_fragments=fragments, bits=bits), _:
            return DataStrategy.model_validate(
                {"kind": "data", "inner_steps": steps, "fragments": fragments, "bits": bits}
            )
        case _, GeneratorDiscriminatorStrategy() as strategy:
            return strategy.model_copy(update={"discriminator_cloud": plan.clouds[-1]})
    own = job.strategy if isinstance(job.strategy, PipelineStrategy) else PipelineStrategy(kind="pipeline")
    return own.model_copy(update={"clouds": plan.clouds, "policy": _policy(plan)})


def _policy(plan: Plan) -> str:
    return plan.settings.policy.value if isinstance(plan.settings, PipelineSettings) else "auto"


def _changes(job: Job, plan: Plan) -> Iterator[tuple[str, Job]]:
    match job.strategy:
        case DataStrategy() as strategy:
            yield from _sync_changes(job, strategy)
        case GeneratorDiscriminatorStrategy():
            yield from _generator_changes(job, plan)
        case _ if len(plan.stages) > 1:
            yield from _link_changes(job, plan)
            yield from _flight_changes(job, plan)
    yield from _train_changes(job, plan)
    yield from _cloud_changes(job, plan)


def _link_changes(job: Job, plan: Plan) -> Iterator[tuple[str, Job]]:
    # Or a wider line would be spent on milder codecs.
    coded = _with_links(job, lambda link: {"codec": _planned_codecs(link, plan)})
    yield "twice the bandwidth", _with_links(coded, _scaled_bandwidth)
    yield "half the round trip", _with_links(coded, _halved_round_trip)
    if any(link.codec != _INT4 for link in job.link):
        yield "int4 on every link", _with_links(job, lambda _: {"codec": _INT4})
    loss = _NEXT_LOSS.get(job.limits.codec_loss)
    if loss is not None and any("auto" in (link.codec.forward, link.codec.backward) for link in job.link):
        limits = job.limits.model_copy(update={"codec_loss": loss})
        yield f'limits.codec_loss = "{loss}"', job.model_copy(update={"limits": limits})


def _flight_changes(job: Job, plan: Plan) -> Iterator[tuple[str, Job]]:
    settings, strategy = plan.settings, job.strategy
    if not isinstance(settings, PipelineSettings) or not isinstance(strategy, PipelineStrategy):
        return
    if settings.max_in_flight is not None:
        windows = tuple(stage.window + 2 for stage in plan.stages)
        roomy = tuple(cloud.model_copy(update={"memory_bytes": 2**60}) for cloud in job.cloud)
        wider = strategy.model_copy(update={"windows": windows, "max_in_flight": None})
        yield "memory for two more in flight", job.model_copy(update={"cloud": roomy, "strategy": wider})
    num_sequences = settings.num_microbatches * settings.microbatch_sequences
    doubled = 2 * settings.num_microbatches
    if num_sequences % doubled == 0:
        finer = strategy.model_copy(update={"microbatches": doubled})
        yield f"{doubled} micro-batches", job.model_copy(update={"strategy": finer})


def _sync_changes(job: Job, strategy: DataStrategy) -> Iterator[tuple[str, Job]]:
    """How often and how exactly copies are made one, within the range that is published."""
    yield "twice the bandwidth", _with_links(job, _scaled_bandwidth)
    least, most = INNER_STEPS[0], min(INNER_STEPS[-1], job.train.steps)
    inner_steps, bits = strategy.inner_steps or 1, strategy.bits or 32
    if inner_steps == 1:
        # Only then does anyone wait for a round trip.
        yield "half the round trip", _with_links(job, _halved_round_trip)
        rare = {"inner_steps": least, "fragments": None, "bits": None}
        yield f"strategy.inner_steps = {least}", _with_strategy(job, rare)
    for number in (inner_steps // 2, 2 * inner_steps):
        if least <= number <= most:
            yield f"strategy.inner_steps = {number}", _with_strategy(job, {"inner_steps": number})
    if bits > (16 if inner_steps == 1 else 4):
        yield f"strategy.bits = {bits // 2}", _with_strategy(job, {"bits": bits // 2})


def _generator_changes(job: Job, plan: Plan) -> Iterator[tuple[str, Job]]:
    """Nobody waits for a round trip, so there is none."""
    yield "twice the bandwidth", _with_links(job, _scaled_bandwidth)
    for name in plan.clouds[:-1]:
        yield f"strategy.discriminator_cloud = {name}", _with_strategy(job, {"discriminator_cloud": name})


def _train_changes(job: Job, plan: Plan) -> Iterator[tuple[str, Job]]:
    if job.train.recompute:
        yield "recompute off", _with_train(job, {"recompute": False})
    if job.train.precision == "float32":
        yield "train.precision = bfloat16", _with_train(job, {"precision": "bfloat16"})
    yield "twice the batch, per token", _with_train(job, {"batch_tokens": 2 * job.train.batch_tokens})
    if "recompute" in plan.savers and not job.train.recompute:
        roomy = tuple(cloud.model_copy(update={"memory_bytes": 2**60}) for cloud in job.cloud)
        yield "memory without end", job.model_copy(update={"cloud": roomy})


def _cloud_changes(job: Job, plan: Plan) -> Iterator[tuple[str, Job]]:
    """Twice the ranks where they count."""
    for names in _cloud_groups(plan):
        clouds = tuple(_doubled(cloud) if cloud.name in names else cloud for cloud in job.cloud)
        yield f"twice the ranks at {' and '.join(names)}", job.model_copy(update={"cloud": clouds})


def _cloud_groups(plan: Plan) -> Iterator[tuple[str, ...]]:
    """The clouds that would grow together: all copies or ranks in step, either role, or the busiest stage."""
    match plan.form:
        case Form.DATA:
            yield plan.clouds
        case Form.GENERATOR_DISCRIMINATOR:
            yield from (plan.clouds[:-1], plan.clouds[-1:])
        case _ if any(stage.sharding is Sharding.FULL for stage in plan.stages):
            yield plan.clouds
        case _:
            yield (max(plan.stages, key=lambda stage: stage.busy_s).cloud,)


def _doubled(cloud: CloudSpec) -> CloudSpec:
    price = cloud.usd_per_hour
    return cloud.model_copy(
        update={"ranks": 2 * cloud.ranks, "usd_per_hour": None if price is None else 2 * price}
    )


def _with_links(job: Job, change: Callable[[LinkSpec], dict[str, Any]]) -> Job:
    return job.model_copy(update={"link": tuple(link.model_copy(update=change(link)) for link in job.link)})


def _with_train(job: Job, change: dict[str, Any]) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update=change)})


def _with_strategy(job: Job, change: dict[str, Any]) -> Job:
    return job.model_copy(update={"strategy": job.strategy.model_copy(update=change)})


def _planned_codecs(link: LinkSpec, plan: Plan) -> CodecSpecs:
    for planned in plan.links:
        if set(planned.between) == set(link.between):
            return CodecSpecs(
                forward=parse_codec(planned.forward_codec), backward=parse_codec(planned.backward_codec)
            )
    return link.codec


def _scaled_bandwidth(link: LinkSpec) -> dict[str, Any]:
    bandwidth_bps: Sequence[float] = link.bandwidth_bps or ()
    return {"bandwidth_bps": tuple(2 * one for one in bandwidth_bps)}


def _halved_round_trip(link: LinkSpec) -> dict[str, Any]:
    return {"rtt_s": (link.rtt_s or 0.0) / 2}
