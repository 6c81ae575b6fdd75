"""Stages of many models, and how each is trained."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from isthmus.job.sections import LoraSpec
from isthmus.plan.costs import Precision, Task
from isthmus.plan.memory import Sharding

NUM_LAYERS = 6
GATED = {"llama", "qwen3", "gemma", "phi3", "mistral", "mixtral", "olmo2", "granite", "qwen3_moe"}
ENCODERS = {"bert", "roberta", "electra"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma", "head_dim": 64},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "mistral, window": {"model_type": "mistral", "sliding_window": 64},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "head_dim": 64,
    },
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite"},
    "gpt_neox": {"model_type": "gpt_neox"},
    "gpt2": {"model_type": "gpt2", "n_positions": 1024},
    "bert": {"model_type": "bert", "max_position_embeddings": 1024},
    "roberta, no dropout": {"model_type": "roberta", "max_position_embeddings": 1026, **NO_DROPOUT},
    "electra": {"model_type": "electra", "max_position_embeddings": 1024, "embedding_size": 128},
}
LEARNS = ("all", "adapters", "frozen")
SHARDINGS = (Sharding.NONE, Sharding.OPTIMIZER, Sharding.FULL)
PLACES = {"first": (0, 2), "middle": (2, 4), "last": (4, 6), "whole": (0, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One stage and how it is trained."""

    model: str
    place: str
    precision: Precision
    recompute: bool
    window: int
    num_sequences: int
    sequence_length: int = 128
    width: int = 256
    vocabulary_size: int = 4096
    num_frozen: int = 0
    lora: LoraSpec | None = None
    sharding: Sharding = Sharding.NONE

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration, all that a prediction is made from."""
        sizes = {
            "vocab_size": self.vocabulary_size,
            "hidden_size": self.width,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": self.width // 64,
        }
        model_type = MODELS[self.model]["model_type"]
        if model_type in GATED:
            sizes |= {"intermediate_size": self.width * 11 // 4, "num_key_value_heads": self.width // 128}
        elif model_type != "gpt2":
            sizes |= {"intermediate_size": 4 * self.width}
        return {**MODELS[self.model], **sizes}

    @property
    def task(self) -> Task:
        """What the model learns."""
        return Task.MASKED_LM if MODELS[self.model]["model_type"] in ENCODERS else Task.CAUSAL_LM

    @property
    def layers(self) -> range:
        """Those of the stage."""
        return range(*PLACES[self.place])

    @property
    def learns(self) -> str:
        """One of `LEARNS`: all, adapters alone, or the layers behind frozen ones."""
        return "adapters" if self.lora else "frozen" if self.num_frozen else "all"


def cases(models: list[str], *, is_quick: bool, on_accelerator: bool) -> list[Case]:
    """Every model and place in both precisions, recomputed or not, with one or several in flight."""
    places = ["first", "last"] if is_quick else list(PLACES)
    found = [
        Case(
            model=model,
            place=place,
            precision=precision,
            recompute=recompute,
            window=1 if place in ("last", "whole") else 4,
            num_sequences=4,
        )
        for model, place, precision, recompute in product(models, places, Precision, (False, True))
    ]
    some = [case for case in found if case.place == ("last" if is_quick else "middle")]
    found += [replace(case, lora=LoraSpec(r=8)) for case in some]
    found += [replace(case, num_frozen=3 if case.place == "middle" else 5) for case in some]
    found += [replace(case, sharding=sharding) for sharding in SHARDINGS[1:] for case in some]
    if not on_accelerator:
        return found
    # Sizes that a GPU is bought for: workspaces and rounding matter less, as they do in use.
    return [
        replace(case, width=2048, sequence_length=1024, num_sequences=4, vocabulary_size=32768)
        for case in found
    ]
