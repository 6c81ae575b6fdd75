"""What can be cut, where its layers lie, and what a user is told when it cannot."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.model.blueprint import Blueprint, fresh_blueprint, pretrained_blueprint, split_layers
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.stage import StageInput
from tests.model.cases import (
    CASES,
    COMMON,
    CONFIGS,
    ENCODERS,
    SEED,
    blueprint,
    build,
    make_batch,
    scores_of,
)
from tests.model.test_weights import save_model
from tests.model.tiny import heads_of, tiny_blueprint, types_with_a_head

CAUSAL = HEADS["causal-lm"]


@given(st.integers(1, 200), st.data())
def test_layers_are_dealt_out_evenly_and_in_order(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    ranges = split_layers(num_layers, num_stages)
    assert [layer for layers in ranges for layer in layers] == list(range(num_layers))
    sizes = [len(layers) for layers in ranges]
    assert len(sizes) == num_stages
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("model_type", "head"), CASES)
def test_every_parameter_has_one_owner(model_type: str, head: str) -> None:
    plan = blueprint(model_type, HEADS[head])
    whole = build_stage(plan, range(plan.num_layers), seed=SEED, untie=True).model
    sizes = {name: p.numel() for name, p in whole.named_parameters()}
    stages = [plan.layout.owned_by(layers) for layers in split_layers(plan.num_layers, 3)]
    assert sum(len(stage) for stage in stages) == len(sizes)
    assert {name: size for stage in stages for name, size in stage.items()} == sizes
    assert plan.num_layers == CONFIGS[model_type]["num_hidden_layers"]
    for index, layer in enumerate(plan.layout.layers):
        assert layer
        assert all(f".{index}." in name for name in layer)


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_encoders_are_not_shown_their_targets(model_type: str) -> None:
    with pytest.raises(UserError, match=f"{model_type} is an encoder") as caught:
        blueprint(model_type, CAUSAL)
    assert 'data.task = "masked-lm"' in str(caught.value.hint)
    assert blueprint(model_type, CAUSAL, is_decoder=True).head is CAUSAL


def test_a_pretrained_encoder_is_refused_too(tmp_path: Path) -> None:
    save_model("bert", tmp_path)
    with pytest.raises(UserError, match="is an encoder"):
        pretrained_blueprint(str(tmp_path), head=CAUSAL)


def changes_what_lies_before(plan: Blueprint) -> bool:
    """Whether another last token changes the scores of the tokens before it."""
    (stage,) = build(plan, [range(plan.num_layers)])
    batch = make_batch(plan.head, lengths=(7, 7))
    other = replace(batch, ids=batch.ids.clone().index_fill_(1, torch.tensor(6), 5))
    with torch.no_grad():
        one, two = (scores_of(stage.eval(), StageInput(batch=each))[:, :6] for each in (batch, other))
    return not torch.allclose(one, two, atol=1e-6)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_is_trained_for_the_next_token_does_not_see_it(model_type: str) -> None:
    is_decoder = {"is_decoder": True} if model_type in ENCODERS else {}
    assert not changes_what_lies_before(blueprint(model_type, CAUSAL, **is_decoder))
    if model_type in ENCODERS:
        assert changes_what_lies_before(blueprint(model_type))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_no_family_sees_the_next_token() -> None:
    seeing: list[str] = []
    blind: list[str] = []
    for model_type in (one for one in types_with_a_head() if CAUSAL in heads_of(one)):
        try:
            sees = changes_what_lies_before(tiny_blueprint(model_type, CAUSAL))
        except UserError:
            continue
        (seeing if sees else blind).append(model_type)
    # The router of Doge's experts mixes the tokens of a batch, in transformers itself.
    assert seeing == ["doge"]
    assert len(blind) > 60


@pytest.mark.parametrize("num_stages", [0, 5, -1])
def test_more_stages_than_layers_are_refused(num_stages: int) -> None:
    with pytest.raises(UserError, match=f"4 layers cannot be cut into {num_stages} stages") as caught:
        split_layers(4, num_stages)
    assert caught.value.hint == "use 1 to 4 stages"


@pytest.mark.parametrize("layers", [range(0), range(2, 2), range(3, 5), range(-1, 2), range(0, 4, 2)])
def test_layers_that_no_stage_can_hold_are_refused(layers: range) -> None:
    with pytest.raises(UserError, match="no stage can hold the layers") as caught:
        build_stage(blueprint("llama"), layers, seed=SEED)
    assert "layers 0 to 3" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({}, "has no model_type", "transformers' documentation"),
        ({"model_type": "lama"}, "unknown model_type, 'lama'", "did you mean 'llama'?"),
        (
            {"model_type": "llama", "hiden_size": 8},
            "llama has no key 'hiden_size'",
            "did you mean 'hidden_size'?",
        ),
        ({"model_type": "llama", "hidden_size": "8"}, "llama cannot be used: .*expected int, got str", None),
        ({"model_type": "llama", "hidden_size": 9, "num_attention_heads": 2}, "not a multiple", None),
        ({"model_type": "albert"}, "no causal-lm head for AlbertConfig", "choose one of masked-lm"),
        (
            {"model_type": "gemma4_text"},
            r"Gemma4ForCausalLM cannot be cut .*: its layers get more than hidden states",
            "docs/adding-a-family.md",
        ),
        (
            {"model_type": "bart"},
            "BartConfig cannot be cut into stages: it is an encoder with a decoder",
            "docs/adding-a-family.md",
        ),
        ({"model_type": "vit"}, "no causal-lm head for ViTConfig", "language models"),
        (
            {"model_type": "qwen3_moe", "output_router_logits": True},
            "balancing loss of Qwen3MoeForCausalLM",
            "output_router_logits = false",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used(values: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(UserError, match=message) as caught:
        fresh_blueprint(values, head=CAUSAL)
    assert hint is None or hint in str(caught.value.hint)
    assert "\n" not in caught.value.message


def test_a_head_that_a_family_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(UserError, match="no question-answering head for GemmaConfig") as caught:
        blueprint("gemma", HEADS["question-answering"])
    assert caught.value.hint == "choose one of causal-lm, sequence-classification, token-classification"


def test_a_classifier_needs_labels_and_a_padding_token() -> None:
    head = HEADS["sequence-classification"]
    values = {"model_type": "llama", **COMMON, **CONFIGS["llama"]}
    with pytest.raises(UserError, match="at least two labels"):
        fresh_blueprint(values, head=head, num_labels=1)
    with pytest.raises(UserError, match="no padding token") as caught:
        fresh_blueprint({**values, "pad_token_id": None}, head=head, num_labels=2)
    assert "pad_token_id" in str(caught.value.hint)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model is found") as caught:
        pretrained_blueprint(str(tmp_path), head=CAUSAL)
    assert "config.json" in str(caught.value.hint)
    (tmp_path / "config.json").write_text('{"no": "type"}')
    with pytest.raises(UserError, match="cannot be used"):
        pretrained_blueprint(str(tmp_path), head=CAUSAL)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be used"):
        pretrained_blueprint(str(tmp_path), head=CAUSAL)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="holds quantised weights") as caught:
        pretrained_blueprint(str(tmp_path), head=CAUSAL)
    assert "bfloat16" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["not a name", "/nowhere/at/all"])
def test_a_name_that_cannot_be_is_refused_without_a_network(name: str) -> None:
    with pytest.raises(UserError, match="no model is found at"):
        pretrained_blueprint(name, head=CAUSAL)
