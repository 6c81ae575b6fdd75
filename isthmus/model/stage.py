"""A stage: some contiguous layers of a model, with its embedding or head at the ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from isthmus.model.boundary import Batch, Boundary, BoundaryKind, StageInput, StageOutput
from isthmus.model.families.family import Router
from isthmus.model.heads import Head
from isthmus.model.randomness import Moment, generators_kept
from isthmus.model.seam import Passage, Seam


class Stage(nn.Module):
    """Runs its layers within the model's own forward; `model` keeps Hugging Face's parameter names."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        head: Head,
        layers: range,
        num_layers: int,
        seam: Seam,
        router: Router | None,
        notes: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.layers = layers
        self.num_layers = num_layers
        self.notes = notes
        self._seam = seam
        self._router = router

    @property
    def is_first(self) -> bool:
        """Whether it takes ids and nothing else."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives the loss."""
        return self.layers.stop == self.num_layers

    @property
    def inbound(self) -> Boundary | None:
        """The cut before this stage."""
        return None if self.is_first else self._boundary()

    @property
    def outbound(self) -> Boundary | None:
        """The cut behind this stage."""
        return None if self.is_last else self._boundary()

    def forward(self, inputs: StageInput) -> StageOutput:
        """Run this stage's part of the model on one micro-batch."""
        with self._passage(inputs) as passage:
            if not self.is_last:
                self.model.base_model(**self._arguments(inputs.batch))
                return StageOutput(
                    crossing=passage.departed, balance=self._balance(inputs.batch, passage.router_logits)
                )
            scores = self.head.scores(self.model(**self._arguments(inputs.batch)))
            labels = inputs.batch.labels
            if labels is None:
                raise ValueError("the last stage needs the labels of a micro-batch")
            return StageOutput(
                loss=self.head.loss(scores, labels),
                balance=self._balance(inputs.batch, passage.router_logits),
                num_correct=None if self.training else self.head.num_correct(scores, labels),
            )

    def scores(self, inputs: StageInput) -> Tensor:
        """The scores, classes last, that the last stage gives without looking at labels."""
        with self._passage(inputs):
            return self.head.scores(self.model(**self._arguments(inputs.batch)))

    @contextmanager
    def _passage(self, inputs: StageInput) -> Iterator[Passage]:
        if self.is_first != (inputs.crossing is None):
            raise ValueError("the first stage takes ids alone, every other one what crossed as well")
        if self.training and inputs.moment is None:
            raise ValueError("a stage in training needs the moment, for dropout")
        moment = inputs.moment if self.training else None
        # A view: autocast casts a leaf once for all its readers, and would add their gradients in bfloat16.
        arrived = None if inputs.crossing is None else inputs.crossing.view_as(inputs.crossing)
        passage = Passage(arrived=arrived, moment=moment)
        self._seam.passage = passage
        try:
            with _seeded(moment, inputs.batch.ids.device):
                yield passage
        finally:
            self._seam.passage = None

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.mask, "use_cache": False}
        if batch.position_ids is not None:
            arguments["position_ids"] = batch.position_ids
        if batch.token_type_ids is not None:
            arguments["token_type_ids"] = batch.token_type_ids
        if self._router is not None:
            # The model's own balancing loss spans all layers, which no stage has.
            arguments["output_router_logits"] = False
        return arguments

    def _balance(self, batch: Batch, router_logits: list[Tensor]) -> Tensor | None:
        if self._router is None or not router_logits:
            return None
        config = self.model.config
        losses = [self._router.balancing_loss(logits, config, batch.mask) for logits in router_logits]
        return torch.stack(losses).sum() * (batch.num_targets / self.num_layers)

    def _boundary(self) -> Boundary:
        return Boundary(kind=BoundaryKind.HIDDEN, width=self.model.config.hidden_size)


@contextmanager
def _seeded(moment: Moment | None, device: torch.device) -> Iterator[None]:
    """Draw for a moment, beginning with the embedding; each layer then starts anew, and the head goes on."""
    if moment is None:
        yield
        return
    with generators_kept(device):
        moment.seed_place("embedding", device)
        yield
