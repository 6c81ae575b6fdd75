"""Frozen layers: nothing goes back to them, and no cut changes what the others learn."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.job.codec import BottleneckSpec
from isthmus.model.blueprint import split_layers
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch, Stage, StageInput, freeze_below
from tests.model.cases import RNG_KEY, SEED, assert_identical, blueprint, build, make_batch


def train_pass(stages: Sequence[Stage], batch: Batch) -> tuple[Tensor, dict[str, Tensor | None]]:
    """As a run does it: what crosses wants a gradient only where the stage behind sends one."""
    crossings: list[Tensor | None] = [None]
    outputs = []
    for index, stage in enumerate(stages):
        outputs.append(stage(StageInput(batch=batch, crossing=crossings[-1], rng_key=RNG_KEY)))
        crossing = outputs[-1].crossing
        if crossing is not None:
            crossings.append(crossing.detach().requires_grad_(stages[index + 1].sends_gradient))
    grad = None
    for stage, output, arrived in zip(reversed(stages), reversed(outputs), reversed(crossings), strict=True):
        assert output.wants_gradient == (grad is not None)
        output.backward(grad=grad, loss_weight=1 / batch.num_targets)
        grad = None if arrived is None else arrived.grad
        assert (grad is not None) == stage.sends_gradient
    grads = {name: one.grad for stage in stages for name, one in stage.parameters_by_name().items()}
    return outputs[-1].loss.detach(), grads


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt2"])
@pytest.mark.parametrize("num_frozen", [1, 2, 3, 4])
def test_no_cut_changes_what_the_other_layers_learn(model_type: str, num_frozen: int) -> None:
    plan = blueprint(model_type)
    batch = make_batch(plan.head)
    whole = build(plan, [range(4)], untie=True, num_frozen_layers=num_frozen)
    loss, expected = train_pass(whole, batch)
    trained = plan.layout.owned_by(range(num_frozen, 4)) if num_frozen < 4 else plan.layout.last
    assert set(expected) == set(trained)
    for num_stages in (2, 4):
        cuts = split_layers(4, num_stages)
        stages = build(plan, cuts, num_frozen_layers=num_frozen, recompute=num_stages == 4)
        found_loss, found = train_pass(stages, batch)
        assert torch.equal(found_loss, loss)
        assert_identical(found, expected)


def test_a_stage_says_whether_it_learns_and_whether_it_sends_a_gradient() -> None:
    stages = build(blueprint("llama"), split_layers(4, 4), num_frozen_layers=2)
    assert [stage.is_trained for stage in stages] == [False, False, True, True]
    assert [stage.sends_gradient for stage in stages] == [False, False, False, True]
    plain = build(blueprint("llama"), split_layers(4, 2))
    assert [stage.is_trained for stage in plain] == [True, True]
    assert [stage.sends_gradient for stage in plain] == [False, True]


def test_a_frozen_stage_keeps_no_graph_and_draws_no_dropout() -> None:
    plan = blueprint("bert")
    (stage,) = build(plan, [range(2)], num_frozen_layers=2)
    batch = make_batch(plan.head)
    training = stage.train()(StageInput(batch=batch, rng_key=RNG_KEY))
    assert training.crossing.grad_fn is None
    assert not training.wants_gradient
    training.backward()
    assert torch.equal(stage.eval()(StageInput(batch=batch)).crossing, training.crossing)


def test_frozen_layers_stay_in_evaluation_within_a_stage_that_learns() -> None:
    (stage,) = build(blueprint("gpt2"), [range(4)], num_frozen_layers=2)
    stage.eval()
    stage.train()
    modes = [layer.training for layer in stage.model.get_submodule("transformer.h").children()]
    assert modes == [False, False, True, True]
    assert not stage.model.get_submodule("transformer.drop").training
    assert stage.training


def test_a_frozen_senders_half_starts_from_what_it_saw_and_stays() -> None:
    plan = blueprint("llama")
    spec = BottleneckSpec(rank=6)
    first = build_stage(plan, range(2), seed=SEED, outbound=spec, num_frozen_layers=2)
    last = build_stage(plan, range(2, 4), seed=SEED, inbound=spec, num_frozen_layers=2)
    assert first.down is not None
    assert last.up is not None
    batch = make_batch(plan.head)
    first(StageInput(batch=batch, rng_key=RNG_KEY, is_warming_up=True))
    last.up.begin(first.down.begin())
    assert not first.is_trained
    assert first.parameters_by_name() == {}
    _, grads = train_pass([first, last], batch)
    assert grads["up.weight"] is not None


def test_a_shared_head_is_frozen_with_its_embedding_and_noted() -> None:
    (stage,) = build(blueprint("qwen3"), [range(3)], num_frozen_layers=1)
    assert any("both are frozen" in note for note in stage.notes)
    assert "lm_head.weight" not in stage.parameters_by_name()


def test_more_layers_than_there_are_cannot_be_frozen() -> None:
    (stage,) = build(blueprint("llama"), [range(4)])
    freeze_below(stage, 0)
    assert len(stage.parameters_by_name()) == len(list(stage.parameters()))
    for num_layers in (-1, 5):
        with pytest.raises(UserError, match="cannot be frozen in a model of 4"):
            freeze_below(stage, num_layers)
