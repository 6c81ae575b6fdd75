"""What the choice of codecs comes to over whole steps, whatever a run began with."""

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.codec_choice import Bounds, Figures, choose, reconsider
from isthmus.plan.ladder import Crossing, Loss, Pair, ladder

CROSSING = Crossing(num_rows=256, width=1024)
RUNGS = ladder(1024, shares_ids=True)
PAIRS = [Pair(forward=rung.forward, backward=rung.backward) for rung in RUNGS]
LOSSES = dict(zip(PAIRS, (rung.loss for rung in RUNGS), strict=True))
NUM_MICROBATCHES = 16


def line(mbps: float) -> Figures:
    return Figures(interval_s=0.03, down_bps=1e6 * mbps, up_bps=1e6 * mbps)


def step_s(pair: Pair, figures: Figures) -> float:
    """`m·τ + t`, and an activation and a gradient that nothing hides."""
    forward_s = 8 * pair.forward_bytes(CROSSING) / figures.down_bps
    backward_s = 8 * pair.backward_bytes(CROSSING) / figures.up_bps
    pace_s = max(figures.interval_s, forward_s, backward_s)
    return NUM_MICROBATCHES * pace_s + figures.interval_s + forward_s + backward_s


def settled(pair: Pair, figures: Figures) -> Pair:
    """Where measured figures lead."""
    for _ in RUNGS:
        moved = reconsider(pair, CROSSING, figures, rungs=RUNGS, bounds=Bounds(loss=Loss.SOME))
        if moved is None:
            return pair
        pair = moved.pair
    raise AssertionError("it never ends")


@settings(deadline=None, max_examples=200)
@given(mbps=st.floats(1, 2000), start=st.sampled_from(PAIRS))
def test_no_step_is_a_tenth_longer_than_with_a_rung_that_loses_no_more(mbps: float, start: Pair) -> None:
    figures = line(mbps)
    own = settled(start, figures)
    own_loss = max(
        LOSSES[pair] for pair in PAIRS if own.forward == pair.forward or own.backward == pair.backward
    )
    rivals_s = [step_s(pair, figures) for pair, loss in LOSSES.items() if loss <= own_loss]
    assert step_s(own, figures) <= 1.1 * min(rivals_s)


@settings(deadline=None, max_examples=200)
@given(wide=st.floats(1, 2000), share=st.floats(0.01, 1))
def test_a_narrower_line_never_has_milder_codecs(wide: float, share: float) -> None:
    before, behind = (
        choose(CROSSING, line(mbps), rungs=RUNGS, bounds=Bounds(loss=Loss.SOME))
        for mbps in (wide, wide * share)
    )
    assert behind.loss >= before.loss
    assert behind.pair.forward_bytes(CROSSING) <= before.pair.forward_bytes(CROSSING)
    assert behind.pair.backward_bytes(CROSSING) <= before.pair.backward_bytes(CROSSING)


def test_a_transfer_that_computing_has_ceased_to_hide_gets_a_stronger_codec() -> None:
    bf16 = PAIRS[1]
    # 28 ms on the line when it was planned, 32 ms now.
    assert choose(CROSSING, line(150), rungs=RUNGS).pair == bf16
    moved = reconsider(bf16, CROSSING, line(131), rungs=RUNGS)
    assert moved is not None
    assert moved.pair == PAIRS[2]
