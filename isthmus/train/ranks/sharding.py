"""Weights, gradients and optimizer state of a stage, dealt out to the ranks of its cloud by FSDP2.

optimizer   parameters are gathered once at the start of a turn, gradients reduced once at its end: ranks
            may run different micro-batches in different orders in between
full        every layer is gathered when it runs and reduced when it has: the least memory, where all ranks
            run one sequence of passes in lock-step

Halves of bottlenecks are small, computed in float32 and given their values late: every rank has them whole.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from isthmus.errors import UserError
from isthmus.model.cut import LayerCall
from isthmus.model.stage import Stage
from isthmus.train.ranks.world import PlainReduction, World


def shard(
    stage: Stage,
    *,
    device: torch.device,
    num_ranks: int,
    compute_dtype: torch.dtype | None = None,
    keeps_sharded: bool = False,
    offload: bool = False,
) -> None:
    """Deal a stage on its device out to all ranks of the world, which hold the same weights.

    With a `compute_dtype` parameters are gathered in it; what is dealt out stays as it is, in float32.
    """
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (num_ranks,)),
        "reshard_after_forward": keeps_sharded,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=None if compute_dtype is None else torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": _on_host(device) if offload else OffloadPolicy(),
    }
    for layer in _layers(stage):
        fully_shard(layer, **options)
    fully_shard(stage, **options, ignored_params=set(_halves(stage).values()))
    for module in _sharded(stage):
        # Losses are weighted by the targets of the whole step already.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    stage.stream_dtype = compute_dtype
    _prepare(stage)


class ShardedReduction:
    """Gathers parameters once, before the first pass of a turn; reduces gradients once, after the last."""

    def __init__(self, world: World, stage: Stage) -> None:
        self._world = world
        self._stage = stage
        self._halves = PlainReduction(world, _halves(stage))
        self._gathering: list[UnshardHandle] = []
        root = _root(stage)
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)

    def begin(self, *, is_training: bool) -> None:
        """Start to gather all parameters, in training and in evaluation; each layer waits for its own."""
        del is_training
        started = [module.unshard(async_op=True) for module in _sharded(self._stage)]
        self._gathering = [one for one in started if one is not None]

    def reduce(self) -> None:
        """Sum the gradients over all ranks, and keep this rank's share of them and of the parameters."""
        for one in self._gathering:
            one.wait()  # Nothing has, at a rank without a micro-batch.
        reduce_now(self._stage)
        self._halves.reduce()

    def squared_norms(self, own: tuple[float, ...]) -> tuple[float, ...]:
        """The sum over the shares of all ranks."""
        return _sums(self._world, self._stage, own)


class LockStepReduction:
    """Leaves all to FSDP2, since every rank runs the same passes, in evaluations as well."""

    def __init__(self, world: World, stage: Stage) -> None:
        self._world = world
        self._stage = stage
        self._halves = PlainReduction(world, _halves(stage))

    def begin(self, *, is_training: bool) -> None:
        """Layers gather themselves."""
        del is_training

    def reduce(self) -> None:
        """Sum the gradients of halves of bottlenecks; every backward has reduced its part of all others."""
        self._halves.reduce()

    def squared_norms(self, own: tuple[float, ...]) -> tuple[float, ...]:
        """The sum over the shares of all ranks."""
        return _sums(self._world, self._stage, own)


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which ranks hold shares, put together; all ranks ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reduce_now(stage: Stage) -> None:
    """Reduce what backwards without synchronisation have left, on all ranks, and give up gathered parameters.

    torch has no public word for it; its own pipelines do the same in `perform_reduce_grad`.
    """
    root = _root(stage)
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    state = _state(stage)
    for group in _groups(stage):
        _fill_gaps(group)
        group.post_backward()
    state._root_post_backward_final_callback()
    root.set_reshard_after_backward(False)
    root.set_requires_gradient_sync(False)


def coming_bytes(stage: Stage) -> int:
    """The gradients that the passes of a step will add where they are reduced once: whole, in float32."""
    parts = [one for group in _groups(stage) for one in group.fsdp_params]
    num_awaited = sum(int(one.sharded_param.numel()) for one in parts if _awaits_gradient(one))
    return torch.float32.itemsize * num_awaited


def _awaits_gradient(part: Any) -> bool:
    return bool(part.sharded_param.requires_grad) and part.unsharded_accumulated_grad is None


def _sums(world: World, stage: Stage, own: tuple[float, ...]) -> tuple[float, ...]:
    """Squared norms over all ranks; of a gradient that every rank has whole, the leader's."""
    present = [one for one in stage.parameters_by_name().values() if one.grad is not None]
    counts = [world.seat.is_leader or isinstance(one.grad, DTensor) for one in present]
    return world.sums([norm if count else 0.0 for norm, count in zip(own, counts, strict=True)])


def _halves(stage: Stage) -> dict[str, nn.Parameter]:
    """The parameters of the stage's halves of bottlenecks, by name."""
    return {
        f"{side}.{name}": parameter
        for side, half in (("up", stage.up), ("down", stage.down))
        if half is not None
        for name, parameter in half.named_parameters()
    }


def _fill_gaps(group: Any) -> None:
    """A rank without a micro-batch, or a parameter that none of its micro-batches used, adds nothing."""
    for one in group.fsdp_params:
        parameter = one.unsharded_param
        is_empty = one.unsharded_accumulated_grad is None and parameter.grad is None
        if is_empty and parameter.requires_grad:
            # As backwards leave theirs: in the type that is reduced, which all of a group must share.
            if one.reduce_dtype is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                one.unsharded_accumulated_grad = torch.zeros_like(parameter, dtype=one.reduce_dtype)


def _on_host(device: torch.device) -> OffloadPolicy:
    """Memory that is pinned for the copies to an accelerator, where there is one."""
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")


def _prepare(stage: Stage) -> None:
    """Let the whole stage be the root, before one of its layers runs or is gathered by itself."""
    _state(stage)._lazy_init()


def _groups(stage: Stage) -> Iterator[Any]:
    for state in _state(stage)._state_ctx.all_states:
        several = getattr(state, "_fsdp_param_groups", None)
        yield from several if several is not None else filter(None, [state._fsdp_param_group])


_PRIVATE: Final = ("_lazy_init", "_state_ctx", "_root_post_backward_final_callback")


def _state(stage: Stage) -> Any:
    state = fully_shard.state(stage)  # type: ignore[attr-defined]
    if not all(hasattr(state, name) for name in _PRIVATE):
        raise UserError(
            f"sharding does not know its way around torch {torch.__version__}",
            hint='set the cloud\'s sharding to "none", or use torch 2.11 to 2.13',
        )
    return state


def _root(stage: Stage) -> FSDPModule:
    if not isinstance(stage, FSDPModule):
        raise TypeError("a stage that is not sharded")
    return stage


def _sharded(stage: Stage) -> Iterator[FSDPModule]:
    return (module for module in stage.modules() if isinstance(module, FSDPModule))


def _layers(stage: Stage) -> list[nn.Module]:
    return [one for one in stage.model.modules() if isinstance(getattr(one, "forward", None), LayerCall)]
