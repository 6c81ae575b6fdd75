"""Stages that take their time and no processor, so that what is measured is schedule and link alone."""

import ctypes
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor, nn

from isthmus.model.heads import HEADS
from isthmus.model.stage import Batch, StageInput

_PR_SET_TIMERSLACK: Final = 29  # from linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Nap:
    """How long one micro-batch takes at a stage."""

    forward_s: float
    backward_s: float


class SleepingOutput:
    """What a sleeping stage gives; its backward sleeps too."""

    def __init__(self, stage: "SleepingStage", arrived: Tensor | None) -> None:
        self.crossing = None if stage.is_last else stage.hidden
        self.loss = torch.zeros(()) if stage.is_last else None
        self.num_correct = None
        self._stage = stage
        self._arrived = arrived

    def backward(
        self, *, grad: Tensor | None = None, memory_grad: Tensor | None = None, loss_weight: float = 1.0
    ) -> None:
        """Sleep, and give a gradient to the stage before."""
        del grad, memory_grad, loss_weight
        time.sleep(self._stage.nap.backward_s)
        if self._arrived is not None:
            self._arrived.grad = self._stage.hidden


class SleepingModel(nn.Module):
    """What a worker and an optimizer want to know of a model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=width, vocab_size=2)
        self.weight = nn.Parameter(torch.zeros(1))


class SleepingStage(nn.Module):
    """Takes the time of a stage and no processor; `width` numbers of each token cross."""

    def __init__(self, nap: Nap, *, num_tokens: int, width: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model = SleepingModel(width)
        self.head = HEADS["causal-lm"]
        self.nap = nap
        self.is_first = is_first
        self.is_last = is_last
        self.sends_gradient = not is_first
        self.has_memory = False
        self.down = self.up = None
        self.stream_dtype = None
        self.hidden = torch.randn(1, num_tokens, width, generator=torch.Generator().manual_seed(0))

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Of the model."""
        return dict(self.model.named_parameters())

    def forward(self, inputs: StageInput) -> SleepingOutput:
        """Sleep as long as a forward pass takes."""
        time.sleep(self.nap.forward_s)
        return SleepingOutput(self, inputs.crossing)


@dataclass(frozen=True, slots=True)
class Same:
    """A source of the same micro-batch over and over."""

    batch: Batch
    num_microbatches: int

    def training(self, _: int) -> list[Batch]:
        """Those of any step."""
        return [self.batch] * self.num_microbatches

    def validation(self) -> list[Batch]:
        """None."""
        return []


def same_tokens(num_tokens: int, num_microbatches: int) -> Same:
    """Sequences of one token over and over."""
    batch = Batch(ids=torch.zeros(1, num_tokens, dtype=torch.int64), num_targets=1)
    return Same(batch, num_microbatches)


def let_sleeps_end_in_time() -> None:
    """Sleeps of this process and its children, all sides alike, end when asked, not up to 50 us later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
