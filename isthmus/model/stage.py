"""A stage: some contiguous layers of a model, with its embedding or head at the ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.model.blueprint import Blueprint
from isthmus.model.bottleneck import Anchors, Down, Up
from isthmus.model.cut import LayerCall, Passage, Seam
from isthmus.model.encoder_decoder import generate_from, run_stacks
from isthmus.model.feed_forward import FeedForwardUp
from isthmus.model.lora import Adapters
from isthmus.model.random import RngKey, generators_kept
from isthmus.model.recompute import ActivationSlot, Fixed, InputSize, Recompute
from isthmus.model.transformers_calls import one_sequence_a_row

_ALIGNMENT_BYTES: Final = 64


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
    """Needed by the last stage alone, and by every stage of a decoder."""
    keys: Tensor | None = None
    """Of shape (batch,): what stands for the ids of sequences in the data, where clouds read its parts."""

    def arguments(self) -> dict[str, Any]:
        """What a model of transformers is called with."""
        optional = {"position_ids": self.position_ids, "token_type_ids": self.token_type_ids}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": False, **given}

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device; the host does not wait for the copies."""
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        moved = {name: _moved(value, device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **(values | moved))


def aligned(tensor: Tensor) -> Tensor:
    """The tensor where torch itself would place it: BLAS may add in another order at an odd address.

    What comes out of a message lies anywhere; a copy is made only where it lies badly, and on the host alone.
    """
    lies_well = tensor.device.type != "cpu" or tensor.data_ptr() % _ALIGNMENT_BYTES == 0
    return tensor if lies_well else tensor.clone()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device or device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """A micro-batch for one stage, with what crossed the cut before it; nothing did for the first stage."""

    batch: Batch
    crossing: Tensor | None = None
    memory: Tensor | None = None
    """The output of the encoder, for a stage behind the first one of the decoder."""
    rng_key: RngKey | None = None
    """Needed while training, for dropout."""
    is_warming_up: bool = False
    """Whether hidden states still cross as they are where a bottleneck is to begin; in both directions."""
    window: int = 1
    """The most micro-batches that are in flight at a time, this one included."""
    on_near_end: Callable[[], None] | None = None
    """Called when its forward, and later its backward, has come to the last of several layers."""
    keeps_scores: bool = False
    """Whether the last stage gives its scores as well, and the memory that they are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What a stage made of a micro-batch; losses are sums over its targets, to be averaged over a step."""

    crossing: Tensor | None = None
    """What crosses the next cut; None from the last stage."""
    memory: Tensor | None = None
    """The output of the encoder, beside hidden states of the decoder or its scores."""
    loss: Tensor | None = None
    """The loss of the head; from the last stage only."""
    balance: Tensor | None = None
    """The loss that balances the experts of this stage's layers, as if summed over targets."""
    num_correct: Tensor | None = None
    """Targets with the highest score; from the last stage, and only in evaluation."""
    scores: Tensor | None = None
    """Those of the last stage, without their graph, where they were asked for."""
    slot: ActivationSlot = field(default_factory=ActivationSlot)
    """What the micro-batch keeps in memory until its backward has ended."""

    @property
    def wants_gradient(self) -> bool:
        """Whether the gradient of what crosses is to come back; not from behind frozen layers."""
        return self.crossing is not None and self.crossing.requires_grad

    def backward(
        self, *, grad: Tensor | None = None, memory_grad: Tensor | None = None, loss_weight: float = 1.0
    ) -> None:
        """Back-propagate the gradient that came back over the cut, and this stage's own losses."""
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        if self.crossing is not None and self.wants_gradient:
            if grad is None:
                raise ValueError("a stage that is not the last needs the gradient of what crossed")
            roots.append(self.crossing)
            grads.append(aligned(grad))
        if self.memory is not None and self.memory.requires_grad and memory_grad is not None:
            roots.append(self.memory)
            grads.append(aligned(memory_grad))
        for loss in (self.loss, self.balance):
            if loss is not None and loss.requires_grad:
                roots.append(loss)
                grads.append(torch.full_like(loss, loss_weight))
        if roots:
            torch.autograd.backward(roots, grads)
        self.slot.end()


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
        blueprint: Blueprint,
        *,
        layers: range,
        seam: Seam,
        notes: tuple[str, ...] = (),
        up: Up | None = None,
        down: Down | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.up = up
        self.down = down
        self.head = blueprint.head
        self.family = blueprint.family
        self.layers = layers
        self.num_layers = blueprint.num_layers
        self.num_frozen_layers = 0
        self.notes = notes
        self.recompute: Recompute = Fixed()
        self.adapters = adapters
        self.stream_dtype: torch.dtype | None = None
        balances = getattr(model.config, "output_router_logits", False)
        self.router = self.family.router if balances else None
        self._frozen: tuple[nn.Module, ...] = ()
        self._seam = seam

    @property
    def is_first(self) -> bool:
        """Whether it takes ids and nothing else."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives the loss."""
        return self.layers.stop == self.num_layers

    @property
    def has_memory(self) -> bool:
        """Whether the memory of an encoder comes to it beside hidden states of a decoder."""
        decoder = self.family.decoder
        return decoder is not None and self.layers.start > decoder.start

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
        slot = self._slot(inputs)
        with self._passage(inputs, slot) as passage:
            output, memory = self._run(passage, inputs)
            if not self.is_last:
                return StageOutput(
                    crossing=self._depart(passage, inputs),
                    memory=memory,
                    balance=self._balance(inputs.batch, passage.router_logits),
                    slot=slot,
                )
            scores = self.head.scores(output)
            labels = inputs.batch.labels
            if labels is None:
                raise ValueError("the last stage needs the labels of a micro-batch")
            return StageOutput(
                loss=self.head.loss(scores, labels),
                balance=self._balance(inputs.batch, passage.router_logits),
                num_correct=None if self.training else self.head.num_correct(scores, labels),
                scores=scores.detach() if inputs.keeps_scores else None,
                memory=memory.detach() if inputs.keeps_scores and memory is not None else None,
                slot=slot,
            )

    def _run(self, passage: Passage, inputs: StageInput) -> tuple[Any, Tensor | None]:
        """Run the model's own forward; gives its output, and the memory that goes on to the next stage."""
        batch, decoder = inputs.batch, self.family.decoder
        if decoder is None:
            model = self.model if self.is_last else self.model.base_model
            return model(**self._arguments(batch)), None
        memory = inputs.memory
        if memory is not None:
            memory = aligned(memory.view_as(memory))
        elif self.layers.start == decoder.start:
            memory = passage.arrived
        output, memory = run_stacks(
            self.model,
            self.family,
            self.layers,
            ids=batch.ids,
            mask=batch.mask,
            labels=batch.labels,
            memory=memory,
        )
        if self.layers.stop == decoder.start:
            passage.departed = memory
        if self.is_last:
            return output, memory
        if memory is None or self.layers.stop <= decoder.start:
            return output, None
        # Made last, so that the gradient that comes back is the first to be added, as in one process.
        return output, memory.view_as(memory)

    @torch.no_grad()
    def generate(self, memory: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """The token ids that a whole decoder says of memories that have arrived, by transformers' search."""
        self._seam.passage = Passage(arrived=None, rng_key=None, layers=self.layers)
        try:
            return generate_from(self.model, memory, mask, **options)
        finally:
            self._seam.passage = None

    def _slot(self, inputs: StageInput) -> ActivationSlot:
        """Let a micro-batch into the memory; one that no backward follows keeps nothing there."""
        if not self._learns:
            return ActivationSlot()
        num_sequences, length = inputs.batch.ids.shape
        return self.recompute.begin(InputSize(num_sequences, length), window=inputs.window)

    @property
    def _learns(self) -> bool:
        return torch.is_grad_enabled() and self.is_trained

    @contextmanager
    def _passage(self, inputs: StageInput, slot: ActivationSlot) -> Iterator[Passage]:
        if self.is_first != (inputs.crossing is None):
            raise ValueError("the first stage takes ids alone, every other one what crossed as well")
        if self.training and inputs.rng_key is None:
            raise ValueError("a stage in training needs the RNG key, for dropout")
        rng_key = inputs.rng_key if self.training else None
        with (
            torch.set_grad_enabled(self._learns),
            _seeded(rng_key, inputs.batch.ids.device),
            one_sequence_a_row(inputs.batch.position_ids is None),
            self._measured(slot),
        ):
            passage = Passage(
                arrived=self._arrive(inputs),
                rng_key=rng_key,
                recomputed=slot.recomputed,
                meter=slot.meter,
                layers=self.layers,
                on_near_end=inputs.on_near_end,
            )
            self._seam.passage = passage
            try:
                yield passage
            finally:
                self._seam.passage = None

    @contextmanager
    def _measured(self, slot: ActivationSlot) -> Iterator[None]:
        if slot.meter is None:
            yield
            return
        with slot.meter.beside(lambda: [*self.parameters(), *self.buffers()]):
            yield
        slot.measured(slot.meter)

    def _arrive(self, inputs: StageInput) -> Tensor | None:
        """Hidden states, from what crossed the cut before."""
        if inputs.crossing is None:
            return None
        if self.up is None or inputs.is_warming_up:
            # A view: autocast casts a leaf once for all its readers, and would add gradients in bfloat16.
            hidden = aligned(inputs.crossing.view_as(inputs.crossing))
            hidden = hidden if self.stream_dtype is None else hidden.to(self.stream_dtype)
            return self.up.whole(hidden) if isinstance(self.up, FeedForwardUp) else hidden
        widened: Tensor = self.up(aligned(inputs.crossing), inputs.batch.ids)
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
        # The model's own balancing loss spans all layers, which no stage has.
        without_balance = {} if self.router is None else {"output_router_logits": False}
        return batch.arguments() | without_balance

    def _balance(self, batch: Batch, router_logits: list[Tensor]) -> Tensor | None:
        if self.router is None or not router_logits:
            return None
        config = self.model.config
        losses = [self.router.balancing_loss(logits, config, batch.mask) for logits in router_logits]
        return torch.stack(losses).sum() * (batch.num_targets / self.num_layers)


def _short(name: str) -> str:
    """A name without this class's own part of it: the model's is Hugging Face's."""
    return name.removeprefix("model.")


@contextmanager
def _seeded(rng_key: RngKey | None, device: torch.device) -> Iterator[None]:
    """Seed for an RNG key at the embedding; each layer seeds again, and the head draws on."""
    if rng_key is None:
        yield
        return
    with generators_kept(device):
        rng_key.seed_place("embedding", device)
        yield


def freeze_below(stage: Stage, num_layers: int) -> None:
    """Freeze a stage's share of the embedding and of the model's first layers; 0 freezes nothing.

    Frozen modules draw no dropout, whichever stage holds them. A stage of nothing else, with its halves of
    bottlenecks, does not learn at all.
    """
    if not 0 <= num_layers <= stage.num_layers:
        raise UserError(
            f"{num_layers} layers cannot be frozen in a model of {stage.num_layers}",
            hint=f"freeze 0 to {stage.num_layers} of them",
        )
    if num_layers == 0:
        return
    is_whole = stage.layers.stop <= num_layers and not stage.is_last
    modules = list(stage.children()) if is_whole else _below(stage, num_layers)
    stage.freeze(modules, num_layers=num_layers)


def _below(stage: Stage, num_layers: int) -> list[nn.Module]:
    present = dict(stage.model.base_model.named_modules())
    first = stage.family.first if stage.is_first else ()
    frozen_layers = range(stage.layers.start, min(stage.layers.stop, num_layers))
    paths = [*first, *(stage.family.layer_path(index) for index in frozen_layers)]
    if stage.family.decoder is not None:
        paths = ["encoder"]  # with all that its own forward draws
    return [present[path] for path in paths if path in present]
