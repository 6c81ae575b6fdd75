"""The checkpoints of a run: the state of all clouds at the start of a step, addressed by parameter name.

Each cloud keeps a record of its own, `step-00000120/<cloud>`, in a store. A record has named tensors and JSON
facts:

    model.layers.3.mlp.up_proj.weight                     weights, by Hugging Face's names
    boundary.4.down.weight                                halves of the bottleneck before layer 4
    optimizer/exp_avg/model.layers.3.mlp.up_proj.weight   moments, by the names of their parameters
    outer/…, feedback/…                                   what a strategy names beside them
    wire/0/west.0/…                                       codec state of rank 0's wire to a peer
    facts                                                 step, cloud, job, layers, cursor, scheduler, wires

Nobody stops for a save: a thread copies the state to the host while the next passes run, the next update
waits until it has been copied, and the thread writes the copy. Every rank writes its own shards, and a share
of what all ranks have; nothing is gathered. Rank 0 writes the manifest when the parts of all ranks are there.

    loop     Save ──┐ passes of the next step … UPDATE waits for ─┐
    thread          └─ copy to the host ──────────────────────────┴─ write, retry ──► Saved

A stage asks for the names that it owns, and takes them from any record of the step that has them, so that a
run with another layout loads what all records together hold; each rank reads the rows that it needs.

Dropout is a function of seed, step, micro-batch and layer, and the learning rate is one of the step, so
there is no generator and no schedule to save.
"""

import itertools
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from isthmus.errors import UserError
from isthmus.events import steady_s
from isthmus.job.rundir import job_of
from isthmus.model.stage import Stage
from isthmus.plan.codecs import read_pair, texts_of
from isthmus.plan.types import Member, NotStored, Saved, Stored
from isthmus.train.coding import CodecState
from isthmus.train.data.samples import Cursor
from isthmus.train.device import Device, Mark
from isthmus.train.in_cloud import World, whole
from isthmus.train.loop import OnEvent
from isthmus.train.members import SavedSteps
from isthmus.train.optimizer import Optimizer
from isthmus.train.records import (
    ASIDE_FILE,
    MANIFEST_FILE,
    Facts,
    Manifest,
    Records,
    Rows,
    StoredTensor,
    merged,
    safetensors_data,
    widest_first,
)
from isthmus.train.store import Store, open_store
from isthmus.train.wire import Failure

_RECORD: Final = re.compile(r"step-([0-9]{8,18})/([a-z0-9-]+)")
_OPTIMIZER: Final = "optimizer/"
_WIRE: Final = "wire/"
_CODECS: Final = "codecs"
_OBSERVED: Final = "down.observed."
_MAX_TOLD: Final = 3
_FIRST_DELAY_S: Final = 1.0
_MAX_DELAY_S: Final = 60.0
_LONGEST_POLL_S: Final = 1.0
_CURE: Final = "see that it can be reached and written to and has room"

