"""Whole runs whose best weights are kept: BLEU across the cut, and the model that is exported."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import isthmus
from isthmus.job import Job
from isthmus.job.load import load_job
from isthmus.train.checkpoint import prune_steps, saved_steps

# Trees of processes.
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
CHANGES = (
    "train.steps=6",
    "train.evaluate_every=2",
    "train.evaluate_texts=30",
    "train.batch_tokens=768",
    "link.east-west.codec=raw",
    "model.config.d_model=32",
)


def run(job: Job, root: Path) -> tuple[list[Mapping[str, Any]], list[str], Path]:
    """The evaluations, the notes and the directory of a run."""
    heard: list[Mapping[str, Any]] = []
    folder = isthmus.run(job, runs=root, measure=False, on_report=lambda _, one: heard.append(one)).run
    evaluations = [one for one in heard if one["kind"] == "evaluation"]
    return evaluations, [str(one["text"]) for one in heard if one["kind"] == "note"], folder


@pytest.mark.parametrize("beams", [1, 2])
def test_the_best_by_bleu_is_exported(beams: int, tmp_path: Path) -> None:
    changes = (*CHANGES, f"train.evaluate_beams={beams}", "train.evaluate_without_codec=true")
    job = load_job(EXAMPLES / "translate.toml", overrides=changes)
    evaluations, notes, folder = run(job, tmp_path)
    assert len(evaluations) == 6
    with_codecs, plain = ([one for one in evaluations if one["is_plain"] is plain] for plain in (False, True))
    # Raw codecs change nothing, so both rounds are the same to the last digit.
    assert [one["metrics"] for one in with_codecs] == [one["metrics"] for one in plain]
    best = max(plain, key=lambda one: one["metrics"]["bleu"])
    (exported,) = [note for note in notes if "validation loss of" in note]
    loss, bleu = re.findall(r"(?:loss of|BLEU) (\d+\.\d+)", exported)
    assert float(bleu) == pytest.approx(best["metrics"]["bleu"], abs=0.01)
    assert float(loss) == pytest.approx(best["loss"], abs=1e-4)
    assert best["step"] in [one.step for one in saved_steps(folder)]
    prune_steps(folder, keep=1)
    assert {best["step"], 6} <= {one.step for one in saved_steps(folder)}


def test_classes_are_judged_across_the_cut(tmp_path: Path) -> None:
    changes = ("train.steps=4", "train.evaluate_every=2", "train.keep_best=f1", "link.east-west.codec=raw")
    job = load_job(
        EXAMPLES / "classify-low-rank.toml", overrides=[*changes, "link.east-west.boundary=hidden"]
    )
    evaluations, notes, _ = run(job, tmp_path)
    best = max(evaluations, key=lambda one: one["metrics"]["f1"])
    (exported,) = [note for note in notes if "validation loss of" in note]
    shown = "accuracy {accuracy:.4f}, F1 {f1:.4f}, Matthews {matthews:.4f}".format(**best["metrics"])
    assert shown in exported
