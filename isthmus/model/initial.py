"""Initial values that no cut changes: a module's depend on the seed and its full name alone."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.model.randomness import seed_from, seed_generators

_CPU = torch.device("cpu")


def seed_initialisation(model: PreTrainedModel, seed: int) -> None:
    """Let the model's own initialisation start the generator anew for each module."""
    names = {module: name for name, module in model.named_modules()}

    def seeded(initialise: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def run(module: nn.Module) -> None:
            _spoil(module)
            seed_generators(seed_from("weights", seed, names[module]), _CPU)
            initialise(module)

        return run

    for part in _parts(model):
        part._init_weights = seeded(part._init_weights)


def end_seeding(model: PreTrainedModel) -> None:
    """Give the model its own initialisation back."""
    for part in _parts(model):
        del part._init_weights


def check_initialised(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Some classes set values as they are built, on the meta device in vain, and forget them afterwards."""
    for name in sorted(names):
        if torch.isnan(model.get_parameter_or_buffer(name)).any():
            raise UserError(
                f"transformers gives {name} of {type(model).__name__} no initial value",
                hint="start from pretrained weights",
            )


def _spoil(module: nn.Module) -> None:
    """Put NaN where nothing has been loaded, so that what stays without a value is seen."""
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        if tensor.is_floating_point() and not getattr(tensor, "_is_hf_initialized", False):
            tensor.fill_(math.nan)


def _parts(model: PreTrainedModel) -> list[Any]:
    """The model and the models inside it, each of which initialises its own modules."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]
