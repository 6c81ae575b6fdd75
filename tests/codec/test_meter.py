"""What is measured of coding."""

import math

import pytest
import torch

from isthmus.codec.chain import measure


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
