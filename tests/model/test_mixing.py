"""Models with experts are known by the names of their parameters, whatever their family."""

import pytest

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
