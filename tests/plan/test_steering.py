"""Codecs change at a step boundary, at both ends, for a reason that is told."""

import math
from dataclasses import replace
from typing import Any

import pytest

from isthmus.job.codec import parse_codec
from isthmus.plan.codecs import RAW_PAIR, Bounds, Crossing, Cut, Loss, Pair, Steering, guarded
from isthmus.plan.end_of_step import Cosines, Tally
from isthmus.plan.scenario import Hop

CROSSING = Crossing(num_rows=512, width=128)


def pair(forward: str, backward: str) -> Pair:
    return Pair(forward=parse_codec(forward), backward=parse_codec(backward))


def cut(codecs: Pair, *, is_free: bool, **changes: Any) -> Cut:
    bounds = Bounds(
        loss=Loss.SOME,
        forward=None if is_free else codecs.forward,
        backward=None if is_free else codecs.backward,
    )
    values: dict[str, Any] = {"crossing": CROSSING, "name": "east-west", "guard_every": 1, "bounds": bounds}
    return Cut(**{**values, "codecs": codecs, "is_free": is_free, **changes})


def tally(
    step: int,
    *,
    on_line_s: float = 0.0,
    cosines: Cosines = Cosines(),  # noqa: B008
    element_bytes: int = 4,
) -> Tally:
    """Of a step in which a micro-batch took 20 ms."""
    hop = Hop(forward_s=on_line_s, backward_s=on_line_s, latency_s=0.01)
    return Tally(
        step=step,
        loss_sum=1.0,
        squared_norms=(),
        busy_s=(0.16, 0.12),
        hops=(hop,),
        travel_s=0.0,
        cosines=(cosines,),
        element_bytes=(element_bytes,),
    )


def steering(*cuts: Cut) -> tuple[Steering, list[str]]:
    found = Steering(cuts, num_microbatches=8)
    return found, found.notes


def test_a_thin_line_gets_a_lossier_codec_once_it_is_measured() -> None:
    steers, notes = steering(cut(RAW_PAIR, is_free=True))
    chosen = [steers(tally(step, on_line_s=0.06)) for step in range(5)]
    assert chosen[:3] == [(RAW_PAIR,)] * 3
    assert str(chosen[3][0].forward) == "rotate | int8"
    assert chosen[4] == chosen[3]
    assert len(notes) == 1
    assert notes[0].startswith("link east-west, from step 5 on: activations rotate | int8")


def test_a_cast_is_nothing_to_gain_where_bfloat16_crosses_raw() -> None:
    for element_bytes, codec in ((4, "bf16"), (0, "bf16"), (2, "rotate | int8")):
        steers, notes = steering(cut(RAW_PAIR, is_free=True))
        chosen = [steers(tally(step, on_line_s=0.03, element_bytes=element_bytes)) for step in range(5)]
        assert str(chosen[-1][0].forward) == codec
        assert "would take 30 ms" in notes[0]


def test_a_line_that_is_overlapped_stays_raw_and_one_that_gets_fast_goes_back() -> None:
    steers, notes = steering(cut(RAW_PAIR, is_free=True))
    assert {steers(tally(step, on_line_s=0.01)) for step in range(6)} == {(RAW_PAIR,)}
    assert notes == []
    lossy = pair("center | rotate | int4", "rotate | int4(stochastic)")
    steers, notes = steering(cut(lossy, is_free=True, bandwidths_bps=(1e9, 1e9)))
    assert [steers(tally(step)) for step in range(5)][-1] == (RAW_PAIR,)
    assert len(notes) == 1


def test_a_line_that_is_faster_than_the_job_says_gets_a_less_lossy_codec() -> None:
    lossy = pair("subspace(32, anchor=tokens) | int4", "int4(stochastic)")
    found = cut(lossy, is_free=True, bandwidths_bps=(2e6, 2e6))
    steers, notes = steering(replace(found, bounds=Bounds(loss=Loss.SOME)))
    # By the job a message would take 34 ms.
    chosen = [steers(tally(step, on_line_s=0.0)) for step in range(12)]
    assert chosen[2] == (lossy,)
    assert [str(found[0].forward) for found in chosen[3:9:3]] == ["rotate | int8", "raw"]
    assert len(notes) == 2


def test_where_money_counts_codecs_get_lossier_but_no_less_lossy_than_planned() -> None:
    planned = pair("rotate | int8", "rotate | int8(stochastic)")
    paid = cut(planned, is_free=True, bandwidths_bps=(1e9, 1e9), least_lossy=planned)
    steers, notes = steering(paid)
    assert [steers(tally(step)) for step in range(6)][-1] == (planned,)
    assert notes == []
    steers, notes = steering(paid)
    lossy = [steers(tally(step, on_line_s=0.03)) for step in range(5)][-1][0]
    assert str(lossy.forward) == "center | rotate | int4"
    fast_again = [steers(tally(step)) for step in range(5, 15)][-1][0]
    assert fast_again == planned


def test_the_guard_comes_before_the_price() -> None:
    planned = pair("center | rotate | int4", "rotate | int4(stochastic)")
    steers, _ = steering(cut(planned, is_free=True, bandwidths_bps=(1e9, 1e9), least_lossy=planned))
    poor = Cosines(forward=0.5, backward=1.0)
    chosen = [steers(tally(step, cosines=poor if step == 4 else Cosines()))[0] for step in range(12)]
    assert str(chosen[3].forward) == "center | rotate | int4"
    assert str(chosen[-1].forward) == "rotate | int8", (
        "less lossy than planned, and no less lossy than it must be"
    )
    assert str(chosen[-1].backward) == "rotate | int8(stochastic)", "gradients are never lossier"


