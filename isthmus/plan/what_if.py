"""What a plan would gain from one thing changed: the same clouds in the same roles, planned again with it."""

from collections.abc import Callable, Collection, Iterator
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
from isthmus.plan.plan import DataSettings, Form, PipelineSettings, Plan, planned_changes
from isthmus.plan.planner import plan as make_plan
from isthmus.plan.replicated import INNER_STEPS

_INT4: Final = CodecSpecs(
    forward=parse_codec("rotate | int4"), backward=parse_codec("rotate | int4(stochastic)")
)
_NEXT_LOSS: Final = {"none": "slight", "slight": "some"}
_ROOMY: Final = {"memory_bytes": 2**60}

Change = tuple[str, Job]


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
    before = make_plan(fixed, is_quick=True, source=source).estimate
    found = []
    for what, changed in _changes(fixed, plan):
        progress(f"trying {what}")
        try:
            after = make_plan(changed, is_quick=True, source=source).estimate
        except UserError:
            # A change that does not fit, for example without recompute, is no lever.
            continue
        usd = before.usd_per_million_tokens, after.usd_per_million_tokens
        found.append(
            Lever(
                what=what,
                step_change=before.tokens_per_s / after.tokens_per_s - 1,
                usd_change=None if not usd[0] or usd[1] is None else usd[1] / usd[0] - 1,
            )
        )
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


def _changes(job: Job, plan: Plan) -> Iterator[Change]:
    """Every change of the job that may be a lever."""
    if plan.form is Form.PIPELINE:
        # With codecs that stay, or a wider line would be spent on less lossy ones.
        coded = _with_links(job, lambda link: {"codec": _planned_codecs(link, plan)})
        yield "twice the bandwidth", _with_links(coded, _doubled_bandwidth)
        yield "half the round trip", _with_links(coded, _halved_round_trip)
        yield from _pipeline_changes(job, plan)
    elif plan.form is not Form.ALONE:
        yield "twice the bandwidth", _with_links(job, _doubled_bandwidth)
    if isinstance(job.strategy, DataStrategy):
        yield from _sync_changes(job, job.strategy)
    if isinstance(job.strategy, GeneratorDiscriminatorStrategy):
        for name in plan.clouds[:-1]:
            yield f"strategy.discriminator_cloud = {name}", _with(job, "strategy", discriminator_cloud=name)
    train = job.train
    if train.recompute:
        yield "recompute off", _with(job, "train", recompute=False)
    if train.precision == "float32":
        yield "train.precision = bfloat16", _with(job, "train", precision="bfloat16")
    yield "twice the batch, per token", _with(job, "train", batch_tokens=2 * train.batch_tokens)
    if "recompute" in plan.memory_words and not train.recompute:
        yield "memory without end", _with_clouds(job, plan.clouds, lambda _: _ROOMY)
    for names in _cloud_groups(plan):
        yield f"twice the ranks at {' and '.join(names)}", _with_clouds(job, names, _doubled_ranks)


def _pipeline_changes(job: Job, plan: Plan) -> Iterator[Change]:
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


def _sync_changes(job: Job, strategy: DataStrategy) -> Iterator[Change]:
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
            return CodecSpecs(
                forward=parse_codec(planned.forward_codec), backward=parse_codec(planned.backward_codec)
            )
    return link.codec


def _doubled_bandwidth(link: LinkSpec) -> dict[str, Any]:
    return {"bandwidth_bps": tuple(2 * one for one in link.bandwidth_bps or ())}


def _halved_round_trip(link: LinkSpec) -> dict[str, Any]:
    return {"rtt_s": (link.rtt_s or 0.0) / 2}


def _doubled_ranks(cloud: CloudSpec) -> dict[str, Any]:
    price = cloud.usd_per_hour
    return {"ranks": 2 * cloud.ranks, "usd_per_hour": None if price is None else 2 * price}
