"""Measures the times of a model's parts on the device at hand, with real stages and made-up micro-batches.

All stages that are measured take turns, round by round, so that a machine that gets slower does so for all of
them. Rounds are repeated until the medians are certain, within bounds on their number and their time. The
times of parts are those whose sums are nearest to what the stages took.
"""

import itertools
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from isthmus.errors import UserError
from isthmus.job import CloudSpec, CodecSpec, Job, LinkSpec, PipelineStrategy
from isthmus.model.blueprint import Blueprint
from isthmus.model.costs import Training, layer_kinds
from isthmus.model.heads import HEADS, Head
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch, Stage
from isthmus.plan.codecs import RAW_PAIR, Crossing, Cut, Loss, Pair, codec_levels, texts_of
from isthmus.plan.costs import Precision, Task
from isthmus.plan.pipeline_parts import GRADIENT, HIDDEN, Pipeline
from isthmus.plan.times import CodingTimes, PassTimes, Profile, Sample, fit_line
from isthmus.plan.types import Member, Message, MessageKind
from isthmus.train.build import AUTOCAST, blueprint_of, made_up_ids
from isthmus.train.device import Device, Mark
from isthmus.train.in_cloud import Reduction, World
from isthmus.train.integers import IDS
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import MEMORY, Passes, PipelineConfig
from isthmus.train.pipeline_role import cut_end

_NUM_WARM_UPS: Final = 2
_SIZE_RATIO: Final = 4
_COPY_BYTES: Final = 64 * 2**20
# The largest message that codecs are timed with: beyond it their time grows with the number of elements.
_MOST_CODED_ELEMENTS: Final = 2**24
_NUM_LABELS: Final = 2
# The error of a median, as a multiple of the median of the absolute deviations over the root of the number.
_MEDIAN_ERROR: Final = 1.25 * 1.4826
# What keeps the device busy while a pass is launched: products of matrices of this size.
_FILLER_WIDTH: Final = 2048
# A first pass, whose launches take seconds, must not make all later ones wait behind as much work.
_MOST_FILLER_S: Final = 0.1
_FILLER_DECAY: Final = 0.7

