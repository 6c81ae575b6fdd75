"""What the choice of codecs comes to over whole steps, whatever a run began with."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.codecs import (
    Bounds,
    Crossing,
    Figures,
    Loss,
    Pair,
    choose,
    codec_levels,
)
from tests.plan.scenarios import changed

NUM_MICROBATCHES = 16
# So long a run that the bases it sends count for little.
CROSSING = Crossing(num_rows=256, width=1024, num_steps=1_000_000, num_microbatches=NUM_MICROBATCHES)
LEVELS = codec_levels(1024, shares_ids=True)
PAIRS = [Pair(forward=level.forward, backward=level.backward) for level in LEVELS]
# Within a class of loss, a learned basis costs more than fewer bits.
LOSSES = dict(zip(PAIRS, ((level.loss, level.is_joint) for level in LEVELS), strict=True))


def line(mbps: float) -> Figures:
    return Figures(interval_s=0.03, down_bps=1e6 * mbps, up_bps=1e6 * mbps)


def few(num_microbatches: int) -> Crossing:
    return replace(CROSSING, num_microbatches=num_microbatches)


def step_s(pair: Pair, figures: Figures, num_microbatches: int) -> float:
    """`m·τ + t`, and an activation and a gradient that nothing overlaps."""
    forward_s = 8 * pair.forward_bytes(CROSSING) / figures.down_bps
    backward_s = 8 * pair.backward_bytes(CROSSING) / figures.up_bps
    pace_s = max(figures.interval_s, forward_s, backward_s)
    return num_microbatches * pace_s + figures.interval_s + forward_s + backward_s


def settled(pair: Pair, crossing: Crossing, figures: Figures) -> Pair:
    """Where measured figures lead."""
    for _ in LEVELS:
        moved = changed(pair, crossing, figures, levels=LEVELS, bounds=Bounds(loss=Loss.SOME))
        if moved is None:
            return pair
        pair = moved.pair
    raise AssertionError("it never ends")


@settings(deadline=None, max_examples=200)
@given(mbps=st.floats(1, 2000), start=st.sampled_from(PAIRS), number=st.integers(2, 64))
def test_no_step_is_a_tenth_longer_than_with_a_level_that_loses_no_more(
    mbps: float, start: Pair, number: int
) -> None:
    figures = line(mbps)
    own = settled(start, few(number), figures)
    own_loss = max(
        LOSSES[pair] for pair in PAIRS if own.forward == pair.forward or own.backward == pair.backward
    )
    rivals_s = [step_s(pair, figures, number) for pair, loss in LOSSES.items() if loss <= own_loss]
    assert step_s(own, figures, number) <= 1.1 * min(rivals_s)


@settings(deadline=None, max_examples=200)
@given(
    wide=st.floats(1, 2000), share=st.floats(0.01, 1), number=st.integers(1, 64), loss=st.sampled_from(Loss)
)
def test_a_narrower_line_never_has_less_lossy_codecs(
    wide: float, share: float, number: int, loss: Loss
) -> None:
    before, behind = (
        choose(few(number), line(mbps), levels=LEVELS, bounds=Bounds(loss=loss))
        for mbps in (wide, wide * share)
    )
    assert behind.loss >= before.loss
    assert behind.pair.forward_bytes(CROSSING) <= before.pair.forward_bytes(CROSSING)
    assert behind.pair.backward_bytes(CROSSING) <= before.pair.backward_bytes(CROSSING)


def test_a_transfer_that_computing_has_ceased_to_overlap_gets_a_lossier_codec() -> None:
    bf16 = PAIRS[1]
    # 27 ms on the line when it was planned, 34 ms now.
    assert choose(few(64), line(155), levels=LEVELS).pair == bf16
    moved = changed(bf16, few(64), line(125), levels=LEVELS)
    assert moved is not None
    assert moved.pair == PAIRS[2]


@pytest.mark.parametrize("num_microbatches", [2, 4, 16, 64])
def test_a_link_that_computing_overlaps_stays_raw_however_few_the_microbatches(num_microbatches: int) -> None:
    # 26 of 30 ms on the line.
    assert choose(few(num_microbatches), line(323), levels=LEVELS).pair == PAIRS[0]


def test_nothing_is_overlapped_by_a_single_microbatch() -> None:
    assert choose(few(1), line(323), levels=LEVELS).pair == PAIRS[2]
    assert choose(few(1), line(100_000), levels=LEVELS).pair == PAIRS[0]


def test_of_codecs_that_are_overlapped_a_step_of_few_microbatches_has_one_with_short_ends() -> None:
    # bfloat16 takes 27 of 30 ms each way.
    assert choose(few(64), line(155), levels=LEVELS).pair == PAIRS[1]
    found = choose(few(4), line(155), levels=LEVELS)
    assert found.pair == PAIRS[2]
    assert "bf16 would take" in found.reason


def test_no_more_is_lost_than_overlaps_the_link() -> None:
    # int4 takes 22 of 30 ms; a subspace would make the ends of a step shorter.
    found = choose(few(4), line(50), levels=LEVELS, bounds=Bounds(loss=Loss.SOME))
    assert (found.loss, found.pair) == (Loss.SOME, PAIRS[3])
    assert changed(PAIRS[3], few(4), line(38), levels=LEVELS, bounds=Bounds(loss=Loss.SOME)) is None
    assert settled(PAIRS[-1], few(16), line(60)) == PAIRS[3]
