"""Which run directory a command goes on with, or starts."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from isthmus.errors import IsthmusError, UserError
from isthmus.job import Job, create_run_directory, dump_job, load_job
from isthmus.job.rundir import JOB_FILE
from isthmus.job.write import replace_file

MODEL_FOLDER: Final = "model"
TOKENIZER_FOLDER: Final = "tokenizer"
PARTS_PREFIX: Final = ".parts-"
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def find_unfinished(root: Path, job: Job) -> Path | None:
    """The newest run of this very job that has not come to its end."""
    for run in sorted((root / job.name).glob("*/"), reverse=True):
        if _is_same_job(run, job) and not (run / MODEL_FOLDER).exists():
            return run
    return None


def start_run(root: Path, job: Job, *, tokenizer: Path) -> Path:
    """A new run, with the tokenizer that was made for it."""
    run = create_run_directory(root, job, now=datetime.now(UTC))
    shutil.copytree(tokenizer, run / TOKENIZER_FOLDER)
    return run


def join_run(root: Path, job: Job, run_id: str) -> Path:
    """The directory of a run that the first cloud has named."""
    if run_id != Path(run_id).name or run_id in {"", ".", ".."}:
        raise UserError(f"{run_id!r} is no name of a run")
    run = root / job.name / run_id
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"no run directory can be made in {root}: {error.strerror}",
            hint="name a folder that can be written to, with --runs",
        ) from None
    if not (run / JOB_FILE).exists():
        replace_file(run / JOB_FILE, dump_job(job))
    return run


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


def _is_same_job(run: Path, job: Job) -> bool:
    try:
        return load_job(run / JOB_FILE).digest == job.digest
    except UserError:
        # Another version's job, or no run at all.
        return False
