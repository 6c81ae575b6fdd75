"""When to save, and how to save and take up again what the ranks of a cloud hold together.

The leader's disk is the only one used. Tensors that are dealt out are put together one after the other, so
that no rank ever needs room for all.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from isthmus.model.stage import Stage
from isthmus.train.checkpoint import Checkpoints, State
from isthmus.train.crossing.cut import SavedCuts
from isthmus.train.crossing.steering import Standing
from isthmus.train.data.order import Cursor
from isthmus.train.observer import StepEnded
from isthmus.train.optimize.optimizer import Optimizer
from isthmus.train.ranks.sharding import whole
from isthmus.train.ranks.world import World


class SaveInterval:
    """Says after which steps to save: when the time has come, and at the end."""

    def __init__(self, every_s: float, *, last_step: int) -> None:
        self._every_s = every_s
        self._last_step = last_step
        self._saved_s = time.monotonic()

    def __call__(self, step: int) -> bool:
        """Whether it is time."""
        now_s = time.monotonic()
        if step != self._last_step and now_s - self._saved_s < self._every_s:
            return False
        self._saved_s = now_s
        return True


class Keeper:
    """The checkpoints of a cloud, as one of its ranks sees them; all ranks save and load together."""

    def __init__(self, checkpoints: Checkpoints, world: World, *, stage: Stage, optimizer: Optimizer) -> None:
        self._checkpoints = checkpoints
        self._world = world
        self._stage = stage
        self._optimizer = optimizer

    def save_after(self, ended: StepEnded, *, cursor: Cursor | None, standings: tuple[Standing, ...]) -> None:
        """Save the state that the next step begins from."""
        layers = self._stage.layers
        state = State(
            step=ended.step + 1,
            layers=(layers.start, layers.stop),
            cursor=cursor,
            cuts=ended.cuts or SavedCuts(),
            standings=standings,
        )
        self.save(state)

    def save(self, state: State) -> None:
        """Write a checkpoint; `state` is this rank's, and all but its cuts is the leader's to say."""
        if self._world.seat.num_ranks == 1:
            self._checkpoints.save(state, stage=self._stage, optimizer=self._optimizer)
            return
        cuts = self._world.gather_bytes(save(state.cuts.tensors()))
        weights = self._together(self._stage.tensors_by_name()) | self._observed_by_rank()
        moments = self._together(self._optimizer.tensors())
        if cuts is not None:
            others = tuple(SavedCuts.from_tensors(load(one)) for one in cuts[1:])
            self._checkpoints.write(replace(state, other_cuts=others), weights=weights, moments=moments)

    def load(self, step: int) -> State:
        """Bring stage and optimizer back to where they were; gives this rank's state."""
        if self._world.seat.num_ranks == 1:
            return self._checkpoints.load(step, stage=self._stage, optimizer=self._optimizer)
        state = State(step=step, layers=(0, 0))
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        if self._world.seat.is_leader:
            state, weights, moments = self._checkpoints.read(step, stage=self._stage)
        own = self._stage.tensors_by_name()
        for name, tensor in self._dealt(weights, own).items():
            is_by_rank = tensor.ndim > own[name].ndim
            own[name].copy_(tensor[self._world.seat.rank] if is_by_rank else tensor)
        parameters = self._stage.parameters_by_name()
        like = {name: parameters[name.partition("/")[2]] for name in self._names(moments)}
        self._optimizer.load_tensors(self._dealt(moments, like))
        cuts = [one.tensors() for one in (state.cuts, *state.other_cuts)]
        blobs = [self._world.spread_bytes(save(one)) for one in self._each_rank(cuts)]
        cursor = self._world.spread(None if state.cursor is None else asdict(state.cursor))
        return replace(
            state,
            cursor=None if cursor is None else Cursor(**cursor),
            cuts=SavedCuts.from_tensors(load(blobs[self._world.seat.rank])),
            other_cuts=(),
        )

    def export(self) -> dict[str, Tensor] | None:
        """The model's weights by its own names, where ranks hold shares of them; None where they do not."""
        own = dict(self._stage.model.state_dict())
        return self._together(own) if any(isinstance(one, DTensor) for one in own.values()) else None

    def _observed_by_rank(self) -> dict[str, Tensor]:
        """What each rank has seen for a bottleneck that is still to begin, stacked at the leader."""
        down = self._stage.down
        if down is None or down.has_begun:
            return {}
        own = {f"down.observed.{name}": one.cpu() for name, one in down.observed.named_buffers()}
        found = [load(one) for one in self._world.gather_bytes(save(own)) or ()]
        return {name: torch.stack([one[name] for one in found]) for name in own} if found else {}

    def _together(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the host at the leader, none elsewhere."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            full = whole(tensor)
            if self._world.seat.is_leader:
                found[name] = full.detach().to("cpu", copy=isinstance(tensor, DTensor))
        return found

    def _names(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return list(self._world.spread(list(tensors)))

    def _dealt(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The leader's tensors at every rank, or its share of them where `like` is dealt out."""
        about = {name: [list(one.shape), str(one.dtype).partition(".")[2]] for name, one in tensors.items()}
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in self._world.spread(about).items():
            full = tensors[name] if name in tensors else torch.empty(shape, dtype=getattr(torch, dtype))
            # A count of steps stays on the host.
            is_alike = list(like[name].shape) == shape
            full = full.to(_device_of(like[name])) if is_alike else full.clone()
            self._world.copy_from_leader(full)
            found[name] = _shared_out(full, like[name]) if is_alike else full
        return found

    def _each_rank(self, cuts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return cuts if self._world.seat.is_leader else [{} for _ in range(self._world.seat.num_ranks)]


def _device_of(tensor: Tensor) -> torch.device:
    return tensor.to_local().device if isinstance(tensor, DTensor) else tensor.device


def _shared_out(full: Tensor, like: Any) -> Tensor:
    if not isinstance(like, DTensor):
        return full
    # Every rank has the whole already, and takes its own part of it.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
