"""Which parameters a model has, layer by layer: what a planner weighs and a cut deals out."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.model.families import HOW_TO_ADD
from isthmus.model.families.family import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The sizes of a model's parameters by name: before the layers, in each layer, behind them."""

    first: Mapping[str, int]
    layers: tuple[Mapping[str, int], ...]
    last: Mapping[str, int]

    @property
    def num_layers(self) -> int:
        """How many layers can be dealt out to stages."""
        return len(self.layers)

    def owned_by(self, layers: range) -> Mapping[str, int]:
        """The parameters of the stage that holds these layers."""
        owned = dict(self.first) if layers.start == 0 else {}
        for layer in layers:
            owned.update(self.layers[layer])
        if layers.stop == self.num_layers:
            owned.update(self.last)
        return owned


def dissect(model: PreTrainedModel, family: Family) -> Anatomy:
    """Place every parameter of a model; one that has no place makes the model unsupported."""
    first: dict[str, int] = {}
    layers: list[dict[str, int]] = [{} for _ in model.base_model.get_submodule(family.layers).children()]
    last: dict[str, int] = {}
    in_base = "" if model.base_model is model else f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = name.removeprefix(in_base)
        if not name.startswith(in_base) or _within(path, family.last):
            last[name] = parameter.numel()
        elif _within(path, family.first):
            first[name] = parameter.numel()
        elif _within(path, (family.layers,)):
            index = path.removeprefix(f"{family.layers}.").split(".")[0]
            layers[int(index)][name] = parameter.numel()
        else:
            raise UserError(
                f"{type(model).__name__} cannot be cut into stages: {name} belongs to none",
                hint=HOW_TO_ADD,
            )
    return Anatomy(first=first, layers=tuple(layers), last=last)


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Deal layers out to stages as evenly as can be, the earlier stages taking one more."""
    if not 1 <= num_stages <= num_layers:
        raise UserError(
            f"a model of {num_layers} layers cannot be cut into {num_stages} stages",
            hint=f"use 1 to {num_layers} stages",
        )
    size, num_larger = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, num_larger) for stage in range(num_stages + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


def check_layers(layers: range, num_layers: int) -> None:
    """A stage holds one or more layers of the model, in their order."""
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= num_layers:
        raise UserError(
            f"no stage can hold the layers from {layers.start} to before {layers.stop}",
            hint=f"the model has layers 0 to {num_layers - 1}, and a stage holds at least one of them",
        )


def _within(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)
