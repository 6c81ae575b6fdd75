"""Run directories on disks that are full, and in places that are none."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from isthmus.errors import IsthmusError, UserError
from isthmus.train.runs import join_run, writing_to
from tests.train.test_setup import tiny_job


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
