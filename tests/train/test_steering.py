"""Codecs change at a step boundary, at both ends, for a reason that is told."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from isthmus.job.codec import parse_codec
from isthmus.plan.codec_choice import Bounds
from isthmus.plan.ladder import Crossing, Loss, Pair
from isthmus.plan.window import Hop
from isthmus.train.crossing.cut import RAW_PAIR, Cut
from isthmus.train.crossing.steering import Standing, Steering, Terms
from isthmus.train.crossing.words import Cosines, Tally
from tests.model.cases import blueprint
from tests.train.chain import Given, chain, course
from tests.train.reference import assert_same, parameters_of
from tests.train.test_exactness import batches

CROSSING = Crossing(num_rows=512, width=128)


def pair(forward: str, backward: str) -> Pair:
    return Pair(forward=parse_codec(forward), backward=parse_codec(backward))


def terms(codecs: Pair, *, is_free: bool, **changes: Any) -> Terms:
    cut = Cut(name="east-west", codecs=codecs, guard_every=1)
    bounds = Bounds(
        loss=Loss.SLIGHT,
        forward=None if is_free else codecs.forward,
        backward=None if is_free else codecs.backward,
    )
    return Terms(cut=cut, crossing=CROSSING, bounds=bounds, is_free=is_free, **changes)


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


def steering(*cuts: Terms) -> tuple[Steering, list[str]]:
    notes: list[str] = []
    return Steering(cuts, num_microbatches=8, note=notes.append), notes


def test_a_thin_line_gets_a_stronger_codec_once_it_is_measured() -> None:
    steers, notes = steering(terms(RAW_PAIR, is_free=True))
    chosen = [steers(tally(step, on_line_s=0.06)) for step in range(5)]
    assert chosen[:3] == [(RAW_PAIR,)] * 3
    assert str(chosen[3][0].forward) == "rotate | int8"
    assert chosen[4] == chosen[3]
    assert len(notes) == 1
    assert notes[0].startswith("link east-west, from step 5 on: activations rotate | int8")


def test_a_cast_is_nothing_to_gain_where_bfloat16_crosses_raw() -> None:
    for element_bytes, codec in ((4, "bf16"), (0, "bf16"), (2, "rotate | int8")):
        steers, notes = steering(terms(RAW_PAIR, is_free=True))
        chosen = [steers(tally(step, on_line_s=0.03, element_bytes=element_bytes)) for step in range(5)]
        assert str(chosen[-1][0].forward) == codec
        assert "would take 30 ms" in notes[0]


def test_a_line_that_is_hidden_stays_raw_and_one_that_gets_fast_goes_back() -> None:
    steers, notes = steering(terms(RAW_PAIR, is_free=True))
    assert {steers(tally(step, on_line_s=0.01)) for step in range(6)} == {(RAW_PAIR,)}
    assert notes == []
    strong = pair("center | rotate | int4", "rotate | int4(stochastic)")
    steers, notes = steering(terms(strong, is_free=True, bandwidths_bps=(1e9, 1e9)))
    assert [steers(tally(step)) for step in range(5)][-1] == (RAW_PAIR,)
    assert len(notes) == 1


def test_a_line_that_is_faster_than_the_job_says_gets_a_milder_codec() -> None:
    strong = pair("subspace(32, anchor=tokens) | int4", "int4(stochastic)")
    found = terms(strong, is_free=True, bandwidths_bps=(2e6, 2e6))
    steers, notes = steering(replace(found, bounds=Bounds(loss=Loss.SOME)))
    # By the job a message would take 34 ms.
    chosen = [steers(tally(step, on_line_s=0.0)) for step in range(12)]
    assert chosen[2] == (strong,)
    assert [str(found[0].forward) for found in chosen[3:9:3]] == ["rotate | int8", "raw"]
    assert len(notes) == 2


def test_where_money_counts_codecs_get_stronger_but_no_milder_than_planned() -> None:
    planned = pair("rotate | int8", "rotate | int8(stochastic)")
    paid = terms(planned, is_free=True, bandwidths_bps=(1e9, 1e9), mildest=planned)
    steers, notes = steering(paid)
    assert [steers(tally(step)) for step in range(6)][-1] == (planned,)
    assert notes == []
    steers, notes = steering(paid)
    strong = [steers(tally(step, on_line_s=0.1)) for step in range(5)][-1][0]
    assert str(strong.forward) == "center | rotate | int4"
    fast_again = [steers(tally(step)) for step in range(5, 15)][-1][0]
    assert fast_again == planned


def test_the_guard_comes_before_the_price() -> None:
    planned = pair("center | rotate | int4", "rotate | int4(stochastic)")
    steers, _ = steering(terms(planned, is_free=True, bandwidths_bps=(1e9, 1e9), mildest=planned))
    poor = Cosines(forward=0.5, backward=1.0)
    chosen = [steers(tally(step, cosines=poor if step == 4 else Cosines()))[0] for step in range(12)]
    assert str(chosen[3].forward) == "center | rotate | int4"
    assert str(chosen[-1].forward) == "rotate | int8", "milder than planned, and no milder than it must be"
    assert str(chosen[-1].backward) == "rotate | int8(stochastic)", "gradients never cross more strongly"


def test_what_is_too_short_to_be_measured_is_as_the_job_says() -> None:
    own = pair("bf16", "bf16")
    steers, notes = steering(terms(own, is_free=True, bandwidths_bps=(1e9, 1e9)))
    assert [steers(tally(step, on_line_s=0.0049)) for step in range(5)][-1] == (RAW_PAIR,)
    assert "2.097 ms on the line" in notes[0]


def test_what_the_job_says_is_not_chosen() -> None:
    own = pair("rotate | int8", "raw")
    steers, notes = steering(terms(own, is_free=False))
    assert {steers(tally(step, on_line_s=1.0)) for step in range(8)} == {(own,)}
    assert notes == []


def test_the_guard_widens_one_direction_at_a_time_and_says_so() -> None:
    own = pair("center | rotate | int4", "rotate | int4(stochastic)")
    steers, notes = steering(terms(own, is_free=False))
    assert steers(tally(0, cosines=Cosines(forward=0.99, backward=0.985))) == (own,)
    widened = steers(tally(1, cosines=Cosines(forward=0.9)))
    assert widened == (pair("rotate | int8", "rotate | int4(stochastic)"),)
    assert steers(tally(2, cosines=Cosines(backward=0.5))) == (
        pair("rotate | int8", "rotate | int8(stochastic)"),
    )
    assert len(notes) == 2
    assert "0.9000" in notes[0]


def test_what_the_guard_found_too_strong_is_not_chosen_again_even_after_a_resume() -> None:
    own = pair("center | rotate | int4", "rotate | int4(stochastic)")
    steers, _ = steering(terms(own, is_free=True))
    steers(tally(0, on_line_s=1.0, cosines=Cosines(forward=0.9, backward=0.9)))
    again, _ = steering(terms(own, is_free=True))
    again.restore(steers.standings)
    for one in (steers, again):
        chosen = {str(one(tally(step, on_line_s=1.0))[0].forward) for step in range(1, 9)}
        assert chosen == {"rotate | int8"}
    assert isinstance(steers.standings[0], Standing)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [("subspace(16) | int4", "int4(stochastic)"), ("topk(0.1) | int8", "topk(0.1) | int8")],
)
def test_gradients_are_not_judged_by_what_another_code_did(forward: str, backward: str) -> None:
    steers, notes = steering(terms(pair(forward, backward), is_free=False))
    steers(tally(40, cosines=Cosines(forward=0.9, backward=0.3)))
    assert len(notes) == 1
    assert "activations" in notes[0]
    assert steers.standings[0].least_backward_bytes == 0


def test_a_codec_of_the_guard_is_not_said_to_be_the_jobs() -> None:
    own = pair("rotate | int2", "raw")
    free = replace(terms(own, is_free=True), bounds=Bounds(forward=own.forward))
    steers, notes = steering(free)
    steers(tally(0, on_line_s=1.0, cosines=Cosines(forward=0.9)))
    for step in range(1, 9):
        steers(tally(step, on_line_s=1.0))
    assert "as the guard has it" in notes[-1]
    assert "as the job says" not in notes[-1]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_both_ends_change_at_the_same_step(num_stages: int) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 4)
    coded = (pair("rotate | int8", "rotate | int8(stochastic)"),) * (num_stages - 1)
    anew = (pair("subspace(5) | int8", "int8"),) * (num_stages - 1)
    schedule = {1: coded, 2: coded, 3: anew}

    def steer(found: Tally) -> Sequence[Pair]:
        return schedule.get(found.step, (RAW_PAIR,) * (num_stages - 1))

    runs = []
    for _ in range(2):
        with chain(plan, course(num_stages, 4, cuts=(Cut(),) * (num_stages - 1))) as found:
            found.run(Given(steps), steer=lambda one: tuple(steer(one)))
        runs.append(found)
    assert_same(parameters_of(runs[0].stages), parameters_of(runs[1].stages))
    coded_at = {
        span.name.split()[1].split(".")[0] for span in found.records[1].spans if span.kind == "decode"
    }
    assert coded_at == {"2", "3", "4"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_stage_learns_the_size_of_what_crosses_each_cut(dtype: torch.dtype) -> None:
    plan = blueprint("llama")
    seen: list[tuple[int, ...]] = []

    def steer(found: Tally) -> tuple[Pair, ...]:
        seen.append(found.element_bytes)
        return ()

    cuts = (Cut(), Cut(codecs=pair("rotate | int8", "raw")))
    with chain(plan, course(3, 2, cuts=cuts)) as found:
        for stage in found.stages:
            stage.to(dtype)
        found.run(Given(batches(plan, 2)), steer=steer)
    assert set(seen) == {(dtype.itemsize, dtype.itemsize)}


def test_the_guard_sees_what_a_coarse_codec_does() -> None:
    plan = blueprint("llama")
    seen: list[Cosines] = []

    def steer(found: Tally) -> tuple[Pair, ...]:
        seen.extend(found.cosines)
        return ()

    own = Cut(codecs=pair("int2", "topk(0.2) | int8"), guard_every=3)
    with chain(plan, course(2, 4, cuts=(own,))) as found:
        found.run(Given(batches(plan, 4)), steer=steer)
    assert len(seen) == 5
    assert all(0 < one.forward < 0.98 and 0 < one.backward < 0.98 for one in seen)
    for record, track, lowest in (
        (found.records[0], "north→east", [one.forward for one in seen]),
        (found.records[1], "east→north", [one.backward for one in seen]),
    ):
        assert {one.track for one in record.measurements} == {track}
        by_step = {step: [one.cosine for one in record.measurements if one.step == step] for step in range(5)}
        assert [min(cosines) for cosines in by_step.values()] == lowest
        assert all(one.relative_error > 0 for one in record.measurements)
