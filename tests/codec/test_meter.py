"""What is measured of coding, and when a codec is found too strong."""

import math

import pytest
import torch

from isthmus.codec.base import Key
from isthmus.codec.meter import Guard, Meter, measure
from isthmus.job.codec import parse_codec
from isthmus.plan.ladder import Crossing, Pair, ladder

CROSSING = Crossing(num_rows=256, width=768)
RUNGS = ladder(768)


def pair(forward: str, backward: str) -> Pair:
    return Pair(forward=parse_codec(forward), backward=parse_codec(backward))


def test_error_and_cosine_of_known_vectors() -> None:
    found = measure(torch.tensor([[3.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
    assert found.relative_error == pytest.approx(4 / 3)
    assert found.cosine == pytest.approx(0.6)


def test_halving_has_an_error_but_no_angle() -> None:
    found = measure(torch.ones(4, 3), 0.5 * torch.ones(4, 3))
    assert found.relative_error == pytest.approx(0.5)
    assert found.cosine == pytest.approx(1.0)


def test_rows_that_are_not_finite_are_left_out() -> None:
    sent = torch.tensor([[1.0, 1.0], [math.nan, 1.0], [math.inf, 0.0]])
    arrives = torch.tensor([[1.0, 0.0], [math.nan, math.nan], [1.0, 0.0]])
    assert measure(sent, arrives).cosine == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("x", [torch.zeros(0, 4), torch.zeros(3, 4), torch.full((2, 2), math.nan)])
def test_equal_matrices_of_any_kind_are_equal(x: torch.Tensor) -> None:
    found = measure(x, x)
    assert (found.relative_error, found.cosine) == (0.0, 1.0)


def test_a_row_that_was_finite_and_is_no_more_is_the_worst() -> None:
    found = measure(torch.ones(2, 3), torch.tensor([[1.0, 1.0, 1.0], [math.nan, 1.0, 1.0]]))
    assert (found.relative_error, found.cosine) == (math.inf, 0.0)


def test_something_out_of_nothing_is_the_worst() -> None:
    found = measure(torch.zeros(2, 2), torch.ones(2, 2))
    assert (found.relative_error, found.cosine) == (math.inf, 0.0)


def test_every_kth_message_is_due_by_its_own_number() -> None:
    meter = Meter(every=5, num_microbatches=4)
    keys = [Key(step=step, microbatch=microbatch) for step in range(3) for microbatch in range(4)]
    assert [number for number, key in enumerate(keys) if meter.is_due(key)] == [0, 5, 10]
    assert not any(Meter(every=0, num_microbatches=4).is_due(key) for key in keys)


def test_the_worst_is_kept_until_it_is_taken() -> None:
    meter = Meter(every=1, num_microbatches=1)
    assert meter.take() is None
    worst = meter.note(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
    meter.note(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.1]]))
    assert meter.take() == worst
    assert meter.take() is None


def judge(
    cosine: float, codecs: Pair, *, steps_in_force: int = 100, of_gradient: bool = False
) -> Pair | None:
    found = Guard().judge(
        cosine, codecs, CROSSING, rungs=RUNGS, steps_in_force=steps_in_force, of_gradient=of_gradient
    )
    return None if found is None else found.pair


INT4 = pair("center | rotate | int4", "rotate | int4(stochastic)")


@pytest.mark.parametrize("cosine", [0.98, 0.999, 1.0, math.nan])
def test_a_good_message_changes_nothing(cosine: float) -> None:
    assert judge(cosine, INT4) is None


def test_a_bad_message_widens_its_own_direction() -> None:
    assert judge(0.97, INT4) == pair("rotate | int8", "rotate | int4(stochastic)")
    assert judge(0.97, INT4, of_gradient=True) == pair("center | rotate | int4", "rotate | int8(stochastic)")


def test_a_codec_that_is_on_no_rung_widens_to_the_next_larger_one() -> None:
    assert judge(0.5, pair("topk(0.1) | int8", "raw")) == pair("center | rotate | int4", "raw")
    assert judge(0.5, pair("svd(0.6) | fp16", "raw")) == pair("bf16", "raw")


def test_a_subspace_widens_in_both_directions_once_it_is_grown() -> None:
    narrow = pair("subspace(96) | int4", "int4(stochastic)")
    assert judge(0.9, narrow, steps_in_force=3) is None
    wider = judge(0.9, narrow)
    assert wider == pair("subspace(192) | int4", "int4(stochastic)")
    assert judge(0.9, wider) == INT4


@pytest.mark.parametrize("forward", ["subspace(96) | int4", "topk(0.1) | int8"])
def test_a_gradient_that_is_projected_as_its_activation_was_is_not_judged(forward: str) -> None:
    backward = "int4(stochastic)" if forward.startswith("subspace") else "topk(0.1) | int8"
    assert judge(0.3, pair(forward, backward), of_gradient=True) is None


def test_raw_cannot_be_widened() -> None:
    assert judge(0.0, pair("raw", "raw")) is None


def test_the_reason_says_what_was_found() -> None:
    found = Guard(least_cosine=0.99).judge(0.9712, INT4, CROSSING, rungs=RUNGS, steps_in_force=1)
    assert found is not None
    assert found.reason == (
        "activations rotate | int8 instead of center | rotate | int4: the cosine between what was sent and "
        "what arrives fell to 0.9712, below the link's guard_cosine of 0.99"
    )
