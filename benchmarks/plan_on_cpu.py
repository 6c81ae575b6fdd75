"""Step times that `isthmus plan` predicts for small jobs on this machine, beside those of `isthmus run`.

python benchmarks/plan_on_cpu.py [--jobs NAME,…] [--repeats N] [--steps N] [--limit-s S] [--out DIR] [--json]

Three jobs of different families, sizes and links, micro-batches left open, on two clouds that share this
machine.
Each is planned and run twice: with nothing given, so that plan and run measure by themselves, and with the
profiles of `isthmus profile`. The prediction is written to a file, whose hash is printed, before the run
starts, and both follow each other closely, since other programs may share the cores. Nothing is fitted.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench import NOTES, finish, new_folder, options, show, tell
from planned_runs import CommandFailed, Commands, Planned, error_of, job_text, middle

CLOUDS: Final = ("east", "west")
GOALS: Final = {"by itself": 0.25, "with isthmus profile": 0.10}
TEXTS: Final = {"source": "builtin:tales", "sequence_length": 128}


def jobs(num_steps: int) -> dict[str, str]:
    """The jobs by name."""
    train = {"steps": num_steps, "learning_rate": 1e-3, "evaluate_every": 0}
    llama = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
    }
    gpt2 = {
        "model_type": "gpt2",
        "vocab_size": 2048,
        "n_embd": 256,
        "n_layer": 6,
        "n_head": 4,
        "n_positions": 128,
    }
    bert = {
        "model_type": "bert",
        "vocab_size": 1024,
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "max_position_embeddings": 128,
    }
    kinds: dict[str, tuple[dict[str, object], float, float, int, str]] = {
        "llama": (llama, 100, 60, 8192, "causal-lm"),
        "gpt2": (gpt2, 500, 20, 4096, "causal-lm"),
        "bert": (bert, 50, 100, 4096, "masked-lm"),
    }
    return {
        name: job_text(
            f"cpu-{name}",
            config=config,
            clouds=CLOUDS,
            links=((mbps, rtt_ms),),
            device="cpu",
            data={**TEXTS, "task": task},
            train={**train, "batch_tokens": batch_tokens},
        )
        for name, (config, mbps, rtt_ms, batch_tokens, task) in kinds.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job, predicted and run."""

    job: str
    how: str
    repeat: int
    planned: Planned
    measured_s: float
    steps_s: tuple[float, ...]
    loads: tuple[float, float]
    """The machine's load before the plan and after the run: what else computes disturbs both."""

    @property
    def error(self) -> float:
        """Of the prediction."""
        return error_of(self.planned.step_s, self.measured_s)

    def record(self) -> dict[str, Any]:
        """All that is known of it."""
        return {**asdict(self), "error": self.error}


def trials(given: argparse.Namespace, out: Path) -> Iterator[Trial]:
    """Plan and run each job in each way, as often as was asked for."""
    texts = jobs(given.steps)
    for repeat in range(given.repeats):
        for name in given.jobs.split(",") if given.jobs else texts:
            for how in GOALS:
                try:
                    yield _trial(name, texts[name], how, repeat, out, limit_s=given.limit_s)
                except CommandFailed as failed:
                    NOTES.print(f"{name}, {how}: {failed}")


def _trial(name: str, text: str, how: str, repeat: int, out: Path, *, limit_s: float) -> Trial:
    folder = out / f"{name}-{how.replace(' ', '-')}-{repeat}"
    folder.mkdir()
    job = folder / "job.toml"
    job.write_text(text)
    # With a cache of its own every trial measures anew, and its run uses what its plan has measured.
    commands = Commands(cache=folder / "cache", limit_s=limit_s)
    given: list[str] = []
    before = os.getloadavg()[0]
    if how == "with isthmus profile":
        for cloud in _profiled(commands, job, folder):
            given += ["--set", cloud]
    planned = commands.plan(job, folder / "prediction.json", *given)
    NOTES.print(f"{name}, {how}: predicted, sha256 {planned.sha256}")
    steps_s = commands.run(job, folder / "runs", *given)
    shutil.rmtree(folder / "runs")
    return Trial(
        job=name,
        how=how,
        repeat=repeat,
        planned=planned,
        measured_s=middle(steps_s),
        steps_s=tuple(steps_s),
        loads=(before, os.getloadavg()[0]),
    )


def _profiled(commands: Commands, job: Path, folder: Path) -> Iterator[str]:
    """Measure all clouds as `isthmus profile` does, and name the files."""
    values = commands.call("profile", str(job), "--json", folder=folder)
    for cloud, profile in json.loads(values).items():
        path = folder / f"{cloud}.profile.json"
        path.write_text(json.dumps(profile))
        yield f"cloud.{cloud}.profile={path}"


def table_row(one: Trial) -> dict[str, str]:
    return {
        "job": one.job,
        "times": one.how,
        "repeat": str(one.repeat),
        "micro-batches": str(one.planned.num_microbatches),
        "layers": " + ".join(map(str, one.planned.layers)),
        "predicted": f"{one.planned.step_s:.3f} s",
        "measured": f"{one.measured_s:.3f} s ({min(one.steps_s):.3f}–{max(one.steps_s):.3f})",
        "error": f"{one.error:+.0%}",
        "goal": f"± {GOALS[one.how]:.0%}",
        "load": f"{one.loads[0]:.1f} → {one.loads[1]:.1f}",
    }


def main() -> None:
    """Plan, run; print the table and a JSON line."""
    given = options(
        __doc__, jobs=str, repeats=1, steps=13, limit_s=240.0, out=Path("runs/plan-on-cpu"), json=False
    )
    found = []
    for one in trials(given, new_folder(given.out)):
        found.append(one)
        tell(one.record())
    if not given.json:
        show([table_row(one) for one in found])
    finish(
        "plan_on_cpu",
        "torch",
        "transformers",
        num_trials=len(found),
        num_within_goal=sum(abs(one.error) <= GOALS[one.how] for one in found),
        trials=[one.record() for one in found],
    )


if __name__ == "__main__":
    main()
