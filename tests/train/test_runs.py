"""Run directories: which one goes on, and those on disks that are full or in places that are none."""

import errno
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from safetensors import SafetensorError

from isthmus.errors import IsthmusError, UserError
from isthmus.job import Job, create_run_directory
from isthmus.job.rundir import JOB_FILE
from isthmus.train.checkpoint import COMPLETE
from isthmus.train.runs import MODEL_FOLDER, describe_other, find_unfinished, join_run, writing_to
from tests.train.test_setup import clouds, links, tiny_job


def left(root: Path, job: Job, *, second: int = 0, **steps: tuple[int, ...]) -> Path:
    """A run of a job, with the steps that its clouds have saved."""
    run = create_run_directory(root, job, now=datetime(2026, 1, 1, second=second, tzinfo=UTC))
    for cloud, saved in steps.items():
        for step in saved:
            folder = run / "checkpoints" / f"step-{step:08d}" / cloud
            folder.mkdir(parents=True)
            (folder / COMPLETE).touch()
    return run


def test_the_newest_unfinished_run_of_the_very_job_goes_on(tmp_path: Path) -> None:
    job = tiny_job()
    older = left(tmp_path, job)
    finished = left(tmp_path, job, second=1)
    (finished / MODEL_FOLDER).mkdir()
    left(tmp_path, tiny_job("seed=3"), second=2, east=(4,))
    assert find_unfinished(tmp_path, job) == older
    assert describe_other(tmp_path, job) is None


def test_a_run_of_another_job_is_named_with_what_differs(tmp_path: Path) -> None:
    before = tiny_job("cloud.east.ranks=2")
    left(tmp_path, before, east=(99,), west=(99,))
    run = left(tmp_path, before, second=1, east=(8, 16, 24), west=(8, 16))
    assert describe_other(tmp_path, tiny_job()) == (
        f"{run} was left unfinished at step 16 with another job: "
        "cloud.east.ranks 2, now 1; set that back to go on there"
    )


def test_of_many_keys_that_differ_some_are_told(tmp_path: Path) -> None:
    changes = ("seed=3", "train.steps=9", "train.optimizer_bits=8", "data.sequence_length=64")
    left(tmp_path, tiny_job(*changes), east=(5,))
    told = describe_other(tmp_path, tiny_job())
    assert told is not None
    assert "seed 3, now 0; data.sequence_length 64, now 32; train.steps 9, now 4; and 1 more;" in told


def test_clouds_are_told_by_name(tmp_path: Path) -> None:
    alone = clouds("east")
    left(tmp_path, tiny_job(), east=(5,))
    told = describe_other(tmp_path, tiny_job(network=alone))
    assert told is not None
    assert "cloud.west there, now unset; link.east-west there, now unset;" in told
    turned = clouds("west", "east") + links(("east", "west"))
    told = describe_other(
        tmp_path, tiny_job("cloud.0.listen=127.0.0.1:7601", "cloud.1.listen=127.0.0.1:7600", network=turned)
    )
    assert told is not None
    assert "its clouds or links come in another order" in told


def test_what_was_saved_nowhere_finished_or_cannot_be_read_is_not_named(tmp_path: Path) -> None:
    before = tiny_job("cloud.east.ranks=2")
    left(tmp_path, before)
    finished = left(tmp_path, before, second=1, east=(4,))
    (finished / MODEL_FOLDER).mkdir()
    (left(tmp_path, before, second=2, east=(4,)) / JOB_FILE).write_text("name = 1")
    assert describe_other(tmp_path, tiny_job()) is None
    assert describe_other(tmp_path / "none", tiny_job()) is None


def test_figures_of_a_site_make_no_other_job(tmp_path: Path) -> None:
    run = left(tmp_path, tiny_job(), east=(4,))
    job = tiny_job("link.east-west.bandwidth=1 Gbps", "cloud.east.certificates=/elsewhere")
    assert find_unfinished(tmp_path, job) == run
    told = describe_other(tmp_path, tiny_job("link.east-west.bandwidth=1 Gbps", "seed=3"))
    assert told is not None
    assert "another job: seed 0, now 3; set" in told


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_sentence_with_the_place_and_the_cure(error: Exception) -> None:
    with pytest.raises(IsthmusError) as raised, writing_to(Path("runs")):
        raise error
    assert raised.value.message == "the run cannot be written to runs: No space left on device"
    assert raised.value.hint is not None
    assert not isinstance(raised.value, UserError)


def test_other_errors_pass() -> None:
    with pytest.raises(ConnectionResetError), writing_to(Path("runs")):
        raise ConnectionResetError(errno.ECONNRESET, "reset")


def test_a_place_for_runs_that_is_a_file_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match=r"no run directory can be made in .*: Not a directory"):
        join_run(tmp_path / "runs", tiny_job(), "20260101T000000.000000Z")
