"""Pipelines that might be the plan: from clouds, cuts and codecs to a scenario, simulated, and to a plan."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from isthmus.job import parse_codec
from isthmus.plan.codecs import (
    Bounds,
    Choice,
    CodecLevel,
    Crossing,
    Figures,
    Loss,
    Pair,
    choose,
    expected_loss,
    explained,
    options,
)
from isthmus.plan.job_facts import CloudFacts
from isthmus.plan.memory import HalfCosts
from isthmus.plan.plan import (
    Form,
    PipelineSettings,
    Plan,
    PlannedLink,
    PlannedStage,
    Warmup,
    estimated,
    estimated_warmup,
    idle_only,
    memory_parts,
)
from isthmus.plan.scenario import (
    Caps,
    HopLoad,
    Line,
    Policy,
    Scenario,
    StageLoad,
    at_worst,
    expected,
    next_windows,
    window_bounds,
)
from isthmus.plan.stage_tables import ModelSupply, Setting, codec_state_bytes
from isthmus.plan.step_time import SteadyStep, simulate_step
from isthmus.plan.walks import Constraints

_RAW: Final = Pair(forward=parse_codec("raw"), backward=parse_codec("raw"))
_CLOSE: Final = 0.01
_THRIFTY: Final = "fewer bytes to pay for than time alone asks for"
_HURRIED: Final = "faster than milder ones, since too few micro-batches are in flight to overlap the line"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """What the job says of a link: its price, and the codecs it may have."""

    between: tuple[str, str]
    usd_per_gib: float | None
    bounds: Bounds
    rungs: Sequence[CodecLevel]

    @property
    def num_thrifty(self) -> int:
        """How many levels may be left out to save money: none where nothing is paid, and never the last."""
        return max(0, len(self.allowed) - 1) if self.usd_per_gib else 0

    def rungs_from(self, first: int) -> Sequence[CodecLevel]:
        """The levels without so many of the least lossy, as far as may be."""
        first = min(first, self.num_thrifty)
        return self.allowed[first:] if first else self.rungs

    def rungs_between(self, first: int, last: int | None) -> Sequence[CodecLevel]:
        """The levels from one to another, as far as there are any."""
        if last is None or not self.allowed:
            return self.rungs
        most = len(self.allowed) - 1
        return self.allowed[min(first, most) : min(last, most) + 1]

    @property
    def allowed(self) -> Sequence[CodecLevel]:
        """The levels that cost no more quality than the job allows."""
        return [one for one in self.rungs if one.loss <= self.bounds.loss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a pipeline must keep to, beside its supply."""

    links: dict[frozenset[str], LinkTerms]
    constraints: Constraints
    policy: Policy
    max_in_flight: Caps | None
    windows: tuple[int, ...] | None
    counts_money: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Clouds as stages in order, where the layers of each end, and the setting that they run under."""

    supply: ModelSupply
    terms: Terms
    setting: Setting
    clouds: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage."""
        return tuple(range(start, stop) for start, stop in pairwise((0, *self.stops)))

    @property
    def facts(self) -> tuple[CloudFacts, ...]:
        """The cloud of each stage."""
        return tuple(self.supply.clouds[cloud] for cloud in self.clouds)

    @property
    def link_terms(self) -> list[LinkTerms]:
        """What the job says of each link along the pipeline."""
        return [self.terms.links[frozenset(one.name for one in pair)] for pair in pairwise(self.facts)]

    def stage_loads(self) -> tuple[StageLoad, ...]:
        """The times of each stage."""
        return tuple(
            self.supply.stage_load(cloud, self.setting, layers)
            for cloud, layers in zip(self.clouds, self.layers, strict=True)
        )

    def crossings(self, supply: ModelSupply) -> Iterator[tuple[tuple[int, int], Crossing]]:
        """What a micro-batch puts across each cut; nothing goes back to frozen layers."""
        element_bytes = supply.element_bytes(self.clouds, self.setting)
        for pair, stop, num_bytes in zip(pairwise(self.clouds), self.stops, element_bytes, strict=False):
            has_gradient = stop > supply.num_frozen
            yield (
                pair,
                supply.crossing(pair, self.setting, has_gradient=has_gradient, element_bytes=num_bytes),
            )

    def codec_bytes(self, codecs: Sequence[Pair]) -> list[int]:
        """What the codecs of its cuts keep at a rank of each stage."""
        found = [0] * len(self.clouds)
        for cut, ((_, crossing), pair) in enumerate(zip(self.crossings(self.supply), codecs, strict=True)):
            num_wires = crossing.num_learners
            for stage, num_bytes in zip((cut, cut + 1), codec_state_bytes(pair, crossing), strict=True):
                found[stage] += num_bytes * -(-num_wires // self.facts[stage].num_ranks)
        return found

    def held(self, codec_bytes: Sequence[int]) -> list[float]:
        """The most that a rank of each stage may keep in flight."""
        held = [
            float(
                self.supply.num_fitting(cloud, self.setting, codec_bytes=one)[layers.start, layers.stop]
                if one
                else self.supply.table(cloud, self.setting).held[layers.start, layers.stop]
            )
            for cloud, layers, one in zip(self.clouds, self.layers, codec_bytes, strict=True)
        ]
        given = self.terms.max_in_flight
        caps = given if isinstance(given, tuple) else (given,) * len(held)
        return [min(one, cap or one) for one, cap in zip(held, caps, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A partition with codecs: all that its time depends on."""

    partition: Partition
    choices: tuple[Choice, ...]
    scenario: Scenario
    num_warmup_steps: int = 0
    warmup: Scenario | None = None
    """The same before bottlenecks begin."""
    why: str | None = None
    """Why its codecs are not those that computing overlaps."""
    codec_bytes: tuple[int, ...] = ()
    """What they keep at a rank of each stage."""

    @property
    def loss(self) -> Loss:
        """Of its codecs."""
        return max((one.loss for one in self.choices), default=Loss.NONE)

    @property
    def mildness(self) -> tuple[int, float]:
        """How much its codecs cost, by class and by what was measured, summed over its cuts."""
        return self.loss, expected_loss(one.pair for one in self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How to choose the codecs of all links: beside so much computing, from these levels on, and why."""

    interval_s: float
    tolerance: float | None = None
    first: int = 0
    last: int | None = None
    is_thrifty: bool = False
    why: str | None = None

    def choice(self, link: LinkTerms, crossing: Crossing, line: Line) -> Choice:
        """The codecs of one link."""
        figures = Figures(interval_s=self.interval_s, down_bps=line.down_bps, up_bps=line.up_bps)
        rungs = link.rungs_from(self.first) if self.is_thrifty else link.rungs_between(self.first, self.last)
        if self.tolerance is None:
            return choose(crossing, figures, levels=rungs, bounds=link.bounds)
        return choose(crossing, figures, levels=rungs, bounds=link.bounds, tolerance=self.tolerance)


def candidates(partition: Partition) -> list[Candidate]:
    """The partition with the codecs that are worth a simulation.

    These are the least lossy codecs by which computing overlaps each line, those with which a step is as fast
    as with any, the same level on all links, and where traffic is paid for, codecs with fewer bytes.
    """
    found: dict[tuple[Pair, ...], Candidate | None] = {}
    for way in _ways(partition):
        links = zip(partition.crossings(partition.supply), partition.link_terms, strict=True)
        choices = tuple(
            way.choice(link, crossing, partition.supply.links[pair].line) for (pair, crossing), link in links
        )
        pairs = tuple(one.pair for one in choices)
        if pairs not in found:
            found[pairs] = _candidate(partition, choices, way.why)
    return [one for one in found.values() if one is not None]


def neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """The same with other codecs on one link: a schedule may be faster with a slower message."""
    partition = candidate.partition
    links = zip(partition.crossings(partition.supply), partition.link_terms, strict=True)
    for number, ((pair, crossing), link) in enumerate(links):
        line = partition.supply.links[pair].line
        figures = Figures(interval_s=0.0, down_bps=line.down_bps, up_bps=line.up_bps)
        allowed = options(crossing, figures, levels=link.rungs, bounds=link.bounds)
        for one in allowed:
            if one.pair != candidate.choices[number].pair:
                other = explained(one, allowed, link.bounds)
                choices = (*candidate.choices[:number], other, *candidate.choices[number + 1 :])
                if (changed := _candidate(partition, choices, _HURRIED)) is not None:
                    yield changed


def _ways(partition: Partition) -> Iterator[_Way]:
    interval_s = max(stage.interval_s for stage in partition.stage_loads())
    yield _Way(interval_s=interval_s)
    if not partition.link_terms:
        return
    if partition.terms.counts_money:
        for number in range(1, 1 + max(one.num_thrifty for one in partition.link_terms)):
            yield _Way(interval_s=interval_s, first=number, is_thrifty=True, why=_THRIFTY)
    yield _Way(interval_s=interval_s, tolerance=_CLOSE, why=_HURRIED)
    for number in range(max(len(one.allowed) for one in partition.link_terms)):
        yield _Way(interval_s=0.0, first=number, last=number, why=_HURRIED)


def _candidate(partition: Partition, choices: tuple[Choice, ...], why: str | None) -> Candidate | None:
    """A partition with these codecs, None where memory does not hold what they keep."""
    supply, terms = partition.supply, partition.terms
    codec_bytes = partition.codec_bytes([one.pair for one in choices])
    held = partition.held(codec_bytes)
    if min(held) < 1:
        return None
    stages = partition.stage_loads()
    crossings = list(partition.crossings(supply))
    hops = tuple(
        supply.coded_hop(pair, crossing, choice.pair)
        for (pair, crossing), choice in zip(crossings, choices, strict=True)
    )
    trained = (number for number, stop in enumerate(partition.stops) if stop > supply.num_frozen)
    scenario = Scenario(
        stages=stages,
        hops=hops,
        num_microbatches=partition.setting.num_microbatches,
        policy=terms.policy,
        first_trained=next(trained, len(stages) - 1),
    )
    num_warmup_steps = supply.num_warmup_steps(partition.clouds)
    before = replace(scenario, hops=_raw_hops(partition, choices)) if num_warmup_steps else scenario
    wanted = terms.windows or next_windows(scenario, expected(scenario))
    caps = _caps({scenario, before}, wanted, held)
    fixed = None if terms.windows is None else _given_windows(scenario, terms.windows, held)
    return Candidate(
        partition=partition,
        choices=choices,
        scenario=replace(scenario, windows=fixed, max_in_flight=caps),
        num_warmup_steps=num_warmup_steps,
        warmup=replace(before, windows=fixed, max_in_flight=caps) if num_warmup_steps else None,
        why=why,
        codec_bytes=tuple(codec_bytes),
    )


def _raw_hops(partition: Partition, choices: Sequence[Choice]) -> tuple[HopLoad, ...]:
    """What crosses before bottlenecks begin: raw hidden states there, and elsewhere as chosen."""
    before, links = partition.supply.before_bottlenecks, partition.supply.links
    return tuple(
        before.coded_hop(pair, crossing, choice.pair if links[pair].bottleneck is None else _RAW)
        for (pair, crossing), choice in zip(partition.crossings(before), choices, strict=True)
    )


def _caps(scenarios: Collection[Scenario], wanted: Sequence[int], held: Sequence[float]) -> Caps | None:
    """What each stage has memory for, one number where all have the same, and None where that binds no stage.

    Workers whose messages meet on the line may ask for more than is expected, and are bound then too; so are
    those of a warm-up.
    """
    most = [next_windows(one, at_worst(one)) for one in scenarios]
    asked = [max(sizes) for sizes in zip(wanted, *most, strict=True)]
    if all(one >= size for one, size in zip(held, asked, strict=True)):
        return None
    number = max(one.num_microbatches for one in scenarios)
    caps = tuple(int(max(1, min(one, number))) for one in held)
    return caps if len(set(caps)) > 1 else caps[0]


def _given_windows(scenario: Scenario, given: Sequence[int], held: Sequence[float]) -> tuple[int, ...]:
    """The job's windows, as far as memory and the stages before allow."""
    sizes: list[int] = []
    for size, most in zip(given, held, strict=True):
        bounds = window_bounds(scenario, sizes) if scenario.policy.keeps_order else []
        sizes.append(int(max(1, min(size, most, *bounds))))
    return tuple(sizes)


def simulated(candidate: Candidate) -> tuple[Plan, int]:
    """The plan of a candidate with the simulator's figures, and how many passes that took."""
    timed = simulate_step(candidate.scenario)
    first = None if candidate.warmup is None else simulate_step(candidate.warmup)
    partition, step = candidate.partition, candidate.partition.supply.step
    level = partition.supply.levels[partition.setting.level]
    stages = planned_stages(candidate, timed, first)
    links = tuple(_links(candidate))
    plan = Plan(
        form=Form.PIPELINE if len(stages) > 1 else Form.ALONE,
        stages=stages,
        links=links,
        savers=level.words(partition.facts),
        sparing=level.sparing,
        estimate=estimated(
            stages,
            links,
            step_s=timed.step_s,
            num_tokens=step.num_tokens,
            num_steps=step.num_steps,
            bubble=idle_only(timed.step_s, [stage.busy_s for stage in stages]),
            limiting="",
            warmup=_warmup(candidate, stages, links, first),
            is_simulated=True,
        ),
        reason="",
        settings=PipelineSettings(
            num_microbatches=partition.setting.num_microbatches,
            microbatch_sequences=step.num_sequences // partition.setting.num_microbatches,
            policy=partition.terms.policy,
            max_in_flight=candidate.scenario.max_in_flight,
        ),
        scenario=candidate.scenario,
        warmup_scenario=candidate.warmup,
        loss=candidate.loss,
        strength=max(map(_strength, candidate.choices, partition.link_terms), default=0),
    )
    return plan, timed.num_passes + (0 if first is None else first.num_passes)


def planned_stages(
    candidate: Candidate, timed: SteadyStep | None = None, first: SteadyStep | None = None
) -> tuple[PlannedStage, ...]:
    """Each cloud's part; windows are those simulated, or without a simulation those expected."""
    scenario = candidate.scenario
    caps = scenario.max_in_flight
    windows = scenario.windows or next_windows(scenario, expected(scenario), max_in_flight=caps)
    windows = windows if timed is None else timed.windows
    most = windows if first is None else tuple(map(max, zip(windows, first.windows, strict=True)))
    halves = candidate.partition.supply.halves(candidate.partition.clouds)
    return tuple(
        _stage(candidate, index, window=windows[index], most=most[index], halves=halves[index])
        for index in range(len(windows))
    )


def _stage(
    candidate: Candidate, index: int, *, window: int, most: int, halves: Sequence[HalfCosts]
) -> PlannedStage:
    partition, load = candidate.partition, candidate.scenario.stages[index]
    cloud, layers = partition.facts[index], partition.layers[index]
    supply, setting = partition.supply, partition.setting
    num_rounds = -(-setting.num_microbatches // load.num_ranks)
    is_trained = index >= candidate.scenario.first_trained
    pass_s = load.forward_s + (load.backward_s if is_trained else 0.0)
    memory = supply.memory(
        cloud, setting, layers, window=most, halves=halves, codec_bytes=candidate.codec_bytes[index]
    )
    last = layers.stop - 1
    return PlannedStage(
        cloud=cloud.name,
        holds=f"layer {last}" if len(layers) == 1 else f"layers {layers.start}–{last}",
        num_ranks=load.num_ranks,
        busy_s=num_rounds * pass_s + load.update_s,
        window=window,
        memory=memory_parts(memory),
        capacity_bytes=cloud.capacity_bytes,
        usd_per_hour=cloud.usd_per_hour,
        layers=(layers.start, layers.stop),
        sharding=supply.levels[setting.level].sharding(cloud),
        is_measured=cloud.profile is not None,
    )


def _links(candidate: Candidate) -> Iterator[PlannedLink]:
    partition, number = candidate.partition, candidate.partition.setting.num_microbatches
    names = [one.name for one in partition.facts]
    parts = zip(
        pairwise(names), candidate.scenario.hops, candidate.choices, partition.link_terms, strict=True
    )
    for between, hop, choice, link in parts:
        codecs = f"{choice.pair.forward} and {choice.pair.backward}"
        yield PlannedLink(
            between=between,
            down_bytes=hop.forward_bytes * number,
            up_bytes=hop.backward_bytes * number,
            forward_codec=str(choice.pair.forward),
            backward_codec=str(choice.pair.backward),
            usd_per_gib=link.usd_per_gib,
            reason=choice.reason if candidate.why is None else f"{codecs}: {candidate.why}",
        )


def _strength(choice: Choice, link: LinkTerms) -> int:
    """How many codec levels are less lossy than that of a link; none where the job has its own."""
    pair = choice.pair
    levels = enumerate(link.rungs)
    same = (one for one, rung in levels if rung.forward == pair.forward or rung.backward == pair.backward)
    return max(same, default=0)


def _warmup(
    candidate: Candidate,
    stages: Sequence[PlannedStage],
    links: Sequence[PlannedLink],
    timed: SteadyStep | None,
) -> Warmup | None:
    if candidate.warmup is None or timed is None:
        return None
    return estimated_warmup(
        candidate.warmup, stages, links, step_s=timed.step_s, num_steps=candidate.num_warmup_steps
    )
