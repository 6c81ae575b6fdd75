"""Metrics against figures worked out by hand, and by definition."""

import math

import pytest
import torch

from isthmus.train.metrics import f1, matthews


def test_two_classes_as_by_the_textbook() -> None:
    # 50 true negatives, 10 false positives, 5 false negatives, 35 true positives.
    confused = torch.tensor([[50, 10], [5, 35]])
    assert f1(confused) == pytest.approx(2 * 35 / (2 * 35 + 10 + 5))
    expected = (35 * 50 - 10 * 5) / math.sqrt((35 + 10) * (35 + 5) * (50 + 10) * (50 + 5))
    assert matthews(confused) == pytest.approx(expected)


def test_three_classes_and_guesses_that_are_always_the_same() -> None:
    perfect = torch.diag(torch.tensor([3, 4, 5]))
    assert f1(perfect) == pytest.approx(1.0)
    assert matthews(perfect) == pytest.approx(1.0)
    constant = torch.tensor([[3, 0, 0], [4, 0, 0], [5, 0, 0]])
    assert matthews(constant) == 0.0
    assert f1(constant) == pytest.approx((2 * 3 / 15) / 3)
