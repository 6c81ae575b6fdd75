from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isthmus.train.optimizer import Optimizer, Schedule


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@given(num_steps=st.integers(1, 500), share=st.floats(0, 1))
def test_the_learning_rate_rises_then_never_rises_again(decay: Any, num_steps: int, share: float) -> None:
    num_warmup = round(share * num_steps)
    schedule = Schedule(peak=0.5, num_steps=num_steps, num_warmup_steps=num_warmup, decay=decay)
    rates = [schedule.at(step) for step in range(num_steps + 2)]
    assert all(0 < rate <= 0.5 for rate in rates)
    assert rates[:num_warmup] == sorted(rates[:num_warmup])
    assert rates[num_warmup:] == sorted(rates[num_warmup:], reverse=True)
    assert max(rates) == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.5 if decay == "constant" else 0.05)


def test_only_matrices_decay_and_gradients_are_cleared() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    schedule = Schedule(peak=0.1, num_steps=1, decay="constant")
    optimizer = Optimizer({"weight": weight, "bias": bias}, schedule=schedule, weight_decay=0.5)
    for one in (weight, bias):
        one.grad = torch.zeros_like(one)
    optimizer.update(0, norm=0.0)
    assert torch.equal(bias.detach(), torch.ones(2))
    assert torch.allclose(weight.detach(), torch.full((2, 2), 0.95))
    assert weight.grad is None
    assert optimizer.squared_norms() == ()


def test_clipping_scales_by_the_norm_of_all_stages() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    schedule = Schedule(peak=0.1, num_steps=1)
    for parameter, norm in zip(parameters, (10.0, 0.5), strict=True):
        parameter.grad = torch.tensor([3.0, 0.0, 4.0])
        optimizer = Optimizer({"w": parameter}, schedule=schedule, max_norm=1.0)
        assert optimizer.squared_norms() == (25.0,)
        optimizer.update(0, norm=norm)
        first_moment = optimizer.tensors()["exp_avg/w"]
        factor = 0.1 if norm > 1 else 1.0
        assert torch.allclose(first_moment, torch.tensor([0.3, 0.0, 0.4]) * factor)
