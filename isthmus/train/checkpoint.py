"""The checkpoints of a run: the state of all clouds at the start of a step, addressed by parameter name.

Each cloud keeps a record of its own, `step-00000120/<cloud>`, in a `Store`. A record has named tensors and
JSON facts:

    model.layers.3.mlp.up_proj.weight                     weights, by Hugging Face's names
    boundary.4.down.weight                                halves of the bottleneck before layer 4
    optimizer/exp_avg/model.layers.3.mlp.up_proj.weight   moments, by the names of their parameters
    wire/0/west.0/…                                       codec state of rank 0's wire to a peer
    facts                                                 step, cloud, job, layers, cursor, scheduler, wires

A stage asks for the names that it owns, and takes them from any record of the step that has them, so that a
run with another layout loads what all records together hold. Rank 0 of a cloud writes and reads for all its
ranks, so only its disk counts. Sharded tensors are gathered, written, read and broadcast one at a time: no
rank ever has all weights or moments of a sharded stage in its memory.

Dropout is a function of seed, step, micro-batch and layer, and the learning rate is one of the step, so
there is no generator and no schedule to save.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field
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
    files_of,
    load_in_turn,
    write_tensors,
)

CHECKPOINTS_FOLDER: Final = "checkpoints"
_RECORD: Final = re.compile(r"step-[0-9]{8,18}/([a-z0-9-]+)(?:\.aside)?")
_ASIDE: Final = ".aside"
_OPTIMIZER: Final = "optimizer/"
_WIRE: Final = "wire/"
_CODECS: Final = "codecs"
_MAX_TOLD: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a rank beside weights and moments; `step` is the next one, and begins at `cursor`."""

    step: int
    cursor: Cursor | None = None
    facts: Facts = field(default_factory=dict)
    """Those of the scheduler, as JSON values."""
    wires: Mapping[Member, CodecState] = field(default_factory=dict)


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
        """The steps that have a complete record here, in order."""
        return tuple(step for step, _ in self._own(is_aside=False))

    def inspect(self, note: Callable[[str], None]) -> SavedSteps:
        """Verify all records: interrupted ones are removed, damaged ones are reported and do not count."""
        for name in self._store.unfinished():
            if _cloud_of(name) == self._cloud:
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
        """Continue from a step: records of later steps no longer count once a new one is saved."""
        self._began_from = step

    def save(self, step: int, tensors: Mapping[str, LazyTensor], facts: Facts) -> None:
        """Write a record, then remove those that are not to be kept."""
        name = self._name(step)
        try:
            self._store.put(name, tensors, {"step": step, "cloud": self._cloud, "job": self._job, **facts})
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise UserError(
                f"the checkpoint {name} cannot be written: {reason or error}",
                hint="make room on the disk and start again: the run continues from the one before",
            ) from error
        self._written.add(step)
        self._damaged.discard(step)
        self._retire(newest=step)

    def read(
        self, step: int, shapes: Mapping[str, tuple[int, ...]], *, layers: range
    ) -> tuple[Facts, dict[str, LazyTensor]]:
        """The facts of a step, and the tensors of these names with their moments, from all records.

        The state of wires is that of our own record, if it has the same layers.
        """
        found = self._manifests(step, shapes.keys())
        sources = _find(shapes, found, step=step)
        own = found.get(self._cloud)
        has_same_layers = own is not None and list(own.facts["layers"]) == [layers.start, layers.stop]
        tensors: dict[str, LazyTensor] = {}
        for cloud, manifest in found.items():
            has_wires = manifest is own and has_same_layers
            names = [
                name
                for name in manifest.tensors
                if sources.get(_parameter_of(name)) is manifest or (has_wires and name.startswith(_WIRE))
            ]
            tensors |= self._store.get(self._name(step, cloud), names)
        every = [own.facts] if own is not None and has_same_layers else [one.facts for one in found.values()]
        facts = {key: next((one[key] for one in every if one[key]), None) for key in ("cursor", "scheduler")}
        return {**facts, "wires": every[0]["wires"] if has_same_layers else []}, tensors

    def _manifests(self, step: int, wanted: Set[str]) -> dict[str, Manifest]:
        """The manifest of our own record, where that has all that is wanted, or those of all records here."""
        names = [name for name in self._store.names() if not name.endswith(_ASIDE)]
        here = [cloud for name in names if (cloud := _cloud_of(name)) and _step_of(name) == step]
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
        """Rename the records of steps that were lost, and remove old ones, now that a new one is complete.

        Renamed records are kept until their step is reached again.
        """
        base = newest if self._began_from is None else self._began_from
        for step in self.steps():
            if step > newest or (step > base and step not in self._written):
                self._store.rename(self._name(step), f"{self._name(step)}{_ASIDE}")
        for step, name in self._own(is_aside=True):
            if step <= newest:
                self._store.remove(name)
        whole = [step for step in self.steps() if step not in self._damaged]
        for step in set(self.steps()).difference(whole[-self._keep :]):
            self._store.remove(self._name(step))

    def _own(self, *, is_aside: bool) -> list[tuple[int, str]]:
        """The steps and names of this cloud's records, those that were renamed or the others."""
        names = [name for name in self._store.names() if _cloud_of(name) == self._cloud]
        return [(_step_of(name), name) for name in names if name.endswith(_ASIDE) == is_aside]

    def _name(self, step: int, cloud: str | None = None) -> str:
        return f"step-{step:08d}/{cloud or self._cloud}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """The records of one step in a run directory; `problem` says why they do not restore a run."""

    step: int
    clouds: tuple[str, ...]
    num_bytes: int
    problem: str | None = None


def saved_steps(run: Path, *, verify: bool = False) -> tuple[SavedStep, ...]:
    """The steps that have records in a run directory, in order.

    A step restores a run when each cloud that has saved here has a complete record of it. With `verify` every
    byte is read and compared with the digests of the manifests.
    """
    store = DiskStore(run / CHECKPOINTS_FOLDER)
    records = [name for name in store.names() if _cloud_of(name) and not name.endswith(_ASIDE)]
    partial = [name for name in store.unfinished() if _cloud_of(name)]
    clouds = {_cloud_of(name) for name in (*records, *partial)}
    found = []
    for step in sorted({_step_of(name) for name in (*records, *partial)}):
        own = [name for name in records if _step_of(name) == step]
        missing = sorted(str(one) for one in clouds - {_cloud_of(name) for name in own})
        problems = [f"no complete record of {cloud}" for cloud in missing]
        num_bytes = 0
        for name in own:
            reason = store.check(name) if verify else None
            try:
                num_bytes += sum(file.num_bytes for file in store.manifest(name).files.values())
            except UserError as error:
                reason = reason or error.message
            problems += [f"{_cloud_of(name)}: {reason}"] if reason else []
        names = tuple(str(_cloud_of(name)) for name in own)
        problem = "; ".join(problems) or None
        found.append(SavedStep(step=step, clouds=names, num_bytes=num_bytes, problem=problem))
    return tuple(found)


def prune_steps(run: Path, *, keep: int) -> tuple[SavedStep, ...]:
    """Remove all steps but the newest ones that restore a run; returns those that were removed.

    Nothing is removed where no step restores the run.
    """
    steps = saved_steps(run, verify=True)
    kept = [one.step for one in steps if one.problem is None][-keep:]
    if not kept:
        return ()
    store = DiskStore(run / CHECKPOINTS_FOLDER)
    removed = tuple(one for one in steps if one.step not in kept)
    for name in (*store.names(), *store.unfinished()):
        if _cloud_of(name) and _step_of(name) in {one.step for one in removed}:
            store.remove(name)
    return removed


def _step_of(record: str) -> int:
    return int(record.partition("/")[0].removeprefix("step-"))


def _cloud_of(record: str) -> str | None:
    """The cloud that a record belongs to; None for a name that is none of ours."""
    match = _RECORD.fullmatch(record)
    return None if match is None else match[1]


def _saved_name(name: str, layers: range) -> str:
    """The name of a stage's tensor in all records: halves of bottlenecks are named by their cut's layer."""
    half, _, _ = name.partition(".")
    cut = {"down": layers.stop, "up": layers.start}.get(half)
    return name if cut is None else f"boundary.{cut}.{name}"


def _moment_of(name: str) -> str:
    return name.removeprefix(_OPTIMIZER).partition("/")[0]


def _parameter_of(name: str) -> str:
    """The parameter that a saved weight or moment belongs to; the name itself for others."""
    return name.removeprefix(_OPTIMIZER).partition("/")[2] if name.startswith(_OPTIMIZER) else name


def _find(
    shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, Manifest], *, step: int
) -> dict[str, Manifest]:
    """The first record that has each name, in the shape that the model has."""
    sources: dict[str, Manifest] = {}
    for manifest in found.values():
        for name in manifest.tensors.keys() & shapes.keys():
            sources.setdefault(name, manifest)
    missing = [name for name in shapes if name not in sources]
    if missing:
        more = f" and {len(missing) - _MAX_TOLD} more" if len(missing) > _MAX_TOLD else ""
        here = ", ".join(f"{cloud!r} (layers {_range_of(one)})" for cloud, one in found.items())
        raise UserError(
            f"the checkpoint of step {step} lacks {', '.join(missing[:_MAX_TOLD])}{more}, "
            f"in the records that are here: {here or 'none'}",
            hint="copy the records of the other clouds here, or start again with --resume never",
        )
    for name, shape in shapes.items():
        saved = sources[name].tensors[name].shape
        # What each rank has observed for itself is stacked.
        if saved not in {shape, (len(sources[name].facts["wires"]), *shape)}:
            raise UserError(
                f"{name} has shape {saved} in the checkpoint, and {shape} in the model",
                hint="set the model back to what the run began with, or start again with --resume never",
            )
    return sources


def _range_of(manifest: Manifest) -> str:
    start, stop = manifest.facts["layers"]
    return f"{start} to {stop - 1}"


def load_weights(checkpoints: Checkpoints, stage: Stage, step: int) -> None:
    """Set the weights of a stage that this process holds alone to what was saved."""
    values = {_saved_name(name, stage.layers): one for name, one in stage.tensors_by_name().items()}
    shapes = {name: tuple(one.shape) for name, one in values.items()}
    _, found = checkpoints.read(step, shapes, layers=stage.layers)
    with torch.no_grad():
        for name, value in values.items():
            tensor = found[name].load()
            value.copy_(tensor[0] if tensor.ndim > value.ndim else tensor)


class Keeper:
    """Saves and loads the state of one rank; all ranks of a cloud call it together."""

    def __init__(self, checkpoints: Checkpoints, world: World, *, stage: Stage, optimizer: Optimizer) -> None:
        self._checkpoints = checkpoints
        self._world = world
        self._stage = stage
        self._optimizer = optimizer

    def save(self, state: State) -> None:
        """Write a record; `state` is this rank's, and its wires are all that others do not have as well."""
        world, layers = self._world, self._stage.layers
        codecs = {_wire_name(peer): {_CODECS: texts_of(one.pair)} for peer, one in state.wires.items()}
        own = {
            f"{_WIRE}{world.rank}/{_wire_name(peer)}/{name}": tensor
            for peer, one in state.wires.items()
            for name, tensor in one.tensors.items()
        }
        wires = self._world.gather(codecs)
        blobs = self._world.gather_bytes(_packed(own))
        tensors = lazily(self._saved_tensors()) | self._observed_by_rank()
        if wires is None or blobs is None:
            load_in_turn(tensors)
            return
        for blob in blobs:
            tensors |= lazily(load(blob))
        facts = {
            "layers": [layers.start, layers.stop],
            "cursor": None if state.cursor is None else asdict(state.cursor),
            "scheduler": dict(state.facts),
            "wires": wires,
        }
        self._checkpoints.save(state.step, tensors, facts)

    def load(self, step: int) -> State:
        """Set stage and optimizer to what was saved; returns this rank's state."""
        self._checkpoints.begin_from(step)
        own = {_saved_name(name, self._stage.layers): name for name in self._stage.tensors_by_name()}
        facts: Facts = {}
        found: dict[str, LazyTensor] = {}
        if self._world.is_leader:
            values = self._stage.tensors_by_name()
            shapes = {saved: tuple(values[name].shape) for saved, name in own.items()}
            facts, found = self._checkpoints.read(step, shapes, layers=self._stage.layers)
        self._load_weights({name: one for name, one in found.items() if name in own}, own)
        self._load_moments({name: one for name, one in found.items() if name.startswith(_OPTIMIZER)}, own)
        facts = self._world.broadcast(facts)
        return State(
            step=step,
            cursor=None if facts["cursor"] is None else Cursor(**facts["cursor"]),
            facts=facts["scheduler"] or {},
            wires=self._load_wires(found, facts["wires"]),
        )

    def export(self, scratch: Path) -> dict[str, Tensor] | None:
        """The model's weights by its own names, at the leader of ranks that hold shards of them; else None.

        They are gathered into a file and mapped from there.
        """
        tensors = self._stage.model.state_dict()
        if not any(isinstance(one, DTensor) for one in tensors.values()):
            return None
        own = lazily(tensors)
        if not self._world.is_leader:
            load_in_turn(own)
            return None
        (in_order,) = files_of(own).values()
        write_tensors(scratch, in_order)
        return load_file(scratch)

    def _saved_tensors(self) -> dict[str, Tensor]:
        """Weights and moments by their names in records."""
        layers = self._stage.layers
        tensors = {_saved_name(name, layers): one for name, one in self._stage.tensors_by_name().items()}
        for name, one in self._optimizer.tensors().items():
            moment, _, parameter = name.partition("/")
            tensors[f"{_OPTIMIZER}{moment}/{_saved_name(parameter, layers)}"] = one
        return tensors

    def _observed_by_rank(self) -> dict[str, LazyTensor]:
        """What each rank has observed for a bottleneck that has not begun, stacked at the leader."""
        down = self._stage.down
        if down is None or down.has_begun or self._world.num_ranks == 1:
            return {}
        own = {
            _saved_name(f"down.observed.{name}", self._stage.layers): one.cpu()
            for name, one in down.observed.named_buffers()
        }
        found = [load(one) for one in self._world.gather_bytes(save(own)) or ()]
        return lazily({name: torch.stack([one[name] for one in found]) for name in own} if found else {})

    def _load_weights(self, weights: Mapping[str, LazyTensor], own: Mapping[str, str]) -> None:
        values = self._stage.tensors_by_name()
        for saved, tensor in self._at_every_rank(weights, lambda saved: values[own[saved]]):
            value = values[own[saved]]
            is_by_rank = tensor.ndim > value.ndim
            value.copy_(tensor[self._world.rank] if is_by_rank else tensor)

    def _load_moments(self, moments: Mapping[str, LazyTensor], own: Mapping[str, str]) -> None:
        """Load the moments of one parameter at a time."""
        parameters = self._stage.parameters_by_name()
        in_order = {name: moments[name] for name in sorted(moments, key=_parameter_of)}
        found = self._at_every_rank(in_order, lambda name: parameters[own[_parameter_of(name)]])
        for saved, group in itertools.groupby(found, key=lambda one: _parameter_of(one[0])):
            self._optimizer.load_tensors({f"{_moment_of(name)}/{own[saved]}": one for name, one in group})

    def _load_wires(self, found: Mapping[str, LazyTensor], wires: list[Any]) -> dict[Member, CodecState]:
        """The wires of this rank, from the leader, which has read those of all; none for other layers."""
        own: dict[Member, CodecState] = {}
        for rank, peers in enumerate(wires[: self._world.num_ranks]):
            prefix = f"{_WIRE}{rank}/"
            leaders = {name: one.load() for name, one in found.items() if name.startswith(prefix)}
            tensors = load(self._world.broadcast_bytes(_packed(leaders)))
            if rank == self._world.rank:
                own = {
                    _peer_of(peer): CodecState(
                        pair=read_pair(about.get(_CODECS)), tensors=_below(f"{prefix}{peer}/", tensors)
                    )
                    for peer, about in peers.items()
                }
        return own

    def _at_every_rank(
        self, tensors: Mapping[str, LazyTensor], like: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The leader's tensors at every rank, or its shard of them where `like` is sharded."""
        if self._world.num_ranks == 1:
            yield from ((name, one.load()) for name, one in tensors.items())
            return
        about = {name: [list(one.shape), str(one.dtype).partition(".")[2]] for name, one in tensors.items()}
        for name, (shape, dtype) in self._world.broadcast(about).items():
            target = like(name)
            is_alike = list(target.shape) == shape
            # A count of steps stays on the host.
            device = _device_of(target) if is_alike else torch.device("cpu")
            if name in tensors:
                full = tensors[name].load().to(device, copy=True)
            else:
                full = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            self._world.broadcast_tensor(full)
            yield name, _shard_like(full, target) if is_alike else full


def lazy(tensor: Tensor) -> LazyTensor:
    """A tensor that is gathered when it is loaded, if ranks hold shards of it."""
    return LazyTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, load=lambda: whole(tensor))


def lazily(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    return {name: lazy(one) for name, one in tensors.items()}


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    # safetensors refuses tensors that share memory.
    return save({name: one.detach().cpu().clone().contiguous() for name, one in tensors.items()})


def _wire_name(peer: Member) -> str:
    return f"{peer.cloud}.{peer.rank}"


def _peer_of(wire_name: str) -> Member:
    cloud, _, rank = wire_name.rpartition(".")
    return Member(cloud, int(rank))


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


def _device_of(tensor: Tensor) -> torch.device:
    return tensor.to_local().device if isinstance(tensor, DTensor) else tensor.device


def _shard_like(full: Tensor, like: Any) -> Tensor:
    if not isinstance(like, DTensor):
        return full
    # Every rank has the whole already, and takes its own shard of it.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
