"""Run directories: which one goes on, and those on disks that are full or in places that are none."""

import errno
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from safetensors import SafetensorError

from isthmus.errors import IsthmusError, UserError
from isthmus.job import Job, load_job
from isthmus.job.rundir import JOB_FILE, create_run_directory, join_run
from isthmus.train.build import MODEL_FOLDER
from isthmus.train.records import DiskStore, Records
from isthmus.train.runs import (
    DATA_FILE,
    TOKENIZER_FOLDER,
    continue_run,
    find_unfinished,
    refuse_changed,
    writing_to,
)
from tests.train.test_setup import clouds, links, tiny_job

SHA256 = "1" * 64


def left(root: Path, job: Job, *, second: int = 0, **steps: tuple[int, ...]) -> Path:
    """A run of a job that was left unfinished, with the steps that its clouds have saved."""

    def fill(run: Path) -> None:
        (run / TOKENIZER_FOLDER).mkdir()
        (run / DATA_FILE).write_text(json.dumps({"sha256": SHA256}))

    run = create_run_directory(root, job, now=datetime(2026, 1, 1, second=second, tzinfo=UTC), fill=fill)
    for cloud, saved in steps.items():
        for step in saved:
            records = Records(DiskStore(run / "checkpoints"))
            records.commit(f"step-{step:08d}/{cloud}", records.put("unused", "0.ab", {}, {}))
    return run


def refusal(root: Path, job: Job) -> str:
    with pytest.raises(UserError) as error:
        refuse_changed(root, job)
    assert error.value.hint == "set that back to continue the run, or start a new one with --resume never"
    return error.value.message


def test_the_newest_unfinished_run_of_the_same_meaning_goes_on(tmp_path: Path) -> None:
    job = tiny_job()
    older = left(tmp_path, job)
    finished = left(tmp_path, job, second=1)
    (finished / MODEL_FOLDER).mkdir()
    left(tmp_path, tiny_job("seed=3"), second=2, east=(4,))
    join_run(tmp_path, job, "20260101T000003.000000Z")
    assert find_unfinished(tmp_path, job) == older, (
        "a run of which only another cloud is here is none of ours"
    )


def test_a_job_that_means_something_else_is_refused_with_keys_and_values(tmp_path: Path) -> None:
    before = tiny_job("cloud.east.ranks=2")
    left(tmp_path, before, east=(99,), west=(99,))
    run = left(tmp_path, before, second=1, east=(8, 16, 24), west=(8, 16))
    assert find_unfinished(tmp_path, tiny_job()) is None
    assert refusal(tmp_path, tiny_job()) == (
        f"{run}, which was stopped after step 16, started with another job: cloud.east.ranks 2, now 1"
    )


def test_of_many_keys_that_differ_some_are_told(tmp_path: Path) -> None:
    changes = ("seed=3", "train.learning_rate=0.1", "train.optimizer_bits=8", "data.sequence_length=64")
    left(tmp_path, tiny_job(*changes), east=(5,))
    told = "seed 3, now 0; data.sequence_length 64, now 32; train.learning_rate 0.1, now 0.0003; and 1 more"
    assert refusal(tmp_path, tiny_job()).endswith(told)


def test_clouds_are_told_by_name(tmp_path: Path) -> None:
    left(tmp_path, tiny_job(), east=(5,))
    told = refusal(tmp_path, tiny_job(network=clouds("east")))
    assert 'the order of clouds ["east", "west"], now ["east"]; cloud.west.name "west", now unset' in told
    turned = clouds("west", "east") + links(("east", "west"))
    assert refusal(tmp_path, tiny_job(network=turned)).endswith(
        'the order of clouds ["east", "west"], now ["west", "east"]'
    )


def test_what_was_saved_nowhere_finished_or_cannot_be_read_is_not_in_the_way(tmp_path: Path) -> None:
    before = tiny_job("cloud.east.ranks=2")
    left(tmp_path, before)
    finished = left(tmp_path, before, second=1, east=(4,))
    (finished / MODEL_FOLDER).mkdir()
    (left(tmp_path, before, second=2, east=(4,)) / JOB_FILE).write_text("name = 1")
    refuse_changed(tmp_path, tiny_job())
    refuse_changed(tmp_path / "none", tiny_job())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("link.east-west.bandwidth=1 Gbps", None),
        ("cloud.east.certificates=/elsewhere", None),
        ("cloud.east.listen=127.0.0.1:9999", 'cloud.east.listen "127.0.0.1:7600", now "127.0.0.1:9999"'),
        ("checkpoint.every=1 s", 'checkpoint.every "5 min", now "1 s"'),
        ("train.evaluate_every=3", "train.evaluate_every 100, now 3"),
        ("train.steps=9", "train.steps 4, now 9"),
        ("link.east-west.codec=int8", 'link.east-west.codec "raw", now "int8"'),
    ],
)
def test_a_job_that_is_operated_otherwise_goes_on_and_is_kept(
    tmp_path: Path, change: str, told: str | None
) -> None:
    run = left(tmp_path, tiny_job(), east=(4,))
    job, notes = tiny_job(change), list[str]()
    assert find_unfinished(tmp_path, job) == run
    continue_run(run, job, data_sha256=SHA256, note=notes.append)
    assert notes == ([] if told is None else [f"the run continues with changed keys: {told}"])
    assert load_job(run / JOB_FILE) == job


def test_data_that_changed_is_refused(tmp_path: Path) -> None:
    run = left(tmp_path, tiny_job(), east=(4,))
    with pytest.raises(UserError, match=r"the data has changed since .* began") as error:
        continue_run(run, tiny_job(), data_sha256="2" * 64, note=lambda _: None)
    assert error.value.hint == "put back what it was, or start again with --resume never"
    (run / DATA_FILE).unlink()
    with pytest.raises(UserError, match=f"{DATA_FILE} cannot be read"):
        continue_run(run, tiny_job(), data_sha256=SHA256, note=lambda _: None)


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    run = left(tmp_path, tiny_job(), east=(4,))
    (run / ".model.x7" / "new").mkdir(parents=True)
    continue_run(run, tiny_job(), data_sha256=SHA256, note=lambda _: None)
    assert not list(run.glob(".model*"))


def test_another_site_takes_over_what_is_operated_otherwise_and_refuses_another_meaning(
    tmp_path: Path,
) -> None:
    run = join_run(tmp_path, tiny_job(), "20260101T000003.000000Z")
    job = tiny_job("train.steps=9")
    assert join_run(tmp_path, job, run.name) == run
    assert load_job(run / JOB_FILE) == job
    with pytest.raises(UserError, match=r"the run .* started with another job: seed 0, now 3"):
        join_run(tmp_path, tiny_job("seed=3"), run.name)


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
