"""Times a step of many micro-batches by simulating fewer, where the pipeline has a periodic steady state.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from isthmus.plan.scenario import Scenario, at_worst, expected, next_windows
from isthmus.plan.simulated_pipeline import simulate_scenario
from isthmus.plan.simulation.alike import one_for_all
from isthmus.plan.simulation.timeline import Timeline

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
