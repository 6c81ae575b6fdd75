"""Run directories."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.job import create_run_directory, load_job

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
