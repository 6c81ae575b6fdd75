"""Casts: rounding, range, and what is not finite."""

import math

import pytest
import torch

from tests.codec.cuts import make_cut, noise


@pytest.mark.parametrize(("text", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_cast_rounds_to_the_nearest(text: str, dtype: torch.dtype) -> None:
    x_ND = noise(20, 30, scale=10)  # noqa: N806
    _, arrived = make_cut(text, width=30).send(x_ND)
    assert torch.equal(arrived, x_ND.to(dtype).float())


@pytest.mark.parametrize(("text", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_finite_stays_finite_and_the_rest_stays_itself(text: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x_ND = torch.tensor([[1.0, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]])  # noqa: N806
    _, arrived = make_cut(text, width=6).send(x_ND)
    expected = torch.tensor([[1.0, largest, -largest, math.inf, -math.inf, math.nan]])
    assert torch.equal(arrived.nan_to_num(nan=5), expected.nan_to_num(nan=5))
