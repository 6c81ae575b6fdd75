"""What a stage takes and gives: losses, boundaries, evaluation, and calls that make no sense."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from isthmus.errors import UserError
from isthmus.model.blueprint import fresh_blueprint, split_layers
from isthmus.model.cut import Departure, LayerCall, Passage, Seam
from isthmus.model.heads import HEADS, IGNORED
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch, StageInput
from tests.model.cases import (
    CASES,
    CONFIGS,
    RNG_KEY,
    TASKS,
    assert_identical,
    blueprint,
    build,
    make_batch,
    parameters,
    run_pass,
    scores_of,
)


@pytest.mark.parametrize(("model_type", "head"), [case for case in CASES if case[0] in ("llama", "bert")])
def test_the_mean_over_targets_is_transformers_own_loss(model_type: str, head: str) -> None:
    plan = blueprint(model_type, HEADS[head])
    batch = make_batch(plan.head)
    (stage,) = build(plan, [range(4)], untie=True)
    output = stage.eval()(StageInput(batch=batch))
    model = plan.head.auto_class.from_config(stage.model.config)
    model.load_state_dict(parameters([stage]))
    assert batch.labels is not None
    labels = (
        {"start_positions": batch.labels[:, 0], "end_positions": batch.labels[:, 1]}
        if head == "question-answering"
        else {"labels": batch.labels}
    )
    expected = model.eval()(input_ids=batch.ids, attention_mask=batch.mask, **labels).loss
    torch.testing.assert_close(output.loss / batch.num_targets, expected)


@pytest.mark.parametrize("head", TASKS)
def test_only_labels_that_count_are_targets(head: str) -> None:
    batch = make_batch(HEADS[head])
    assert batch.labels is not None
    num_labels = int((batch.labels != IGNORED).sum())
    num_firsts = len(batch.ids) if head == "causal-lm" else 0
    assert batch.num_targets == num_labels - num_firsts


def test_micro_batches_averaged_by_targets_make_one_batch() -> None:
    plan = blueprint("llama", attention_dropout=0.0)
    whole = make_batch(plan.head, lengths=(9, 3, 5, 9))
    assert whole.labels is not None
    assert whole.mask is not None
    expected = run_pass(build(plan, [range(4)]), whole)
    stages = build(plan, split_layers(4, 2))
    loss = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        part = Batch(
            ids=whole.ids[rows],
            mask=whole.mask[rows],
            labels=whole.labels[rows],
            num_targets=plan.head.num_targets(whole.labels[rows]),
        )
        first = stages[0](StageInput(batch=part, rng_key=RNG_KEY))
        crossing = first.crossing.detach().requires_grad_()
        last = stages[1](StageInput(batch=part, crossing=crossing, rng_key=RNG_KEY))
        last.backward(loss_weight=1 / whole.num_targets)
        first.backward(grad=crossing.grad)
        loss += float(last.loss.detach())
    assert loss == pytest.approx(float(expected.loss))
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected.grads[name])


def test_evaluation_counts_right_answers_and_draws_nothing() -> None:
    plan = blueprint("bert", HEADS["token-classification"])
    batch = make_batch(plan.head)
    first, last = (stage.eval() for stage in build(plan, split_layers(4, 2)))
    crossing = first(StageInput(batch=batch)).crossing
    output = last(StageInput(batch=batch, crossing=crossing))
    scores = scores_of(last, StageInput(batch=batch, crossing=crossing))
    assert batch.labels is not None
    assert int(output.num_correct) == int(scores.argmax(-1).eq(batch.labels).sum())
    assert torch.equal(output.loss, last(StageInput(batch=batch, crossing=crossing)).loss)
    last.train()
    assert last(StageInput(batch=batch, crossing=crossing, rng_key=RNG_KEY)).num_correct is None


def test_hidden_states_of_the_models_width_cross() -> None:
    plan = blueprint("electra")
    first, _ = build(plan, split_layers(3, 2))
    batch = make_batch(plan.head)
    assert first(StageInput(batch=batch, rng_key=RNG_KEY)).crossing.shape == (3, 9, 16)


def test_a_stage_holds_no_parameter_of_another() -> None:
    plan = blueprint("mixtral")
    for layers in split_layers(3, 3):
        (stage,) = build(plan, [layers])
        assert set(dict(stage.model.named_parameters())) == set(plan.layout.owned_by(layers))


def test_experts_are_balanced_layer_by_layer() -> None:
    plan = blueprint("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    batch = make_batch(plan.head)
    whole = build(plan, [range(3)])
    expected = run_pass(whole, batch)
    for num_stages in (2, 3):
        stages = build(plan, split_layers(3, num_stages), recompute=num_stages == 3)
        found = run_pass(stages, batch)
        assert torch.equal(found.loss, expected.loss)
        assert found.balance == pytest.approx(expected.balance)
        assert_identical(found.grads, expected.grads)
    unbalanced = run_pass(build(blueprint("mixtral"), [range(3)]), batch)
    assert unbalanced.balance == 0
    assert torch.equal(unbalanced.loss, expected.loss)
    gate = "model.layers.0.mlp.gate.weight"
    without, balanced = unbalanced.grads[gate], expected.grads[gate]
    assert without is not None
    assert balanced is not None
    assert not torch.equal(without, balanced)


def test_the_balancing_loss_is_the_mean_of_transformers_own_over_layers() -> None:
    plan = blueprint("mixtral", output_router_logits=True, router_aux_loss_coef=0.5, attention_dropout=0.0)
    batch = make_batch(plan.head)
    stages = build(plan, [range(3)])
    model = plan.head.auto_class.from_config(plan.config)
    model.load_state_dict(parameters(stages))
    with torch.no_grad():
        logits = model(input_ids=batch.ids, attention_mask=batch.mask).router_logits
    losses = [load_balancing_loss_func((layer,), 3, 2, batch.mask) for layer in logits]
    expected = 0.5 * sum(float(loss) for loss in losses) / 3 * batch.num_targets
    assert run_pass(stages, batch).balance == pytest.approx(expected, rel=1e-5)


def test_calls_that_make_no_sense_are_refused() -> None:
    plan = blueprint("llama")
    batch = make_batch(plan.head)
    first, last = build(plan, split_layers(4, 2))
    hidden = torch.zeros(3, 9, 16)
    with pytest.raises(ValueError, match="ids alone"):
        first(StageInput(batch=batch, crossing=hidden, rng_key=RNG_KEY))
    with pytest.raises(ValueError, match="ids alone"):
        last(StageInput(batch=batch, rng_key=RNG_KEY))
    with pytest.raises(ValueError, match="needs the RNG key"):
        first(StageInput(batch=batch))
    unlabelled = Batch(ids=batch.ids, num_targets=0)
    with pytest.raises(ValueError, match="needs the labels"):
        last(StageInput(batch=unlabelled, crossing=hidden, rng_key=RNG_KEY))
    with pytest.raises(ValueError, match="needs the gradient"):
        first(StageInput(batch=batch, rng_key=RNG_KEY)).backward()
    with pytest.raises(RuntimeError, match="only through its stage"):
        last.model(batch.ids)


def test_hidden_states_changed_between_layers_are_noticed() -> None:
    seam = Seam(model_class="OddForCausalLM")
    left = torch.ones(1, 2, 3)
    seam.passage = Passage(arrived=None, rng_key=None, left_layer=left)
    departure = Departure(nn.Identity(), seam)
    departure(left)
    assert seam.passage.departed is left
    with pytest.raises(UserError, match=r"OddForCausalLM cannot be cut .* between its layers"):
        departure(left * 2)


def test_learnt_side_inputs_of_layers_are_noticed() -> None:
    class Layer(nn.Module):
        def forward(self, hidden: Tensor, *, side: tuple[Tensor, ...]) -> Tensor:
            return hidden + side[0]

    seam = Seam(model_class="OddForCausalLM", passage=Passage(arrived=None, rng_key=None))
    call = LayerCall(Layer(), index=0, seam=seam, router=None)
    call(torch.ones(1), side=(torch.ones(1),))
    with pytest.raises(UserError, match="OddForCausalLM cannot be cut"):
        call(torch.ones(1), side=(torch.ones(1, requires_grad=True),))


def test_parameters_that_transformers_leaves_without_a_value_are_noticed() -> None:
    values = {
        "vocab_size": 53,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "moe_num_experts": 4,
        "moe_intermediate_size": 8,
    }
    plan = fresh_blueprint({"model_type": "ernie4_5_moe", **values}, head=HEADS["causal-lm"])
    with pytest.raises(UserError, match=r"gives model\.layers\.1\.mlp\.gate\.weight .* no initial value"):
        build(plan, [range(2)])


def test_other_families_with_a_plan_of_their_own_need_no_line_of_ours() -> None:
    values = {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
    shared = {key: value for key, value in CONFIGS["llama"].items() if key != "attention_dropout"}
    small = {"vocab_size": 53, "hidden_size": 16, "num_attention_heads": 2, "pad_token_id": 1}
    plan = fresh_blueprint({**values, **small, **shared}, head=HEADS["causal-lm"])
    batch = make_batch(plan.head)
    expected = run_pass(build(plan, [range(4)], untie=True), batch)
    found = run_pass(build(plan, split_layers(4, 3)), batch)
    assert torch.equal(found.loss, expected.loss)
    assert_identical(found.grads, expected.grads)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_pass_tells_when_it_nears_its_end(recompute: bool) -> None:
    plan = blueprint("llama")
    stage = build_stage(plan, range(3), seed=0, recompute=recompute)
    order: list[str] = []

    def note(word: str) -> Callable[..., None]:
        return lambda *_: order.append(word)

    for index in stage.layers:
        layer = stage.model.get_submodule(f"model.layers.{index}")
        layer.register_forward_pre_hook(note(f"layer {index}"))
        layer.register_full_backward_hook(note(f"back {index}"))
    inputs = StageInput(batch=make_batch(plan.head), rng_key=RNG_KEY, on_near_end=note("told"))
    output = stage(inputs)
    assert order == ["layer 0", "layer 1", "layer 2", "told"]
    order.clear()
    output.backward(grad=torch.ones_like(output.crossing))
    back = [word for word in order if not word.startswith("layer")]
    assert back.count("told") == 1
    assert back.index("back 2") < back.index("told") < back.index("back 0")
