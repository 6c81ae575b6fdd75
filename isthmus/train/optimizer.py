"""AdamW with warm-up and decay, clipping by the norm over all stages, and its moments.

Moments are on the device of the weights, in float32 or in 8 bits, or in float32 on the host.
"""

import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isthmus.errors import import_extra
from isthmus.model.torch_calls import scale_all
from isthmus.plan.memory import OptimizerState

_BETAS: Final = (0.9, 0.95)
_EPSILON: Final = 1e-8
_STEP: Final = "step"
_SIGNED: Final = "exp_avg"
_MOMENTS: Final = (_SIGNED, "exp_avg_sq")
# As torchao has them: numbers that share a scale, and the fewest of a parameter that are worth it.
_BLOCK: Final = 256
_LEAST_COARSE: Final = 4096

ParameterState = dict[str, Tensor]
"""What an optimizer keeps of one parameter, by name."""


ParameterGroup = dict[str, Any]
"""A parameter group of torch's optimizers: `params` and their `weight_decay`."""


class Moments(Protocol):
    """Updates parameters with their gradients, and keeps the moments for that."""

    def step(self, learning_rate: float) -> None: ...

    def state(self, parameter: nn.Parameter) -> ParameterState:
        """The state of a parameter; nothing before the first step."""

    def load(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None: ...


class OnDevice:
    """Moments in float32 on the device of the weights."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self._adamw = torch_adamw(groups)

    def step(self, learning_rate: float) -> None:
        set_rate(self._adamw, learning_rate)
        self._adamw.step()

    def state(self, parameter: nn.Parameter) -> ParameterState:
        return dict(self._adamw.state.get(parameter, {}))

    def load(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        # The fused form keeps even the count of steps on the device.
        self._adamw.state[parameter] = {key: one.to(parameter.device) for key, one in state.items()}


class EightBit:
    """Moments on the device in 8 bits with a scale for every 256 numbers; small parameters keep float32.

    So do `tables` of embeddings, in which a row has a gradient only if its token occurred: a second moment
    that is rounded to zero would make a large update of what is left of the first.

    Of a sharded parameter each rank updates its shard: blocks are those of the whole tensor, so the result
    is what one rank would have. A parameter whose shards end within a block keeps float32.
    """

    def __init__(self, groups: Sequence[ParameterGroup], *, tables: Collection[nn.Parameter] = ()) -> None:
        library = _torchao()
        self._tables = set(tables)
        self._moment_class: Any = library.subclass_8bit.OptimState8bit
        self._parts: dict[nn.Parameter, nn.Parameter] = {
            one: _part(one) for group in groups for one in group["params"]
        }
        own = [{**group, "params": [self._parts[one] for one in group["params"]]} for group in groups]
        self._adamw: Any = library.AdamW8bit(own, lr=1.0, betas=_BETAS, eps=_EPSILON, block_size=_BLOCK)

    def step(self, learning_rate: float) -> None:
        for parameter, part in self._parts.items():
            part.grad = None if parameter.grad is None else _local(parameter.grad)
            if part.grad is not None and part not in self._adamw.state:
                self._adamw.state[part] = self._first_state(parameter)
        for group in self._adamw.param_groups:
            group["lr"].fill_(learning_rate)
        self._adamw.step()
        for part in self._parts.values():
            part.grad = None

    def state(self, parameter: nn.Parameter) -> ParameterState:
        """The state of a parameter: of each moment the codes, the scales and the table of levels."""
        found: ParameterState = {}
        for key, moment in self._adamw.state.get(self._parts[parameter], {}).items():
            if key == _STEP:
                found[key] = moment
            elif self._is_coarse(parameter):
                codes, scales, levels = self._pieces(moment)
                found[f"{key}.codes"] = _like(parameter, codes)
                found[f"{key}.scale"] = _scales(parameter, scales)
                found[f"{key}.qmap"] = levels
            else:
                found[key] = _like(parameter, moment)
        return found

    def load(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        part = self._parts[parameter]
        found = {_STEP: state[_STEP]}
        for key in _MOMENTS:
            saved = _local(state[key]) if key in state else self._join(parameter, state, key=key)
            # A copy: it may have been saved in the other form.
            found[key] = self._first_moment(parameter, key).copy_(saved.to(part.device))
        self._adamw.state[part] = found

    def _first_state(self, parameter: nn.Parameter) -> ParameterState:
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
        """Whether moments are kept in 8 bits; the same at all ranks."""
        is_large = parameter.numel() >= _LEAST_COARSE and parameter not in self._tables
        return is_large and not (parameter.numel() % _BLOCK or _part_size(parameter) % _BLOCK)

    def _pieces(self, moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and levels; empty where this rank's shard is."""
        if isinstance(moment, self._moment_class):
            return moment.codes, moment.scale, moment.qmap
        return moment.to(torch.uint8), moment.flatten(), moment.flatten()

    def _join(self, parameter: nn.Parameter, state: Mapping[str, Tensor], *, key: str) -> Tensor:
        part = self._parts[parameter]
        if not part.numel():
            return torch.zeros_like(part, requires_grad=False)
        moment: Tensor = self._moment_class(
            _local(state[f"{key}.codes"]).to(part.device),
            _own_scales(parameter, state[f"{key}.scale"].flatten()).to(part.device),
            state[f"{key}.qmap"].to(part.device),
            signed=key == _SIGNED,
            dtype=part.dtype,
        )
        return moment


def torch_adamw(groups: Sequence[ParameterGroup]) -> torch.optim.AdamW:
    """torch's AdamW; on an accelerator the fused form."""
    is_fused = any(one.device.type != "cpu" for group in groups for one in group["params"]) or None
    return torch.optim.AdamW(list(groups), lr=1.0, betas=_BETAS, eps=_EPSILON, fused=is_fused)


def set_rate(adamw: torch.optim.AdamW, learning_rate: float) -> None:
    for group in adamw.param_groups:
        group["lr"] = learning_rate


def _part_size(parameter: nn.Parameter) -> int:
    """The size of a parameter's shard; the last ranks may have less, or nothing."""
    num_ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
    return -(-len(parameter) // num_ranks) * math.prod(parameter.shape[1:]) if parameter.ndim else 1


def _part(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's shard of a parameter, in the same memory."""
    return nn.Parameter(_local(parameter.detach())) if isinstance(parameter, DTensor) else parameter


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """A tensor that is sharded like a parameter, from this rank's shard."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _scales(parameter: nn.Parameter, own: Tensor) -> Tensor:
    """The scales of this rank, in rows that are sharded like those of the parameter.

    A row has the scales of the fewest rows of the parameter that fill whole blocks.
    """
    row_size = parameter.numel() // len(parameter)
    own = own.view(-1, math.lcm(row_size, _BLOCK) // _BLOCK)
    if not isinstance(parameter, DTensor):
        return own
    shape = torch.Size((parameter.numel() // _BLOCK // own.shape[1], own.shape[1]))
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))


def _own_scales(parameter: nn.Parameter, every: Tensor) -> Tensor:
    """The scales of this rank, from those of all."""
    if not isinstance(parameter, DTensor):
        return every
    num_blocks = _part_size(parameter) // _BLOCK
    first = parameter.device_mesh.get_local_rank() * num_blocks
    return every[first : first + num_blocks]


def _torchao() -> Any:
    # The warning says that its compiled update is not cached between runs, which users need not know.
    warnings.filterwarnings("ignore", message="OptimState8bit does not implement", category=UserWarning)
    what = "train.optimizer_bits = 8"
    import_extra("torchao.optim.subclass_8bit", extra="lowbit", what=what)
    return import_extra("torchao.optim", extra="lowbit", what=what)


# The moments of so many parameters are on the device while those of as many are copied: 1 GiB in all.
_SLICE_PARAMETERS: Final = 2**26


class OnHost:
    """Moments of an accelerator in float32 on the host; copies overlap with the update of the slice before.

    The result is that of `OnDevice`, to the bit.
    """

    def __init__(
        self, groups: Sequence[ParameterGroup], *, slice_parameters: int = _SLICE_PARAMETERS
    ) -> None:
        slices = [one for group in groups for one in _sliced(group, slice_parameters)]
        self._slices = [torch_adamw([one]) for one in slices]
        self._host: dict[nn.Parameter, ParameterState] = {}
        self._device = slices[0]["params"][0].device
        self._inward, self._outward = (torch.Stream(device=self._device) for _ in range(2))

    def step(self, learning_rate: float) -> None:
        # Copies to the host of the last step end before anything is fetched.
        self._inward.wait_stream(self._outward)
        computing = torch.accelerator.current_stream(self._device)
        arrived = self._fetch(self._slices[0], computing)
        for adamw, following in itertools.zip_longest(self._slices, self._slices[1:]):
            computing.wait_event(arrived)
            if following is not None:
                arrived = self._fetch(following, computing)
            set_rate(adamw, learning_rate)
            adamw.step()
            self._put_back(adamw, computing)

    def state(self, parameter: nn.Parameter) -> ParameterState:
        self._outward.synchronize()
        return dict(self._host.get(parameter, {}))

    def load(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        self._outward.synchronize()
        self._host[parameter] = {key: _pinned_like(one).copy_(one) for key, one in state.items()}

    def _fetch(self, adamw: torch.optim.AdamW, computing: torch.Stream) -> torch.Event:
        """Copy a slice to the device; gives when it is there."""
        with self._inward:
            for parameter in adamw.param_groups[0]["params"]:
                for key, host in self._host.get(parameter, {}).items():
                    copy = host.to(self._device, non_blocking=True)
                    # The allocator may not reuse its memory until the update is done with it.
                    copy.record_stream(computing)
                    adamw.state[parameter][key] = copy
            return self._inward.record_event()

    def _put_back(self, adamw: torch.optim.AdamW, computing: torch.Stream) -> None:
        """Copy a slice to the host, in the memory that it had there, after what was computed so far."""
        self._outward.wait_stream(computing)
        with self._outward:
            for parameter in adamw.param_groups[0]["params"]:
                host = self._host.setdefault(parameter, {})
                for key, one in adamw.state.pop(parameter, {}).items():
                    one.record_stream(self._outward)
                    host[key] = (_pinned_like(one) if key not in host else host[key]).copy_(
                        one, non_blocking=True
                    )


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _sliced(group: ParameterGroup, max_parameters: int) -> Iterator[ParameterGroup]:
    """The parameters of a group in order, some at a time; a large one may be alone."""
    taken: list[nn.Parameter] = []
    for parameter in group["params"]:
        if taken and sum(one.numel() for one in taken) + parameter.numel() > max_parameters:
            yield {**group, "params": taken}
            taken = []
        taken.append(parameter)
    yield {**group, "params": taken}


_NORM_EPSILON: Final = 1e-6
_FINAL_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate as a function of the step alone, so that there is nothing to save."""

    peak: float
    num_steps: int
    num_warmup_steps: int = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How it falls after the warm-up, to a tenth at the end or not at all."""

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / self.num_warmup_steps
        num_left = max(self.num_steps - self.num_warmup_steps, 1)
        progress = min((step - self.num_warmup_steps) / num_left, 1.0)
        left = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
        return self.peak * (_FINAL_SHARE + (1 - _FINAL_SHARE) * left[self.decay])


class Optimizer:
    """Updates the parameters of one stage; `max_norm` bounds the norm of the gradients of all stages.

    The moments are on the device, as `state` says, or in float32 on the host; those of `tables` always have
    float32.
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
        self._moments: Moments | None = None
        # A stage of frozen layers has nothing to update.
        if groups and state is OptimizerState.EIGHT_BIT:
            if offload:
                raise ValueError("moments in 8 bits stay on the device")
            self._moments = EightBit(groups, tables=tables)
        elif groups:
            # Moments of a CPU are on the host already.
            is_away = offload and groups[0]["params"][0].device.type != "cpu"
            self._moments = OnHost(groups) if is_away else OnDevice(groups)

    def squared_norms(self) -> tuple[float, ...]:
        """The squared norm of each parameter's gradient, or of this rank's shard of it."""
        grads = self._gradients()
        if not grads:
            return ()
        # With sharding and offload, only the halves of bottlenecks are still on the device.
        norms = torch.stack([torch.linalg.vector_norm(grad).to(grads[0].device) for grad in grads])
        return tuple(float(norm) ** 2 for norm in norms.tolist())

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        if grads := self._gradients():
            scale_all(grads, factor)

    def update(self, step: int, *, norm: float) -> None:
        """Take a step with the gradients, of which `norm` is the norm over all stages, and clear them."""
        grads = self._gradients()
        if grads and self._max_norm is not None and norm > self._max_norm:
            scale_all(grads, self._max_norm / (norm + _NORM_EPSILON))
        if self._moments is not None:
            self._moments.step(self.schedule.at(step))
        for parameter in self._parameters.values():
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        grads = [one.grad for one in self._parameters.values() if one.grad is not None]
        return [_local(grad) for grad in grads]

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
        """Load what `tensors` gave, of all parameters or of some."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            key, _, parameter = name.partition("/")
            by_parameter.setdefault(parameter, {})[key] = tensor
        for name, state in by_parameter.items():
            if self._moments is not None:
                self._moments.load(self._parameters[name], state)


def _groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[ParameterGroup]:
    """Matrices decay, vectors do not; torch cannot update sharded and other parameters in one call."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
    for one in parameters:
        groups[one.ndim > 1, isinstance(one, DTensor)].append(one)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), members in sorted(groups.items(), reverse=True, key=lambda one: one[0])
    ]
