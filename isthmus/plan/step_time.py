"""The one lower bound on the time of a step: no simulated step is shorter.

A step starts with the first forward pass of the first stage and ends with its update. In between, one
micro-batch goes through all stages and hops and back, which takes `once`. For every further one

    a line       carries its messages one after the other
    a stage      runs its forwards one after the other, and its backwards
    a stage      runs both; it idles until its first gradient is back, but for the forwards that its window
                 lets it run meanwhile, and behind its last forward, but for the backwards that it still owes
    a window w   lets forward k + w start only when k backwards have ended: each w take a whole round trip

The bound is `once` and the most that any of these adds. With windows that overlap all round trips it is
`Σ(tf + tb) + Σ(there + back) + (m - 1)·τ`. All figures are arrays, so that many cuts are bounded at once.

Times a step of many micro-batches by simulating fewer, where the pipeline has a periodic steady state.

A step fills the pipeline, repeats one pattern, and drains it. Filling and draining take as long for any
number of micro-batches, so a step of m micro-batches takes as long as one of n < m and `(m - n) / P` periods
of P micro-batches each:

    T(m) = T(n) + (m - n) / P · D

P and D are read off the simulated step: D is what P completions of the first trained stage take, before it
drains, and the pattern counts as periodic when every completion of the last two periods, and of as many
micro-batches as are in flight, is D behind the one P before it. Without such a pattern n doubles, up to m
itself. Lines with jitter have none. The error of T(m) beside the whole simulation is at most 0.5 %, which
`tests/plan/test_steady.py` holds on random pipelines.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from isthmus.plan.scenario import HopLoad, Policy, Scenario, at_worst, expected, next_windows, one_for_all
from isthmus.plan.simulate import Timeline
from isthmus.plan.simulated import simulate_scenario

Table = NDArray[np.float64]
Mask = NDArray[np.bool_]

# A window may be so much larger than expected, in intervals of each hop, where messages wait for each other.
_SPARE_INTERVALS: Final = 1.5
_NO_CAP: Final = 2.0**40
_SHORTEST_S: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTimes:
    """A hop as far as the bound goes: a message's time on the line and from end to end, there and back.

    `num_bytes` are those of a micro-batch, both ways.
    """

    down_s: Table
    up_s: Table
    there_s: Table
    back_s: Table
    num_bytes: Table
    latency_s: float

    @classmethod
    def of(cls, hop: HopLoad) -> "HopTimes":
        """Time one hop."""
        down_s, up_s = 8 * hop.forward_bytes / hop.line.down_bps, 8 * hop.backward_bytes / hop.line.up_bps
        there_s = down_s + hop.line.delay_s + hop.forward_coding_s
        back_s = up_s + hop.line.delay_s + hop.backward_coding_s if hop.backward_bytes else 0.0
        num_bytes = hop.forward_bytes + hop.backward_bytes
        found = (np.asarray(one) for one in (down_s, up_s, there_s, back_s, num_bytes))
        return cls(**dict(zip(_HOP_FIELDS, found, strict=True)), latency_s=hop.line.latency_s)

    @classmethod
    def least(cls, hops: Sequence["HopTimes"]) -> "HopTimes":
        """The least of each figure: a hop with any of several codecs takes no less."""
        times = {name: np.minimum.reduce([getattr(one, name) for one in hops]) for name in _HOP_FIELDS}
        return cls(**times, latency_s=min(one.latency_s for one in hops))

    def where(self, is_own: Mask, other: "HopTimes") -> "HopTimes":
        """These figures where the mask holds, and elsewhere those of the other hop."""
        times = {name: np.where(is_own, getattr(self, name), getattr(other, name)) for name in _HOP_FIELDS}
        return HopTimes(**times, latency_s=self.latency_s)


_HOP_FIELDS: Final = ("down_s", "up_s", "there_s", "back_s", "num_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """A stage as far as the bound goes: times of one rank, and the most that it may keep in flight."""

    forward_s: Table
    backward_s: Table
    update_s: Table
    cap: Table
    num_ranks: int
    is_trained: Mask
    """Whether anything goes back through it; a frozen stage keeps nothing in flight."""

    @property
    def pass_s(self) -> Table:
        """A forward and a backward."""
        return self.forward_s + self.backward_s


def scenario_bound_s(scenario: Scenario) -> float:
    """The least that a step of one scenario takes."""
    stages = [
        StageTimes(
            forward_s=np.asarray(stage.forward_s),
            backward_s=np.asarray(stage.backward_s if index >= scenario.first_trained else 0.0),
            update_s=np.asarray(stage.update_s),
            cap=np.asarray(_cap(scenario, index)),
            num_ranks=stage.num_ranks,
            is_trained=np.asarray(index >= scenario.first_trained),
        )
        for index, stage in enumerate(scenario.stages)
    ]
    hops = [
        HopTimes.of(hop if index >= scenario.first_trained else replace(hop, backward_bytes=0))
        for index, hop in enumerate(scenario.hops)
    ]
    return float(
        step_bound_s(stages, hops, num_microbatches=scenario.num_microbatches, policy=scenario.policy)
    )


def step_bound_s(
    stages: Sequence[StageTimes], hops: Sequence[HopTimes], *, num_microbatches: int, policy: Policy
) -> Table:
    """The least that a step takes, for every entry of the arrays."""
    behind_s = _behind(stages, hops)
    once_s = behind_s[0] + stages[0].pass_s
    added_s: list[Table] = [np.zeros_like(once_s)]
    added_s += [(num_microbatches - 1) * np.maximum(hop.down_s, hop.up_s) for hop in hops]
    late_s = _late_starts(stages, hops)
    windows = _most_windows(stages, hops, num_microbatches=num_microbatches, policy=policy)
    for stage, tail_s, start_s, window in zip(stages, behind_s, late_s, windows, strict=True):
        rounds = -(-num_microbatches // stage.num_ranks)
        added_s.append(start_s + _stage_adds_s(stage, tail_s, rounds, window))
    return np.asarray(once_s + functools.reduce(np.maximum, added_s) + stages[0].update_s)


def _behind(stages: Sequence[StageTimes], hops: Sequence[HopTimes]) -> list[Table]:
    """What a micro-batch takes behind each stage until it is back."""
    found = [np.zeros_like(stages[-1].pass_s)]
    for stage, hop in zip(reversed(stages[1:]), reversed(hops), strict=True):
        found.append(found[-1] + stage.pass_s + hop.there_s + hop.back_s)
    return found[::-1]


def _stage_adds_s(stage: StageTimes, behind_s: Table, rounds: int, window: Table) -> Table:
    """What the micro-batches of a rank but the first add to the time of one."""
    forward_s, backward_s, pass_s = stage.forward_s, stage.backward_s, stage.pass_s
    before_s = np.maximum(0.0, behind_s - (window - 1) * forward_s)
    after_s = np.maximum(0.0, behind_s - (window - 1) * backward_s)
    idle_s = np.where(window < rounds, before_s + after_s, np.maximum(before_s, after_s))
    busy_s = (rounds - 1) * pass_s - behind_s + idle_s
    num_trips, rest = np.divmod(rounds - 1, window)
    trips_s = num_trips * (pass_s + behind_s) + rest * np.maximum(forward_s, backward_s)
    return np.where(stage.is_trained, np.maximum(busy_s, trips_s), (rounds - 1) * forward_s)


def _late_starts(stages: Sequence[StageTimes], hops: Sequence[HopTimes]) -> list[Table]:
    """How much later than its first activation a stage starts, since its own update comes first.

    The verdict that lets it update leaves the first stage before that one's own update.
    """
    zero = np.zeros_like(stages[0].update_s + stages[0].forward_s)
    found, arrival_s, verdict_s = [zero], zero, 0.0
    for (before, stage), hop in zip(pairwise(stages), hops, strict=True):
        arrival_s = arrival_s + before.forward_s + hop.there_s
        verdict_s += hop.latency_s
        own_s = verdict_s + stage.update_s - stages[0].update_s - arrival_s
        found.append(np.maximum(found[-1], own_s))
    return found


def _most_windows(
    stages: Sequence[StageTimes], hops: Sequence[HopTimes], *, num_microbatches: int, policy: Policy
) -> list[Table]:
    """The most that a rank of each stage keeps in flight, as `windows.next_windows` may find it."""
    interval_s = np.maximum.reduce([one.pass_s / one.num_ranks for one in stages])
    shortest_s = np.maximum(interval_s, _SHORTEST_S)
    found = [np.ones_like(interval_s)]
    for number, (stage, hop) in enumerate(zip(reversed(stages[:-1]), reversed(hops), strict=True)):
        behind = stages[len(stages) - 1 - number]
        shared = min(num_microbatches, max(stage.num_ranks, behind.num_ranks))
        # A line that is slower than all stages sets the interval, so its messages never take more of them.
        trip = shared * 2 + (hop.there_s + hop.back_s) / shortest_s + _SPARE_INTERVALS
        own = found[0] * behind.num_ranks / stage.num_ranks + trip / stage.num_ranks + 2
        found.insert(0, np.ceil(own))
    most = [float(-(-num_microbatches // one.num_ranks)) for one in stages]
    if policy is Policy.GPIPE:
        found = [np.full_like(interval_s, one) for one in most]
    if policy is Policy.ONE_F_ONE_B:
        found = [np.full_like(interval_s, len(stages) - index) for index in range(len(stages))]
    pairs = zip(found, stages, most, strict=True)
    return [np.maximum(1.0, np.minimum(np.minimum(one, stage.cap), number)) for one, stage, number in pairs]


def _cap(scenario: Scenario, index: int) -> float:
    caps = scenario.windows or scenario.max_in_flight
    cap = caps[index] if isinstance(caps, tuple) else caps
    return _NO_CAP if cap is None else float(cap)


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
    number = _NUM_FILLS * _num_in_flight(scenario) + 4 * round_size
    return most if number > 0.75 * most else number


def _num_in_flight(scenario: Scenario) -> int:
    """The most that all ranks of a stage keep in flight together."""
    caps = scenario.max_in_flight
    sizes = scenario.windows
    if sizes is None:
        found = [next_windows(scenario, of(scenario), max_in_flight=caps) for of in (expected, at_worst)]
        sizes = tuple(map(max, zip(*found, strict=True)))
    return max(size * one.num_ranks for size, one in zip(sizes, scenario.stages, strict=True))


def _period_s(scenario: Scenario, timeline: Timeline, number: int, round_size: int) -> float | None:
    """Seconds per micro-batch in the steady state, None where there is none yet."""
    windows = timeline.steps[-1].windows
    num_in_flight = max(one.num_ranks * size for one, size in zip(scenario.stages, windows, strict=True))
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
        if one.kind == "backward" and one.end_s > start_s and _cloud_of(one.track) == cloud
    )


def _cloud_of(track: str) -> str:
    return track.partition("/")[0]
