"""Run directories, and the locks that keep a second command out of them."""

import errno
import fcntl
import multiprocessing
import os
import threading
from datetime import UTC, datetime, timedelta, timezone
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.job import load_job
from isthmus.job.rundir import choosing, create_run_directory, lock_run, lock_site

JOB = load_job(Path(__file__).parents[2] / "examples" / "two-clouds.toml", overrides=["seed=5"])
NOON = datetime(2026, 3, 1, 12, 0, 0, 250, tzinfo=UTC)


def test_holds_the_resolved_job(tmp_path: Path) -> None:
    folder = create_run_directory(tmp_path / "runs", JOB, now=NOON)
    assert folder == tmp_path / "runs" / "two-clouds" / "20260301T120000.000250Z"
    assert [file.name for file in folder.iterdir()] == ["job.toml"]
    assert load_job(folder / "job.toml") == JOB


def test_ids_of_one_moment_differ(tmp_path: Path) -> None:
    folders = [create_run_directory(tmp_path, JOB, now=NOON) for _ in range(20)]
    assert len(set(folders)) == 20
    assert folders == sorted(folders)


def test_ids_sort_by_time_in_any_zone(tmp_path: Path) -> None:
    moments = [
        NOON + timedelta(hours=hours, microseconds=hours) for hours in (-30, 0, 1, 24, 24 * 40, 24 * 400)
    ]
    zones = [timezone(timedelta(hours=hours)) for hours in (9, -8, 0, 5, -3, 12)]
    folders = [
        create_run_directory(tmp_path, JOB, now=moment.astimezone(zone))
        for moment, zone in zip(moments, zones, strict=True)
    ]
    assert folders == sorted(folders)


def test_a_root_that_is_a_file_is_a_users_mistake(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.write_text("")
    with pytest.raises(UserError, match="no run directory can be made in"):
        create_run_directory(root, JOB, now=NOON)


def test_a_folder_that_was_not_filled_is_no_run(tmp_path: Path) -> None:
    def killed(folder: Path) -> None:
        (folder / "plan.json").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_run_directory(tmp_path, JOB, now=NOON, fill=killed)
    assert not list(tmp_path.rglob("job.toml"))


def hold(run: Path, has_begun: Event) -> None:
    with lock_run(run, note=print):
        has_begun.set()
        threading.Event().wait()


def test_a_run_has_one_command_and_the_kernel_lets_go_of_a_dead_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    has_begun = context.Event()
    holder = context.Process(target=hold, args=(tmp_path, has_begun), daemon=True)
    holder.start()
    assert has_begun.wait(60)
    with pytest.raises(UserError) as error, lock_run(tmp_path, note=print):
        pass
    assert error.value.message.startswith(f"the run {tmp_path} is already run by process {holder.pid} on ")
    assert error.value.hint is not None
    assert "--resume never" in error.value.hint
    holder.kill()
    holder.join()
    with lock_run(tmp_path, note=print):
        assert f"process {os.getpid()} " in (tmp_path / "lock").read_text()


def test_clouds_of_one_run_share_it_with_each_other_alone(tmp_path: Path) -> None:
    with lock_run(tmp_path, note=print, is_shared=True):
        with lock_run(tmp_path, note=print, is_shared=True):
            pass
        with pytest.raises(UserError, match="already run"), lock_run(tmp_path, note=print):
            pass
    with (
        lock_run(tmp_path, note=print),
        pytest.raises(UserError, match="already run"),
        lock_run(tmp_path, note=print, is_shared=True),
    ):
        pass


def test_a_rank_of_a_cloud_is_one_process(tmp_path: Path) -> None:
    with lock_site(tmp_path, JOB, cloud="west", rank=0, note=print):
        for cloud, rank in (("east", 0), ("west", 1)):
            with lock_site(tmp_path, JOB, cloud=cloud, rank=rank, note=print):
                pass
        with (
            pytest.raises(UserError, match=r"cloud 'west' of job 'two-clouds' is already run by process \d+"),
            lock_site(tmp_path, JOB, cloud="west", rank=0, note=print),
        ):
            pass


def test_who_chooses_waits_for_another_that_does(tmp_path: Path) -> None:
    notes: list[str] = []
    waits, chose = threading.Event(), threading.Event()

    def note(text: str) -> None:
        notes.append(text)
        waits.set()

    def choose() -> None:
        with choosing(tmp_path, JOB, note=note):
            chose.set()

    with choosing(tmp_path, JOB, note=note):
        other = threading.Thread(target=choose)
        other.start()
        assert waits.wait(60)
        assert not chose.is_set()
    other.join(60)
    assert chose.is_set()
    assert notes == ["waiting for another command that starts a run of this job"]


def test_a_disk_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    notes: list[str] = []
    with choosing(tmp_path, JOB, note=notes.append), lock_run(tmp_path, note=notes.append):
        pass
    (note,) = notes
    assert note.endswith("(No locks available): start no second command for this run")
