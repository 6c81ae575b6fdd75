"""How a stage calls its own layers: seeded, recomputed if asked, and watched for what a cut would break."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isthmus.model.meter import Meter
from isthmus.model.randomness import Moment
from isthmus.model.seam import Passage, Seam, first_input

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
        self._forward = torch.compile(self._forward, dynamic=dynamic, backend=backend)

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
