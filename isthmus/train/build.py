"""Builds a member's stage and what trains it: on its device, with its memory options, sharded, reduced."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job, stage_order
from isthmus.job.codec import HiddenSpec
from isthmus.model.blueprint import Blueprint, fresh_blueprint, pretrained_blueprint
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.random import seed_from
from isthmus.model.recompute import Budgeted, Fixed
from isthmus.model.stage import Stage
from isthmus.plan.memory import OptimizerState
from isthmus.plan.pipeline_parts import FACTS
from isthmus.plan.types import Facts, Member, Scheduler
from isthmus.train.coding import CutCoding, CutEnd
from isthmus.train.device import Device
from isthmus.train.frozen_cache import HELD, Cache, held_of
from isthmus.train.in_cloud import (
    Reduction,
    World,
    awaited_gradient_bytes,
    shard,
)
from isthmus.train.integers import IDS, MASK, mask_of, valid_rows
from isthmus.train.loop import Loop
from isthmus.train.optimizer import Decay, Optimizer, Schedule
from isthmus.train.pipeline import BuiltStage, PipelineActor, Source, admission
from isthmus.train.run_config import RunConfig
from isthmus.train.wire import Inbox, Observer, Wire
from isthmus.units import format_bytes
from isthmus.wan.link import Link

AUTOCAST: Final = {"float32": None, "bfloat16": torch.bfloat16}
"""What a job's precision computes in, where that is not float32."""
_ALIKE: Final = (
    'train.recompute = "auto" recomputes every layer here, as ranks of a fully sharded stage must '
    "compute alike"
)
_NOT_CACHED: Final = (
    "what frozen layers give is not cached: where clouds have several ranks a sequence comes to "
    "another one every time, so it crosses every time"
)
_MOMENT_BYTES: Final = {OptimizerState.FLOAT32: 8, OptimizerState.EIGHT_BIT: 2}
_HIDDEN: Final = HiddenSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What a member builds its stage from; `job` is this site's own, for what sites may differ in."""

    job: Job
    config: RunConfig
    cloud: str
    blueprint: Blueprint
    device: Device
    world: World

    @property
    def index(self) -> int:
        """The stage of this cloud."""
        return next(
            number for number, stage in enumerate(self.config.pipeline.stages) if stage[0].cloud == self.cloud
        )

    @property
    def sharding(self) -> str:
        """What of the stage the ranks of this cloud shard."""
        return self.config.sharding[self.index]

    def make(self) -> BuiltStage:
        stage = self.stage()
        return BuiltStage(
            stage=stage,
            optimizer=self.optimizer(stage),
            device=self.device,
            autocast=AUTOCAST[self.job.train.precision],
            world=self.world,
            reduction=Reduction(self.world, stage, sharding=self.sharding),
        )

    def stage(self) -> Stage:
        """The stage of this cloud, on its device."""
        config, index = self.config, self.index
        is_last = index + 1 == len(config.pipeline.stages)
        stage = build_stage(
            self.blueprint,
            config.stage_layers(self.blueprint.num_layers)[index],
            seed=config.seed,
            recompute=config.recompute is True,
            inbound=_HIDDEN if index == 0 else config.boundary(index - 1),
            outbound=_HIDDEN if is_last else config.boundary(index),
            num_frozen_layers=0 if self.job.model is None else self.job.model.frozen_layers,
            lora=None if self.job.model is None else self.job.model.lora,
        ).to(self.device.torch_device)
        self._recompute(stage)
        if self.job.train.compile:
            # Language models get sequences of one length; other tasks pad to the longest of a micro-batch.
            is_padded = self.job.data is not None and self.job.data.task != "causal-lm"
            stage.compile_layers(dynamic=True if is_padded else None)
        if config.cache_bytes > 0 and 0 < index == config.pipeline.first_trained and not config.is_cached:
            stage.notes += (_NOT_CACHED,)
        if self.sharding != "none":
            shard(
                stage,
                device=self.device.torch_device,
                num_ranks=self.world.num_ranks,
                compute_dtype=AUTOCAST[self.job.train.precision],
                keeps_sharded=self.sharding == "full",
                offload=config.offload_optimizer,
            )
        return stage

    def optimizer(self, stage: Stage) -> Optimizer:
        """The optimizer of a stage, as the job's `[train]` says; FSDP2 has its own way to offload."""
        train = self.job.train
        return Optimizer(
            stage.parameters_by_name(),
            schedule=Schedule(
                peak=train.learning_rate,
                num_steps=train.steps,
                num_warmup_steps=round(train.warmup_share * train.steps),
                decay=Decay(train.decay),
            ),
            weight_decay=train.weight_decay,
            max_norm=train.max_norm or None,
            state=optimizer_state(self.config),
            offload=self.config.offload_optimizer and self.sharding == "none",
            tables=stage.tables(),
        )

    def _recompute(self, stage: Stage) -> None:
        """Recompute activations within the memory budget, where the run config says so.

        Ranks of a fully sharded stage must all recompute the same, whatever the sizes of their micro-batches.
        """
        if self.config.recompute != "auto":
            return
        if self.sharding == "full":
            stage.recompute = Fixed(frozenset(stage.layers))
            stage.notes += (_ALIKE,)
            return
        job = self.job
        memory_bytes = job.cloud_named(self.cloud).memory_bytes or self.device.memory_bytes()
        stage.recompute = Budgeted(
            budget_bytes=job.train.memory_budget_bytes or int(job.limits.memory_share * memory_bytes),
            standing_bytes=lambda: _standing_bytes(stage, self.config, self.device),
            max_length=None if job.data is None else job.data.sequence_length,
        )


