"""A pipeline over links trains to the bit like one process that does the same micro-batches."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from isthmus.model.blueprint import Blueprint
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch
from isthmus.plan.scenario import Policy
from isthmus.wan.shaping import Shape
from tests.model.cases import CONFIGS, SEED, blueprint, make_batch
from tests.train.chain import SCHEDULE, WEIGHT_DECAY, Given, chain, config
from tests.train.reference import assert_same, parameters_of, train_alone

NUM_STEPS = 5
LENGTHS = ((9, 4), (3, 7), (5, 5), (8, 2))


def batches(plan: Blueprint, num_microbatches: int, *, num_steps: int = NUM_STEPS) -> list[list[Batch]]:
    """Micro-batches of several lengths, all different."""
    return [
        [
            make_batch(plan.head, lengths=LENGTHS[(step + number) % 4], seed=100 * step + number)
            for number in range(num_microbatches)
        ]
        for step in range(num_steps)
    ]


def alone(
    plan: Blueprint,
    steps: Sequence[Sequence[Batch]],
    *,
    max_norm: float | None = 0.5,
    autocast: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    stage = build_stage(plan, range(plan.num_layers), seed=SEED, untie=True)
    rates = [SCHEDULE.at(step) for step in range(len(steps))]
    losses = train_alone(
        stage,
        steps,
        seed=11,
        learning_rates=rates,
        weight_decay=WEIGHT_DECAY,
        max_norm=max_norm,
        autocast=autocast,
    )
    return parameters_of([stage]), losses


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 2), (2, 1), (2, 8), (3, 3), (4, 1), (4, 6)])
def test_pipeline_equals_one_process(num_stages: int, num_microbatches: int) -> None:
    plan = blueprint("llama")
    steps = batches(plan, num_microbatches)
    expected, losses = alone(plan, steps)
    with chain(plan, config(num_stages, num_microbatches)) as found:
        found.run(Given(steps))
    assert_same(parameters_of(found.stages), expected)
    assert [one.loss for one in found.records[0].steps] == pytest.approx(losses, rel=1e-6)


# Of those that differ least one is enough: tests/train/test_families.py has all, slowly.
@pytest.mark.parametrize(
    "model_type", sorted(CONFIGS.keys() - {"llama", "qwen2", "mistral", "roberta", "xlm-roberta"})
)
def test_every_family(model_type: str) -> None:
    plan = blueprint(model_type)
    steps = batches(plan, 2, num_steps=2)
    expected, _ = alone(plan, steps)
    agreed = config(2, 2, num_steps=2, keeps_padding=plan.mixes_tokens)
    with chain(plan, agreed, recompute=True) as found:
        found.run(Given(steps))
    assert_same(parameters_of(found.stages), expected)


def test_clipping_binds_and_is_by_the_norm_of_all_stages() -> None:
    plan = blueprint("llama")
    steps = batches(plan, 2)
    with chain(plan, config(3, 2), max_norm=0.01) as found:
        found.run(Given(steps))
    assert all(one.norm > 0.01 for one in found.records[0].steps)
    assert [one.norm for one in found.records[2].steps] == [one.norm for one in found.records[0].steps]
    assert_same(parameters_of(found.stages), alone(plan, steps, max_norm=0.01)[0])
    with pytest.raises(AssertionError):
        assert_same(parameters_of(found.stages), alone(plan, steps, max_norm=None)[0])


def test_without_clipping() -> None:
    plan = blueprint("gpt2")
    steps = batches(plan, 4)
    with chain(plan, config(2, 4), max_norm=None) as found:
        found.run(Given(steps))
    assert_same(parameters_of(found.stages), alone(plan, steps, max_norm=None)[0])


def test_bfloat16_autocast() -> None:
    plan = blueprint("llama")
    steps = batches(plan, 2)
    with chain(plan, config(2, 2)) as found:
        found.run(Given(steps), autocast=torch.bfloat16)
    assert_same(parameters_of(found.stages), alone(plan, steps, autocast=torch.bfloat16)[0])


@pytest.mark.parametrize("policy", Policy)
def test_every_policy_gives_the_same_weights(policy: Policy) -> None:
    plan = blueprint("bert")
    steps = batches(plan, 4)
    with chain(plan, config(2, 4, policy=policy)) as found:
        found.run(Given(steps))
    assert_same(parameters_of(found.stages), alone(plan, steps)[0])


def test_latency_opens_the_window_and_the_cap_closes_it() -> None:
    plan = blueprint("llama")
    steps = batches(plan, 8)
    shape = Shape(delay_s=0.02)
    with chain(plan, config(2, 8), shape=shape) as wide:
        wide.run(Given(steps))
    with chain(plan, config(2, 8, max_in_flight=(3, 8)), shape=shape) as narrow:
        narrow.run(Given(steps))
    assert wide.records[0].steps[-1].windows[0] > 3
    assert narrow.records[0].steps[-1].windows[0] == 3
    assert_same(parameters_of(wide.stages), parameters_of(narrow.stages))


def test_evaluation_across_the_cut_leaves_no_trace() -> None:
    plan = blueprint("llama")
    steps = batches(plan, 2)
    held_out = batches(plan, 3, num_steps=1)[0]
    with chain(plan, config(3, 2, evaluate_every=2, num_validation_microbatches=3)) as found:
        found.run(Given(steps, held_out))
    assert_same(parameters_of(found.stages), alone(plan, steps)[0])
    assert [one.step for one in found.records[0].evaluations] == [2, 4, 5]
    assert all(
        one.num_targets == sum(b.num_targets for b in held_out) for one in found.records[0].evaluations
    )
    assert found.records[0].evaluations[0].loss != found.records[0].evaluations[2].loss


def test_a_cut_link_changes_nothing() -> None:
    plan = blueprint("llama")
    steps = batches(plan, 8)
    with chain(plan, config(2, 8), shape=Shape(bandwidth_bps=2e6, delay_s=0.01)) as found:
        found.records[0].on_step = lambda ended: found.links[0].cut(0.5) if ended.step in (0, 2) else None
        found.run(Given(steps))
        assert found.links[0].end("north").counters().reconnects > 0
    assert_same(parameters_of(found.stages), alone(plan, steps)[0])
