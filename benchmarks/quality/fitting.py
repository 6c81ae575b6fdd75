"""What both tasks have in common: sizes, the optimizer, and what a finished training tells."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quality.cut import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training: task, row and seed; the number of steps is fixed beforehand, the same for all rows."""

    task: str
    row: str
    seed: int
    num_steps: int

    @property
    def id(self) -> str:
        """Its name in result files."""
        return f"{self.task}/{self.row}/{self.seed}/{self.num_steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a training gave; quality is told with the codec as trained, and without."""

    loss_on: float
    loss_off: float
    train_losses: tuple[float, ...]
    traffic: Traffic
    facts: dict[str, Any] = field(default_factory=dict)
    hypotheses: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a training learns."""

    peak: float
    num_warmup_steps: int
    num_steps: int
    weight_decay: float

    def at(self, step: int) -> float:
        """The learning rate: a linear rise, then half a cosine to a twentieth."""
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / self.num_warmup_steps
        progress = (step - self.num_warmup_steps) / max(self.num_steps - self.num_warmup_steps, 1)
        return self.peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


class Fitter:
    """AdamW over modules, with clipping, and without a word between device and host."""

    def __init__(self, modules: Iterable[nn.Module], pace: Pace, *, device: torch.device) -> None:
        self._pace = pace
        self._device = device
        self._parameters = [one for module in modules for one in module.parameters() if one.requires_grad]
        groups = [
            {"params": [one for one in self._parameters if one.ndim > 1], "weight_decay": pace.weight_decay},
            {"params": [one for one in self._parameters if one.ndim <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=pace.peak, betas=(0.9, 0.98), fused=device.type != "cpu")
        self._losses: list[Tensor] = []

    def step(self, step: int, loss: Tensor) -> None:
        """Back-propagate a loss and take a step."""
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._adamw.param_groups:
            group["lr"] = self._pace.at(step)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._losses.append(loss.detach())

    def losses(self, num_points: int = 100) -> tuple[float, ...]:
        """The training loss, averaged over so many stretches of the run."""
        whole = torch.stack(self._losses).float()
        parts = whole.chunk(min(num_points, len(whole)))
        return tuple(torch.stack([part.mean() for part in parts]).tolist())


def autocast(device: torch.device) -> torch.autocast:
    """Bfloat16 where an accelerator has it; plain float32 on the CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type != "cpu", cache_enabled=True)
