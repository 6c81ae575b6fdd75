"""Forward and backward passes of one stage; what a backward needs is kept from its forward until then."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.model.boundary import StageInput, StageOutput
from isthmus.model.randomness import Moment
from isthmus.model.stage import Stage
from isthmus.plan.types import Pass, Run
from isthmus.train.crossing.messages import Gradient, Microbatch
from isthmus.train.ranks.beginning import begin_down, begin_up
from isthmus.train.ranks.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A micro-batch in flight."""

    arrived: Tensor | None
    output: StageOutput
    microbatch: Microbatch


class Passes:
    """Runs a stage, and adds up the losses that it gives.

    A frozen stage runs as in evaluation, without dropout. `sends_gradients` is false where the stage before
    is frozen, or there is none. Until `num_warmup_steps` hidden states cross where a bottleneck is to begin.
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
    ) -> None:
        self._stage = stage
        self._device = device
        self._seed = seed
        self._autocast = autocast
        self._is_frozen = is_frozen
        self._sends_gradients = sends_gradients
        self._num_warmup_steps = num_warmup_steps
        self.window = 1
        """The most micro-batches in flight at a time."""
        self.on_near_end: Callable[[], None] = lambda: None
        """Called when a pass, forward or backward, has come to its last layers."""
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._losses: list[Tensor] = []
        self._num_correct: list[Tensor] = []

    def set_training(self, is_training: bool) -> None:
        """Switch between training and evaluation, and forget the losses."""
        self._stage.train(is_training and not self._is_frozen)
        self._losses.clear()
        self._num_correct.clear()

    def forward(self, run: Run, microbatch: Microbatch) -> Tensor | None:
        """Run a micro-batch; gives what crosses to the next stage, if there is one."""
        is_training = run.kind is Pass.FORWARD and not self._is_frozen
        arrived = microbatch.crossing
        if arrived is not None and is_training and self._sends_gradients:
            arrived.requires_grad_()
        inputs = StageInput(
            batch=microbatch.batch.to(self._device),
            crossing=arrived,
            moment=Moment(seed=self._seed, step=run.step, microbatch=run.microbatch),
            is_warming_up=run.step < self._num_warmup_steps,
            window=self.window,
            on_near_end=self.on_near_end,
        )
        with torch.set_grad_enabled(is_training), self._precision():
            output: StageOutput = self._stage(inputs)
        if is_training:
            self._kept[run.step, run.microbatch] = _Kept(
                arrived=arrived, output=output, microbatch=microbatch
            )
        self._note(output)
        return output.crossing

    def backward(self, run: Run, gradient: Tensor | None) -> Gradient | None:
        """Run a micro-batch back, given the gradient of what crossed; gives that for the stage before."""
        kept = self._kept.pop((run.step, run.microbatch))
        kept.output.backward(grad=gradient, loss_weight=1 / max(kept.microbatch.num_step_targets, 1))
        if kept.arrived is None or kept.arrived.grad is None:
            return None
        return Gradient(values=kept.arrived.grad, mask=kept.microbatch.batch.mask)

    def begin_sending(self, world: World) -> dict[str, Tensor] | None:
        """Begin the bottleneck behind this stage, if there is one; gives what the stage behind needs."""
        return None if self._stage.down is None else begin_down(self._stage.down, world)

    def begin_receiving(self, world: World, take: Callable[[], Mapping[str, Tensor]]) -> None:
        """Begin the bottleneck before this stage, if there is one, with what the stage before gives."""
        if self._stage.up is not None:
            begin_up(self._stage.up, world, take)

    def losses(self) -> list[float]:
        """The loss of each micro-batch of this turn, summed over its targets; the last stage has them."""
        return torch.stack(self._losses).tolist() if self._losses else []

    def num_correct(self) -> list[int]:
        """Targets of each micro-batch of this evaluation that the model would have chosen."""
        return torch.stack(self._num_correct).tolist() if self._num_correct else []

    def _note(self, output: StageOutput) -> None:
        if output.loss is not None:
            self._losses.append(output.loss.detach())
        if output.num_correct is not None:
            self._num_correct.append(output.num_correct)

    @contextmanager
    def _precision(self) -> Iterator[None]:
        if self._autocast is None:
            yield
        else:
            # Without its cache, in which copies of weights would outlive the layers that are recomputed.
            with torch.autocast(self._device.type, dtype=self._autocast, cache_enabled=False):
                yield
