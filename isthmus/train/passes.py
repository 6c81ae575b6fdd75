"""Forward and backward passes of one stage; what a backward needs is kept from its forward until then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.model.cut import Moment
from isthmus.model.stage import Batch, Stage, StageInput, StageOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """What the backward of a micro-batch needs from its forward."""

    arrived: Tensor | None
    output: StageOutput
    num_step_targets: int


class Passes:
    """Runs a stage on micro-batches.

    A frozen stage runs as in evaluation, without dropout. `sends_gradients` is false where the stage before
    is frozen, or there is none. Until `num_warmup_steps` hidden states cross where a bottleneck is to start.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        device: torch.device,
        seed: int,
        autocast: torch.dtype | None = None,
        is_frozen: bool = False,
        sends_gradients: bool = True,
        num_warmup_steps: int = 0,
        on_near_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.stage = stage
        self.window = 1
        """The most micro-batches in flight at a time."""
        self._device = device
        self._seed = seed
        self._autocast = autocast
        self._is_frozen = is_frozen
        self._sends_gradients = sends_gradients
        self._num_warmup_steps = num_warmup_steps
        self._on_near_end = on_near_end
        self._in_flight: dict[tuple[int, int], _InFlight] = {}

    def train(self, is_training: bool) -> None:
        """Switch between training and evaluation."""
        self.stage.train(is_training and not self._is_frozen)

    def forward(
        self,
        batch: Batch,
        hidden: Tensor | None,
        *,
        step: int,
        item: int,
        num_step_targets: int,
        is_evaluation: bool = False,
    ) -> StageOutput:
        """Run a micro-batch, with the hidden states that arrived for it."""
        is_training = not is_evaluation and not self._is_frozen
        if hidden is not None and is_training and self._sends_gradients:
            hidden.requires_grad_()
        inputs = StageInput(
            batch=batch.to(self._device),
            crossing=hidden,
            moment=Moment(seed=self._seed, step=step, microbatch=item),
            is_warming_up=step < self._num_warmup_steps,
            window=self.window,
            on_near_end=self._on_near_end,
        )
        with torch.set_grad_enabled(is_training), self._precision():
            output: StageOutput = self.stage(inputs)
        if is_training:
            self._in_flight[step, item] = _InFlight(
                arrived=hidden, output=output, num_step_targets=num_step_targets
            )
        return output

    def backward(self, *, step: int, item: int, gradient: Tensor | None) -> Tensor | None:
        """Run a micro-batch back, given the gradient of what it sent; gives that of what had arrived."""
        kept = self._in_flight.pop((step, item))
        kept.output.backward(grad=gradient, loss_weight=1 / max(kept.num_step_targets, 1))
        return None if kept.arrived is None else kept.arrived.grad

    @contextmanager
    def _precision(self) -> Iterator[None]:
        if self._autocast is None:
            yield
        else:
            # Without its cache, in which copies of weights would outlive the layers that are recomputed.
            with torch.autocast(self._device.type, dtype=self._autocast, cache_enabled=False):
                yield
