"""The role of a member in a pipeline: its stage, its wires to the stages beside it, its part of the data."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from torch import Tensor

from isthmus.errors import UserError
from isthmus.job import Job, stage_order
from isthmus.job.codec import BottleneckSpec, HiddenSpec
from isthmus.model.blueprint import Blueprint
from isthmus.model.encoder_decoder import check_learns
from isthmus.model.export import describe_exported
from isthmus.model.feed_forward import check_within, lies_within
from isthmus.model.random import seed_from
from isthmus.model.stage import Stage
from isthmus.plan.end_of_step import Note
from isthmus.plan.job_facts import check_cuts, common_ranks, links_along, num_frozen_layers
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.pipeline_parts import FACTS, Pipeline, PipelineState
from isthmus.plan.plan import Decisions, follow
from isthmus.plan.types import Member, Scheduler
from isthmus.train.build import (
    AUTOCAST,
    MODEL_FOLDER,
    Build,
    BuiltStage,
    RunConfig,
    check_fits,
    layout_of,
)
from isthmus.train.coding import CutCoding, CutEnd
from isthmus.train.data.rows import NOT_HERE
from isthmus.train.data.training_data import Feed, Layout, Source, TrainingData, check_enough, check_paired
from isthmus.train.device import Device
from isthmus.train.frozen_cache import Cache, held_of
from isthmus.train.integers import IDS, MASK, mask_of, said_before, target_ids, valid_rows
from isthmus.train.metrics import (
    Judge,
    describe_metrics,
    judge_of,
    refused,
    tokenizer_files,
    why_not_translated,
)
from isthmus.train.pipeline import PipelineActor, PipelineConfig
from isthmus.train.pipeline_config import check_apart, decide, plan_run, run_config, stage_layers
from isthmus.train.wire import Observer

_NOT_CACHED: Final = (
    "what frozen layers give is not cached: where clouds have several ranks a sequence comes to "
    "another one every time, so it crosses every time"
)
_HIDDEN: Final = HiddenSpec()


class PipelineKind:
    """Each cloud holds a stage; a cloud that is lost holds up all others."""

    config = PipelineConfig
    saves_together = True
    continues = False
    chooses = True
    clouds = staticmethod(stage_order)
    plan = staticmethod(plan_run)
    decide = staticmethod(decide)

    def links(self, job: Job) -> Sequence[tuple[str, str]]:
        """The cuts."""
        return list(pairwise(stage_order(job)))

    def data_job(self, job: Job, cloud: str) -> Job:
        """The first cloud reads what the job says; where another reads translations, each its own part."""
        if not job.is_read_apart:
            return job
        own = job.reading_at(cloud)
        column = "pair_column" if cloud == stage_order(job)[0] else "text_column"
        return own.model_copy(update={"data": own.given_data.model_copy(update={column: NOT_HERE})})

    def check(self, job: Job, known: Job, decisions: Decisions, blueprint: Blueprint) -> None:
        """Refuse stages that do not fit, cuts that cannot be, and what no exported model could hold."""
        check_export(job, blueprint)
        clouds = stage_order(job)
        layers = stage_layers(job, decisions, blueprint.num_layers, blueprint.family.decoder)
        check_apart(job, layers, blueprint.num_encoder_layers)
        if blueprint.abnet is not None and blueprint.abnet.frozen:
            check_learns(blueprint.config, layers, num_frozen=num_frozen_layers(job))
        last = job.cloud_named(clouds[-1])
        is_sharded = last.ranks > 1 and last.sharding == "full"
        reason = why_not_translated(layers[-1], blueprint.num_encoder_layers, is_sharded=is_sharded)
        if job.train.keep_best == "bleu" and reason is not None:
            raise refused(reason)
        check_fits(follow(known, clouds, decisions), layers, blueprint)
        check_cuts(
            links_along(job, clouds),
            layers,
            num_frozen=num_frozen_layers(job),
            hidden_width=blueprint.config.hidden_size,
            num_steps=job.train.steps,
        )

    def check_data(self, job: Job, decisions: Decisions, data: TrainingData) -> None:
        """Refuse data that cannot fill a step."""
        check_enough(data.samples, layout_of(job, decisions.num_microbatches))

    def reads(self, config: RunConfig, cloud: str) -> bool:
        """The first stage reads for all, but translations that are read apart."""
        stage = of_pipeline(config).target_stage
        return cloud in {config.members[0].cloud, of_pipeline(config).pipeline.stages[stage or 0][0].cloud}

    def config_of(
        self, job: Job, decisions: Decisions, blueprint: Blueprint, data: TrainingData, *, run_id: str
    ) -> PipelineConfig:
        """The run config, with as many micro-batches in an evaluation as the data gives."""
        held_out = data.validation_batches(
            num_sequences=layout_of(job, decisions.num_microbatches).num_sequences,
            multiple_of=common_ranks(follow(job, stage_order(job), decisions)),
        )
        config = run_config(
            job,
            decisions,
            blueprint,
            num_validation_microbatches=sum(1 for _ in held_out),
            run_id=run_id,
            model=dict(data.facts.config),
            num_labels=data.facts.num_labels,
            pairing=data.pairing,
        )
        return replace(config, tokenizer=tokenizer_files(job, data.tokenizer))

    def make(self, build: Build) -> "PipelineRole":
        """Build the stage of this cloud."""
        config = of_pipeline(build.config)
        member = Member(build.cloud, build.world.rank)
        return PipelineRole(config, member, build.make(pipeline_stage(build)), job=build.job)


class PipelineRole:
    """One rank of one stage; without a job it can neither read data nor describe the model."""

    facts = FACTS
    state = PipelineState

    def __init__(
        self, config: PipelineConfig, member: Member, built: BuiltStage, *, job: Job | None = None
    ) -> None:
        self.built = built
        self.peers = peers_of(config.pipeline, member)
        self._config = config
        self._pipeline = config.pipeline
        self._member = member
        self._index = config.pipeline.stage_of(member)
        self._job = job

    def scheduler(self) -> Scheduler:
        """The schedule of this member."""
        return PipelineScheduler(self._pipeline, self._member)

    def actor(self, observer: Observer, source: Source | None) -> PipelineActor:
        """The passes of the stage."""
        return PipelineActor(
            self._config,
            self._member,
            self.built,
            on_span=observer.span,
            source=source,
            judge=self._judge(observer),
        )

    def _judge(self, observer: Observer) -> Judge | None:
        if self._job is None:
            return None
        found = judge_of(
            self._job,
            self.built.stage,
            files=self._config.tokenizer,
            is_sharded=self._index in self._pipeline.grouped_stages,
        )
        if isinstance(found, str):
            observer.tell(Note(text=found))
            return None
        return found

    def feed(self, data: TrainingData, *, step: int) -> Feed:
        """This rank's micro-batches of each step, as the schedule routes them."""
        check_paired(self._config.pairing, data.pairing)
        return Feed(
            data,
            self._layout,
            share=functools.partial(self._pipeline.routing.share, self._index, self._member.rank),
            first_step=step,
            multiple_of=self._config.common_ranks,
        )

    def cut(self, peer: Member) -> CutEnd:
        """This end of the cut to a neighbouring stage."""
        other = self._pipeline.stage_of(peer)
        return cut_end(
            self._config,
            min(self._index, other),
            self.built.device,
            self.built.stage.model.config.hidden_size,
            is_sender=other > self._index,
        )

    def extra(self) -> Mapping[str, Tensor]:
        """Nothing beside weights, moments and the codec state of wires."""
        return {}

    def models(self, *, is_first: bool) -> Mapping[str, Stage]:  # noqa: ARG002 - every cloud has its own
        """The stage of every cloud is a part of the one model."""
        return {MODEL_FOLDER: self.built.stage}

    def describe(self, model: Path, data: TrainingData) -> str | None:
        """The loss of the exported model on held-out data."""
        job = self._job
        if job is None or not job.train.evaluate_every:
            return None
        if self._config.pairing:
            return "the exported model was not evaluated: no cloud has both texts and translations"
        return describe_exported(
            model,
            head=data.head,
            batches=data.validation_batches(num_sequences=self._layout.num_sequences),
            device=self.built.device.torch_device,
            autocast=AUTOCAST[job.train.precision],
            trust_remote_code=job.given_model.trust_remote_code,
            judge=functools.partial(describe_metrics, job=job, tokenizer=data.tokenizer),
        )

    @property
    def _layout(self) -> Layout:
        if self._job is None:
            raise ValueError("the batch of a step is divided as a job says")
        return layout_of(self._job, self._pipeline.num_microbatches)


