"""What the planner says of a stage's memory, and what the allocator does."""

import functools
import gc
import json
from collections.abc import Callable
from typing import Any, Final

import torch
from one_rank import one_rank
from torch.profiler import ProfilerActivity, profile

from isthmus.job.sections import LoraSpec
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.costs import MeasuredModel, Training
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.stage import Stage
from isthmus.plan.costs import Arithmetic, Task, Workload
from isthmus.plan.memory import Memory, Sharding, StageOptions, stage_memory
from isthmus.train.build import AUTOCAST
from isthmus.train.device import Device
from isthmus.train.in_cloud import Reduction, World, shard
from isthmus.train.profiling import Rig, Size
from memory.cases import Case

_NUM_EXTRA_MICROBATCHES: Final = 2


@functools.cache
def _model(config: str, task: Task, num_frozen: int, lora: LoraSpec | None) -> MeasuredModel:
    blueprint = fresh_blueprint(json.loads(config), head=HEADS[task.value])
    return MeasuredModel(blueprint, Training(num_frozen_layers=num_frozen, lora=lora))


def predict(case: Case, *, on_accelerator: bool) -> Memory:
    """What the planner says, from the model's costs on fake tensors."""
    workload = Workload(
        num_sequences=case.num_sequences,
        sequence_length=case.sequence_length,
        arithmetic=Arithmetic(
            precision=case.precision,
            on_accelerator=on_accelerator,
            is_gathered=case.sharding is not Sharding.NONE,
        ),
        recompute=case.recompute,
    )
    model = _model(json.dumps(case.config, sort_keys=True), case.task, case.num_frozen, case.lora)
    options = StageOptions(sharding=case.sharding)
    return stage_memory(
        model.costs(workload), case.layers, window=case.window, options=options, num_buffered=0
    )


def measure(case: Case, device: Device) -> int:
    """Build the stage, and let it take two steps."""
    blueprint = fresh_blueprint(case.config, head=HEADS[case.task.value])
    stage = build_stage(
        blueprint,
        case.layers,
        seed=0,
        recompute=case.recompute,
        num_frozen_layers=case.num_frozen,
        lora=case.lora,
    )
    size = Size(
        num_sequences=case.num_sequences, sequence_length=case.sequence_length, precision=case.precision
    )
    if case.sharding is Sharding.NONE:
        return peak_bytes(Rig(stage, device=device, size=size), case, device)
    with one_rank(device.torch_device):
        reduction = share_out(stage, case, device)
        return peak_bytes(Rig(stage, device=device, size=size, reduction=reduction), case, device)


def share_out(stage: Stage, case: Case, device: Device) -> Reduction:
    """Have FSDP2 deal the stage out, to one rank."""
    shard(
        stage.to(device.torch_device),
        device=device.torch_device,
        num_ranks=1,
        compute_dtype=AUTOCAST[case.precision.value],
        keeps_sharded=case.sharding is Sharding.FULL,
    )
    return Reduction(World(), stage, sharding=case.sharding.value)


def peak_bytes(rig: Rig, case: Case, device: Device) -> int:
    """What the allocator says of the second step, in bytes."""
    take_step(rig, case, step=0)
    gc.collect()
    if device.is_accelerator:
        return accelerator_peak_bytes(device, lambda: take_step(rig, case, step=1))
    return rig.held_bytes() + cpu_peak_bytes(lambda: take_step(rig, case, step=1))


def take_step(rig: Rig, case: Case, *, step: int) -> None:
    """Fill the window, then one back and one forward, then drain; the update ends it."""
    num_microbatches = case.window + _NUM_EXTRA_MICROBATCHES
    rig.begin()
    for microbatch in range(num_microbatches):
        if microbatch >= case.window:
            rig.backward(microbatch - case.window, step=step)
        rig.forward(microbatch, step=step)
    for microbatch in range(num_microbatches - case.window, num_microbatches):
        rig.backward(microbatch, step=step)
    rig.update()


def cpu_peak_bytes(work: Callable[[], None]) -> int:
    """The most that was allocated on top of what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    inner: Any = profiler.profiler
    events = [one for one in inner.kineto_results.events() if one.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def accelerator_peak_bytes(device: Device, work: Callable[[], None]) -> int:
    """The most that was allocated in all."""
    module = torch.get_device_module(device.torch_device)
    module.reset_peak_memory_stats(device.torch_device)
    work()
    device.mark().wait()
    return int(module.max_memory_allocated(device.torch_device))
