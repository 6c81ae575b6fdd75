"""Saves and loads the state of one rank, beside the computation and without a gather.

    loop     Save ──┐ passes of the next step … UPDATE waits for ─┐
    thread          └─ copy to the host ──────────────────────────┴─ write, retry ──► Saved

A thread copies the state to the host while the next passes run, the next update waits until it has been
copied, and the thread writes the copy. Every rank writes its shards, and a share of what all ranks have.
"""

import errno
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from isthmus.errors import UserError
from isthmus.events import Span, steady_s
from isthmus.model.stage import Stage
from isthmus.plan.codecs import read_pair, texts_of
from isthmus.plan.types import Member, NotStored, Saved, Stored
from isthmus.train.checkpoint import (
    CURE,
    OBSERVED,
    OPTIMIZER,
    WIRE,
    Checkpoints,
    Note,
    parameter_of,
    reaching,
    reason_of,
    saved_name,
)
from isthmus.train.coding import CodecState
from isthmus.train.device import Device, Mark
from isthmus.train.in_cloud import World, whole
from isthmus.train.loop import OnEvent
from isthmus.train.optimizer import Optimizer
from isthmus.train.records import (
    Facts,
    ShardRows,
    StoredTensor,
    safetensors_data,
    widest_first,
)
from isthmus.train.wire import Failure