def of_pipeline(config: RunConfig) -> PipelineConfig:
    """The run config of a pipeline; another kind is the caller's mistake."""
    if not isinstance(config, PipelineConfig):
        raise TypeError(f"a pipeline is built from the run config of a pipeline, not of {config.kind}")
    return config


def pipeline_stage(build: Build) -> Stage:
    """The stage of a cloud, on its device."""
    config = of_pipeline(build.config)
    pipeline = config.pipeline
    index = pipeline.stage_of(Member(build.cloud))
    stage = build.stage(
        config.stage_layers[index],
        inbound=_HIDDEN if index == 0 else config.boundary(index - 1),
        outbound=_HIDDEN if index + 1 == len(pipeline.stages) else config.boundary(index),
    )
    if config.cache_bytes > 0 and 0 < index == pipeline.first_trained and not config.is_cached:
        stage.notes += (_NOT_CACHED,)
    return stage


def peers_of(pipeline: Pipeline, member: Member) -> tuple[Member, ...]:
    """The members of the neighbouring stages that a member exchanges messages with."""
    index = pipeline.stage_of(member)
    return tuple(
        pipeline.stages[stage][rank]
        for stage in (index - 1, index + 1)
        if 0 <= stage < len(pipeline.stages)
        for rank in pipeline.routing.peers(index, member.rank, neighbour=stage)
    )


