"""Pipelines that might be the plan: from clouds, cuts and codecs to a scenario, simulated, and to a plan.

A step of many micro-batches is timed by simulating fewer, where the pipeline has a periodic steady state. It
fills the pipeline, repeats one pattern, and drains it. Filling and draining take as long for any number of
micro-batches, so a step of m micro-batches takes as long as one of n < m and `(m - n) / P` periods of P
micro-batches each:

    T(m) = T(n) + (m - n) / P · D

P and D are read off the simulated step: D is what P completions of the first trained stage take, before it
drains, and the pattern counts as periodic when every completion of the last two periods, and of as many
micro-batches as are in flight, is D behind the one P before it. Without such a pattern n doubles, up to m
itself. Lines with jitter have none. The error of T(m) beside the whole simulation is at most 0.5 %, which
`tests/plan/test_steady.py` holds on random pipelines.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from isthmus.plan.codecs import (
    RAW_PAIR,
    Choice,
    CodecLevel,
    Loss,
    Pair,
    choose,
    explained,
)
from isthmus.plan.job_facts import first_trained
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
    step_usd,
)
from isthmus.plan.scenario import (
    Caps,
    Scenario,
    at_worst,
    expected,
    next_windows,
    one_for_all,
    scenario_bound_s,
    window_bounds,
)
from isthmus.plan.simulate import Timeline
from isthmus.plan.simulated import simulate_scenario
from isthmus.plan.study import CloudOrder

Stops = NDArray[np.int64]
"""Rows of where the layers of each stage end."""

_GIB: Final = 2**30
_CLOSE: Final = 0.01
_THRIFTY: Final = "fewer bytes to pay for than time alone asks for"
_HURRIED: Final = "faster than less lossy ones, since too few micro-batches are in flight to overlap the line"


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidate:
    """An order with cuts and codecs: all that its time depends on."""

    order: CloudOrder
    stops: tuple[int, ...]
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
    def lossiness(self) -> int:
        """How many codec levels are less lossy than its most lossy one."""
        pairs = zip(self.choices, self.order.links, strict=True)
        return max((link.lossiness(one.pair) for one, link in pairs), default=0)

    @property
    def simplicity(self) -> tuple[float, ...]:
        """What one of several equals is chosen by, as far as it is known before a simulation."""
        order = self.order
        is_reordered = order.clouds != order.study.run_order
        return self.loss, self.lossiness, len(order.memory_words), len(order.clouds), is_reordered

    def least_totals(self) -> tuple[float, float | None]:
        """The least time and price of a run."""
        study, clouds, num_first = self.order.study, self.order.clouds, self.order.num_warmup_steps
        parts = [(study.step.num_steps - num_first, self.scenario)]
        parts += [] if self.warmup is None else [(num_first, self.warmup)]
        total_s = sum(number * scenario_bound_s(one) for number, one in parts)
        usd = sum(number * self._traffic_usd(one) for number, one in parts)
        rate = study.usd_per_s(clouds)
        return total_s, None if rate is None else rate * total_s + usd

    def _traffic_usd(self, scenario: Scenario) -> float:
        hops = zip(scenario.hops, self.order.links, strict=True)
        each = sum((hop.forward_bytes + hop.backward_bytes) * (link.usd_per_gib or 0.0) for hop, link in hops)
        return float(scenario.num_microbatches * each / _GIB)

    def with_codecs(self) -> Iterator["Candidate"]:
        """The same with other codecs on one link: a schedule may be faster with a slower message."""
        for cut, (own, link) in enumerate(zip(self.choices, self.order.links, strict=True)):
            allowed = link.options(own.crossing)
            for one in (each for each in allowed if each.pair != own.pair):
                other = explained(one, allowed, link.bounds)
                choices = (*self.choices[:cut], other, *self.choices[cut + 1 :])
                if (changed := _candidate(self.order, self.stops, choices, _HURRIED)) is not None:
                    yield changed


def layers_of(stops: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage."""
    return tuple(range(start, stop) for start, stop in pairwise((0, *stops)))


