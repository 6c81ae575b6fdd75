"""The checkpoints of a run: the state of all clouds at the start of a step, addressed by parameter name.

Each cloud keeps a record of its own, `checkpoints/step-00000120/<cloud>/`, as `store.py` describes it:

    model.layers.3.mlp.up_proj.weight                     weights, by Hugging Face's names
    boundary.4.down.weight                                halves of the bottleneck before layer 4
    optimizer/exp_avg/model.layers.3.mlp.up_proj.weight   moments, by the names of their parameters
    wire/0/west/…                                         codec state of rank 0's wire to a peer
    facts                                                 step, cloud, job, layers, cursor, scheduler, wires

A stage asks for the names that it owns, and takes them from whichever record of the step has them, so a run
that is cut otherwise loads what all records together hold. Rank 0 of a cloud writes and reads for all its
ranks, so only its disk counts. Sharded tensors are gathered, written, read and broadcast one at a time: no
rank has all of a sharded stage in its memory.

Dropout is drawn from seed, step, micro-batch and layer, and the learning rate follows from the step, so
there is no generator and no schedule to save.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from isthmus.errors import UserError
from isthmus.model.stage import Stage
from isthmus.plan.codecs import read_pair, texts_of
from isthmus.plan.types import Member
from isthmus.train.coding import CodecState
from isthmus.train.data.samples import Cursor
from isthmus.train.in_cloud import World, whole
from isthmus.train.members import SavedSteps
from isthmus.train.optimizer import Optimizer
from isthmus.train.store import (
    DiskStore,
    Facts,
    LazyTensor,
    Manifest,
    Store,
    in_file_order,
    write_tensors,
)

CHECKPOINTS_FOLDER: Final = "checkpoints"
_RECORD: Final = re.compile(r"step-([0-9]{8,18})/([a-z0-9-]+)(\.aside)?")
_ASIDE: Final = ".aside"
_OPTIMIZER: Final = "optimizer/"
_WIRE: Final = "wire/"
_MAX_TOLD: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WireState:
    """What one end of a wire must know to go on: plain facts, such as its codecs, and tensors by name."""

    facts: Facts = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is saved of a rank beside weights and moments; `step` is the next one, and begins at `cursor`.

    `layers` are told for people, and `facts` are those of the scheduler. Peers name the other ends of wires
    in the words of whoever runs the wires, without a slash.
    """

    step: int
    layers: tuple[int, int]
    cursor: Cursor | None = None
    facts: Facts = field(default_factory=dict)
    wires: Mapping[str, WireState] = field(default_factory=dict)
    other_wires: tuple[Mapping[str, WireState], ...] = ()
    """Of the ranks behind rank 0, in order."""


