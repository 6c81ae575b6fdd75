"""Mixtral: its balancing loss is taken layer by layer, so that every stage adds its own."""

from typing import Any, Final

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from isthmus.model.families.family import Family, Router


def _balancing_loss(logits: Tensor, config: PreTrainedConfig, mask: Tensor | None) -> Tensor:
    settings: Any = config
    loss: Tensor = settings.router_aux_loss_coef * load_balancing_loss_func(
        (logits,), settings.num_local_experts, settings.num_experts_per_tok, mask
    )
    return loss


MIXTRAL: Final = Family(
    first=("embed_tokens",),
    layers="layers",
    last=("norm",),
    router=Router(path="mlp.gate", balancing_loss=_balancing_loss),
)