def test_what_is_too_short_to_be_measured_is_as_the_job_says() -> None:
    own = pair("bf16", "bf16")
    steers, notes = steering(cut(own, is_free=True, bandwidths_bps=(1e9, 1e9)))
    assert [steers(tally(step, on_line_s=0.0049)) for step in range(5)][-1] == (RAW_PAIR,)
    assert "2.097 ms on the line" in notes[0]


def test_what_the_job_says_is_not_chosen() -> None:
    own = pair("rotate | int8", "raw")
    steers, notes = steering(cut(own, is_free=False))
    assert {steers(tally(step, on_line_s=1.0)) for step in range(8)} == {(own,)}
    assert notes == []


def test_the_guard_widens_one_direction_at_a_time_and_says_so() -> None:
    own = pair("center | rotate | int4", "rotate | int4(stochastic)")
    steers, notes = steering(cut(own, is_free=False))
    assert steers(tally(0, cosines=Cosines(forward=0.99, backward=0.985))) == (own,)
    widened = steers(tally(1, cosines=Cosines(forward=0.9)))
    assert widened == (pair("rotate | int8", "rotate | int4(stochastic)"),)
    assert steers(tally(2, cosines=Cosines(backward=0.5))) == (
        pair("rotate | int8", "rotate | int8(stochastic)"),
    )
    assert len(notes) == 2
    assert "0.9000" in notes[0]


def test_what_the_guard_found_too_lossy_is_not_chosen_again_even_after_a_resume() -> None:
    own = pair("center | rotate | int4", "rotate | int4(stochastic)")
    steers, _ = steering(cut(own, is_free=True))
    steers(tally(0, on_line_s=1.0, cosines=Cosines(forward=0.9, backward=0.9)))
    again, _ = steering(cut(own, is_free=True))
    again.restore(steers.states, is_same=[True], step=1)
    for one in (steers, again):
        chosen = {str(one(tally(step, on_line_s=1.0))[0].forward) for step in range(1, 9)}
        assert chosen == {"rotate | int8"}
    assert again.states == steers.states


@pytest.mark.parametrize(
    ("forward", "backward"),
    [("subspace(16) | int4", "int4(stochastic)"), ("topk(0.1) | int8", "topk(0.1) | int8")],
)
def test_gradients_are_not_judged_by_what_another_code_did(forward: str, backward: str) -> None:
    steers, notes = steering(cut(pair(forward, backward), is_free=False))
    steers(tally(40, cosines=Cosines(forward=0.9, backward=0.3)))
    assert len(notes) == 1
    assert "activations" in notes[0]
    assert steers.states[0].least_backward_bytes == 0


# The guard alone.

WIDE = Cut(crossing=Crossing(num_rows=256, width=768))


def judge(
    cosine: float, codecs: Pair, *, steps_in_force: int = 100, of_gradient: bool = False
) -> Pair | None:
    found = guarded(WIDE, codecs, cosine, steps_in_force=steps_in_force, of_gradient=of_gradient)
    return None if found is None else found[0]


INT4 = pair("center | rotate | int4", "rotate | int4(stochastic)")


@pytest.mark.parametrize("cosine", [0.98, 0.999, 1.0, math.nan])
def test_a_good_message_changes_nothing(cosine: float) -> None:
    assert judge(cosine, INT4) is None


def test_a_bad_message_widens_its_own_direction() -> None:
    assert judge(0.97, INT4) == pair("rotate | int8", "rotate | int4(stochastic)")
    assert judge(0.97, INT4, of_gradient=True) == pair("center | rotate | int4", "rotate | int8(stochastic)")


def test_a_codec_that_is_on_no_level_widens_to_the_next_larger_one() -> None:
    assert judge(0.5, pair("topk(0.1) | int8", "raw")) == pair("center | rotate | int4", "raw")
    assert judge(0.5, pair("svd(0.6) | fp16", "raw")) == pair("bf16", "raw")


def test_a_subspace_widens_in_both_directions_once_it_is_grown() -> None:
    narrow = pair("subspace(96, anchor=tokens) | int4", "int4(stochastic)")
    assert judge(0.9, narrow, steps_in_force=3) is None
    wider = judge(0.9, narrow)
    assert wider == pair("subspace(192, anchor=tokens) | int4", "int4(stochastic)")
    assert judge(0.9, wider) == INT4


@pytest.mark.parametrize("forward", ["subspace(96) | int4", "topk(0.1) | int8"])
def test_a_gradient_that_is_projected_as_its_activation_was_is_not_judged(forward: str) -> None:
    backward = "int4(stochastic)" if forward.startswith("subspace") else "topk(0.1) | int8"
    assert judge(0.3, pair(forward, backward), of_gradient=True) is None


def test_raw_cannot_be_widened() -> None:
    assert judge(0.0, pair("raw", "raw")) is None


def test_the_reason_says_what_was_found() -> None:
    found = guarded(replace(WIDE, guard_cosine=0.99), INT4, 0.9712, steps_in_force=1)
    assert found is not None
    assert found[1] == (
        "activations rotate | int8 instead of center | rotate | int4: the cosine between what was sent and "
        "what arrives fell to 0.9712, below the link's guard_cosine of 0.99"
    )