_CODECS: Final = "codecs"
_FIRST_DELAY_S: Final = 1.0
_MAX_DELAY_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a rank beside weights and moments; `step` is the next one.

    What was saved at `best_step` is kept.
    """

    step: int
    facts: Facts = field(default_factory=dict)
    """Those of the scheduler, as JSON values."""
    wires: Mapping[Member, CodecState] = field(default_factory=dict)
    best_step: int | None = None


@dataclass(slots=True, eq=False)
class _Snapshot:
    """A copy of the state on its way to the host."""

    begun_s: float
    stall_s: float = 0.0
    copied: threading.Event = field(default_factory=threading.Event)
    """The copies are made, or have been started on the device."""
    mark: Mark = field(default_factory=Mark)

    def settle(self, device: Device) -> None:
        """Let what is computed from now on wait for the copies."""
        asked_s = steady_s()
        self.copied.wait()
        if self.mark.event is not None:
            torch.accelerator.current_stream(device.torch_device).wait_event(self.mark.event)
        self.stall_s += steady_s() - asked_s


class Keeper:
    """Saves and loads the state of one rank; the ranks of a cloud make theirs together.

    A save that fails is tried again for `patience_s`; it fails while there is a `full_marker`.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        world: World,
        *,
        stage: Stage,
        optimizer: Optimizer,
        device: Device | None = None,
        extra: Callable[[], Mapping[str, Tensor]] = dict,
        note: Note = lambda _: None,
        patience_s: float = 0.0,
        full_marker: Path | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._world = world
        self._stage = stage
        self._optimizer = optimizer
        self._device = device or Device("cpu")
        self._extra = extra
        self._note = note
        self._patience_s = patience_s
        self._full_marker = full_marker
        self._session = str(world.broadcast(secrets.token_hex(4)))
        self._lane = self._device.side_stream()
        self._memory: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._under_way: Future[Saved] | None = None
        self._is_closing = threading.Event()
        self._try_store()

    def _try_store(self) -> None:
        """Refuse a store that cannot be written to, or that not all ranks of this cloud see."""
        store, name = self._checkpoints.store, f".tried.{self._session}"
        with reaching(store):
            if self._world.is_leader:
                store.put(name, [b"tried"])
            self._world.broadcast(None)
            sees = int(name in store.list())
            (number,) = self._world.all_reduce([sees])
            if self._world.is_leader:
                store.remove(name)
        if number < self._world.num_ranks:
            raise UserError(
                f"{self._world.num_ranks - number} ranks of this cloud do not see what rank 0 writes to "
                f"{store.place}",
                hint="start all ranks with --runs on a disk that they share, or set checkpoint.store",
            )

    def save(
        self,
        state: State,
        done: OnEvent,
        *,
        safe_step: int | None = None,
        on_span: Callable[[Span], None] = lambda _: None,
    ) -> Callable[[], None]:
        """Begin to save, and tell `done` with `Saved` later; the next update waits for what this returns.

        Two states are never in memory: this waits until the one before is written.
        """
        snapshot = _Snapshot(begun_s=steady_s())
        if self._under_way is not None:
            wait([self._under_way])
        buffers = self._buffers()
        changing = self._wires(state) | self._changed_by_passes(buffers)
        weights = {name: one for name, one in self._weights().items() if name not in buffers}
        copy = partial(self._copy, snapshot, changing, weights, self._device.mark())
        self._under_way = self._thread.submit(self._write, state, snapshot, copy, safe_step, on_span)
        self._under_way.add_done_callback(partial(self._report, done))
        snapshot.stall_s = steady_s() - snapshot.begun_s
        return partial(snapshot.settle, self._device)

    def close(self) -> None:
        """End a save that is under way early; nothing of it counts."""
        self._is_closing.set()
        self._thread.shutdown(wait=True)

    def load(self, step: int) -> State:
        """Set stage and optimizer to what was saved; returns this rank's state."""
        self._checkpoints.begin_from(step)
        rank, layers = self._world.rank, self._stage.layers
        facts, found = _load(self._checkpoints, self._weights(), step, layers=layers, rank=rank)
        self._load_moments({name: one for name, one in found.items() if name.startswith(OPTIMIZER)})
        return State(
            step=step,
            facts=facts["scheduler"] or {},
            wires=self._load_wires(found, facts["wires"]),
        )

    def export(self, scratch: Path) -> dict[str, Tensor] | None:
        """The model's weights by its own names, at the leader of ranks that hold shards of them; else None.

        They are gathered into a file, one at a time, and mapped from there.
        """
        tensors = self._stage.model.state_dict()
        if not any(isinstance(one, DTensor) for one in tensors.values()):
            return None
        names = widest_first(tensors, lambda name: tensors[name].dtype)
        gathered = (whole(tensors[name]) for name in names)
        if not self._world.is_leader:
            for _ in gathered:
                pass
            return None
        about = {name: (tuple(tensors[name].shape), tensors[name].dtype) for name in names}
        with scratch.open("wb") as file:
            file.writelines(safetensors_data(about, gathered))
        return load_file(scratch)

    # What is saved.

    def _weights(self) -> dict[str, Tensor]:
        """Weights and buffers, and what the strategy has beside them, by their names in records."""
        return {**_weights_of(self._stage), **self._extra()}

    def _moments(self) -> dict[str, Tensor]:
        found = {}
        for name, one in self._optimizer.tensors().items():
            moment, _, parameter = name.partition("/")
            found[f"{OPTIMIZER}{moment}/{saved_name(parameter, self._stage.layers)}"] = one
        return found

    def _buffers(self) -> dict[str, Tensor]:
        """What passes may change of the stage; it is small."""
        names = {name.removeprefix("model.") for name, _ in self._stage.named_buffers()}
        own = self._stage.tensors_by_name()
        return {saved_name(name, self._stage.layers): own[name] for name in own.keys() & names}

    def _changed_by_passes(self, buffers: Mapping[str, Tensor]) -> dict[str, ShardRows]:
        """Copies that are made at once: of what each rank observes for itself, and of what all have."""
        down, rank, num_ranks = self._stage.down, self._world.rank, self._world.num_ranks
        by_rank = {name for name in buffers if down is not None and not down.has_begun and OBSERVED in name}
        found = {
            name: ShardRows(
                own=buffers[name].clone()[None], shape=(num_ranks, *buffers[name].shape), start=rank
            )
            for name in by_rank
        }
        if self._world.is_leader:
            common = {name: buffers[name].clone() for name in buffers.keys() - by_rank}
            found |= {name: ShardRows(own=one, shape=tuple(one.shape)) for name, one in common.items()}
        return found

    def _wires(self, state: State) -> dict[str, ShardRows]:
        """The codec state of this rank's wires, which are copies already."""
        return {
            f"{WIRE}{self._world.rank}/{_wire_name(peer)}/{name}": ShardRows(own=one, shape=tuple(one.shape))
            for peer, wire in state.wires.items()
            for name, one in wire.tensors.items()
        }

    def _share(self, tensors: Mapping[str, Tensor]) -> dict[str, ShardRows]:
        """What this rank writes: its shards, and some of what all ranks have, which are dealt by size.

        What a strategy has beside them may be known to the leader alone, which writes that.
        """
        extra = self._extra().keys()
        sharded = [name for name, one in tensors.items() if isinstance(one, DTensor)]
        common = tensors.keys() - extra - set(sharded)
        by_size = sorted(common, key=lambda name: (-tensors[name].nbytes, name))
        own = {*sharded, *by_size[self._world.rank :: self._world.num_ranks]}
        own |= extra if self._world.is_leader else set()
        return {name: rows_of(tensors[name]) for name in tensors if name in own}

    # The thread.

    def _write(
        self,
        state: State,
        snapshot: _Snapshot,
        copy: Callable[[], dict[str, ShardRows]],
        safe_step: int | None,
        on_span: Callable[[Span], None],
    ) -> Saved:
        try:
            copies = copy()
        finally:
            snapshot.copied.set()
        failure = self._persist(state, copies, safe_step)
        if failure is not None:
            return Saved(state.step, failure)
        begun_s, end_s = snapshot.begun_s, steady_s()
        num_bytes = sum(rows.own.nbytes for rows in copies.values())
        on_span(Span("disk", f"save {state.step}", "save", begun_s, end_s, num_bytes))
        return Saved(state.step, Stored(save_s=end_s - begun_s, stall_s=snapshot.stall_s))

    def _copy(
        self,
        snapshot: _Snapshot,
        changing: Mapping[str, ShardRows],
        weights: Mapping[str, Tensor],
        after: Mark,
    ) -> dict[str, ShardRows]:
        """Copies of all that this rank writes, once the device has come to a mark."""
        with self._lane.work(after=after):
            own = self._share({**weights, **self._moments()}) | dict(changing)
            copies = {name: self._on_host(name, rows) for name, rows in own.items()}
            snapshot.mark = self._device.mark()
            snapshot.copied.set()
        return copies

    def _on_host(self, name: str, rows: ShardRows) -> ShardRows:
        """A copy on the host, in memory that is used again and again."""
        host, own = self._memory.get(name), rows.own
        if host is None or host.shape != own.shape or host.dtype != own.dtype:
            host = torch.empty(own.shape, dtype=own.dtype, pin_memory=self._device.is_accelerator)
            self._memory[name] = host
        return replace(rows, own=host.copy_(own, non_blocking=True))

    def _facts(self, state: State) -> Facts:
        layers = self._stage.layers
        return {
            "layers": [layers.start, layers.stop],
            "scheduler": dict(state.facts),
            "wires": {_wire_name(peer): {_CODECS: texts_of(one.pair)} for peer, one in state.wires.items()},
        }

    def _persist(
        self, state: State, tensors: Mapping[str, ShardRows], safe_step: int | None
    ) -> NotStored | None:
        """Write, again and again while there is hope."""
        end_s, delay_s = steady_s() + self._patience_s, _FIRST_DELAY_S
        facts, place = self._facts(state), self._checkpoints.store.place
        while True:
            try:
                self._checkpoints.save(
                    state.step,
                    tensors,
                    facts,
                    ranks=self._world.spec,
                    session=self._session,
                    safe_step=safe_step,
                    best_step=state.best_step,
                    check=self._check,
                )
            except OSError as error:
                what = f"step {state.step} cannot be saved in {place}: {reason_of(error)}"
            else:
                return None
            if self._is_closing.is_set() or steady_s() + delay_s > end_s:
                return NotStored(
                    reason=what, hint=f"{CURE}; the same command then continues from what was saved last"
                )
            self._note(f"{what}; training continues, and it is tried again in {delay_s:g} s: {CURE}")
            self._is_closing.wait(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    def _check(self) -> None:
        if self._is_closing.is_set():
            raise OSError("the run has ended")
        if self._full_marker is not None and self._full_marker.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _report(self, done: OnEvent, ended: "Future[Saved]") -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            done(Failure(member=Member("", self._world.rank), error=error))
        elif not ended.cancelled():
            done(ended.result())

    # What is loaded.

    def _load_moments(self, moments: Mapping[str, StoredTensor]) -> None:
        """Load the moments of one parameter at a time."""
        own = {saved_name(name, self._stage.layers): name for name in self._stage.tensors_by_name()}
        parameters = self._stage.parameters_by_name()
        in_order = sorted(moments, key=parameter_of)
        for saved, names in itertools.groupby(in_order, key=parameter_of):
            like = parameters[own[saved]]
            found = {one.removeprefix(OPTIMIZER).partition("/")[0]: moments[one] for one in names}
            self._optimizer.load_tensors(
                {f"{moment}/{own[saved]}": _moment(stored, like) for moment, stored in found.items()}
            )

    def _load_wires(self, found: Mapping[str, StoredTensor], wires: list[Any]) -> dict[Member, CodecState]:
        """The wires of this rank; none for other layers, or where there was no such rank."""
        rank = self._world.rank
        return {
            _peer_of(peer): CodecState(
                pair=read_pair(about.get(_CODECS)),
                tensors={
                    name.removeprefix(prefix): one.load()
                    for name, one in found.items()
                    if name.startswith(prefix)
                },
            )
            for peer, about in (wires[rank].items() if rank < len(wires) else ())
            for prefix in [f"{WIRE}{rank}/{peer}/"]
        }


def _moment(stored: StoredTensor, like: Tensor) -> Tensor:
    """A moment on the host, or this rank's shard of it where it is sharded like its parameter."""
    if not isinstance(like, DTensor) or stored.shape != tuple(like.shape):
        return stored.load()
    own = rows_of(like)
    rows = stored.load(own.start, own.start + len(own.own))
    device = own.own.device
    return DTensor.from_local(
        rows.to(device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _wire_name(peer: Member) -> str:
    return f"{peer.cloud}.{peer.rank}"


def _peer_of(wire_name: str) -> Member:
    cloud, _, rank = wire_name.rpartition(".")
    return Member(cloud, int(rank))


def load_weights(checkpoints: Checkpoints, stage: Stage, step: int, *, extra: Mapping[str, Tensor]) -> None:
    """Set the weights of a stage that this process holds alone, and what is beside them."""
    _load(checkpoints, {**_weights_of(stage), **extra}, step, layers=stage.layers, rank=0)


def _load(
    checkpoints: Checkpoints, values: Mapping[str, Tensor], step: int, *, layers: range, rank: int
) -> tuple[Facts, dict[str, StoredTensor]]:
    """Set tensors to what was saved under their names; gives all that belongs to them, and facts."""
    shapes = {name: tuple(one.shape) for name, one in values.items()}
    facts, found = checkpoints.read(step, shapes, layers=layers)
    with torch.no_grad():
        for name, value in values.items():
            _set(value, found[name], rank)
    return facts, found


def _weights_of(stage: Stage) -> dict[str, Tensor]:
    """Weights and buffers of a stage by their names in records."""
    return {saved_name(name, stage.layers): one for name, one in stage.tensors_by_name().items()}


def _set(value: Tensor, stored: StoredTensor, rank: int) -> None:
    """Set a tensor, or this rank's shard of it, to what was saved."""
    if len(stored.shape) > value.ndim:
        # What a rank has observed that is there no more is lost; one that is new has observed nothing.
        if rank < stored.shape[0]:
            value.copy_(stored.load(rank, rank + 1)[0])
        return
    own = rows_of(value)
    own.own.copy_(stored.load(own.start, own.start + len(own.own)) if value.ndim else stored.load())


def rows_of(tensor: Tensor) -> ShardRows:
    """The rows of a tensor that this rank has."""
    if not isinstance(tensor, DTensor):
        return ShardRows(own=tensor.detach(), shape=tuple(tensor.shape))
    (placement,) = tensor.placements
    own, shape = tensor.to_local().detach(), tuple(tensor.shape)
    if isinstance(placement, Replicate):
        return ShardRows(own=own, shape=shape)
    if not placement.is_shard(0):
        raise ValueError(f"a tensor that is sharded by {placement}")
    mesh = tensor.device_mesh
    num_rows = -(-shape[0] // mesh.size())
    return ShardRows(own=own, shape=shape, start=min(shape[0], mesh.get_local_rank() * num_rows))
