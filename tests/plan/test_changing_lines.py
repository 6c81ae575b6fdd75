"""Codecs follow a line that changes in the middle of a run, and come back; and guard and `auto` agree."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.job.codec import parse_codec
from isthmus.plan.codecs import RAW_PAIR, Bounds, Crossing, Cut, Loss, Pair, Steering
from isthmus.plan.end_of_step import Cosines, Tally
from isthmus.plan.scenario import Hop

NUM_MICROBATCHES = 16
INTERVAL_S = 0.03
CROSSING = Crossing(num_rows=256, width=1024)
INT8, INT4 = (f"rotate | int{bits}(stochastic)" for bits in (8, 4))


@dataclass
class Run:
    """Steps over a line that carries what it carries at each step, give or take what is measured wrong."""

    cut: Cut
    bps_at: Callable[[int], tuple[float, float]]
    noise: float = 0.0
    seed: int = 0
    cosines: dict[int, Cosines] = field(default_factory=dict)

    def codecs(self, num_steps: int) -> list[Pair]:
        """Those of each step."""
        random, pair, found = Random(self.seed), self.cut.codecs, []
        steering = Steering([self.cut], num_microbatches=NUM_MICROBATCHES)
        for step in range(num_steps):
            found.append(pair)
            (pair,) = steering(self._tally(step, pair, random))
        return found

    def _tally(self, step: int, pair: Pair, random: Random) -> Tally:
        down_bps, up_bps = self.bps_at(step)
        there_s, back_s = (
            8 * pair.forward_bytes(CROSSING) / down_bps,
            8 * pair.backward_bytes(CROSSING) / up_bps,
        )
        on_line_s = (there_s + back_s) / 2 * random.uniform(1 - self.noise, 1 + self.noise)
        busy_s = NUM_MICROBATCHES * INTERVAL_S * random.uniform(1 - self.noise, 1 + self.noise)
        return Tally(
            step=step,
            loss_sum=1.0,
            squared_norms=(),
            busy_s=(busy_s, busy_s),
            hops=(Hop(forward_s=on_line_s, backward_s=on_line_s, latency_s=0.02),),
            travel_s=0.0,
            cosines=(self.cosines.get(step, Cosines()),),
            element_bytes=(CROSSING.element_bytes,),
        )


def cut(
    pair: Pair, *, loss: Loss = Loss.SLIGHT, mbps: tuple[float, float] = (100, 100), **bounds: Any
) -> Cut:
    return Cut(
        crossing=CROSSING,
        name="east-west",
        codecs=pair,
        bounds=Bounds(loss=loss, **bounds),
        is_free=True,
        bandwidths_bps=(1e6 * mbps[0], 1e6 * mbps[1]),
    )


def slow_from(
    start: int, stop: int, *, factor: float, mbps: tuple[float, float] = (100, 100)
) -> Callable[[int], tuple[float, float]]:
    """A slow-down of so many steps."""

    def bps_at(step: int) -> tuple[float, float]:
        share = 1e6 / factor if start <= step < stop else 1e6
        return share * mbps[0], share * mbps[1]

    return bps_at


def pair(forward: str, backward: str) -> Pair:
    return Pair(forward=parse_codec(forward), backward=parse_codec(backward))


def num_changes(codecs: list[Pair]) -> int:
    return sum(before != behind for before, behind in pairwise(codecs))


@settings(deadline=None, max_examples=20)
@given(
    factor=st.floats(2, 30),
    loss=st.just(Loss.SOME),
    seed=st.integers(0, 1000),
)
def test_a_slow_down_is_followed_within_four_steps_and_left_again_without_flapping(
    factor: float, loss: Loss, seed: int
) -> None:
    fine = pair("rotate | int8", INT8)
    run = Run(cut(fine, loss=loss), slow_from(20, 50, factor=factor), noise=0.05, seed=seed)
    codecs = run.codecs(100)
    assert set(codecs[:20]) == {fine}
    assert codecs[24].forward_bytes(CROSSING) < fine.forward_bytes(CROSSING)
    assert set(codecs[28:50]) == {codecs[28]}
    assert set(codecs[66:]) == {fine}
    assert num_changes(codecs) <= 6


@settings(deadline=None, max_examples=20)
@given(mbps=st.floats(5, 400), seed=st.integers(0, 1000))
def test_a_line_that_wavers_by_a_tenth_changes_nothing_for_long(mbps: float, seed: int) -> None:
    def bps_at(step: int) -> tuple[float, float]:
        wave = 1 + 0.1 * math.sin(step / 3)
        return 1e6 * mbps * wave, 1e6 * mbps * wave

    codecs = Run(cut(RAW_PAIR, mbps=(mbps, mbps)), bps_at, noise=0.03, seed=seed).codecs(100)
    assert num_changes(codecs) <= 3


@pytest.mark.parametrize(("wide", "narrow"), [((500, 50), 1), ((50, 500), 0)])
def test_the_wide_direction_stays_less_lossy(wide: tuple[float, float], narrow: int) -> None:
    codecs = Run(cut(RAW_PAIR, mbps=wide), slow_from(30, 60, factor=4, mbps=wide)).codecs(90)
    sizes = [(one.forward_bytes(CROSSING), one.backward_bytes(CROSSING)) for one in codecs]
    assert all(one[narrow] < one[1 - narrow] for one in sizes[4:])
    assert (str(codecs[20].forward), str(codecs[20].backward))[1 - narrow] == "raw"
    # Where the narrow one sets the pace, the other need not be coded though it is not overlapped either.
    assert set(codecs[4:]) == {codecs[4]}


def test_a_basis_is_not_begun_for_the_last_steps_of_a_run() -> None:
    def codecs(left: int) -> list[Pair]:
        free = cut(pair("center | rotate | int4", INT4), loss=Loss.SOME, mbps=(40, 40))
        crossing = replace(CROSSING, num_microbatches=NUM_MICROBATCHES, num_learners=8)
        free = replace(free, crossing=replace(crossing, num_steps=20 + left))
        return Run(free, slow_from(18, 999, factor=4, mbps=(40, 40))).codecs(20 + left)

    assert all(one.subspace is None for one in codecs(3))
    assert codecs(300)[-1].subspace is not None


def test_what_the_guard_widens_stays_so_though_a_lossier_codec_would_be_faster() -> None:
    lossy = pair("center | rotate | int4", INT4)
    poor = {5: Cosines(forward=0.9), 7: Cosines(backward=0.9)}
    codecs = Run(cut(lossy, loss=Loss.SOME), slow_from(0, 99, factor=2), cosines=poor).codecs(40)
    assert set(codecs[:6]) == {lossy}
    assert {str(one.forward) for one in codecs[6:]} == {"rotate | int8"}
    assert {str(one.backward) for one in codecs[8:]} == {INT8}


def test_a_codec_of_the_job_that_the_guard_has_widened_stays_so_while_the_other_direction_is_chosen() -> None:
    own = parse_codec("subspace(64) | int4")
    free = cut(pair(str(own), "raw"), loss=Loss.SOME, forward=own)
    codecs = Run(free, slow_from(0, 99, factor=4), cosines={30: Cosines(forward=0.9)}).codecs(60)
    assert {one.forward for one in codecs[:31]} == {own}
    assert {str(one.forward) for one in codecs[31:]} == {"subspace(128, anchor=tokens) | int4"}


def test_the_guard_of_one_direction_leaves_the_choice_of_the_other_free() -> None:
    own = parse_codec("center | rotate | int4")
    free = cut(pair(str(own), INT8), forward=own)
    line = slow_from(20, 99, factor=0.2)
    codecs = Run(free, line, cosines={5: Cosines(forward=0.9)}).codecs(40)
    assert str(codecs[10].forward) == str(codecs[-1].forward) == "rotate | int8"
    assert (str(codecs[10].backward), str(codecs[-1].backward)) == (INT8, "raw")
