"""What each cloud takes for any stage of a model under any setting: times and memory, as tables."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from isthmus.job import CodecSpec
from isthmus.job.codec import gradient_codec
from isthmus.job.codec_steps import (
    NUM_ANCHOR_SLOTS,
    Anchor,
    Feedback,
    Subspace,
    Svd,
    num_directions,
    svd_rank,
)
from isthmus.plan.codecs import Crossing, Pair, num_learners
from isthmus.plan.costs import WIDE_BYTES, Messages, ModelCosts, PartCosts, Stages, Workload, stream_bytes
from isthmus.plan.job_facts import CloudFacts, Level, StepFacts
from isthmus.plan.memory import Bottleneck, HalfCosts, Memory, Savers, Sharding, stage_memory, stages_memory
from isthmus.plan.scenario import HopLoad, Line, StageLoad
from isthmus.plan.step_time import Table
from isthmus.plan.times import ModelTimes, estimated_times, learned_times, measured_times

MAX_MICROBATCHES: Final = 4096
"""Of a step."""

# Python, the scheduler and the wires for every pass, whatever its size; a profile has it in its figures.
_PASS_OVERHEAD_S: Final = 2e-4


CostModel = Callable[[Workload], ModelCosts]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTables:
    """Bytes (a, b) of any stage: with nothing in flight, what each micro-batch adds, and at the update."""

    empty: Table
    each: Table
    update: Table

    @classmethod
    def of(
        cls, costs: ModelCosts, savers: Savers, *, up: HalfCosts | None = None, down: HalfCosts | None = None
    ) -> "MemoryTables":
        """Count the stages of a model, all at once; `up` and `down` lie at their cuts."""
        stages = Stages.every(costs.num_layers)
        ends = ((up, ~stages.are_first), (down, ~stages.are_last))
        halves = [(half, where) for half, where in ends if half is not None]
        found = stages_memory(costs, stages, window=1, savers=savers, halves=halves)
        standing, has_layers = found.standing_bytes, stages.starts < stages.stops
        return cls(
            empty=np.where(has_layers, standing + found.working, np.inf),
            each=np.where(has_layers, np.maximum(1.0, found.activations), np.inf),
            update=np.where(has_layers, standing + found.update, np.inf),
        )

    def num_fitting(self, room_bytes: int) -> Table:
        """Micro-batches in flight that fit into the room; 0 where layers alone are too much."""
        with np.errstate(invalid="ignore"):
            fitting = np.floor((room_bytes - self.empty) / self.each)
        return np.where(np.isfinite(self.each) & (self.update <= room_bytes), np.maximum(fitting, 0.0), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """A cloud under one setting: tables (a, b) over the layers from a to before b, times of one rank."""

    forward_s: Table
    backward_s: Table
    update_s: Table
    held: Table
    """Micro-batches in flight that the memory of one rank has room for; 0 where layers alone are too much."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """One way to run a pipeline: micro-batches, and a level of memory options, which cost time."""

    num_microbatches: int
    level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One direction of travel between two clouds: the line, and the width of what crosses it."""

    line: Line
    width: int
    bottleneck: Bottleneck | None = None

    @property
    def before_bottleneck(self) -> "LinkFacts":
        """The same while hidden states still cross."""
        if self.bottleneck is None:
            return self
        return replace(self, width=self.bottleneck.hidden_width, bottleneck=None)


