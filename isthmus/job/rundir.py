"""The run directory, `runs/<name>/<id>/`: the interface of everything that looks at a run."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from isthmus.errors import UserError
from isthmus.job.spec import Job
from isthmus.job.write import dump_job, replace_file

JOB_FILE: Final = "job.toml"


def create_run_directory(root: Path, job: Job, *, now: datetime) -> Path:
    """Make `<root>/<name>/<id>/` with the resolved job in it; ids sort by time and never collide."""
    try:
        folder = _make_folder(root / job.name, now.astimezone(UTC))
    except OSError as error:
        raise UserError(f"no run directory can be made in {root}: {error.strerror}") from None
    replace_file(folder / JOB_FILE, dump_job(job))
    return folder


def _make_folder(parent: Path, moment: datetime) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = parent / moment.strftime("%Y%m%dT%H%M%S.%fZ")
        try:
            folder.mkdir()
        except FileExistsError:
            moment += timedelta(microseconds=1)
        else:
            return folder