def blueprint_of(job: Job, *, config: Mapping[str, Any], num_labels: int | None) -> Blueprint:
    """The job's model, with what its configuration takes from the data."""
    if job.model is None or job.data is None:
        raise UserError("the job has no [model] or no [data] section")
    head = HEADS[job.data.task]
    if job.model.source is not None:
        return pretrained_blueprint(
            job.model.source,
            head=head,
            num_labels=num_labels,
            trust_remote_code=job.model.trust_remote_code,
        )
    return fresh_blueprint({**(job.model.config or {}), **config}, head=head, num_labels=num_labels)


def optimizer_state(config: RunConfig) -> OptimizerState:
    """What AdamW remembers of each parameter."""
    return OptimizerState.EIGHT_BIT if config.optimizer_bits == 8 else OptimizerState.FLOAT32


def _standing_bytes(stage: Stage, config: RunConfig, device: Device) -> int:
    """The memory in use when nothing is in flight, and the gradients to come."""
    used_bytes = awaited_gradient_bytes(stage)
    if device.is_accelerator:
        module = torch.get_device_module(device.torch_device)
        return used_bytes + int(module.memory_allocated(device.torch_device))
    # The allocator of a CPU does not say what is allocated.
    moment_bytes = _MOMENT_BYTES[optimizer_state(config)]
    for parameter in stage.parameters():
        used_bytes += parameter.nbytes + (0 if parameter.grad is None else parameter.grad.nbytes)
        used_bytes += moment_bytes * parameter.numel() if parameter.requires_grad else 0
    return used_bytes


def check_fits(job: Job, stage_layers: Sequence[range], blueprint: Blueprint) -> None:
    """Refuse a stage whose weights, gradients and moments alone are over the memory of its cloud.

    The job leaves nothing open about memory.
    """
    for name, layers in zip(stage_order(job), stage_layers, strict=True):
        cloud = job.cloud_named(name)
        needed_bytes = _state_bytes(job, cloud, blueprint, layers)
        memory_bytes = cloud.memory_bytes or (Device("cpu").memory_bytes() if cloud.device == "cpu" else None)
        if memory_bytes is not None and needed_bytes > memory_bytes:
            raise UserError(
                f"the stage of cloud {name!r} needs {format_bytes(needed_bytes)} for weights, gradients "
                f"and optimizer, but it has {format_bytes(memory_bytes)}",
                hint="take a smaller model, or add clouds, so that each holds fewer layers",
            )


