"""`isthmus checkpoints` on records that are whole, missing, partial and damaged."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from isthmus.cli.main import app
from isthmus.job.load import dump_job, load_job
from isthmus.job.rundir import JOB_FILE
from isthmus.train.records import CHECKPOINTS_FOLDER, DiskStore, Records, ShardRows

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 2 and 4 of two clouds, and step 6 of one of them."""
    folder = tmp_path / "runs" / "demo" / "20260101T000000.000000Z"
    (folder / "events").mkdir(parents=True)
    (folder / "events" / "east.jsonl").touch()
    save(folder, (2, "east"), (2, "west"), (4, "east"), (4, "west"), (6, "east"))
    return folder


def save(folder: Path, *every: tuple[int, str]) -> None:
    records = Records(DiskStore(folder / CHECKPOINTS_FOLDER))
    for step, cloud in every:
        name, rows = f"step-{step:08d}/{cloud}", ShardRows(own=torch.full((8,), float(step)), shape=(8,))
        records.commit(name, records.put(name, "0.ab", {"w": rows}, {"step": step}))


def invoke(run: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["checkpoints", str(run), *options])


def listed(run: Path, *options: str) -> dict[int, str | None]:
    found = json.loads(invoke(run, "--json", *options).stdout)
    return {one["step"]: one["problem"] for one in found["checkpoints"]}


def test_a_step_that_one_cloud_lacks_does_not_restore_the_run(run: Path) -> None:
    assert listed(run) == {2: None, 4: None, 6: "no complete record of west"}
    text = invoke(run).output
    assert "east, west" in text
    assert "no: no complete record of west" in text


def test_a_flipped_bit_is_found_by_verifying(run: Path) -> None:
    path = run / CHECKPOINTS_FOLDER / "step-00000004" / "west" / "weights.0.ab.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert listed(run)[4] is None
    assert "SHA-256" in str(listed(run, "--verify")[4])


def test_a_record_without_a_manifest_is_partial(run: Path) -> None:
    (run / CHECKPOINTS_FOLDER / "step-00000004" / "east" / "manifest.json").unlink()
    assert listed(run)[4] == "no complete record of east"


def test_pruning_keeps_the_newest_that_restores_the_run(run: Path) -> None:
    assert "removed step 6" in invoke(run, "--prune", "1").output
    assert listed(run) == {4: None}


def test_pruning_removes_nothing_where_no_step_restores_the_run(run: Path) -> None:
    for step in (2, 4):
        (run / CHECKPOINTS_FOLDER / f"step-{step:08d}" / "west" / "manifest.json").unlink()
    result = invoke(run, "--prune", "1")
    assert result.exit_code == 1
    assert sorted(listed(run)) == [2, 4, 6]


def test_where_each_cloud_saves_for_itself_a_record_restores_its_cloud(run: Path) -> None:
    (run / JOB_FILE).write_text(dump_job(load_job(EXAMPLES / "generator-discriminator.toml")))
    save(run, (3, "mid"))
    (run / CHECKPOINTS_FOLDER / "step-00000003" / "mid" / "manifest.json").unlink()
    found = json.loads(invoke(run, "--json").stdout)["checkpoints"]
    assert [(one["step"], *one["clouds"], one["problem"]) for one in found] == [
        (2, "east", None), (2, "west", None), (3, "mid", "no complete record of mid"),
        (4, "east", None), (4, "west", None), (6, "east", None),
    ]  # fmt: skip
    invoke(run, "--prune", "1")
    assert listed(run).keys() == {3, 4, 6}, "a cloud that nothing restores keeps what it has"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    result = invoke(tmp_path)
    assert result.exit_code != 0
    assert "holds no run" in str(result.exception)
