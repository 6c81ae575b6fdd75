"""Training in one process, plain and obvious: no scheduler, no links, no messages."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.model.boundary import Batch, StageInput
from isthmus.model.randomness import Moment
from isthmus.model.stage import Stage


def train_alone(
    stage: Stage,
    steps: Sequence[Sequence[Batch]],
    *,
    seed: int,
    learning_rates: Sequence[float],
    weight_decay: float,
    max_norm: float | None,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """Train a whole model on these micro-batches; gives the loss of each step."""
    parameters = list(stage.model.parameters())
    matrices = [one for one in parameters if one.ndim > 1]
    vectors = [one for one in parameters if one.ndim <= 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses = []
    for step, batches in enumerate(steps):
        num_targets = sum(batch.num_targets for batch in batches)
        loss_sum = 0.0
        for number, batch in enumerate(batches):
            moment = Moment(seed=seed, step=step, microbatch=number)
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                output = stage(StageInput(batch=batch, moment=moment))
            output.backward(loss_weight=1 / num_targets)
            loss_sum += float(output.loss.detach())
        losses.append(loss_sum / num_targets)
        grads = [one.grad for one in parameters if one.grad is not None]
        norm = math.sqrt(math.fsum(float(torch.linalg.vector_norm(grad)) ** 2 for grad in grads))
        if max_norm is not None and norm > max_norm:
            for grad in grads:
                grad.mul_(max_norm / (norm + 1e-6))
        for group in adamw.param_groups:
            group["lr"] = learning_rates[step]
        adamw.step()
        adamw.zero_grad()
    return losses


def parameters_of(stages: Sequence[Stage]) -> dict[str, Tensor]:
    return {name: one.detach().clone() for stage in stages for name, one in stage.model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