def _state_bytes(job: Job, cloud: CloudSpec, blueprint: Blueprint, layers: range) -> int:
    """What one rank keeps of a stage; what layers gather for one pass does not count."""
    num_parameters = sum(blueprint.layout.owned_by(layers).values())
    num_trained = _num_trained(job, blueprint, layers)
    has_moments = cloud.device == "cpu" or not job.train.offload_optimizer
    moment_bytes = job.train.optimizer_bits // 4 * num_trained if has_moments else 0
    gathered_bytes = torch.float32.itemsize * (num_parameters + num_trained)
    shard_bytes = -(-(gathered_bytes + moment_bytes) // cloud.ranks)
    match cloud.sharding:
        case "optimizer":
            return gathered_bytes + shard_bytes
        case "full":
            return shard_bytes
    return gathered_bytes + moment_bytes


def _num_trained(job: Job, blueprint: Blueprint, layers: range) -> int:
    """The weights of a stage that learn; adapters are too small to keep it from fitting."""
    if job.model is None or job.model.lora is not None:
        return 0
    layout, num_frozen = blueprint.layout, job.model.frozen_layers
    parts = [layout.layers[layer] for layer in layers if layer >= num_frozen]
    parts += [layout.first] if layers.start == 0 and num_frozen == 0 else []
    parts += [layout.last] if layers.stop == layout.num_layers else []
    return sum(sum(part.values()) for part in parts)


def pipeline_loop(
    built: BuiltStage,
    config: RunConfig,
    member: Member,
    scheduler: Scheduler,
    links: Mapping[Member, Link],
    *,
    observer: Observer,
    source: Source | None,
    save: Callable[[int, Facts | None], None],
) -> Loop:
    """The loop of a member, with its actor and its wires."""
    inbox, width = Inbox(), built.stage.model.config.hidden_size
    wires = pipeline_wires(
        config, member, links, hidden_width=width, device=built.device, inbox=inbox, observer=observer
    )
    actor = PipelineActor(config, member, built, on_span=observer.span, source=source)
    return Loop(scheduler, actor, wires, inbox, tell=observer.tell, save=save)


def pipeline_wires(
    config: RunConfig,
    member: Member,
    links: Mapping[Member, Link],
    *,
    hidden_width: int,
    device: Device,
    inbox: Inbox,
    observer: Observer,
) -> dict[Member, Wire]:
    """The wires of a member to all members of the neighbouring stages that it speaks to."""
    pipeline = config.pipeline
    index = pipeline.stage_of(member)
    return {
        peer: Wire(
            link,
            here=member,
            peer=peer,
            inbox=inbox,
            observer=observer,
            facts=FACTS,
            cut=cut_end(
                config, min(index, pipeline.stage_of(peer)), device, hidden_width, is_sender=peer_is_behind
            ),
        )
        for peer, link in links.items()
        for peer_is_behind in [pipeline.stage_of(peer) > index]
    }


def cut_end(config: RunConfig, cut: int, device: Device, hidden_width: int, *, is_sender: bool) -> CutEnd:
    """One end of the cut behind a stage, with codec state of its own."""
    pipeline = config.pipeline
    receives_from_frozen = config.is_cached and cut + 1 == pipeline.first_trained
    boundary = config.boundary(cut)
    terms = pipeline.cuts[cut] if pipeline.cuts else None

    def rows(integers: Mapping[str, Tensor]) -> Tensor | None:
        ids, mask = integers[IDS], integers.get(MASK)
        held = held_of(integers) if HELD in integers else None
        if receives_from_frozen and held:
            return valid_rows(mask_of(ids, mask, keeps_padding=config.keeps_padding), without=held)
        return valid_rows(None if config.keeps_padding else mask)

    has_cache = receives_from_frozen and not is_sender
    return CutEnd(
        coding=CutCoding(
            hidden_width=hidden_width,
            crossing_width=boundary.crossing_width(hidden_width),
            num_warmup_steps=config.num_warmup_steps if cut in pipeline.bottlenecks else 0,
            # Cuts round by themselves, or their errors would add up.
            seed=seed_from("cut", config.seed, cut),
            guard_every=0 if terms is None else terms.guard_every,
            num_microbatches=pipeline.num_microbatches,
            returns_gradients=cut >= pipeline.first_trained,
            max_rows=None if terms is None else terms.crossing.num_rows,
            may_omit=config.is_cached and cut + 1 < pipeline.first_trained,
            rows=rows,
            allows=(lambda _: True) if terms is None else terms.allows,
        ),
        device=device,
        is_sender=is_sender,
        cache=Cache(admission(config, hidden_width), keeps_padding=config.keeps_padding)
        if has_cache
        else None,
    )
