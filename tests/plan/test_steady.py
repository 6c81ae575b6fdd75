"""A step of many micro-batches takes as long as one of fewer and the periods that it leaves out."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isthmus.plan.candidates import NUM_STEPS, least_passes, simulate_step
from isthmus.plan.scenario import (
    HopLoad,
    Line,
    Policy,
    Scenario,
    StageLoad,
    one_for_all,
    scenario_bound_s,
)
from isthmus.plan.simulated import simulate_scenario
from tests.plan.scenarios import pipeline, scenarios

# Of the time of a step. Where two stages are almost equally fast, the pace may change after it looks steady.
MOST_ERROR, RARE_ERROR = 0.005, 0.015
POLICIES = [Policy.WAN_ONE_F_ONE_B] * 3 + [Policy.LOCK_STEP, Policy.ONE_F_ONE_B, Policy.GPIPE]


@st.composite
def long_scenarios(draw: st.DrawFn) -> Scenario:
    """Pipelines of up to four stages, of lines from slow to fast, with up to 256 micro-batches."""
    num_stages = draw(st.integers(1, 4))
    first_trained = draw(st.sampled_from([0, 0, 0, num_stages - 1]))
    equal = draw(st.sampled_from([1, 1, 2, 4]))
    stages, hops = [], []
    for index in range(num_stages):
        num_ranks = equal if draw(st.booleans()) else draw(st.integers(1, 4))
        load = StageLoad(
            cloud=f"c{index}",
            forward_s=num_ranks * draw(st.floats(0.005, 0.05)),
            backward_s=num_ranks * draw(st.floats(0.005, 0.1)) if index >= first_trained else 0.0,
            update_s=draw(st.sampled_from([0.0, 0.05, 0.5])),
            num_ranks=num_ranks,
        )
        stages.append(load)
    for index in range(num_stages - 1):
        down_bps, up_bps = (10 ** draw(st.floats(7.5, 10)) for _ in range(2))
        latency_s = draw(st.sampled_from([0.0, 0.005, 0.02, 0.1]))
        line = Line(down_bps=down_bps, up_bps=up_bps, latency_s=latency_s, handling_s=0.001)
        goes_back = index >= first_trained
        hop = HopLoad(
            line=line,
            forward_bytes=draw(st.integers(10_000, 2_000_000)),
            backward_bytes=draw(st.integers(10_000, 2_000_000)) if goes_back else 0,
            forward_coding_s=0.002,
            backward_coding_s=0.002 if goes_back else 0.0,
        )
        hops.append(hop)
    return Scenario(
        stages=tuple(stages),
        hops=tuple(hops),
        num_microbatches=draw(st.sampled_from([1, 2, 4, 6, 12, 16, 32, 64, 100, 128, 256])),
        policy=draw(st.sampled_from(POLICIES)),
        max_in_flight=draw(st.sampled_from([None, None, 1, 2, 4, 8])),
        first_trained=first_trained,
    )


def whole_s(scenario: Scenario) -> float:
    return simulate_scenario(one_for_all(scenario), num_steps=NUM_STEPS).step_s


@settings(max_examples=40, deadline=None)
@given(long_scenarios())
def test_it_takes_as_long_as_the_whole_simulation(scenario: Scenario) -> None:
    assert simulate_step(scenario).step_s == pytest.approx(whole_s(scenario), rel=MOST_ERROR)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(long_scenarios())
def test_many_take_as_long_as_the_whole_simulation(scenario: Scenario) -> None:
    assert simulate_step(scenario).step_s == pytest.approx(whole_s(scenario), rel=RARE_ERROR)


@settings(max_examples=60, deadline=None)
@given(st.one_of(long_scenarios(), scenarios()))
@example(pipeline(4, 128, serialise_s=2.0, latency_s=10.0))
def test_no_step_is_shorter_than_its_bound(scenario: Scenario) -> None:
    assert scenario_bound_s(scenario) <= whole_s(scenario) * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(st.one_of(long_scenarios(), scenarios()))
def test_none_of_many_steps_is_shorter_than_its_bound(scenario: Scenario) -> None:
    assert scenario_bound_s(scenario) <= whole_s(scenario) * (1 + 1e-9)


def test_the_bound_of_overlapped_trips_is_the_closed_form() -> None:
    one = pipeline(2, 16, serialise_s=0.3, latency_s=3.0)
    assert scenario_bound_s(one) == pytest.approx(16 * 3 + 3 + 2 * 3.3)
    assert whole_s(one) == pytest.approx(scenario_bound_s(one), rel=0.02)


def test_many_micro_batches_take_no_more_work_than_some() -> None:
    some, many = (pipeline(3, number, serialise_s=0.3, latency_s=3.0) for number in (96, 960))
    assert simulate_step(many).num_passes < 2 * simulate_step(some).num_passes
    assert simulate_step(many).windows == simulate_step(some).windows
    assert least_passes(many) <= simulate_step(many).num_passes


def test_jitter_has_no_period() -> None:
    one = pipeline(2, 64, serialise_s=0.3, latency_s=3.0)
    hop = one.hops[0]
    shaky = replace(one, hops=(replace(hop, line=replace(hop.line, jitter_s=1.0)),))
    assert simulate_step(shaky).step_s == whole_s(shaky)
