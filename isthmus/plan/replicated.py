"""Plans in which clouds hold whole models: data parallel, and generators with a discriminator.

In data parallel each cloud owns a share of the parameters: the others send it their changes of that share, it
sums them and sends the sum back to all. That is a ring's traffic, `2(R-1)/R·N·bits` per cloud, and it goes
along the fewest links. It is sustainable up to 0.6 of a link: the one controlled measurement in the field
found reality up to 1.92 times worse than the formula. By that formula the best settings of each set of clouds
are chosen; their times are then those of the simulator, which runs the schedulers of workers.

Generators send token ids and labels to the discriminator, one way, so no cloud waits for a round trip.
"""

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product
from typing import Final, NamedTuple

from isthmus.errors import UserError
from isthmus.events import Span
from isthmus.job import DataStrategy, GeneratorDiscriminatorStrategy, Job, PipelineStrategy
from isthmus.plan.codecs import Loss
from isthmus.plan.costs import PlannedModel, Precision, Task
from isthmus.plan.data_times import DataTimes, are_alike, forecast_data
from isthmus.plan.feed_plan import FeedTimes, batch_bytes, forecast, shares
from isthmus.plan.membership import DataParallel
from isthmus.plan.memory import Memory, Sharding, stage_memory
from isthmus.plan.models import load_config, model_config, read_model, with_task
from isthmus.plan.plan import (
    Aim,
    DataSettings,
    Form,
    Plan,
    PlannedLink,
    PlannedStage,
    estimated,
    excess,
    planned_stage,
)
from isthmus.plan.scenario import Line, StageLoad
from isthmus.plan.search import fits, no_room
from isthmus.plan.study import Setting, Study, study
from isthmus.plan.times import CloudFacts
from isthmus.plan.types import Member
from isthmus.units import join_words

INNER_STEPS: Final = (30, 40, 50, 75, 100)
"""Streaming DiLoCo's range of inner steps; between 24 and 100 the loss hardly moves."""

_SUSTAINABLE_SHARE: Final = 0.6
_LAYERS_PER_FRAGMENT: Final = 3
# A fragment that comes later than this is stale.
MOST_DELAY_STEPS: Final = 4
SPARSE_BITS: Final = 0.223
# The best by formula, which are simulated.
_MAX_SIMULATED: Final = 8
# A run divides a rank's part of a step into as many micro-batches, if it can.
MOST_MICROBATCHES: Final = 4
_COMPUTE: Final = "compute of all clouds"
# Every subset of more clouds than this would be too many; then all that hold the model and are joined count.
_MAX_SUBSETS: Final = 6
# XLM-E's generator has 4 layers to the discriminator's 12, of the same width.
_GENERATOR_SHARE: Final = 3

_COPY, _GENERATOR, _DISCRIMINATOR = "the whole model", "a generator", "the discriminator"

_ONE_WAY: Final = "token ids and labels, one way"
# Below these a wait, or what a line costs, is not what limits a feed.
_SHORT_WAIT, _NEAR_ONE = 0.01, 0.99
# Quotients that are 1 but for their last bits leave no bubble.
_NO_BUBBLE: Final = 1e-9

Direction = tuple[int, int]
"""One direction of a link between two clouds, by their numbers in a study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A cloud with a whole model under a setting."""

    study: Study
    cloud: int
    setting: Setting
    holds: str

    @property
    def facts(self) -> CloudFacts:
        return self.study.clouds[self.cloud]

    @property
    def memory(self) -> Memory:
        """The memory of a rank."""
        costs, options = self.study.costs(self.cloud, self.setting), self.setting.memory.at(self.facts)
        return stage_memory(costs, range(costs.num_layers), window=1, options=options)

    @property
    def memory_words(self) -> tuple[str, ...]:
        memory = self.setting.memory
        return memory.words([memory.sharding_at(self.facts)])

    @property
    def has_room(self) -> bool:
        return bool(self.study.num_fitting(self.cloud, self.setting)[0, -1] >= 1)

    @property
    def load(self) -> StageLoad:
        """What a micro-batch takes a rank, and what ends a step."""
        return self.study.stage_load(self.cloud, self.setting, range(self.study.model.num_layers))

    def stage(self, busy_s: float = 0.0) -> PlannedStage:
        """Its part of a plan."""
        sharding = self.setting.memory.sharding_at(self.facts)
        return planned_stage(self.facts, self.holds, self.memory, sharding, busy_s=busy_s)


