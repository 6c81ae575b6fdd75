"""The checkpoints of a run: the state of all clouds at the start of a step, addressed by parameter name.

Each cloud keeps a record of its own, `step-00000120/<cloud>`, in a store. A record has named tensors and JSON
facts:

    model.layers.3.mlp.up_proj.weight                     weights, by Hugging Face's names
    boundary.4.down.weight                                halves of the bottleneck before layer 4
    optimizer/exp_avg/model.layers.3.mlp.up_proj.weight   moments, by the names of their parameters
    outer/…, feedback/…                                   what a strategy names beside them
    wire/0/west.0/…                                       codec state of rank 0's wire to a peer
    facts                                                 step, cloud, job, layers, scheduler, wires

Every rank of the cloud writes a part of it (`train/keeper.py`), and rank 0 the manifest when all of them are
there. A stage asks for the names that it owns, and takes them from any record of the step that has them, so
that a run with another layout loads what all records together hold; each rank reads the rows that it needs.

Dropout is a function of seed, step, micro-batch and layer, and the learning rate is one of the step, so
there is no generator and no schedule to save.
"""

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isthmus.errors import UserError
from isthmus.job.rundir import job_of
from isthmus.train.members import SavedSteps
from isthmus.train.records import (
    MANIFEST_FILE,
    Facts,
    Manifest,
    Records,
    ShardRows,
    Store,
    StoredTensor,
    merged,
    open_store,
)
from isthmus.train.role import kind_of
from isthmus.wan.handshake import RankSpec

_RECORD: Final = re.compile(r"step-([0-9]{8,18})/([a-z0-9-]+)")
OPTIMIZER: Final = "optimizer/"
WIRE: Final = "wire/"
SCHEDULER: Final = "state"
"""The name of its facts among those of a record."""
OBSERVED: Final = "down.observed."
_MAX_TOLD: Final = 3
_LONGEST_POLL_S: Final = 1.0
CURE: Final = "see that it can be reached and written to and has room"

