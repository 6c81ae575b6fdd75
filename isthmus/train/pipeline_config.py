"""The run config of a pipeline, made from the job and its plan."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.job import CodecSpec, Job, LinkSpec, PipelineStrategy, parse_codec, stage_order
from isthmus.job.codec import BottleneckSpec, BoundarySpec, HiddenSpec, MemorySpec
from isthmus.model.blueprint import Blueprint, split_layers
from isthmus.model.encoder_decoder import split_stacks
from isthmus.model.families import Decoder
from isthmus.plan.codecs import RAW, Bounds, Crossing, Cut, Loss, Pair, num_learners
from isthmus.plan.costs import CostSource, nothing_measured
from isthmus.plan.job_facts import (
    OPEN,
    check_even,
    check_lists,
    check_lock_step,
    check_memory,
    check_stacks,
    common_ranks,
    first_trained,
    links_along,
    num_frozen_layers,
    policy_of,
)
from isthmus.plan.memory import Sharding
from isthmus.plan.models import why_not_planned
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.plan import Decisions, PipelineSettings, Plan, follow
from isthmus.plan.planner import plan
from isthmus.plan.scenario import Policy
from isthmus.plan.types import Member
from isthmus.train.build import layout_of, sharding_of
from isthmus.train.data.tokenizer import trains_tokenizer
from isthmus.train.pipeline import PipelineConfig

_MICROBATCHES_PER_STAGE: Final = 8


def plan_run(job: Job, *, known: Job | None = None, source: CostSource = nothing_measured) -> Plan | None:
    """Plan the pipeline of a job, with the reason of each choice; None where the planner knows too little.

    Plans are made for `known`: the job with what is known of its clouds beside it, such as profiles. The
    costs of its model come from `source`, where it can measure them.
    """
    strategy = _pipeline(job)
    known = known or job
    if why_not_planned(known, source) is not None:
        return None
    chosen, clouds, notes = plan(known, source=source), stage_order(job), list[str]()
    if chosen.clouds != clouds:
        # The first cloud has the data, and every cloud of the job takes part.
        better, fixed = chosen.what.partition(";")[0], strategy.model_copy(update={"clouds": clouds})
        chosen = plan(known.model_copy(update={"strategy": fixed}), source=source)
        listed = f"clouds: {', '.join(clouds)}, as the job lists them; better would be {better}"
        notes.append(f"{listed}: isthmus plan JOB --write puts that into the job")
    return replace(chosen, notes=(*notes, *_reasons(job, strategy, chosen), *chosen.notes))


def decide(job: Job, decisions: Decisions | None = None) -> Decisions:
    """Complete the decisions of a plan, or decide by a rule without one; refuse a job that cannot run.

    Without a plan `layers` is empty where stages are as even as can be, and `codecs` are raw.
    """
    strategy = _pipeline(job)
    check_own_data(job)
    if decisions is None:
        decisions = _by_rule(job, strategy)
    number = decisions.num_microbatches
    policy = decisions.policy or policy_of(job, strategy).value
    decided = strategy.model_copy(update={"policy": policy, "microbatches": number})
    check_lock_step(follow(job, stage_order(job), decisions), decided)
    layout_of(job, number)
    in_flight = decisions.max_in_flight or strategy.max_in_flight or number
    return replace(decisions, policy=policy, max_in_flight=in_flight)


def stage_layers(
    job: Job, decisions: Decisions, num_layers: int, decoder: Decoder | None = None
) -> tuple[range, ...]:
    """The layers of each stage."""
    links, counts = links_along(job, stage_order(job)), decisions.layers
    memory_cut = next((cut for cut, link in enumerate(links) if isinstance(link.boundary, MemorySpec)), None)
    if decoder is not None:
        counts = counts or split_stacks(decoder, num_layers, len(links) + 1, memory_cut)
        stages = _ranges(counts, num_layers)
        check_stacks(
            stages,
            [link.boundary for link in links],
            num_encoder_layers=decoder.start,
            is_joined=decoder.is_joined,
            num_frozen=num_frozen_layers(job),
        )
        return stages
    for link in links:
        check_memory(link, 0)
    return _ranges(counts, num_layers) if counts else split_layers(num_layers, len(links) + 1)


def _ranges(counts: Sequence[int], num_layers: int) -> tuple[range, ...]:
    if sum(counts) != num_layers:
        raise UserError(
            f"the stages were planned with {sum(counts)} layers, but the model has {num_layers}",
            hint="set strategy.layers, or leave it out",
        )
    return tuple(range(start, stop) for start, stop in pairwise((0, *accumulate(counts))))


def _reasons(job: Job, strategy: PipelineStrategy, chosen: Plan) -> Iterator[str]:
    """A sentence for every choice that the job left open."""
    settings = chosen.settings
    if not isinstance(settings, PipelineSettings):
        raise ValueError("a pipeline was asked for and something else planned")
    if not isinstance(job.strategy, PipelineStrategy):
        yield "strategy: pipeline, since it is the only one that can be run so far"
    if strategy.layers is None and len(chosen.stages) > 1:
        cut = ", ".join(f"{stage.cloud} {stage.holds}" for stage in chosen.stages)
        yield f"cut: {cut}, so that the slowest stage is as fast as possible"
    if strategy.microbatches is None:
        number, size = settings.num_microbatches, settings.microbatch_sequences
        yield f"micro-batches: {number} of {size} sequences, the best of all that divide a step"
    if strategy.policy == OPEN and settings.policy.keeps_order:
        yield f"policy: {settings.policy.value}, since ranks of a fully sharded stage need one order"
    yield from _memory_reasons(job, chosen)
    if (caps := settings.max_in_flight) is not None:
        of_each = zip(caps, chosen.clouds, strict=True) if isinstance(caps, tuple) else [(caps, "each cloud")]
        most = ", ".join(f"{cap} at {cloud}" for cap, cloud in of_each)
        yield f"in flight: at most {most}, which is what fits into memory"
    free = {link.name for link in job.link if "auto" in (link.codec.forward, link.codec.backward)}
    for link in chosen.links:
        if {"-".join(link.between), "-".join(reversed(link.between))} & free:
            yield f"codec of {'-'.join(link.between)}: {link.reason}"
    yield f"planned: {chosen.reason}"


def _memory_reasons(job: Job, chosen: Plan) -> Iterator[str]:
    """Memory options that the job did not ask for."""
    sharded = [one.cloud for one in chosen.stages if one.sharding is not Sharding.NONE]
    if free := [name for name in sharded if job.cloud_named(name).sharding == "auto"]:
        yield f"sharding: the ranks of {' and of '.join(free)} shard a stage: copies are slower or do not fit"
    if chosen.memory_options.recompute and not job.train.recompute:
        yield "recompute: on, since activations do not fit otherwise"
    if chosen.memory_options.offload_optimizer and not job.train.offload_optimizer:
        yield "optimizer: its moments are on the host, since nothing else fits"
    if chosen.memory_options.optimizer_bits != job.train.optimizer_bits:
        yield f"optimizer: moments of {chosen.memory_options.optimizer_bits} bits, since nothing else fits"


def _by_rule(job: Job, strategy: PipelineStrategy) -> Decisions:
    """Decisions without a plan."""
    why_not = why_not_planned(job, nothing_measured)
    notes = [] if why_not is None else [f"layers are split evenly, since nothing can be planned: {why_not}"]
    return Decisions(
        layers=strategy.layers or (),
        num_microbatches=strategy.microbatches or _choose_microbatches(job, notes),
        max_in_flight=strategy.max_in_flight,
        recompute=job.train.recompute is True,
        reasons=tuple(notes),
        offload_optimizer=job.train.offload_optimizer,
        optimizer_bits=job.train.optimizer_bits,
    )


def _pipeline(job: Job) -> PipelineStrategy:
    """The pipeline that a job asks for, or leaves to the plan; refuses a job that cannot run as one."""
    strategy = job.strategy
    if not isinstance(strategy, PipelineStrategy):
        strategy = PipelineStrategy(kind="pipeline")
    check_lock_step(job, strategy)
    check_lists(strategy, num_clouds=len(stage_order(job)))
    return strategy


def check_own_data(job: Job) -> None:
    """Refuse data of clouds that nothing would read, and a tokenizer that would see a part of it."""
    named = [cloud.name for cloud in job.cloud if cloud.data is not None]
    if named and not job.is_read_apart:
        raise UserError(
            f"cloud {named[0]!r} has data of its own, but in a pipeline the first cloud reads for all",
            hint="leave [cloud.data] out; for translation, data.id_column lets two clouds read",
        )
    if job.is_read_apart and trains_tokenizer(job.given_data, job.given_model):
        raise UserError(
            "a tokenizer cannot be trained where no cloud reads both texts and translations",
            hint="name one in data.tokenizer that both clouds have",
        )


def check_apart(job: Job, layers: Sequence[range], num_encoder_layers: int) -> None:
    """Refuse texts that would have to leave the clouds of the encoder, where `data.id_column` is set."""
    if not job.is_read_apart:
        return
    starts, clouds = [one.start for one in layers], stage_order(job)
    if not num_encoder_layers or num_encoder_layers not in starts:
        raise UserError(
            "two clouds read texts and translations, but no cut lies between encoder and decoder",
            hint='set boundary = "memory" at the link behind the encoder, or leave data.id_column out',
        )
    index = starts.index(num_encoder_layers)
    for name in clouds:
        if job.cloud_named(name).data is not None and name not in (clouds[0], clouds[index]):
            raise UserError(
                f"cloud {name!r} has data of its own, but {clouds[0]!r} reads texts and {clouds[index]!r} "
                "translations",
                hint=f"leave [cloud.data] of {name!r} out",
            )
    link = links_along(job, clouds)[index - 1]
    given = [str(link.boundary), str(link.codec.forward)]
    if anchored := next((one for one in given if "anchor=tokens" in one), None):
        raise UserError(
            f"{anchored} needs the ids of the texts at both ends of {link.name}, and they do not cross it",
            hint="set anchor=none there, or leave data.id_column out",
        )


def _choose_microbatches(job: Job, notes: list[str]) -> int:
    sequence_length = job.given_data.sequence_length
    num_sequences = max(1, job.train.batch_tokens // sequence_length)
    most = _MICROBATCHES_PER_STAGE * len(stage_order(job))
    every = [one for one in range(1, num_sequences + 1) if num_sequences % one == 0]
    check_even(job, num_sequences=num_sequences, sequence_length=sequence_length)
    possible = [one for one in every if one % common_ranks(job) == 0]
    chosen = max((one for one in possible if one <= most), default=possible[0])
    notes.append(
        f"micro-batches: {chosen}, the most up to {most} ({_MICROBATCHES_PER_STAGE} a stage) "
        f"that divide the {num_sequences} sequences of a step"
    )
    return chosen


def warmup_of(boundaries: Iterable[BoundarySpec]) -> int:
    """Steps in which hidden states cross raw, for bottlenecks to learn from."""
    found = (one.num_warmup_steps for one in boundaries if isinstance(one, BottleneckSpec))
    return max(found, default=0)


def run_config(
    job: Job,
    decisions: Decisions,
    blueprint: Blueprint,
    *,
    num_validation_microbatches: int,
    run_id: str = "",
    model: Mapping[str, Any] | None = None,
    num_labels: int | None = None,
    pairing: str = "",
) -> PipelineConfig:
    """The run config of a job, with the decisions that `decide` has completed."""
    clouds = stage_order(job)
    followed = follow(job, clouds, decisions)
    specs = [followed.cloud_named(name) for name in clouds]
    layers = stage_layers(job, decisions, blueprint.num_layers, blueprint.family.decoder)
    found = [link.boundary for link in links_along(job, clouds)]
    # Where an encoder ends is known by its layers.
    boundaries = tuple(HiddenSpec() if isinstance(one, MemorySpec) else one for one in found)
    trained_from = first_trained(layers, num_frozen_layers(job))
    pipeline = Pipeline(
        stages=tuple(tuple(Member(one.name, rank) for rank in range(one.ranks)) for one in specs),
        num_steps=job.train.steps,
        num_microbatches=decisions.num_microbatches,
        policy=Policy(decisions.policy),
        max_in_flight=decisions.max_in_flight or decisions.num_microbatches,
        first_trained=trained_from,
        grouped_stages=frozenset(
            index for index, one in enumerate(specs) if one.ranks > 1 and one.sharding == "full"
        ),
        evaluate_every=job.train.evaluate_every or None,
        num_validation_microbatches=num_validation_microbatches,
        evaluates_without_codecs=job.train.evaluate_without_codec,
        keep_best=job.train.keep_best,
        fit_step=warmup_of(boundaries) or None,
        bottlenecks=frozenset(
            number for number, one in enumerate(boundaries) if isinstance(one, BottleneckSpec)
        ),
        save_every_s=job.checkpoint.every_s,
        save_overhead=job.checkpoint.overhead,
        cuts=tuple(
            _cuts(job, decisions, hidden_width=blueprint.config.hidden_size, trained_from=trained_from)
        ),
    )
    return PipelineConfig(
        pipeline=pipeline,
        seed=job.seed,
        run_id=run_id,
        model=model or {},
        num_labels=num_labels,
        layers=tuple(map(len, layers)),
        sharding={one.name: sharding_of(one) for one in specs},
        recompute=followed.train.recompute,
        offload_optimizer=followed.train.offload_optimizer,
        optimizer_bits=followed.train.optimizer_bits,
        boundaries=boundaries,
        keeps_padding=blueprint.mixes_tokens,
        cache_bytes=job.given_model.cache_frozen_bytes,
        num_encoder_layers=blueprint.num_encoder_layers,
        pairing=pairing,
    )


def _cuts(job: Job, decisions: Decisions, *, hidden_width: int, trained_from: int) -> Iterator[Cut]:
    """The cuts of a job; where it leaves a codec open, they start with what was planned, else raw."""
    clouds = stage_order(job)
    links = links_along(job, clouds)
    layout = layout_of(job, decisions.num_microbatches)
    warmup = warmup_of(link.boundary for link in links)
    for number, link in enumerate(links):
        forward, backward = _own(link.codec.forward), _own(link.codec.backward)
        first = _first_pair(forward, backward, decisions.codecs[number] if decisions.codecs else None)
        ranks = [job.cloud_named(name).ranks for name in clouds[number : number + 2]]
        yield Cut(
            crossing=Crossing(
                num_rows=layout.num_sequences * job.given_data.sequence_length,
                width=link.boundary.crossing_width(hidden_width),
                has_gradient=number >= trained_from,
                num_steps=job.train.steps,
                num_microbatches=layout.num_microbatches,
                num_learners=num_learners(*ranks),
            ),
            name=link.name,
            codecs=first,
            num_warmup_steps=warmup if isinstance(link.boundary, BottleneckSpec) else 0,
            guard_every=link.guard_every,
            guard_cosine=link.guard_cosine,
            bounds=Bounds(loss=Loss[job.limits.codec_loss.upper()], forward=forward, backward=backward),
            is_free=forward is None or backward is None,
            bandwidths_bps=_bandwidths(link, clouds[number]),
            least_lossy=first if job.limits.counts_money and link.usd_per_gib else None,
            shares_ids=not job.is_read_apart,
        )


def _first_pair(
    forward: CodecSpec | None, backward: CodecSpec | None, planned: tuple[str, str] | None
) -> Pair:
    if planned is not None:
        pair = Pair(forward=forward or parse_codec(planned[0]), backward=backward or parse_codec(planned[1]))
        if pair.is_possible:
            return pair
    return Pair(forward=forward or RAW, backward=backward or RAW)


def _own(codec: CodecSpec | str) -> CodecSpec | None:
    return codec if isinstance(codec, CodecSpec) else None


def _bandwidths(link: LinkSpec, sender: str) -> tuple[float, float] | None:
    if link.bandwidth_bps is None:
        return None
    there, back = link.bandwidth_bps
    return (there, back) if link.between[0] == sender else (back, there)