@dataclass(frozen=True, kw_only=True)
class ModelSupply:
    """The clouds of a job with one model on them."""

    clouds: Sequence[CloudFacts]
    links: Mapping[tuple[int, int], LinkFacts]
    step: StepFacts
    levels: Sequence[Level]
    costs_of: CostModel
    memory_share: float
    messages: Messages
    num_frozen: int = 0
    """Layers from the first on that are not trained: nothing goes back through them."""
    _costs: dict[Workload, ModelCosts] = field(default_factory=dict)
    _tables: dict[tuple[int, Setting], StageTable] = field(default_factory=dict)
    _memory: dict[tuple[Workload, Savers, HalfCosts | None, HalfCosts | None], MemoryTables] = field(
        default_factory=dict
    )

    @property
    def num_ranks(self) -> Sequence[int]:
        """Of each cloud."""
        return [cloud.num_ranks for cloud in self.clouds]

    @property
    def pairs(self) -> Collection[tuple[int, int]]:
        """The clouds that a link joins, both ways."""
        return self.links.keys()

    def costs(self, cloud: CloudFacts, setting: Setting) -> ModelCosts:
        """The model under a setting, as this cloud computes it."""
        workload = Workload(
            num_sequences=self.step.num_sequences // setting.num_microbatches,
            sequence_length=self.step.sequence_length,
            arithmetic=replace(self.step.arithmetic(cloud), is_gathered=self._is_sharded(cloud, setting)),
            recompute=self.levels[setting.level].sparing.recompute,
        )
        if workload not in self._costs:
            self._costs[workload] = self.costs_of(workload)
        return self._costs[workload]

    def times(self, cloud: CloudFacts, setting: Setting) -> ModelTimes:
        """The times of the model's parts at a cloud, as measured there if they were."""
        costs = self.costs(cloud, setting)
        if cloud.profile is not None:
            measured = measured_times(cloud.profile, costs.workload, num_layers=costs.num_layers)
            return learned_times(measured, costs)
        return estimated_times(costs, cloud.accelerator, is_compiled=self.step.is_compiled)

    def table(self, cloud: int, setting: Setting) -> StageTable:
        """What a cloud takes for any of its possible stages."""
        key = (cloud, setting)
        if key not in self._tables:
            self._tables[key] = self._table(cloud, setting)
        return self._tables[key]

    def stage_load(self, cloud: int, setting: Setting, layers: range) -> StageLoad:
        """The times of one stage."""
        table, spot = self.table(cloud, setting), (layers.start, layers.stop)
        return StageLoad(
            cloud=self.clouds[cloud].name,
            forward_s=float(table.forward_s[spot]),
            backward_s=float(table.backward_s[spot]),
            update_s=float(table.update_s[spot]),
            num_ranks=self.clouds[cloud].num_ranks,
        )

    def without_cache(self, **changes: Any) -> "ModelSupply":
        """The same with something changed, and nothing that was computed before."""
        return replace(self, **changes, _tables={}, _memory={}, _costs={})

    def _table(self, cloud: int, setting: Setting) -> StageTable:
        facts = self.clouds[cloud]
        costs, times = self.costs(facts, setting), self.times(facts, setting)
        savers = self.levels[setting.level].savers(facts)
        # Beside what moves for a layer another one is computed; for the ends of a model there is none.
        moved = [exchange_s(part, costs, savers, facts) for part in costs.layers]
        first, last = (exchange_s(part, costs, savers, facts) for part in (costs.embedding, costs.head))
        forward_s = between(
            times.embedding.forward_s + first[0],
            [max(one.forward_s, wait_s) for one, (wait_s, _) in zip(times.layers, moved, strict=True)],
            times.head.forward_s + last[0],
        )
        backward_s = between(
            times.embedding.backward_s + first[1],
            [
                max(one.backward_s, wait_s) if one.backward_s else 0.0
                for one, (_, wait_s) in zip(times.layers, moved, strict=True)
            ],
            times.head.backward_s + last[1],
        )
        forward_s, backward_s = whole_passes_s(times, forward_s, backward_s)
        overhead_s = _PASS_OVERHEAD_S if facts.profile is None else 0.0
        return StageTable(
            forward_s=forward_s + overhead_s,
            backward_s=backward_s + overhead_s,
            update_s=updating_s(costs, times, savers, facts),
            held=self.num_fitting(cloud, setting),
        )

    def num_fitting(self, cloud: int, setting: Setting, *, codec_bytes: int = 0) -> Table:
        """Micro-batches in flight that a rank has memory for at any stage, beside the state of its codecs."""
        facts = self.clouds[cloud]
        savers = self.levels[setting.level].savers(facts)
        tables = self._memory_tables(cloud, self.costs(facts, setting), savers)
        found = tables.num_fitting(facts.room_bytes(self.memory_share) - codec_bytes)
        if savers.sharding is Sharding.FULL and setting.num_microbatches % facts.num_ranks:
            # Ranks that run the same schedule have as many micro-batches each.
            return np.zeros_like(found)
        return found

    def memory(
        self,
        cloud: CloudFacts,
        setting: Setting,
        layers: range,
        *,
        window: int,
        halves: Sequence[HalfCosts] = (),
        codec_bytes: int = 0,
    ) -> Memory:
        """What a rank of one stage needs, with its halves of bottlenecks and the state of its codecs."""
        return stage_memory(
            self.costs(cloud, setting),
            layers,
            window=window,
            savers=self.levels[setting.level].savers(cloud),
            halves=halves,
            codec_bytes=codec_bytes,
        )

    def halves(self, clouds: Sequence[int]) -> tuple[tuple[HalfCosts, ...], ...]:
        """The halves of bottlenecks that each of these stages has."""
        cuts = [self.links[pair].bottleneck for pair in pairwise(clouds)]
        ups = [() if one is None else (one.up,) for one in cuts]
        downs = [() if one is None else (one.down,) for one in cuts]
        return tuple((*up, *down) for up, down in zip([(), *ups], [*downs, ()], strict=True))

    def num_warmup_steps(self, clouds: Sequence[int]) -> int:
        """Steps before the bottlenecks between these stages begin; 0 where there is none."""
        cuts = (self.links[pair].bottleneck for pair in pairwise(clouds))
        longest = max((one.num_warmup_steps for one in cuts if one is not None), default=0)
        return min(longest, self.step.num_steps)

    @property
    def before_bottlenecks(self) -> "ModelSupply":
        """The same while hidden states still cross where a bottleneck is to begin."""
        return replace(self, links={pair: one.before_bottleneck for pair, one in self.links.items()})

    def can_cross(self, pair: tuple[int, int], setting: Setting, *, has_gradient: bool) -> bool:
        """Whether there can be a cut: bottlenecks must learn, and ranks with one schedule must be as many."""
        if self.links[pair].bottleneck is not None and not has_gradient:
            return False
        first, second = (self.clouds[one] for one in pair)
        level = self.levels[setting.level]
        is_full = any(level.sharding(one) is Sharding.FULL for one in self.clouds)
        return not is_full or first.num_ranks == second.num_ranks

    def element_bytes(self, clouds: Sequence[int], setting: Setting) -> tuple[int, ...]:
        """Of a number that crosses raw behind each of these stages but the last."""
        found: list[int] = []
        is_narrow: bool | None = None
        for pair in pairwise(clouds):
            sender, receiver = (self.clouds[one] for one in pair)
            is_narrow = self.messages.leave_narrow(
                self.step.arithmetic(sender),
                is_sharded=self._is_sharded(sender, setting),
                arrived_narrow=is_narrow,
            )
            if self.links[pair].bottleneck is not None:
                # It is computed in float32; behind it hidden states have the type of the weights.
                found.append(WIDE_BYTES)
                is_narrow = self.step.arithmetic(receiver).is_mixed and self._is_sharded(receiver, setting)
            else:
                found.append(stream_bytes(is_narrow=is_narrow))
        return tuple(found)

    def crossing(
        self, pair: tuple[int, int], setting: Setting, *, has_gradient: bool, element_bytes: int
    ) -> Crossing:
        """What a micro-batch puts across a cut."""
        num_sequences = self.step.num_sequences // setting.num_microbatches
        return Crossing(
            num_rows=num_sequences * self.step.sequence_length,
            width=self.links[pair].width,
            element_bytes=element_bytes,
            has_gradient=has_gradient,
            num_steps=self.step.num_steps,
            num_microbatches=setting.num_microbatches,
            num_learners=num_learners(*(self.clouds[one].num_ranks for one in pair)),
        )

    def coded_hop(self, pair: tuple[int, int], crossing: Crossing, codecs: Pair) -> HopLoad:
        """What a micro-batch sends with these codecs; over the run, editions of a basis are a part of it."""
        first, second = (self.clouds[one] for one in pair)
        activation_bytes = codecs.forward_bytes(crossing) + round(codecs.basis_bytes(crossing))
        forward_bytes = self.messages.forward_bytes(activation_bytes, num_tokens=crossing.num_rows)
        backward_bytes = 0
        if crossing.has_gradient:
            backward_bytes = self.messages.backward_bytes(codecs.backward_bytes(crossing))
        num_elements = crossing.num_rows * crossing.width
        forward_coding_s = coding_s(
            codecs.forward, num_elements, forward_bytes, sender=first, receiver=second
        )
        backward_coding_s = 0.0
        if crossing.has_gradient:
            backward_coding_s = coding_s(
                codecs.backward, num_elements, backward_bytes, sender=second, receiver=first
            )
        return HopLoad(
            line=self.links[pair].line,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
            forward_coding_s=forward_coding_s,
            backward_coding_s=backward_coding_s,
        )

    def _is_sharded(self, cloud: CloudFacts, setting: Setting) -> bool:
        return self.levels[setting.level].sharding(cloud) is not Sharding.NONE

    def _memory_tables(self, cloud: int, costs: ModelCosts, savers: Savers) -> MemoryTables:
        """With the largest halves of bottlenecks that the cloud may have, whoever its neighbours will be."""
        cuts = [(pair, one.bottleneck) for pair, one in self.links.items() if one.bottleneck is not None]
        up = _largest([one.up for pair, one in cuts if pair[1] == cloud])
        down = _largest([one.down for pair, one in cuts if pair[0] == cloud])
        key = (costs.workload, savers, up, down)
        if key not in self._memory:
            self._memory[key] = MemoryTables.of(costs, savers, up=up, down=down)
        return self._memory[key]