class Checkpoints:
    """The checkpoints of one cloud in a run; `job` is the digest of what the job means."""

    def __init__(
        self, run: Path, *, cloud: str, keep: int = 2, job: str = "", store: Store | None = None
    ) -> None:
        self._store = store or DiskStore(run / CHECKPOINTS_FOLDER)
        self._cloud = cloud
        self._keep = keep
        self._job = job
        self._damaged: set[int] = set()
        self._written: set[int] = set()
        self._began_from: int | None = None

    def steps(self) -> tuple[int, ...]:
        """The steps whose checkpoint was written to its end here, in order."""
        return tuple(step for step, cloud, _ in self._records() if cloud == self._cloud)

    def inspect(self, note: Callable[[str], None]) -> SavedSteps:
        """Read all that is here: what was cut short is removed, what is damaged is named and not counted."""
        for name in self._store.unfinished():
            if self._is_own(name):
                self._store.remove(name)
                note(f"removed {name}, a checkpoint that was cut short")
        for step in self.steps():
            reason = self._store.check(self._name(step))
            if reason is not None:
                self._damaged.add(step)
                note(f"the checkpoint {self._name(step)} is left out: {reason}")
        whole = tuple(step for step in self.steps() if step not in self._damaged)
        return SavedSteps(whole=whole, damaged=tuple(sorted(self._damaged)))

    def begin_from(self, step: int) -> None:
        """Go on from a step: what was saved of later ones no longer counts, once a new one is saved."""
        self._began_from = step

    def save(
        self, state: State, *, weights: Mapping[str, LazyTensor], moments: Mapping[str, LazyTensor]
    ) -> None:
        """Write a checkpoint, then remove those that are not to be kept."""
        name = self._name(state.step)
        tensors = dict(_named_tensors(state, weights, moments))
        try:
            self._store.put(name, tensors, self._facts(state))
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise UserError(
                f"the checkpoint {name} cannot be written: {reason or error}",
                hint="make room on the disk and start again: the run goes on from the one before",
            ) from error
        self._written.add(state.step)
        self._damaged.discard(state.step)
        self._retire(newest=state.step)

    def read(self, step: int, *, stage: Stage) -> tuple[State, dict[str, LazyTensor], dict[str, LazyTensor]]:
        """A stage's state, weights and moments at a step, from the records that have them."""
        own = {_saved_name(name, stage.layers): name for name in stage.tensors_by_name()}
        found = self._manifests(step, own.keys())
        sources = _find(own, found, step=step)
        _check_shapes({_saved_name(name, stage.layers): one for name, one in _shapes(stage)}, sources)
        weights: dict[str, LazyTensor] = {}
        moments: dict[str, LazyTensor] = {}
        for cloud, manifest in found.items():
            names = {name for name in own if sources[name] is manifest}
            about = [name for name in manifest.tensors if _parameter_of(name) in names]
            tensors = self._store.get(self._name(step, cloud), [*names, *about])
            weights |= {own[name]: tensors[name] for name in names}
            moments |= {f"{_moment_of(name)}/{own[_parameter_of(name)]}": tensors[name] for name in about}
        return self._state(step, found, stage.layers), weights, moments

    def _state(self, step: int, found: Mapping[str, Manifest], layers: range) -> State:
        own = found.get(self._cloud)
        is_same_cut = own is not None and list(own.facts["layers"]) == [layers.start, layers.stop]
        every = [own] if own is not None and is_same_cut else list(found.values())
        cursor = next((one.facts["cursor"] for one in every if one.facts["cursor"]), None)
        wires: tuple[Mapping[str, WireState], ...] = ({},)
        if own is not None and is_same_cut:
            wires = self._wires(step, own)
        return State(
            step=step,
            layers=(layers.start, layers.stop),
            cursor=None if cursor is None else Cursor(epoch=cursor["epoch"], position=cursor["position"]),
            facts=next((one.facts["scheduler"] for one in every if one.facts["scheduler"]), {}),
            wires=wires[0],
            other_wires=wires[1:],
        )

    def _wires(self, step: int, own: Manifest) -> tuple[Mapping[str, WireState], ...]:
        names = [name for name in own.tensors if name.startswith(_WIRE)]
        tensors = {name: one.load() for name, one in self._store.get(self._name(step), names).items()}
        return tuple(
            {
                peer: WireState(facts=facts, tensors=_below(f"{_WIRE}{rank}/{peer}/", tensors))
                for peer, facts in peers.items()
            }
            for rank, peers in enumerate(own.facts["wires"])
        )

    def _facts(self, state: State) -> dict[str, Any]:
        return {
            "step": state.step,
            "cloud": self._cloud,
            "job": self._job,
            "layers": list(state.layers),
            "cursor": None if state.cursor is None else asdict(state.cursor),
            "scheduler": dict(state.facts),
            "wires": [
                {peer: dict(wire.facts) for peer, wire in wires.items()}
                for wires in (state.wires, *state.other_wires)
            ],
        }

    def _manifests(self, step: int, wanted: Set[str]) -> dict[str, Manifest]:
        """The manifest of our own record, where that has all that is wanted, or those of all records here."""
        here = [cloud for one, cloud, _ in self._records() if one == step]
        found: dict[str, Manifest] = {}
        for cloud in sorted(here, key=lambda one: (one != self._cloud, one)):
            found[cloud] = self._manifest(self._name(step, cloud))
            if cloud == self._cloud and wanted <= found[cloud].tensors.keys():
                break
        return found

    def _manifest(self, name: str) -> Manifest:
        manifest = self._store.manifest(name)
        match manifest.facts:
            case {
                "layers": [int(), int()],
                "cursor": None | {"epoch": int(), "position": int()},
                "scheduler": dict(),
                "wires": [dict(), *_],
                "job": str(job),
            }:
                reason = "it is of another job" if self._job not in ("", job) else None
            case _:
                reason = "its facts make no sense"
        if reason is not None:
            raise UserError(
                f"the checkpoint {name} cannot be used: {reason}",
                hint="put that of this run in its place, or start again with --resume never",
            )
        return manifest

    def _retire(self, *, newest: int) -> None:
        """Now that a checkpoint is whole, set aside what lost steps have left, and remove what is too old.

        What is set aside is kept until its step is reached again.
        """
        base = newest if self._began_from is None else self._began_from
        for step in self.steps():
            if step > newest or (step > base and step not in self._written):
                self._store.rename(self._name(step), f"{self._name(step)}{_ASIDE}")
        for name, step in self._aside():
            if step <= newest:
                self._store.remove(name)
        whole = [step for step in self.steps() if step not in self._damaged]
        for step in set(self.steps()).difference(whole[-self._keep :]):
            self._store.remove(self._name(step))

    def _records(self, *, aside: bool = False) -> Iterator[tuple[int, str, str]]:
        for name in self._store.names():
            match = _RECORD.fullmatch(name)
            if match is not None and (match[3] is not None) == aside:
                yield int(match[1]), match[2], name

    def _aside(self) -> list[tuple[str, int]]:
        return [(name, step) for step, cloud, name in self._records(aside=True) if cloud == self._cloud]

    def _is_own(self, name: str) -> bool:
        match = _RECORD.fullmatch(name)
        return match is not None and match[2] == self._cloud

    def _name(self, step: int, cloud: str | None = None) -> str:
        return f"step-{step:08d}/{cloud or self._cloud}"


