"""A stage and all that trains it, made ready at one rank: built, equipped, shared out, reduced."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from isthmus.job import CloudSpec, Job
from isthmus.job.boundary import HiddenSpec
from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import Blueprint
from isthmus.model.stage import Stage
from isthmus.plan.costs.memory import Sharding
from isthmus.plan.cuts import num_frozen_layers
from isthmus.train.course import Course
from isthmus.train.crossing.steering import Steering
from isthmus.train.crossing.wiring import steering_terms
from isthmus.train.device import Device
from isthmus.train.optimize.optimizer import Decay, Optimizer, Schedule
from isthmus.train.ranks.reduction import NoReduction, PlainReduction, Reduction
from isthmus.train.ranks.sharding import LockStepReduction, ShardedReduction, shard
from isthmus.train.ranks.world import World
from isthmus.train.savers import equip, optimizer_state
from isthmus.train.setup import Setup

AUTOCAST: Final = {"float32": None, "bfloat16": torch.bfloat16}
"""What a job's precision computes in, where that is not float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipped:
    """A stage, and what trains it."""

    stage: Stage
    optimizer: Optimizer
    reduction: Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """What a rank makes its stage from."""

    job: Job
    cloud: CloudSpec
    setup: Setup
    blueprint: Blueprint
    device: Device
    world: World

    @property
    def sharding(self) -> Sharding:
        """What of the stage the ranks of this cloud share out; one rank has no one to share with."""
        return Sharding(self.cloud.sharding) if self.world.seat.num_ranks > 1 else Sharding.NONE

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks share anything out."""
        return self.sharding is not Sharding.NONE

    def make(self, course: Course) -> Equipped:
        """All of it."""
        stage = self.stage(course)
        optimizer = make_optimizer(self.job, stage, offload=not self.is_sharded)
        return Equipped(stage=stage, optimizer=optimizer, reduction=self.reduction(stage))

    def stage(self, course: Course) -> Stage:
        """The stage of this cloud, on its device."""
        index, hidden = self.setup.clouds.index(self.cloud.name), HiddenSpec()
        stage = build_stage(
            self.blueprint,
            self.setup.stage_layers(self.blueprint.num_layers)[index],
            seed=self.job.seed,
            recompute=self.setup.recompute,
            inbound=hidden if index == 0 else course.cut(index - 1).boundary,
            outbound=hidden if index + 1 == course.num_stages else course.cut(index).boundary,
            num_frozen_layers=num_frozen_layers(self.job),
            lora=None if self.job.model is None else self.job.model.lora,
        ).to(self.device.torch_device)
        stage = equip(
            stage,
            self.job,
            cloud=self.cloud.name,
            device=self.device,
            in_lock_step=self.is_sharded and self.sharding is Sharding.FULL,
        )
        stage.notes += tuple(_notes(course, index))
        if self.is_sharded:
            self._share_out(stage)
        return stage

    def reduction(self, stage: Stage) -> Reduction:
        """How the ranks of this cloud come to one gradient."""
        if self.world.seat.num_ranks == 1:
            return NoReduction()
        match self.sharding:
            case Sharding.NONE:
                return PlainReduction(self.world, stage.parameters_by_name())
            case Sharding.OPTIMIZER:
                return ShardedReduction(self.world, stage)
            case Sharding.FULL:
                return LockStepReduction(self.world, stage)

    def _share_out(self, stage: Stage) -> None:
        shard(
            stage,
            device=self.device.torch_device,
            num_ranks=self.world.seat.num_ranks,
            compute_dtype=AUTOCAST[self.job.train.precision],
            keeps_sharded=self.sharding is Sharding.FULL,
            offload=self.job.train.offload_optimizer,
        )


def _notes(course: Course, index: int) -> Iterator[str]:
    """What a stage does otherwise than its job may lead one to expect."""
    would_cache = course.cache_bytes > 0 and 0 < index == course.first_trained
    if would_cache and not course.is_cached:
        yield (
            "what frozen layers give is not cached: where clouds have several ranks a sequence comes to "
            "another one every time, so it crosses every time"
        )


def make_optimizer(job: Job, stage: Stage, *, offload: bool = True) -> Optimizer:
    """The optimizer of a stage, as the job's `[train]` says; FSDP2 has its own way to offload."""
    train = job.train
    schedule = Schedule(
        peak=train.learning_rate,
        num_steps=train.steps,
        num_warmup_steps=round(train.warmup_share * train.steps),
        decay=Decay(train.decay),
    )
    return Optimizer(
        stage.parameters_by_name(),
        schedule=schedule,
        weight_decay=train.weight_decay,
        max_norm=train.max_norm or None,
        state=optimizer_state(job),
        offload=train.offload_optimizer and offload,
        tables=stage.tables(),
    )


def make_steering(
    job: Job, setup: Setup, course: Course, stage: Stage, *, note: Callable[[str], None]
) -> Steering:
    """What chooses the codecs of all cuts, at the first stage."""
    length = 1 if job.data is None else job.data.sequence_length
    terms = steering_terms(
        job,
        setup.clouds,
        course.cuts,
        num_rows=setup.layout.num_sequences * length,
        num_microbatches=course.num_microbatches,
        num_steps=course.num_steps,
        hidden_width=stage.model.config.hidden_size,
        trained_from=course.first_trained,
    )
    return Steering(terms, num_microbatches=course.num_microbatches, note=note)