def whole_models(study: Study, holds: str) -> Mapping[int, list[Whole]]:
    """The clouds that hold the whole model with as few memory options as they can, by micro-batches."""
    found: dict[int, list[Whole]] = {}
    for number in study.microbatch_choices():
        for cloud in range(len(study.clouds)):
            first = next((one for one in _wholes(study, cloud, number, holds) if one.has_room), None)
            found.setdefault(number, []).extend([] if first is None else [first])
    return found


def _wholes(study: Study, cloud: int, number: int, holds: str) -> Iterator[Whole]:
    """The whole model on a cloud with each of the memory options."""
    for memory in study.levels:
        setting = Setting(num_microbatches=number, memory=memory)
        yield Whole(study=study, cloud=cloud, setting=setting, holds=holds)


def _smallest(study: Study, holds: str) -> list[Whole]:
    """Every cloud with the whole model in as little memory as it can be, whether there is so much or not."""
    found = []
    for cloud, facts in enumerate(study.clouds):
        for number in reversed(study.microbatch_choices()):
            # Ranks with one schedule have as many micro-batches each.
            even = [
                one
                for one in _wholes(study, cloud, number, holds)
                if one.setting.memory.sharding_at(facts) is not Sharding.FULL or number % facts.num_ranks == 0
            ]
            if even:
                found.append(min(even, key=lambda one: one.memory.total_bytes))
                break
    return found


def _lines(study: Study, clouds: Iterable[int]) -> dict[Direction, Line]:
    chosen = set(clouds)
    return {pair: one.line for pair, one in study.links.items() if chosen.issuperset(pair)}


def share_out(loads: Iterable[StageLoad], num_microbatches: int) -> float:
    """The least time in which the ranks of all clouds together get through a step's micro-batches."""
    every = list(loads)
    ends_s = sorted(
        {
            number * _pass_s(one) + one.update_s
            for one in every
            for number in range(1, math.ceil(num_microbatches / one.num_ranks) + 1)
        }
    )
    return ends_s[bisect_left(ends_s, num_microbatches, key=lambda by_s: _num_done(every, by_s))]


def _pass_s(load: StageLoad) -> float:
    return load.forward_s + load.backward_s


def _num_done(loads: Sequence[StageLoad], by_s: float) -> int:
    rounds = (max(0.0, by_s - one.update_s) / _pass_s(one) for one in loads)
    # A quotient that is whole but for its last bits is whole.
    return sum(one.num_ranks * math.floor(number + 1e-9) for one, number in zip(loads, rounds, strict=True))


def _plan(
    study: Study,
    form: Form,
    wholes: Mapping[Whole, float],
    links: Sequence[PlannedLink],
    *,
    step_s: float,
    limiting: str,
    note: str,
    settings: DataSettings | None = None,
    loss: Loss = Loss.NONE,
    spans: tuple[Span, ...] = (),
) -> Plan:
    """The plan of whole models that are busy for so long in a step."""
    stages = tuple(one.stage(busy_s) for one, busy_s in wholes.items())
    return Plan(
        form=form,
        stages=stages,
        links=tuple(links),
        memory_options=max(wholes, key=lambda one: len(one.memory_words)).setting.memory,
        estimate=estimated(
            stages,
            links,
            step_s=step_s,
            num_tokens=study.step.num_tokens,
            num_steps=study.step.num_steps,
            limiting=limiting,
            is_simulated=bool(spans),
        ),
        reason="",
        spans=spans,
        settings=settings,
        loss=loss,
        notes=(note,),
    )


def _link(
    study: Study, direction: Direction, down_bytes: float, up_bytes: float, reason: str = ""
) -> PlannedLink:
    first, second = (study.clouds[one].name for one in direction)
    return PlannedLink(
        between=(first, second),
        down_bytes=down_bytes,
        up_bytes=up_bytes,
        usd_per_gib=study.links[direction].usd_per_gib,
        reason=reason,
    )


