"""Training in one process, plain and obvious: no scheduler, no links, no messages."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from quality.crossing import cross
from torch import Tensor

from isthmus.codec.base import Key
from isthmus.codec.chain import CodecEnd, Codecs
from isthmus.model.random import RngKey, seed_from
from isthmus.model.stage import Batch, Stage, StageInput
from tests.train.chain import CutCase


class PlainAdamW:
    """AdamW whose gradients are clipped by their norm; vectors do not decay."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], weight_decay: float) -> None:
        self.parameters = parameters
        matrices = [one for one in parameters if one.ndim > 1]
        vectors = [one for one in parameters if one.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)

    def update(self, learning_rate: float, max_norm: float | None) -> None:
        grads = [one.grad for one in self.parameters if one.grad is not None]
        norm = math.sqrt(math.fsum(float(torch.linalg.vector_norm(grad)) ** 2 for grad in grads))
        if max_norm is not None and norm > max_norm:
            for grad in grads:
                grad.mul_(max_norm / (norm + 1e-6))
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.adamw.zero_grad()


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
    adamw = PlainAdamW(parameters, weight_decay)
    losses = []
    for step, batches in enumerate(steps):
        num_targets = sum(batch.num_targets for batch in batches)
        loss_sum = 0.0
        for number, batch in enumerate(batches):
            rng_key = RngKey(seed=seed, step=step, microbatch=number)
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                output = stage(StageInput(batch=batch, rng_key=rng_key))
            output.backward(loss_weight=1 / num_targets)
            loss_sum += float(output.loss.detach())
        losses.append(loss_sum / num_targets)
        adamw.update(learning_rates[step], max_norm)
    return losses


def train_across(
    stages: Sequence[Stage],
    steps: Sequence[Sequence[Batch]],
    *,
    cuts: Sequence[CutCase],
    seed: int,
    learning_rates: Sequence[float],
    weight_decay: float,
    max_norm: float | None,
    num_warmup_steps: int = 0,
    changes: Mapping[int, Sequence[CutCase]] | None = None,
) -> list[float]:
    """Train all stages in one graph, with what crosses coded within it; gives the loss of each step.

    `changes` are the cuts from a step on, with codecs that start afresh.
    """
    parameters = [one for stage in stages for one in stage.parameters_by_name().values()]
    adamw = PlainAdamW(parameters, weight_decay)
    hidden_width = stages[0].model.config.hidden_size
    ends = _all_ends(cuts, hidden_width, seed=seed)
    losses = []
    for step, batches in enumerate(steps):
        num_targets = sum(batch.num_targets for batch in batches)
        if changes is not None and step in changes:
            ends = _all_ends(changes[step], hidden_width, seed=seed)
        if step == num_warmup_steps > 0:
            for before, behind in pairwise(stages):
                if before.down is not None and behind.up is not None:
                    behind.up.begin(before.down.begin())
        loss_sum = 0.0
        for number, batch in enumerate(batches):
            rng_key = RngKey(seed=seed, step=step, microbatch=number)
            is_warming_up = step < num_warmup_steps
            crossing = None
            for index, stage in enumerate(stages):
                inputs = StageInput(
                    batch=batch, crossing=crossing, rng_key=rng_key, is_warming_up=is_warming_up
                )
                output = stage(inputs)
                crossing = output.crossing
                if crossing is not None and step >= cuts[index].num_warmup_steps:
                    sending, receiving = ends[index]
                    key = Key(step=step, microbatch=number)
                    crossing = cross(
                        crossing,
                        sending=sending,
                        receiving=receiving,
                        key=key,
                        ids=batch.ids,
                        mask=batch.mask,
                    )
            output.backward(loss_weight=1 / num_targets)
            loss_sum += float(output.loss.detach())
        losses.append(loss_sum / num_targets)
        adamw.update(learning_rates[step], max_norm)
    return losses


def _all_ends(cuts: Sequence[CutCase], hidden_width: int, *, seed: int) -> list[tuple[CodecEnd, CodecEnd]]:
    return [_ends(cut, hidden_width, seed=seed_from("cut", seed, number)) for number, cut in enumerate(cuts)]


def _ends(cut: CutCase, hidden_width: int, *, seed: int) -> tuple[CodecEnd, CodecEnd]:
    codecs = Codecs(
        forward=cut.codecs.forward,
        backward=cut.codecs.backward,
        width=cut.boundary.crossing_width(hidden_width),
        seed=seed,
    )
    device = torch.device("cpu")
    return CodecEnd(codecs, device=device), CodecEnd(codecs, device=device)


def parameters_of(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Of the model, by name, and of bottlenecks, by stage and name."""
    found = {name: one.detach().clone() for stage in stages for name, one in stage.model.named_parameters()}
    for index, stage in enumerate(stages):
        for half in (stage.up, stage.down):
            if half is not None:
                found |= {
                    f"{index}.{type(half).__name__}.{name}": one.detach().clone()
                    for name, one in half.named_parameters()
                }
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
