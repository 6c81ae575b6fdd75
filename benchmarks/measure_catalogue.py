"""Measures the costs of published models and of the examples' models, for machines without torch.

    python benchmarks/measure_catalogue.py [--models NAME …]

Writes one file for each model to isthmus/plan/catalogue, and families.json with the defaults of every family
that can be cut. Nothing is downloaded, and no weights are made: models are built of fake tensors. Every model
is measured at three lengths and two numbers of sequences, in each precision, with weights whole or gathered
from several ranks, recomputed or not. Takes about half a minute for each model.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import isthmus
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.costs import MeasuredModel, Training
from isthmus.model.heads import HEADS
from isthmus.plan.costs import Arithmetic, Precision, Workload, table_text
from isthmus.plan.models import NEUTRAL_KEYS

FOLDER: Final = Path(isthmus.__file__).parent / "plan" / "catalogue"
LONGEST: Final = 8192
LENGTH_STEP: Final = 4
NUM_SEQUENCES: Final = (1, 16)
PRECISIONS: Final = (
    Arithmetic(precision=Precision.FLOAT32),
    Arithmetic(precision=Precision.BFLOAT16),
    Arithmetic(precision=Precision.BFLOAT16, is_gathered=True),
)
# Families that are listed though their configurations have no pipeline plan.
WITHOUT_PLAN: Final = ("bert", "electra", "gpt2", "roberta", "xlm-roberta")
# Families whose first position is the one behind the padding token's id.
STARTS_LATE: Final = ("roberta", "xlm-roberta", "camembert")


def _sizes(model_type: str, *sizes: int, **more: object) -> dict[str, object]:
    """A configuration: vocabulary, width, inner width, layers, heads and positions, then what else it has."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    given = dict(zip((*names, "max_position_embeddings"), sizes, strict=True))
    return {"model_type": model_type, **given, **more}


def _gpt2(width: int, num_layers: int, num_heads: int) -> dict[str, object]:
    return {"model_type": "gpt2", "n_embd": width, "n_layer": num_layers, "n_head": num_heads}


XLM_R_BASE: Final = _sizes("xlm-roberta", 250002, 768, 3072, 12, 12, 514)
XLM_R_LARGE: Final = _sizes("xlm-roberta", 250002, 1024, 4096, 24, 16, 514)
# Sizes from the models' own config.json.
MODELS: Final[Mapping[str, tuple[str, dict[str, object]]]] = {
    "isthmus-demo": ("causal-lm", _sizes("llama", 512, 128, 352, 4, 4, 128, num_key_value_heads=4)),
    "llama-2-7b": ("causal-lm", _sizes("llama", 32000, 4096, 11008, 32, 32, 4096)),
    "llama-2-13b": ("causal-lm", _sizes("llama", 32000, 5120, 13824, 40, 40, 4096)),
    "llama-2-70b": ("causal-lm", _sizes("llama", 32000, 8192, 28672, 80, 64, 4096, num_key_value_heads=8)),
    "llama-3-8b": ("causal-lm", _sizes("llama", 128256, 4096, 14336, 32, 32, 8192, num_key_value_heads=8)),
    "llama-3.2-1b": (
        "causal-lm",
        _sizes(
            "llama",
            128256,
            2048,
            8192,
            16,
            32,
            131072,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2.5-0.5b": (
        "causal-lm",
        _sizes("qwen2", 151936, 896, 4864, 24, 14, 32768, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "qwen3-0.6b": (
        "causal-lm",
        _sizes(
            "qwen3",
            151936,
            1024,
            3072,
            28,
            16,
            40960,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-8b": (
        "causal-lm",
        _sizes("qwen3", 151936, 4096, 12288, 36, 32, 40960, num_key_value_heads=8, head_dim=128),
    ),
    "mistral-7b": (
        "causal-lm",
        _sizes("mistral", 32000, 4096, 14336, 32, 32, 32768, num_key_value_heads=8, sliding_window=None),
    ),
    "mixtral-8x7b": (
        "causal-lm",
        _sizes("mixtral", 32000, 4096, 14336, 32, 32, 32768, num_key_value_heads=8),
    ),
    "gpt2": ("causal-lm", _gpt2(768, 12, 12)),
    "gpt2-medium": ("causal-lm", _gpt2(1024, 24, 16)),
    "gpt2-xl": ("causal-lm", _gpt2(1600, 48, 25)),
    "bert-base": ("masked-lm", _sizes("bert", 30522, 768, 3072, 12, 12, 512)),
    "roberta-base": ("masked-lm", _sizes("roberta", 50265, 768, 3072, 12, 12, 514)),
    "xlm-roberta-base": ("masked-lm", XLM_R_BASE),
    "xlm-roberta-large": ("masked-lm", XLM_R_LARGE),
    "xlm-roberta-large-tokens": ("token-classification", XLM_R_LARGE),
}


def _arithmetics(name: str) -> Iterator[Arithmetic]:
    """A model of billions is not planned for a CPU."""
    for one in PRECISIONS:
        yield one
        if name == "isthmus-demo":
            yield dataclasses.replace(one, on_accelerator=False)


def measure(name: str) -> str:
    """The text of a model's file."""
    task, config = MODELS[name]
    num_labels = None if task.endswith("lm") else 2
    blueprint = fresh_blueprint(config, head=HEADS[task], num_labels=num_labels)
    model = MeasuredModel(blueprint, Training())
    longest = min(LONGEST, model.table.sizes.max_length or LONGEST)
    for arithmetic in _arithmetics(name):
        for recompute in (False, True):
            for length in (longest // LENGTH_STEP**2, longest // LENGTH_STEP, longest):
                for number in NUM_SEQUENCES:
                    model.costs(
                        Workload(
                            num_sequences=number,
                            sequence_length=length,
                            arithmetic=arithmetic,
                            recompute=recompute,
                        )
                    )
    return table_text(model.table, {"task": task, "config": config})


def families() -> str:
    """What each family's configuration has where a job leaves it out, and its own spellings of keys."""
    lines = []
    for model_type, own in sorted(CONFIG_MAPPING.items()):
        if model_type not in WITHOUT_PLAN and not getattr(own, "base_model_pp_plan", None):
            continue
        spellings = {theirs: ours for ours, theirs in own.attribute_map.items()}
        defaults: dict[str, Any] = {
            spellings.get(one.name, one.name): one.default
            for one in dataclasses.fields(own)
            if isinstance(one.default, bool | int | float | str | None) and one.name not in NEUTRAL_KEYS
        }
        tasks = [name for name, head in HEADS.items() if own in head.auto_class._model_mapping]
        about = {
            "spellings": spellings,
            "tasks": tasks,
            "is_rotary": any(one.name.startswith("rope") for one in dataclasses.fields(own)),
            "starts_late": model_type in STARTS_LATE,
            "defaults": defaults,
        }
        lines.append(f'"{model_type}": {json.dumps(about)}')
    return "{" + ",\n".join(lines) + "}\n"


def main() -> int:
    """Measure all models, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "families.json").write_text(families())
    for name in parser.parse_args().models:
        start_s = time.perf_counter()
        text = measure(name)
        (FOLDER / f"{name}.json").write_text(text)
        print(f"{name}: {len(text):,} bytes in {time.perf_counter() - start_s:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
