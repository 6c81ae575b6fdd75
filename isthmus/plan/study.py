"""A job made ready for the search: its clouds, links, model and memory options, and what each stage takes.

Setting    micro-batches of a step and memory options
Study      what every cloud and link takes under any setting, computed once
CloudOrder clouds as stages in one order under one setting

Memory options are tried in this order; what a run refuses is no option:

    replicated → sharded → recompute → both → the optimizer on the host → 8-bit moments

The last two are last resorts: the one is slow, the other rounds. Where the job leaves the policy open, ranks
that run one schedule, which alone can shard all of a stage, come behind all others.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.job import (
    CodecSpec,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    Job,
    LinkSpec,
    PipelineStrategy,
    stage_order,
)
from isthmus.job.codec import BottleneckSpec, MemorySpec
from isthmus.plan.codecs import (
    Bounds,
    Choice,
    CodecLevel,
    Crossing,
    Loss,
    Pair,
    codec_levels,
    num_learners,
    options,
)
from isthmus.plan.codecs import Figures as LineFigures
from isthmus.plan.costs import (
    WIDE_BYTES,
    Arithmetic,
    CostSource,
    Figures,
    Mask,
    ModelCosts,
    PartSize,
    PlannedModel,
    Precision,
    Stages,
    Workload,
    check_length,
    nothing_measured,
    stream_bytes,
)
from isthmus.plan.job_facts import (
    OPEN,
    check_even,
    check_lists,
    check_lock_step,
    check_stacks,
    cloud_facts,
    line,
    links_along,
    num_frozen_layers,
    policy_of,
    run_order,
)
from isthmus.plan.memory import (
    Bottleneck,
    MemoryUse,
    OptimizerState,
    Sharding,
    StageOptions,
    bottleneck_costs,
    stages_memory,
)
from isthmus.plan.models import read_model
from isthmus.plan.scenario import HopLoad, Line, Policy, StageLoad
from isthmus.plan.times import CloudFacts, StageTable, coding_s, stage_table

_MAX_MICROBATCHES: Final = 4096
_EIGHT_BITS: Final = 8

Clouds = tuple[int, ...]
"""Clouds by their numbers in a study, in the order of their stages."""
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Memory options of all stages of a plan; later ones in the list of `memory_levels` cost more time."""

    recompute: bool = False
    offload_optimizer: bool = False
    optimizer_bits: int = 32
    sharding: Sharding = Sharding.NONE
    """What the ranks of a cloud shard, where the job leaves that open."""

    def sharding_at(self, cloud: CloudFacts) -> Sharding:
        """What the ranks of a cloud shard; a single rank shards nothing."""
        if cloud.num_ranks == 1:
            return Sharding.NONE
        return self.sharding if cloud.sharding is None else cloud.sharding

    def at(self, cloud: CloudFacts) -> StageOptions:
        """The options at one cloud; the memory of a CPU is that of its host."""
        is_small = self.optimizer_bits == _EIGHT_BITS
        sharding = self.sharding_at(cloud)
        return StageOptions(
            optimizer=OptimizerState.EIGHT_BIT if is_small else OptimizerState.FLOAT32,
            sharding=sharding,
            num_shards=1 if sharding is Sharding.NONE else cloud.num_ranks,
            offload_optimizer=self.offload_optimizer and not cloud.accelerator.is_cpu,
        )

    def words(self, shardings: Iterable[Sharding]) -> tuple[str, ...]:
        """The options as a user reads them, for stages that are sharded like this."""
        found = {
            "sharding inside the cloud": any(one is not Sharding.NONE for one in shardings),
            "recompute": self.recompute,
            "optimizer on the host": self.offload_optimizer,
            "8-bit optimizer": self.optimizer_bits == _EIGHT_BITS,
        }
        return tuple(word for word, is_on in found.items() if is_on)


def asked_options(job: Job) -> MemoryOptions:
    """The memory options that the job asks for, which are part of every level.

    `recompute = "auto"` asks for nothing: a run then recomputes no more than its memory needs.
    """
    return MemoryOptions(
        recompute=job.train.recompute is True,
        offload_optimizer=job.train.offload_optimizer,
        optimizer_bits=job.train.optimizer_bits,
    )


