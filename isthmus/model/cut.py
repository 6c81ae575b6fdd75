"""Stand-ins for the modules that other stages own, so that a model's own forward runs one stage's part.

Every stage runs the forward of the model as it is, on the ids of the micro-batch. So masks, rotary embeddings
and positions are rebuilt by the model itself, from integers. Modules of other stages have stand-ins:

    embedding   Arrival     gives what arrived, for its shape, type and device
    layers      Absent      pass their input on
                Arrival     in place of the layer below the first own one: gives what arrived
                  …         the stage's own layers
                Departure   in place of the layer above the last own one: takes what leaves
    norm, head  Absent

What the model does between embedding and layers, or behind them, thus touches only its first or last stage.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.model.families import (
    Absent,
    Family,
    Router,
    cannot_cut,
    first_input,
    only_hidden_learns,
    tensors_in,
)
from isthmus.model.random import RngKey
from isthmus.model.recompute import Meter


@dataclass(slots=True, kw_only=True)
class Passage:
    """One micro-batch on its way through a stage; hidden states are of shape (batch, tokens, width)."""

    arrived: Tensor | None
    rng_key: RngKey | None
    recomputed: frozenset[int] = frozenset()
    """Layers that compute again in the backward pass instead of keeping their activations."""
    meter: Meter | None = None
    layers: range = range(0)
    """Those of the stage."""
    on_near_end: Callable[[], None] | None = None
    """Called when only the last layers are left to run, and later, to run back."""
    left_layer: Tensor | None = None
    """What the last layer that ran has returned."""
    departed: Tensor | None = None
    router_logits: list[Tensor] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Seam:
    """What the stand-ins and layers of a stage share: the passage that is under way."""

    model_class: str
    passage: Passage | None = None
    learns_aside: bool = False
    """Whether gradients flow into more than hidden states: into the memory that a decoder attends to."""

    def current(self) -> Passage:
        """The passage under way; without one the model was called past its stage."""
        if self.passage is None:
            raise RuntimeError(f"a {self.model_class} that was cut runs only through its stage")
        return self.passage

    def misfit(self, what: str) -> UserError:
        """The error for a model that does what no cut can carry."""
        return cannot_cut(self.model_class, what)


class Arrival(Absent):
    """Stands for what precedes the stage, and gives the hidden states that arrived."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the hidden states that arrived."""
        return self.returned(self._seam.current().arrived)


class Departure(Absent):
    """Stands for the layer behind the stage, and takes the hidden states that leave."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the input for the next stage, and pass it on."""
        passage: Passage = self._seam.current()
        hidden = first_input(args, kwargs)
        if not _same(hidden, passage.left_layer):
            raise self._seam.misfit("it changes the hidden states between its layers")
        passage.departed = hidden
        return self.returned(hidden)


def drop_absent(
    model: PreTrainedModel,
    family: Family,
    layers: range,
    seam: Seam,
    *,
    present: Iterable[int] | None = None,
) -> None:
    """Put stand-ins in the place of all that the stage does not own; `present` are its layers, or all."""
    base = model.base_model
    num_layers = family.num_layers(base)
    if layers.start > 0:
        for path in _present(base, family.first):
            base.set_submodule(path, Arrival(base.get_submodule(path), seam))
    for index in sorted(set(range(num_layers)).difference(layers if present is None else present)):
        make = {layers.start - 1: Arrival, layers.stop: Departure}.get(index, Absent)
        path = f"{family.layers}.{index}"
        layer = base.get_submodule(path)
        base.set_submodule(path, make(layer, seam, returns_tuple=family.returns_tuple))
    if layers.stop < num_layers:
        for path in _present(base, family.last):
            base.set_submodule(path, Absent(base.get_submodule(path)))
        for name, child in model.named_children():
            if child is not base and base is not model:
                model.set_submodule(name, Absent(child))


def _present(base: nn.Module, paths: tuple[str, ...]) -> list[str]:
    names = {name for name, _ in base.named_modules()}
    return [path for path in paths if path in names]


def _same(hidden: object, left: Tensor | None) -> bool:
    """Whether both are one tensor; sharding inside a cloud may have wrapped or cast it on its way."""
    if not isinstance(hidden, Tensor) or left is None:
        return False
    return hidden is left or hidden.dtype != left.dtype or hidden.data_ptr() == left.data_ptr()


_SHARE_LEFT: Final = 1 / 8
"""Of a stage's layers, those whose time the host has to start the next pass before this one ends."""


class LayerCall:
    """Takes the place of a layer's `forward`, so that its name and hooks stay as they are."""

    def __init__(self, layer: nn.Module, *, index: int, seam: Seam, router: Router | None) -> None:
        self._layer = layer
        self._forward: Callable[..., Any] = layer.forward
        self._router = None if router is None else layer.get_submodule(router.path)
        self._index = index
        self._seam = seam

    def compile(self, *, dynamic: bool | None, backend: str) -> None:
        """Compile the layer's own forward, but nothing of what is done around it."""
        self.wrap(lambda forward: torch.compile(forward, dynamic=dynamic, backend=backend))

    def wrap(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put something around the layer's own forward, but not around what is done beside it."""
        self._forward = around(self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        passage = self._seam.current()
        if not self._seam.learns_aside and not only_hidden_learns(args, kwargs):
            raise self._seam.misfit("its layers get more than hidden states and what follows from the ids")
        hidden = first_input(args, kwargs)
        if passage.meter is not None:
            side_inputs = [one for one in tensors_in([args, kwargs]) if one is not hidden]
            others = [*side_inputs, *self._layer.parameters(), *self._layer.buffers()]
            self._seed(passage.rng_key, hidden.device)
            passage.meter.run_layer(
                self._index, lambda: self._run(*args, **kwargs), hidden=hidden, others=others
            )
        self._announce(passage, hidden)
        # Before the checkpoint, which then keeps the state of the generators for the recomputation.
        self._seed(passage.rng_key, hidden.device)
        is_recomputed = passage.meter is not None or self._index in passage.recomputed
        if is_recomputed and torch.is_grad_enabled():
            output, router_logits = checkpoint(self._run, *args, use_reentrant=False, **kwargs)
        else:
            output, router_logits = self._run(*args, **kwargs)
        if router_logits is not None:
            passage.router_logits.append(router_logits)
        passage.left_layer = output[0] if isinstance(output, tuple | list) else output
        return output

    def _run(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
        if self._router is None:
            return self._forward(*args, **kwargs), None
        logits: list[Tensor] = []
        handle = self._router.register_forward_hook(lambda _module, _args, output: logits.append(output[0]))
        try:
            return self._forward(*args, **kwargs), logits[0]
        finally:
            handle.remove()

    def _announce(self, passage: Passage, hidden: Tensor) -> None:
        """Say when a pass nears its end: forward before the highest layers, backward before the lowest."""
        tell, layers = passage.on_near_end, passage.layers
        num_left = max(1, round(_SHARE_LEFT * len(layers)))
        if tell is None or len(layers) <= num_left:
            return
        if self._index == layers[-num_left]:
            tell()
        if self._index == layers[num_left] and hidden.requires_grad:
            # Its gradient is there when all layers but the lowest have run back.
            hidden.register_hook(lambda _gradient: tell())  # type: ignore[no-untyped-call]

    def _seed(self, rng_key: RngKey | None, device: torch.device) -> None:
        if rng_key is not None:
            rng_key.seed_place(f"layer {self._index}", device)
