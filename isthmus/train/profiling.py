"""Measures what the parts of a model take on the device at hand: real stages, made-up micro-batches.

All stages that are compared take turns, round by round, so that a machine that gets slower does so for all of
them; parts are told apart by differences within a round. Rounds are repeated until the medians are certain,
within bounds on their number and their time.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job, PipelineStrategy
from isthmus.model.blueprint import Blueprint
from isthmus.model.heads import HEADS, Head
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch, Stage
from isthmus.plan.costs import Precision
from isthmus.plan.times import NO_TIME, CodingTimes, PassTimes, Profile, Sample
from isthmus.train.build import blueprint_of
from isthmus.train.device import Device
from isthmus.train.in_cloud import Reduction, World
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import Passes
from isthmus.train.profiled_codecs import measure_codings

_NUM_WARM_UPS: Final = 2
_SIZE_RATIO: Final = 4
_COPY_BYTES: Final = 64 * 2**20
# The largest message that codecs are timed with: beyond it their time grows with the number of elements.
_MOST_CODED_ELEMENTS: Final = 2**24
_NUM_COPIES: Final = 10
_NUM_LABELS: Final = 2
# The error of a median, as a multiple of the median of the absolute deviations over the root of the number.
_MEDIAN_ERROR: Final = 1.25 * 1.4826
# What keeps the device busy while a pass is launched: products of matrices of this size.
_FILLER_WIDTH: Final = 2048
# A first pass, whose launches take seconds, must not make all later ones wait behind as much work.
_MOST_FILLER_S: Final = 0.1
_FILLER_DECAY: Final = 0.7

AUTOCAST: Final = {Precision.FLOAT32: None, Precision.BFLOAT16: torch.bfloat16}

Report = Callable[[str], None]
Clock = Callable[[], float]
Round = Mapping[tuple[int, int], PassTimes]
"""The passes of several stages, each by its first layer and the one behind its last."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: rounds for each size, and the time that they and a single pass may take."""

    least_rounds: int
    most_rounds: int
    size_s: float
    """Rounds of one size end when they have taken so long, if there are enough of them."""
    round_s: float
    """Sizes of which one round would take longer are not measured."""
    rehearsal_s: float
    """What rehearsing a size may take, where several clouds share a machine."""
    wanted_error: float = 0.03
    """Rounds end when all medians are so certain."""


QUICK: Final = Effort(least_rounds=4, most_rounds=12, size_s=0.8, round_s=1.0, rehearsal_s=4.0)
THOROUGH: Final = Effort(least_rounds=8, most_rounds=60, size_s=4.0, round_s=4.0, rehearsal_s=10.0)
MAX_SCATTER: Final = 0.25
"""Medians that are less certain are refused: a plan from them would be no better than the catalogue's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One micro-batch, and the precision that it is computed in."""

    num_sequences: int
    sequence_length: int
    precision: Precision

    @property
    def num_tokens(self) -> int:
        """Of the whole micro-batch."""
        return self.num_sequences * self.sequence_length


class Rig:
    """One stage alone, with its optimizer, fed with micro-batches that are made up."""

    def __init__(
        self, stage: Stage, *, device: Device, size: Size, reduction: Reduction | None = None
    ) -> None:
        self.stage = stage.to(device.torch_device)
        self.size = size
        self._reduction = reduction or Reduction(World(), stage)
        self._device = device
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
        self._reduction.begin()

    def forward(self, microbatch: int, *, step: int = 0) -> None:
        """Run a micro-batch, and keep what its backward needs."""
        batch = made_up_batch(
            self.stage.head, self.stage.model.config.vocab_size, self.size, generator=self._generator
        )
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
        shape = (self.size.num_sequences, self.size.sequence_length, self._width)
        return torch.zeros(shape, dtype=self.stage.stream_dtype, device=self._device.torch_device)