def memory_levels(job: Job, clouds: Sequence[CloudFacts], policy: Policy) -> tuple[MemoryOptions, ...]:
    """The memory options to try at these clouds, those that cost least first and last resorts last."""
    asked = asked_options(job)
    resorts = [asked]
    if not asked.offload_optimizer and asked.optimizer_bits != _EIGHT_BITS:
        resorts += [replace(asked, offload_optimizer=True), replace(asked, optimizer_bits=_EIGHT_BITS)]
    shardings = [Sharding.NONE]
    if any(cloud.num_ranks > 1 and cloud.sharding is None for cloud in clouds):
        shardings += [Sharding.OPTIMIZER, *([Sharding.FULL] if policy.keeps_order else [])]
    return tuple(
        replace(one, recompute=recompute, sharding=sharding)
        for one in resorts
        for recompute in ((True,) if asked.recompute else (False, True))
        for sharding in shardings
    )


_NOTHING_ASKED: Final = MemoryOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run a pipeline: micro-batches, and memory options, which cost time."""

    num_microbatches: int
    memory: MemoryOptions = _NOTHING_ASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step computes."""

    num_sequences: int
    sequence_length: int
    precision: Precision
    num_steps: int
    is_compiled: bool = False

    @property
    def num_tokens(self) -> int:
        """The tokens of a step at all clouds together."""
        return self.num_sequences * self.sequence_length

    def arithmetic(self, cloud: CloudFacts) -> Arithmetic:
        """How a cloud computes it."""
        return Arithmetic(precision=self.precision, on_accelerator=not cloud.accelerator.is_cpu)


