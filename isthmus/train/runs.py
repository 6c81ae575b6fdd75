"""Chooses the run directory of a command, new or unfinished, and refuses a job that cannot run."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError

from isthmus.errors import IsthmusError, UserError
from isthmus.job import CloudSpec, Job
from isthmus.job.load import dump_job, replace_file
from isthmus.job.rundir import JOB_FILE, changed_meaning, choosing, create_run_directory, job_of, lock_run
from isthmus.job.spec import KeyRole, tell_changes
from isthmus.model.load import Checkpoint
from isthmus.plan.costs import CostSource, nothing_measured
from isthmus.plan.models import may_plan
from isthmus.plan.plan import PLAN_FILE, Decisions, Plan, decisions_of, plan_to_json
from isthmus.train.build import MODEL_FOLDER, blueprint_of, made_up_ids
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.data.rows import open_rows, read_texts
from isthmus.train.data.token_files import TokenFiles, tokens_of
from isthmus.train.data.training_data import open_data
from isthmus.train.metrics import check_best
from isthmus.train.records import open_store
from isthmus.train.role import kind_of
from isthmus.wan.doctor import Devices, require_kind, require_one_each
from isthmus.wan.handshake import RankSpec

TOKENIZER_FOLDER: Final = "tokenizer"
DATA_FILE: Final = "data.json"
PARTS_PREFIX: Final = ".parts-"
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def find_unfinished(root: Path, job: Job) -> Path | None:
    """The newest unfinished run of a job that means the same."""
    for run in _unfinished(root, job):
        there = job_of(run)
        if there is not None and there.meaning_digest == job.meaning_digest:
            return run
    return None


def refuse_changed(root: Path, job: Job) -> None:
    """Refuse a job that means something else than an unfinished run with a checkpoint."""
    for run in _unfinished(root, job):
        there = job_of(run)
        step = None if there is None else _saved_step(run, there)
        if there is not None and step is not None:
            raise changed_meaning(f"{run}, which was stopped after step {step},", there, job)


def continue_run(run: Path, job: Job, *, data_sha256: str, note: Callable[[str], None]) -> None:
    """Continue a run with a job that means the same; refuse data that has changed."""
    _check_data(run, data_sha256)
    for left in run.glob(f".{MODEL_FOLDER}.*/"):
        # An export was killed here.
        shutil.rmtree(left)
    there = job_of(run)
    changes = () if there is None else job.changes_from(there, KeyRole.OPERATION)
    if changes:
        note(f"the run continues with changed keys: {tell_changes(changes)}")
    if there != job:
        replace_file(run / JOB_FILE, dump_job(job))


@contextmanager
def writing_to(root: Path) -> Iterator[None]:
    """Turn errors of a full or read-only disk into one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = _disk_reason(error)
        if reason is None:
            raise
        raise IsthmusError(
            f"the run cannot be written to {root}: {reason}",
            hint="make room there; the same command then continues from what was saved last",
        ) from error


