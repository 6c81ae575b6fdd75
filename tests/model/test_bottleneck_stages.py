"""Stages with bottlenecks between them: warm-up, switch, exactness and state."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.job.codec import BottleneckSpec, BoundarySpec, HiddenSpec
from isthmus.job.codec_steps import Anchor
from isthmus.model.blueprint import Blueprint, split_layers
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch, Stage, StageInput
from tests.model.cases import RNG_KEY, SEED, assert_identical, blueprint, make_batch

SPEC = BottleneckSpec(rank=6)
HIDDEN = HiddenSpec()


def build_cut(plan: Blueprint, num_stages: int, spec: BoundarySpec = SPEC, **options: Any) -> list[Stage]:
    cuts = split_layers(plan.num_layers, num_stages)
    return [
        build_stage(
            plan,
            layers,
            seed=SEED,
            inbound=spec if layers.start > 0 else HIDDEN,
            outbound=spec if layers.stop < plan.num_layers else HIDDEN,
            **options,
        )
        for layers in cuts
    ]


def train_pass(
    stages: Sequence[Stage], batch: Batch, *, is_warming_up: bool = False, is_cut: bool = True
) -> Tensor:
    """Forward and backward; at a cut the graph ends and gradients are handed back, or it spans all stages."""
    crossings: list[Tensor | None] = [None]
    outputs = []
    for stage in stages:
        inputs = StageInput(batch=batch, crossing=crossings[-1], rng_key=RNG_KEY, is_warming_up=is_warming_up)
        outputs.append(stage(inputs))
        crossing = outputs[-1].crossing
        if crossing is not None:
            crossings.append(crossing.detach().requires_grad_() if is_cut else crossing)
    loss: Tensor = outputs[-1].loss.detach()
    if not is_cut:
        outputs[-1].backward(loss_weight=1 / batch.num_targets)
        return loss
    grad = None
    for output, arrived in zip(reversed(outputs), reversed(crossings), strict=True):
        output.backward(grad=grad, loss_weight=1 / batch.num_targets)
        grad = None if arrived is None else arrived.grad
    return loss


def begin(stages: Sequence[Stage]) -> None:
    for before, behind in pairwise(stages):
        assert before.down is not None
        assert behind.up is not None
        behind.up.begin(before.down.begin())


def warm_up(stages: Sequence[Stage], plan: Blueprint, *, num_batches: int = 4) -> None:
    for seed in range(num_batches):
        train_pass(stages, make_batch(plan.head, seed=seed), is_warming_up=True)
    for stage in stages:
        stage.zero_grad()
    begin(stages)


def grads(stages: Sequence[Stage]) -> dict[str, Tensor | None]:
    return {
        f"{index}.{name}": one.grad
        for index, stage in enumerate(stages)
        for name, one in stage.parameters_by_name().items()
    }


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt2", "mixtral"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_cut_stages_train_to_the_bit_like_one_graph(model_type: str, num_stages: int) -> None:
    plan = blueprint(model_type)
    batch = make_batch(plan.head, seed=9)
    found, expected = (
        build_cut(plan, num_stages, recompute=recompute) for recompute in (num_stages == 3, False)
    )
    for stages in (found, expected):
        warm_up(stages, plan)
    assert torch.equal(train_pass(found, batch), train_pass(expected, batch, is_cut=False))
    assert_identical(grads(found), grads(expected))
    assert all(grad is not None for name, grad in grads(found).items() if "down." in name or "up." in name)


def test_under_autocast_too() -> None:
    plan = blueprint("qwen3")
    batch = make_batch(plan.head, seed=9)
    found, expected = build_cut(plan, 2), build_cut(plan, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for stages in (found, expected):
            warm_up(stages, plan)
        assert torch.equal(train_pass(found, batch), train_pass(expected, batch, is_cut=False))
    assert_identical(grads(found), grads(expected))


def test_during_the_warm_up_nothing_differs_from_plain_stages() -> None:
    plan = blueprint("llama")
    batch = make_batch(plan.head)
    stages, plain = build_cut(plan, 2), build_cut(plan, 2, HIDDEN)
    assert torch.equal(train_pass(stages, batch, is_warming_up=True), train_pass(plain, batch))
    found = grads(stages)
    assert_identical({name: one for name, one in found.items() if name in grads(plain)}, grads(plain))
    extra = {name: one for name, one in found.items() if name not in grads(plain)}
    assert set(extra) == {"0.down.weight", "1.up.weight", "1.up.anchors.mean", "1.up.anchors.table"}
    assert set(extra.values()) == {None}


def test_only_training_is_observed() -> None:
    plan = blueprint("llama")
    first, _ = build_cut(plan, 2)
    assert first.down is not None
    inputs = StageInput(batch=make_batch(plan.head), rng_key=RNG_KEY, is_warming_up=True)
    first.eval()(inputs)
    assert first.down.observed.is_empty
    first.train()(inputs)
    assert float(first.down.observed.weight) == 9 + 4 + 6


def test_as_many_numbers_cross_as_the_boundary_says() -> None:
    plan = blueprint("llama")
    first, last = build_cut(plan, 2)
    warm_up([first, last], plan)
    inputs = StageInput(batch=make_batch(plan.head), rng_key=RNG_KEY)
    assert first(inputs).crossing.shape == (3, 9, 6)


def test_weights_in_bfloat16_get_their_hidden_states_in_it() -> None:
    plan = blueprint("llama")
    stages = build_cut(plan, 2, dtype=torch.bfloat16)
    warm_up(stages, plan)
    loss = train_pass(stages, make_batch(plan.head))
    assert torch.isfinite(loss)
    assert stages[1].up is not None
    assert stages[1].up.weight.dtype == torch.float32


@pytest.mark.parametrize("num_before", [2, 5])
def test_a_state_saved_before_or_behind_the_switch_goes_on_to_the_bit(num_before: int) -> None:
    plan = blueprint("llama")
    whole, again = build_cut(plan, 2), build_cut(plan, 2)
    learn(whole, plan, range(num_before))
    saved = [{name: one.clone() for name, one in stage.tensors_by_name().items()} for stage in whole]
    for stage, tensors in zip(again, saved, strict=True):
        for name, tensor in stage.tensors_by_name().items():
            tensor.copy_(tensors[name])
    for stages in (whole, again):
        learn(stages, plan, range(num_before, 7))
    for stage, other in zip(whole, again, strict=True):
        assert_identical(other.tensors_by_name(), stage.tensors_by_name())
    assert all(half is not None and half.has_begun for half in (again[0].down, again[1].up))


def learn(stages: Sequence[Stage], plan: Blueprint, steps: range, *, num_warmup_steps: int = 4) -> None:
    for step in steps:
        if step == num_warmup_steps:
            begin(stages)
        train_pass(stages, make_batch(plan.head, seed=step), is_warming_up=step < num_warmup_steps)
        with torch.no_grad():
            for stage in stages:
                for parameter in stage.parameters_by_name().values():
                    if parameter.grad is not None:
                        parameter.sub_(0.01 * parameter.grad)
                stage.zero_grad()


def test_a_trained_bottleneck_learns() -> None:
    plan = blueprint("llama", attention_dropout=0.0)
    stages = build_cut(plan, 2)
    learn(stages, plan, range(5))
    assert stages[0].down is not None
    before = stages[0].down.weight.detach().clone()
    batch = make_batch(plan.head, seed=1)
    first = train_pass(stages, batch)
    learn(stages, plan, range(5, 12))
    assert not torch.equal(stages[0].down.weight, before)
    for _ in range(20):
        learn(stages, plan, range(1, 2), num_warmup_steps=0)
    assert float(train_pass(stages, batch)) < float(first)


def test_names_are_hugging_faces_and_those_of_the_halves() -> None:
    plan = blueprint("llama")
    first, middle, last = build_cut(plan, 3)
    for stage in (first, middle, last):
        names = set(stage.parameters_by_name())
        assert set(plan.layout.owned_by(stage.layers)) == {
            name for name in names if not name.startswith(("down.", "up."))
        }
        assert names <= set(stage.tensors_by_name())
    assert "down.anchors.table" not in first.parameters_by_name()
    assert {"down.anchors.table", "down.observed.scatter_DD"} < set(first.tensors_by_name())
    assert {"down.weight", "up.weight", "up.anchors.table"} < set(middle.parameters_by_name())
    assert not [name for name in last.tensors_by_name() if name.startswith("down.")]


def test_bottlenecks_that_make_no_sense_are_refused() -> None:
    plan = blueprint("llama")
    with pytest.raises(UserError, match="no bottleneck where hidden states are 16 wide"):
        build_cut(plan, 2, BottleneckSpec(rank=16, anchor=Anchor.NONE))
    with pytest.raises(ValueError, match="not at an end"):
        build_stage(plan, range(2), seed=SEED, inbound=SPEC)
    with pytest.raises(ValueError, match="not at an end"):
        build_stage(plan, range(2, 4), seed=SEED, outbound=SPEC)
