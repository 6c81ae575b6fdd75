"""What Isthmus must know of a model's architecture to cut it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig


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
