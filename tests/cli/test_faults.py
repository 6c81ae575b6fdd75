"""Runs on this machine that are disturbed at random moments end with the weights of the undisturbed ones."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import isthmus
from isthmus.events import Fact, read_events
from isthmus.job import Job
from isthmus.job.load import parse_job
from tests.train.test_setup import TINY, clouds, links

# Trees of processes.
pytestmark = pytest.mark.slow

NAMES = ("east", "mid", "west")
CHANGES = (
    "train.steps=30",
    "train.evaluate_every=0",
    "strategy.microbatches=4",
    "checkpoint.every=1 s",
    "checkpoint.overhead=1",
    "checkpoint.keep=4",
)
KILLS = """
seed = {seed}
[[fault]]
kind = "kill"
cloud = "{cloud}"
at = "0.5 s"
until = "8 s"
times = 3
[[fault]]
kind = "kill"
cloud = "east"
rank = {rank}
at = "0.5 s"
until = "8 s"
times = 2
"""
OTHERS = """
[[fault]]
kind = "fill-disk"
cloud = "west"
at = "1 s"
duration = "0.6 s"
[[fault]]
kind = "spoil"
cloud = "east"
at = "4 s"
[[fault]]
kind = "kill"
cloud = "west"
at = "4.1 s"
[[fault]]
kind = "freeze"
cloud = "east"
at = "6 s"
duration = "4 s"
"""


def job_of(num_clouds: int, num_ranks: int, *more: str) -> Job:
    names = NAMES[:1] + NAMES[4 - num_clouds :]
    network = clouds(*names).replace('device = "cpu"', f'device = "cpu"\nranks = {num_ranks}') + links(
        *pairwise(names)
    )
    slow = [f"link.{number}.{key}" for number in range(num_clouds - 1) for key in FIGURES]
    changes = [*CHANGES, f"model.config.num_hidden_layers={num_clouds}", *slow, *more]
    return parse_job(TINY + network, file=Path("tiny.toml"), overrides=changes)


FIGURES = ("rtt=300 ms", "bandwidth=20 Mbps", "heartbeat_timeout=3 s")


def run(job: Job, root: Path, **options: Any) -> tuple[Mapping[str, Tensor], Path, list[str]]:
    """The weights, the run directory and all notes of a run."""
    notes: list[str] = []

    def hear(_: str, report: Mapping[str, Any]) -> None:
        if report["kind"] == "note":
            notes.append(str(report["text"]))

    folder = isthmus.run(job, runs=root, measure=False, on_report=hear, **options).run
    weights: dict[str, Tensor] = {}
    for file in (folder / "model").glob("*.safetensors"):
        weights |= load_file(file)
    return weights, folder, notes


@pytest.mark.parametrize(("num_clouds", "num_ranks"), [(2, 1), (3, 1), (2, 2)])
def test_kills_at_random_moments_change_no_bit(num_clouds: int, num_ranks: int, tmp_path: Path) -> None:
    job = job_of(num_clouds, num_ranks)
    faults = tmp_path / "faults.toml"
    faults.write_text(KILLS.format(seed=num_clouds + num_ranks, cloud="west", rank=num_ranks - 1))
    undisturbed, _, _ = run(job, tmp_path / "undisturbed")
    found, folder, notes = run(job, tmp_path / "disturbed", faults=faults, restarts=9)
    assert sum(note.startswith("fault: ") for note in notes) == 5
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(found[name], undisturbed[name]) for name in undisturbed)
    events = [one for one in read_events(folder / "events" / "east.jsonl") if isinstance(one, Fact)]
    assert sum(one.kind == "started" for one in events) > 1


def test_a_full_disk_a_spoilt_checkpoint_and_a_freeze_change_no_bit(tmp_path: Path) -> None:
    job, faults = job_of(2, 1, "checkpoint.every=2 s"), tmp_path / "faults.toml"
    faults.write_text(OTHERS)
    undisturbed, _, _ = run(job, tmp_path / "undisturbed")
    found, _, notes = run(job, tmp_path / "disturbed", faults=faults, restarts=3)
    assert all(torch.equal(found[name], undisturbed[name]) for name in undisturbed)
    assert any("is not as it was written" in note for note in notes)
    assert any("waiting for it" in note for note in notes)