def threads_here(job: Job) -> int:
    """CPU threads of each rank where all clouds of a job are on this machine: they share its cores."""
    return max(1, (os.cpu_count() or 1) // sum(cloud.ranks for cloud in job.cloud))


def measure(
    job: Job,
    cloud: CloudSpec,
    *,
    effort: Effort = THOROUGH,
    num_sharing: int = 1,
    takes_least: bool = False,
    report: Report = lambda _: None,
) -> Profile:
    """Measure the job's model on this machine's device, in the precision and the sizes that it may use.

    The threads are those that this process computes with. Times are medians; with `takes_least` they are the
    least of all rounds, which are disturbed the least: for parts whose sum is measured in another way.
    """
    device = Device(cloud.device)
    blueprint = made_up_blueprint(job)
    found = _measure_sizes(blueprint, device, job, effort, report, takes_least=takes_least)
    report("codecs, copies and the update of the weights")
    sizes = [
        Size(num_sequences=one.num_sequences, sequence_length=one.sequence_length, precision=one.precision)
        for one in found.samples
    ]
    to_host, from_host = _copy_speeds(device)
    return Profile(
        device=device.name,
        model_type=str(blueprint.config.model_type),
        samples=found.samples,
        update_s_per_parameter=_update_s_per_parameter(blueprint, device, sizes[0]),
        to_host_bytes_per_s=to_host,
        from_host_bytes_per_s=from_host,
        codings=_codings(job, blueprint, device, sizes),
        num_threads=None if device.is_accelerator else torch.get_num_threads(),
        num_sharing=num_sharing,
        is_compiled=job.train.compile,
        scatter=found.scatter,
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def require_certain(profile: Profile) -> None:
    """Refuse a profile whose figures scatter too much to plan with."""
    if profile.scatter > MAX_SCATTER:
        raise UserError(
            f"the figures of {profile.device} scatter: their medians are certain to {profile.scatter:.0%} "
            f"only, and {MAX_SCATTER:.0%} is the most; something else computes on this machine",
            hint="end other programs there and measure again, or plan without: isthmus plan JOB --no-profile",
        )


def made_up_blueprint(job: Job) -> Blueprint:
    """The job's model without its weights, whose values do not matter to how long passes take."""
    if job.data is None or job.model is None:
        raise UserError(
            "the job has no [model] or no [data] section", hint="docs/job.md shows what they hold"
        )
    num_labels = None if job.data.task.endswith("lm") else _NUM_LABELS
    # A run has the ids of its tokenizer; those that a family assumes may lie beyond a small vocabulary.
    config = dict.fromkeys(("bos_token_id", "eos_token_id")) if job.model.source is None else {}
    return replace(blueprint_of(job, config=config, num_labels=num_labels), source=None)


def sizes_of(job: Job) -> list[int]:
    """Sequences of the micro-batches that are measured, from the least on.

    All that may be chosen, a few times as many each time; where the job gives the micro-batches, theirs and
    one that is smaller, which shows what is fixed.
    """
    length = 1 if job.data is None else job.data.sequence_length
    most = max(1, job.train.batch_tokens // length)
    if isinstance(job.strategy, PipelineStrategy) and job.strategy.microbatches is not None:
        given = max(1, most // job.strategy.microbatches)
        return sorted({max(1, given // _SIZE_RATIO), given})
    return [_SIZE_RATIO**power for power in range(int(math.log(most, _SIZE_RATIO) + 1e-9) + 1)]


def precisions_of(job: Job, device: Device) -> list[Precision]:
    """The job's own, and on accelerators bfloat16 too, since a plan may show what it would bring."""
    found = [Precision(job.train.precision)]
    if device.is_accelerator and found[0] is not Precision.BFLOAT16:
        found.append(Precision.BFLOAT16)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    samples: tuple[Sample, ...]
    scatter: float


def _measure_sizes(
    blueprint: Blueprint, device: Device, job: Job, effort: Effort, report: Report, *, takes_least: bool
) -> _Found:
    length = 1 if job.data is None else job.data.sequence_length
    samples: list[Sample] = []
    scatter = 0.0
    for precision in precisions_of(job, device):
        bench = _Bench(blueprint, device, precision, sequence_length=length, compiles=job.train.compile)
        round_s = 0.0
        for number in sizes_of(job):
            if samples and round_s * _SIZE_RATIO > effort.round_s:
                break
            report(f"{number} × {length} tokens in {precision.value}")
            try:
                rounds = bench.rounds(number, effort)
            except torch.OutOfMemoryError:
                if not samples:
                    raise
                break
            round_s = statistics.median(sum(map(_total_s, one.values())) for one in rounds)
            scatter = max(scatter, median_error([sum(map(_total_s, one.values())) for one in rounds]))
            samples.append(bench.sample(number, [least_of(rounds)] if takes_least else rounds))
    return _Found(samples=tuple(samples), scatter=scatter)


class _Bench:
    """The stages that tell the parts of a model apart: each has a layer or two, some an end of the model."""

    def __init__(
        self,
        blueprint: Blueprint,
        device: Device,
        precision: Precision,
        *,
        sequence_length: int,
        compiles: bool,
    ) -> None:
        self._blueprint = blueprint
        self._device = device
        self._filler = _Filler(device)
        self._size = Size(num_sequences=1, sequence_length=sequence_length, precision=precision)
        self._rigs: dict[tuple[int, int], Rig] = {}
        for layers in _cuts(blueprint):
            stage = build_stage(blueprint, range(*layers), seed=0)
            rig = Rig(stage, device=device, size=self._size)
            if compiles:
                rig.stage.compile_layers(dynamic=None)
            self._rigs[layers] = rig

    def rounds(self, num_sequences: int, effort: Effort) -> list[Round]:
        """Passes of all stages in turn, after some that count for nothing."""
        for rig in self._rigs.values():
            rig.size = replace(self._size, num_sequences=num_sequences)

        def take() -> Round:
            return {key: self._pass_times(rig) for key, rig in self._rigs.items()}

        for _ in range(_NUM_WARM_UPS):
            take()
        return repeat(take, figure=lambda one: sum(map(_total_s, one.values())), effort=effort)

    def sample(self, num_sequences: int, rounds: Sequence[Round]) -> Sample:
        """The parts, from differences within rounds."""
        num_layers = self._blueprint.num_layers
        parts = _parts(self._blueprint, rounds)
        return Sample(
            num_sequences=num_sequences,
            sequence_length=self._size.sequence_length,
            precision=self._size.precision,
            embedding=parts.embedding,
            layers=tuple(parts.by_kind[_kind(self._blueprint, index)] for index in range(num_layers)),
            head=parts.head,
            beside=parts.beside,
            peak_bytes=self._device.peak_bytes(),
        )

    def _pass_times(self, rig: Rig) -> PassTimes:
        forward_s, forward_launch_s = self._timed(lambda: rig.forward(0))
        backward_s, backward_launch_s = self._timed(lambda: rig.backward(0))
        return PassTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            forward_launch_s=forward_launch_s,
            backward_launch_s=backward_launch_s,
        )

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """How long work computes and how long the host takes to launch it, which on a CPU is one thing.

        The device is kept busy until all is launched, so that its own time has no gaps in it.
        """
        if not self._device.is_accelerator:
            started_s = time.perf_counter()
            work()
            return time.perf_counter() - started_s, 0.0
        self._device.mark().wait()
        self._filler.start()
        begun = self._device.mark(is_timed=True)
        started_s = time.perf_counter()
        work()
        launch_s = time.perf_counter() - started_s
        ended = self._device.mark(is_timed=True)
        ended.wait()
        self._filler.cover(launch_s)
        return ended.since_s(begun), launch_s


class _Filler:
    """Work that keeps an accelerator busy for as long as it takes to launch a pass behind it."""

    def __init__(self, device: Device) -> None:
        self._number = 8
        self._one_s = 0.0
        self._device = device
        self._matrix: Tensor | None = None
        if device.is_accelerator:
            shape = (_FILLER_WIDTH, _FILLER_WIDTH)
            self._matrix = torch.zeros(shape, dtype=torch.bfloat16, device=device.torch_device)
            for _ in range(_NUM_WARM_UPS):
                self._one_s = self._time_one()

    def start(self) -> None:
        """Start it; the host does not wait."""
        if self._matrix is not None:
            for _ in range(self._number):
                torch.mm(self._matrix, self._matrix)

    def cover(self, launch_s: float) -> None:
        """Adapt to launches that take so long: longer at once, shorter little by little."""
        if self._one_s > 0:
            wanted_s = min(1.5 * launch_s, _MOST_FILLER_S)
            self._number = math.ceil(max(wanted_s / self._one_s, _FILLER_DECAY * self._number))

    def _time_one(self) -> float:
        begun = self._device.mark(is_timed=True)
        self.start()
        ended = self._device.mark(is_timed=True)
        ended.wait()
        return ended.since_s(begun) / self._number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    embedding: PassTimes
    head: PassTimes
    beside: PassTimes
    by_kind: Mapping[object, PassTimes]


def _cuts(blueprint: Blueprint) -> list[tuple[int, int]]:
    """Stages to measure: one layer, two layers, both ends, and a layer of every further kind."""
    number = blueprint.num_layers
    if number < 3:
        return [(index, index + 1) for index in range(number)]
    found = [(0, 1), (1, 2), (number - 1, number)]
    if number > 3:
        found.append((1, 3))
    kinds = {_kind(blueprint, 1)}
    for index in range(1, number - 1):
        if _kind(blueprint, index) not in kinds:
            kinds.add(_kind(blueprint, index))
            found.append((index, index + 1))
    return found


def _parts(blueprint: Blueprint, rounds: Sequence[Round]) -> _Parts:
    number = blueprint.num_layers

    def median(pick: Callable[[Round], PassTimes]) -> PassTimes:
        return median_times([pick(one) for one in rounds])

    if number < 3:
        # One or two layers cannot be told from what stands beside them: the embedding counts as theirs.
        layer = median(lambda one: one[0, 1])
        head = median(lambda one: _minus(one[1, 2], one[0, 1])) if number == 2 else NO_TIME
        kinds = {_kind(blueprint, index): layer for index in range(number)}
        return _Parts(embedding=NO_TIME, head=_at_least_nothing(head), beside=NO_TIME, by_kind=kinds)
    one = median(lambda found: found[1, 2])
    layer = one
    if number > 3:
        layer = _within(median(lambda found: _minus(found[1, 3], found[1, 2])), one)
    beside = _minus(one, layer)
    by_kind = {_kind(blueprint, 1): layer}
    for start, stop in rounds[0]:
        if start > 0 and stop < number and stop == start + 1:
            by_kind.setdefault(_kind(blueprint, start), _only(median(_stage(start, stop)), beside))
    for index in (0, number - 1):
        by_kind.setdefault(_kind(blueprint, index), layer)
    return _Parts(
        embedding=_at_least_nothing(median(lambda found: _minus(found[0, 1], found[1, 2]))),
        head=_at_least_nothing(median(lambda found: _minus(found[number - 1, number], found[1, 2]))),
        beside=_at_least_nothing(beside),
        by_kind=by_kind,
    )


def _stage(start: int, stop: int) -> Callable[[Round], PassTimes]:
    return lambda one: one[start, stop]


def _kind(blueprint: Blueprint, layer: int) -> object:
    """Layers of one kind take the same time: as many parameters, and the same attention."""
    kinds: Sequence[str] | None = getattr(blueprint.config, "layer_types", None)
    return tuple(blueprint.layout.layers[layer].values()), kinds[layer] if kinds else None


def repeat(
    take: Callable[[], T],
    *,
    figure: Callable[[T], float],
    effort: Effort,
    clock: Clock = time.perf_counter,
) -> list[T]:
    """Measure until the median of a figure is certain enough, or there is no time for more."""
    started_s = clock()
    taken: list[T] = []
    while len(taken) < effort.most_rounds:
        taken.append(take())
        if len(taken) < effort.least_rounds:
            continue
        if median_error([figure(one) for one in taken]) <= effort.wanted_error:
            break
        if clock() - started_s >= effort.size_s:
            break
    return taken


def median_error(figures: Sequence[float]) -> float:
    """The standard error of a median as a share of it, from the median of the absolute deviations."""
    middle = statistics.median(figures)
    if middle <= 0:
        return 0.0
    deviation = statistics.median(abs(one - middle) for one in figures)
    return _MEDIAN_ERROR * deviation / math.sqrt(len(figures)) / middle


def median_times(taken: Sequence[PassTimes]) -> PassTimes:
    """The median of each time."""
    return PassTimes(
        forward_s=statistics.median(one.forward_s for one in taken),
        backward_s=statistics.median(one.backward_s for one in taken),
        forward_launch_s=statistics.median(one.forward_launch_s for one in taken),
        backward_launch_s=statistics.median(one.backward_launch_s for one in taken),
    )


def least_of(rounds: Sequence[Round]) -> Round:
    """One round with the least time of each stage."""
    return {
        key: PassTimes(
            forward_s=min(one[key].forward_s for one in rounds),
            backward_s=min(one[key].backward_s for one in rounds),
            forward_launch_s=min(one[key].forward_launch_s for one in rounds),
            backward_launch_s=min(one[key].backward_launch_s for one in rounds),
        )
        for key in rounds[0]
    }


def _total_s(times: PassTimes) -> float:
    return times.whole_forward_s + times.whole_backward_s


def _minus(whole: PassTimes, part: PassTimes) -> PassTimes:
    return whole + part.each(lambda time_s: -time_s)


def _at_least_nothing(times: PassTimes) -> PassTimes:
    """The same where noise has not made a time negative."""
    return times.each(lambda time_s: max(0.0, time_s))


def _only(whole: PassTimes, beside: PassTimes) -> PassTimes:
    return _at_least_nothing(_minus(whole, beside))


def _within(added: PassTimes, whole: PassTimes) -> PassTimes:
    """A layer is most of its stage; what says otherwise is noise."""

    def clamp(added_s: float, whole_s: float) -> float:
        return min(max(added_s, whole_s / 2), whole_s)

    return PassTimes(
        forward_s=clamp(added.forward_s, whole.forward_s),
        backward_s=clamp(added.backward_s, whole.backward_s),
        forward_launch_s=clamp(added.forward_launch_s, whole.forward_launch_s),
        backward_launch_s=clamp(added.backward_launch_s, whole.backward_launch_s),
    )


def _update_s_per_parameter(blueprint: Blueprint, device: Device, size: Size) -> float:
    rig = Rig(build_stage(blueprint, range(1), seed=0), device=device, size=size)
    taken = []
    for _ in range(_NUM_WARM_UPS + QUICK.least_rounds):
        rig.forward(0)
        rig.backward(0)
        taken.append(_timed(device, rig.update))
    num_parameters = sum(one.numel() for one in rig.stage.parameters())
    return statistics.median(taken[_NUM_WARM_UPS:]) / num_parameters


def _codings(
    job: Job, blueprint: Blueprint, device: Device, sizes: Sequence[Size]
) -> tuple[CodingTimes, ...]:
    rows = sorted({one.num_tokens for one in sizes})
    width = blueprint.config.hidden_size
    most = max(rows[0], min(rows[-1], _MOST_CODED_ELEMENTS // width))
    return measure_codings(job, width=width, num_rows=(rows[0], most), device=device)


def _copy_speeds(device: Device) -> tuple[float | None, float | None]:
    """Bytes per second to the host and from it, through pinned memory."""
    if not device.is_accelerator:
        return None, None
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device.torch_device)
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def bytes_per_s(to: Tensor, source: Tensor) -> float:
        taken = [
            _timed(device, lambda: to.copy_(source, non_blocking=True))
            for _ in range(_NUM_WARM_UPS + _NUM_COPIES)
        ]
        return _COPY_BYTES / statistics.median(taken[_NUM_WARM_UPS:])

    return bytes_per_s(here, there), bytes_per_s(there, here)


def _timed(device: Device, work: Callable[[], object]) -> float:
    device.mark().wait()
    started_s = time.perf_counter()
    work()
    device.mark().wait()
    return time.perf_counter() - started_s


def made_up_batch(head: Head, vocabulary_size: int, size: Size, *, generator: torch.Generator) -> Batch:
    """A micro-batch of random tokens, with labels of the kind that a head takes."""
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
