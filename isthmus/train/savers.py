"""What a job says of memory and speed, given to a stage: how it recomputes, and whether it is compiled."""

import os
from typing import Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from isthmus.job import Job
from isthmus.model.budget import Budgeted
from isthmus.model.recompute import Fixed
from isthmus.model.stage import Stage
from isthmus.plan.costs.memory import OptimizerState
from isthmus.train.device import Device
from isthmus.train.ranks.sharding import coming_bytes

_ALIKE: Final = (
    'train.recompute = "auto" recomputes every layer here, as ranks that share out all of a stage must '
    "compute alike"
)
_MOMENT_BYTES: Final = {OptimizerState.FLOAT32: 8, OptimizerState.EIGHT_BIT: 2}


def equip(stage: Stage, job: Job, *, cloud: str, device: Device, in_lock_step: bool = False) -> Stage:
    """Let a stage, on its device, recompute within its budget and run compiled, where the job says so.

    Ranks in lock-step must all recompute the same, whatever the sizes of their micro-batches: everything.
    """
    if job.train.recompute == "auto" and in_lock_step:
        stage.recompute = Fixed(frozenset(stage.layers))
        stage.notes += (_ALIKE,)
    elif job.train.recompute == "auto":
        stage.recompute = Budgeted(
            budget_bytes=job.train.memory_budget_bytes or _share_bytes(job, cloud, device),
            standing_bytes=lambda: _standing_bytes(stage, job, device),
            device=device.torch_device,
            max_length=None if job.data is None else job.data.sequence_length,
        )
    if job.train.compile:
        # Language models get sequences of one length; all other tasks pad to the longest of a micro-batch.
        is_padded = job.data is not None and job.data.task != "causal-lm"
        stage.compile_layers(dynamic=True if is_padded else None)
    return stage


def optimizer_state(job: Job) -> OptimizerState:
    """What AdamW remembers of each parameter."""
    return OptimizerState.EIGHT_BIT if job.train.optimizer_bits == 8 else OptimizerState.FLOAT32


def _share_bytes(job: Job, cloud: str, device: Device) -> int:
    """What a plan may fill of the device's memory."""
    given = job.cloud_named(cloud).memory_bytes
    return int(job.limits.memory_share * (given or _memory_bytes(device)))


def _memory_bytes(device: Device) -> int:
    if not device.is_accelerator:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _, total_bytes = torch.get_device_module(device.torch_device).mem_get_info(device.torch_device)
    return int(total_bytes)


def _standing_bytes(stage: Stage, job: Job, device: Device) -> int:
    """What is there when nothing is in flight, and the gradients that will be."""
    to_come = _coming_bytes(stage)
    if device.is_accelerator:
        module = torch.get_device_module(device.torch_device)
        return to_come + int(module.memory_allocated(device.torch_device))
    return to_come + sum(_held_bytes(one, job) for one in stage.parameters())


def _coming_bytes(stage: Stage) -> int:
    if isinstance(stage, FSDPModule):
        return coming_bytes(stage)
    return sum(one.nbytes for one in stage.parameters() if one.requires_grad and one.grad is None)


def _held_bytes(parameter: nn.Parameter, job: Job) -> int:
    """A parameter on a CPU, whose allocator does not say what it holds: with its gradient and moments."""
    gradient = 0 if parameter.grad is None else parameter.grad.nbytes
    moments = _MOMENT_BYTES[optimizer_state(job)] * parameter.numel() if parameter.requires_grad else 0
    return parameter.nbytes + gradient + moments
