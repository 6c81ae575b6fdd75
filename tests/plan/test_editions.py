"""The basis of a subspace counts by the steps that it serves."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.job.codec import parse_codec
from isthmus.job.codec_steps import Subspace, num_due, num_versions
from isthmus.plan.codecs import (
    Bounds,
    Crossing,
    Figures,
    Loss,
    Pair,
    choose,
    codec_levels,
    num_learners,
)
from isthmus.plan.costs import Messages
from isthmus.plan.plan import PipelineSettings
from isthmus.plan.planner import plan
from tests.plan.jobs import two_clouds
from tests.plan.scenarios import changed

CROSSING = Crossing(num_rows=256, width=1024)
LEVELS = codec_levels(1024, shares_ids=True)
BOUNDS = Bounds(loss=Loss.SOME)
INT4, LOSSIEST = (Pair(forward=level.forward, backward=level.backward) for level in (LEVELS[3], LEVELS[-1]))
THIN = Figures(interval_s=0.03, down_bps=4e6, up_bps=4e6)


def over(num_steps: int, num_microbatches: int = 16, num_learners: int = 1) -> Crossing:
    crossing = replace(CROSSING, num_microbatches=num_microbatches, num_learners=num_learners)
    return replace(crossing, num_steps=num_steps)


@settings(deadline=None, max_examples=100)
@given(every=st.integers(1, 130), age=st.integers(0, 400), num_steps=st.integers(1, 400))
def test_editions_are_counted_as_they_fall_due(every: int, age: int, num_steps: int) -> None:
    due = [step == 0 or num_due(step, every=every) > num_due(step - 1, every=every) for step in range(800)]
    step = Subspace(rank=8, every=every)
    assert num_versions(step, num_steps, age=age) == sum(due[age : age + num_steps])


def test_what_has_no_basis_has_no_editions_and_a_run_without_end_does_not_count_them() -> None:
    assert INT4.basis_bytes(over(1)) == 0
    assert LOSSIEST.basis_bytes(CROSSING) == 0
    assert LOSSIEST.basis_bytes(over(1, 1)) > 400_000


def test_every_pair_of_ranks_has_its_own_basis() -> None:
    assert num_learners(4, 6) == 12
    alone, many = (LOSSIEST.basis_bytes(over(100, num_learners=one)) for one in (1, 12))
    assert many == pytest.approx(12 * alone)


def test_a_run_too_short_for_a_basis_does_without() -> None:
    short = choose(over(2, 1), THIN, levels=LEVELS, bounds=BOUNDS)
    assert short.pair == INT4
    longer = choose(over(1000), THIN, levels=LEVELS, bounds=BOUNDS)
    assert longer.pair == LOSSIEST
    assert 0.02 * longer.forward_s < longer.basis_s < 0.1 * longer.forward_s
    assert "its basis adds" in longer.reason.partition("; gradients")[0]


@settings(deadline=None, max_examples=150)
@given(
    mbps=st.floats(0.5, 200),
    num_steps=st.integers(1, 2000),
    num_microbatches=st.integers(1, 32),
)
def test_no_basis_is_sent_that_costs_more_than_it_saves(
    mbps: float, num_steps: int, num_microbatches: int
) -> None:
    crossing, line = over(num_steps, num_microbatches), replace(THIN, down_bps=mbps * 1e6, up_bps=mbps * 1e6)
    own_s, plain_s = (
        max(line.interval_s, one.forward_s, one.backward_s)
        + (one.forward_s + one.backward_s) / num_microbatches
        + one.basis_s
        for loss in (Loss.SOME, Loss.SLIGHT)
        for one in [choose(crossing, line, levels=LEVELS, bounds=Bounds(loss=loss))]
    )
    assert own_s <= 1.1 * plain_s


@settings(deadline=None, max_examples=150)
@given(wide=st.floats(1, 2000), share=st.floats(0.01, 1), num_steps=st.integers(1, 2000))
def test_a_narrower_line_never_has_less_lossy_codecs(wide: float, share: float, num_steps: int) -> None:
    before, behind = (
        choose(over(num_steps), replace(THIN, down_bps=bps, up_bps=bps), levels=LEVELS, bounds=BOUNDS).pair
        for bps in (wide * 1e6, wide * share * 1e6)
    )
    assert behind.forward_bytes(CROSSING) <= before.forward_bytes(CROSSING)
    assert behind.backward_bytes(CROSSING) <= before.backward_bytes(CROSSING)


def test_a_basis_that_is_there_serves_to_the_end_and_a_new_one_is_not_begun_so_late() -> None:
    last, bounds = over(2, 1), BOUNDS
    assert changed(LOSSIEST, last, THIN, levels=LEVELS, bounds=bounds, age=80) is None
    assert changed(INT4, last, THIN, levels=LEVELS, bounds=bounds, age=80) is None
    moved = changed(INT4, over(300, 2), THIN, levels=LEVELS, bounds=bounds, age=80)
    assert moved is not None
    assert moved.pair == LOSSIEST


def test_the_plan_counts_editions_among_bytes_and_dollars() -> None:
    thin = ("strategy.kind=pipeline", "link.0.bandwidth=20 Mbps", "link.0.usd_per_gib=0.1")
    codec = 'link.0.codec={ forward = "subspace(128, anchor=tokens) | int4", backward = "int4(stochastic)" }'
    plans = [plan(two_clouds(*thin, codec, f"train.steps={steps}")) for steps in (20, 2000)]
    short, long = (one.links[0] for one in plans)
    assert short.up_bytes == long.up_bytes
    assert short.down_bytes > 1.05 * long.down_bytes
    planned = plans[0].settings
    assert isinstance(planned, PipelineSettings)
    pair = Pair(forward=parse_codec(short.forward_codec), backward=parse_codec(short.backward_codec))
    number = planned.num_microbatches
    crossing = Crossing(num_rows=65536 // number, width=2048, num_steps=20, num_microbatches=number)
    payload_bytes = pair.forward_bytes(crossing) + round(pair.basis_bytes(crossing))
    messages = Messages(integer_bytes=2)
    assert short.down_bytes == number * messages.forward_bytes(payload_bytes, num_tokens=crossing.num_rows)
    assert short.usd_per_gib == long.usd_per_gib == 0.1


def test_a_crossing_has_steps_and_messages() -> None:
    with pytest.raises(ValueError, match="nothing crosses"):
        over(0)
