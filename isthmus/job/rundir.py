"""The run directory, `runs/<name>/<id>/`: the interface of everything that looks at a run, and its locks.

    runs/<name>/              locked while a run in it is chosen or made
    runs/<name>/<id>/lock     locked by the command that runs all clouds here, or by that of the first cloud
    runs/<name>/.locks/west.0 locked by rank 0 of cloud west, where each site runs its own cloud

The kernel releases a lock when its process ends, however it ends. The file names the process.
"""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from isthmus.errors import UserError
from isthmus.job.load import dump_job, load_job, replace_file
from isthmus.job.spec import Job, KeyRole, tell_changes

JOB_FILE: Final = "job.toml"
LOCK_FILE: Final = "lock"
_SITE_LOCKS: Final = ".locks"
_MAX_HOLDER: Final = 300

Note = Callable[[str], None]


def create_run_directory(
    root: Path, job: Job, *, now: datetime, fill: Callable[[Path], None] = lambda _: None
) -> Path:
    """Make `<root>/<name>/<id>/` with the resolved job in it; ids sort by time and never collide.

    `fill` puts in what the run needs. The job comes last: a folder without one is no run.
    """
    with _told(root):
        folder = _make_folder(root / job.name, now.astimezone(UTC))
    fill(folder)
    replace_file(folder / JOB_FILE, dump_job(job))
    return folder


@contextmanager
def _told(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"no run directory can be made in {root}: {error.strerror}",
            hint="name a folder that can be written to, with --runs",
        ) from None


def lock_or_wait(file: int, *, note: Note, waiting: str) -> bool:
    """Lock until the file is closed, after another process if need be; false where the disk has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(waiting)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


@contextmanager
def choosing(root: Path, job: Job, *, note: Note) -> Iterator[None]:
    """Let no other command choose or make a run of this name meanwhile; waits for one that does."""
    folder = root / job.name
    with _told(root):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock_or_wait(
            descriptor, note=note, waiting="waiting for another command that starts a run of this job"
        )
        yield
    finally:
        os.close(descriptor)


def lock_run(run: Path, *, note: Note, is_shared: bool = False) -> AbstractContextManager[None]:
    """Keep all others out of a run; with `is_shared`, all but other clouds of the same run."""
    hint = "wait until that ends, or end it; --resume never starts another run beside it"
    return _locked(run / LOCK_FILE, what=f"the run {run}", hint=hint, note=note, is_shared=is_shared)


def lock_site(root: Path, job: Job, *, cloud: str, rank: int, note: Note) -> AbstractContextManager[None]:
    """Let no other process on this disk be this rank of this cloud."""
    who = f"rank {rank} of cloud {cloud!r}" if rank else f"cloud {cloud!r}"
    path = root / job.name / _SITE_LOCKS / f"{cloud}.{rank}"
    return _locked(path, what=f"{who} of job {job.name!r}", hint="wait until that ends, or end it", note=note)


@contextmanager
def _locked(path: Path, *, what: str, hint: str, note: Note, is_shared: bool = False) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(_MAX_HOLDER).strip() or "another process"
            raise UserError(f"{what} is already run by {holder}", hint=hint) from None
        except OSError as error:
            # A disk without locks: the user must see to it.
            note(f"{path} cannot be locked ({error.strerror}): start no second command for this run")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


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


def join_run(root: Path, job: Job, run_id: str) -> Path:
    """Return the directory of a run that the first cloud has named."""
    if run_id != Path(run_id).name or run_id in {"", ".", ".."}:
        raise UserError(f"{run_id!r} is no name of a run")
    run = root / job.name / run_id
    with _told(root):
        run.mkdir(parents=True, exist_ok=True)
    there = job_of(run)
    if there is not None and there.meaning_digest != job.meaning_digest:
        raise changed_meaning(f"the run {run}", there, job)
    if there is None or there.digest != job.digest:
        replace_file(run / JOB_FILE, dump_job(job))
    return run


def job_of(run: Path) -> Job | None:
    """Return the job of a run directory, None where there is none that this version reads."""
    try:
        return load_job(run / JOB_FILE)
    except UserError:
        # Another version's job, or no run at all.
        return None


def changed_meaning(run: str, there: Job, here: Job) -> UserError:
    """Return the error for a run that started with a job of another meaning."""
    changes = tell_changes(here.changes_from(there, KeyRole.MEANING))
    return UserError(
        f"{run} started with another job: {changes}",
        hint="set that back to continue the run, or start a new one with --resume never",
    )
