"""Finds where the parts of a model lie by running its own code once on tensors without values.

No table of families is needed: the layers are the base model's one list of modules, what is called before
them belongs to the first stage, what is called behind them to the last. In the trace each layer returns its
input, so a model of any size takes well under a second, and a model that does what no cut can carry is found
out before anything is read or made.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from isthmus.errors import UserError
from isthmus.model.transformers_calls import expect_no_padding, one_sequence_a_row

HOW_TO_ADD: Final = "docs/adding-a-family.md says what can be cut"
_BATCH_SHAPE: Final = (2, 4)
BUILD_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What the classes of transformers raise when a configuration does not fit together."""


FIRST: Final = -1
"""What stands before the layers, among their numbers."""
LAST: Final = -2
"""What stands behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Where a mixture of experts routes in each layer, and the loss that keeps its experts evenly used."""

    path: str
    """The router inside a layer; the first tensor it returns holds the logits."""
    balancing_loss: Callable[[Tensor, PreTrainedConfig, Tensor | None], Tensor]
    """Of one layer's logits, the configuration and the attention mask; a mean over tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Modules of a base model, as dotted paths, that an encoder–decoder has beside its encoder."""

    layers: str
    start: int
    """The number of its first layer, which is how many layers the encoder has."""
    encoder_end: tuple[str, ...]
    """What follows the encoder's layers."""
    first: tuple[str, ...]
    is_joined: bool
    """Whether the layers of a stack share weights, so that no cut may part them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Modules of a base model, as dotted paths, that belong to the first stage, the layers and the last.

    Modules outside the base model are the head, and belong to the last stage.
    """

    first: tuple[str, ...]
    layers: str
    last: tuple[str, ...] = ()
    returns_tuple: bool = False
    """Whether a layer returns a tuple that begins with the hidden states, not these alone."""
    has_experts: bool = False
    """Whether some layer keeps the weights of its experts in one tensor."""
    router: Router | None = None
    decoder: Decoder | None = None
    """Of an encoder–decoder, whose `layers` are those of the encoder."""

    def layer_path(self, index: int) -> str:
        """The path of a layer; those of a decoder count on from the encoder's."""
        if self.decoder is None or index < self.decoder.start:
            return f"{self.layers}.{index}"
        return f"{self.decoder.layers}.{index - self.decoder.start}"

    def num_layers(self, base: nn.Module) -> int:
        """How many layers a base model has."""
        stacks = [self.layers] if self.decoder is None else [self.layers, self.decoder.layers]
        return sum(len(list(base.get_submodule(path).children())) for path in stacks)

    def place_of(self, name: str, model: PreTrainedModel) -> int | None:
        """The layer to whose stage a parameter belongs, FIRST or LAST for an end; None if it has no place."""
        in_base = "" if model.base_model is model else f"{model.base_model_prefix}."
        path, decoder = name.removeprefix(in_base), self.decoder
        if not name.startswith(in_base) or within(path, self.last):
            return LAST
        if within(path, self.first):
            return FIRST
        if decoder is not None and within(path, decoder.encoder_end):
            return decoder.start - 1
        if decoder is not None and within(path, decoder.first):
            return decoder.start
        for stack, start in ((self.layers, 0), *([(decoder.layers, decoder.start)] if decoder else [])):
            if within(path, (stack,)):
                return start + int(path.removeprefix(f"{stack}.").split(".")[0])
        return None


def within(path: str, places: tuple[str, ...]) -> bool:
    """Whether a module is one of these, or lies inside one."""
    return any(path == place or path.startswith(f"{place}.") for place in places)


def _mixtral_balance(logits: Tensor, config: PreTrainedConfig, mask: Tensor | None) -> Tensor:
    settings: Any = config
    loss: Tensor = settings.router_aux_loss_coef * load_balancing_loss_func(
        (logits,), settings.num_local_experts, settings.num_experts_per_tok, mask
    )
    return loss


# Balancing losses are taken layer by layer, so that every stage adds its own.
ROUTERS: Final[Mapping[str, Router]] = MappingProxyType(
    {"mixtral": Router(path="mlp.gate", balancing_loss=_mixtral_balance)}
)


def cannot_cut(model_class: str, reason: str) -> UserError:
    """The error for a model that does what no cut can carry."""
    return UserError(f"{model_class} cannot be cut into stages: {reason}", hint=HOW_TO_ADD)


# What a trace cannot show.
MISFITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ctrl": "it changes its embeddings in place",
        "falcon_h1": "it looks into its layers for their masks",
        "fnet": "padding changes what its layers compute for other tokens",
        "gemma4_assistant": "it needs the hidden states of another model",
        "gemma4_unified_assistant": "it needs the hidden states of another model",
        "yoso": "padding changes what its attention computes for other tokens",
    }
)


def family_of(model: PreTrainedModel) -> Family:
    """Find the parts of a model that lies on the meta device; refuses one that cannot be cut."""
    layers = _find_layers(model)
    trace = _Trace(model, layers)
    try:
        trace.run()
    except _TakesFirst:
        trace = _Trace(model, layers, returns_tuple=True)
        trace.run()
    return Family(
        first=tuple(path for path in trace.units if trace.called[path] == {0}),
        layers=layers,
        last=tuple(path for path in trace.units if 0 not in trace.called[path]),
        returns_tuple=trace.returns_tuple,
        has_experts=any(one.ndim > 2 and ".experts." in name for name, one in model.named_parameters()),
        router=ROUTERS.get(model.config.model_type),
    )