def _largest(halves: Sequence[HalfCosts]) -> HalfCosts | None:
    return max(halves, key=lambda one: one.held_bytes, default=None)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [one for one in range(1, number + 1) if number % one == 0]


def microbatch_choices(
    num_sequences: int, *, given: int | None, most: int, num_ranks: int = 1, multiple_of: int = 1
) -> list[int]:
    """Numbers of micro-batches to try: divisors of a step's sequences, about two for each doubling.

    With fewer than `num_ranks`, the least of all clouds, ranks would have nothing to do. Multiples of what
    all ranks ask for go first, if there are any.
    """
    if given is not None:
        return [given]
    every = [one for one in divisors(num_sequences) if one <= most]
    every = [one for one in every if one % multiple_of == 0] or every
    enough = [one for one in every if one >= num_ranks] or every[-1:]
    return sorted({round(2 * math.log2(one)): one for one in enough}.values())


# Between a device and its host: about what PCIe 4 gives.
_HOST_BYTES_PER_S: Final = 20e9
# Reading and writing that a codec does for each byte that it is given.
_CODING_PASSES: Final = 16
# Two moments of four bytes, there and back.
_OFFLOADED_BYTES_PER_PARAMETER: Final = 16


def between(first: float, layers: Sequence[float], last: float) -> Table:
    """Sums (a, b) over the layers from a to before b, with the ends of the model where a stage has them."""
    return np.maximum(Stages.every(len(layers)).total([first, *layers, last]), 0.0)