# Data parallel.


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCosts:
    """What a step takes and sends; bytes by direction of a link, in a step on average."""

    compute_s: float
    latency_s: float
    bandwidth_s: float
    step_bytes: Mapping[Direction, float]
    busiest: Direction | None
    delay_steps: int

    @property
    def step_s(self) -> float:
        return self.compute_s + self.latency_s + self.bandwidth_s


def data_plans(study: Study) -> list[Plan]:
    """Copies of the model on two clouds or more, synchronised as often as each choice says.

    Where there is none, and the job asks for no other form, why.
    """
    asked = study.job.strategy if isinstance(study.job.strategy, DataStrategy) else None
    given, of_clouds = asked or DataStrategy(kind="data"), defaultdict[tuple[str, ...], list[_Bounded]](list)
    for one in _bounded(study, given):
        of_clouds[one.plan.clouds].append(one)
    if asked is not None and not of_clouds:
        raise _no_data(study)
    bests = sorted((_best(every, study.job) for every in of_clouds.values()), key=_bound(study.job))
    return [_simulated(study, one, given) for one in bests[:_MAX_SIMULATED]]


class _Bounded(NamedTuple):
    """Copies of the model, and their plan by a formula, which chooses what is simulated."""

    wholes: Sequence[Whole]
    plan: Plan
    delay_steps: int


def _bound(job: Job) -> Callable[[_Bounded], tuple[float, ...]]:
    aim = Aim.of(job)
    return lambda one: (excess(one.plan, job), *aim.key(*one.plan.totals))


def _best(every: Sequence[_Bounded], job: Job) -> _Bounded:
    """The best of the same clouds, or one nearly as good that is more exact."""
    least = min(excess(one.plan, job) for one in every)
    picked = Aim.of(job).pick([one.plan for one in every if excess(one.plan, job) <= least])
    return next(one for one in every if one.plan is picked)


def _bounded(study: Study, given: DataStrategy) -> Iterator[_Bounded]:
    syncs = list(sync_choices(given, num_layers=study.model.num_layers))
    for wholes in whole_models(study, _COPY).values():
        for chosen in _joined(study, wholes):
            for sync in syncs:
                plan, costs = _data_plan(study, chosen, sync)
                yield _Bounded(chosen, plan, costs.delay_steps)
                # Rarer ones would only cost quality; but traffic has a price, and under a deadline the
                # cheapest is wanted.
                limits, is_overlapped = study.job.limits, plan.estimate.bubble < _NO_BUBBLE
                if is_overlapped and limits.deadline_s is None and not excess(plan, study.job):
                    break


def sync_choices(given: DataStrategy, *, num_layers: int) -> Iterator[DataSettings]:
    """How often and how exactly to synchronise, the most exact first, within what the job says."""
    fragments = given.fragments or math.ceil(num_layers / _LAYERS_PER_FRAGMENT) + 2
    for steps in (1, *INNER_STEPS) if given.inner_steps is None else (given.inner_steps,):
        default_bits = (32, 16) if steps == 1 else (8, 4)
        for bits in default_bits if given.bits is None else (given.bits,):
            number = 1 if steps == 1 else min(fragments, steps)
            yield DataSettings(inner_steps=steps, num_fragments=number, bits=bits)


def _joined(study: Study, wholes: Sequence[Whole]) -> Iterator[Sequence[Whole]]:
    """Sets of two clouds or more that links join: all there are, or of many clouds the largest."""
    if len(wholes) <= _MAX_SUBSETS:
        for size in range(2, len(wholes) + 1):
            for chosen in combinations(wholes, size):
                lines = _lines(study, (one.cloud for one in chosen))
                if all(path(chosen[0].cloud, one.cloud, lines) for one in chosen):
                    yield chosen
        return
    left, lines = list(wholes), _lines(study, (one.cloud for one in wholes))
    while left:
        joined = [one for one in left if path(left[0].cloud, one.cloud, lines)]
        left = [one for one in left if one not in joined]
        if len(joined) > 1:
            yield joined


