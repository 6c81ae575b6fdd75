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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.model.families import HOW_TO_ADD
from isthmus.model.families.family import Family
from isthmus.model.meter import Meter
from isthmus.model.randomness import Moment


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
    return hidden.dtype != left.dtype or hidden.data_ptr() == left.data_ptr()
