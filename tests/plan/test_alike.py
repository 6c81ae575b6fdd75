"""One rank that stands for all takes as long as all of them do."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.scenario import HopLoad, Line, Policy, Scenario, StageLoad, one_for_all
from isthmus.plan.simulated import simulate_scenario

TIMES = st.floats(0.01, 0.2)
BYTES = st.integers(1000, 50_000)


@st.composite
def lock_steps(draw: st.DrawFn) -> Scenario:
    num_stages, num_ranks = draw(st.integers(1, 4)), draw(st.sampled_from([2, 3]))
    return Scenario(
        stages=tuple(
            StageLoad(
                cloud=str(index),
                forward_s=draw(TIMES),
                backward_s=draw(TIMES),
                update_s=draw(st.sampled_from([0.0, 0.05])),
                num_ranks=num_ranks,
            )
            for index in range(num_stages)
        ),
        hops=tuple(draw(hops()) for _ in range(num_stages - 1)),
        num_microbatches=num_ranks * draw(st.integers(1, 7)),
        policy=draw(st.sampled_from([one for one in Policy if one.keeps_order])),
        max_in_flight=draw(st.sampled_from([None, 2, 4])),
    )


@st.composite
def hops(draw: st.DrawFn) -> HopLoad:
    bits_per_s = st.sampled_from([1e6, 1e7, 1e8])
    return HopLoad(
        line=Line(
            down_bps=draw(bits_per_s),
            up_bps=draw(bits_per_s),
            latency_s=draw(st.floats(0, 0.2)),
            handling_s=draw(st.sampled_from([0.0, 0.003])),
        ),
        forward_bytes=draw(BYTES),
        backward_bytes=draw(BYTES),
        forward_coding_s=draw(st.sampled_from([0.0, 0.01])),
        backward_coding_s=draw(st.sampled_from([0.0, 0.01])),
    )


@settings(max_examples=150, deadline=None)
@given(lock_steps())
def test_it_takes_as_long(scenario: Scenario) -> None:
    one = one_for_all(scenario)
    assert [stage.num_ranks for stage in one.stages] == [1] * scenario.num_stages
    together, alone = (simulate_scenario(which, num_steps=2) for which in (scenario, one))
    assert alone.step_s == pytest.approx(together.step_s, rel=1e-6)
    for first, second in zip(together.traffic, alone.traffic, strict=True):
        assert (first.down_bytes, first.up_bytes) == (second.down_bytes, second.up_bytes)


@settings(max_examples=40, deadline=None)
@given(lock_steps())
def test_what_is_not_alike_stays_as_it_is(scenario: Scenario) -> None:
    different = [
        replace(scenario, policy=Policy.WAN_ONE_F_ONE_B),
        replace(scenario, num_microbatches=scenario.num_microbatches + 1),
        replace(scenario, stages=(*scenario.stages[:-1], replace(scenario.stages[-1], num_ranks=1))),
    ]
    if scenario.num_stages == 1:
        different.pop()
    assert all(one_for_all(one) is one for one in different)
