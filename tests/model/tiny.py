"""Tiny configurations for all types of models that transformers has, by the names of their keys."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.errors import UserError
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
PICTURE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "crop_size": 32,
}
# What a family wants beside, or instead.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {"n_shared_experts": 1, "norm_topk_prob": True},
    "esmc": {"num_key_value_heads": 2},
    "longcat_flash": {"head_dim": 8},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "codegen": {"num_attention_heads": 4, "rotary_dim": 4},
    "diffllama": {"attention_dropout": 0.0, "num_key_value_heads": 2},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "git": {"vision_config": PICTURE},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "phi4_multimodal": {
        "vision_config": PICTURE,
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    },
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "squeezebert": {"embedding_size": 16},
    "xlnet": {"d_head": 8},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def types_with_a_head() -> list[str]:
    """Every type of model for which transformers has a class for one of our tasks."""
    return [name for name in CONFIG_MAPPING if heads_of(name)]


@functools.cache
def heads_of(model_type: str) -> tuple[Head, ...]:
    """The tasks of a type; a composite one has those of its text part too."""
    classes = {CONFIG_MAPPING[model_type]}
    with contextlib.suppress(StrictDataclassError, ImportError, ValueError):
        classes.add(type(getattr(CONFIG_MAPPING[model_type](), "text_config", None)))
    return tuple(one for one in HEADS.values() if classes & set(one.auto_class._model_mapping))


def tiny_values(model_type: str, **changes: Any) -> dict[str, Any]:
    config_class = CONFIG_MAPPING[model_type]
    try:
        defaults = config_class()
    except StrictDataclassError:
        return {"model_type": model_type}
    if "text_config" in config_class.sub_configs and defaults.text_config.model_type in CONFIG_MAPPING:
        text_values = tiny_values(defaults.text_config.model_type, **changes)
        return {"model_type": model_type, "text_config": text_values}
    known = {*defaults.to_dict(), *config_class.attribute_map}
    values: dict[str, Any] = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:
        # Latent attention: its heads have sizes of their own, and share no keys.
        del values["num_key_value_heads"]
        values.pop("head_dim", None)
    return {"model_type": model_type, **values, **CHANGES.get(model_type, {}), **changes}


def tiny_blueprint(model_type: str, head: Head | None = None, **changes: Any) -> Blueprint:
    """A tiny model, for the first of its tasks that it can be trained for unless one is given."""
    refusals = []
    for one in heads_of(model_type) if head is None else [head]:
        num_labels = None if one.name.endswith("lm") else NUM_LABELS
        try:
            return fresh_blueprint(tiny_values(model_type, **changes), head=one, num_labels=num_labels)
        except UserError as error:
            refusals.append(error)
    raise refusals[0]
