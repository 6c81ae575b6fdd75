"""AdamW with its moments beside the weights, in float32 or in 8 bits."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isthmus.errors import UserError

_BETAS: Final = (0.9, 0.95)
_EPSILON: Final = 1e-8
_STEP: Final = "step"

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that decay alike."""

    parameters: Sequence[nn.Parameter]
    weight_decay: float


class Moments(Protocol):
    """Updates parameters, and remembers what it needs for that."""

    def step(self, learning_rate: float) -> None:
        """Update the parameters with their gradients."""

    def state(self, parameter: nn.Parameter) -> State:
        """What is remembered of a parameter, by name; nothing before the first step."""

    def load(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Take up again what was remembered of a parameter."""


class OnDevice:
    """In float32 beside the weights."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._adamw = torch_adamw(groups)

    def step(self, learning_rate: float) -> None:
        """Update the parameters with their gradients."""
        set_rate(self._adamw, learning_rate)
        self._adamw.step()

    def state(self, parameter: nn.Parameter) -> State:
        """What is remembered of a parameter."""
        return dict(self._adamw.state.get(parameter, {}))

    def load(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Take up again what was remembered of a parameter."""
        # The fused form keeps even the count of steps on the device.
        self._adamw.state[parameter] = {key: one.to(parameter.device) for key, one in state.items()}


class EightBit:
    """Beside the weights, in 8 bits with a scale for every 256 numbers; small parameters stay in float32."""

    def __init__(self, groups: Sequence[Group]) -> None:
        library = _torchao()
        self._moment_class: Any = library.subclass_8bit.OptimState8bit
        self._adamw: Any = library.AdamW8bit(_torch_groups(groups), lr=1.0, betas=_BETAS, eps=_EPSILON)

    def step(self, learning_rate: float) -> None:
        """Update the parameters with their gradients."""
        for group in self._adamw.param_groups:
            group["lr"].fill_(learning_rate)
        self._adamw.step()

    def state(self, parameter: nn.Parameter) -> State:
        """What is remembered of a parameter: of each moment the codes, the scales and the table of levels."""
        found: State = {}
        for key, moment in self._adamw.state.get(parameter, {}).items():
            local = moment.to_local() if isinstance(moment, DTensor) else moment
            if isinstance(local, self._moment_class):
                found |= {f"{key}.{part}": getattr(local, part) for part in local.tensor_attrs}
            else:
                found[key] = moment
        return found

    def load(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Take up again what was remembered of a parameter."""
        moments: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            key, _, part = name.partition(".")
            moments.setdefault(key, {})[part] = tensor if key == _STEP else tensor.to(parameter.device)
        self._adamw.state[parameter] = {
            key: self._joined(key, parts, parameter) for key, parts in moments.items()
        }

    def _joined(self, key: str, parts: Mapping[str, Tensor], parameter: nn.Parameter) -> Tensor:
        if "" in parts:
            return parts[""]
        moment: Tensor = self._moment_class(**parts, signed=key == "exp_avg", dtype=parameter.dtype)
        if not isinstance(parameter, DTensor):
            return moment
        return DTensor.from_local(
            moment,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def torch_adamw(groups: Sequence[Group]) -> torch.optim.AdamW:
    """Torch's own; on an accelerator the form that reads and writes everything once."""
    on_accelerator = any(one.device.type != "cpu" for group in groups for one in group.parameters)
    return torch.optim.AdamW(
        _torch_groups(groups), lr=1.0, betas=_BETAS, eps=_EPSILON, fused=True if on_accelerator else None
    )


def set_rate(adamw: torch.optim.AdamW, learning_rate: float) -> None:
    """Let the next step take this learning rate."""
    for group in adamw.param_groups:
        group["lr"] = learning_rate


def _torch_groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [{"params": list(group.parameters), "weight_decay": group.weight_decay} for group in groups]


def _torchao() -> Any:
    try:
        importlib.import_module("torchao.optim.subclass_8bit")
        return importlib.import_module("torchao.optim")
    except ImportError as error:
        raise UserError(
            "train.optimizer_bits = 8 needs torchao, which is not installed here",
            hint="pip install 'isthmus[lowbit]'",
        ) from error