def _simulated(study: Study, bounded: _Bounded, given: DataStrategy) -> Plan:
    """The plan, with the time of steps that the simulator runs by the schedulers of workers."""
    wholes, plan, sync = bounded.wholes, bounded.plan, bounded.plan.settings
    if not isinstance(sync, DataSettings):
        raise TypeError("data parallel without its settings")
    names, count = [one.facts.name for one in wholes], len(wholes)
    number = wholes[0].setting.num_microbatches
    passes = [math.ceil(number / (count * one.load.num_ranks)) for one in wholes]
    gathers, own = given.how == "sparse", given.microbatches or MOST_MICROBATCHES
    spec = DataParallel(
        clouds=tuple((Member(name),) for name in names),
        num_steps=1,
        num_microbatches=own,
        sync_every=sync.inner_steps,
        num_fragments=sync.num_fragments,
        delay_steps=min(bounded.delay_steps, sync.inner_steps - 1, MOST_DELAY_STEPS),
        quorum=count // 2 + 1,
        grace_s=given.grace_s,
        gathers=gathers,
        adapts=not are_alike(study.job.cloud_named(name) for name in names),
        wait_s=math.inf,
    )
    times = DataTimes(
        forward_s=tuple(many * one.load.forward_s / own for many, one in zip(passes, wholes, strict=True)),
        backward_s=tuple(many * one.load.backward_s / own for many, one in zip(passes, wholes, strict=True)),
        update_s=max(one.load.update_s for one in wholes),
        num_parameters=_num_trained(study, wholes),
        delta_bits=SPARSE_BITS if gathers else coded_bits(sync.bits),
    )
    numbers = [one.cloud for one in wholes]
    lines = {
        (study.clouds[first].name, study.clouds[second].name): line
        for (first, second), line in _lines(study, numbers).items()
        if first < second
    }
    found = forecast_data(spec, times, lines)
    is_free = found.step_s < found.free_step_s / _NEAR_ONE
    busy_s = [own * sum(one) + times.update_s for one in zip(times.forward_s, times.backward_s, strict=True)]
    limiting = plan.estimate.limiting
    if is_free:
        limiting = _COMPUTE
    elif limiting == _COMPUTE:
        farthest, _ = max(lines.items(), key=lambda one: one[1].latency_s)
        limiting = f"round trip of {'-'.join(farthest)}"
    stages = tuple(one.stage(min(s, found.step_s)) for one, s in zip(wholes, busy_s, strict=True))
    estimate = estimated(
        stages,
        plan.links,
        step_s=found.step_s,
        num_tokens=study.step.num_tokens,
        num_steps=study.step.num_steps,
        limiting=limiting,
        is_simulated=True,
    )
    return replace(plan, stages=stages, estimate=estimate, spans=found.spans)


def _num_trained(study: Study, wholes: Sequence[Whole]) -> int:
    first = wholes[0]
    return study.costs(first.cloud, first.setting).num_trained(range(study.model.num_layers))


def coded_bits(bits: int) -> float:
    """The bits of a number on the line; integers have a scale of 16 bits for 64 of them."""
    return bits + (0.25 if bits < 16 else 0.0)


def _data_plan(study: Study, wholes: Sequence[Whole], sync: DataSettings) -> tuple[Plan, SyncCosts]:
    lines, first = _lines(study, (one.cloud for one in wholes)), wholes[0]
    costs = sync_costs(
        {one.cloud: one.load for one in wholes},
        lines,
        sync,
        num_parameters=_num_trained(study, wholes),
        num_microbatches=first.setting.num_microbatches,
    )
    sent = costs.step_bytes
    gains_s = {"bandwidth": costs.bandwidth_s, "round trip": costs.latency_s}
    # Beside rare exchanges all is computed that can be.
    gains_s["compute"] = costs.compute_s if sync.inner_steps == 1 or not costs.bandwidth_s else 0.0
    most = max(gains_s, key=lambda one: gains_s[one])
    limiting = _COMPUTE
    if most != "compute" and costs.busiest is not None:
        limiting = f"{most} of {'-'.join(study.clouds[one].name for one in costs.busiest)}"
    plan = _plan(
        study,
        Form.DATA,
        dict.fromkeys(wholes, costs.compute_s),
        [_link(study, one, sent[one], sent[one[::-1]]) for one in lines if one[0] < one[1]],
        step_s=costs.step_s,
        limiting=limiting,
        note=sync_note(len(wholes), sync, costs.delay_steps),
        settings=replace(sync, delay_steps=costs.delay_steps),
        loss=sync_loss(len(wholes), sync),
    )
    return plan, costs


