"""A model that is cut trains to the bit like the one that is not."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.model.blueprint import split_layers
from isthmus.model.heads import HEADS
from isthmus.model.random import RngKey
from isthmus.model.stage import Batch, StageInput
from tests.model.cases import (
    CASES,
    RNG_KEY,
    assert_identical,
    blueprint,
    build,
    make_batch,
    parameters,
    run_pass,
)
from tests.model.plain import plain_pass


@pytest.mark.parametrize(("model_type", "head"), CASES)
def test_every_family_and_head_is_cut_without_a_trace(model_type: str, head: str) -> None:
    plan = blueprint(model_type, HEADS[head])
    batch = make_batch(plan.head)
    values = parameters(build(plan, [range(plan.num_layers)], untie=True))
    expected = plain_pass(plan, batch, values)
    for num_stages in range(1, plan.num_layers + 1):
        cuts = split_layers(plan.num_layers, num_stages)
        stages = build(plan, cuts, untie=True, recompute=num_stages % 2 == 0)
        assert_identical(parameters(stages), values)
        found = run_pass(stages, batch)
        assert torch.equal(found.loss, expected.loss)
        assert_identical(found.grads, expected.grads)


@settings(max_examples=8, deadline=None)
@given(st.sets(st.integers(1, 3)), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_any_cut_and_any_lengths(cuts_at: set[int], lengths: list[int]) -> None:
    plan = blueprint("llama")
    batch = make_batch(plan.head, lengths=[*lengths, 9])
    edges = [0, *sorted(cuts_at), 4]
    ranges = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    expected = run_pass(build(plan, [range(4)]), batch)
    found = run_pass(build(plan, ranges), batch)
    assert torch.equal(found.loss, expected.loss)
    assert_identical(found.grads, expected.grads)


@pytest.mark.parametrize("model_type", ["bert", "electra", "llama"])
def test_where_a_message_lies_in_memory_changes_nothing(model_type: str) -> None:
    """At an odd address BLAS adds in another order, for some shapes: those of an encoder's first product."""
    plan = blueprint(model_type, hidden_size=104, intermediate_size=180)
    cuts = split_layers(plan.num_layers, 3)
    for seed, length in itertools.product(range(2), (2, 3, 9)):
        batch = make_batch(plan.head, lengths=(length,), seed=seed)
        expected = run_pass(build(plan, cuts), batch)
        found = run_pass(build(plan, cuts), batch, place=at_an_odd_address)
        assert torch.equal(found.loss, expected.loss)
        assert_identical(found.grads, expected.grads)


def at_an_odd_address(tensor: Tensor) -> Tensor:
    shifted = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return shifted.copy_(tensor)


def test_positions_that_start_anew_are_rebuilt_at_every_stage() -> None:
    plan = blueprint("llama")
    padded = make_batch(plan.head, lengths=(8, 8))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)
    batch = Batch(
        ids=padded.ids, labels=padded.labels, num_targets=padded.num_targets, position_ids=positions
    )
    values = parameters(build(plan, [range(4)]))
    expected = plain_pass(plan, batch, values)
    found = run_pass(build(plan, split_layers(4, 3)), batch)
    assert torch.equal(found.loss, expected.loss)
    assert_identical(found.grads, expected.grads)
    straight = Batch(ids=batch.ids, labels=batch.labels, num_targets=batch.num_targets)
    assert not torch.equal(run_pass(build(plan, split_layers(4, 3)), straight).loss, expected.loss)


def test_token_types_reach_the_embedding() -> None:
    plan = blueprint("bert")
    batch = make_batch(plan.head)
    typed = Batch(
        ids=batch.ids,
        mask=batch.mask,
        labels=batch.labels,
        num_targets=batch.num_targets,
        token_type_ids=(torch.arange(9) > 3).long().expand(3, 9),
    )
    cut, whole = split_layers(4, 2), [range(4)]
    assert torch.equal(
        run_pass(build(plan, cut), typed).loss, run_pass(build(plan, whole, untie=True), typed).loss
    )
    assert not torch.equal(run_pass(build(plan, cut), typed).loss, run_pass(build(plan, cut), batch).loss)


@pytest.mark.parametrize("model_type", ["qwen3", "bert"])
def test_autocast_changes_nothing_at_a_cut(model_type: str) -> None:
    plan = blueprint(model_type)
    batch = make_batch(plan.head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = run_pass(build(plan, [range(plan.num_layers)], untie=True), batch)
        found = run_pass(build(plan, split_layers(plan.num_layers, 3), recompute=True), batch)
    assert torch.equal(found.loss, expected.loss)
    assert_identical(found.grads, expected.grads)


def test_dropout_depends_on_the_moment_alone() -> None:
    plan = blueprint("gpt2")
    batch = make_batch(plan.head)
    stages = build(plan, split_layers(4, 2))
    first = run_pass(stages, batch).loss
    torch.rand(100)
    assert torch.equal(run_pass(stages, batch).loss, first)
    for other in (
        RngKey(seed=8, step=3, microbatch=2),
        RngKey(seed=7, step=4, microbatch=2),
        RngKey(seed=7, step=3, microbatch=1),
    ):
        assert not torch.equal(run_pass(stages, batch, rng_key=other).loss, first)


def test_recomputation_of_an_older_micro_batch_draws_its_own_masks() -> None:
    plan = blueprint("bert")
    batch = make_batch(plan.head)
    expected = run_pass(build(plan, [range(4)], untie=True), batch)
    (stage,) = build(plan, [range(4)], untie=True, recompute=True)
    older = stage(StageInput(batch=batch, rng_key=RNG_KEY))
    stage(StageInput(batch=batch, rng_key=RngKey(seed=7, step=3, microbatch=3)))
    older.backward(loss_weight=1 / batch.num_targets)
    assert_identical({name: p.grad for name, p in stage.model.named_parameters()}, expected.grads)


def test_the_generators_of_the_process_are_left_as_found() -> None:
    plan = blueprint("bert")
    before = torch.random.get_rng_state()
    run_pass(build(plan, split_layers(4, 2), recompute=True), make_batch(plan.head))
    assert torch.equal(torch.random.get_rng_state(), before)
