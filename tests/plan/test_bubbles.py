"""Closed forms of the bubble, against the published figures and against a scan of their own optimum."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.bubbles import (
    best_blocking_microbatches,
    best_overlapped_microbatches,
    blocking_bubble,
    fill_bubble,
    interval_s,
    overlapped_bubble,
    overlapped_step_s,
)
from isthmus.plan.scenario import Hop


def equal_hops(num_stages: int, on_line_s: float, latency_s: float) -> list[Hop]:
    return [Hop(forward_s=on_line_s, backward_s=on_line_s, latency_s=latency_s)] * (num_stages - 1)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "on_line_s", "latency_s", "blocking", "overlapped"),
    [
        (2, 16, 0.3, 3.0, 0.693, 0.167),
        (2, 64, 1.5, 6.0, 0.834, 0.086),
        (4, 128, 2.0, 10.0, 0.960, 0.174),
        (2, 16, 0.0, 1.0, 0.422, 0.094),
    ],
)
def test_published_figures(
    num_stages: int,
    num_microbatches: int,
    on_line_s: float,
    latency_s: float,
    blocking: float,
    overlapped: float,
) -> None:
    found = blocking_bubble(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        forward_s=1.0,
        backward_s=2.0,
        travel_s=on_line_s + latency_s,
    )
    assert found == pytest.approx(blocking, abs=6e-4)
    hops = equal_hops(num_stages, on_line_s, latency_s)
    found = overlapped_bubble(num_microbatches=num_microbatches, compute_s=3.0, hops=hops)
    assert found == pytest.approx(overlapped, abs=6e-4)


def test_the_measured_case_has_its_closed_form() -> None:
    """20 ms each way, 500 Mbit/s, 256 KiB per message: 1.04 s."""
    hops = equal_hops(2, 256 * 1024 * 8 / 500e6, 0.02)
    assert overlapped_step_s(num_microbatches=32, compute_s=0.03, hops=hops) == pytest.approx(1.04, abs=0.005)


def test_without_communication_all_three_agree() -> None:
    plain = fill_bubble(num_stages=4, num_microbatches=12)
    assert plain == pytest.approx(3 / 15)
    assert blocking_bubble(
        num_stages=4, num_microbatches=12, forward_s=1, backward_s=2, travel_s=0
    ) == pytest.approx(plain)
    hops = equal_hops(4, 0.0, 0.0)
    assert overlapped_bubble(num_microbatches=12, compute_s=3.0, hops=hops) == pytest.approx(plain)


def test_a_slow_line_sets_the_rate() -> None:
    hops = [Hop(forward_s=5.0, backward_s=1.0, latency_s=0.0)]
    assert interval_s(compute_s=3.0, hops=hops) == 5.0
    assert interval_s(compute_s=3.0, hops=[]) == 3.0
    assert overlapped_step_s(num_microbatches=10, compute_s=3.0, hops=hops) == pytest.approx(50 + 3 + 6)


positive = st.floats(0.01, 100.0)


@given(stages=st.integers(2, 8), batch_s=positive, on_line_s=positive, latency_s=positive)
@settings(max_examples=50, deadline=None)
def test_the_blocking_optimum_is_one(stages: int, batch_s: float, on_line_s: float, latency_s: float) -> None:
    def bubble(microbatches: float) -> float:
        # Equation (2) with the batch fixed, for a number that need not be whole.
        each_s, travel_s = batch_s / microbatches, latency_s + on_line_s / microbatches
        idle_s = (stages - 1) * (each_s + 2 * microbatches * travel_s)
        return idle_s / (batch_s + idle_s)

    best = best_blocking_microbatches(batch_compute_s=batch_s, latency_s=latency_s)
    assert bubble(best) <= min(bubble(best * 1.01), bubble(best / 1.01))


@given(
    stages=st.integers(2, 8), batch_s=positive, on_line_s=positive, latency_s=positive, overhead_s=positive
)
@settings(max_examples=50, deadline=None)
def test_the_overlapped_optimum_is_one(
    stages: int, batch_s: float, on_line_s: float, latency_s: float, overhead_s: float
) -> None:
    def step_s(microbatches: float) -> float:
        each_s = batch_s / microbatches
        travel_s = latency_s + on_line_s / microbatches
        return microbatches * (each_s + overhead_s) + (stages - 1) * (each_s + 2 * travel_s)

    best = best_overlapped_microbatches(
        num_stages=stages, batch_compute_s=batch_s, batch_on_line_s=on_line_s, overhead_s=overhead_s
    )
    assert step_s(best) <= min(step_s(best * 1.01), step_s(best / 1.01))


def test_nothing_to_trade_means_as_many_as_can_be() -> None:
    assert best_blocking_microbatches(batch_compute_s=1.0, latency_s=0.0) == math.inf
    assert (
        best_overlapped_microbatches(num_stages=2, batch_compute_s=1, batch_on_line_s=1, overhead_s=0)
        == math.inf
    )


def test_no_stage_and_no_microbatch_are_refused() -> None:
    with pytest.raises(ValueError, match="0 stages"):
        fill_bubble(num_stages=0, num_microbatches=1)
    with pytest.raises(ValueError, match="0 micro-batches"):
        overlapped_step_s(num_microbatches=0, compute_s=1.0, hops=[])