Note = Callable[[str], None]


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
        self._counting: set[int] | None = None
        """The steps whose records count: neither damaged, nor lost when the run began from an earlier one."""

    @property
    def store(self) -> Store:
        return self._records.store

    def steps(self) -> tuple[int, ...]:
        """The steps that have a complete record here, in order."""
        with reaching(self.store):
            return tuple(step for step, files in self._own().items() if MANIFEST_FILE in files)

    def inspect(self) -> SavedSteps:
        """Verify all records: interrupted ones are removed, damaged ones are told and do not count."""
        with reaching(self.store):
            for step, files in self._own().items():
                self._remove_leftovers(step, files)
        steps = self.steps()
        reasons = {step: self._records.check(self._name(step)) for step in steps}
        damaged = tuple(step for step in steps if reasons[step] is not None)
        for step in damaged:
            self._note(f"the checkpoint {self._name(step)} is left out: {reasons[step]}")
        good = tuple(step for step in steps if step not in damaged)
        self._counting = set(good)
        return SavedSteps(whole=good, damaged=damaged)

    def begin_from(self, step: int) -> None:
        """Continue from a step: records of later steps are removed once a new one is saved."""
        self._counting = {one for one in self._known_steps() if one <= step}

    def save(
        self,
        step: int,
        tensors: Mapping[str, ShardRows],
        facts: Facts,
        *,
        ranks: RankSpec,
        session: str,
        safe_step: int | None = None,
        best_step: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the part of one rank; the leader then waits for the others and makes the record complete.

        The session is the same at all ranks. An OSError leaves what was saved before as it is; `check` raises
        one to end it early.
        """
        name, rank = self._name(step), ranks.rank
        own = self._records.put(name, f"{rank}.{session}", tensors, facts, check=check)
        if rank:
            self._records.commit(name, own, f"part.{rank}.{session}.json")
            return
        others = (f"part.{other}.{session}.json" for other in range(1, ranks.num_ranks))
        parts = [own, *(self._await(name, file, check) for file in others)]
        wires = [one.facts["wires"] for one in parts]
        about = {"step": step, "cloud": self._cloud, "job": self._job, **facts, "wires": wires}
        self._records.commit(name, merged(parts, about))
        self._counting = {*self._known_steps(), step}
        self._retire(step, safe_step=safe_step, best_step=best_step)

    def _known_steps(self) -> set[int]:
        return set(self.steps()) if self._counting is None else self._counting

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
                if sources.get(parameter_of(name)) is manifest or (has_wires and name.startswith(WIRE))
            ]
            tensors |= self._records.get(self._name(step, cloud), manifest, names)
        every = [own.facts] if own is not None and has_same_layers else [one.facts for one in found.values()]
        scheduler = next((one["scheduler"] for one in every if one["scheduler"]), None)
        return {"scheduler": scheduler, "wires": every[0]["wires"] if has_same_layers else []}, tensors

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

    def _await(self, name: str, file: str, check: Callable[[], None]) -> Manifest:
        """The part of another rank, which comes at any time after our own."""
        pause, pause_s = threading.Event(), 0.01
        while True:
            try:
                return self._records.read_manifest(name, file)
            except FileNotFoundError:
                check()
                pause.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _retire(self, newest: int, *, safe_step: int | None, best_step: int | None) -> None:
        """Remove records that do not count any more, and old ones, now that a new one is complete."""
        own, counting = self._own(), sorted(self._known_steps())
        self._remove_leftovers(newest, own[newest])
        safe = [one for one in counting if one == best_step or (safe_step is not None and one >= safe_step)]
        self._counting = {*counting[-self._keep :], *safe}
        # Without a manifest it may be what another rank writes of the next step already.
        for step in [step for step, files in own.items() if MANIFEST_FILE in files]:
            if step not in counting:
                self._note(f"removed {self._name(step)}, which no longer counts: step {newest} is whole")
            if step not in self._counting:
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
        else:
            self._note(f"removed {name}, a checkpoint that was cut short")
        self._records.remove(name, files - listed)

    def _own(self) -> dict[int, set[str]]:
        """The files of this cloud's records, by step, in order."""
        return {step: files for cloud, step, files in self._all() if cloud == self._cloud}

    def _all(self) -> list[tuple[str, int, set[str]]]:
        return _known(self._records)

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

    A step restores a run when each cloud that has saved here has a complete record of it. Where each saves
    at steps of its own, or may get the state of another, a record restores its cloud. With `verify` every
    byte is compared with the digests.
    """
    records, job = Records(_store_of(run)), job_of(run)
    kind = None if job is None else kind_of(job)
    is_common = kind is None or (kind.saves_together and not kind.continues)
    with reaching(records.store):
        every = _known(records)
    clouds = {cloud for cloud, *_ in every}

    def key(record: tuple[str, int, set[str]]) -> tuple[int, str]:
        return record[1], "" if is_common else record[0]

    found = []
    for (step, cloud), group in itertools.groupby(sorted(every, key=key), key=key):
        own = sorted(cloud for cloud, _, files in group if MANIFEST_FILE in files)
        wanted = clouds if is_common else {cloud}
        problems = [f"no complete record of {cloud}" for cloud in sorted(wanted.difference(own))]
        num_bytes = 0
        for one in own:
            reason, size = _look_at(records, f"step-{step:08d}/{one}", verify=verify)
            num_bytes += size
            problems += [f"{one}: {reason}"] if reason else []
        whose = tuple(own) if is_common else (cloud,)
        problem = "; ".join(problems) or None
        found.append(SavedStep(step=step, clouds=whose, num_bytes=num_bytes, problem=problem))
    return tuple(found)


def _look_at(records: Records, name: str, *, verify: bool) -> tuple[str | None, int]:
    """Why a record cannot be used, if so, and its bytes."""
    reason = records.check(name) if verify else None
    try:
        return reason, records.manifest(name).num_bytes
    except UserError as error:
        return reason or error.message, 0


def prune_steps(run: Path, *, keep: int) -> tuple[SavedStep, ...]:
    """Remove all steps but the newest ones that restore the run, or each cloud, and the best one that they
    know of; returns what was removed.

    Nothing is removed of a cloud that no step restores.
    """
    steps = saved_steps(run, verify=True)
    whole = [one for one in steps if one.problem is None]
    kept = [one for one in whole if one in [other for other in whole if other.clouds == one.clouds][-keep:]]
    records = Records(_store_of(run))
    best = {_best_step(records, one) for one in kept}
    kept += [one for one in whole if one.step in best and one not in kept]
    safe = {cloud for one in kept for cloud in one.clouds}
    removed = tuple(one for one in steps if safe and one not in kept and safe.issuperset(one.clouds))
    stays = {(one.step, cloud) for one in kept for cloud in one.clouds}
    with reaching(records.store):
        for cloud, step, files in _known(records):
            if cloud in safe and (step, cloud) not in stays:
                records.remove(f"step-{step:08d}/{cloud}", files)
    return removed


def _best_step(records: Records, saved: SavedStep) -> int | None:
    """The step whose weights were the best when another one was saved."""
    facts = records.manifest(f"step-{saved.step:08d}/{saved.clouds[0]}").facts
    match json.loads((facts.get("scheduler") or {}).get(SCHEDULER, "null")):
        case {"best": {"step": int(step)}}:
            return step
    return None


def _store_of(run: Path) -> Store:
    job = job_of(run)
    return open_store(run, None if job is None else job.checkpoint.store)


@contextmanager
def reaching(store: Store) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the checkpoints in {store.place} cannot be reached: {reason_of(error)}", hint=CURE
        ) from error


def reason_of(error: OSError) -> str:
    return error.strerror or str(error)


def _known(records: Records) -> list[tuple[str, int, set[str]]]:
    """The cloud, the step and the files of each record; what is none of ours is left alone."""
    matches = ((_RECORD.fullmatch(name), files) for name, files in records.list().items())
    return [(match[2], int(match[1]), files) for match, files in matches if match]


def saved_name(name: str, layers: range) -> str:
    """The name of a stage's tensor in all records: halves of bottlenecks are named by their cut's layer."""
    half, _, _ = name.partition(".")
    cut = {"down": layers.stop, "up": layers.start}.get(half)
    return name if cut is None else f"boundary.{cut}.{name}"


def parameter_of(name: str) -> str:
    """The parameter that a saved weight or moment belongs to; the name itself for others."""
    return name.removeprefix(OPTIMIZER).partition("/")[2] if name.startswith(OPTIMIZER) else name


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
        if shape not in (saved, saved[1:] if OBSERVED in name else saved):
            raise UserError(
                f"{name} has shape {saved} in the checkpoint, and {shape} in the model",
                hint="set the model back to what the run began with, or start again with --resume never",
            )
    return sources


def _range_of(manifest: Manifest) -> str:
    start, stop = manifest.facts["layers"]
    return f"{start} to {stop - 1}"
