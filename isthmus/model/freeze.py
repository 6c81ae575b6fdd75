"""Layers that do not learn: nothing goes back to them, and what they give for a sample never changes."""

from torch import nn

from isthmus.errors import UserError
from isthmus.model.stage import Stage


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
    paths = [*first, *(f"{stage.family.layers}.{index}" for index in frozen_layers)]
    return [present[path] for path in paths if path in present]
