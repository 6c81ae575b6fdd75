"""What the members of a run agree on, and what each of them builds from it, whatever the strategy.

RunConfig   made by the first cloud, once it has planned, and sent to all others, so that no two sites
            can differ; each strategy adds its schedule in a subclass
Build       the run config with this member's own job, device and ranks
BuiltStage  the stage on its device, with its memory options, sharded, and what trains it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job, stage_order
from isthmus.job.codec import BoundarySpec, HiddenSpec
from isthmus.model.blueprint import Blueprint, fresh_blueprint, joined_blueprint, pretrained_blueprint
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.recompute import Budgeted, Fixed
from isthmus.model.stage import Stage
from isthmus.plan.memory import OptimizerState
from isthmus.plan.types import Facts, Member
from isthmus.train.data.training_data import Layout, divide_batch
from isthmus.train.device import Device
from isthmus.train.in_cloud import Reduction, World, awaited_gradient_bytes, shard
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.units import format_bytes

AUTOCAST: Final = {"float32": None, "bfloat16": torch.bfloat16}
"""What a job's precision computes in, where that is not float32."""
_ALIKE: Final = (
    'train.recompute = "auto" recomputes every layer here, as ranks of a fully sharded stage must '
    "compute alike"
)
_MOMENT_BYTES: Final = {OptimizerState.FLOAT32: 8, OptimizerState.EIGHT_BIT: 2}
_HIDDEN: Final = HiddenSpec()


ShardingName = Literal["none", "optimizer", "full"]
MODEL_FOLDER: Final = "model"
"""Where a run directory has the exported model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Facts):
    """What all members of a run agree on; the subclass of its kind adds the schedule."""

    kind: str
    seed: int
    run_id: str = ""
    """The name of the run directory, which the first cloud chooses."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """What the model's configuration takes from the data, which only some clouds read."""
    num_labels: int | None = None
    sharding: Mapping[str, ShardingName] = field(default_factory=dict)
    """What the ranks of a cloud shard, by its name; nothing where it is not named."""
    recompute: bool | Literal["auto"] = False
    offload_optimizer: bool = False
    optimizer_bits: Literal[8, 32] = 32
    keeps_padding: bool = False
    """Whether padding crosses too, as `Blueprint.mixes_tokens` says."""

    @property
    def members(self) -> Sequence[Member]:
        """All members of the run."""
        raise NotImplementedError

    def continues_without(self, cloud: str) -> bool:  # noqa: ARG002 - a strategy may say so
        """Whether the others continue where this cloud ends with an error."""
        return False


def sharding_of(cloud: CloudSpec) -> ShardingName:
    """What the ranks of a cloud shard; one rank alone shards nothing."""
    if cloud.ranks == 1 or cloud.sharding == "auto":
        return "none"
    return cloud.sharding


def layout_of(job: Job, num_microbatches: int) -> Layout:
    """How the batch of a step is divided into micro-batches."""
    return divide_batch(
        batch_tokens=job.train.batch_tokens,
        sequence_length=job.given_data.sequence_length,
        num_microbatches=num_microbatches,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A member's stage, and what trains it."""

    stage: Stage
    optimizer: Optimizer
    device: Device
    autocast: torch.dtype | None = None
    world: World = field(default_factory=World)
    reduction: Reduction | None = None
    """None where ranks have whole parameters, or there is one rank."""


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
    def sharding(self) -> str:
        """What of the stage the ranks of this cloud shard."""
        return self.config.sharding.get(self.cloud, "none")

    def make(self, stage: Stage) -> BuiltStage:
        """The stage with what trains it."""
        return BuiltStage(
            stage=stage,
            optimizer=self.optimizer(stage),
            device=self.device,
            autocast=AUTOCAST[self.job.train.precision],
            world=self.world,
            reduction=Reduction(self.world, stage, sharding=self.sharding),
        )

    def stage(
        self, layers: range, *, inbound: BoundarySpec = _HIDDEN, outbound: BoundarySpec = _HIDDEN
    ) -> Stage:
        """A stage with these layers, on the device of this member."""
        model, data = self.job.given_model, self.job.given_data
        stage = build_stage(
            self.blueprint,
            layers,
            seed=self.config.seed,
            recompute=self.config.recompute is True,
            inbound=inbound,
            outbound=outbound,
            num_frozen_layers=model.frozen_layers,
            lora=model.lora,
        ).to(self.device.torch_device)
        self._recompute(stage)
        if self.job.train.compile:
            # Language models get sequences of one length; other tasks pad to the longest of a micro-batch.
            stage.compile_layers(dynamic=None if data.task == "causal-lm" else True)
        if self.sharding != "none":
            shard(
                stage,
                device=self.device.torch_device,
                num_ranks=self.world.num_ranks,
                compute_dtype=AUTOCAST[self.job.train.precision],
                keeps_sharded=self.sharding == "full",
                offload=self.config.offload_optimizer,
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
                decay=train.decay,
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
            max_length=job.given_data.sequence_length,
        )


def blueprint_of(job: Job, *, config: Mapping[str, Any], num_labels: int | None) -> Blueprint:
    """The job's model, with what its configuration takes from the data."""
    head, model = HEADS[job.given_data.task], job.given_model
    if model.abnet is not None:
        return joined_blueprint(model, model.abnet, values=config, head=head)
    if model.source is None:
        return fresh_blueprint({**(model.config or {}), **config}, head=head, num_labels=num_labels)
    return pretrained_blueprint(
        model.source, head=head, num_labels=num_labels, trust_remote_code=model.trust_remote_code
    )


def made_up_ids(job: Job) -> dict[str, int | None]:
    """Special tokens where no tokenizer was read.

    Those that a family assumes may lie beyond a small vocabulary.
    """
    if job.given_model.source is not None and job.given_model.abnet is None:
        return {}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return {**ids, **({"decoder_start_token_id": 0} if job.given_data.task == "translation" else {})}


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
        needed_bytes = _least_bytes(job, cloud, blueprint, layers)
        memory_bytes = cloud.memory_bytes or (Device("cpu").memory_bytes() if cloud.device == "cpu" else None)
        if memory_bytes is not None and needed_bytes > memory_bytes:
            raise UserError(
                f"the stage of cloud {name!r} needs {format_bytes(needed_bytes)} for weights, gradients "
                f"and optimizer, but it has {format_bytes(memory_bytes)}",
                hint="take a smaller model, or add clouds, so that each holds fewer layers",
            )


def _least_bytes(job: Job, cloud: CloudSpec, blueprint: Blueprint, layers: range) -> int:
    """What one rank keeps of a stage at least; a stage that is frozen in part counts as frozen."""
    model, num_parameters = job.given_model, sum(blueprint.layout.owned_by(layers).values())
    is_adapted = model.lora is not None or (model.abnet is not None and model.abnet.frozen)
    num_trained = 0 if is_adapted or layers.start < model.frozen_layers else num_parameters
    is_away = job.train.offload_optimizer and cloud.device != "cpu"
    moment_bytes = 0 if is_away else job.train.optimizer_bits // 4 * num_trained
    gathered_bytes = torch.float32.itemsize * (num_parameters + num_trained)
    if cloud.sharding not in ("optimizer", "full"):
        return gathered_bytes + moment_bytes
    shard_bytes = -(-(gathered_bytes + moment_bytes) // cloud.ranks)
    return shard_bytes + (gathered_bytes if cloud.sharding == "optimizer" else 0)