def step_facts(job: Job) -> StepFacts:
    """A step of the job, which is whole sequences."""
    length, num_tokens = job.given_data.sequence_length, job.train.batch_tokens
    if num_tokens % length:
        near = max(1, round(num_tokens / length)) * length
        raise UserError(
            f"a batch of {num_tokens} tokens is no whole number of sequences of {length} tokens",
            hint=f"set train.batch_tokens to {near}",
        )
    return StepFacts(
        num_sequences=num_tokens // length,
        sequence_length=length,
        precision=Precision(job.train.precision),
        num_steps=job.train.steps,
        is_compiled=job.train.compile,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One direction of a link: its line, the width of what crosses, its price, the codecs it may have."""

    line: Line
    width: int
    bottleneck: Bottleneck | None
    usd_per_gib: float | None
    bounds: Bounds
    levels: Sequence[CodecLevel]
    ends_encoder: bool = False
    """Whether the encoder must end before it."""

    @property
    def allowed(self) -> Sequence[CodecLevel]:
        """The levels that cost no more quality than the job allows."""
        return [one for one in self.levels if one.loss <= self.bounds.loss]

    def lossiness(self, pair: Pair) -> int:
        """How many codec levels are less lossy; none where the job has its own codecs."""
        same = (one.forward == pair.forward or one.backward == pair.backward for one in self.levels)
        return max((number for number, is_same in enumerate(same) if is_same), default=0)

    def figures(self, interval_s: float = 0.0) -> LineFigures:
        """The line beside so much computing."""
        return LineFigures(interval_s=interval_s, down_bps=self.line.down_bps, up_bps=self.line.up_bps)

    def options(self, crossing: Crossing) -> list[Choice]:
        """All codecs that may be chosen."""
        return options(crossing, self.figures(), levels=self.levels, bounds=self.bounds)


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
        return _pipeline(self.job)

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
    def synchronous_levels(self) -> tuple[MemoryOptions, ...]:
        """The levels that shard all of a stage, where the job leaves the policy open."""
        if self.strategy.policy != OPEN or self.policy.keeps_order:
            return ()
        levels = memory_levels(self.job, self.clouds, Policy.LOCK_STEP)
        return tuple(one for one in levels if one.sharding is Sharding.FULL)

    def policy_under(self, memory: MemoryOptions) -> Policy:
        """The policy of the job, but for ranks that shard all of a stage, which run one schedule."""
        is_full = memory.sharding is Sharding.FULL and not self.policy.keeps_order
        return Policy.LOCK_STEP if is_full else self.policy

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
        own = memory.offload_optimizer, memory.optimizer_bits
        return own != (asked.offload_optimizer, asked.optimizer_bits)

    def microbatch_choices(self, policy: Policy | None = None) -> list[int]:
        """Numbers of micro-batches to try: divisors of a step's sequences, about two for each doubling.

        With fewer than the least number of ranks of a cloud, some ranks would have nothing to do. Multiples
        of what all ranks ask for go first, if there are any.
        """
        if self.strategy.microbatches is not None:
            return [self.strategy.microbatches]
        ranks = [cloud.num_ranks for cloud in self.clouds]
        every = divisors(self.step.num_sequences)
        if (policy or self.policy).keeps_order:
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
        """The times of a cloud for any of its possible stages."""

        def timed() -> StageTable:
            facts, costs = self.clouds[cloud], self.costs(cloud, setting)
            times = facts.times(costs, is_compiled=self.step.is_compiled)
            return stage_table(costs, times, setting.memory.at(facts), facts)

        return self.once(("table", cloud, setting), timed)

    def memory(self, cloud: int, setting: Setting) -> MemoryUse[Figures]:
        """The memory of a rank for any of its possible stages, with one micro-batch in flight."""
        costs, at_stage = self.costs(cloud, setting), setting.memory.at(self.clouds[cloud])
        # The largest halves of bottlenecks that it may have, whichever clouds are its neighbours.
        cuts = [(pair, one.bottleneck) for pair, one in self.links.items() if one.bottleneck is not None]
        up = _largest([one.up for pair, one in cuts if pair[1] == cloud])
        down = _largest([one.down for pair, one in cuts if pair[0] == cloud])

        def counted() -> MemoryUse[Figures]:
            every = Stages.every(costs.num_layers)
            ends = ((up, ~every.are_first), (down, ~every.are_last))
            halves = [(half, where) for half, where in ends if half is not None]
            return stages_memory(costs, every, window=1, options=at_stage, halves=halves)

        return self.once(("memory", costs.workload, at_stage, up, down), counted)

    def num_fitting(self, cloud: int, setting: Setting, *, codec_bytes: int = 0) -> Figures:
        """Micro-batches in flight that a rank has memory for at any stage, beside the state of its codecs."""

        def counted() -> Figures:
            room_bytes = self.clouds[cloud].room_bytes(self.memory_share) - codec_bytes
            found = self.memory(cloud, setting).num_fitting(room_bytes)
            return np.where(self._are_possible(cloud, setting), found, 0.0)

        return self.once(("fitting", cloud, setting, codec_bytes), counted)

    def needed_share(self, cloud: int, setting: Setting) -> Figures:
        """The share of a rank's memory that any stage takes at least; infinite where there can be none."""
        capacity = self.clouds[cloud].capacity_bytes
        found = self.memory(cloud, setting).least_bytes() / (capacity or math.inf)
        return np.where(self._are_possible(cloud, setting), found, np.inf)

    def _are_possible(self, cloud: int, setting: Setting) -> Mask:
        """Which stages have layers; none where ranks with one schedule had not as many micro-batches each."""
        facts = self.clouds[cloud]
        is_full = setting.memory.sharding_at(facts) is Sharding.FULL
        is_uneven = is_full and bool(setting.num_microbatches % facts.num_ranks)
        size = self.model.num_layers + 1
        return np.triu(np.ones((size, size), dtype=bool), k=1) & (not is_uneven)

    def stage_load(self, cloud: int, setting: Setting, layers: range) -> StageLoad:
        """The times of one stage."""
        forward_s, backward_s, update_s = (
            float(one[layers.start, layers.stop]) for one in self.table(cloud, setting)
        )
        return StageLoad(
            cloud=self.clouds[cloud].name,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
            num_ranks=self.clouds[cloud].num_ranks,
        )

    def can_cross(self, pair: tuple[int, int], setting: Setting, *, has_gradient: bool) -> bool:
        """Whether there can be a cut: bottlenecks must learn, and ranks with one schedule must be as many."""
        if self.links[pair].bottleneck is not None and not has_gradient:
            return False
        first, second = (self.clouds[one] for one in pair)
        is_full = any(setting.memory.sharding_at(one) is Sharding.FULL for one in self.clouds)
        return not is_full or first.num_ranks == second.num_ranks

    def once(self, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
        """Make something that depends on this study alone, the first time that it is asked for."""
        if key not in self._made:
            self._made[key] = make()
        return cast("Made", self._made[key])


@dataclass(frozen=True, eq=False, kw_only=True)
class CloudOrder:
    """Clouds as stages in this order under one setting, with the cuts that a beam found, if it did."""

    study: Study
    setting: Setting
    clouds: Clouds
    found_stops: NDArray[np.int64] | None = None

    @property
    def policy(self) -> Policy:
        """The policy that the stages run by."""
        return self.study.policy_under(self.setting.memory)

    @property
    def facts(self) -> tuple[CloudFacts, ...]:
        """The cloud of each stage."""
        return tuple(self.study.clouds[cloud] for cloud in self.clouds)

    @property
    def links(self) -> list[LinkFacts]:
        """The links along the pipeline."""
        return [self.study.links[pair] for pair in pairwise(self.clouds)]

    @property
    def memory_words(self) -> tuple[str, ...]:
        """Its memory options as a user reads them."""
        memory = self.setting.memory
        return memory.words(memory.sharding_at(one) for one in self.facts)

    @property
    def halves(self) -> tuple[tuple[PartSize, ...], ...]:
        """The halves of bottlenecks that each of these stages has."""
        cuts = [one.bottleneck for one in self.links]
        ups = [() if one is None else (one.up,) for one in cuts]
        downs = [() if one is None else (one.down,) for one in cuts]
        return tuple((*up, *down) for up, down in zip([(), *ups], [*downs, ()], strict=True))

    @property
    def num_warmup_steps(self) -> int:
        """Steps before the bottlenecks between these stages begin; 0 where there is none."""
        cuts = (one.bottleneck for one in self.links)
        longest = max((one.num_warmup_steps for one in cuts if one is not None), default=0)
        return min(longest, self.study.step.num_steps)

    def crossing(self, cut: int, *, has_gradient: bool, is_warmup: bool = False) -> Crossing:
        """What a micro-batch puts across the cut behind a stage, or did while bottlenecks had not begun."""
        link, step, number = self.links[cut], self.study.step, self.setting.num_microbatches
        return Crossing(
            num_rows=step.num_sequences // number * step.sequence_length,
            width=link.width if link.bottleneck is None or not is_warmup else link.bottleneck.hidden_width,
            element_bytes=self._element_bytes(cut, is_warmup=is_warmup),
            has_gradient=has_gradient,
            num_steps=step.num_steps,
            num_microbatches=number,
            num_learners=num_learners(*(one.num_ranks for one in self.facts[cut : cut + 2])),
        )

    def _element_bytes(self, cut: int, *, is_warmup: bool) -> int:
        """The bytes of a number that crosses a cut raw."""
        found, step, memory = WIDE_BYTES, self.study.step, self.setting.memory
        is_narrow: bool | None = None
        for (sender, receiver), link in zip(pairwise(self.facts), self.links[: cut + 1], strict=False):
            is_narrow = self.study.model.messages.leave_narrow(
                step.arithmetic(sender), is_sharded=memory.at(sender).is_sharded, arrived_narrow=is_narrow
            )
            found = stream_bytes(is_narrow=is_narrow)
            if link.bottleneck is not None and not is_warmup:
                # It is computed in float32; behind it hidden states have the type of the weights.
                found = WIDE_BYTES
                is_narrow = step.arithmetic(receiver).is_mixed and memory.at(receiver).is_sharded
        return found

    def hop(self, cut: int, crossing: Crossing, codecs: Pair, *, stop: int = 0) -> HopLoad:
        """What a micro-batch sends with these codecs over the cut behind so many layers.

        Over the run, versions of a basis are a part of it. The output of an encoder crosses as it is beside
        hidden states of the decoder, either way.
        """
        first, second = self.facts[cut : cut + 2]
        model, num_elements = self.study.model, crossing.num_rows * crossing.width
        is_in_decoder = 0 < model.num_encoder_layers < stop
        beside_bytes = crossing.num_rows * model.width * WIDE_BYTES if is_in_decoder else 0
        activation_bytes = codecs.forward_bytes(crossing) + round(codecs.basis_bytes(crossing)) + beside_bytes
        forward_bytes = model.messages.forward_bytes(activation_bytes, num_tokens=crossing.num_rows)
        backward_bytes, backward_s = 0, 0.0
        if crossing.has_gradient:
            backward_bytes = model.messages.backward_bytes(codecs.backward_bytes(crossing) + beside_bytes)
            backward_s = coding_s(
                codecs.backward, num_elements, backward_bytes, sender=second, receiver=first
            )
        return HopLoad(
            line=self.links[cut].line,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
            forward_coding_s=coding_s(
                codecs.forward, num_elements, forward_bytes, sender=first, receiver=second
            ),
            backward_coding_s=backward_s,
        )


def _largest(halves: Sequence[PartSize]) -> PartSize | None:
    return max(halves, key=lambda one: one.held_bytes, default=None)


def divisors(number: int) -> list[int]:
    """The divisors that may be a number of micro-batches, ascending."""
    return [one for one in range(1, min(number, _MAX_MICROBATCHES) + 1) if number % one == 0]


def _pipeline(job: Job) -> PipelineStrategy:
    return job.strategy if isinstance(job.strategy, PipelineStrategy) else PipelineStrategy(kind="pipeline")


def study(job: Job, *, source: CostSource = nothing_measured) -> Study:
    """Read a job, or say in one sentence what is missing or wrong."""
    model, step, own = read_model(job, source=source), step_facts(job), _pipeline(job)
    clouds = cloud_facts(job)
    if isinstance(job.strategy, PipelineStrategy):
        clouds = _ordered(clouds, job.strategy)
        _check_given(job, job.strategy, model, step, num_clouds=len(clouds))
    check_length(step.sequence_length, model.max_length)
    for link in job.link:
        link.boundary.check_width(model.width)
    if not isinstance(job.strategy, DataStrategy | GeneratorDiscriminatorStrategy):
        check_lock_step(job.used(), own)
        check_even(job.used(), num_sequences=step.num_sequences, sequence_length=step.sequence_length)
    policy = policy_of(job.used(), own)
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
    job: Job, strategy: PipelineStrategy, model: PlannedModel, step: StepFacts, *, num_clouds: int
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
    if strategy.layers is not None and model.num_encoder_layers:
        stops = (0, *accumulate(strategy.layers))
        check_stacks(
            [range(*ends) for ends in pairwise(stops)],
            [link.boundary for link in links_along(job, stage_order(job))],
            num_encoder_layers=model.num_encoder_layers,
            is_joined=model.is_joined,
            num_frozen=num_frozen_layers(job),
        )
    if model.cuts is not None and num_clouds > len(model.cuts) + 1:
        raise UserError(
            f"{num_clouds} clouds need {num_clouds - 1} cuts, and this model can be cut at {len(model.cuts)}",
            hint="name fewer clouds in strategy.clouds: the encoder in one, the decoder in another",
        )
    if num_clouds > model.num_layers:
        raise UserError(
            f"{num_clouds} clouds need {num_clouds} layers at least, and the model has {model.num_layers}",
            hint="name fewer clouds in strategy.clouds, or take a deeper model",
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
    forward, backward = (
        one if isinstance(one, CodecSpec) else None for one in (link.codec.forward, link.codec.backward)
    )
    return LinkFacts(
        line=line(link, first),
        width=width,
        bottleneck=bottleneck,
        usd_per_gib=link.usd_per_gib,
        bounds=Bounds(loss=Loss[job.limits.codec_loss.upper()], forward=forward, backward=backward),
        # The levels are those of steering, or a run would change codecs that were planned right.
        levels=codec_levels(width, shares_ids=not job.is_read_apart),
        ends_encoder=isinstance(link.boundary, MemorySpec),
    )
