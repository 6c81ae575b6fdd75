"""Writes what the planner knows of every family of models without torch: its tasks, spellings and defaults.

    python benchmarks/families.py

Writes isthmus/plan/families.json. Nothing is downloaded, and no model is made.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import isthmus
from isthmus.model.heads import HEADS
from isthmus.plan.models import SIZE_KEYS

# Families that are listed though their configurations have no pipeline plan.
WITHOUT_PLAN: Final = ("bert", "electra", "gpt2", "roberta", "xlm-roberta")
# Families whose first position is the one behind the padding token's id.
STARTS_LATE: Final = ("roberta", "xlm-roberta", "camembert")


def families() -> str:
    """What each family's configuration has where a job leaves it out, and its own spellings of keys."""
    lines = []
    for model_type, own in sorted(CONFIG_MAPPING.items()):
        if model_type not in WITHOUT_PLAN and not getattr(own, "base_model_pp_plan", None):
            continue
        spellings = {theirs: ours for ours, theirs in own.attribute_map.items()}
        every: dict[str, Any] = {
            spellings.get(one.name, one.name): one.default for one in dataclasses.fields(own)
        }
        about = {
            "spellings": {theirs: ours for theirs, ours in spellings.items() if ours in SIZE_KEYS},
            "tasks": [name for name, head in HEADS.items() if own in head.auto_class._model_mapping],
            "is_rotary": any(one.name.startswith("rope") for one in dataclasses.fields(own)),
            "starts_late": model_type in STARTS_LATE,
            "defaults": {
                key: value for key, value in every.items() if key in SIZE_KEYS and isinstance(value, int)
            },
        }
        lines.append(f'"{model_type}": {json.dumps(about)}')
    return "{" + ",\n".join(lines) + "}\n"


if __name__ == "__main__":
    (Path(isthmus.__file__).parent / "plan" / "families.json").write_text(families())