def _named_tensors(
    state: State, weights: Mapping[str, LazyTensor], moments: Mapping[str, LazyTensor]
) -> Iterator[tuple[str, LazyTensor]]:
    layers = range(*state.layers)
    for name, tensor in weights.items():
        yield _saved_name(name, layers), tensor
    for name, tensor in moments.items():
        moment, _, parameter = name.partition("/")
        yield f"{_OPTIMIZER}{moment}/{_saved_name(parameter, layers)}", tensor
    for rank, wires in enumerate((state.wires, *state.other_wires)):
        for peer, wire in wires.items():
            for name, own in wire.tensors.items():
                yield f"{_WIRE}{rank}/{peer}/{name}", lazy(own)


def _saved_name(name: str, layers: range) -> str:
    """The name of a stage's tensor that no other stage has: halves of bottlenecks go by their cut's layer."""
    half, _, _ = name.partition(".")
    cut = {"down": layers.stop, "up": layers.start}.get(half)
    return name if cut is None else f"boundary.{cut}.{name}"


def _moment_of(name: str) -> str:
    return name.removeprefix(_OPTIMIZER).partition("/")[0]


def _parameter_of(name: str) -> str:
    """The parameter that a moment belongs to; nothing for other names."""
    return name.removeprefix(_OPTIMIZER).partition("/")[2] if name.startswith(_OPTIMIZER) else ""


def _find(names: Mapping[str, str], found: Mapping[str, Manifest], *, step: int) -> dict[str, Manifest]:
    """The record that each name is taken from: the first that has it."""
    sources: dict[str, Manifest] = {}
    for manifest in found.values():
        for name in manifest.tensors.keys() & names.keys():
            sources.setdefault(name, manifest)
    missing = [name for name in names if name not in sources]
    if missing:
        more = f" and {len(missing) - _MAX_TOLD} more" if len(missing) > _MAX_TOLD else ""
        here = ", ".join(f"{cloud!r} (layers {_range_of(one)})" for cloud, one in found.items())
        raise UserError(
            f"the checkpoint of step {step} lacks {', '.join(missing[:_MAX_TOLD])}{more}, "
            f"in the records that are here: {here or 'none'}",
            hint="copy the records of the other clouds here, or start again with --resume never",
        )
    return sources