Note = Callable[[str], None]
OnSaved = Callable[[int, float, int], None]
"""Is told, on the thread that writes: the step, when its save began, and the bytes of this rank's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a rank beside weights and moments; `step` is the next one, and begins at `cursor`."""

    step: int
    cursor: Cursor | None = None
    facts: Facts = field(default_factory=dict)
    """Those of the scheduler, as JSON values."""
    wires: Mapping[Member, CodecState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one of the ranks of a cloud writes of a step; `session` is the same at all of them."""

    rank: int = 0
    num_ranks: int = 1
    session: str = "0"
    tensors: Mapping[str, Rows] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    def suffix(self, rank: int) -> str:
        return f"{rank}.{self.session}"


class Checkpoints:
    """The checkpoints of one cloud in a run; `job` is the digest of what the job means."""

    def __init__(
        self, store: Store, *, cloud: str, keep: int = 2, job: str = "", note: Note = lambda _: None
    ) -> None:
        self._records = Records(store)
        self._cloud = cloud
        self._keep = keep
        self._job = job
        self._note = note
        self._damaged: set[int] = set()
        self._written: set[int] = set()
        self._began_from: int | None = None

    @property
    def store(self) -> Store:
        return self._records.store

    def steps(self) -> tuple[int, ...]:
        """The steps that have a complete record here, in order."""
        with self._reached():
            return tuple(step for step, files in self._own().items() if MANIFEST_FILE in files)

    def inspect(self) -> SavedSteps:
        """Verify all records: interrupted ones are removed, damaged ones are told and do not count."""
        with self._reached():
            for step, files in self._own().items():
                self._remove_leftovers(step, files)
        for step in self.steps():
            reason = self._records.check(self._name(step))
            if reason is not None:
                self._damaged.add(step)
                self._note(f"the checkpoint {self._name(step)} is left out: {reason}")
        good = tuple(step for step in self.steps() if step not in self._damaged)
        return SavedSteps(whole=good, damaged=tuple(sorted(self._damaged)))

    def begin_from(self, step: int) -> None:
        """Continue from a step: records of later steps no longer count once a new one is saved."""
        self._began_from = step

    def save(
        self, step: int, part: Part, *, safe_step: int | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        """Write the part of one rank; the leader then waits for the others and makes the record complete.

        An OSError leaves what was saved before as it is; `check` raises one to end it early.
        """
        name = self._name(step)
        own = self._records.put(name, part.suffix(part.rank), part.tensors, part.facts, check=check)
        if part.rank:
            self._records.commit(name, own, f"part.{part.suffix(part.rank)}.json")
            return
        parts = [own, *self._others(name, part, check)]
        facts = {
            "step": step,
            "cloud": self._cloud,
            "job": self._job,
            **part.facts,
            "wires": [one.facts["wires"] for one in parts],
        }
        self._records.commit(name, merged(parts, facts))
        self._written.add(step)
        self._damaged.discard(step)
        self._retire(newest=step, safe_step=safe_step)

    def read(
        self, step: int, shapes: Mapping[str, tuple[int, ...]], *, layers: range
    ) -> tuple[Facts, dict[str, StoredTensor]]:
        """The facts of a step, and the tensors of these names with their moments, from all records.

        The state of wires is that of our own record, if it has the same layers.
        """
        found = self._manifests(step, shapes.keys())
        sources = _find(shapes, found, step=step)
        own = found.get(self._cloud)
        has_same_layers = own is not None and list(own.facts["layers"]) == [layers.start, layers.stop]
        tensors: dict[str, StoredTensor] = {}
        for cloud, manifest in found.items():
            has_wires = manifest is own and has_same_layers
            names = [
                name
                for name in manifest.tensors
                if sources.get(_parameter_of(name)) is manifest or (has_wires and name.startswith(_WIRE))
            ]
            tensors |= self._records.get(self._name(step, cloud), manifest, names)
        every = [own.facts] if own is not None and has_same_layers else [one.facts for one in found.values()]
        facts = {key: next((one[key] for one in every if one[key]), None) for key in ("cursor", "scheduler")}
        return {**facts, "wires": every[0]["wires"] if has_same_layers else []}, tensors

    def _manifests(self, step: int, wanted: Set[str]) -> dict[str, Manifest]:
        """The manifest of our own record, where that has all that is wanted, or those of all records here."""
        here = [cloud for cloud, at, files in self._all() if at == step and MANIFEST_FILE in files]
        found: dict[str, Manifest] = {}
        for cloud in sorted(here, key=lambda one: (one != self._cloud, one)):
            found[cloud] = self._manifest(self._name(step, cloud))
            if cloud == self._cloud and wanted <= found[cloud].tensors.keys():
                break
        return found

    def _manifest(self, name: str) -> Manifest:
        manifest = self._records.manifest(name)
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
        if reason is not None or manifest.missing is not None:
            raise UserError(
                f"the checkpoint {name} cannot be used: {reason or f'it lacks rows of {manifest.missing}'}",
                hint="put that of this run in its place, or start again with --resume never",
            )
        return manifest

    def _others(self, name: str, part: Part, check: Callable[[], None]) -> list[Manifest]:
        """The parts of the other ranks, which come at any time after our own."""
        found: list[Manifest] = []
        pause, pause_s = threading.Event(), 0.01
        while len(found) < part.num_ranks - 1:
            try:
                file = f"part.{part.suffix(len(found) + 1)}.json"
                found.append(self._records.read_manifest(name, file))
            except FileNotFoundError:
                check()
                pause.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return found

    def _retire(self, *, newest: int, safe_step: int | None) -> None:
        """Set the records of steps aside that were lost, and remove old ones, now that a new one is complete.

        Those set aside are kept until their step is reached again.
        """
        base = newest if self._began_from is None else self._began_from
        own = self._own()
        self._remove_leftovers(newest, own[newest])
        for step, files in own.items():
            is_lost = step > newest or (step > base and step not in self._written)
            if step in self._damaged:
                self._note(f"removed {self._name(step)}, a damaged checkpoint: step {newest} is whole")
                self._records.remove(self._name(step), files)
            elif ASIDE_FILE in files and step < newest:
                self._records.remove(self._name(step), files)
            elif MANIFEST_FILE in files and is_lost:
                self._records.rename(self._name(step), MANIFEST_FILE, ASIDE_FILE)
        self._damaged.clear()
        steps = self.steps()
        kept = {*steps[-self._keep :], *(one for one in steps if safe_step is not None and one >= safe_step)}
        for step in set(steps).difference(kept):
            self._records.remove(self._name(step), own[step])

    def _remove_leftovers(self, step: int, files: Set[str]) -> None:
        """Remove the files of a record that no manifest lists: of a save that was cut short."""
        name, listed = self._name(step), set[str]()
        if MANIFEST_FILE in files:
            try:
                listed = {MANIFEST_FILE, *self._records.manifest(name).files}
            except UserError:
                # It is found damaged, and kept until a newer one is whole.
                return
        elif ASIDE_FILE in files:
            return
        else:
            self._note(f"removed {name}, a checkpoint that was cut short")
        self._records.remove(name, files - listed)

    def _own(self) -> dict[int, set[str]]:
        """The files of this cloud's records, by step, in order."""
        return {step: files for cloud, step, files in self._all() if cloud == self._cloud}

    def _all(self) -> list[tuple[str, int, set[str]]]:
        return _known(self._records)

    def _reached(self) -> Any:
        return _reaching(self.store)

    def _name(self, step: int, cloud: str | None = None) -> str:
        return f"step-{step:08d}/{cloud or self._cloud}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """The records of one step of a run; `problem` says why they do not restore it."""

    step: int
    clouds: tuple[str, ...]
    num_bytes: int
    problem: str | None = None


def saved_steps(run: Path, *, verify: bool = False) -> tuple[SavedStep, ...]:
    """The steps of a run that have records in its store, in order.

    A step restores a run when each cloud that has saved here has a complete record of it. With `verify` every
    byte is read and compared with the digests of the manifests.
    """
    records = Records(_store_of(run))
    with _reaching(records.store):
        every = [one for one in _known(records) if ASIDE_FILE not in one[2]]
    clouds = {cloud for cloud, *_ in every}
    found = []
    for step, group in itertools.groupby(sorted(every, key=lambda one: one[1]), key=lambda one: one[1]):
        own = sorted(cloud for cloud, _, files in group if MANIFEST_FILE in files)
        problems = [f"no complete record of {cloud}" for cloud in sorted(clouds.difference(own))]
        num_bytes = 0
        for cloud in own:
            name = f"step-{step:08d}/{cloud}"
            reason = records.check(name) if verify else None
            try:
                num_bytes += records.manifest(name).num_bytes
            except UserError as error:
                reason = reason or error.message
            problems += [f"{cloud}: {reason}"] if reason else []
        problem = "; ".join(problems) or None
        found.append(SavedStep(step=step, clouds=tuple(own), num_bytes=num_bytes, problem=problem))
    return tuple(found)


def prune_steps(run: Path, *, keep: int) -> tuple[SavedStep, ...]:
    """Remove all steps but the newest ones that restore the run; returns those that were removed.

    Nothing is removed where no step restores the run.
    """
    steps = saved_steps(run, verify=True)
    kept = [one.step for one in steps if one.problem is None][-keep:]
    if not kept:
        return ()
    removed = tuple(one for one in steps if one.step not in kept)
    records = Records(_store_of(run))
    with _reaching(records.store):
        for cloud, step, files in _known(records):
            if step in {one.step for one in removed}:
                records.remove(f"step-{step:08d}/{cloud}", files)
    return removed


def _store_of(run: Path) -> Store:
    job = job_of(run)
    return open_store(run, None if job is None else job.checkpoint.store)


@contextmanager
def _reaching(store: Store) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the checkpoints in {store.place} cannot be reached: {_reason_of(error)}", hint=_CURE
        ) from error


def _reason_of(error: OSError) -> str:
    return error.strerror or str(error)


def _known(records: Records) -> list[tuple[str, int, set[str]]]:
    """The cloud, the step and the files of each record; what is none of ours is left alone."""
    matches = ((_RECORD.fullmatch(name), files) for name, files in records.list().items())
    return [(match[2], int(match[1]), files) for match, files in matches if match]


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
        # What each rank has observed for itself has a row for each rank.
        if shape not in (saved, saved[1:] if _OBSERVED in name else saved):
            raise UserError(
                f"{name} has shape {saved} in the checkpoint, and {shape} in the model",
                hint="set the model back to what the run began with, or start again with --resume never",
            )
    return sources


def _range_of(manifest: Manifest) -> str:
    start, stop = manifest.facts["layers"]
    return f"{start} to {stop - 1}"


def load_weights(
    checkpoints: Checkpoints, stage: Stage, step: int, *, rank: int = 0
) -> dict[str, StoredTensor]:
    """Set the weights of a stage to what was saved; gives all that the records have of them."""
    values = {_saved_name(name, stage.layers): one for name, one in stage.tensors_by_name().items()}
    shapes = {name: tuple(one.shape) for name, one in values.items()}
    _, found = checkpoints.read(step, shapes, layers=stage.layers)
    with torch.no_grad():
        for name, value in values.items():
            _set(value, found[name], rank)
    return found


def _set(value: Tensor, stored: StoredTensor, rank: int) -> None:
    """Set a tensor, or this rank's shard of it, to what was saved."""
    if len(stored.shape) > value.ndim:
        # What a rank has observed that is there no more is lost; one that is new has observed nothing.
        if rank < stored.shape[0]:
            value.copy_(stored.load(rank, rank + 1)[0])
        return
    own = rows_of(value)
    own.own.copy_(stored.load(own.start, own.start + len(own.own)) if value.ndim else stored.load())


def rows_of(tensor: Tensor) -> Rows:
    """The rows of a tensor that this rank has."""
    if not isinstance(tensor, DTensor):
        return Rows(own=tensor.detach(), shape=tuple(tensor.shape))
    (placement,) = tensor.placements
    own, shape = tensor.to_local().detach(), tuple(tensor.shape)
    if isinstance(placement, Replicate):
        return Rows(own=own, shape=shape)
    if not placement.is_shard(0):
        raise ValueError(f"a tensor that is sharded by {placement}")
    mesh = tensor.device_mesh
    num_rows = -(-shape[0] // mesh.size())
    return Rows(own=own, shape=shape, start=min(shape[0], mesh.get_local_rank() * num_rows))


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

    A save that fails is tried again for `patience_s`.
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
    ) -> None:
        self._checkpoints = checkpoints
        self._world = world
        self._stage = stage
        self._optimizer = optimizer
        self._device = device or Device("cpu")
        self._extra = extra
        self._note = note
        self._patience_s = patience_s
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
        with _reaching(store):
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
        on_saved: OnSaved = lambda _step, _begun_s, _num_bytes: None,
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
        self._under_way = self._thread.submit(self._write, state, snapshot, copy, safe_step, on_saved)
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
        own = {_saved_name(name, self._stage.layers): name for name in self._stage.tensors_by_name()}
        shapes = {saved: tuple(one.shape) for saved, one in self._weights().items()}
        facts, found = self._checkpoints.read(step, shapes, layers=self._stage.layers)
        with torch.no_grad():
            for saved, value in self._weights().items():
                _set(value, found[saved], self._world.rank)
        self._load_moments({name: one for name, one in found.items() if name.startswith(_OPTIMIZER)}, own)
        return State(
            step=step,
            cursor=None if facts["cursor"] is None else Cursor(**facts["cursor"]),
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
        layers = self._stage.layers
        own = {_saved_name(name, layers): one for name, one in self._stage.tensors_by_name().items()}
        return {**own, **self._extra()}

    def _moments(self) -> dict[str, Tensor]:
        found = {}
        for name, one in self._optimizer.tensors().items():
            moment, _, parameter = name.partition("/")
            found[f"{_OPTIMIZER}{moment}/{_saved_name(parameter, self._stage.layers)}"] = one
        return found

    def _buffers(self) -> dict[str, Tensor]:
        """What passes may change of the stage; it is small."""
        names = {name.removeprefix("model.") for name, _ in self._stage.named_buffers()}
        own = self._stage.tensors_by_name()
        return {_saved_name(name, self._stage.layers): own[name] for name in own.keys() & names}

    def _changed_by_passes(self, buffers: Mapping[str, Tensor]) -> dict[str, Rows]:
        """Copies that are made at once: of what each rank observes for itself, and of what all have."""
        down, rank, num_ranks = self._stage.down, self._world.rank, self._world.num_ranks
        by_rank = {name for name in buffers if down is not None and not down.has_begun and _OBSERVED in name}
        found = {
            name: Rows(own=buffers[name].clone()[None], shape=(num_ranks, *buffers[name].shape), start=rank)
            for name in by_rank
        }
        if self._world.is_leader:
            common = {name: buffers[name].clone() for name in buffers.keys() - by_rank}
            found |= {name: Rows(own=one, shape=tuple(one.shape)) for name, one in common.items()}
        return found

    def _wires(self, state: State) -> dict[str, Rows]:
        """The codec state of this rank's wires, which are copies already."""
        return {
            f"{_WIRE}{self._world.rank}/{_wire_name(peer)}/{name}": Rows(own=one, shape=tuple(one.shape))
            for peer, wire in state.wires.items()
            for name, one in wire.tensors.items()
        }

    def _share(self, tensors: Mapping[str, Tensor]) -> dict[str, Rows]:
        """What this rank writes: its shards, and some of what all ranks have, which are dealt by size."""
        own = {name: rows_of(one) for name, one in tensors.items()}
        common = [name for name, one in tensors.items() if not isinstance(one, DTensor)]
        loads = [0] * self._world.num_ranks
        for name in sorted(common, key=lambda name: (-own[name].own.nbytes, name)):
            rank = loads.index(min(loads))
            loads[rank] += max(own[name].own.nbytes, 1)
            if rank != self._world.rank:
                del own[name]
        return own

    # The thread.

    def _write(
        self,
        state: State,
        snapshot: _Snapshot,
        copy: Callable[[], dict[str, Rows]],
        safe_step: int | None,
        on_saved: OnSaved,
    ) -> Saved:
        try:
            copies = copy()
        finally:
            snapshot.copied.set()
        failure = self._persist(state.step, self._part(state, copies), safe_step)
        if failure is not None:
            return Saved(state.step, failure)
        on_saved(state.step, snapshot.begun_s, sum(rows.own.nbytes for rows in copies.values()))
        save_s = steady_s() - snapshot.begun_s
        return Saved(state.step, Stored(save_s=save_s, stall_s=snapshot.stall_s))

    def _copy(
        self,
        snapshot: _Snapshot,
        changing: Mapping[str, Rows],
        weights: Mapping[str, Tensor],
        after: Mark,
    ) -> dict[str, Rows]:
        """Copies of all that this rank writes, once the device has come to a mark."""
        with self._lane.work(after=after):
            own = self._share({**weights, **self._moments()}) | dict(changing)
            copies = {name: self._on_host(name, rows) for name, rows in own.items()}
            snapshot.mark = self._device.mark()
            snapshot.copied.set()
        return copies

    def _on_host(self, name: str, rows: Rows) -> Rows:
        """A copy on the host, in memory that is used again and again."""
        host, own = self._memory.get(name), rows.own
        if host is None or host.shape != own.shape or host.dtype != own.dtype:
            host = torch.empty(own.shape, dtype=own.dtype, pin_memory=self._device.is_accelerator)
            self._memory[name] = host
        return replace(rows, own=host.copy_(own, non_blocking=True))

    def _part(self, state: State, tensors: Mapping[str, Rows]) -> Part:
        layers = self._stage.layers
        return Part(
            rank=self._world.rank,
            num_ranks=self._world.num_ranks,
            session=self._session,
            tensors=tensors,
            facts={
                "layers": [layers.start, layers.stop],
                "cursor": None if state.cursor is None else asdict(state.cursor),
                "scheduler": dict(state.facts),
                "wires": {
                    _wire_name(peer): {_CODECS: texts_of(one.pair)} for peer, one in state.wires.items()
                },
            },
        )

    def _persist(self, step: int, part: Part, safe_step: int | None) -> NotStored | None:
        """Write, again and again while there is hope."""
        end_s, delay_s = steady_s() + self._patience_s, _FIRST_DELAY_S
        place = self._checkpoints.store.place
        while True:
            try:
                self._checkpoints.save(step, part, safe_step=safe_step, check=self._check)
            except OSError as error:
                what = f"step {step} cannot be saved in {place}: {_reason_of(error)}"
            else:
                return None
            if self._is_closing.is_set() or steady_s() + delay_s > end_s:
                return NotStored(
                    reason=what, hint=f"{_CURE}; the same command then continues from what was saved last"
                )
            self._note(f"{what}; training continues, and it is tried again in {delay_s:g} s: {_CURE}")
            self._is_closing.wait(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    def _check(self) -> None:
        if self._is_closing.is_set():
            raise OSError("the run has ended")

    def _report(self, done: OnEvent, ended: "Future[Saved]") -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            done(Failure(member=Member("", self._world.rank), error=error))
        elif not ended.cancelled():
            done(ended.result())

    # What is loaded.

    def _load_moments(self, moments: Mapping[str, StoredTensor], own: Mapping[str, str]) -> None:
        """Load the moments of one parameter at a time."""
        parameters = self._stage.parameters_by_name()
        in_order = sorted(moments, key=_parameter_of)
        for saved, names in itertools.groupby(in_order, key=_parameter_of):
            like = parameters[own[saved]]
            self._optimizer.load_tensors(
                {f"{_moment_of(name)}/{own[saved]}": _moment(moments[name], like) for name in names}
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
            for prefix in [f"{_WIRE}{rank}/{peer}/"]
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
