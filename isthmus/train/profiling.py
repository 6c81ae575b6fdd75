"""Measures what the parts of a model take on the device at hand: real stages, made-up micro-batches."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job, PipelineStrategy
from isthmus.model.blueprint import Blueprint
from isthmus.model.families import HEADS, Head
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch, Stage
from isthmus.plan.costs.activations import Precision
from isthmus.plan.costs.profile import NO_TIME, PassTimes, Profile, Sample
from isthmus.train.build import blueprint_of
from isthmus.train.device import Device
from isthmus.train.optimize.optimizer import Optimizer, Schedule
from isthmus.train.passes import Passes
from isthmus.train.ranks.world import NoReduction, Reduction

_NUM_WARM_UPS: Final = 3
_NUM_REPEATS: Final = 10
_MAX_SEQUENCES: Final = 8
_COPY_BYTES: Final = 64 * 2**20
_NUM_LABELS: Final = 2

AUTOCAST: Final = {Precision.FLOAT32: None, Precision.BFLOAT16: torch.bfloat16}

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One micro-batch, and the precision that it is computed in."""

    num_sequences: int
    sequence_length: int
    precision: Precision


class Rig:
    """One stage alone, with its optimizer, fed with micro-batches that are made up."""

    def __init__(
        self, stage: Stage, *, device: Device, size: Size, reduction: Reduction | None = None
    ) -> None:
        self.stage = stage.to(device.torch_device)
        self._reduction = reduction or NoReduction()
        self._device = device
        self._size = size
        self._width: int = stage.model.config.hidden_size
        self._generator = torch.Generator().manual_seed(0)
        self._passes = Passes(
            self.stage,
            device=device.torch_device,
            seed=0,
            autocast=AUTOCAST[size.precision] if stage.stream_dtype is None else None,
            sends_gradients=stage.sends_gradient,
        )
        self._passes.train(True)
        schedule = Schedule(peak=1e-6, num_steps=1)
        self._optimizer = Optimizer(stage.parameters_by_name(), schedule=schedule, max_norm=1.0)

    def begin(self) -> None:
        """Make the parameters ready, where ranks share them."""
        self._reduction.begin(is_training=True)

    def forward(self, microbatch: int, *, step: int = 0) -> None:
        """Run a micro-batch, and keep what its backward needs."""
        batch = _batch(self.stage.head, self.stage.model.config.vocab_size, self._size, self._generator)
        arrived = None if self.stage.is_first else self._hidden()
        self._passes.forward(batch, arrived, step=step, item=microbatch, num_step_targets=batch.num_targets)

    def backward(self, microbatch: int, *, step: int = 0) -> None:
        """Run a micro-batch back, with a made-up gradient where one would come from behind."""
        gradient = None if self.stage.is_last else self._hidden()
        self._passes.backward(step=step, item=microbatch, gradient=gradient)

    def update(self) -> None:
        """Update the weights, and clear the gradients."""
        self._reduction.reduce()
        self._optimizer.squared_norms()
        self._optimizer.update(0, norm=1.0)

    def held_bytes(self) -> int:
        """What weights and optimizer hold between two steps."""
        tensors = (*self.stage.parameters(), *self._optimizer.tensors().values())
        own = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
        return sum({one.data_ptr(): one.nbytes for one in own}.values())

    def _hidden(self) -> Tensor:
        shape = (self._size.num_sequences, self._size.sequence_length, self._width)
        return torch.zeros(shape, dtype=self.stage.stream_dtype, device=self._device.torch_device)