def _range_of(manifest: Manifest) -> str:
    start, stop = manifest.facts["layers"]
    return f"{start} to {stop - 1}"


def _shapes(stage: Stage) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in stage.tensors_by_name().items():
        yield name, tuple(tensor.shape)


def _check_shapes(own: Mapping[str, tuple[int, ...]], sources: Mapping[str, Manifest]) -> None:
    for name, shape in own.items():
        manifest = sources[name]
        saved = manifest.tensors[name].shape
        # What every rank has seen for itself is stacked.
        if saved not in {shape, (len(manifest.facts["wires"]), *shape)}:
            raise UserError(
                f"{name} has shape {saved} in the checkpoint, and {shape} in the model",
                hint="set the model back to what the run began with, or start again with --resume never",
            )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


_Wires = Mapping[str, WireState]
_CODECS: Final = "codecs"


def pack_wires(states: Mapping[Member, CodecState]) -> dict[str, WireState]:
    """The codec states of a member's wires, as a checkpoint holds them."""
    return {
        _wire_name(peer): WireState(facts={_CODECS: texts_of(one.pair)}, tensors=one.tensors)
        for peer, one in states.items()
    }


def unpack_wires(saved: Mapping[str, WireState], peers: Iterable[Member]) -> dict[Member, CodecState]:
    """The codec states that `pack_wires` was given, of those of these peers that a checkpoint knows."""
    found = {peer: saved[_wire_name(peer)] for peer in peers if _wire_name(peer) in saved}
    return {
        peer: CodecState(pair=read_pair(one.facts.get(_CODECS)), tensors=one.tensors)
        for peer, one in found.items()
    }


def _wire_name(peer: Member) -> str:
    return f"{peer.cloud}.{peer.rank}"


