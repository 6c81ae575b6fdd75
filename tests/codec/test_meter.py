"""What is measured of coding."""

import math

import pytest
import torch

from isthmus.codec.base import Key
from isthmus.codec.meter import ErrorMeter, measure


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
    meter = ErrorMeter(every=5, num_microbatches=4)
    keys = [Key(step=step, microbatch=microbatch) for step in range(3) for microbatch in range(4)]
    assert [number for number, key in enumerate(keys) if meter.is_due(key)] == [0, 5, 10]
    assert not any(ErrorMeter(every=0, num_microbatches=4).is_due(key) for key in keys)


def test_the_worst_is_kept_until_it_is_taken() -> None:
    meter = ErrorMeter(every=1, num_microbatches=1)
    assert meter.take() is None
    worst = meter.note(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
    meter.note(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.1]]))
    assert meter.take() == worst
    assert meter.take() is None
