"""What Isthmus must know of an architecture: where its parts lie, by family, and what a head gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from isthmus.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Where a mixture of experts routes in each layer, and the loss that keeps its experts evenly used."""

    path: str
    """The router inside a layer; the first tensor it returns holds the logits."""
    balancing_loss: Callable[[Tensor, PreTrainedConfig, Tensor | None], Tensor]
    """Of one layer's logits, the configuration and the attention mask; a mean over tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Which modules of a base model belong to the first stage, the layers and the last; dotted paths.

    Modules outside the base model are the head, and belong to the last stage.
    """

    first: tuple[str, ...]
    layers: str
    last: tuple[str, ...] = ()
    router: Router | None = None


def _mixtral_balance(logits: Tensor, config: PreTrainedConfig, mask: Tensor | None) -> Tensor:
    settings: Any = config
    loss: Tensor = settings.router_aux_loss_coef * load_balancing_loss_func(
        (logits,), settings.num_local_experts, settings.num_experts_per_tok, mask
    )
    return loss


# Its balancing loss is taken layer by layer, so that every stage adds its own.
MIXTRAL: Final = Family(
    first=("embed_tokens",),
    layers="layers",
    last=("norm",),
    router=Router(path="mlp.gate", balancing_loss=_mixtral_balance),
)
BERT: Final = Family(first=("embeddings",), layers="encoder.layer", last=("pooler",))
ELECTRA: Final = Family(first=("embeddings", "embeddings_project"), layers="encoder.layer")
GPT2: Final = Family(first=("wte", "wpe", "drop"), layers="h", last=("ln_f",))

HOW_TO_ADD: Final = "docs/adding-a-family.md shows how to add a family"

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
