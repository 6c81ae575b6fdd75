"""AdamW with warm-up and decay, and clipping by the norm over all stages."""

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isthmus.plan.costs.memory import OptimizerState
from isthmus.train.optimize.adamw import EightBit, Group, Moments, OnDevice
from isthmus.train.optimize.offload import OnHost

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
    """Updates the parameters of one stage; `max_norm` bounds the norm of the gradients of all stages.

    The moments lie beside the weights, as `state` says, or all of them in float32 on the host. Those of
    `tables` are float32 in any case.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        schedule: Schedule,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        state: OptimizerState = OptimizerState.FLOAT32,
        offload: bool = False,
        tables: Collection[nn.Parameter] = (),
    ) -> None:
        self.schedule = schedule
        self._max_norm = max_norm
        self._parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        groups = _groups(self._parameters.values(), weight_decay)
        # A stage of frozen layers has nothing to update.
        self._moments = _make_moments(groups, state, offload=offload, tables=tables) if groups else None

    def squared_norms(self) -> tuple[float, ...]:
        """The squared norm of each parameter's gradient, or of this rank's shard of it."""
        grads = self._gradients()
        if not grads:
            return ()
        # With sharding and offload, only the halves of bottlenecks are still on the device.
        norms = torch.stack([torch.linalg.vector_norm(grad).to(grads[0].device) for grad in grads])
        return tuple(float(norm) ** 2 for norm in norms.tolist())

    def update(self, step: int, *, norm: float) -> None:
        """Take a step with the gradients, of which `norm` is the norm over all stages, and clear them."""
        grads = self._gradients()
        if grads and self._max_norm is not None and norm > self._max_norm:
            torch._foreach_mul_(grads, self._max_norm / (norm + _NORM_EPSILON))
        if self._moments is not None:
            self._moments.step(self.schedule.at(step))
        for parameter in self._parameters.values():
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        grads = [one.grad for one in self._parameters.values() if one.grad is not None]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]

    def tensors(self) -> dict[str, Tensor]:
        """The state as tensors by name, such as `exp_avg/model.norm.weight`."""
        if self._moments is None:
            return {}
        return {
            f"{key}/{name}": value
            for name, parameter in self._parameters.items()
            for key, value in self._moments.state(parameter).items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state up again."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            key, _, parameter = name.partition("/")
            by_parameter.setdefault(parameter, {})[key] = tensor
        for name, state in by_parameter.items():
            if self._moments is not None:
                self._moments.load(self._parameters[name], state)


def total_norm(squared_norms: Sequence[float]) -> float:
    """The norm over all parameters; summed exactly, so that no bit depends on how stages are cut."""
    if not all(map(math.isfinite, squared_norms)):
        return math.nan
    return math.sqrt(math.fsum(squared_norms))


def _groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[Group]:
    """Matrices decay, vectors do not."""
    present = list(parameters)
    groups = [
        Group(parameters=[one for one in present if one.ndim > 1], weight_decay=weight_decay),
        Group(parameters=[one for one in present if one.ndim <= 1], weight_decay=0.0),
    ]
    return [group for group in groups if group.parameters]


def _make_moments(
    groups: Sequence[Group], state: OptimizerState, *, offload: bool, tables: Collection[nn.Parameter]
) -> Moments:
    match state:
        case OptimizerState.EIGHT_BIT:
            if offload:
                raise ValueError("moments in 8 bits stay on the device")
            return EightBit(groups, tables=tables)
        case OptimizerState.FLOAT32:
            return OnHost(groups) if offload else OnDevice(groups)
