"""AdamW with warm-up and decay, and clipping by the norm over all stages."""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
_NORM_EPSILON = 1e-6


class Decay(enum.StrEnum):
    """How the learning rate falls after the warm-up, to a tenth at the end or not at all."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate as a function of the step alone, so that there is nothing to save."""

    peak: float
    num_steps: int
    num_warmup_steps: int = 0
    decay: Decay = Decay.COSINE
    final_share: float = 0.1

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / self.num_warmup_steps
        num_left = max(self.num_steps - self.num_warmup_steps, 1)
        progress = min((step - self.num_warmup_steps) / num_left, 1.0)
        return self.peak * (self.final_share + (1 - self.final_share) * self._left(progress))

    def _left(self, progress: float) -> float:
        match self.decay:
            case Decay.COSINE:
                return 0.5 * (1 + math.cos(math.pi * progress))
            case Decay.LINEAR:
                return 1 - progress
            case Decay.CONSTANT:
                return 1.0


class Optimizer:
    """Updates the parameters of one stage; `max_norm` bounds the norm of the gradients of all stages."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        schedule: Schedule,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
    ) -> None:
        self.schedule = schedule
        self._max_norm = max_norm
        self._parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        decayed = [one for one in self._parameters.values() if one.ndim > 1]
        others = [one for one in self._parameters.values() if one.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=schedule.peak, betas=_BETAS, eps=_EPSILON
        )

    def squared_norms(self) -> tuple[float, ...]:
        """The squared norm of each parameter's gradient."""
        grads = [one.grad for one in self._parameters.values() if one.grad is not None]
        if not grads:
            return ()
        norms = torch.stack([torch.linalg.vector_norm(grad) for grad in grads])
        return tuple(float(norm) ** 2 for norm in norms.tolist())

    def update(self, step: int, *, norm: float) -> None:
        """Take a step with the gradients, of which `norm` is the norm over all stages, and clear them."""
        if self._max_norm is not None and norm > self._max_norm:
            factor = self._max_norm / (norm + _NORM_EPSILON)
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for group in self._adamw.param_groups:
            group["lr"] = self.schedule.at(step)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The state as tensors by name, such as `exp_avg/model.norm.weight`."""
        return {
            f"{key}/{name}": value
            for name, parameter in self._parameters.items()
            for key, value in self._adamw.state[parameter].items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state up again."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            key, _, parameter = name.partition("/")
            by_parameter.setdefault(parameter, {})[key] = tensor
        for name, state in by_parameter.items():
            owner = self._parameters[name]
            self._adamw.state[owner] = {key: _placed(key, one, owner) for key, one in state.items()}


def total_norm(squared_norms: Sequence[float]) -> float:
    """The norm over all parameters; summed exactly, so that no bit depends on how stages are cut."""
    if not all(map(math.isfinite, squared_norms)):
        return math.nan
    return math.sqrt(math.fsum(squared_norms))


def _placed(key: str, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    # AdamW counts its steps on the host.
    return tensor if key == "step" else tensor.to(parameter.device)