def _disk_reason(error: Exception) -> str | None:
    """The system's message about the disk; libraries pass it on by number, or only in their text."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return error.strerror
    return next((text for text in map(os.strerror, _DISK_ERRORS) if text in str(error)), None)


def _unfinished(root: Path, job: Job) -> Iterator[Path]:
    """Runs of a job of this name that started here and have no model yet, the newest first."""
    for run in sorted((root / job.name).glob("*/"), reverse=True):
        # Only the first cloud of a run has its tokenizer.
        if (run / TOKENIZER_FOLDER).exists() and not (run / MODEL_FOLDER).exists():
            yield run


def _saved_step(run: Path, job: Job) -> int | None:
    """The newest step that all clouds that save here have saved."""
    store = open_store(run, job.checkpoint.store)
    steps = [set(Checkpoints(store, cloud=cloud.name).steps()) for cloud in job.cloud]
    saved = [one for one in steps if one]
    return max(set.intersection(*saved), default=None) if saved else None


def _check_data(run: Path, sha256: str) -> None:
    try:
        before = json.loads((run / DATA_FILE).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{run / DATA_FILE} cannot be read, so it is unknown whether the data has changed",
            hint="put the file back, or start again with --resume never",
        ) from None
    if before != sha256:
        raise UserError(
            f"the data has changed since {run} began: its tokens have SHA-256 {sha256[:12]}, "
            f"and had {str(before)[:12]}",
            hint="put back what it was, or start again with --resume never",
        )


Learn = Callable[[Job], Job]
"""Gives a job with what is known of its clouds beside it: profiles, and their share of this machine."""


@contextmanager
def choose_run(
    job: Job,
    *,
    root: Path,
    resume: bool,
    note: Callable[[str], None],
    is_shared: bool = False,
    learn: Learn | None = None,
    source: CostSource = nothing_measured,
) -> Iterator[Path]:
    """Check job, model and data; then lock the run that continues, or a new one.

    The tokens that are made for this are those that the run reads. With `is_shared` other clouds of the run
    may be run from this disk, too. A new run is planned with what `learn` finds out; one that continues keeps
    its plan, and nothing is measured.
    """
    with ExitStack() as locks:
        with choosing(root, job, note=note):
            run = find_unfinished(root, job) if resume else None
            if run is not None:
                locks.enter_context(lock_run(run, note=note, is_shared=is_shared))
                tokens = tokens_of(job, root=root, note=note)
                # The plan of a run is never made again.
                _, sha256 = check_job(
                    job,
                    tokenizer_folder=run / TOKENIZER_FOLDER,
                    tokens=tokens,
                    decisions=read_decisions(run),
                    plans=False,
                )
                continue_run(run, job, data_sha256=sha256, note=note)
            else:
                if resume:
                    refuse_changed(root, job)
                run = _start(job, root=root, note=note, learn=learn, source=source)
                locks.enter_context(lock_run(run, note=note, is_shared=is_shared))
        yield run


def read_decisions(run: Path) -> Decisions | None:
    """The decisions of the plan that was made when the run started; None without a plan."""
    path = run / PLAN_FILE
    return decisions_of(path.read_text(encoding="utf-8")) if path.exists() else None


def check_job(
    job: Job,
    *,
    tokenizer_folder: Path,
    tokens: TokenFiles | None = None,
    decisions: Decisions | None = None,
    plans: bool = True,
    learn: Learn | None = None,
    source: CostSource = nothing_measured,
) -> tuple[Plan | None, str]:
    """Refuse a job that cannot run, before any cloud starts; gives its plan, if any, and its data's digest.

    A first plan, with the catalogue's times, refuses what can be refused before clouds are measured.
    """
    kind = kind_of(job)
    check_best(job)
    plan, known = kind.plan(job, source=source) if plans else None, job
    decisions = kind.decide(job, decisions if plan is None else plan.decisions)
    look_at_model(job)  # before tokens are made, which takes longer
    first = kind.data_job(job, kind.clouds(job)[0])
    data = open_data(first, tokenizer_folder=tokenizer_folder, tokens=tokens)
    blueprint = blueprint_of(job, config=data.facts.config, num_labels=data.facts.num_labels)
    if learn is not None and plans and kind.chooses and may_plan(job, source):
        known = learn(job)
        plan = kind.plan(job, known=known, source=source)
        decisions = kind.decide(job, decisions if plan is None else plan.decisions)
    kind.check(job, known, decisions, blueprint)
    kind.check_data(job, decisions, data)
    return plan, data.sha256


def check_unplanned(job: Job, *, root: Path, note: Callable[[str], None]) -> None:
    """Refuse a job that cannot run, as far as that is known before all clouds have met."""
    with tempfile.TemporaryDirectory() as scratch:
        tokens = tokens_of(job, root=root, note=note)
        check_job(job, tokenizer_folder=Path(scratch) / TOKENIZER_FOLDER, tokens=tokens, plans=False)


def _start(
    job: Job, *, root: Path, note: Callable[[str], None], learn: Learn | None, source: CostSource
) -> Path:
    """A new run, with the tokenizer and the plan that were made for it, and the digest of its data."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = Path(scratch) / TOKENIZER_FOLDER
        tokens = tokens_of(job, root=root, note=note)
        plan, sha256 = check_job(job, tokenizer_folder=tokenizer, tokens=tokens, learn=learn, source=source)

        def fill(run: Path) -> None:
            shutil.copytree(tokenizer, run / TOKENIZER_FOLDER)
            replace_file(run / DATA_FILE, json.dumps({"sha256": sha256}) + "\n")
            if plan is not None:
                replace_file(run / PLAN_FILE, plan_to_json(plan))

        return create_run_directory(root, job, now=datetime.now(UTC), fill=fill)


def check_all_devices(job: Job) -> None:
    """Refuse to start all clouds here if one of them lacks devices; clouds may share them, ranks may not."""
    found = find_devices()
    for cloud in job.cloud:
        require_kind(cloud, found)
        require_one_each(cloud, found, num_ranks=cloud.ranks)


def check_device(cloud: CloudSpec, spec: RankSpec) -> None:
    """Refuse to be a rank of a cloud that would have no device of its own here."""
    found = find_devices()
    require_kind(cloud, found)
    # A launcher may show every rank a single device, its own; whether it is, the ranks find out together.
    if spec.num_ranks > 1 and found.num_devices > 1:
        require_one_each(cloud, found, num_ranks=spec.local_rank + 1)


def find_devices() -> Devices:
    """The kind and the number of the devices that torch finds on this machine."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return Devices()
    return Devices(kind=found.type, num_devices=torch.accelerator.device_count())


def look_at_model(job: Job) -> str:
    """Describe the job's model without loading it; a folder must have its weights."""
    blueprint = blueprint_of(job, config=made_up_ids(job), num_labels=None)
    name = job.given_model.source
    if name is not None and Path(name).is_dir():
        Checkpoint(name).tensors()
    return f"{name or 'fresh'}: {blueprint.config.model_type} of {blueprint.num_layers} layers"


def look_at_data(job: Job) -> str:
    """Read one row of the job's data; returns where the data is."""
    kind = kind_of(job)
    job = kind.data_job(job, kind.clouds(job)[0])
    data = job.given_data
    for source in filter(None, (data.source, data.validation_source)):
        row = next(iter(open_rows(source)), None)
        if row is None:
            raise UserError(f"{source!r} is empty", hint="name files with something in them")
        read_texts(row, data)
    return data.source