def check_export(job: Job, blueprint: Blueprint) -> None:
    """Refuse to train what no exported model could hold."""
    links = links_along(job, stage_order(job))
    bottlenecks = [link for link in links if isinstance(link.boundary, BottleneckSpec)]
    lora = job.given_model.lora
    for link in links:
        check_within(link.boundary, blueprint.config)
        if lora is not None and lies_within(link.boundary):
            raise UserError(
                f"adapters cannot be trained beside {link.boundary}, which parts a layer",
                hint="leave [model.lora] out, or set init=pca",
            )
    if bottlenecks and lora is not None and not lora.merge:
        raise UserError(
            f"an adapter alone cannot hold {bottlenecks[0].boundary}, which would be trained with it",
            hint="set model.lora.merge = true, so that the whole model is exported",
        )
    if bottlenecks and blueprint.brings_code:
        raise UserError(
            f"a model with code of its own cannot be exported with {bottlenecks[0].boundary}",
            hint='leave link.boundary at "hidden", and set link.codec instead',
        )


def cut_end(
    config: PipelineConfig, cut: int, device: Device, hidden_width: int, *, is_sender: bool
) -> CutEnd:
    """One end of the cut behind a stage, with codec state of its own."""
    pipeline = config.pipeline
    receives_from_frozen = config.is_cached and cut + 1 == pipeline.first_trained
    is_in_decoder = config.is_in_decoder(cut)

    def rows(integers: Mapping[str, Tensor]) -> Tensor | None:
        if is_in_decoder:
            return valid_rows(target_ids(integers) >= 0)
        ids, mask = integers[IDS], integers.get(MASK)
        if receives_from_frozen and (held := held_of(integers)):
            return valid_rows(mask_of(ids, mask, keeps_padding=config.keeps_padding), without=held)
        return valid_rows(None if config.keeps_padding else mask)

    return CutEnd(
        coding=CutCoding(
            cut=pipeline.cuts[cut],
            hidden_width=hidden_width,
            crossing_width=config.boundary(cut).crossing_width(hidden_width),
            # Cuts round by themselves, or their errors would add up.
            seed=seed_from("cut", config.seed, cut),
            num_microbatches=pipeline.num_microbatches,
            returns_gradients=cut >= pipeline.first_trained,
            may_omit=config.is_cached and cut + 1 < pipeline.first_trained,
            rows=rows,
            ids=said_before if is_in_decoder else lambda integers: integers[IDS],
        ),
        device=device,
        is_sender=is_sender,
        cache=Cache(config.admission(hidden_width)) if receives_from_frozen and not is_sender else None,
    )
