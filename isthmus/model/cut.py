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

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.model.families import HOW_TO_ADD, Family
from isthmus.model.meter import Meter


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The pass for which random numbers are drawn: a micro-batch of a step of a run."""

    seed: int
    step: int
    microbatch: int

    def seed_place(self, place: str, device: torch.device) -> None:
        """Start the device's generator, and the host's, for one place of the model."""
        seed_generators(seed_from("draw", self.seed, self.step, self.microbatch, place), device)


def seed_from(*parts: object) -> int:
    """A seed of 63 bits that depends on every part."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the host's generator and the device's; `torch.manual_seed` would go through all back ends."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators as they were found."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield


@dataclass(slots=True, kw_only=True)
class Passage:
    """One micro-batch on its way through a stage; hidden states are of shape (batch, tokens, width)."""

    arrived: Tensor | None
    moment: Moment | None
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

    def current(self) -> Passage:
        """The passage under way; without one the model was called past its stage."""
        if self.passage is None:
            raise RuntimeError(f"a {self.model_class} that was cut runs only through its stage")
        return self.passage

    def misfit(self, what: str) -> UserError:
        """The error for a model that does what no cut can carry."""
        return UserError(f"{self.model_class} cannot be cut into stages: {what}", hint=HOW_TO_ADD)


class Absent(nn.Module):
    """Stands for a module of another stage and passes its input on."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # Some forwards look at a layer before they call it, for its kind of attention say.
        for name, value in vars(original).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the input."""
        return first_input(args, kwargs)


class Arrival(Absent):
    """Stands for what precedes the stage, and gives the hidden states that arrived."""

    def __init__(self, original: nn.Module, seam: Seam) -> None:
        super().__init__(original)
        self._seam = seam

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the hidden states that arrived."""
        return self._seam.current().arrived


class Departure(Absent):
    """Stands for the layer behind the stage, and takes the hidden states that leave."""

    def __init__(self, original: nn.Module, seam: Seam) -> None:
        super().__init__(original)
        self._seam = seam

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the input for the next stage, and pass it on."""
        passage = self._seam.current()
        hidden = first_input(args, kwargs)
        if not _same(hidden, passage.left_layer):
            raise self._seam.misfit("it changes the hidden states between its layers")
        passage.departed = hidden
        return hidden


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The input that a module works on: the hidden states, for a layer."""
    return args[0] if args else next(iter(kwargs.values()))


def drop_absent(model: PreTrainedModel, family: Family, layers: range, seam: Seam) -> None:
    """Put stand-ins in the place of all that the stage with these layers does not own."""
    base = model.base_model
    num_layers = sum(1 for _ in base.get_submodule(family.layers).children())
    if layers.start > 0:
        for path in _present(base, family.first):
            base.set_submodule(path, Arrival(base.get_submodule(path), seam))
    for index in [*range(layers.start), *range(layers.stop, num_layers)]:
        path = f"{family.layers}.{index}"
        base.set_submodule(path, _layer_stand_in(base.get_submodule(path), index, layers, seam))
    if layers.stop < num_layers:
        for path in _present(base, family.last):
            base.set_submodule(path, Absent(base.get_submodule(path)))
        for name, child in model.named_children():
            if child is not base and base is not model:
                model.set_submodule(name, Absent(child))


def _layer_stand_in(layer: nn.Module, index: int, layers: range, seam: Seam) -> nn.Module:
    if index == layers.start - 1:
        return Arrival(layer, seam)
    if index == layers.stop:
        return Departure(layer, seam)
    return Absent(layer)


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

    def __init__(self, layer: nn.Module, *, index: int, seam: Seam, router_path: str | None) -> None:
        self._layer = layer
        self._forward: Callable[..., Any] = layer.forward
        self._router = None if router_path is None else layer.get_submodule(router_path)
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
        if not _only_hidden_learns(args, kwargs):
            raise self._seam.misfit("its layers get more than hidden states and what follows from the ids")
        hidden = first_input(args, kwargs)
        if passage.meter is not None:
            self._measure(passage.meter, passage.moment, hidden, args, kwargs)
        self._announce(passage, hidden)
        # Before the checkpoint, which then keeps the state of the generators for the recomputation.
        self._seed(passage.moment, hidden.device)
        is_recomputed = passage.meter is not None or self._index in passage.recomputed
        if is_recomputed and torch.is_grad_enabled():
            output, router_logits = checkpoint(self._run, *args, use_reentrant=False, **kwargs)
        else:
            output, router_logits = self._run(*args, **kwargs)
        if router_logits is not None:
            passage.router_logits.append(router_logits)
        passage.left_layer = output if isinstance(output, Tensor) else None
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

    def _measure(
        self,
        meter: Meter,
        moment: Moment | None,
        hidden: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        side_inputs = [one for one in _tensors([*args, *kwargs.values()]) if one is not hidden]
        meter.run_layer(
            self._index,
            lambda: self._run(*args, **kwargs),
            hidden=hidden,
            others=[*side_inputs, *self._layer.parameters(), *self._layer.buffers()],
            seed=lambda: self._seed(moment, hidden.device),
        )

    def _seed(self, moment: Moment | None, device: torch.device) -> None:
        if moment is not None:
            moment.seed_place(f"layer {self._index}", device)


def _only_hidden_learns(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether each stage can rebuild all that a layer gets beside hidden states: no gradient flows there."""
    side_inputs = [*args, *kwargs.values()][1:]
    return not any(tensor.requires_grad for tensor in _tensors(side_inputs))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
