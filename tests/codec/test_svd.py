"""Truncated SVD: nearly the best product of two thin matrices, and better from message to message."""

import math

import pytest
import torch
from torch import Tensor

from isthmus.codec import Key
from isthmus.job.codec_steps import svd_rank
from tests.codec.cuts import activations, make_cut, noise


def best_error(x_ND: Tensor, rank: int) -> float:  # noqa: N803
    values = torch.linalg.svdvals(x_ND)
    return float(values[rank:].norm())


@pytest.mark.parametrize("ratio", [0.2, 0.6])
def test_the_product_is_nearly_the_best_of_its_rank(ratio: float) -> None:
    x_ND = activations(128, 192)  # noqa: N806
    rank = svd_rank(ratio, 128, 192)
    assert rank is not None
    cut = make_cut(f"svd({ratio})", width=192)
    errors = []
    for step in range(3):
        _, arrived = cut.send(x_ND, Key(step=step, microbatch=0))
        errors.append(float((arrived - x_ND).norm()))
    assert errors[0] < 1.1 * best_error(x_ND, rank)
    assert errors[-1] < 1.02 * best_error(x_ND, rank)
    assert errors[-1] <= errors[0]


def test_a_matrix_of_low_rank_arrives_whole() -> None:
    x_ND = noise(100, 5) @ noise(5, 80, seed=1)  # noqa: N806
    _, arrived = make_cut("svd(0.3)", width=80).send(x_ND)
    torch.testing.assert_close(arrived, x_ND, rtol=1e-4, atol=1e-4)


def test_messages_of_changing_length_go_through() -> None:
    cut = make_cut("svd(0.4) | fp16", width=60)
    for step, num_rows in enumerate((50, 10, 80, 1, 0, 50)):
        x_ND = activations(num_rows, 60)  # noqa: N806
        _, arrived = cut.send(x_ND, Key(step=step, microbatch=0))
        assert arrived.shape == x_ND.shape
        assert float((arrived - x_ND).norm()) <= 0.5 * float(x_ND.norm())


@pytest.mark.parametrize("stranger", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_message_and_is_forgotten(stranger: float) -> None:
    cut, clean = make_cut("svd(0.5)", width=40), make_cut("svd(0.5)", width=40)
    x_ND = activations(40, 40)  # noqa: N806
    for step in range(2):
        for one in (cut, clean):
            one.send(x_ND, Key(step=step, microbatch=0))
    bad_ND = x_ND.clone()  # noqa: N806
    bad_ND[3, 3] = stranger
    _, arrived = cut.send(bad_ND, Key(step=2, microbatch=0))
    assert bool(arrived.isnan().all())
    _, arrived = cut.send(x_ND, Key(step=3, microbatch=0))
    _, expected = clean.send(x_ND, Key(step=3, microbatch=0))
    torch.testing.assert_close(arrived, expected, rtol=0.05, atol=0.05)


def test_zeros_and_one_row_stay_what_they_are() -> None:
    for x_ND in (torch.zeros(30, 20), noise(1, 20)):  # noqa: N806
        _, arrived = make_cut("svd(0.3)", width=20).send(x_ND)
        torch.testing.assert_close(arrived, x_ND)
