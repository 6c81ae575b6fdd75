"""Tiny configurations for all families of transformers with a pipeline plan, by the names of their keys."""

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.model.blueprint import Blueprint, fresh_blueprint
from isthmus.model.heads import HEADS, Head
from tests.model.cases import NUM_LABELS, PAD, VOCABULARY_SIZE

NUM_LAYERS = 4
SIZES: Mapping[str, int | float] = {
    "additional_vocab_size": 5,
    "attention_dropout": 0.1,
    "bos_token_id": 2,
    "dense_intermediate_size": 24,
    "dim_model_base": 16,
    "eos_token_id": 2,
    "expert_ffn_hidden_size": 8,
    "ffn_hidden_size": 24,
    "first_k_dense_replace": 1,
    "gated_norm_rank": 4,
    "head_dim": 8,
    "hidden_size": 16,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "intermediate_size": 24,
    "kv_lora_rank": 8,
    "linear_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_num_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 8,
    "mask_token_id": 3,
    "max_position_embeddings": 64,
    "max_window_layers": 1,
    "moe_hidden_size": 16,
    "moe_intermediate_size": 8,
    "moe_k": 2,
    "moe_layer_end_index": NUM_LAYERS - 1,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "n_group": 1,
    "n_routed_experts": 4,
    "num_attention_heads": 2,
    "num_dense_layers": 1,
    "num_expert_group": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "num_layers": NUM_LAYERS,
    "num_local_experts": 4,
    "pad_token_id": PAD,
    "prediction_head_size": 16,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rel_extent": 16,
    "rotary_dim": 8,
    "shared_expert_intermediate_size": 8,
    "shared_intermediate_size": 8,
    "sliding_window": 3,
    "sliding_window_size": 3,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1,
    "topk_group": 1,
    "v_head_dim": 8,
    "vocab_size": VOCABULARY_SIZE,
    "zero_expert_num": 2,
}
# What a family wants beside, or instead.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {"n_shared_experts": 1, "norm_topk_prob": True},
    "esmc": {"num_key_value_heads": 2},
    "longcat_flash": {"head_dim": 8},
}


def planned_types() -> list[str]:
    """Every type of model whose configuration brings a pipeline plan, and for which there is a head."""
    planned = [name for name in CONFIG_MAPPING if getattr(CONFIG_MAPPING[name], "base_model_pp_plan", None)]
    return [name for name in planned if heads_of(name)]


def heads_of(model_type: str) -> list[Head]:
    return [one for one in HEADS.values() if CONFIG_MAPPING[model_type] in one.auto_class._model_mapping]


def tiny_values(model_type: str, **changes: Any) -> dict[str, Any]:
    config_class = CONFIG_MAPPING[model_type]
    known = {*config_class().to_dict(), *config_class.attribute_map}
    values: dict[str, Any] = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:
        # Latent attention: its heads have sizes of their own, and share no keys.
        del values["num_key_value_heads"]
        values.pop("head_dim", None)
    return {"model_type": model_type, **values, **CHANGES.get(model_type, {}), **changes}


def tiny_blueprint(model_type: str, head: Head | None = None, **changes: Any) -> Blueprint:
    head = head or heads_of(model_type)[0]
    num_labels = None if head.name.endswith("lm") else NUM_LABELS
    return fresh_blueprint(tiny_values(model_type, **changes), head=head, num_labels=num_labels)