def candidates(order: CloudOrder, stops: tuple[int, ...]) -> list[Candidate]:
    """The order with these cuts and the codecs that are worth a simulation.

    These are the least lossy codecs by which computing overlaps each line, those with which a step is as fast
    as with any, the same level on all links, and where traffic is paid for, codecs with fewer bytes.
    """
    found: dict[tuple[Pair, ...], Candidate | None] = {}
    for choices, why in _choices(order, stops):
        pairs = tuple(one.pair for one in choices)
        if pairs not in found:
            found[pairs] = _candidate(order, stops, choices, why)
    return [one for one in found.values() if one is not None]


def _choices(order: CloudOrder, stops: tuple[int, ...]) -> Iterator[tuple[tuple[Choice, ...], str | None]]:
    """The codecs of all links, chosen in several ways, and why each differs from the first."""
    links, study = order.links, order.study
    # Nothing goes back to frozen layers.
    crossings = [
        order.crossing(cut, has_gradient=stop > study.num_frozen) for cut, stop in enumerate(stops[:-1])
    ]
    stages = zip(order.clouds, layers_of(stops), strict=True)
    interval_s = max(study.stage_load(cloud, order.setting, own).interval_s for cloud, own in stages)

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
    fewer = [[one.allowed[min(at, len(one.allowed) - 1) :] for one in links] for at in range(most)]
    for levels in fewer if study.job.limits.counts_money else ():
        # Nothing is saved where nothing is paid.
        paid = zip(links, every, levels, strict=True)
        yield choice([some if link.usd_per_gib else own for link, own, some in paid], interval_s), _THRIFTY
    yield choice(every, interval_s, tolerance=_CLOSE), _HURRIED
    for levels in fewer:
        yield choice([one[:1] for one in levels], 0.0), _HURRIED


def _candidate(
    order: CloudOrder, stops: tuple[int, ...], choices: tuple[Choice, ...], why: str | None
) -> Candidate | None:
    """An order with these cuts and codecs, None where memory does not hold what they keep."""
    study, setting, layers = order.study, order.setting, layers_of(stops)
    codec_bytes = _codec_bytes(order, choices)
    fitting = _num_fitting(order, layers, codec_bytes)
    if min(fitting) < 1:
        return None
    pairs = [one.pair for one in choices]
    scenario = Scenario(
        stages=tuple(map(study.stage_load, order.clouds, [setting] * len(layers), layers)),
        hops=tuple(
            order.hop(cut, one.crossing, one.pair, stop=stops[cut]) for cut, one in enumerate(choices)
        ),
        num_microbatches=setting.num_microbatches,
        policy=order.policy,
        first_trained=first_trained(layers, study.num_frozen),
    )
    warmup = None
    if order.num_warmup_steps:
        raw = []
        for cut, (link, pair) in enumerate(zip(order.links, pairs, strict=True)):
            crossing = order.crossing(cut, has_gradient=choices[cut].crossing.has_gradient, is_warmup=True)
            codecs = RAW_PAIR if link.bottleneck else pair
            raw.append(order.hop(cut, crossing, codecs, stop=stops[cut]))
        warmup = replace(scenario, hops=tuple(raw))
    given = study.strategy.windows
    wanted = given or next_windows(scenario, expected(scenario))
    bounds: dict[str, Any] = {
        "windows": None if given is None else _given_windows(scenario, given, fitting),
        "max_in_flight": _caps({scenario, warmup or scenario}, wanted, fitting),
    }
    return Candidate(
        order=order,
        stops=stops,
        choices=choices,
        scenario=replace(scenario, **bounds),
        warmup=None if warmup is None else replace(warmup, **bounds),
        why=why,
        codec_bytes=codec_bytes,
    )


