"""What goes into a stage and what comes out: the integers of a micro-batch, and what crosses a cut."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from isthmus.model.randomness import Moment
from isthmus.model.recompute import Stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The integers of a micro-batch: they ride with its first message; stages rebuild masks from them.

    All but the labels are of shape (batch, tokens). Labels are so for language models and token
    classification, (batch,) for sequence classification, (batch, 2) for an answer's first and last token.
    """

    ids: Tensor
    num_targets: int
    """How many labels count, as `Head.num_targets` says."""
    mask: Tensor | None = None
    """1 for a token, 0 for padding; None where nothing is padded."""
    position_ids: Tensor | None = None
    token_type_ids: Tensor | None = None
    labels: Tensor | None = None
    """Needed by the last stage alone."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device; the host does not wait for the copies."""
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        moved = {name: _moved(value, device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **(values | moved))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device or device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """A micro-batch for one stage, with what crossed the cut before it; nothing did for the first stage."""

    batch: Batch
    crossing: Tensor | None = None
    moment: Moment | None = None
    """Needed while training, for dropout."""
    is_warming_up: bool = False
    """Whether hidden states still cross as they are where a bottleneck is to begin; in both directions."""
    window: int = 1
    """The most micro-batches that are in flight at a time, this one included."""
    on_near_end: Callable[[], None] | None = None
    """Called when its forward, and later its backward, has come to the last of several layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What a stage made of a micro-batch; losses are sums over its targets, to be averaged over a step."""

    crossing: Tensor | None = None
    """What crosses the next cut; None from the last stage."""
    loss: Tensor | None = None
    """The loss of the head; from the last stage only."""
    balance: Tensor | None = None
    """The loss that balances the experts of this stage's layers, as if summed over targets."""
    num_correct: Tensor | None = None
    """Targets with the highest score; from the last stage, and only in evaluation."""
    stay: Stay = field(default_factory=Stay)
    """What the micro-batch keeps in memory until its backward has ended."""

    @property
    def wants_gradient(self) -> bool:
        """Whether the gradient of what crosses is to come back; not from behind frozen layers."""
        return self.crossing is not None and self.crossing.requires_grad

    def backward(self, *, grad: Tensor | None = None, loss_weight: float = 1.0) -> None:
        """Back-propagate the gradient that came back over the cut, and this stage's own losses."""
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        if self.crossing is not None and self.wants_gradient:
            if grad is None:
                raise ValueError("a stage that is not the last needs the gradient of what crossed")
            roots.append(self.crossing)
            grads.append(grad)
        for loss in (self.loss, self.balance):
            if loss is not None and loss.requires_grad:
                roots.append(loss)
                grads.append(torch.full_like(loss, loss_weight))
        if roots:
            torch.autograd.backward(roots, grads)
        self.stay.end()
