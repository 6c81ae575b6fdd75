"""Which run directory a command goes on with, or starts."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from isthmus.errors import IsthmusError, UserError
from isthmus.job import Job, create_run_directory, dump_job
from isthmus.job.roles import KeyRole
from isthmus.job.rundir import JOB_FILE, changed_meaning, job_of, told_changes
from isthmus.job.write import replace_file
from isthmus.plan.search.plan_file import PLAN_FILE
from isthmus.train.checkpoint import Checkpoints

MODEL_FOLDER: Final = "model"
TOKENIZER_FOLDER: Final = "tokenizer"
DATA_FILE: Final = "data.json"
PARTS_PREFIX: Final = ".parts-"
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def find_unfinished(root: Path, job: Job) -> Path | None:
    """The newest run that means what this job means and has not come to its end."""
    for run in _unfinished(root, job):
        there = job_of(run)
        if there is not None and there.meaning_digest == job.meaning_digest:
            return run
    return None


def refuse_changed(root: Path, job: Job) -> None:
    """Refuse to leave behind a run with something saved because the job means something else now."""
    for run in _unfinished(root, job):
        there = job_of(run)
        step = None if there is None else _saved_step(run, there)
        if there is not None and step is not None:
            raise changed_meaning(f"{run}, which was stopped after step {step},", there, job)


def start_run(root: Path, job: Job, *, tokenizer: Path, data_sha256: str, plan: str | None) -> Path:
    """A new run, with the tokenizer and the plan that were made for it, and the digest of its data."""

    def fill(run: Path) -> None:
        shutil.copytree(tokenizer, run / TOKENIZER_FOLDER)
        replace_file(run / DATA_FILE, json.dumps({"sha256": data_sha256}) + "\n")
        if plan is not None:
            replace_file(run / PLAN_FILE, plan)

    return create_run_directory(root, job, now=datetime.now(UTC), fill=fill)


def go_on(run: Path, job: Job, *, data_sha256: str, note: Callable[[str], None]) -> None:
    """Make a run go on with a job that means the same; its data must be what it was."""
    _check_data(run, data_sha256)
    for left in run.glob(f".{MODEL_FOLDER}.*/"):
        # An export was killed here.
        shutil.rmtree(left)
    there = job_of(run)
    changes = () if there is None else job.changes_from(there, KeyRole.OPERATION)
    if changes:
        note(f"the run goes on with changed keys: {told_changes(changes)}")
    if there != job:
        replace_file(run / JOB_FILE, dump_job(job))


@contextmanager
def writing_to(root: Path) -> Iterator[None]:
    """Say in one sentence that a disk takes no more, whoever wrote to it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = _disk_reason(error)
        if reason is None:
            raise
        raise IsthmusError(
            f"the run cannot be written to {root}: {reason}",
            hint="make room there; the same command then goes on from what was saved last",
        ) from error


def _disk_reason(error: Exception) -> str | None:
    """What the system says of the disk; libraries pass it on by number, or only in their words."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return error.strerror
    return next((text for text in map(os.strerror, _DISK_ERRORS) if text in str(error)), None)


def _unfinished(root: Path, job: Job) -> Iterator[Path]:
    """Runs of a job of this name that began here and have no model yet, the newest first."""
    for run in sorted((root / job.name).glob("*/"), reverse=True):
        # Only the first cloud of a run has its tokenizer.
        if (run / TOKENIZER_FOLDER).exists() and not (run / MODEL_FOLDER).exists():
            yield run


def _saved_step(run: Path, job: Job) -> int | None:
    """The newest step that all clouds that save here have saved."""
    steps = [set(Checkpoints(run, cloud=cloud.name).steps()) for cloud in job.cloud]
    saved = [one for one in steps if one]
    return max(set.intersection(*saved), default=None) if saved else None


def _check_data(run: Path, sha256: str) -> None:
    try:
        before = json.loads((run / DATA_FILE).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{run / DATA_FILE} cannot be read, so nothing tells whether the data is what it was",
            hint="put the file back, or start anew with --resume never",
        ) from None
    if before != sha256:
        raise UserError(
            f"the data has changed since {run} began: its tokens have SHA-256 {sha256[:12]}, "
            f"and had {str(before)[:12]}",
            hint="put back what it was, or start anew with --resume never",
        )
