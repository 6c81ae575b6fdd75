"""What each family of models is built of, as far as its costs go, and what its configuration leaves unsaid.

Keys are those of Hugging Face's `config.json`, in one spelling for all families; a test holds every default
to transformers' own.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final


class Norm(enum.Enum):
    """How a layer normalises its input."""

    RMS = "rms"
    """By a formula in float32, scaled in the type of its input."""
    WIDE_RMS = "wide rms"
    """The same, scaled in float32 too."""
    LAYER = "layer"


class Rotary(enum.Enum):
    """How positions enter queries and keys."""

    NONE = "none"
    WHOLE = "whole"
    SPLIT = "split"
    """Some of the width turns and the rest is put beside it again, which copies both."""


class Product(enum.Enum):
    """A linear module of a layer."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    QUERY_KEY_VALUE = "query, key and value"
    OUT = "out"
    GATE = "gate"
    UP = "up"
    GATE_UP = "gate and up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The structure that all models of one `model_type` share."""

    defaults: Mapping[str, object]
    products: Mapping[Product, str]
    """The linear modules of a layer, by their names in it."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """What other families' configurations say, and this one's cannot."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Its own names of keys, and ours."""
    norm: Norm = Norm.RMS
    rotary: Rotary = Rotary.WHOLE
    is_encoder: bool = False
    """An encoder attends both ways and normalises behind each part of a layer instead of before it."""
    is_gated: bool = True
    has_joint_projections: bool = False
    """Whether queries, keys and values, and gate and up where gated, come from one product each."""
    has_query_norm: bool = False
    has_question_head: bool = True
    """Whether transformers has a head for answers in it."""
    counts_from_padding: bool = False
    """Whether the first position is the one behind the padding token's id."""
    num_score_biases: int = 0
    """Of a language model's head; BERT and its kin name theirs twice, and a cut makes two of it."""


_COMMON: Final[dict[str, object]] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "max_position_embeddings": 0,
    "type_vocab_size": 0,
    "embedding_size": None,
    "sliding_window": None,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "num_local_experts": None,
    "num_experts_per_tok": 0,
    "use_parallel_residual": False,
    "partial_rotary_factor": 1.0,
}
_NO_BIAS: Final[dict[str, object]] = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_ALL_BIAS: Final[dict[str, object]] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
# Rotary positions have no parameters, so how many there may be costs nothing.
_NO_POSITIONS: Final[dict[str, object]] = {"max_position_embeddings": 0}


def _defaults(**changes: object) -> dict[str, object]:
    return _COMMON | changes


_QWEN: Final = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "max_position_embeddings": 32768,
}
_ENCODER_SIZES: Final = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "residual_dropout": 0.1,
    "attention_dropout": 0.1,
    "type_vocab_size": 2,
}

_ATTENTION: Final = {
    Product.QUERY: "self_attn.q_proj",
    Product.KEY: "self_attn.k_proj",
    Product.VALUE: "self_attn.v_proj",
    Product.OUT: "self_attn.o_proj",
}
_SPLIT: Final = _ATTENTION | {
    Product.GATE: "mlp.gate_proj",
    Product.UP: "mlp.up_proj",
    Product.DOWN: "mlp.down_proj",
}


