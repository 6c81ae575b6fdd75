"""Pipelines that might be the plan: from clouds, cuts and codecs to a scenario, simulated, and to a plan."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from isthmus.plan.codecs import (
    RAW_PAIR,
    Choice,
    CodecLevel,
    Crossing,
    Loss,
    Pair,
    choose,
    expected_loss,
    explained,
)
from isthmus.plan.job_facts import CloudFacts, first_trained
from isthmus.plan.memory import stage_memory
from isthmus.plan.plan import (
    Form,
    PipelineSettings,
    Plan,
    PlannedLink,
    PlannedStage,
    Warmup,
    estimated,
    planned_stage,
    split_bubble,
    step_usd,
)
from isthmus.plan.scenario import (
    Caps,
    HopLoad,
    Scenario,
    StageLoad,
    at_worst,
    expected,
    next_windows,
    window_bounds,
)
from isthmus.plan.stage_tables import codec_state_bytes
from isthmus.plan.step_time import SteadyStep, scenario_bound_s, simulate_step
from isthmus.plan.study import Clouds, LinkFacts, Setting, Study

_GIB: Final = 2**30
_CLOSE: Final = 0.01
_THRIFTY: Final = "fewer bytes to pay for than time alone asks for"
_HURRIED: Final = "faster than less lossy ones, since too few micro-batches are in flight to overlap the line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Clouds as stages in order, where the layers of each end, and the setting that they run under."""

    study: Study
    setting: Setting
    clouds: Clouds
    stops: tuple[int, ...]

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage."""
        return tuple(range(start, stop) for start, stop in pairwise((0, *self.stops)))

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

    def stage_loads(self) -> tuple[StageLoad, ...]:
        """The times of each stage."""
        stages = zip(self.clouds, self.layers, strict=True)
        return tuple(self.study.stage_load(cloud, self.setting, layers) for cloud, layers in stages)

    def crossings(self, study: Study) -> list[Crossing]:
        """What a micro-batch puts across each cut; nothing goes back to frozen layers."""
        return [
            study.crossing(self.clouds, cut, self.setting, has_gradient=stop > study.num_frozen)
            for cut, stop in enumerate(self.stops[:-1])
        ]

    def codec_bytes(self, codecs: Sequence[Pair]) -> tuple[int, ...]:
        """What the codecs of its cuts keep at a rank of each stage."""
        found = [0] * len(self.clouds)
        for cut, (crossing, pair) in enumerate(zip(self.crossings(self.study), codecs, strict=True)):
            for stage, num_bytes in zip((cut, cut + 1), codec_state_bytes(pair, crossing), strict=True):
                found[stage] += num_bytes * -(-crossing.num_learners // self.facts[stage].num_ranks)
        return tuple(found)

    def num_fitting(self, codec_bytes: Sequence[int]) -> list[float]:
        """The most that a rank of each stage may keep in flight."""
        given = self.study.strategy.max_in_flight
        caps = given if isinstance(given, tuple) else (given,) * len(self.clouds)
        found = []
        for cloud, layers, num_bytes, cap in zip(self.clouds, self.layers, codec_bytes, caps, strict=True):
            fitting = self.study.table(cloud, self.setting).num_fitting
            if num_bytes:
                fitting = self.study.num_fitting(cloud, self.setting, codec_bytes=num_bytes)
            most = float(fitting[layers.start, layers.stop])
            found.append(min(most, cap or most))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A placement with codecs: all that its time depends on."""

    placement: Placement
    choices: tuple[Choice, ...]
    scenario: Scenario
    warmup: Scenario | None
    """The same before bottlenecks begin."""
    why: str | None
    """Why its codecs are not those that computing overlaps."""
    codec_bytes: tuple[int, ...]
    """What they keep at a rank of each stage."""

    @property
    def loss(self) -> Loss:
        """The greatest loss of its codecs."""
        return max((one.loss for one in self.choices), default=Loss.NONE)

    @property
    def simplicity(self) -> tuple[float, ...]:
        """What one of several equals is chosen by, as far as it is known before a simulation."""
        lossiness, placement = expected_loss(one.pair for one in self.choices), self.placement
        is_reordered = placement.clouds != placement.study.run_order
        return self.loss, lossiness, len(placement.memory_words), len(placement.clouds), is_reordered

    def least_totals(self) -> tuple[float, float | None]:
        """The least time and price of a run."""
        study, clouds = self.placement.study, self.placement.clouds
        num_first = study.num_warmup_steps(clouds)
        parts = [(study.step.num_steps - num_first, self.scenario)]
        parts += [] if self.warmup is None else [(num_first, self.warmup)]
        total_s = sum(number * scenario_bound_s(one) for number, one in parts)
        usd = sum(number * self._traffic_usd(one) for number, one in parts)
        rate = study.usd_per_s(clouds)
        return total_s, None if rate is None else rate * total_s + usd

    def _traffic_usd(self, scenario: Scenario) -> float:
        hops = zip(scenario.hops, self.placement.links, strict=True)
        each = sum((hop.forward_bytes + hop.backward_bytes) * (link.usd_per_gib or 0.0) for hop, link in hops)
        return float(scenario.num_microbatches * each / _GIB)


