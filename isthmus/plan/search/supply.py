"""What each cloud takes for any stage of a model under any setting: times and memory as tables."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from isthmus.plan.costs.activations import WIDE_BYTES
from isthmus.plan.costs.memory import Memory, Savers, Sharding, stage_memory
from isthmus.plan.costs.parts import ModelCosts, PartCosts, Workload
from isthmus.plan.costs.times import ModelTimes, estimated_times, learned_times, measured_times
from isthmus.plan.ladder import Crossing, Pair, Stretch, num_learners
from isthmus.plan.scenario import HopLoad, Line
from isthmus.plan.search.facts import CloudFacts, StepFacts
from isthmus.plan.search.settings import Setting, StageTable
from isthmus.plan.search.sparing import Level
from isthmus.plan.search.walks import Table

# Inside a cloud, per device: about what a 200 Gbit/s network card gives; links within a machine give more.
_INSIDE_BYTES_PER_S: Final = 25e9
# Between a device and its host: about what PCIe 4 gives.
_HOST_BYTES_PER_S: Final = 20e9
# Python, the scheduler and the courier for every pass, whatever its size.
_PASS_OVERHEAD_S: Final = 2e-4
# A layer is some tens of kernels, and each takes a few microseconds to start.
_LEAST_LAYER_S: Final = 1e-4
# Reading and writing that a codec does for each byte that it is given.
_CODING_PASSES: Final = 16
# Two moments of four bytes, there and back.
_OFFLOADED_BYTES_PER_PARAMETER: Final = 16


CostModel = Callable[[Workload], ModelCosts]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One direction of travel between two clouds: the line, what crosses it, and its strongest codecs."""

    line: Line
    width: int
    strongest: Pair