def measure(job: Job, cloud: CloudSpec, *, report: Report = lambda _: None) -> Profile:
    """Measure the job's model on this machine's device, in the precision and the sizes that it may use."""
    if job.data is None or job.model is None:
        raise UserError(
            "the job has no [model] or no [data] section", hint="docs/job.md shows what they hold"
        )
    device = Device(cloud.device)
    num_labels = None if job.data.task.endswith("lm") else _NUM_LABELS
    # Values do not matter to how long they take, so nothing is loaded.
    blueprint = replace(blueprint_of(job, config={}, num_labels=num_labels), checkpoint=None)
    sizes = tuple(_sizes(job, job.data.sequence_length, device))
    samples = [_sample(blueprint, device, size, report) for size in sizes]
    report("the update of the weights, and copies")
    to_host, from_host = _copy_speeds(device)
    return Profile(
        device=device.name,
        model_type=str(blueprint.config.model_type),
        samples=tuple(samples),
        update_s_per_parameter=_update_s_per_parameter(blueprint, device, sizes[0]),
        to_host_bytes_per_s=to_host,
        from_host_bytes_per_s=from_host,
    )


def _sizes(job: Job, sequence_length: int, device: Device) -> Iterable[Size]:
    """Powers of two up to the micro-batch that the job asks for, or up to a few sequences."""
    num_sequences = max(1, job.train.batch_tokens // sequence_length)
    most = min(num_sequences, _MAX_SEQUENCES)
    if isinstance(job.strategy, PipelineStrategy) and job.strategy.microbatches is not None:
        most = max(1, num_sequences // job.strategy.microbatches)
    precisions = [Precision(job.train.precision)]
    if device.is_accelerator and precisions[0] is not Precision.BFLOAT16:
        precisions.append(Precision.BFLOAT16)
    counts = sorted({most, *(2**power for power in range(most.bit_length()))})
    for precision in precisions:
        for count in counts:
            yield Size(num_sequences=count, sequence_length=sequence_length, precision=precision)


def _sample(blueprint: Blueprint, device: Device, size: Size, report: Report) -> Sample:
    report(f"{size.num_sequences} × {size.sequence_length} tokens in {size.precision.value}")

    def stage_times(start: int, stop: int) -> PassTimes:
        return _stage_times(blueprint, range(start, stop), device, size)

    num_layers = blueprint.num_layers
    if num_layers < 3:
        return _small_sample(num_layers, stage_times, size)
    one, layer = _layer_times(blueprint, device, size)
    beside = _difference(one, layer)
    by_kind = {_kind(blueprint, 1): layer}
    for index in range(1, num_layers - 1):
        if _kind(blueprint, index) not in by_kind:
            by_kind[_kind(blueprint, index)] = _difference(stage_times(index, index + 1), beside)
    return Sample(
        num_sequences=size.num_sequences,
        sequence_length=size.sequence_length,
        precision=size.precision,
        embedding=_difference(stage_times(0, 1), one),
        layers=tuple(by_kind.get(_kind(blueprint, index), layer) for index in range(num_layers)),
        head=_difference(stage_times(num_layers - 1, num_layers), one),
        beside=beside,
        peak_bytes=device.peak_bytes(),
    )


def _small_sample(num_layers: int, stage_times: Callable[[int, int], PassTimes], size: Size) -> Sample:
    """One or two layers cannot be told from what stands beside them: the embedding counts as theirs."""
    layer = stage_times(0, 1)
    head = _difference(stage_times(1, 2), layer) if num_layers == 2 else NO_TIME
    return Sample(
        num_sequences=size.num_sequences,
        sequence_length=size.sequence_length,
        precision=size.precision,
        embedding=NO_TIME,
        layers=(layer,) * num_layers,
        head=head,
    )


def _kind(blueprint: Blueprint, layer: int) -> object:
    """Layers of one kind take the same time: as many parameters, and the same attention."""
    kinds: Sequence[str] | None = getattr(blueprint.config, "layer_types", None)
    return tuple(blueprint.anatomy.layers[layer].values()), kinds[layer] if kinds else None


def _stage_times(blueprint: Blueprint, layers: range, device: Device, size: Size) -> PassTimes:
    (taken,) = _alternate(blueprint, (layers,), device, size)
    return _median(taken)


def _layer_times(blueprint: Blueprint, device: Device, size: Size) -> tuple[PassTimes, PassTimes]:
    """A stage of one layer in the middle, and the layer alone: what a second one adds.

    The two stages take turns, so that a machine that gets slower does so for both.
    """
    if blueprint.num_layers < 4:
        one = _stage_times(blueprint, range(1, 2), device, size)
        return one, one
    ones, twos = _alternate(blueprint, (range(1, 2), range(1, 3)), device, size)
    one = _median(ones)
    added = _median(
        [
            PassTimes(forward_s=two.forward_s - one.forward_s, backward_s=two.backward_s - one.backward_s)
            for one, two in zip(ones, twos, strict=True)
        ]
    )
    layer = PassTimes(
        forward_s=_within(added.forward_s, one.forward_s),
        backward_s=_within(added.backward_s, one.backward_s),
    )
    return one, layer


def _within(added_s: float, whole_s: float) -> float:
    """A layer is most of its stage; what says otherwise is noise."""
    return min(max(added_s, whole_s / 2), whole_s)


def _alternate(
    blueprint: Blueprint, cuts: Sequence[range], device: Device, size: Size
) -> list[list[PassTimes]]:
    """Several passes of each stage in turn, after some that count for nothing."""
    rigs = [Rig(build_stage(blueprint, layers, seed=0), device=device, size=size) for layers in cuts]
    rounds = [[_pass_times(rig, device) for rig in rigs] for _ in range(_NUM_WARM_UPS + _NUM_REPEATS)]
    return [list(taken) for taken in zip(*rounds[_NUM_WARM_UPS:], strict=True)]


def _pass_times(rig: Rig, device: Device) -> PassTimes:
    forward_s = _timed(device, lambda: rig.forward(0))
    return PassTimes(forward_s=forward_s, backward_s=_timed(device, lambda: rig.backward(0)))


def _median(taken: Sequence[PassTimes]) -> PassTimes:
    return PassTimes(
        forward_s=statistics.median(one.forward_s for one in taken),
        backward_s=statistics.median(one.backward_s for one in taken),
    )


def _update_s_per_parameter(blueprint: Blueprint, device: Device, size: Size) -> float:
    layers = range(1)
    rig = Rig(build_stage(blueprint, layers, seed=0), device=device, size=size)
    taken = []
    for _ in range(_NUM_WARM_UPS + _NUM_REPEATS):
        rig.forward(0)
        rig.backward(0)
        taken.append(_timed(device, rig.update))
    num_parameters = sum(one.numel() for one in rig.stage.parameters())
    return statistics.median(taken[_NUM_WARM_UPS:]) / num_parameters


def _copy_speeds(device: Device) -> tuple[float | None, float | None]:
    """Bytes per second to the host and from it, through pinned memory."""
    if not device.is_accelerator:
        return None, None
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device.torch_device)
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def bytes_per_s(to: Tensor, source: Tensor) -> float:
        taken = [
            _timed(device, lambda: to.copy_(source, non_blocking=True))
            for _ in range(_NUM_WARM_UPS + _NUM_REPEATS)
        ]
        return _COPY_BYTES / statistics.median(taken[_NUM_WARM_UPS:])

    return bytes_per_s(here, there), bytes_per_s(there, here)


def _timed(device: Device, work: Callable[[], object]) -> float:
    device.mark().wait()
    started_s = time.perf_counter()
    work()
    device.mark().wait()
    return time.perf_counter() - started_s


def _difference(whole: PassTimes, part: PassTimes) -> PassTimes:
    """What is left of a time; noise may make it less than nothing."""
    return PassTimes(
        forward_s=max(0.0, whole.forward_s - part.forward_s),
        backward_s=max(0.0, whole.backward_s - part.backward_s),
    )


def _batch(head: Head, vocabulary_size: int, size: Size, generator: torch.Generator) -> Batch:
    ids = torch.randint(0, vocabulary_size, (size.num_sequences, size.sequence_length), generator=generator)
    if head is HEADS["sequence-classification"]:
        labels = torch.zeros(size.num_sequences, dtype=torch.int64)
    elif head is HEADS["question-answering"]:
        labels = torch.zeros(size.num_sequences, 2, dtype=torch.int64)
    elif head is HEADS["token-classification"]:
        labels = torch.zeros_like(ids)
    else:
        labels = ids
    return Batch(ids=ids, labels=labels, num_targets=head.num_targets(labels))