def candidates(placement: Placement) -> list[Candidate]:
    """The placement with the codecs that are worth a simulation.

    These are the least lossy codecs by which computing overlaps each line, those with which a step is as fast
    as with any, the same level on all links, and where traffic is paid for, codecs with fewer bytes.
    """
    found: dict[tuple[Pair, ...], Candidate | None] = {}
    for choices, why in _choices(placement):
        pairs = tuple(one.pair for one in choices)
        if pairs not in found:
            found[pairs] = _candidate(placement, choices, why)
    return [one for one in found.values() if one is not None]


def neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """The same with other codecs on one link: a schedule may be faster with a slower message."""
    placement = candidate.placement
    for cut, (crossing, link) in enumerate(
        zip(placement.crossings(placement.study), placement.links, strict=True)
    ):
        allowed = link.options(crossing)
        for one in allowed:
            if one.pair != candidate.choices[cut].pair:
                other = explained(one, allowed, link.bounds)
                choices = (*candidate.choices[:cut], other, *candidate.choices[cut + 1 :])
                if (changed := _candidate(placement, choices, _HURRIED)) is not None:
                    yield changed


def _choices(placement: Placement) -> Iterator[tuple[tuple[Choice, ...], str | None]]:
    """The codecs of all links, chosen in several ways, and why each differs from the first."""
    links, crossings = placement.links, placement.crossings(placement.study)
    interval_s = max(stage.interval_s for stage in placement.stage_loads())

    def choice(levels: Sequence[Sequence[CodecLevel]], beside_s: float, **how: Any) -> tuple[Choice, ...]:
        return tuple(
            choose(crossing, link.figures(beside_s), levels=own, bounds=link.bounds, **how)
            for crossing, link, own in zip(crossings, links, levels, strict=True)
        )

    every = [one.levels for one in links]
    yield choice(every, interval_s), None
    if not links:
        return
    most = max(len(one.allowed) for one in links)
    if placement.study.job.limits.counts_money:
        for number in range(1, most):
            # Nothing is saved where nothing is paid, and the last level stays.
            first = [min(number, len(one.allowed) - 1) if one.usd_per_gib else 0 for one in links]
            if any(one == number for one in first):
                levels = [
                    one.allowed[at:] if at else one.levels for one, at in zip(links, first, strict=True)
                ]
                yield choice(levels, interval_s), _THRIFTY
    yield choice(every, interval_s, tolerance=_CLOSE), _HURRIED
    for number in range(most):
        levels = [one.allowed[min(number, len(one.allowed) - 1) :][:1] or one.levels for one in links]
        yield choice(levels, 0.0), _HURRIED


def _candidate(placement: Placement, choices: tuple[Choice, ...], why: str | None) -> Candidate | None:
    """A placement with these codecs, None where memory does not hold what they keep."""
    study = placement.study
    pairs = [one.pair for one in choices]
    codec_bytes = placement.codec_bytes(pairs)
    fitting = placement.num_fitting(codec_bytes)
    if min(fitting) < 1:
        return None
    scenario = Scenario(
        stages=placement.stage_loads(),
        hops=_hops(study, placement, pairs),
        num_microbatches=placement.setting.num_microbatches,
        policy=study.policy,
        first_trained=first_trained(placement.layers, study.num_frozen),
    )
    warmup = None
    if study.num_warmup_steps(placement.clouds):
        raw = [
            RAW_PAIR if link.bottleneck else pair for link, pair in zip(placement.links, pairs, strict=True)
        ]
        warmup = replace(scenario, hops=_hops(study.before_bottlenecks, placement, raw))
    given = study.strategy.windows
    wanted = given or next_windows(scenario, expected(scenario))
    bounds: dict[str, Any] = {
        "windows": None if given is None else _given_windows(scenario, given, fitting),
        "max_in_flight": _caps({scenario, warmup or scenario}, wanted, fitting),
    }
    return Candidate(
        placement=placement,
        choices=choices,
        scenario=replace(scenario, **bounds),
        warmup=None if warmup is None else replace(warmup, **bounds),
        why=why,
        codec_bytes=codec_bytes,
    )


def _hops(study: Study, placement: Placement, pairs: Sequence[Pair]) -> tuple[HopLoad, ...]:
    parts = zip(pairwise(placement.clouds), placement.crossings(study), pairs, strict=True)
    return tuple(study.coded_hop(between, crossing, pair) for between, crossing, pair in parts)


