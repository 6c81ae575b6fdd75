"""The families of models that can be cut: those listed here, and all that bring a pipeline plan."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from torch import nn
from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.model.families.bert import BERT, ELECTRA
from isthmus.model.families.family import Family
from isthmus.model.families.gpt2 import GPT2
from isthmus.model.families.mixtral import MIXTRAL

HOW_TO_ADD: Final = "docs/adding-a-family.md shows how to add a family: one small file"

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "bert": BERT,
        "electra": ELECTRA,
        "gpt2": GPT2,
        "mixtral": MIXTRAL,
        "roberta": BERT,
        "xlm-roberta": BERT,
    }
)


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model: the one listed for its type, else what its own pipeline plan says."""
    family = FAMILIES.get(model.config.model_type) or _planned_family(model)
    if family is None:
        raise UserError(f"{type(model).__name__} cannot be cut into stages yet", hint=HOW_TO_ADD)
    return family


def _planned_family(model: PreTrainedModel) -> Family | None:
    """Read transformers' plan: what precedes the layers is the first stage's, what follows the last's."""
    base = model.base_model
    names = list(model.config.base_model_pp_plan or {})
    lists = [name for name in names if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1:
        return None
    position = names.index(lists[0])
    return Family(first=tuple(names[:position]), layers=lists[0], last=tuple(names[position + 1 :]))