def _encoder(*, num_score_biases: int = 2, counts_from_padding: bool = False, **changes: object) -> Family:
    return Family(
        defaults=_defaults(**(_ENCODER_SIZES | changes)),
        products={
            Product.QUERY: "attention.self.query",
            Product.KEY: "attention.self.key",
            Product.VALUE: "attention.self.value",
            Product.OUT: "attention.output.dense",
            Product.UP: "intermediate.dense",
            Product.DOWN: "output.dense",
        },
        fixed=_ALL_BIAS,
        spellings={
            "hidden_dropout_prob": "residual_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        norm=Norm.LAYER,
        rotary=Rotary.NONE,
        is_encoder=True,
        is_gated=False,
        num_score_biases=num_score_biases,
        counts_from_padding=counts_from_padding,
    )


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": Family(
            defaults=_defaults(
                intermediate_size=11008, attention_bias=False, mlp_bias=False, max_position_embeddings=2048
            ),
            products=_SPLIT,
            fixed=_NO_POSITIONS,
        ),
        "qwen2": Family(
            defaults=_defaults(**_QWEN),
            products=_SPLIT,
            fixed=_NO_POSITIONS | _NO_BIAS | {"qkv_bias": True},
        ),
        "qwen3": Family(
            defaults=_defaults(**_QWEN, head_dim=128, attention_bias=False),
            products=_SPLIT,
            fixed=_NO_POSITIONS | {"mlp_bias": False},
            has_query_norm=True,
        ),
        "mistral": Family(
            defaults=_defaults(
                intermediate_size=14336,
                num_key_value_heads=8,
                sliding_window=4096,
                max_position_embeddings=131072,
            ),
            products=_SPLIT,
            fixed=_NO_POSITIONS | _NO_BIAS,
        ),
        "gemma": Family(
            defaults=_defaults(
                vocab_size=256000,
                hidden_size=3072,
                intermediate_size=24576,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=16,
                head_dim=256,
                hidden_act="gelu_pytorch_tanh",
                tie_word_embeddings=True,
                attention_bias=False,
                max_position_embeddings=8192,
            ),
            norm=Norm.WIDE_RMS,
            products=_SPLIT,
            fixed=_NO_POSITIONS | {"mlp_bias": False},
            has_question_head=False,
        ),
        "phi3": Family(
            defaults=_defaults(
                vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096
            ),
            products={
                Product.QUERY_KEY_VALUE: "self_attn.qkv_proj",
                Product.OUT: "self_attn.o_proj",
                Product.GATE_UP: "mlp.gate_up_proj",
                Product.DOWN: "mlp.down_proj",
            },
            fixed=_NO_POSITIONS | _NO_BIAS,
            spellings={"resid_pdrop": "residual_dropout"},
            rotary=Rotary.SPLIT,
            has_joint_projections=True,
            has_question_head=False,
        ),
        "gpt_neox": Family(
            defaults=_defaults(
                vocab_size=50432,
                hidden_size=6144,
                intermediate_size=24576,
                num_hidden_layers=44,
                num_attention_heads=64,
                hidden_act="gelu",
                attention_bias=True,
                use_parallel_residual=True,
                partial_rotary_factor=0.25,
                max_position_embeddings=2048,
            ),
            products={
                Product.QUERY_KEY_VALUE: "attention.query_key_value",
                Product.OUT: "attention.dense",
                Product.UP: "mlp.dense_h_to_4h",
                Product.DOWN: "mlp.dense_4h_to_h",
            },
            fixed=_NO_POSITIONS | {"mlp_bias": True},
            spellings={"hidden_dropout": "residual_dropout", "rotary_pct": "partial_rotary_factor"},
            norm=Norm.LAYER,
            rotary=Rotary.SPLIT,
            is_gated=False,
            has_joint_projections=True,
        ),
        "mixtral": Family(
            defaults=_defaults(
                intermediate_size=14336,
                num_key_value_heads=8,
                num_local_experts=8,
                num_experts_per_tok=2,
                max_position_embeddings=131072,
            ),
            # Experts and their router are parameters of their own, in no linear module.
            products=_ATTENTION,
            fixed=_NO_POSITIONS | _NO_BIAS,
            spellings={"num_experts": "num_local_experts"},
        ),
        "gpt2": Family(
            defaults=_defaults(
                vocab_size=50257,
                hidden_size=768,
                num_hidden_layers=12,
                num_attention_heads=12,
                intermediate_size=None,
                hidden_act="gelu_new",
                max_position_embeddings=1024,
                tie_word_embeddings=True,
                attention_dropout=0.1,
                residual_dropout=0.1,
                embedding_dropout=0.1,
            ),
            products={
                Product.QUERY_KEY_VALUE: "attn.c_attn",
                Product.OUT: "attn.c_proj",
                Product.UP: "mlp.c_fc",
                Product.DOWN: "mlp.c_proj",
            },
            fixed=_ALL_BIAS,
            spellings={
                "n_embd": "hidden_size",
                "n_layer": "num_hidden_layers",
                "n_head": "num_attention_heads",
                "n_positions": "max_position_embeddings",
                "n_inner": "intermediate_size",
                "activation_function": "hidden_act",
                "attn_pdrop": "attention_dropout",
                "resid_pdrop": "residual_dropout",
                "embd_pdrop": "embedding_dropout",
            },
            norm=Norm.LAYER,
            rotary=Rotary.NONE,
            is_gated=False,
            has_joint_projections=True,
        ),
        "bert": _encoder(),
        "roberta": _encoder(vocab_size=50265, counts_from_padding=True),
        "xlm-roberta": _encoder(counts_from_padding=True),
        "electra": _encoder(
            num_score_biases=1,
            hidden_size=256,
            intermediate_size=1024,
            num_attention_heads=4,
            embedding_size=128,
        ),
    }
)
