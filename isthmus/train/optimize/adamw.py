"""AdamW with its moments beside the weights, in float32 or in 8 bits."""

import importlib
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from isthmus.errors import UserError

_BETAS: Final = (0.9, 0.95)
_EPSILON: Final = 1e-8
_STEP: Final = "step"
_SIGNED: Final = "exp_avg"
_MOMENTS: Final = (_SIGNED, "exp_avg_sq")
# As torchao has them: numbers that share a scale, and the fewest of a parameter that are worth it.
_BLOCK: Final = 256
_LEAST_COARSE: Final = 4096

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
    """Beside the weights, in 8 bits with a scale for every 256 numbers; small parameters stay in float32.

    So do `tables`, in which a row has a gradient only where its token was there: a second moment that is
    rounded to nothing would make a leap of what is left of the first.

    Where ranks share a parameter out, each updates its own part: blocks lie as in the whole, so the result is
    what one rank would have. A parameter whose parts end within a block stays in float32.
    """

    def __init__(self, groups: Sequence[Group], *, tables: Collection[nn.Parameter] = ()) -> None:
        library = _torchao()
        self._tables = set(tables)
        self._moment_class: Any = library.subclass_8bit.OptimState8bit
        self._parts = {one: _part(one) for group in groups for one in group.parameters}
        own = [replace(one, parameters=[self._parts[each] for each in one.parameters]) for one in groups]
        self._adamw: Any = library.AdamW8bit(
            _torch_groups(own), lr=1.0, betas=_BETAS, eps=_EPSILON, block_size=_BLOCK
        )

    def step(self, learning_rate: float) -> None:
        """Update the parameters with their gradients."""
        for parameter, part in self._parts.items():
            part.grad = None if parameter.grad is None else _local(parameter.grad)
            if part.grad is not None and part not in self._adamw.state:
                self._adamw.state[part] = self._first_state(parameter)
        for group in self._adamw.param_groups:
            group["lr"].fill_(learning_rate)
        self._adamw.step()
        for part in self._parts.values():
            part.grad = None

    def state(self, parameter: nn.Parameter) -> State:
        """What is remembered of a parameter: of each moment the codes, the scales and the table of levels.

        Where ranks share it out all of them ask, and each has its part of the codes.
        """
        found: State = {}
        for key, moment in self._adamw.state.get(self._parts[parameter], {}).items():
            if key == _STEP:
                found[key] = moment
            elif self._is_coarse(parameter):
                codes, scales, levels = self._pieces(moment)
                found[f"{key}.codes"] = _like(parameter, codes)
                found[f"{key}.scale"] = _all_scales(parameter, scales)
                found[f"{key}.qmap"] = levels
            else:
                found[key] = _like(parameter, moment)
        return found

    def load(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Take up again what was remembered of a parameter."""
        part = self._parts[parameter]
        found = {_STEP: state[_STEP]}
        for key in _MOMENTS:
            saved = _local(state[key]) if key in state else self._join(parameter, state, key=key)
            # A copy: it may have been saved in the other form.
            found[key] = self._first_moment(parameter, key).copy_(saved.to(part.device))
        self._adamw.state[part] = found

    def _first_state(self, parameter: nn.Parameter) -> State:
        return {_STEP: torch.tensor(0.0), **{key: self._first_moment(parameter, key) for key in _MOMENTS}}

    def _first_moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        part = self._parts[parameter]
        if not self._is_coarse(parameter) or not part.numel():
            return torch.zeros_like(part, requires_grad=False)
        moment: Tensor = self._moment_class.zeros(
            part.shape, key == _SIGNED, _BLOCK, part.device, dtype=part.dtype
        )
        return moment

    def _is_coarse(self, parameter: nn.Parameter) -> bool:
        """Whether moments are kept in 8 bits, which all ranks must answer alike."""
        is_large = parameter.numel() >= _LEAST_COARSE and parameter not in self._tables
        return is_large and not (parameter.numel() % _BLOCK or _part_size(parameter) % _BLOCK)

    def _pieces(self, moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and levels; none of them where this rank's part is empty."""
        if isinstance(moment, self._moment_class):
            return moment.codes, moment.scale, moment.qmap
        return moment.to(torch.uint8), moment.flatten(), moment.flatten()

    def _join(self, parameter: nn.Parameter, state: Mapping[str, Tensor], *, key: str) -> Tensor:
        part = self._parts[parameter]
        if not part.numel():
            return torch.zeros_like(part, requires_grad=False)
        moment: Tensor = self._moment_class(
            _local(state[f"{key}.codes"]).to(part.device),
            _own_scales(parameter, state[f"{key}.scale"]).to(part.device),
            state[f"{key}.qmap"].to(part.device),
            signed=key == _SIGNED,
            dtype=part.dtype,
        )
        return moment


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
    """As torch takes them; it cannot update in one call what ranks share out and what each has whole."""
    return [
        {"params": members, "weight_decay": group.weight_decay}
        for group in groups
        for is_shared in (True, False)
        if (members := [one for one in group.parameters if isinstance(one, DTensor) is is_shared])
    ]


def _part_size(parameter: nn.Parameter) -> int:
    """How many numbers of a parameter a rank holds; the last ones may hold fewer, or none."""
    num_ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
    return -(-len(parameter) // num_ranks) * math.prod(parameter.shape[1:]) if parameter.ndim else 1


def _part(parameter: nn.Parameter) -> nn.Parameter:
    """What this rank holds of a parameter, in the same memory."""
    return nn.Parameter(_local(parameter.detach())) if isinstance(parameter, DTensor) else parameter


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """This rank's part of a tensor that is shared out as a parameter is."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _all_scales(parameter: nn.Parameter, own: Tensor) -> Tensor:
    """The scales of all ranks in order, from those of this one."""
    if not isinstance(parameter, DTensor):
        return own
    num_blocks = _part_size(parameter) // _BLOCK
    padded = torch.nn.functional.pad(own, (0, num_blocks - len(own)))
    every = DTensor.from_local(padded, parameter.device_mesh, [Shard(0)], run_check=False).full_tensor()
    return every[: parameter.numel() // _BLOCK]


def _own_scales(parameter: nn.Parameter, every: Tensor) -> Tensor:
    """The scales of this rank, from those of all."""
    if not isinstance(parameter, DTensor):
        return every
    num_blocks = _part_size(parameter) // _BLOCK
    first = parameter.device_mesh.get_local_rank() * num_blocks
    return every[first : first + num_blocks]


def _torchao() -> Any:
    # Compiled programs of its update are then not kept between runs, which is no news to whoever trains.
    warnings.filterwarnings("ignore", message="OptimState8bit does not implement", category=UserWarning)
    try:
        importlib.import_module("torchao.optim.subclass_8bit")
        return importlib.import_module("torchao.optim")
    except ImportError as error:
        raise UserError(
            "train.optimizer_bits = 8 needs torchao, which is not installed here",
            hint="pip install 'isthmus[lowbit]'",
        ) from error