def sync_costs(
    loads: Mapping[int, StageLoad],
    lines: Mapping[Direction, Line],
    sync: DataSettings,
    *,
    num_parameters: int,
    num_microbatches: int,
) -> SyncCosts:
    """What a step comes to; every cloud must reach every other over the lines."""
    compute_s = share_out(loads.values(), num_microbatches)
    sync_bytes = sync_traffic(list(loads), lines, num_bytes=num_parameters * sync.bits / 8)
    on_line_s = {one: 8 * sync_bytes[one] / lines[one].down_bps for one in lines}
    busiest = max(on_line_s, key=lambda one: on_line_s[one], default=None)
    line_s = on_line_s[busiest] if busiest is not None else 0.0
    rtt_s = max((2 * line.latency_s for line in lines.values()), default=0.0)
    latency_s, bandwidth_s, delay_steps = 2 * rtt_s, line_s, 0
    if sync.inner_steps > 1:
        sustained_s = line_s / (sync.inner_steps * _SUSTAINABLE_SHARE)
        latency_s, bandwidth_s = 0.0, max(0.0, sustained_s - compute_s)
        delay_steps = math.ceil((line_s / sync.num_fragments + rtt_s) / (compute_s + bandwidth_s))
    return SyncCosts(
        compute_s=compute_s,
        latency_s=latency_s,
        bandwidth_s=bandwidth_s,
        step_bytes={one: value / sync.inner_steps for one, value in sync_bytes.items()},
        busiest=busiest,
        delay_steps=delay_steps,
    )


def sync_traffic(
    clouds: Sequence[int], lines: Mapping[Direction, Line], *, num_bytes: float
) -> dict[Direction, float]:
    """Bytes in each direction of each link for one synchronisation of so many bytes of parameters."""
    traffic = dict.fromkeys(lines, 0.0)
    for first, second in permutations(clouds, 2):
        for direction in pairwise(path(first, second, lines)):
            traffic[direction] += 2 * num_bytes / len(clouds)
    return traffic


def path(first: int, second: int, lines: Mapping[Direction, Line]) -> tuple[int, ...]:
    """The clouds on the way over the fewest links, the widest first; empty where there is no way."""
    ways: deque[tuple[int, ...]] = deque([(first,)])
    seen = {first}
    widest = sorted(lines, key=lambda one: -min(lines[one].down_bps, lines[one].up_bps))
    while ways:
        way = ways.popleft()
        if way[-1] == second:
            return way
        for here, there in widest:
            if here == way[-1] and there not in seen:
                seen.add(there)
                ways.append((*way, there))
    return ()


def sync_loss(num_clouds: int, sync: DataSettings) -> Loss:
    """What rare or coarse synchronisation costs in quality."""
    if sync.inner_steps == 1:
        return Loss.NONE if sync.bits > 16 else Loss.SLIGHT
    return Loss.SLIGHT if num_clouds <= 2 and sync.bits >= 4 else Loss.SOME


def sync_note(num_clouds: int, sync: DataSettings, delay_steps: int) -> str:
    """What a user should expect of the loss."""
    if sync.inner_steps == 1:
        return "every step averages the gradients of all clouds, as one cloud would"
    # Streaming DiLoCo at 35-300 M parameters.
    expected = "0.3–0.6 %" if num_clouds <= 2 else "1.4–2.6 %"
    note = f"expect a loss {expected} higher than with synchronous steps, at published settings"
    if delay_steps > MOST_DELAY_STEPS:
        note += f"; fragments arrive {delay_steps} steps late, and only {MOST_DELAY_STEPS} are published"
    return note


