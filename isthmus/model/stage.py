"""A stage: some contiguous layers of a model, with its embedding or head at the ends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from isthmus.model.anchors import Anchors
from isthmus.model.bottleneck import Down, Up
from isthmus.model.boundary import Batch, StageInput, StageOutput
from isthmus.model.families.family import Family, Router
from isthmus.model.heads import Head
from isthmus.model.layer_call import LayerCall
from isthmus.model.lora import Adapters
from isthmus.model.randomness import Moment, generators_kept
from isthmus.model.recompute import Fixed, InputSize, Recompute, Stay
from isthmus.model.seam import Passage, Seam
from isthmus.model.waits import one_sequence_a_row


class Stage(nn.Module):
    """Runs its layers within the model's own forward; `model` keeps Hugging Face's parameter names.

    `up` and `down` are its halves of the bottlenecks at the cuts before and behind it, where there are any.
    `recompute` chooses, for each micro-batch, the layers that do not keep their activations. `stream_dtype`
    is for weights that are gathered in another type than they are kept in: what arrives is cast to it, as not
    every norm takes numbers of one type and weights of another.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        head: Head,
        layers: range,
        num_layers: int,
        seam: Seam,
        family: Family,
        router: Router | None,
        notes: tuple[str, ...],
        up: Up | None = None,
        down: Down | None = None,
        recompute: Recompute | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.up = up
        self.down = down
        self.head = head
        self.layers = layers
        self.num_layers = num_layers
        self.num_frozen_layers = 0
        self.family = family
        self.notes = notes
        self.recompute: Recompute = recompute or Fixed()
        self.adapters = adapters
        self.stream_dtype: torch.dtype | None = None
        self._frozen: tuple[nn.Module, ...] = ()
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
    def is_trained(self) -> bool:
        """Whether it has anything to learn; a stage of frozen layers has not."""
        return any(parameter.requires_grad for parameter in self.parameters())

    @property
    def sends_gradient(self) -> bool:
        """Whether a gradient goes back over the cut before it: not where all before that is frozen."""
        return self.layers.start > self.num_frozen_layers

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """All that it trains: the model's by Hugging Face's names, and those of `down` and `up`."""
        return {_short(name): one for name, one in self.named_parameters() if one.requires_grad}

    def tables(self) -> set[nn.Parameter]:
        """Weights with a row for each token, or place, of which a micro-batch has but some."""
        found: list[object] = [one.rows for one in self.modules() if isinstance(one, Anchors)]
        found += [one.weight for one in self.modules() if isinstance(one, nn.Embedding)]
        return {one for one in found if isinstance(one, nn.Parameter)}

    def tensors_by_name(self) -> dict[str, Tensor]:
        """All that a checkpoint holds of it, under the same names; what is shared, once."""
        own = {*dict(self.named_parameters()), *dict(self.named_buffers())}
        return {_short(name): tensor for name, tensor in self.state_dict().items() if name in own}

    def compile_layers(self, *, dynamic: bool | None = None, backend: str = "inductor") -> None:
        """Compile each layer by itself, so that all that lies between layers, and every cut, stays as it is.

        `dynamic` is for inputs of changing length: one program then serves them all.
        """
        for call in (getattr(module, "forward", None) for module in self.model.modules()):
            if isinstance(call, LayerCall):
                call.compile(dynamic=dynamic, backend=backend)

    def freeze(self, modules: Sequence[nn.Module], *, num_layers: int) -> None:
        """Train these modules no more, and draw no dropout in them; see `freeze_below`."""
        self.num_frozen_layers = num_layers
        self._frozen = tuple(modules)
        for module in self._frozen:
            module.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation; what is frozen stays in evaluation."""
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    def forward(self, inputs: StageInput) -> StageOutput:
        """Run this stage's part of the model on one micro-batch."""
        stay = self._stay(inputs)
        with self._passage(inputs, stay) as passage:
            if not self.is_last:
                self.model.base_model(**self._arguments(inputs.batch))
                return StageOutput(
                    crossing=self._depart(passage, inputs),
                    balance=self._balance(inputs.batch, passage.router_logits),
                    stay=stay,
                )
            scores = self.head.scores(self.model(**self._arguments(inputs.batch)))
            labels = inputs.batch.labels
            if labels is None:
                raise ValueError("the last stage needs the labels of a micro-batch")
            return StageOutput(
                loss=self.head.loss(scores, labels),
                balance=self._balance(inputs.batch, passage.router_logits),
                num_correct=None if self.training else self.head.num_correct(scores, labels),
                stay=stay,
            )

    def _stay(self, inputs: StageInput) -> Stay:
        """Let a micro-batch into the memory; one that no backward follows keeps nothing there."""
        if not self._learns:
            return Stay()
        num_sequences, length = inputs.batch.ids.shape
        return self.recompute.begin(InputSize(num_sequences, length), window=inputs.window)

    @property
    def _learns(self) -> bool:
        return torch.is_grad_enabled() and self.is_trained

    @contextmanager
    def _passage(self, inputs: StageInput, stay: Stay) -> Iterator[Passage]:
        if self.is_first != (inputs.crossing is None):
            raise ValueError("the first stage takes ids alone, every other one what crossed as well")
        if self.training and inputs.moment is None:
            raise ValueError("a stage in training needs the moment, for dropout")
        moment = inputs.moment if self.training else None
        with (
            torch.set_grad_enabled(self._learns),
            _seeded(moment, inputs.batch.ids.device),
            one_sequence_a_row(inputs.batch.position_ids is None),
            self._measured(stay),
        ):
            passage = Passage(
                arrived=self._arrive(inputs),
                moment=moment,
                recomputed=stay.recomputed,
                meter=stay.meter,
                layers=self.layers,
                on_near_end=inputs.on_near_end,
            )
            self._seam.passage = passage
            try:
                yield passage
            finally:
                self._seam.passage = None

    @contextmanager
    def _measured(self, stay: Stay) -> Iterator[None]:
        if stay.meter is None:
            yield
            return
        with stay.meter.beside(lambda: [*self.parameters(), *self.buffers()]):
            yield
        stay.measured(stay.meter)

    def _arrive(self, inputs: StageInput) -> Tensor | None:
        """Hidden states, from what crossed the cut before."""
        if inputs.crossing is None:
            return None
        if self.up is None or inputs.is_warming_up:
            # A view: autocast casts a leaf once for all its readers, and would add gradients in bfloat16.
            hidden = inputs.crossing.view_as(inputs.crossing)
            return hidden if self.stream_dtype is None else hidden.to(self.stream_dtype)
        widened: Tensor = self.up(inputs.crossing, inputs.batch.ids)
        return widened.to(self.stream_dtype or self.model.dtype)

    def _depart(self, passage: Passage, inputs: StageInput) -> Tensor | None:
        """What crosses the next cut, from the hidden states that leave."""
        if passage.meter is not None and passage.departed is not None:
            passage.meter.keep(passage.departed)
        if self.down is None or passage.departed is None:
            return passage.departed
        batch = inputs.batch
        if not inputs.is_warming_up:
            crossing: Tensor = self.down(passage.departed, batch.ids)
            return crossing
        if self.training:
            self.down.observe(passage.departed, batch.ids, batch.mask)
        return passage.departed

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


def _short(name: str) -> str:
    """A name without this class's own part of it: the model's is Hugging Face's."""
    return name.removeprefix("model.")


@contextmanager
def _seeded(moment: Moment | None, device: torch.device) -> Iterator[None]:
    """Draw for a moment, beginning with the embedding; each layer then starts anew, and the head goes on."""
    if moment is None:
        yield
        return
    with generators_kept(device):
        moment.seed_place("embedding", device)
        yield