def _find_layers(model: PreTrainedModel) -> str:
    """The path of the list of layers; of several lists, the one as long as the configuration says."""
    lists: dict[str, int] = {
        path: len(module)
        for path, module in model.base_model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    }
    outer = {
        path: size for path, size in lists.items() if not any(path.startswith(f"{one}.") for one in lists)
    }
    number = getattr(model.config, "num_hidden_layers", None)
    found = list(outer) if len(outer) == 1 else [path for path, size in outer.items() if size == number]
    if len(found) != 1:
        have = f"has several lists of layers, {', '.join(outer)}" if outer else "has no list of layers"
        raise cannot_cut(type(model).__name__, f"it {have}")
    return found[0]


class Absent(nn.Module):
    """Stands for a module of another stage and passes its input on."""

    def __init__(self, original: nn.Module, seam: Any = None, *, returns_tuple: bool = False) -> None:
        super().__init__()
        self._seam = seam
        # Some classes initialise the weight of a part, or ask it for its device.
        self.register_buffer("weight", torch.empty(0), persistent=False)
        self.returns_tuple = returns_tuple
        # Some forwards look at a layer before they call it, for its kind of attention say.
        for name, value in vars(original).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the input."""
        return self.returned(first_input(args, kwargs))

    def returned(self, hidden: Any) -> Any:
        """Hidden states as the original would return them."""
        return (hidden,) if self.returns_tuple else hidden


class _TakesFirst(Exception):
    """The model has taken the first row of what a layer returned, as it would of a tuple."""


class _Trace:
    """One forward pass in which layers return their input, to see what runs around them and when."""

    def __init__(self, model: PreTrainedModel, path: str, *, returns_tuple: bool = False) -> None:
        self.called: dict[str, set[int]] = defaultdict(set)
        """By unit: how many layers had run when it was called."""
        self.returns_tuple = returns_tuple
        self._model = model
        self._base: nn.Module = model.base_model
        self._path = path
        self._layers = list(self._base.get_submodule(path).children())
        self.units = [one for one, module in _beside(self._base, path) if _counts(module)]
        """Modules that belong to one end of the model: they have parameters, or draw dropout."""
        self._num_run = 0
        self._left: Tensor | None = None

    def run(self) -> None:
        """Trace; refuses a model that does what no cut can carry."""
        expect_no_padding(self._model)
        hooks = [self._watch(path) for path in self.units]
        for index, layer in enumerate(self._layers):
            stand_in = Absent(layer)
            stand_in.forward = partial(self._run_layer, index)  # type: ignore[method-assign]
            self._base.set_submodule(f"{self._path}.{index}", stand_in)
        try:
            ids = torch.zeros(_BATCH_SHAPE, dtype=torch.long, device="meta")
            with one_sequence_a_row(True):
                self._base(input_ids=ids, attention_mask=None, use_cache=False)
        except BUILD_ERRORS as error:
            raise self._misfit(self._what_it_needs(error)) from error
        finally:
            for hook in hooks:
                hook.remove()
            for index, layer in enumerate(self._layers):
                self._base.set_submodule(f"{self._path}.{index}", layer)
        if self._num_run != len(self._layers):
            raise self._misfit(f"it runs {self._num_run} of its {len(self._layers)} layers")

    def _misfit(self, reason: str) -> UserError:
        return cannot_cut(type(self._model).__name__, reason)

    def _what_it_needs(self, error: Exception) -> str:
        """The reason why a forward fails that gets token ids, without values, and nothing of its layers."""
        message = (str(error).strip().splitlines() or [""])[-1].strip()
        if "meta" in message:
            return f"its forward reads the values of its inputs ({message})"
        what = "of its layers than hidden states" if self._num_run else "than token ids"
        return f"its forward needs more {what} ({type(error).__name__}: {message})"

    def _watch(self, path: str) -> Any:
        def note(_module: nn.Module, _args: Any) -> None:
            self.called[path].add(self._num_run)
            if len(self.called[path]) > 1 or 0 < self._num_run < len(self._layers):
                raise self._misfit(f"{path} does not run at one end of its layers")

        return self._base.get_submodule(path).register_forward_pre_hook(note)

    def _run_layer(self, index: int, *args: Any, **kwargs: Any) -> Any:
        hidden = first_input(args, kwargs)
        if index != self._num_run:
            raise self._misfit("its layers do not run once each, in their order")
        if self._left is not None and hidden is not self._left:
            if not self.returns_tuple and isinstance(hidden, Tensor) and hidden.ndim < self._left.ndim:
                raise _TakesFirst
            raise self._misfit("it changes the hidden states between its layers")
        if not only_hidden_learns(args, kwargs):
            raise self._misfit("its layers get more than hidden states and what follows from the ids")
        if not isinstance(hidden, Tensor) or hidden.shape[:-1] != _BATCH_SHAPE:
            raise self._misfit("its layers pass on more than one vector for each token")
        self._num_run += 1
        self._left = hidden.view_as(hidden)
        return (self._left,) if self.returns_tuple else self._left


def _counts(module: nn.Module) -> bool:
    draws = any(isinstance(one, nn.Dropout) for one in module.modules())
    return draws or any(True for _ in module.parameters())


def _beside(base: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that lie beside the list of layers, or beside a module that holds it."""
    holder = ""
    for name in path.split("."):
        prefix = f"{holder}." if holder else ""
        for child, module in base.get_submodule(holder).named_children():
            if child != name:
                yield f"{prefix}{child}", module
        holder = f"{prefix}{name}"


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The input that a module works on: the hidden states, for a layer."""
    return args[0] if args else next(iter(kwargs.values()))


def only_hidden_learns(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether each stage can rebuild all that a layer gets beside hidden states: no gradient flows there."""
    side_inputs = [*args, *kwargs.values()][1:]
    return not any(tensor.requires_grad for tensor in tensors_in(side_inputs))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