def _no_data(study: Study) -> UserError:
    if len(study.clouds) < 2:
        return UserError(
            "data parallel between clouds needs two clouds", hint="add a [[cloud]] and a [[link]]"
        )
    way = 'set strategy.kind to "pipeline", which gives each cloud some of the layers'
    return _no_pair(
        study,
        lambda one: list(combinations(_smallest(one, _COPY), 2)),
        claim="the whole model fits on no two linked clouds",
        ways=[way] if _fits_as_pipeline(study) else [],
    )


def _fits_as_pipeline(ready: Study) -> bool:
    try:
        job = ready.job.model_copy(update={"strategy": PipelineStrategy(kind="pipeline")})
        return fits(study(job, source=ready.source))
    except UserError:
        # There may be more clouds than layers.
        return False


# Generators and a discriminator.


def generator_plans(study: Study, strategy: GeneratorDiscriminatorStrategy) -> list[Plan]:
    """One for each cloud that may be the discriminator and each number of micro-batches, or why none is."""
    if len(study.clouds) < 2:
        raise UserError("generator and discriminator need two clouds", hint="add a [[cloud]] and a [[link]]")
    models = small, large = _models(study, strategy)
    generators = whole_models(study.with_model(small), _GENERATOR)
    judges = whole_models(study.with_model(large), _DISCRIMINATOR)
    plans = []
    for number, candidates in judges.items():
        for judge in candidates:
            joined = [one for one in generators[number] if (one.cloud, judge.cloud) in study.links]
            if joined and judge.facts.name in _judge_names(study.job, strategy):
                plans.append(_generator_plan(study, strategy, joined, judge, small.vocabulary_size))
    if not plans:
        raise _no_generator(study, strategy, models)
    return plans


def _judge_names(job: Job, strategy: GeneratorDiscriminatorStrategy) -> list[str]:
    """The clouds that may be the discriminator."""
    given = strategy.discriminator_cloud
    return [cloud.name for cloud in job.cloud] if given is None else [job.cloud_named(given).name]


