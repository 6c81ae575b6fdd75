"""The least lossy codec that overlaps a link."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.job.codec import parse_codec
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

CROSSING = Crossing(num_rows=4096, width=768)
LEVELS = codec_levels(768)
MBPS = 1e6
SOME = Bounds(loss=Loss.SOME)


def figures(down_mbps: float, up_mbps: float | None = None, *, interval_s: float = 0.15) -> Figures:
    up_mbps = down_mbps if up_mbps is None else up_mbps
    return Figures(interval_s=interval_s, down_bps=down_mbps * MBPS, up_bps=up_mbps * MBPS)


def chosen(line: Figures, bounds: Bounds, crossing: Crossing = CROSSING) -> tuple[str, str]:
    pair = choose(crossing, line, levels=LEVELS, bounds=bounds).pair
    return str(pair.forward), str(pair.backward)


def test_the_levels_send_ever_fewer_bytes_at_ever_more_loss() -> None:
    pairs = [Pair(forward=level.forward, backward=level.backward) for level in LEVELS]
    for measure in (Pair.forward_bytes, Pair.backward_bytes):
        sizes = [measure(pair, CROSSING) for pair in pairs]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == len(sizes)
    assert [level.loss for level in LEVELS] == sorted(level.loss for level in LEVELS)


def test_narrow_cuts_have_no_subspace_and_anchors_need_shared_ids() -> None:
    assert len(codec_levels(16)) == 4
    assert "anchor=tokens" in str(codec_levels(768, shares_ids=True)[-1].forward)
    assert "anchor" not in str(LEVELS[-1].forward)


@pytest.mark.parametrize(
    ("mbps", "codecs"),
    [
        (10_000, ("raw", "raw")),
        (1_000, ("raw", "raw")),
        (400, ("bf16", "bf16")),
        (250, ("rotate | int8", "rotate | int8(stochastic)")),
        (120, ("center | rotate | int4", "rotate | int4(stochastic)")),
        (50, ("subspace(192) | int4", "int4(stochastic)")),
        (15, ("subspace(96) | int4", "int4(stochastic)")),
        (1, ("subspace(48) | int4", "int4(stochastic)")),
    ],
)
def test_codecs_grow_lossier_as_the_link_narrows(mbps: float, codecs: tuple[str, str]) -> None:
    assert chosen(figures(mbps), Bounds(loss=Loss.SOME)) == codecs


def test_the_allowed_loss_ends_the_levels() -> None:
    assert chosen(figures(1), Bounds(loss=Loss.NONE)) == ("raw", "raw")
    assert chosen(figures(1), Bounds()) == ("rotate | int8", "rotate | int8(stochastic)")


def test_each_direction_has_its_own() -> None:
    assert chosen(figures(1000, 120), SOME) == ("raw", "rotate | int4(stochastic)")
    assert chosen(figures(250, 1000), Bounds()) == ("rotate | int8", "raw")


def test_nothing_is_compressed_to_beat_a_direction_that_sets_the_pace() -> None:
    choice = choose(CROSSING, figures(120, 10), levels=LEVELS)
    assert str(choice.pair.forward) == "raw"
    assert not choice.is_overlapped(1.0)


def test_gradients_that_do_not_cross_count_for_nothing() -> None:
    frozen = replace(CROSSING, has_gradient=False)
    choice = choose(frozen, figures(1000, 0.001), levels=LEVELS)
    assert (str(choice.pair.forward), choice.backward_s, choice.is_overlapped(1.0)) == ("raw", 0.0, True)
    assert "gradients" not in choice.reason


def test_the_codec_of_the_job_stays() -> None:
    own = parse_codec("topk(0.05) | fp16")
    assert chosen(figures(120), Bounds(loss=Loss.SOME, forward=own)) == (
        str(own),
        "rotate | int4(stochastic)",
    )
    assert chosen(figures(120), Bounds(loss=Loss.SOME, backward=own)) == ("center | rotate | int4", str(own))


def test_a_subspace_of_the_job_narrows_its_gradients_too() -> None:
    own = parse_codec("subspace(64) | int4")
    assert chosen(figures(120), Bounds(forward=own)) == (str(own), "raw")


def test_what_the_guard_ruled_out_is_not_chosen() -> None:
    int8 = Pair(forward=LEVELS[2].forward, backward=LEVELS[3].backward)
    bounds = Bounds(loss=Loss.SOME, least_forward_bytes=int8.forward_bytes(CROSSING))
    assert chosen(figures(10, 120), bounds)[0] == "rotate | int8"


def test_an_element_of_two_bytes_makes_bf16_pointless() -> None:
    half = replace(CROSSING, element_bytes=2)
    picked = {chosen(figures(mbps), SOME, half)[0] for mbps in range(100, 2000, 50)}
    assert picked == {"raw", "rotate | int8", "center | rotate | int4"}


def test_reasons_are_words() -> None:
    overlapped = choose(CROSSING, figures(1000, interval_s=0.3), levels=LEVELS).reason
    assert overlapped == (
        "activations raw: 100.7 ms on the line beside 300 ms of compute; "
        "gradients raw: 100.7 ms on the line beside 300 ms of compute"
    )
    coded = choose(CROSSING, figures(150, 1000), levels=LEVELS, bounds=SOME).reason
    assert coded.startswith(
        "activations center | rotate | int4: 89.21 ms on the line beside 150 ms of compute, "
        "rotate | int8 would take 173 ms; "
    )
    thin = choose(CROSSING, figures(10, 1000), levels=LEVELS).reason
    assert "rotate | int8: 2.595 s on the line beside 150 ms of compute" in thin


@settings(deadline=None, max_examples=100)
@given(
    down=st.floats(0.1, 1e5),
    up=st.floats(0.1, 1e5),
    interval_s=st.floats(0, 10),
    loss=st.sampled_from(Loss),
    rows=st.integers(1, 10_000),
)
def test_no_pair_of_no_more_loss_is_a_tenth_faster(
    down: float, up: float, interval_s: float, loss: Loss, rows: int
) -> None:
    crossing, line = replace(CROSSING, num_rows=rows), figures(down, up, interval_s=interval_s)
    choice = choose(crossing, line, levels=LEVELS, bounds=Bounds(loss=loss))
    own_s = max(line.interval_s, choice.forward_s, choice.backward_s)
    assert choice.loss <= loss
    for level in (level for level in LEVELS if level.loss <= loss):
        pair = Pair(forward=level.forward, backward=level.backward)
        forward_s = 8 * pair.forward_bytes(crossing) / line.down_bps
        backward_s = 8 * pair.backward_bytes(crossing) / line.up_bps
        assert own_s <= 1.1 * max(line.interval_s, forward_s, backward_s)


@settings(deadline=None, max_examples=100)
@given(mbps=st.floats(1, 1e4), drift=st.floats(0.95, 1.05))
def test_small_changes_of_the_figures_change_nothing(mbps: float, drift: float) -> None:
    current = choose(CROSSING, figures(mbps), levels=LEVELS, bounds=Bounds(loss=Loss.SOME)).pair
    moved = changed(current, CROSSING, figures(mbps * drift), levels=LEVELS, bounds=Bounds(loss=Loss.SOME))
    assert moved is None


@settings(deadline=None, max_examples=100)
@given(mbps=st.floats(1, 1e4), start=st.sampled_from(LEVELS))
def test_a_change_lasts_while_the_figures_do(mbps: float, start: object) -> None:
    bounds = Bounds(loss=Loss.SOME)
    pair = next(Pair(forward=level.forward, backward=level.backward) for level in LEVELS if level == start)
    moved = changed(pair, CROSSING, figures(mbps), levels=LEVELS, bounds=bounds)
    if moved is not None:
        assert moved.pair != pair
        assert changed(moved.pair, CROSSING, figures(mbps), levels=LEVELS, bounds=bounds) is None


def test_a_link_that_has_become_thin_gets_a_lossier_codec() -> None:
    raw = Pair(forward=LEVELS[0].forward, backward=LEVELS[0].backward)
    moved = changed(raw, CROSSING, figures(120), levels=LEVELS, bounds=SOME)
    assert moved is not None
    assert str(moved.pair.forward) == "center | rotate | int4"


def test_a_link_that_has_become_wide_gets_raw_again() -> None:
    int4 = Pair(forward=LEVELS[3].forward, backward=LEVELS[3].backward)
    assert changed(int4, CROSSING, figures(180), levels=LEVELS, bounds=SOME) is None
    moved = changed(int4, CROSSING, figures(2000), levels=LEVELS, bounds=SOME)
    assert moved is not None
    assert str(moved.pair.forward) == "raw"


def test_what_is_not_allowed_any_more_is_left_at_once() -> None:
    lossy = Pair(forward=LEVELS[4].forward, backward=LEVELS[4].backward)
    moved = changed(lossy, CROSSING, figures(50), levels=LEVELS)
    assert moved is not None
    assert moved.loss is Loss.SLIGHT


def test_figures_of_no_line_are_refused() -> None:
    with pytest.raises(ValueError, match="no line has these figures"):
        figures(0)