class Keeper:
    """The checkpoints of a cloud, as one of its ranks sees them; all ranks save and load together."""

    def __init__(self, checkpoints: Checkpoints, world: World, *, stage: Stage, optimizer: Optimizer) -> None:
        self._checkpoints = checkpoints
        self._world = world
        self._stage = stage
        self._optimizer = optimizer

    def save(self, state: State) -> None:
        """Write a checkpoint; `state` is this rank's, and all but its wires is the leader's to say."""
        others = self._gather_wires(state.wires)
        weights = lazily(self._stage.tensors_by_name()) | self._observed_by_rank()
        moments = lazily(self._optimizer.tensors())
        if others is not None:
            self._checkpoints.save(replace(state, other_wires=others), weights=weights, moments=moments)
        else:
            _load_all(weights)
            _load_all(moments)

    def load(self, step: int) -> State:
        """Bring stage and optimizer back to where they were; gives this rank's state."""
        self._checkpoints.begin_from(step)
        state = State(step=step, layers=(0, 0))
        weights: dict[str, LazyTensor] = {}
        moments: dict[str, LazyTensor] = {}
        if self._world.seat.is_leader:
            state, weights, moments = self._checkpoints.read(step, stage=self._stage)
        own = self._stage.tensors_by_name()
        for name, tensor in self._sharded(weights, own):
            is_by_rank = tensor.ndim > own[name].ndim
            own[name].copy_(tensor[self._world.seat.rank] if is_by_rank else tensor)
        parameters = self._stage.parameters_by_name()
        like = {name: parameters[name.partition("/")[2]] for name in self._world.broadcast(list(moments))}
        self._optimizer.load_tensors(dict(self._sharded(moments, like)))
        cursor = self._world.broadcast(None if state.cursor is None else asdict(state.cursor))
        return replace(
            state,
            cursor=None if cursor is None else Cursor(**cursor),
            facts=self._world.broadcast(state.facts),
            wires=self._own_wires((state.wires, *state.other_wires)),
            other_wires=(),
        )

    def export(self, scratch: Path) -> dict[str, Tensor] | None:
        """The model's weights by its own names, at the leader of ranks that hold shards of them; else None.

        They are gathered into a file and mapped from there.
        """
        own = lazily(self._stage.model.state_dict())
        if not any(isinstance(one, DTensor) for one in self._stage.model.state_dict().values()):
            return None
        if not self._world.seat.is_leader:
            _load_all(own)
            return None
        write_tensors(scratch, own)
        return load_file(scratch)

    def _observed_by_rank(self) -> dict[str, LazyTensor]:
        """What each rank has seen for a bottleneck that is still to begin, stacked at the leader."""
        down = self._stage.down
        if down is None or down.has_begun or self._world.seat.num_ranks == 1:
            return {}
        own = {f"down.observed.{name}": one.cpu() for name, one in down.observed.named_buffers()}
        found = [load(one) for one in self._world.gather_bytes(save(own)) or ()]
        return lazily({name: torch.stack([one[name] for one in found]) for name in own} if found else {})

    def _sharded(
        self, tensors: Mapping[str, LazyTensor], like: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The leader's tensors at every rank, or its shard of them where `like` is sharded."""
        if self._world.seat.num_ranks == 1:
            yield from ((name, one.load()) for name, one in tensors.items())
            return
        about = {name: [list(one.shape), str(one.dtype).partition(".")[2]] for name, one in tensors.items()}
        for name, (shape, dtype) in self._world.broadcast(about).items():
            is_alike = list(like[name].shape) == shape
            # A count of steps stays on the host.
            device = _device_of(like[name]) if is_alike else torch.device("cpu")
            if name in tensors:
                full = tensors[name].load().to(device, copy=True)
            else:
                full = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            self._world.broadcast_tensor(full)
            yield name, _shard_like(full, like[name]) if is_alike else full

    def _gather_wires(self, wires: _Wires) -> tuple[_Wires, ...] | None:
        """The wires of all ranks but the first, at the leader; None elsewhere."""
        if self._world.seat.num_ranks == 1:
            return ()
        facts = self._world.gather({peer: dict(wire.facts) for peer, wire in wires.items()})
        blobs = self._world.gather_bytes(save(_flat(wires)))
        if facts is None or blobs is None:
            return None
        return tuple(_unflat(one, load(blob)) for one, blob in zip(facts[1:], blobs[1:], strict=True))

    def _own_wires(self, wires: Sequence[_Wires]) -> _Wires:
        """Of the leader's wires of all ranks, those of this one."""
        found: _Wires = {}
        for rank in range(self._world.seat.num_ranks):
            # A run whose layers lie elsewhere now has none.
            leaders = wires[rank] if rank < len(wires) else {}
            facts = self._world.broadcast({peer: dict(wire.facts) for peer, wire in leaders.items()})
            blob = self._world.broadcast_bytes(save(_flat(leaders)))
            if rank == self._world.seat.rank:
                found = _unflat(facts, load(blob))
        return found


def lazy(tensor: Tensor) -> LazyTensor:
    """A tensor that is gathered when it is needed, if ranks hold shards of it."""
    return LazyTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, load=lambda: whole(tensor))


def lazily(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    return {name: lazy(one) for name, one in tensors.items()}


def _load_all(tensors: Mapping[str, LazyTensor]) -> None:
    """Take part in gathering what the leader writes, in the order in which it does."""
    for name in in_file_order(tensors):
        tensors[name].load()


def _flat(wires: _Wires) -> dict[str, Tensor]:
    return {
        f"{peer}/{name}": one.contiguous()
        for peer, wire in wires.items()
        for name, one in wire.tensors.items()
    }


def _unflat(facts: Mapping[str, Facts], tensors: Mapping[str, Tensor]) -> _Wires:
    return {
        peer: WireState(
            facts=about,
            tensors={
                name.removeprefix(f"{peer}/"): one
                for name, one in tensors.items()
                if name.startswith(f"{peer}/")
            },
        )
        for peer, about in facts.items()
    }


def _device_of(tensor: Tensor) -> torch.device:
    return tensor.to_local().device if isinstance(tensor, DTensor) else tensor.device


def _shard_like(full: Tensor, like: Any) -> Tensor:
    if not isinstance(like, DTensor):
        return full
    # Every rank has the whole already, and takes its own shard of it.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
