"""What each cloud takes for any stage of a model under any setting: times and memory as tables."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from isthmus.plan.costs.arithmetic import WIDE_BYTES
from isthmus.plan.costs.bottlenecks import Bottleneck, HalfCosts
from isthmus.plan.costs.memory import Memory, Savers, Sharding, stage_memory
from isthmus.plan.costs.messages import Messages, stream_bytes
from isthmus.plan.costs.parts import ModelCosts, Workload
from isthmus.plan.costs.times import ModelTimes, estimated_times, learned_times, measured_times
from isthmus.plan.ladder import Crossing, Pair, Stretch, num_learners
from isthmus.plan.scenario import HopLoad, Line, StageLoad
from isthmus.plan.search.facts import CloudFacts, StepFacts
from isthmus.plan.search.inside import between, coding_s, exchange_s, updating_s, whole_passes_s
from isthmus.plan.search.memory_tables import MemoryTables
from isthmus.plan.search.sparing import Level
from isthmus.plan.search.walks import Table

MAX_MICROBATCHES: Final = 4096
"""Of a step."""

# Python, the scheduler and the wires for every pass, whatever its size; a profile has it in its figures.
_PASS_OVERHEAD_S: Final = 2e-4


CostModel = Callable[[Workload], ModelCosts]


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
        held = self._memory_tables(cloud, costs, savers).held(facts.room_bytes(self.memory_share))
        if savers.sharding is Sharding.FULL and setting.num_microbatches % facts.num_ranks:
            # Ranks in lock-step have as many micro-batches each.
            held = np.zeros_like(held)
        return StageTable(
            forward_s=forward_s + overhead_s,
            backward_s=backward_s + overhead_s,
            update_s=updating_s(costs, times, savers, facts),
            held=held,
        )

    def memory(
        self,
        cloud: CloudFacts,
        setting: Setting,
        layers: range,
        *,
        window: int,
        halves: Sequence[HalfCosts] = (),
    ) -> Memory:
        """What a rank of one stage needs, with its halves of bottlenecks."""
        savers = self.levels[setting.level].savers(cloud)
        return stage_memory(self.costs(cloud, setting), layers, window=window, savers=savers, halves=halves)

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
            stretch=Stretch(
                num_steps=self.step.num_steps,
                num_microbatches=setting.num_microbatches,
                num_learners=num_learners(*(self.clouds[one].num_ranks for one in pair)),
            ),
        )

    def coded_hop(self, pair: tuple[int, int], crossing: Crossing, codecs: Pair) -> HopLoad:
        """What a micro-batch sends with these codecs; over the run, editions of a basis are a part of it."""
        first, second = (self.clouds[one] for one in pair)
        activation_bytes = codecs.forward_bytes(crossing) + round(codecs.edition_bytes(crossing))
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