@dataclass(frozen=True, kw_only=True)
class ModelSupply:
    """The clouds of a job with one model on them."""

    clouds: Sequence[CloudFacts]
    links: Mapping[tuple[int, int], LinkFacts]
    step: StepFacts
    levels: Sequence[Level]
    costs_of: CostModel
    memory_share: float
    num_frozen: int = 0
    """Layers from the first on that are not trained: nothing goes back through them."""
    _costs: dict[Workload, ModelCosts] = field(default_factory=dict)
    _tables: dict[tuple[int, Setting], StageTable] = field(default_factory=dict)
    _memory: dict[tuple[Workload, Savers], "_MemoryTables"] = field(default_factory=dict)

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
            arithmetic=self.step.arithmetic(cloud),
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
        return estimated_times(costs, cloud.accelerator)

    def table(self, cloud: int, setting: Setting) -> StageTable:
        """What a cloud takes for any of its possible stages."""
        key = (cloud, setting)
        if key not in self._tables:
            self._tables[key] = self._table(self.clouds[cloud], setting)
        return self._tables[key]

    def _table(self, facts: CloudFacts, setting: Setting) -> StageTable:
        costs, times = self.costs(facts, setting), self.times(facts, setting)
        savers = self.levels[setting.level].savers(facts)
        least_s = 0.0 if facts.profile is not None or facts.accelerator.is_cpu else _LEAST_LAYER_S
        gather_s = [_gather_s(costs, layer.num_parameters, savers) for layer in costs.layers]
        forward_s = _between(
            times.embedding.forward_s,
            [max(least_s, one.forward_s, wait_s) for one, wait_s in zip(times.layers, gather_s, strict=True)],
            times.head.forward_s,
        )
        backward_s = _between(
            times.embedding.backward_s,
            [
                max(2 * least_s, one.backward_s, 2 * gather_s[layer]) if one.backward_s else 0.0
                for layer, one in enumerate(times.layers)
            ],
            times.head.backward_s,
        )
        return StageTable(
            forward_s=forward_s + _PASS_OVERHEAD_S,
            backward_s=backward_s + _PASS_OVERHEAD_S,
            update_s=_update_s(costs, times, savers, facts.num_ranks),
            held=self._memory_tables(costs, savers).held(facts.room_bytes(self.memory_share)),
        )

    def memory(self, cloud: CloudFacts, setting: Setting, layers: range, *, window: int) -> Memory:
        """What a rank of one stage needs."""
        savers = self.levels[setting.level].savers(cloud)
        return stage_memory(self.costs(cloud, setting), layers, window=window, savers=savers)

    def hop(self, pair: tuple[int, int], setting: Setting) -> HopLoad:
        """What a micro-batch sends, as strongly coded as is allowed."""
        return self.coded_hop(pair, setting, self.links[pair].strongest)

    def crossing(self, pair: tuple[int, int], setting: Setting, *, has_gradient: bool = True) -> Crossing:
        """What a micro-batch puts across a cut."""
        num_sequences = self.step.num_sequences // setting.num_microbatches
        return Crossing(
            num_rows=num_sequences * self.step.sequence_length,
            width=self.links[pair].width,
            has_gradient=has_gradient,
            stretch=Stretch(
                num_steps=self.step.num_steps,
                num_microbatches=setting.num_microbatches,
                num_learners=num_learners(*(self.clouds[one].num_ranks for one in pair)),
            ),
        )

    def coded_hop(
        self, pair: tuple[int, int], setting: Setting, codecs: Pair, *, has_gradient: bool = True
    ) -> HopLoad:
        """What a micro-batch sends with these codecs; over the run, editions of a basis are a part of it."""
        crossing = self.crossing(pair, setting, has_gradient=has_gradient)
        first, second = (self.clouds[one] for one in pair)
        forward_bytes = codecs.forward_bytes(crossing) + round(codecs.edition_bytes(crossing))
        backward_bytes = codecs.backward_bytes(crossing)
        raw_bytes = crossing.num_rows * crossing.width * crossing.element_bytes
        coding_s = [
            0.0 if codec.is_raw else _coding_s(raw_bytes, cloud)
            for codec in (codecs.forward, codecs.backward)
            for cloud in (first, second)
        ]
        return HopLoad(
            line=self.links[pair].line,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
            forward_coding_s=sum(coding_s[:2]) + _copying_s(forward_bytes, first, second),
            backward_coding_s=sum(coding_s[2:]) + _copying_s(backward_bytes, first, second),
        )

    def _memory_tables(self, costs: ModelCosts, savers: Savers) -> "_MemoryTables":
        key = (costs.workload, savers)
        if key not in self._memory:
            self._memory[key] = _MemoryTables.of(costs, savers)
        return self._memory[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryTables:
    """Bytes (a, b) of any stage: with nothing in flight, what each micro-batch adds, and at the update."""

    empty: Table
    each: Table
    update: Table

    @classmethod
    def of(cls, costs: ModelCosts, savers: Savers) -> "_MemoryTables":
        size = costs.num_layers + 1
        tables = np.full((3, size, size), np.inf)
        known: dict[object, tuple[float, float, float]] = {}
        kinds = {id(layer): kind for kind, layer in enumerate(costs.layers)}
        sequence = [kinds[id(layer)] for layer in costs.layers]
        for start in range(size - 1):
            counts: dict[int, int] = {}
            for stop in range(start + 1, size):
                counts[sequence[stop - 1]] = counts.get(sequence[stop - 1], 0) + 1
                key = (start == 0, stop == size - 1, sequence[stop - 1], *sorted(counts.items()))
                if key not in known:
                    known[key] = _affine(stage_memory(costs, range(start, stop), window=1, savers=savers))
                tables[:, start, stop] = known[key]
        return cls(empty=tables[0], each=tables[1], update=tables[2])

    def held(self, room_bytes: int) -> Table:
        """Micro-batches in flight that fit into the room."""
        with np.errstate(invalid="ignore"):
            fitting = np.floor((room_bytes - self.empty) / self.each)
        return np.where(np.isfinite(self.each) & (self.update <= room_bytes), np.maximum(fitting, 0.0), 0.0)


def _affine(memory: Memory) -> tuple[float, float, float]:
    standing = memory.standing_bytes
    return standing + memory.working, max(1, memory.activations), standing + memory.update


def _between(first: float, layers: Sequence[float], last: float) -> Table:
    """Sums (a, b) over the layers from a to before b, with the ends of the model where a stage has them."""
    ends = np.concatenate([[0.0], np.cumsum(layers)])
    sums = ends[None, :] - ends[:, None]
    sums[0, :] += first
    sums[:, -1] += last
    return np.asarray(np.maximum(sums, 0.0))


def _update_s(costs: ModelCosts, times: ModelTimes, savers: Savers, num_ranks: int) -> Table:
    """The optimizer on what a rank owns, and the sum of gradients over the ranks."""
    trained = _summed(costs, lambda part: part.num_trained)
    optimizer_s = trained / savers.num_shards * times.update_s_per_parameter
    if savers.offload_optimizer:
        optimizer_s += trained / savers.num_shards * _OFFLOADED_BYTES_PER_PARAMETER / _HOST_BYTES_PER_S
    exchanged = (num_ranks - 1) / num_ranks * _summed(costs, lambda part: _exchanged(part, costs, savers))
    return np.asarray(optimizer_s + exchanged / _INSIDE_BYTES_PER_S)


def _summed(costs: ModelCosts, count: Callable[[PartCosts], int]) -> Table:
    """Sums (a, b) over the parts of any stage."""
    return _between(count(costs.embedding), [count(layer) for layer in costs.layers], count(costs.head))


def _exchanged(part: PartCosts, costs: ModelCosts, savers: Savers) -> int:
    """Bytes at the end of a step: gradients are summed, then the sums or all weights gathered."""
    match savers.sharding:
        case Sharding.NONE:
            return 2 * WIDE_BYTES * part.num_trained
        case Sharding.OPTIMIZER:
            gathered = costs.workload.arithmetic.element_bytes * part.num_parameters
            return WIDE_BYTES * part.num_trained + gathered
        case Sharding.FULL:
            return 0


def _gather_s(costs: ModelCosts, num_parameters: int, savers: Savers) -> float:
    """What a pass waits for the weights of a layer, beside which the layer before is computed."""
    if savers.sharding is not Sharding.FULL:
        return 0.0
    share = (savers.num_shards - 1) / savers.num_shards
    num_bytes = share * num_parameters * costs.workload.arithmetic.element_bytes
    return num_bytes / _INSIDE_BYTES_PER_S


def _coding_s(raw_bytes: int, cloud: CloudFacts) -> float:
    return _CODING_PASSES * raw_bytes / cloud.accelerator.memory_bandwidth


def _copying_s(num_bytes: int, *clouds: CloudFacts) -> float:
    return sum(num_bytes / _HOST_BYTES_PER_S for cloud in clouds if not cloud.accelerator.is_cpu)


def microbatch_choices(num_sequences: int, *, given: int | None, most: int, num_ranks: int = 1) -> list[int]:
    """Numbers of micro-batches to try: divisors of a step's sequences, about two for each doubling.

    With fewer than `num_ranks`, the least of all clouds, ranks would have nothing to do.
    """
    if given is not None:
        return [given]
    every = [one for one in range(1, min(num_sequences, most) + 1) if num_sequences % one == 0]
    enough = [one for one in every if one >= num_ranks] or every[-1:]
    return sorted({round(2 * math.log2(one)): one for one in enough}.values())
