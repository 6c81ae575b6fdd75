"""From a job to what every stage must know, and all that can be wrong with it before anything starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

from isthmus.errors import UserError
from isthmus.job import Job, PipelineStrategy, parse_codec, stage_order
from isthmus.job.sections import why_not_run
from isthmus.model.blueprint import split_layers
from isthmus.plan.costs.families import FAMILIES
from isthmus.plan.costs.memory import Sharding
from isthmus.plan.costs.source import CostSource, nothing_measured
from isthmus.plan.following import follow
from isthmus.plan.ladder import Pair
from isthmus.plan.lock_step import OPEN, check_even, check_lock_step, common_ranks, policy_of
from isthmus.plan.planner import plan
from isthmus.plan.scenario import Caps, Policy
from isthmus.plan.search.choice import Decisions, PipelineSettings, Plan
from isthmus.plan.search.facts import model_config
from isthmus.plan.search.study import check_lists
from isthmus.train.data.batches import Layout, divide_batch

_MICROBATCHES_PER_STAGE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A pipeline along the links: its clouds in the order of their stages, and how a step is divided."""

    clouds: tuple[str, ...]
    layout: Layout
    policy: Policy
    max_in_flight: Caps
    recompute: bool
    notes: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    """Of each stage; None for as even as can be."""
    codecs: tuple[Pair, ...] | None = None
    """Of each cut, to begin with where the job leaves them open; None for raw."""
    decisions: Decisions | None = None
    """What the other clouds must know of the plan; None where nothing was planned."""
    plan: Plan | None = None

    def followed(self, job: Job) -> Job:
        """The job with what it leaves open about memory as it was decided."""
        return follow(job, self.clouds, self.decisions)

    def stage_layers(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each stage."""
        if self.layers is None:
            return split_layers(num_layers, len(self.clouds))
        if sum(self.layers) != num_layers:
            raise UserError(
                f"the stages were planned with {sum(self.layers)} layers, but the model has {num_layers}",
                hint="set strategy.layers, or leave it out",
            )
        return tuple(range(start, stop) for start, stop in pairwise((0, *accumulate(self.layers))))


def set_up(
    job: Job,
    *,
    decisions: Decisions | None = None,
    plans: bool = True,
    known: Job | None = None,
    source: CostSource = nothing_measured,
) -> Setup:
    """Choose what the job leaves open, with reasons, and refuse what cannot run.

    A cloud that does not plan takes the decisions of the one that has, or those that the run began with.
    Plans are made for `known`: the job with what is known of its clouds beside it, such as profiles. The
    costs of its model come from `source`, where it can measure them.
    """
    if job.data is None or job.model is None:
        missing = "[data]" if job.data is None else "[model]"
        raise UserError(f"the job has no {missing} section", hint="docs/job.md shows what it holds")
    strategy = _pipeline(job)
    clouds = stage_order(job)
    check_lock_step(job, strategy)
    check_lists(strategy, num_clouds=len(clouds))
    if decisions is not None:
        return _decided(job, strategy, clouds, decisions)
    why_not = _why_not_planned(known or job, source)
    if plans and why_not is None:
        return _planned(job, strategy, clouds, known or job, source)
    return _unplanned(job, strategy, clouds, why_not)


def _planned(
    job: Job, strategy: PipelineStrategy, clouds: tuple[str, ...], known: Job, source: CostSource
) -> Setup:
    fixed = known.model_copy(update={"strategy": strategy.model_copy(update={"clouds": clouds})})
    chosen = plan(fixed, source=source)
    chosen = replace(chosen, notes=(*_reasons(job, strategy, chosen), *chosen.notes))
    if chosen.decisions is None:
        raise ValueError("a pipeline was asked for and something else planned")
    return replace(_decided(job, strategy, clouds, chosen.decisions), plan=chosen)


def _reasons(job: Job, strategy: PipelineStrategy, chosen: Plan) -> Iterator[str]:
    """What was chosen and not given, and why."""
    if not isinstance(job.strategy, PipelineStrategy):
        yield "strategy: pipeline, since it is the only one that can be run so far"
    if strategy.layers is None and len(chosen.stages) > 1:
        cut = ", ".join(f"{stage.cloud} {stage.holds}" for stage in chosen.stages)
        yield f"cut: {cut}, by which no stage is slower than it must be"
    if strategy.microbatches is None and isinstance(chosen.settings, PipelineSettings):
        number, size = chosen.settings.num_microbatches, chosen.settings.microbatch_sequences
        yield f"micro-batches: {number} of {size} sequences, the best of all that divide a step"
    settings = chosen.settings
    if strategy.policy == OPEN and isinstance(settings, PipelineSettings) and settings.policy.keeps_order:
        yield f"policy: {settings.policy.value}, since ranks that share out all of a stage need one order"
    yield from _spared(job, chosen)
    if isinstance(chosen.settings, PipelineSettings) and chosen.settings.max_in_flight is not None:
        yield f"in flight: {_most(chosen.settings.max_in_flight, chosen.clouds)}, which is what memory holds"
    free = {link.name for link in job.link if "auto" in (link.codec.forward, link.codec.backward)}
    for link in chosen.links:
        if {"-".join(link.between), "-".join(reversed(link.between))} & free:
            yield f"codec of {'-'.join(link.between)}: {link.reason}"
    yield f"planned: {chosen.reason}"


def _most(caps: Caps, clouds: Sequence[str]) -> str:
    if not isinstance(caps, tuple):
        return f"at most {caps}"
    return "at most " + ", ".join(f"{cap} at {cloud}" for cap, cloud in zip(caps, clouds, strict=True))


def _spared(job: Job, chosen: Plan) -> Iterator[str]:
    """What spares memory that the job did not ask for."""
    shared = [one.cloud for one in chosen.stages if one.sharding is not Sharding.NONE]
    if free := [name for name in shared if job.cloud_named(name).sharding == "auto"]:
        yield f"sharding: the ranks of {' and of '.join(free)} share a stage: copies are slower or do not fit"
    if chosen.sparing.recompute and not job.train.recompute:
        yield "recompute: on, since activations do not fit otherwise"
    if chosen.sparing.offload_optimizer and not job.train.offload_optimizer:
        yield "optimizer: its moments are on the host, since nothing else fits"
    if chosen.sparing.optimizer_bits != job.train.optimizer_bits:
        yield f"optimizer: moments of {chosen.sparing.optimizer_bits} bits, since nothing else fits"


def _decided(job: Job, strategy: PipelineStrategy, clouds: tuple[str, ...], decisions: Decisions) -> Setup:
    number = decisions.num_microbatches
    policy = policy_of(job, strategy) if decisions.policy is None else Policy(decisions.policy)
    decided = strategy.model_copy(update={"policy": policy.value, "microbatches": number})
    check_lock_step(follow(job, clouds, decisions), decided)
    return Setup(
        clouds=clouds,
        layout=_layout(job, number),
        policy=policy,
        max_in_flight=decisions.max_in_flight or strategy.max_in_flight or number,
        recompute=decisions.recompute or job.train.recompute is True,
        notes=decisions.reasons,
        layers=decisions.layers,
        codecs=tuple(
            Pair(forward=parse_codec(forward), backward=parse_codec(backward))
            for forward, backward in decisions.codecs
        ),
        decisions=decisions,
    )


def _unplanned(job: Job, strategy: PipelineStrategy, clouds: tuple[str, ...], why_not: str | None) -> Setup:
    notes = [] if why_not is None else [f"layers are dealt out evenly, for nothing can be planned: {why_not}"]
    number = strategy.microbatches
    if number is None:
        number = _choose_microbatches(job, len(clouds), notes)
    return Setup(
        clouds=clouds,
        layout=_layout(job, number),
        policy=policy_of(job, strategy),
        max_in_flight=strategy.max_in_flight or number,
        recompute=job.train.recompute is True,
        notes=tuple(notes),
        layers=strategy.layers,
    )


def _layout(job: Job, num_microbatches: int) -> Layout:
    return divide_batch(
        batch_tokens=job.train.batch_tokens,
        sequence_length=1 if job.data is None else job.data.sequence_length,
        num_microbatches=num_microbatches,
    )


def may_plan(job: Job, source: CostSource = nothing_measured) -> bool:
    """Whether a plan can be made once all clouds are measured."""
    return _why_no_costs(job, source) is None


def _why_not_planned(job: Job, source: CostSource) -> str | None:
    """What the planner would have to know, None where it knows enough."""
    for cloud in job.cloud:
        is_known = cloud.device == "cpu" or cloud.profile is not None or cloud.accelerator is not None
        if not is_known and (cloud.flops is None or cloud.memory_bytes is None):
            return f"cloud {cloud.name} does not say what its devices are; set its accelerator"
    return _why_no_costs(job, source)


def _why_no_costs(job: Job, source: CostSource) -> str | None:
    """What the planner lacks of links and model."""
    for link in job.link:
        if link.bandwidth_bps is None or link.rtt_s is None:
            return f"the figures of link {link.name} are not known; isthmus probe JOB --write measures them"
    model_type = model_config(job).get("model_type")
    if model_type not in FAMILIES and source(job) is None:
        return f"the costs of model_type {model_type!r} are not known"
    return None


def _pipeline(job: Job) -> PipelineStrategy:
    why_not = why_not_run(job.strategy.kind)
    if why_not is not None:
        raise UserError(why_not, hint='set strategy.kind to "pipeline"')
    return job.strategy if isinstance(job.strategy, PipelineStrategy) else PipelineStrategy(kind="pipeline")


def _choose_microbatches(job: Job, num_stages: int, notes: list[str]) -> int:
    sequence_length = 1 if job.data is None else job.data.sequence_length
    num_sequences = max(1, job.train.batch_tokens // sequence_length)
    most = _MICROBATCHES_PER_STAGE * num_stages
    every = [one for one in range(1, num_sequences + 1) if num_sequences % one == 0]
    check_even(job, num_sequences=num_sequences, sequence_length=sequence_length)
    possible = [one for one in every if one % common_ranks(job) == 0]
    chosen = max((one for one in possible if one <= most), default=possible[0])
    notes.append(
        f"micro-batches: {chosen}, the most up to {most} ({_MICROBATCHES_PER_STAGE} a stage) "
        f"that divide the {num_sequences} sequences of a step"
    )
    return chosen
