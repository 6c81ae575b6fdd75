"""Windows, and the time that a step takes with them."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.scenario import (
    Caps,
    Hop,
    HopLoad,
    Line,
    Policy,
    Scenario,
    StageLoad,
    windows,
)
from isthmus.plan.simulated import simulate_scenario
from isthmus.plan.types import Member

FORWARD_S, BACKWARD_S = 1.0, 2.0
COMPUTE_S = FORWARD_S + BACKWARD_S
BYTES_PER_S = 10**9


def step_s(
    num_microbatches: int,
    hops: Sequence[Hop],
    stage_windows: Sequence[int],
    *,
    policy: Policy = Policy.WAN_ONE_F_ONE_B,
) -> float:
    """The simulated time of one step of equal stages."""
    scenario = Scenario(
        stages=tuple(
            StageLoad(cloud=f"cloud{stage}", forward_s=FORWARD_S, backward_s=BACKWARD_S)
            for stage in range(len(hops) + 1)
        ),
        hops=tuple(_load(hop) for hop in hops),
        num_microbatches=num_microbatches,
        windows=tuple(stage_windows),
        policy=policy,
    )
    return simulate_scenario(scenario).step_s


def _load(hop: Hop) -> HopLoad:
    return HopLoad(
        line=Line(down_bps=8 * BYTES_PER_S, up_bps=8 * BYTES_PER_S, latency_s=hop.latency_s),
        forward_bytes=round(hop.forward_s * BYTES_PER_S),
        backward_bytes=round(hop.backward_s * BYTES_PER_S),
    )


def windows_of(
    hops: Sequence[Hop],
    *,
    policy: Policy = Policy.WAN_ONE_F_ONE_B,
    num_microbatches: int = 99,
    interval_s: float = COMPUTE_S,
    max_in_flight: Caps | None = None,
) -> tuple[int, ...]:
    stages = tuple((Member(f"cloud-{index}"),) for index in range(len(hops) + 1))
    pipeline = Pipeline(stages=stages, num_steps=1, num_microbatches=num_microbatches, policy=policy)
    return windows(pipeline, hops, interval_s=interval_s, max_in_flight=max_in_flight)


def equal_hops(num_stages: int, serialise_s: float, latency_s: float) -> list[Hop]:
    return [Hop(forward_s=serialise_s, backward_s=serialise_s, latency_s=latency_s)] * (num_stages - 1)


hops_of_wans = st.lists(
    st.builds(
        Hop,
        forward_s=st.floats(0, COMPUTE_S / 2),
        backward_s=st.floats(0, COMPUTE_S / 2),
        latency_s=st.floats(0, 4 * COMPUTE_S),
    ),
    min_size=1,
    max_size=5,
)


@given(hops=hops_of_wans, m=st.integers(1, 24))
@settings(deadline=None, max_examples=60)
def test_the_window_hides_every_link_that_compute_can_hide(hops: list[Hop], m: int) -> None:
    """A step takes `m·t + (p-1)·t + 2·Σ tt`, though the window is far below m where links are short."""
    closed_form_s = (m + len(hops)) * COMPUTE_S + sum(hop.round_trip_s for hop in hops)
    chosen = windows_of(hops, num_microbatches=m)
    assert step_s(m, hops, chosen) <= closed_form_s + 1e-6


def test_one_micro_batch_less_in_flight_shows() -> None:
    hops = equal_hops(4, 0.3, 1.2)
    enough = windows_of(hops)
    full_s = step_s(64, hops, enough)
    assert step_s(64, hops, [max(1, one - 1) for one in enough]) > 1.1 * full_s


def test_each_round_trip_is_rounded_up_by_itself() -> None:
    hops = equal_hops(4, 0.0, 0.1)
    assert windows_of(hops, interval_s=1.0) == (7, 5, 3, 1)


def test_a_quotient_that_is_whole_but_for_rounding_is_not_rounded_up() -> None:
    assert windows_of([Hop(forward_s=0.1, backward_s=0.1, latency_s=0.05)], interval_s=0.1)[0] == 5


def test_memory_has_the_last_word() -> None:
    hops = equal_hops(2, 1.5, 6.0)
    assert windows_of(hops, max_in_flight=4)[0] == 4


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Policy.GPIPE, (8, 2, 2)), (Policy.ONE_F_ONE_B, (3, 2, 1)), (Policy.WAN_ONE_F_ONE_B, (8, 2, 1))],
)
def test_a_small_window_binds_the_stages_behind_it(policy: Policy, expected: tuple[int, ...]) -> None:
    hops = equal_hops(3, 1.0, 10.0)
    found = windows_of(hops, policy=policy, num_microbatches=8, max_in_flight=(99, 2, 99))
    assert found == expected


@pytest.mark.parametrize(("m", "cap"), [(8, 8), (8, 5), (16, 6), (16, 4), (16, 3)])
@pytest.mark.parametrize("on_line_s", [0.5, 2.0, 2.9])
def test_windows_that_keep_an_order_are_near_the_best_there_are(m: int, cap: int, on_line_s: float) -> None:
    """Behind one that memory binds others must shrink, or stages wait for what cannot come yet."""
    hops = equal_hops(3, on_line_s, 0.3)
    chosen = windows_of(hops, policy=Policy.LOCK_STEP, num_microbatches=m, max_in_flight=(cap, m, m))
    assert chosen[0] <= cap
    every = ((a, b, c) for a in range(1, cap + 1) for b in range(1, a + 1) for c in range(1, b + 1))
    least_s = min(step_s(m, hops, one, policy=Policy.LOCK_STEP) for one in every)
    assert step_s(m, hops, chosen, policy=Policy.LOCK_STEP) <= 1.04 * least_s