Report = Callable[[str], None]
Clock = Callable[[], float]
Times = NDArray[np.float64]
"""Rows of the four times that `PassTimes` has."""
T = TypeVar("T")
_HERE, _BEYOND = Member("here"), Member("beyond")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: rounds for each size, and the time that they and a single pass may take."""

    least_rounds: int
    most_rounds: int
    size_s: float
    """Rounds of one size end when they have taken so long, if there are enough of them.

    Sizes of which one round would take longer are not measured.
    """
    rehearsal_s: float
    """What rehearsing a size may take, where several clouds share a machine."""


QUICK: Final = Effort(least_rounds=4, most_rounds=12, size_s=1.0, rehearsal_s=4.0)
THOROUGH: Final = Effort(least_rounds=8, most_rounds=60, size_s=4.0, rehearsal_s=10.0)
_CODING: Final = replace(QUICK, most_rounds=6, size_s=0.1)
_WANTED_ERROR: Final = 0.03
"""Rounds end when medians are so certain."""
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
            autocast=AUTOCAST[size.precision.value] if stage.stream_dtype is None else None,
            sends_gradients=stage.sends_gradient,
        )
        self._passes.train(True)
        schedule = Schedule(peak=1e-6, num_steps=1)
        self._optimizer = Optimizer(stage.parameters_by_name(), schedule=schedule, max_norm=1.0)

    def begin(self) -> None:
        """Gather the parameters of a sharded stage."""
        self._reduction.begin()

    def forward(self, microbatch: int, *, step: int = 0) -> None:
        """Run a micro-batch, and keep what its backward needs."""
        batch = made_up_batch(
            self.stage.head, self.stage.model.config.vocab_size, self.size, generator=self._generator
        )
        arrived = {} if self.stage.is_first else {HIDDEN: self._hidden()}
        arrived |= {MEMORY: self._hidden()} if self.stage.has_memory else {}
        self._passes.forward(batch, arrived, step=step, item=microbatch, num_step_targets=batch.num_targets)

    def backward(self, microbatch: int, *, step: int = 0) -> None:
        """Run a micro-batch back, with a made-up gradient where one would come from behind."""
        gradients = {} if self.stage.is_last else {HIDDEN: self._hidden()}
        self._passes.backward(step=step, item=microbatch, gradients=gradients)

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
    report: Report = lambda _: None,
) -> Profile:
    """Measure the job's model on this machine's device, in the sizes that it may use.

    The threads are those that this process computes with.
    """
    device = Device(cloud.device)
    blueprint = made_up_blueprint(job)
    found = list(_Bench(job, blueprint, device).samples(effort, report))
    samples = tuple(sample for sample, _ in found)
    report("codecs, copies and the update of the weights")
    rows = sorted(one.num_sequences * one.sequence_length for one in samples)
    smallest = made_up_size(job, samples[0].num_sequences)
    to_host, from_host = _copy_speeds(device)
    return Profile(
        device=device.name,
        model_type=str(blueprint.config.model_type),
        samples=samples,
        update_s_per_parameter=_update_s_per_parameter(blueprint, device, smallest),
        to_host_bytes_per_s=to_host,
        from_host_bytes_per_s=from_host,
        codings=_measure_codings(job, device, width=blueprint.config.hidden_size, rows=rows),
        num_threads=None if device.is_accelerator else torch.get_num_threads(),
        num_sharing=num_sharing,
        is_compiled=job.train.compile,
        scatter=max(scatter for _, scatter in found),
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
    blueprint = blueprint_of(job, config=made_up_ids(job), num_labels=num_made_up_labels(job))
    return replace(blueprint, source=None)


def num_made_up_labels(job: Job) -> int | None:
    """The labels of a made-up classification; None for language models."""
    is_language_model = job.data is None or Task(job.data.task).is_language_model
    return None if is_language_model else _NUM_LABELS


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


# The sampler.


def repeat(
    take: Callable[[], T],
    *,
    figure: Callable[[T], float],
    effort: Effort,
    num_warm_ups: int = 0,
    clock: Clock = time.perf_counter,
) -> list[T]:
    """Measure until the median of a figure is certain enough, or there is no time for more."""
    for _ in range(num_warm_ups):
        take()
    started_s = clock()
    taken: list[T] = []
    while len(taken) < effort.most_rounds:
        taken.append(take())
        if len(taken) < effort.least_rounds:
            continue
        if median_error([figure(one) for one in taken]) <= _WANTED_ERROR:
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


def _median_s(take: Callable[[], float], effort: Effort = QUICK) -> float:
    return statistics.median(repeat(take, figure=float, effort=effort, num_warm_ups=_NUM_WARM_UPS))


def _wall_s(device: Device, work: Callable[[], object]) -> float:
    """How long work takes until the device is done with it."""
    device.mark().wait()
    started_s = time.perf_counter()
    work()
    device.mark().wait()
    return time.perf_counter() - started_s


# Passes.


class _Bench:
    """The stages whose differences are the parts of a model: each has a layer or two, some an end of it."""

    def __init__(self, job: Job, blueprint: Blueprint, device: Device) -> None:
        self._sizes = [made_up_size(job, number) for number in sizes_of(job)]
        self._blueprint = blueprint
        self._device = device
        self._filler = _Filler(device)
        self._rigs: dict[range, Rig] = {}
        for layers in _stages(blueprint):
            stage = build_stage(blueprint, layers, seed=0)
            self._rigs[layers] = Rig(stage, device=device, size=self._sizes[0])
            if job.train.compile:
                # A run compiles for one size; without this, sizes after the first get kernels for any size.
                self._rigs[layers].stage.compile_layers(dynamic=False)

    def samples(self, effort: Effort, report: Report) -> Iterator[tuple[Sample, float]]:
        """Measure each size with its scatter, as long as there is time and memory; the first one always."""
        round_s = 0.0
        for number, size in enumerate(self._sizes):
            if number > 0 and round_s * _SIZE_RATIO > effort.size_s:
                return
            report(f"{size.num_sequences} × {size.sequence_length} tokens in {size.precision.value}")
            for rig in self._rigs.values():
                rig.size = size
            try:
                rounds = repeat(self._round, figure=_total_s, effort=effort, num_warm_ups=_NUM_WARM_UPS)
            except torch.OutOfMemoryError:
                if number == 0:
                    raise
                return
            totals_s = [_total_s(one) for one in rounds]
            round_s = statistics.median(totals_s)
            sample = Sample(
                num_sequences=size.num_sequences,
                sequence_length=size.sequence_length,
                precision=size.precision,
                peak_bytes=self._device.peak_bytes(),
                **_parts(self._blueprint, [*self._rigs], np.median(rounds, axis=0)),
            )
            yield sample, median_error(totals_s)

    def _round(self) -> Times:
        """Passes of all stages in turn."""
        return np.array([self._pass_times(rig) for rig in self._rigs.values()])

    def _pass_times(self, rig: Rig) -> tuple[float, ...]:
        forward_s, forward_launch_s = self._timed(lambda: rig.forward(0))
        backward_s, backward_launch_s = self._timed(lambda: rig.backward(0))
        return forward_s, backward_s, forward_launch_s, backward_launch_s

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """How long work computes and how long the host takes to launch it, which on a CPU is one thing.

        The device is kept busy until all is launched, so that its own time has no gaps in it.
        """
        if not self._device.is_accelerator:
            return _wall_s(self._device, work), 0.0
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
        """Start the work; the host does not wait."""
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


def _stages(blueprint: Blueprint) -> list[range]:
    """Stages to measure: one layer, two layers, both ends, and a layer of every further kind.

    Of an encoder–decoder they are the encoder and the decoder, whose layers then have even parts of either.
    """
    number = blueprint.num_layers
    if start := blueprint.num_encoder_layers:
        return [range(start), range(start, number)]
    kinds = _kinds(blueprint)
    first_of_kind = {kinds[index]: index for index in reversed(range(1, number - 1))}
    singles = {0, min(1, number - 1), number - 1, *first_of_kind.values()}
    stages = [range(index, index + 1) for index in sorted(singles)]
    first = min(1, number - 2)
    return stages if number == 1 else [*stages, range(first, first + 2)]


_EMBEDDING, _HEAD, _BESIDE, _KINDS = range(4)
"""The columns of the parts; a column for each kind of layers follows."""


def _parts(blueprint: Blueprint, stages: Sequence[range], times: Times) -> dict[str, Any]:
    """The parts of a sample, whose sums are nearest to the times of stages."""
    kinds = _kinds(blueprint)
    names = list(dict.fromkeys(kinds))
    columns = [_KINDS + names.index(kind) for kind in kinds]
    counts = np.zeros((len(stages), _KINDS + len(names)))
    for row, layers in zip(counts, stages, strict=True):
        row[_EMBEDDING], row[_HEAD], row[_BESIDE] = layers.start == 0, layers.stop == len(kinds), 1
        for layer in layers:
            row[columns[layer]] += 1
    if blueprint.num_encoder_layers:
        counts[:, :_KINDS] = 0
    found = np.stack([_solved(counts, column) for column in times.T], axis=1)
    parts = [
        PassTimes(**{one.name: float(time_s) for one, time_s in zip(fields(PassTimes), row, strict=True)})
        for row in found
    ]
    return {
        "embedding": parts[_EMBEDDING],
        "layers": tuple(parts[column] for column in columns),
        "head": parts[_HEAD],
        "beside": parts[_BESIDE],
    }


def _solved(counts: Times, times_s: Times) -> Times:
    """The times of parts, given how often each is in every stage; none is below 0.

    Where noise would give layers no time, fewer parts are told apart: nothing beside them, then layers alone.
    """
    for left_out in ([], [_BESIDE], [_EMBEDDING, _HEAD, _BESIDE]):
        told = counts.copy()
        told[:, left_out] = 0
        found_s = np.linalg.lstsq(told, times_s)[0]
        if found_s[_BESIDE] >= 0 and found_s[_KINDS:].min() > 0:
            break
    return found_s.clip(min=0)


def _kinds(blueprint: Blueprint) -> list[object]:
    """The kind of each layer; those of one kind take the same time. Encoder and decoder are a kind each."""
    if start := blueprint.num_encoder_layers:
        return [index < start for index in range(blueprint.num_layers)]
    return layer_kinds(blueprint, Training())


def _total_s(times: Times) -> float:
    """What a round takes: each pass the longer of computing and of launching."""
    return float(np.maximum(times[:, :2], times[:, 2:]).sum())


# The update of the weights, copies and codecs.


def _update_s_per_parameter(blueprint: Blueprint, device: Device, size: Size) -> float:
    rig = Rig(build_stage(blueprint, range(1), seed=0), device=device, size=size)

    def take() -> float:
        rig.forward(0)
        rig.backward(0)
        return _wall_s(device, rig.update)

    return _median_s(take) / sum(one.numel() for one in rig.stage.parameters())


def _copy_speeds(device: Device) -> tuple[float | None, float | None]:
    """Bytes per second to the host and from it, through pinned memory."""
    if not device.is_accelerator:
        return None, None
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device.torch_device)
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def bytes_per_s(to: Tensor, source: Tensor) -> float:
        return _COPY_BYTES / _median_s(lambda: _wall_s(device, lambda: to.copy_(source, non_blocking=True)))

    return bytes_per_s(here, there), bytes_per_s(there, here)


def _measure_codings(job: Job, device: Device, *, width: int, rows: Sequence[int]) -> tuple[CodingTimes, ...]:
    """What the codecs that a job may use take for messages of the fewest and of the most rows."""
    most = max(rows[0], min(rows[-1], _MOST_CODED_ELEMENTS // width))
    points: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for pair in dict.fromkeys(_pairs(job, width)):
        for number in sorted({rows[0], most}):
            for codec, *times_s in _coding_times(pair, number, width, device):
                points[codec].append((float(number * width), *times_s))
    found = []
    for codec, taken in points.items():
        sizes, *both = zip(*taken, strict=True)
        (encode_fixed_s, encode_s), (decode_fixed_s, decode_s) = (
            fit_line([*zip(sizes, times_s, strict=True)]) for times_s in both
        )
        found.append(
            CodingTimes(
                codec=codec,
                encode_fixed_s=encode_fixed_s,
                encode_s_per_element=encode_s,
                decode_fixed_s=decode_fixed_s,
                decode_s_per_element=decode_s,
            )
        )
    return tuple(found)


def _pairs(job: Job, width: int) -> Iterator[Pair]:
    """Raw, the codecs that links have, and where one is open all levels that learn nothing."""
    yield RAW_PAIR
    for link in job.link:
        if link.boundary.crossing_width(width) != width:
            continue
        given = given_pair(link)
        yield from open_pairs(job, width) if given is None else [given]


def open_pairs(job: Job, width: int) -> list[Pair]:
    """The codecs that a link whose codec is open may get and that learn nothing, the least lossy first."""
    most = Loss[job.limits.codec_loss.upper()]
    return [
        Pair(forward=level.forward, backward=level.backward)
        for level in codec_levels(width)
        if level.loss <= most and not level.is_joint
    ]


def given_pair(link: LinkSpec) -> Pair | None:
    """The codecs that the job gives a link, raw in place of a subspace; None where one is open."""
    forward, backward = link.codec.forward, link.codec.backward
    if isinstance(forward, CodecSpec) and isinstance(backward, CodecSpec):
        pair = Pair(forward=forward, backward=backward)
        return RAW_PAIR if pair.subspace is not None else pair
    return None


def _coding_times(pair: Pair, num_rows: int, width: int, device: Device) -> list[tuple[str, float, float]]:
    """Encoding and decoding of activations and of gradients, through both ends of a cut, copies included."""
    cut = Cut(crossing=Crossing(num_rows=num_rows, width=width), codecs=pair)
    pipeline = Pipeline(
        stages=((_HERE,), (_BEYOND,)), num_steps=1, num_microbatches=1, max_in_flight=1, cuts=(cut,)
    )
    config = PipelineConfig(pipeline=pipeline, seed=0)
    sending, receiving = (cut_end(config, 0, device, width, is_sender=one) for one in (True, False))
    hidden_BTD = torch.randn(1, num_rows, width, device=device.torch_device)
    integers = {IDS: torch.zeros((1, num_rows), dtype=torch.int64)}
    forward, backward = texts_of(pair)
    items = itertools.count()

    def cross() -> list[float]:
        item, codecs = next(items), ((HIDDEN, forward), (GRADIENT, backward))
        there = Message(MessageKind.ACTIVATION, 0, item, _HERE, (_BEYOND,), None, codecs)
        back = Message(MessageKind.GRADIENT, 0, item, _BEYOND, (_HERE,), None, ((HIDDEN, backward),))
        # An end waits for its device, so what coding gives is there when a call returns.
        clock = [time.perf_counter()]
        out = sending.encode(there, hidden_BTD, integers, after=Mark())
        clock.append(time.perf_counter())
        receiving.decode(there, out, integers)
        clock.append(time.perf_counter())
        home = receiving.encode(back, hidden_BTD, {}, after=Mark())
        clock.append(time.perf_counter())
        sending.decode(back, home, {})
        clock.append(time.perf_counter())
        return [end_s - start_s for start_s, end_s in itertools.pairwise(clock)]

    taken = repeat(cross, figure=math.fsum, effort=_CODING, num_warm_ups=1)
    there_s, arrived_s, back_s, home_s = map(statistics.median, zip(*taken, strict=True))
    return [(forward, there_s, arrived_s), (backward, back_s, home_s)]


# What is made up.


def made_up_size(job: Job, num_sequences: int) -> Size:
    """A micro-batch of so many of the job's sequences."""
    return Size(
        num_sequences=num_sequences,
        sequence_length=1 if job.data is None else job.data.sequence_length,
        precision=Precision(job.train.precision),
    )


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