def _caps(scenarios: Collection[Scenario], wanted: Sequence[int], fitting: Sequence[float]) -> Caps | None:
    """What each stage has memory for, one number where all have the same, and None where that binds no stage.

    Workers whose messages meet on the line may ask for more than is expected, and are bound then too; so are
    those of a warm-up.
    """
    most = [next_windows(one, at_worst(one)) for one in scenarios]
    asked = [max(sizes) for sizes in zip(wanted, *most, strict=True)]
    if all(one >= size for one, size in zip(fitting, asked, strict=True)):
        return None
    number = max(one.num_microbatches for one in scenarios)
    caps = tuple(int(max(1, min(one, number))) for one in fitting)
    return caps if len(set(caps)) > 1 else caps[0]


def _given_windows(scenario: Scenario, given: Sequence[int], fitting: Sequence[float]) -> tuple[int, ...]:
    """The job's windows, as far as memory and the stages before allow."""
    sizes: list[int] = []
    for size, most in zip(given, fitting, strict=True):
        bounds = window_bounds(scenario, sizes) if scenario.policy.keeps_order else []
        sizes.append(int(max(1, min(size, most, *bounds))))
    return tuple(sizes)


def simulated(candidate: Candidate) -> tuple[Plan, int]:
    """The plan of a candidate with the simulator's figures, and how many passes that took."""
    timed = simulate_step(candidate.scenario)
    first = None if candidate.warmup is None else simulate_step(candidate.warmup)
    placement, step = candidate.placement, candidate.placement.study.step
    stages, links = planned_stages(candidate, timed, first), tuple(_links(candidate))
    number = placement.setting.num_microbatches
    plan = Plan(
        form=Form.PIPELINE if len(stages) > 1 else Form.ALONE,
        stages=stages,
        links=links,
        memory_options=placement.setting.memory,
        estimate=estimated(
            stages,
            links,
            step_s=timed.step_s,
            num_tokens=step.num_tokens,
            num_steps=step.num_steps,
            bubble=split_bubble(timed.step_s, [stage.busy_s for stage in stages]),
            limiting="",
            warmup=_warmup(candidate, stages, links, first),
            is_simulated=True,
        ),
        reason="",
        settings=PipelineSettings(
            num_microbatches=number,
            microbatch_sequences=step.num_sequences // number,
            policy=placement.study.policy,
            max_in_flight=candidate.scenario.max_in_flight,
        ),
        scenario=candidate.scenario,
        warmup_scenario=candidate.warmup,
        loss=candidate.loss,
        lossiness=max(map(_lossiness, candidate.choices, placement.links), default=0),
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
    return tuple(
        _stage(candidate, index, window=windows[index], most=most[index]) for index in range(len(windows))
    )


def _stage(candidate: Candidate, index: int, *, window: int, most: int) -> PlannedStage:
    placement, load = candidate.placement, candidate.scenario.stages[index]
    cloud, layers, setting = placement.facts[index], placement.layers[index], placement.setting
    is_trained = index >= candidate.scenario.first_trained
    pass_s = load.forward_s + (load.backward_s if is_trained else 0.0)
    memory = stage_memory(
        placement.study.costs(placement.clouds[index], setting),
        layers,
        window=most,
        options=setting.memory.at(cloud),
        halves=placement.study.halves(placement.clouds)[index],
        codec_bytes=candidate.codec_bytes[index],
    )
    last = layers.stop - 1
    stage = planned_stage(
        cloud,
        f"layer {last}" if len(layers) == 1 else f"layers {layers.start}–{last}",
        memory,
        setting.memory.sharding_at(cloud),
        busy_s=-(-setting.num_microbatches // load.num_ranks) * pass_s + load.update_s,
        window=window,
    )
    return replace(stage, layers=(layers.start, layers.stop))


def _links(candidate: Candidate) -> Iterator[PlannedLink]:
    placement, number = candidate.placement, candidate.placement.setting.num_microbatches
    betweens = pairwise(one.name for one in placement.facts)
    parts = zip(betweens, candidate.scenario.hops, candidate.choices, placement.links, strict=True)
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


def _lossiness(choice: Choice, link: LinkFacts) -> int:
    """How many codec levels are less lossy than that of a link; none where the job has its own."""
    pair = choice.pair
    levels = enumerate(link.levels)
    same = (one for one, level in levels if level.forward == pair.forward or level.backward == pair.backward)
    return max(same, default=0)


def _warmup(
    candidate: Candidate,
    stages: Sequence[PlannedStage],
    links: Sequence[PlannedLink],
    timed: SteadyStep | None,
) -> Warmup | None:
    if candidate.warmup is None or timed is None:
        return None
    number = candidate.warmup.num_microbatches
    raw = [
        replace(link, down_bytes=number * hop.forward_bytes, up_bytes=number * hop.backward_bytes)
        for link, hop in zip(links, candidate.warmup.hops, strict=True)
    ]
    return Warmup(
        num_steps=candidate.placement.study.num_warmup_steps(candidate.placement.clouds),
        step_s=timed.step_s,
        wan_bytes=sum(one.num_bytes for one in raw),
        usd_per_step=step_usd(stages, raw, timed.step_s),
    )
