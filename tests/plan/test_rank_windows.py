"""The windows of a simulation are those of the workers, and with several ranks they keep every rank busy."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isthmus.plan.end_of_step import Reduced, Seen, joined, stage_tally
from isthmus.plan.planner import plan
from isthmus.plan.scenario import (
    Hop,
    Measured,
    Policy,
    Scenario,
    at_worst,
    expected,
    first_windows,
    next_windows,
)
from isthmus.plan.simulated import simulate_scenario
from tests.plan.jobs import two_clouds
from tests.plan.one_member import pipeline_of, tally_of
from tests.plan.scenarios import hop, pipeline, stage

# Sums and differences of these are exact.
times = st.integers(1, 600).map(lambda number: number / 64)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(times, min_size=2, max_size=4),
    st.lists(st.tuples(times, times), min_size=3, max_size=3),
    st.integers(1, 64),
)
def test_windows_are_those_that_the_first_stage_concludes_from_all_tallies(
    busy_s: list[float], found: list[tuple[float, float]], num_microbatches: int
) -> None:
    hops = [Hop(forward_s=one, backward_s=one, latency_s=other) for one, other in found][: len(busy_s) - 1]
    first, *behind = hops
    travel_s = first.forward_s + first.latency_s
    members = [reduced(busy_s[0], backward_travel_s=travel_s, rtt_s=2 * first.latency_s)]
    others = tally_of(len(busy_s) - 1, busy_s=tuple(busy_s[1:]), hops=tuple(behind), travel_s=travel_s)
    tally = joined(stage_tally(0, members), members, others)
    assert tally.hops == tuple(hops)
    measured = Measured(pass_s=tuple(one / num_microbatches for one in busy_s), hops=tuple(hops))
    scenario = pipeline(len(busy_s), num_microbatches)
    chosen = pipeline_of((1,) * len(busy_s), num_microbatches=num_microbatches).next_windows(tally)
    assert next_windows(scenario, measured) == chosen


def reduced(busy_s: float, **seen: Any) -> Reduced:
    return Reduced(seen=Seen(busy_s=busy_s, **seen), loss_sum=1.0, squared_norms=(1.0,))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(1, 20), st.sampled_from(list(Policy)))
def test_first_windows_are_those_that_members_begin_with(ranks: list[int], m: int, policy: Policy) -> None:
    scenario = pipeline(len(ranks), m, policy=policy)
    loads = zip(scenario.stages, ranks, strict=True)
    scenario = replace(scenario, stages=tuple(replace(one, num_ranks=number) for one, number in loads))
    chosen = pipeline_of(tuple(ranks), num_microbatches=m, policy=policy).first_windows()
    assert first_windows(scenario) == chosen


@pytest.mark.parametrize("ranks", [(2, 2, 2), (4, 1, 2), (1, 4, 1), (2, 3, 1)])
def test_ranks_with_measured_windows_are_as_busy_as_with_all_in_flight(ranks: tuple[int, ...]) -> None:
    """Stages of several ranks, each so much slower that all stages keep step."""
    plain = pipeline(3, 48, serialise_s=0.1, latency_s=2.0)
    loads = zip(plain.stages, ranks, strict=True)
    scenario = replace(
        plain,
        stages=tuple(
            replace(one, num_ranks=number, forward_s=float(number), backward_s=2.0 * number)
            for one, number in loads
        ),
    )
    found = simulate_scenario(scenario, num_steps=3).steps[-1]
    unbounded = simulate_scenario(replace(scenario, windows=(48, 48, 48))).steps[-1]
    assert found.duration_s <= 1.02 * unbounded.duration_s
    assert found.windows[0] * ranks[0] < 48


def test_what_is_expected_is_what_is_measured() -> None:
    coded = replace(pipeline(3, 24), hops=(hop(0.5, 1.0, coding_s=2.0),) * 2)
    slow = replace(coded.hops[0], line=replace(coded.hops[0].line, handling_s=0.25))
    scenario = replace(coded, hops=(slow, *coded.hops[1:]))
    assert (
        next_windows(scenario, expected(scenario))
        == simulate_scenario(scenario, num_steps=2).steps[-1].windows
    )


@pytest.mark.parametrize("ranks", [(4, 4), (8, 2), (2, 8), (16, 16)])
def test_ranks_that_meet_on_the_line_have_what_hides_it(ranks: tuple[int, int]) -> None:
    """Half of each rank's time a line is taken, and all ranks send at once."""
    scenario = Scenario(
        stages=tuple(
            stage(index, forward_s=float(one), backward_s=2.0 * one, num_ranks=one)
            for index, one in enumerate(ranks)
        ),
        hops=(hop(1.5, 3.0),),
        num_microbatches=64,
    )
    planned = next_windows(scenario, expected(scenario))
    most = next_windows(scenario, at_worst(scenario))
    found = simulate_scenario(scenario, num_steps=3).steps[-1]
    widest = simulate_scenario(replace(scenario, windows=(64, 64))).steps[-1].duration_s
    as_planned = simulate_scenario(replace(scenario, windows=planned)).steps[-1].duration_s
    assert as_planned <= 1.02 * widest
    assert found.duration_s <= 1.02 * widest
    assert all(one <= other for one, other in zip(found.windows, most, strict=True))


@settings(deadline=None, max_examples=40)
@given(
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    num_microbatches=st.integers(1, 12),
    caps=st.integers(1, 6) | st.tuples(*[st.integers(1, 6)] * 3),
    policy=st.sampled_from(list(Policy)),
)
@example(ranks=[1, 2, 1], num_microbatches=2, caps=(1, 1, 2), policy=Policy.GPIPE)
def test_nobody_waits_for_what_cannot_come(
    ranks: list[int], num_microbatches: int, caps: int | tuple[int, ...], policy: Policy
) -> None:
    scenario = Scenario(
        stages=tuple(stage(index, num_ranks=one) for index, one in enumerate(ranks)),
        hops=(hop(0.25, 0.5),) * (len(ranks) - 1),
        num_microbatches=num_microbatches,
        policy=policy,
        max_in_flight=caps[: len(ranks)] if isinstance(caps, tuple) else caps,
    )
    steps = simulate_scenario(scenario, num_steps=2).steps
    assert len(steps) == 2
    each = caps if isinstance(caps, tuple) else (caps,) * 3
    assert all(window <= cap for window, cap in zip(steps[-1].windows, each, strict=False))


@pytest.mark.parametrize("ranks", [(1, 1), (4, 4), (8, 2), (2, 8)])
@pytest.mark.parametrize("memory", ["40 GiB", "9 GiB"])
def test_plan_and_simulation_take_the_same_time(ranks: tuple[int, int], memory: str) -> None:
    clouds = [f"cloud.{name}.ranks={one}" for name, one in zip(("east", "west"), ranks, strict=True)]
    clouds += [f"cloud.{name}.memory={memory}" for name in ("east", "west")]
    chosen = plan(two_clouds("strategy.kind=pipeline", "link.0.rtt=200 ms", *clouds), is_quick=True)
    assert chosen.scenario is not None
    assert chosen.decisions is not None
    assert chosen.scenario.max_in_flight == chosen.decisions.max_in_flight, "workers are bound alike"
    timeline = simulate_scenario(chosen.scenario, num_steps=4)
    assert chosen.estimate.step_s == pytest.approx(timeline.step_s, rel=1e-3)
    for step in timeline.steps:
        caps = chosen.scenario.max_in_flight or 64
        each = caps if isinstance(caps, tuple) else (caps, caps)
        assert all(window <= cap for window, cap in zip(step.windows, each, strict=True))
