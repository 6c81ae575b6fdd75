"""A job made ready for the search: its clouds, links, model and memory options, and what each stage takes.

Setting    micro-batches of a step and memory options
Study      what every cloud and link takes under any setting, computed once
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar, cast

import numpy as np

from isthmus.errors import UserError
from isthmus.job import (
    CodecSpec,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    Job,
    LinkSpec,
    PipelineStrategy,
)
from isthmus.job.codec import BottleneckSpec
from isthmus.plan.codecs import (
    Bounds,
    Choice,
    CodecLevel,
    Crossing,
    Figures,
    Loss,
    Pair,
    codec_levels,
    num_learners,
    options,
)
from isthmus.plan.costs import (
    WIDE_BYTES,
    CostSource,
    ModelCosts,
    PartSize,
    PlannedModel,
    Workload,
    check_length,
    nothing_measured,
    stream_bytes,
)
from isthmus.plan.job_facts import (
    OPEN,
    CloudFacts,
    MemoryOptions,
    StepFacts,
    asked_options,
    check_even,
    check_lock_step,
    cloud_facts,
    line,
    memory_levels,
    policy_of,
    run_order,
    step_facts,
)
from isthmus.plan.memory import Bottleneck, Sharding, bottleneck_costs
from isthmus.plan.models import read_model
from isthmus.plan.scenario import HopLoad, Line, Policy, StageLoad
from isthmus.plan.stage_tables import MemoryTables, StageTable, coding_s, stage_table
from isthmus.plan.step_time import Table
from isthmus.plan.times import estimated_times, learned_times, measured_times

LOSSES: Final = {"none": Loss.NONE, "slight": Loss.SLIGHT, "some": Loss.SOME}
_MAX_MICROBATCHES: Final = 4096
_NOTHING_ASKED: Final = MemoryOptions()

Clouds = tuple[int, ...]
"""Clouds by their numbers in a study, in the order of their stages."""
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run a pipeline: micro-batches, and memory options, which cost time."""

    num_microbatches: int
    memory: MemoryOptions = _NOTHING_ASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One direction of a link: its line, the width of what crosses, its price, the codecs it may have."""

    line: Line
    width: int
    bottleneck: Bottleneck | None
    usd_per_gib: float | None
    bounds: Bounds
    levels: Sequence[CodecLevel]

    @property
    def allowed(self) -> Sequence[CodecLevel]:
        """The levels that cost no more quality than the job allows."""
        return [one for one in self.levels if one.loss <= self.bounds.loss]

    def figures(self, interval_s: float = 0.0) -> Figures:
        """The line beside so much computing."""
        return Figures(interval_s=interval_s, down_bps=self.line.down_bps, up_bps=self.line.up_bps)

    def options(self, crossing: Crossing) -> list[Choice]:
        """All codecs that may be chosen."""
        return options(crossing, self.figures(), levels=self.levels, bounds=self.bounds)

    @property
    def before_bottleneck(self) -> "LinkFacts":
        """The same while hidden states still cross."""
        if self.bottleneck is None:
            return self
        return replace(self, width=self.bottleneck.hidden_width, bottleneck=None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Study:
    """All that the search needs to know of a job, and tables of what its clouds take."""

    job: Job
    model: PlannedModel
    step: StepFacts
    clouds: tuple[CloudFacts, ...]
    links: Mapping[tuple[int, int], LinkFacts]
    """Both directions of every link between the clouds."""
    policy: Policy
    levels: tuple[MemoryOptions, ...]
    memory_share: float
    source: CostSource = nothing_measured
    _made: dict[tuple[object, ...], Any] = field(default_factory=dict)

    @cached_property
    def strategy(self) -> PipelineStrategy:
        """What the job says of a pipeline, if anything."""
        given = self.job.strategy
        return given if isinstance(given, PipelineStrategy) else PipelineStrategy(kind="pipeline")

    @cached_property
    def stops(self) -> tuple[int, ...] | None:
        """Where the job ends the layers of each stage, None where that is open."""
        return None if self.strategy.layers is None else tuple(accumulate(self.strategy.layers))

    @cached_property
    def run_order(self) -> Clouds:
        """The order of all clouds that a run takes by itself."""
        numbers = {cloud.name: number for number, cloud in enumerate(self.clouds)}
        return tuple(numbers[name] for name in run_order(self.job.used()))

    @property
    def is_in_row(self) -> bool:
        """Whether the clouds are the stages, in the order in which they are given."""
        return self.strategy.clouds is not None or self.strategy.layers is not None

    @property
    def sizes(self) -> range:
        """How many stages there may be: a pipeline that is asked for takes all clouds."""
        most = len(self.clouds)
        return range(most if isinstance(self.job.strategy, PipelineStrategy) else 1, most + 1)

    @property
    def num_frozen(self) -> int:
        """Layers from the first on that are not trained: nothing goes back through them."""
        return self.job.model.frozen_layers if self.job.model is not None else 0

    @property
    def in_lock_step(self) -> "Study | None":
        """The same with one schedule for all ranks, so that stages can be fully sharded.

        None where the job has its own policy.
        """
        if self.strategy.policy != OPEN or self.policy.keeps_order:
            return None
        return study(self.job, policy=Policy.LOCK_STEP, source=self.source)

    def but(self, **changes: Any) -> "Study":
        """The same with something changed, and none of the tables that depend on it."""
        kept = () if "model" in changes else ("costs", "memory")
        made = {key: value for key, value in self._made.items() if key[0] in kept}
        return replace(self, **changes, _made=made)

    def with_model(self, model: PlannedModel) -> "Study":
        """The same clouds and links with another model."""
        return self.but(model=model, links=_links(self.job, self.clouds, model))

    def is_last_resort(self, memory: MemoryOptions) -> bool:
        """Whether the optimizer is on the host or in 8 bits and the job did not ask for that."""
        asked = asked_options(self.job)
        return (memory.offload_optimizer, memory.optimizer_bits) != (
            asked.offload_optimizer,
            asked.optimizer_bits,
        )

    def microbatch_choices(self) -> list[int]:
        """Numbers of micro-batches to try: divisors of a step's sequences, about two for each doubling.

        With fewer than the least number of ranks of a cloud, some ranks would have nothing to do. Multiples
        of what all ranks ask for go first, if there are any.
        """
        if self.strategy.microbatches is not None:
            return [self.strategy.microbatches]
        ranks = [cloud.num_ranks for cloud in self.clouds]
        every = divisors(self.step.num_sequences)
        if self.policy.keeps_order:
            every = [one for one in every if one % math.lcm(*ranks) == 0] or every
        enough = [one for one in every if one >= min(ranks)] or every[-1:]
        return sorted({round(2 * math.log2(one)): one for one in enough}.values())

    def usd_per_s(self, clouds: Clouds) -> float | None:
        """The price of these clouds, None where it is not known."""
        prices = [self.clouds[one].usd_per_hour for one in clouds]
        return None if None in prices else sum(one or 0.0 for one in prices) / 3600

    def costs(self, cloud: int, setting: Setting) -> ModelCosts:
        """The model under a setting, as this cloud computes it."""
        facts = self.clouds[cloud]
        workload = Workload(
            num_sequences=self.step.num_sequences // setting.num_microbatches,
            sequence_length=self.step.sequence_length,
            arithmetic=replace(self.step.arithmetic(facts), is_gathered=setting.memory.at(facts).is_sharded),
            recompute=setting.memory.recompute,
        )
        return self.once(("costs", workload), lambda: self.model.costs_of(workload))

    def table(self, cloud: int, setting: Setting) -> StageTable:
        """What a cloud takes for any of its possible stages."""
        return self.once(("table", cloud, setting), lambda: self._table(cloud, setting))

    def _table(self, cloud: int, setting: Setting) -> StageTable:
        facts, costs = self.clouds[cloud], self.costs(cloud, setting)
        if facts.profile is None:
            times = estimated_times(costs, facts.accelerator, is_compiled=self.step.is_compiled)
        else:
            measured = measured_times(facts.profile, costs.workload, num_layers=costs.num_layers)
            times = learned_times(measured, costs)
        fitting = self.num_fitting(cloud, setting)
        return stage_table(costs, times, setting.memory.at(facts), facts, num_fitting=fitting)

    def num_fitting(self, cloud: int, setting: Setting, *, codec_bytes: int = 0) -> Table:
        """Micro-batches in flight that a rank has memory for at any stage, beside the state of its codecs."""
        facts, costs = self.clouds[cloud], self.costs(cloud, setting)
        at_stage = setting.memory.at(facts)
        up, down = self._largest_halves(cloud)
        tables = self.once(
            ("memory", costs.workload, at_stage, up, down),
            lambda: MemoryTables.of(costs, at_stage, up=up, down=down),
        )
        found = tables.num_fitting(facts.room_bytes(self.memory_share) - codec_bytes)
        if at_stage.sharding is Sharding.FULL and setting.num_microbatches % facts.num_ranks:
            # Ranks that run the same schedule have as many micro-batches each.
            return np.zeros_like(found)
        return found

    def _largest_halves(self, cloud: int) -> tuple[PartSize | None, PartSize | None]:
        """The largest halves of bottlenecks that a cloud may have, whichever clouds are its neighbours."""
        cuts = [(pair, one.bottleneck) for pair, one in self.links.items() if one.bottleneck is not None]
        return (
            _largest([one.up for pair, one in cuts if pair[1] == cloud]),
            _largest([one.down for pair, one in cuts if pair[0] == cloud]),
        )

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

    def halves(self, clouds: Clouds) -> tuple[tuple[PartSize, ...], ...]:
        """The halves of bottlenecks that each of these stages has."""
        cuts = [self.links[pair].bottleneck for pair in pairwise(clouds)]
        ups = [() if one is None else (one.up,) for one in cuts]
        downs = [() if one is None else (one.down,) for one in cuts]
        return tuple((*up, *down) for up, down in zip([(), *ups], [*downs, ()], strict=True))

    def num_warmup_steps(self, clouds: Clouds) -> int:
        """Steps before the bottlenecks between these stages begin; 0 where there is none."""
        cuts = (self.links[pair].bottleneck for pair in pairwise(clouds))
        longest = max((one.num_warmup_steps for one in cuts if one is not None), default=0)
        return min(longest, self.step.num_steps)

    @cached_property
    def before_bottlenecks(self) -> "Study":
        """The same while hidden states still cross where a bottleneck is to begin."""
        return self.but(links={pair: one.before_bottleneck for pair, one in self.links.items()})

    def can_cross(self, pair: tuple[int, int], setting: Setting, *, has_gradient: bool) -> bool:
        """Whether there can be a cut: bottlenecks must learn, and ranks with one schedule must be as many."""
        if self.links[pair].bottleneck is not None and not has_gradient:
            return False
        first, second = (self.clouds[one] for one in pair)
        is_full = any(setting.memory.sharding_at(one) is Sharding.FULL for one in self.clouds)
        return not is_full or first.num_ranks == second.num_ranks

    def crossing(self, clouds: Clouds, cut: int, setting: Setting, *, has_gradient: bool) -> Crossing:
        """What a micro-batch puts across the cut behind a stage."""
        pair = clouds[cut], clouds[cut + 1]
        return Crossing(
            num_rows=self.step.num_sequences // setting.num_microbatches * self.step.sequence_length,
            width=self.links[pair].width,
            element_bytes=self._element_bytes(clouds[: cut + 2], setting),
            has_gradient=has_gradient,
            num_steps=self.step.num_steps,
            num_microbatches=setting.num_microbatches,
            num_learners=num_learners(*(self.clouds[one].num_ranks for one in pair)),
        )

    def _element_bytes(self, clouds: Clouds, setting: Setting) -> int:
        """The bytes of a number that crosses raw to the last of these stages."""
        found = WIDE_BYTES
        is_narrow: bool | None = None
        for pair in pairwise(clouds):
            sender, receiver = (self.clouds[one] for one in pair)
            is_narrow = self.model.messages.leave_narrow(
                self.step.arithmetic(sender),
                is_sharded=setting.memory.at(sender).is_sharded,
                arrived_narrow=is_narrow,
            )
            found = stream_bytes(is_narrow=is_narrow)
            if self.links[pair].bottleneck is not None:
                # It is computed in float32; behind it hidden states have the type of the weights.
                found = WIDE_BYTES
                is_narrow = self.step.arithmetic(receiver).is_mixed and setting.memory.at(receiver).is_sharded
        return found

    def coded_hop(self, pair: tuple[int, int], crossing: Crossing, codecs: Pair) -> HopLoad:
        """What a micro-batch sends with these codecs; over the run, versions of a basis are a part of it."""
        first, second = (self.clouds[one] for one in pair)
        num_elements = crossing.num_rows * crossing.width
        activation_bytes = codecs.forward_bytes(crossing) + round(codecs.basis_bytes(crossing))
        forward_bytes = self.model.messages.forward_bytes(activation_bytes, num_tokens=crossing.num_rows)
        backward_bytes, backward_coding_s = 0, 0.0
        if crossing.has_gradient:
            backward_bytes = self.model.messages.backward_bytes(codecs.backward_bytes(crossing))
            backward_coding_s = coding_s(
                codecs.backward, num_elements, backward_bytes, sender=second, receiver=first
            )
        return HopLoad(
            line=self.links[pair].line,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
            forward_coding_s=coding_s(
                codecs.forward, num_elements, forward_bytes, sender=first, receiver=second
            ),
            backward_coding_s=backward_coding_s,
        )

    def once(self, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
        """Make something that depends on this study alone, the first time that it is asked for."""
        if key not in self._made:
            self._made[key] = make()
        return cast("Made", self._made[key])


def _largest(halves: Sequence[PartSize]) -> PartSize | None:
    return max(halves, key=lambda one: one.held_bytes, default=None)


def divisors(number: int) -> list[int]:
    """The divisors that may be a number of micro-batches, ascending."""
    return [one for one in range(1, min(number, _MAX_MICROBATCHES) + 1) if number % one == 0]


def study(job: Job, *, policy: Policy | None = None, source: CostSource = nothing_measured) -> Study:
    """Read a job, or say in one sentence what is missing or wrong; by this policy if it leaves that open."""
    model, step = read_model(job, source=source), step_facts(job)
    clouds = cloud_facts(job)
    if isinstance(job.strategy, PipelineStrategy):
        clouds = _ordered(clouds, job.strategy)
        _check_given(job.strategy, model, step, num_clouds=len(clouds))
    check_length(step.sequence_length, model.max_length)
    for link in job.link:
        link.boundary.check_width(model.width)
    own = job.strategy if isinstance(job.strategy, PipelineStrategy) else PipelineStrategy(kind="pipeline")
    if not isinstance(job.strategy, DataStrategy | GeneratorDiscriminatorStrategy):
        check_lock_step(job.used(), own)
        check_even(job.used(), num_sequences=step.num_sequences, sequence_length=step.sequence_length)
    policy = policy or policy_of(job.used(), own)
    return Study(
        job=job,
        model=model,
        step=step,
        clouds=clouds,
        links=_links(job, clouds, model),
        policy=policy,
        levels=memory_levels(job, clouds, policy),
        memory_share=job.limits.memory_share,
        source=source,
    )


def _ordered(clouds: tuple[CloudFacts, ...], strategy: PipelineStrategy) -> tuple[CloudFacts, ...]:
    if strategy.clouds is None:
        return clouds
    by_name = {cloud.name: cloud for cloud in clouds}
    for name in strategy.clouds:
        if name not in by_name:
            raise UserError(
                f"strategy.clouds names {name!r}, but there is no such cloud",
                hint=f"the clouds are {', '.join(by_name)}",
            )
    return tuple(by_name[name] for name in strategy.clouds)


def _check_given(
    strategy: PipelineStrategy, model: PlannedModel, step: StepFacts, *, num_clouds: int
) -> None:
    if strategy.microbatches is not None and step.num_sequences % strategy.microbatches:
        raise UserError(
            f"the {step.num_sequences} sequences of a step cannot be divided into "
            f"{strategy.microbatches} micro-batches",
            hint=f"set strategy.microbatches to a divisor of {step.num_sequences}",
        )
    check_lists(strategy, num_clouds=num_clouds)
    if strategy.layers is not None and sum(strategy.layers) != model.num_layers:
        raise UserError(
            f"strategy.layers adds up to {sum(strategy.layers)}, but the model has {model.num_layers} layers",
            hint="make it add up, or leave it out and let the planner choose",
        )
    if num_clouds > model.num_layers:
        raise UserError(
            f"{num_clouds} clouds need {num_clouds} layers at least, and the model has {model.num_layers}",
            hint="name fewer clouds in strategy.clouds, or take a deeper model",
        )


def check_lists(strategy: PipelineStrategy, *, num_clouds: int) -> None:
    """Refuse lists that have not one entry for each stage."""
    lists = {"layers": strategy.layers, "windows": strategy.windows, "max_in_flight": strategy.max_in_flight}
    for key, given in lists.items():
        if isinstance(given, tuple) and len(given) != num_clouds:
            raise UserError(
                f"strategy.{key} has {len(given)} entries for {num_clouds} stages",
                hint=f"give one number for each stage, or leave {key} out",
            )


def _links(job: Job, clouds: Sequence[CloudFacts], model: PlannedModel) -> dict[tuple[int, int], LinkFacts]:
    """Every link between these clouds, in both directions."""
    numbers = {cloud.name: number for number, cloud in enumerate(clouds)}
    return {
        (numbers[first], numbers[second]): _link_facts(job, link, first, model)
        for link in job.link
        if all(name in numbers for name in link.between)
        for first, second in (link.between, link.between[::-1])
    }


def _link_facts(job: Job, link: LinkSpec, first: str, model: PlannedModel) -> LinkFacts:
    width, bottleneck = link.boundary.crossing_width(model.width), None
    if isinstance(link.boundary, BottleneckSpec):
        bottleneck = bottleneck_costs(link.boundary, width=model.width, vocabulary_size=model.vocabulary_size)
    return LinkFacts(
        line=line(link, first),
        width=width,
        bottleneck=bottleneck,
        usd_per_gib=link.usd_per_gib,
        bounds=Bounds(
            loss=LOSSES[job.limits.codec_loss],
            forward=link.codec.forward if isinstance(link.codec.forward, CodecSpec) else None,
            backward=link.codec.backward if isinstance(link.codec.backward, CodecSpec) else None,
        ),
        # The levels are those of steering, or a run would change codecs that were planned right.
        levels=codec_levels(width, shares_ids=True),
    )