def _models(study: Study, strategy: GeneratorDiscriminatorStrategy) -> tuple[PlannedModel, PlannedModel]:
    """A generator and the discriminator."""
    judging, filling = (with_task(study.job, one) for one in (Task.TOKEN_CLASSIFICATION, Task.MASKED_LM))
    config, given = model_config(study.job), strategy.generator
    large = read_model(judging, config, source=study.source)
    if given is not None:
        vocabulary = {key: one for key, one in config.items() if key == "vocab_size"}
        own = (
            load_config(given.source) if given.source is not None else {**vocabulary, **(given.config or {})}
        )
    else:
        own = {**config, "num_hidden_layers": max(1, large.num_layers // _GENERATOR_SHARE)}
    return read_model(filling, own, source=study.source), large


def _generator_plan(
    study: Study,
    strategy: GeneratorDiscriminatorStrategy,
    generators: Sequence[Whole],
    judge: Whole,
    vocabulary: int,
) -> Plan:
    """What some simulated steps of these clouds take, by the scheduler that they run by."""
    clouds = [one.facts.name for one in (judge, *generators)]
    number, name = judge.setting.num_microbatches, judge.facts.name
    batch_size = math.ceil(study.step.num_sequences / strategy.batches)
    size = batch_bytes(
        num_sequences=batch_size, sequence_length=study.step.sequence_length, vocabulary_size=vocabulary
    )
    update_s = judge.load.update_s
    judge_s = share_out([judge.load], number)
    times = FeedTimes(
        generate_s=tuple(share_out([one.load], math.ceil(number / strategy.batches)) for one in generators),
        discriminate_s=(judge_s - update_s) / strategy.batches,
        update_s=update_s,
        batch_tokens=batch_size * study.step.sequence_length,
        batch_bytes=size,
    )
    lines = {(one.facts.name, name): study.links[one.cloud, judge.cloud].line for one in generators}
    found = forecast(strategy, clouds, times, lines)
    busy_s = {
        one: strategy.batches * share * batch_s
        for one, share, batch_s in zip(generators, shares(strategy, clouds), times.generate_s, strict=True)
    }
    busy_s[judge] = judge_s
    limiting = (
        f"compute of {name}" if found.waited_s < _SHORT_WAIT * found.step_s else "compute of the generators"
    )
    ratio, waits = found.throughput_ratio, found.waited_s / found.step_s
    return _plan(
        study,
        Form.GENERATOR_DISCRIMINATOR,
        busy_s,
        [
            _link(study, (one.cloud, judge.cloud), share * strategy.batches * size, 0.0, _ONE_WAY)
            for one, share in zip(generators, shares(strategy, clouds), strict=True)
        ],
        step_s=found.step_s,
        limiting=limiting if ratio > _NEAR_ONE else f"bandwidth towards {name}",
        note=f"generators run ahead of the discriminator, which waits for batches {waits:.1%} of the time; "
        f"the throughput is {ratio:.1%} of that over lines without limits",
        spans=found.spans,
    )


def _no_generator(
    study: Study, strategy: GeneratorDiscriminatorStrategy, models: tuple[PlannedModel, PlannedModel]
) -> UserError:
    def pairs_of(ready: Study, names: Sequence[str]) -> list[tuple[Whole, Whole]]:
        small, large = (ready.with_model(one) for one in models)
        every = product(_smallest(large, _DISCRIMINATOR), _smallest(small, _GENERATOR))
        return [
            (judge, one) for judge, one in every if judge.facts.name in names and one.cloud != judge.cloud
        ]

    given = strategy.discriminator_cloud
    claim, ways = "discriminator and generator fit on no two linked clouds", []
    if given is not None:
        claim = f"nothing fits with the discriminator in {given!r}"
        better = _linked_fit(study, pairs_of(study, [one.name for one in study.clouds]))
        ways = [f'set strategy.discriminator_cloud to "{better[0].facts.name}"'] if better else []
    names = _judge_names(study.job, strategy)
    return _no_pair(study, lambda one: pairs_of(one, names), claim=claim, ways=ways)


# What is in the way where no two linked clouds have room.


def _linked_fit(study: Study, pairs: Iterable[tuple[Whole, Whole]]) -> tuple[Whole, Whole] | None:
    """The first two linked clouds that both have room."""
    return next((pair for pair in pairs if _is_linked(study, pair) and _have_room(pair)), None)


def _is_linked(study: Study, pair: tuple[Whole, Whole]) -> bool:
    return (pair[0].cloud, pair[1].cloud) in study.links


def _have_room(pair: tuple[Whole, Whole]) -> bool:
    return all(one.has_room for one in pair)


def _no_pair(
    study: Study,
    pairs_of: Callable[[Study], Sequence[tuple[Whole, Whole]]],
    *,
    claim: str,
    ways: Sequence[str],
) -> UserError:
    """What is in the way where no linked pair fits; `ways` are further ones out of it, known to work."""
    pairs, found = pairs_of(study), list(ways)
    if study.step.precision is Precision.FLOAT32:
        narrow = study.but(step=replace(study.step, precision=Precision.BFLOAT16))
        if _linked_fit(narrow, pairs_of(narrow)):
            found.append('set train.precision to "bfloat16"')
    cause = None
    if apart := next((pair for pair in pairs if _have_room(pair)), None):
        names = [one.facts.name for one in apart]
        cause = f"{join_words([repr(one) for one in names])} have room, but no link joins them"
        listens = any(study.job.cloud_named(name).listen for name in names)
        found.append(
            f'add a [[link]] with between = ["{names[0]}", "{names[1]}"], bandwidth and rtt'
            + ("" if listens else f", and set cloud.{names[0]}.listen")
        )
    fittings = [
        [(one.stage(), one.memory_words) for one in pair] for pair in pairs if _is_linked(study, pair)
    ]
    nearest = min(
        fittings, key=lambda fit: sorted((one.memory_share for one, _ in fit), reverse=True), default=None
    )
    if nearest is None and cause is None:
        cause = "ranks in lock-step cannot have as many micro-batches each"
        return UserError(
            f"{claim}: {cause}, however much memory there is",
            hint="; or ".join([*found, 'set cloud.NAME.sharding to "auto" where it is "full"']),
        )
    return no_room(study, nearest or (), claim=claim, cause=cause, ways=found)
