"""Which run directory a command goes on with, or starts."""

import errno
import json
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
from isthmus.job.findings import Tables, entries, entry_name
from isthmus.job.rundir import JOB_FILE
from isthmus.job.write import replace_file
from isthmus.train.checkpoint import Checkpoints

MODEL_FOLDER: Final = "model"
TOKENIZER_FOLDER: Final = "tokenizer"
PARTS_PREFIX: Final = ".parts-"
_MAX_TOLD: Final = 3
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def find_unfinished(root: Path, job: Job) -> Path | None:
    """The newest run of this very job that has not come to its end."""
    for run in _unfinished(root, job):
        there = _job_of(run)
        if there is not None and there.digest == job.digest:
            return run
    return None


def describe_other(root: Path, job: Job) -> str | None:
    """What to tell before a new run: which one of another job of this name could be gone on with, and how.

    None where a run of this very job goes on, or none of another was left with anything saved.
    """
    if find_unfinished(root, job) is not None:
        return None
    for run in _unfinished(root, job):
        there = _job_of(run)
        step = None if there is None else _saved_step(run, there)
        if there is not None and step is not None:
            return (
                f"{run} was left unfinished at step {step} with another job: "
                f"{_told(there, job)}; set that back to go on there"
            )
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


def _unfinished(root: Path, job: Job) -> Iterator[Path]:
    """Runs of a job of this name without a model, the newest first."""
    for run in sorted((root / job.name).glob("*/"), reverse=True):
        if not (run / MODEL_FOLDER).exists():
            yield run


def _job_of(run: Path) -> Job | None:
    try:
        return load_job(run / JOB_FILE)
    except UserError:
        # Another version's job, or no run at all.
        return None


def _saved_step(run: Path, job: Job) -> int | None:
    """The newest step that all clouds that save here have saved."""
    steps = [set(Checkpoints(run, cloud=cloud.name).steps()) for cloud in job.cloud]
    saved = [one for one in steps if one]
    return max(set.intersection(*saved), default=None) if saved else None


def _told(there: Job, here: Job) -> str:
    found = list(_differences(_agreed(there), _agreed(here)))
    more = [f"and {len(found) - _MAX_TOLD} more"] if len(found) > _MAX_TOLD else []
    return "; ".join([*found[:_MAX_TOLD], *more]) or "its clouds or links come in another order"


def _agreed(job: Job) -> dict[str, object]:
    """What a run is known by, with clouds and links under their names."""
    tables = job.agreed()
    return tables | {section: _by_name(section, tables) for section in ("cloud", "link")}


def _by_name(section: str, tables: Tables) -> dict[str, object]:
    return {entry_name(section, entry) or "": entry for entry in entries(tables, section)}


def _differences(there: object, here: object, key: str = "") -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for name in there | here:
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}".removeprefix("."))
    elif there != here:
        yield f"{key} {_shown(there)}, now {_shown(here)}"


def _shown(value: object) -> str:
    match value:
        case None:
            return "unset"
        case dict():
            return "there"
    return json.dumps(value, ensure_ascii=False)
