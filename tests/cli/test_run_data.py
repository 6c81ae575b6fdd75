"""Data parallel between real processes: a cloud is killed and started again while the others train."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.run import EXIT_TERMINATED
from isthmus.events import Fact, read_events
from isthmus.train.checkpoint import saved_steps
from isthmus.train.records import Records, open_store
from isthmus.wan.certificates import make_authority, make_request, sign_request
from tests.cli.test_run_ends import PATIENCE_S, command, free_port, wait_until
from tests.train.reference import assert_same
from tests.train.test_setup import TINY

# Trees of processes.
pytestmark = pytest.mark.slow

CLOUDS = ("east", "mid", "west")
CHANGES = (
    "train.steps=10000",
    'strategy={kind="data", inner_steps=8, fragments=2}',
    "train.batch_tokens=768",
    "checkpoint.every=1 s",
    "checkpoint.overhead=1",
)


def job_text() -> str:
    text = TINY
    for name in CLOUDS:
        text += f'[[cloud]]\nname = "{name}"\ndevice = "cpu"\nlisten = "127.0.0.1:{free_port()}"\n'
    for pair in combinations(CLOUDS, 2):
        text += f'[[link]]\nbetween = {json.dumps(pair)}\nheartbeat_timeout = "5 s"\n'
    return text


def facts(cloud: str, kind: str) -> list[Fact]:
    """What a cloud has written of one kind, in all its lives."""
    (path,) = Path("runs").glob(f"*/*/events/{cloud}.jsonl")
    return [one for one in read_events(path) if isinstance(one, Fact) and one.kind == kind]


def is_averaged(at: str, number: int, *, after: int) -> Callable[[], bool]:
    """Whether so many clouds were averaged in a round that a cloud has seen after so many others."""
    return lambda: any(one.values["averaged"] == number for one in facts(at, "round")[after:])


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Starts a cloud of the job as a process of its own."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(job_text())
    make_authority(Path("certs"))
    for cloud in CLOUDS:
        sign_request(make_request(Path("certs"), cloud), cloud=cloud, folder=Path("certs"))
    sets = [text for change in CHANGES for text in ("--set", change)]
    return lambda cloud: command(
        Path("tiny.toml"),
        "--cloud",
        cloud,
        "--runs",
        "runs",
        *sets,
        log=Path(f"{cloud}.{os.urandom(2).hex()}"),
    )


def test_clouds_train_on_while_the_first_is_killed_and_comes_back(start: Callable[[str], Any]) -> None:
    with ExitStack() as stack:
        running = {cloud: stack.enter_context(start(cloud)) for cloud in CLOUDS}
        (log,) = Path().glob("mid.*")
        wait_until(lambda: list(Path("runs").glob("*/*/events/mid.jsonl")), running["mid"], log)
        wait_until(is_averaged("mid", 3, after=0), running["mid"], log)
        before = len(facts("mid", "round"))
        running["east"].send_signal(signal.SIGKILL)
        wait_until(is_averaged("mid", 2, after=before), running["mid"], log)
        before = len(facts("mid", "round"))
        running["east"] = stack.enter_context(start("east"))
        wait_until(is_averaged("mid", 3, after=before), running["mid"], log)
        running["mid"].send_signal(signal.SIGTERM)
        ends = {cloud: one.wait(PATIENCE_S) for cloud, one in running.items()}
        assert ends == dict.fromkeys(CLOUDS, EXIT_TERMINATED)
    assert [len(facts(cloud, "started")) for cloud in CLOUDS] == [2, 1, 1]
    contents: dict[object, set[object]] = {}
    for cloud in CLOUDS:
        for one in facts(cloud, "round"):
            contents.setdefault(one.values["number"], set()).add(one.values["content"])
    assert all(len(found) == 1 for found in contents.values())
    for cloud in ("mid", "west"):
        numbers = [one.values["number"] for one in facts(cloud, "round")]
        assert numbers == list(range(len(numbers)))
    # Outer parameters are saved by the names of the model's, at one step by all.
    run = next(Path("runs").glob("*/*/checkpoints")).parent
    step = max(one.step for one in saved_steps(run))
    records = Records(open_store(run, None))
    saved = []
    for cloud in CLOUDS:
        name = f"step-{step:08d}/{cloud}"
        found = records.get(name, manifest := records.manifest(name), manifest.tensors)
        saved.append({key: one.load() for key, one in found.items() if key.startswith("outer/value/")})
    assert saved[0]
    for other in saved[1:]:
        assert_same(saved[0], other)