def whole_passes_s(times: ModelTimes, forward_s: Table, backward_s: Table) -> tuple[Table, Table]:
    """Tables of passes from those of computing alone: with what is beside the parts, and with launches.

    The host launches ahead of the device, so a pass takes the longer of launching its parts and computing.
    """
    beside = times.beside
    launch_forward_s = between(
        times.embedding.forward_launch_s,
        [one.forward_launch_s for one in times.layers],
        times.head.forward_launch_s,
    )
    launch_backward_s = between(
        times.embedding.backward_launch_s,
        [one.backward_launch_s for one in times.layers],
        times.head.backward_launch_s,
    )
    return (
        np.maximum(forward_s + beside.forward_s, launch_forward_s + beside.forward_launch_s),
        np.maximum(backward_s + beside.backward_s, launch_backward_s + beside.backward_launch_s),
    )


def updating_s(costs: ModelCosts, times: ModelTimes, savers: Savers, cloud: CloudFacts) -> Table:
    """Tables (a, b) of the optimizer on what a rank owns, and of the sum of gradients over the ranks."""
    trained = _summed(costs, lambda part: part.num_trained)
    optimizer_s = trained / savers.num_shards * times.update_s_per_parameter
    if savers.offload_optimizer:
        optimizer_s += trained / savers.num_shards * _OFFLOADED_BYTES_PER_PARAMETER / _HOST_BYTES_PER_S
    exchanged_bytes = _summed(costs, lambda part: _exchanged_bytes(part, costs, savers))
    share = (cloud.num_ranks - 1) / cloud.num_ranks
    return np.asarray(optimizer_s + share * exchanged_bytes / cloud.inside_bytes_per_s)


def _summed(costs: ModelCosts, count: Callable[[PartCosts], int]) -> Table:
    """Sums (a, b) over the parts of any stage."""
    return np.maximum(Stages.every(costs.num_layers).total(costs.each(count)), 0.0)


