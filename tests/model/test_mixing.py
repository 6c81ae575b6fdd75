"""Which models sort tokens by their values is found by watching them, and held to a list only here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.cut import sorts_tokens
from isthmus.model.families import Family
from isthmus.model.heads import HEADS
from tests.model.cases import CONFIGS, blueprint
from tests.model.tiny import tiny_blueprint

WITH_EXPERTS = [
    "deepseek_v3",
    "doge",
    "gpt_oss",
    "minimax",
    "mistral4",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
]


@pytest.mark.parametrize("model_type", CONFIGS)
def test_of_the_listed_families_mixtral_alone_has_experts(model_type: str) -> None:
    assert blueprint(model_type).mixes_tokens == (model_type == "mixtral")


@pytest.mark.parametrize("model_type", WITH_EXPERTS)
def test_experts_are_found_whatever_the_family_calls_them(model_type: str) -> None:
    assert tiny_blueprint(model_type).mixes_tokens


def test_a_family_with_and_without_experts() -> None:
    assert not tiny_blueprint("doge", is_moe=False).mixes_tokens
    assert not tiny_blueprint("qwen3_moe", mlp_only_layers=[0, 1, 2, 3]).mixes_tokens
    assert tiny_blueprint("qwen3_moe", mlp_only_layers=[0, 1, 2]).mixes_tokens


class Layer(nn.Module):
    """Does one thing with hidden states of shape (batch, tokens, width)."""

    def __init__(self, act: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.act = act

    def forward(self, hidden: Tensor) -> Tensor:
        self.act(hidden)
        return hidden


class Toy(nn.Module):
    """As much of a model as is watched."""

    def __init__(self, act: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3, device="meta")
        self.layers = nn.ModuleList([Layer(act)])

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, input_ids: Tensor, **_: object) -> Tensor:
        hidden: Tensor = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def sorts(act: Callable[[Tensor], object]) -> bool:
    model: Any = Toy(act)
    return sorts_tokens(model, Family(first=("embed",), layers="layers"))


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x - x.max(-1, keepdim=True).values,  # gives the places of the maxima beside
        lambda x: torch.where(x > 0, x, x.exp()),
        lambda x: x.masked_fill(torch.ones_like(x).tril() != 0, 0),
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: torch.view_as_complex(x[..., :2].contiguous()) * 2,
        lambda x: torch.arange(x.shape[1], device=x.device).argsort() + 1,
    ],
)
def test_what_is_computed_row_by_row_sorts_nothing(act: Callable[[Tensor], object]) -> None:
    assert not sorts(act)


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.flatten(0, 1)[x.flatten(0, 1).sum(-1).argsort()],
        lambda x: x.flatten(0, 1)[x.detach().flatten(0, 1).sum(-1).argsort()],
        lambda x: F.one_hot(x.data.topk(2).indices, 3),
        lambda x: x[x.sum(-1) > 0],
        lambda x: (x.sum(-1) > 0).nonzero(),
        lambda x: x * x.sum().item(),
        lambda x: x if x.sum() > 0 else -x,
    ],
)
def test_rows_that_are_chosen_by_values_are_seen(act: Callable[[Tensor], object]) -> None:
    assert sorts(act)


@pytest.mark.parametrize(("model_type", "expected"), [("deepseek_v3", True), ("llama", False)])
def test_a_model_of_real_size_needs_no_memory(model_type: str, expected: bool) -> None:
    sizes = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672}
    plan = fresh_blueprint(
        {"model_type": model_type, **sizes, "bos_token_id": 0, "eos_token_id": 1}, head=HEADS["causal-lm"]
    )
    assert plan.mixes_tokens == expected


def test_a_configuration_that_no_layer_can_run_is_refused() -> None:
    """Transformers builds this model, but its router asks for a number of experts that is missing."""
    plan = tiny_blueprint("deepseek_v2", num_experts_per_tok=None)
    with pytest.raises(UserError, match="configuration of DeepseekV2ForCausalLM cannot be used") as refused:
        _ = plan.mixes_tokens
    assert refused.value.hint
