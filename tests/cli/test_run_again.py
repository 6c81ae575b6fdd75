"""`isthmus run` started again: after a stop at a bad moment, on damaged files, and beside itself."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import UserError
from isthmus.events import Fact, read_events
from isthmus.job import load_job
from tests.cli.test_run import CHANGES, NUM_STEPS, assert_equal_weights, invoke, weights
from tests.cli.test_run_ends import PATIENCE_S, command, free_port, make_certificates, wait_until
from tests.train.test_setup import TINY, clouds, links

# Trees of processes.
pytestmark = pytest.mark.slow

NETWORK = """
[[cloud]]
name = "east"
device = "cpu"
listen = "127.0.0.1:{port}"
[[cloud]]
name = "west"
device = "cpu"
[[link]]
between = ["east", "west"]
"""


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("again") / "tiny.toml"
    path.write_text(TINY + clouds("east", "west") + links(("east", "west")))
    return path


@pytest.fixture(scope="module")
def finished(job_file: Path) -> Path:
    result = invoke(job_file, "--runs", str(job_file.parent / "runs"))
    assert result.exit_code == 0, result.output
    return Path(json.loads(result.stdout)["run"])


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """The same run, as it was when it had saved its last step."""
    root = tmp_path / "runs"
    shutil.copytree(finished.parents[1], root)
    run = root / finished.relative_to(finished.parents[1])
    shutil.rmtree(run / "model")
    return run


def start_again(job: Path, run: Path, *changes: str) -> Any:
    return invoke(job, "--runs", str(run.parents[1]), changes=[*CHANGES, *changes])


def saved(run: Path) -> dict[str, list[int]]:
    """The steps that each cloud has saved."""
    found: dict[str, list[int]] = {}
    for path in sorted(run.glob("checkpoints/step-*/*/manifest.json")):
        found.setdefault(path.parent.name, []).append(int(path.parents[1].name.removeprefix("step-")))
    return found


def test_a_stop_during_the_export_is_made_good_by_the_next_start(
    finished: Path, stopped: Path, job_file: Path
) -> None:
    for cloud in ("east", "west"):
        (stopped / f".parts-{cloud}" / f".{cloud}.k3f" / "new").mkdir(parents=True)
    (stopped / ".model.q1" / "new").mkdir(parents=True)
    result = start_again(job_file, stopped)
    assert result.exit_code == 0, result.output
    assert f"resumed after step {NUM_STEPS}" in result.output
    assert_equal_weights(weights(stopped), weights(finished))
    assert not [path.name for path in stopped.iterdir() if path.name.startswith(".")]


def test_a_damaged_newest_checkpoint_is_left_out_for_an_older_one(
    finished: Path, stopped: Path, job_file: Path
) -> None:
    older = saved(stopped)["west"][-2]
    (file,) = (stopped / "checkpoints" / f"step-{NUM_STEPS:08d}" / "west").glob("weights.*")
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    result = start_again(job_file, stopped)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert f"step-{NUM_STEPS:08d}/west is left out: {file.name} is not as it was written" in text
    assert f"resumed after step {older}" in text
    assert f"step {older} is the newest that every cloud has saved; 'east' has step {NUM_STEPS} too" in text
    assert_equal_weights(weights(stopped), weights(finished))
    assert saved(stopped)["east"] == saved(stopped)["west"]


def test_a_cloud_that_lost_its_checkpoints_is_named_and_nothing_is_deleted(
    stopped: Path, job_file: Path
) -> None:
    for path in stopped.glob("checkpoints/*/west"):
        shutil.rmtree(path)
    before = saved(stopped)
    result = start_again(job_file, stopped)
    assert result.exit_code == 1
    steps = " and ".join(str(step) for step in before["east"])
    assert f"no step is saved at every cloud: 'east' has steps {steps}, 'west' has none" in str(
        result.exception
    )
    assert result.exception.hint == "copy back what is missing, or start again with --resume never"
    assert saved(stopped) == before


def test_a_run_goes_on_when_it_is_operated_otherwise(stopped: Path, job_file: Path) -> None:
    changes = [
        f"train.steps={NUM_STEPS + 2}",
        "train.evaluate_every=0",
        "checkpoint.every=1 h",
        "cloud.east.listen=127.0.0.1:7999",
        "link.0.codec=int8",
        "link.0.guard_every=0",
    ]
    result = start_again(job_file, stopped, *changes)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert f"resumed after step {NUM_STEPS}" in text
    assert "the run continues with changed keys: " in text
    assert "link east-west: codec raw, now int8" in text
    assert Path(json.loads(result.stdout)["run"]) == stopped
    assert load_job(stopped / "job.toml").train.steps == NUM_STEPS + 2
    events = [one for one in read_events(stopped / "events" / "east.jsonl") if isinstance(one, Fact)]
    steps = [one.values["step"] for one in events if one.kind == "step"]
    assert steps == list(range(NUM_STEPS + 2))


def test_a_run_does_not_go_on_with_another_meaning(stopped: Path, job_file: Path) -> None:
    before = saved(stopped)
    result = start_again(job_file, stopped, "train.learning_rate=0.1")
    assert result.exit_code == 1
    assert str(result.exception).endswith("started with another job: train.learning_rate 0.0003, now 0.1")
    assert saved(stopped) == before


def test_a_cloud_that_is_not_the_first_plans_nothing(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was planned")

    def far_enough(*_: object, **__: object) -> None:
        raise UserError("far enough")

    monkeypatch.chdir(tmp_path)
    make_certificates(Path("certs"))
    monkeypatch.setattr("isthmus.train.pipeline_config.plan", never)
    monkeypatch.setattr("isthmus.train.launch.Endpoint", far_enough)
    assert str(invoke(job_file, "--cloud", "west").exception) == "far enough"


def ended(job: Path, *options: str, log: Path) -> tuple[int, str]:
    """The exit code and the words of a command that ends by itself."""
    with command(job, *options, log=log) as process:
        code = process.wait(PATIENCE_S)
    return code, " ".join(log.read_text().split())


def goes_on(runs: Path) -> Callable[[], bool]:
    """Whether the first cloud has noted anything since this was asked for."""
    (events,) = runs.glob("tiny/*/events/east.jsonl")
    before_bytes = events.stat().st_size
    return lambda: events.stat().st_size > before_bytes


def test_a_second_command_of_a_run_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    job, log, runs = tmp_path / "job.toml", tmp_path / "log", tmp_path / "runs"
    job.write_text(TINY + '[[cloud]]\nname = "east"\ndevice = "cpu"\n')
    with command(job, "--runs", str(runs), log=log) as first:
        wait_until(lambda: list(runs.glob("tiny/*/checkpoints/*/*/manifest.json")), first, log)
        code, text = ended(job, "--runs", str(runs), log=tmp_path / "second")
        assert code == 2
        assert re.search(rf"the run \S+ is already run by process {first.pid} on ", text)
        assert "cure: wait until that ends" in text
        wait_until(goes_on(runs), first, log)


def test_a_second_process_of_a_cloud_is_refused_and_both_clouds_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job, runs, other = tmp_path / "job.toml", tmp_path / "runs", tmp_path / "elsewhere"
    job.write_text(TINY + NETWORK.format(port=free_port()))
    make_certificates(Path("certs"))
    logs = {cloud: tmp_path / f"{cloud}.log" for cloud in ("east", "west")}
    with (
        command(job, "--cloud", "east", "--runs", str(runs), log=logs["east"]) as east,
        command(job, "--cloud", "west", "--runs", str(runs), log=logs["west"]) as west,
    ):
        wait_until(
            lambda: len(list(runs.glob("tiny/*/checkpoints/*/*/manifest.json"))) > 1, west, logs["west"]
        )
        code, text = ended(job, "--cloud", "west", "--runs", str(runs), log=tmp_path / "second")
        assert (code, f"cloud 'west' of job 'tiny' is already run by process {west.pid}" in text) == (2, True)
        code, text = ended(job, "--cloud", "west", "--runs", str(other), log=tmp_path / "third")
        assert code == 1
        assert "west rank 0 is already connected to east rank 0: end one of its two processes" in text
        wait_until(goes_on(runs), east, logs["east"])
        assert west.poll() is None


@pytest.mark.timeout(1200)
def test_a_cloud_that_is_lost_five_times_is_met_again_without_a_hand_on_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clouds run with --cloud; only the one that was killed is started again, by the same command."""
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "tiny.toml"
    job.write_text(TINY + NETWORK.format(port=free_port()))
    make_certificates(Path("certs"))
    changes = ("train.steps=300", "checkpoint.every=1 s", "checkpoint.overhead=1")
    options = [text for change in changes for text in ("--set", change)]

    def newest() -> int:
        found = Path("lost").glob("*/*/checkpoints/step-*/west/manifest.json")
        return max((int(one.parents[1].name.removeprefix("step-")) for one in found), default=0)

    def is_newer(before: int) -> bool:
        return newest() > before

    def start(name: str, cloud: str, log: Path) -> Any:
        return command(job, "--cloud", cloud, "--runs", name, *options, log=log)

    with start("whole", "west", tmp_path / "one") as west, start("whole", "east", tmp_path / "two") as east:
        assert (west.wait(PATIENCE_S), east.wait(PATIENCE_S)) == (0, 0)
    log = tmp_path / "east"
    with start("lost", "east", log) as east:
        for number in range(5):
            before = newest()
            with start("lost", "west", tmp_path / f"west-{number}") as west:
                wait_until(partial(is_newer, before), west, log)
                west.kill()
        with start("lost", "west", tmp_path / "west") as west:
            assert (west.wait(PATIENCE_S), east.wait(PATIENCE_S)) == (0, 0)
    (events,) = Path("lost").glob("*/*/events/west.jsonl")
    facts = [one for one in read_events(events) if isinstance(one, Fact)]
    assert sum(one.kind == "started" for one in facts) == 6
    assert log.read_text().count("waiting for it") == 5
    (whole,), (lost,) = Path("whole").glob("*/*/model"), Path("lost").glob("*/*/model")
    assert_equal_weights(weights(whole.parent), weights(lost.parent))