def _exchanged_bytes(part: PartCosts, costs: ModelCosts, savers: Savers) -> int:
    """At the end of a step: gradients are summed, then the sums or all weights gathered."""
    match savers.sharding:
        case Sharding.NONE:
            return 2 * WIDE_BYTES * part.num_trained
        case Sharding.OPTIMIZER:
            gathered = costs.workload.arithmetic.element_bytes * part.num_parameters
            return WIDE_BYTES * part.num_trained + gathered
        case Sharding.FULL:
            return 0


def exchange_s(part: PartCosts, costs: ModelCosts, savers: Savers, cloud: CloudFacts) -> tuple[float, float]:
    """What moves in a forward and in a backward of a part whose weights are shared out.

    Weights are gathered in both as they are computed with, and gradients reduced in float32.
    """
    if savers.sharding is not Sharding.FULL:
        return 0.0, 0.0
    share = (savers.num_shards - 1) / savers.num_shards
    gathered_bytes = share * part.num_parameters * costs.workload.arithmetic.element_bytes
    reduced_bytes = share * part.num_trained * WIDE_BYTES
    rate = cloud.inside_bytes_per_s
    return gathered_bytes / rate, (gathered_bytes + reduced_bytes) / rate


def coding_s(
    codec: CodecSpec, num_elements: int, num_bytes: int, *, sender: CloudFacts, receiver: CloudFacts
) -> float:
    """What coding a message takes at both ends, copies between devices and hosts included."""
    encoding, decoding = (
        None if one.profile is None else one.profile.coding(str(codec)) for one in (sender, receiver)
    )
    if encoding is None:
        speed = None if sender.profile is None else sender.profile.to_host_bytes_per_s
        encode_s = _guessed_s(codec, num_elements, sender) + _copy_s(num_bytes, sender, speed)
    else:
        encode_s = encoding.encode_s(num_elements)
    if decoding is None:
        speed = None if receiver.profile is None else receiver.profile.from_host_bytes_per_s
        decode_s = _guessed_s(codec, num_elements, receiver) + _copy_s(num_bytes, receiver, speed)
    else:
        decode_s = decoding.decode_s(num_elements)
    return encode_s + decode_s


def codec_state_bytes(codecs: Pair, crossing: Crossing) -> tuple[int, int]:
    """What the codecs of a cut keep between messages on one wire: at the sending stage, at the receiving one.

    Error feedback keeps what the last message lost, an SVD the directions of the last message. A subspace
    keeps its basis at both ends, and what it learns the next one from at the sender of activations.
    """
    shape = crossing.num_rows, crossing.width
    learned, basis = _subspace_state_bytes(codecs.forward, crossing.width)
    sender_bytes = _sender_state_bytes(codecs.forward, *shape) + learned + basis
    gradients = gradient_codec(codecs.forward, codecs.backward)
    return sender_bytes, basis + (_sender_state_bytes(gradients, *shape) if crossing.has_gradient else 0)


def _sender_state_bytes(codec: CodecSpec, num_rows: int, width: int) -> int:
    num_elements = 0
    for step in codec.steps:
        match step:
            case Feedback():
                num_elements += num_rows * width
            case Svd(ratio=ratio):
                num_elements += width * (svd_rank(ratio, num_rows, width) or 0)
    return WIDE_BYTES * num_elements


def _subspace_state_bytes(codec: CodecSpec, width: int) -> tuple[int, int]:
    """The sums that a basis is learned from, and the basis with its anchors by token id."""
    match codec.steps:
        case (Subspace() as subspace, *_):
            num_slots = NUM_ANCHOR_SLOTS if subspace.anchor is Anchor.TOKENS else 0
            # A sum, two weights and the number of a row for each slot.
            learned = WIDE_BYTES * (width * width + width + num_slots * (width + 4))
            basis = WIDE_BYTES * width * (1 + num_directions(subspace, width))
            return learned, basis + 2 * num_slots * width
    return 0, 0


def _guessed_s(codec: CodecSpec, num_elements: int, cloud: CloudFacts) -> float:
    """By the memory's bandwidth; codecs compute in float32 whatever they are given."""
    if codec.is_raw:
        return 0.0
    return _CODING_PASSES * WIDE_BYTES * num_elements / cloud.accelerator.memory_bandwidth


def _copy_s(num_bytes: int, cloud: CloudFacts, bytes_per_s: float | None) -> float:
    if cloud.accelerator.is_cpu:
        return 0.0
    return num_bytes / (bytes_per_s or _HOST_BYTES_PER_S)
