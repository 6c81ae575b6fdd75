"""Which run directory a command goes on with, or starts."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from isthmus.errors import UserError
from isthmus.job import Job, create_run_directory, dump_job, load_job
from isthmus.job.rundir import JOB_FILE
from isthmus.job.write import replace_file

MODEL_FOLDER: Final = "model"
TOKENIZER_FOLDER: Final = "tokenizer"
PARTS_PREFIX: Final = ".parts-"


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
    run.mkdir(parents=True, exist_ok=True)
    if not (run / JOB_FILE).exists():
        replace_file(run / JOB_FILE, dump_job(job))
    return run


def _is_same_job(run: Path, job: Job) -> bool:
    try:
        return load_job(run / JOB_FILE).digest == job.digest
    except UserError:
        # Another version's job, or no run at all.
        return False
