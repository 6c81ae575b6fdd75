"""Forward and backward passes of one stage; what a backward needs is kept from its forward until then."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.model.boundary import StageInput, StageOutput
from isthmus.model.randomness import Moment
from isthmus.model.stage import Stage
from isthmus.plan.types import Pass, Run
from isthmus.train.messages import Gradient, Microbatch, restore_padding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A micro-batch in flight."""

    arrived: Tensor | None
    output: StageOutput
    microbatch: Microbatch


class Passes:
    """Runs a stage, and adds up the losses that it gives."""

    def __init__(
        self, stage: Stage, *, device: torch.device, seed: int, autocast: torch.dtype | None = None
    ) -> None:
        self._stage = stage
        self._device = device
        self._seed = seed
        self._autocast = autocast
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._losses: list[Tensor] = []
        self._num_correct: list[Tensor] = []

    def set_training(self, is_training: bool) -> None:
        """Switch between training and evaluation, and forget the losses."""
        self._stage.train(is_training)
        self._losses.clear()
        self._num_correct.clear()

    def forward(self, run: Run, microbatch: Microbatch) -> Tensor | None:
        """Run a micro-batch; gives what crosses to the next stage, if there is one."""
        is_training = run.kind is Pass.FORWARD
        arrived = microbatch.crossing
        if arrived is not None and is_training:
            arrived.requires_grad_()
        moment = Moment(seed=self._seed, step=run.step, microbatch=run.microbatch)
        inputs = StageInput(batch=microbatch.batch.to(self._device), crossing=arrived, moment=moment)
        with torch.set_grad_enabled(is_training), self._precision():
            output: StageOutput = self._stage(inputs)
        if is_training:
            self._kept[run.step, run.microbatch] = _Kept(
                arrived=arrived, output=output, microbatch=microbatch
            )
        self._note(output)
        return output.crossing

    def backward(self, run: Run, rows: Tensor | None) -> Gradient | None:
        """Run a micro-batch back, given the gradient of what crossed; gives that for the stage before."""
        kept = self._kept.pop((run.step, run.microbatch))
        mask = kept.microbatch.batch.mask
        crossed = kept.output.crossing
        gradient = None
        if crossed is not None and rows is not None:
            there = None if mask is None else mask.to(rows.device)
            gradient = restore_padding(rows, there, shape=tuple(crossed.shape))
        kept.output.backward(grad=gradient, loss_weight=1 / max(kept.microbatch.num_step_targets, 1))
        if kept.arrived is None or kept.arrived.grad is None:
            return None
        return Gradient(values=kept.arrived.grad, mask=mask)

    def losses(self) -> list[float]:
        """The loss of each micro-batch of this turn, summed over its targets; the last stage has them."""
        return torch.stack(self._losses).tolist() if self._losses else []

    def num_correct(self) -> int:
        """Targets of this evaluation that the model would have chosen."""
        return int(torch.stack(self._num_correct).sum()) if self._num_correct else 0

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
            with torch.autocast(self._device.type, dtype=self._autocast):
                yield