def _codec_bytes(order: CloudOrder, choices: Sequence[Choice]) -> tuple[int, ...]:
    """What the codecs of all cuts keep at a rank of each stage."""
    found = [0] * len(order.clouds)
    for cut, one in enumerate(choices):
        for stage, num_bytes in zip((cut, cut + 1), one.pair.state_bytes(one.crossing), strict=True):
            found[stage] += num_bytes * -(-one.crossing.num_learners // order.facts[stage].num_ranks)
    return tuple(found)


def _num_fitting(order: CloudOrder, layers: Sequence[range], codec_bytes: Sequence[int]) -> list[float]:
    """The most that a rank of each stage may keep in flight."""
    given = order.study.strategy.max_in_flight
    caps = given if isinstance(given, tuple) else (given,) * len(order.clouds)
    found = []
    for cloud, own, num_bytes, cap in zip(order.clouds, layers, codec_bytes, caps, strict=True):
        fitting = order.study.num_fitting(cloud, order.setting, codec_bytes=num_bytes)
        most = float(fitting[own.start, own.stop])
        found.append(min(most, cap or most))
    return found


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
    order, step = candidate.order, candidate.order.study.step
    most = timed.windows if first is None else tuple(map(max, zip(timed.windows, first.windows, strict=True)))
    stages, links = planned_stages(candidate, timed.windows, most), tuple(_links(candidate))
    number = order.setting.num_microbatches
    plan = Plan(
        form=Form.PIPELINE if len(stages) > 1 else Form.ALONE,
        stages=stages,
        links=links,
        memory_options=order.setting.memory,
        estimate=estimated(
            stages,
            links,
            step_s=timed.step_s,
            num_tokens=step.num_tokens,
            num_steps=step.num_steps,
            warmup=None if first is None else _warmup(candidate, stages, links, first),
            is_simulated=True,
        ),
        reason="",
        settings=PipelineSettings(
            num_microbatches=number,
            microbatch_sequences=step.num_sequences // number,
            policy=order.policy,
            max_in_flight=candidate.scenario.max_in_flight,
        ),
        scenario=candidate.scenario,
        warmup_scenario=candidate.warmup,
        loss=candidate.loss,
        lossiness=candidate.lossiness,
    )
    return plan, timed.num_passes + (0 if first is None else first.num_passes)


def planned_stages(
    candidate: Candidate, windows: Sequence[int] = (), most: Sequence[int] = ()
) -> tuple[PlannedStage, ...]:
    """Each cloud's part; windows are those simulated, or without a simulation those expected."""
    scenario, order = candidate.scenario, candidate.order
    caps, setting = scenario.max_in_flight, order.setting
    windows = windows or scenario.windows or next_windows(scenario, expected(scenario), max_in_flight=caps)
    found = []
    for index, (cloud, layers) in enumerate(zip(order.facts, layers_of(candidate.stops), strict=True)):
        load, last = scenario.stages[index], layers.stop - 1
        pass_s = load.forward_s + (load.backward_s if index >= scenario.first_trained else 0.0)
        memory = stage_memory(
            order.study.costs(order.clouds[index], setting),
            layers,
            window=(most or windows)[index],
            options=setting.memory.at(cloud),
            halves=order.halves[index],
            codec_bytes=candidate.codec_bytes[index],
        )
        stage = planned_stage(
            cloud,
            f"layer {last}" if len(layers) == 1 else f"layers {layers.start}–{last}",
            memory,
            setting.memory.sharding_at(cloud),
            busy_s=-(-setting.num_microbatches // load.num_ranks) * pass_s + load.update_s,
            window=windows[index],
        )
        found.append(replace(stage, layers=(layers.start, layers.stop)))
    return tuple(found)


def _links(candidate: Candidate) -> Iterator[PlannedLink]:
    order, number = candidate.order, candidate.order.setting.num_microbatches
    betweens = pairwise(one.name for one in order.facts)
    parts = zip(betweens, candidate.scenario.hops, candidate.choices, order.links, strict=True)
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


def _warmup(
    candidate: Candidate, stages: Sequence[PlannedStage], links: Sequence[PlannedLink], timed: "SteadyStep"
) -> Warmup:
    number = candidate.order.setting.num_microbatches
    hops = candidate.scenario.hops if candidate.warmup is None else candidate.warmup.hops
    raw = [
        replace(link, down_bytes=number * hop.forward_bytes, up_bytes=number * hop.backward_bytes)
        for link, hop in zip(links, hops, strict=True)
    ]
    return Warmup(
        num_steps=candidate.order.num_warmup_steps,
        step_s=timed.step_s,
        wan_bytes=sum(one.num_bytes for one in raw),
        usd_per_step=step_usd(stages, raw, timed.step_s),
    )


NUM_STEPS: Final = 2
"""The first step has windows that are guessed; the second has those that were measured, and counts."""

# Periods are so many rounds of all ranks; each divides the last, so that all fit into what is left out.
_PERIODS: Final = (1, 2, 3, 4, 6, 12)
_TOLERANCE: Final = 1e-3
_NUM_FILLS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyStep:
    """A simulated step: its time, what each rank kept in flight, and how many passes were simulated."""

    step_s: float
    windows: tuple[int, ...]
    num_passes: int


def simulate_step(scenario: Scenario) -> SteadyStep:
    """Time a step that follows another, with the windows measured in that one, as `isthmus simulate` does."""
    scenario = one_for_all(scenario)
    most, round_size = scenario.num_microbatches, math.lcm(*(one.num_ranks for one in scenario.stages))
    unit = round_size * _PERIODS[-1]
    number, num_passes = _first_number(scenario, round_size), 0
    while True:
        # What is left out is whole units.
        number = most - (most - number) // unit * unit if number < most else most
        timeline = simulate_scenario(replace(scenario, num_microbatches=number), num_steps=NUM_STEPS)
        num_passes += NUM_STEPS * 2 * number * scenario.num_stages
        period_s = None if number == most else _period_s(scenario, timeline, number, round_size)
        if number == most or period_s is not None:
            step_s = timeline.step_s + (most - number) * (period_s or 0.0)
            return SteadyStep(step_s=step_s, windows=timeline.steps[-1].windows, num_passes=num_passes)
        number *= 2


def least_passes(scenario: Scenario) -> int:
    """How many passes are simulated at least to time a step."""
    one = one_for_all(scenario)
    round_size = math.lcm(*(stage.num_ranks for stage in one.stages))
    return NUM_STEPS * 2 * _first_number(one, round_size) * one.num_stages


def _first_number(scenario: Scenario, round_size: int) -> int:
    """Micro-batches that fill the pipeline twice, and a few periods; all of them where lines have jitter."""
    most = scenario.num_microbatches
    if any(hop.line.jitter_s for hop in scenario.hops):
        return most
    caps, sizes = scenario.max_in_flight, scenario.windows
    if sizes is None:
        found = [next_windows(scenario, of(scenario), max_in_flight=caps) for of in (expected, at_worst)]
        sizes = tuple(map(max, zip(*found, strict=True)))
    number = _NUM_FILLS * _num_in_flight(scenario, sizes) + 4 * round_size
    return most if number > 0.75 * most else number


def _num_in_flight(scenario: Scenario, windows: Sequence[int]) -> int:
    """The most that all ranks of a stage keep in flight together."""
    return max(size * one.num_ranks for size, one in zip(windows, scenario.stages, strict=True))


def _period_s(scenario: Scenario, timeline: Timeline, number: int, round_size: int) -> float | None:
    """Seconds per micro-batch in the steady state, None where there is none yet."""
    num_in_flight = _num_in_flight(scenario, timeline.steps[-1].windows)
    ends_s = _completions_s(scenario, timeline)
    steady_s = ends_s[: number - num_in_flight]
    for period in (round_size * one for one in _PERIODS):
        num_checked = max(2 * period, num_in_flight + round_size)
        if len(steady_s) < num_checked + period:
            return None
        lags_s = [later - sooner for sooner, later in zip(steady_s, steady_s[period:], strict=False)]
        last_s = lags_s[-num_checked:]
        if max(last_s) - min(last_s) <= _TOLERANCE * max(last_s):
            return last_s[-1] / period
    return None


def _completions_s(scenario: Scenario, timeline: Timeline) -> Sequence[float]:
    """When each backward pass of the last step ends at the first stage that has any."""
    cloud = scenario.stages[scenario.first_trained].cloud
    start_s = timeline.steps[-1].start_s
    return sorted(
        one.end_s
        for one in timeline.spans
        if one.kind == "backward" and one.end_s > start_s and one.track.partition("/")[0] == cloud
    )
