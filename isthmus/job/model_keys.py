"""The keys that the configuration of a model may have, known without transformers.

Those of transformers 5.17 to 5.22; a test holds them to the installed version.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from isthmus.units import closest


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALL: Final = _keys("""
    _name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id hidden_size id2label
    initializer_range is_encoder_decoder label2id max_position_embeddings model_type num_attention_heads
    num_hidden_layers output_attentions output_hidden_states pad_token_id problem_type return_dict
    tie_word_embeddings transformers_version use_cache vocab_size
""")
_DECODER: Final = _ALL | _keys("""
    attention_dropout hidden_act intermediate_size num_key_value_heads rms_norm_eps rope_parameters
""")
_WINDOWED: Final = _DECODER | _keys("layer_types max_window_layers sliding_window use_sliding_window")
_ENCODER: Final = _ALL | _keys("""
    add_cross_attention attention_probs_dropout_prob classifier_dropout hidden_act hidden_dropout_prob
    intermediate_size is_decoder layer_norm_eps type_vocab_size
""")
_GPT_NEOX: Final = _ALL | _keys("""
    attention_bias attention_dropout classifier_dropout hidden_act hidden_dropout intermediate_size is_decoder
    layer_norm_eps rope_parameters use_parallel_residual
""")
_MIXTRAL: Final = _DECODER | _keys("""
    head_dim num_experts num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef
    router_jitter_noise sliding_window
""")
_GPT2: Final = _ALL | _keys("""
    activation_function add_cross_attention attn_pdrop embd_pdrop layer_norm_epsilon n_embd n_head n_inner
    n_layer n_positions reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx scale_attn_weights
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
""")

MODEL_KEYS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "llama": _DECODER | _keys("attention_bias head_dim mlp_bias pretraining_tp"),
        "qwen2": _WINDOWED,
        "qwen3": _WINDOWED | _keys("attention_bias head_dim"),
        "mistral": _DECODER | _keys("head_dim sliding_window"),
        "gemma": _DECODER | _keys("attention_bias head_dim use_bidirectional_attention"),
        "phi3": _DECODER | _keys("embd_pdrop original_max_position_embeddings resid_pdrop sliding_window"),
        "gpt_neox": _GPT_NEOX,
        "mixtral": _MIXTRAL,
        "gpt2": _GPT2,
        "bert": _ENCODER,
        "roberta": _ENCODER,
        "xlm-roberta": _ENCODER,
        "electra": _ENCODER
        | _keys("embedding_size summary_activation summary_last_dropout summary_type summary_use_proj"),
    }
)


def unknown_key(model_type: str, keys: Collection[str], known: Collection[str]) -> tuple[str, str] | None:
    """What is wrong with the first key that a configuration does not have, and the cure; None if all do."""
    key = next((one for one in keys if one not in known), None)
    if key is None:
        return None
    meant = closest(key, known)
    cure = f"did you mean {meant!r}?" if meant else "transformers' documentation lists them"
    return f"the configuration of {model_type} has no key {key!r}", cure
