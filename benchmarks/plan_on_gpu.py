"""Plans of jobs on one GPU beside the best that a sweep by hand finds, with real kernels.

python benchmarks/plan_on_gpu.py [--jobs NAME …] [--sweep NAME … | --sweep none] [--quick]
                                 [--steps N] [--run NAME …]
                                 [--deadline-s S] [--device KIND] [--tiny] [--out DIR]

Clouds share one GPU by NVIDIA's MPS, each with an equal part of its multiprocessors, and are joined through
the emulated WAN. For each job, in this order: the planner measures, chooses micro-batches, cut and codecs,
and its plan is written to a file, whose hash is printed; then that choice is trained for some steps, and
other micro-batches and codecs by `swept.py`. Jobs named by --run are also run by `isthmus run`, from data to
export. A setting whose bytes alone take the line longer than the whole planned step is named and not tried.
The table says how near the prediction came, and what share of the best throughput the planned choice
reached. A job for which no time is left is named as missing. With --device cpu --tiny the same is tried on
small models.
"""

import argparse
import hashlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final

from bench import NOTES, Choice, Deadline, finish, new_folder, options, show, tell
from mps import share_among, shared_gpu
from planned_runs import CommandFailed, Commands, error_of, job_text
from swept import NUM_WARM_UP_STEPS, Setting, Tried, sweep

from isthmus import load_job, plan
from isthmus.errors import IsthmusError
from isthmus.plan.codecs import Crossing, read_pair
from isthmus.plan.plan import Decisions, plan_to_json
from isthmus.train.data.rows import open_rows

CLOUDS: Final = ("east", "west", "north")
RAW: Final = ("raw", "raw")
INT8: Final = ("rotate | int8", "rotate | int8(stochastic)")
INT4: Final = ("center | rotate | int4", "rotate | int4(stochastic)")
SEQUENCE_LENGTH: Final = 1024
# The tales are some 60,000 tokens, and a step reads up to 262,144.
NUM_COPIES: Final = 6
# Times the predicted step; predictions are nearer than that.
MOST_ON_LINE: Final = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuJob:
    """A model on some clouds over a WAN."""

    name: str
    family: str
    width: int
    num_layers: int
    links: tuple[tuple[float, float], ...]
    """Mbit/s and ms of each."""
    batch_tokens: int = 131072
    compiles: bool = False

    @property
    def clouds(self) -> tuple[str, ...]:
        """In a row."""
        return CLOUDS[: len(self.links) + 1]

    def line_s(self, setting: Setting) -> float:
        """How long the slowest line is busy with a step's activations, if their elements have 16 bits."""
        crossing = Crossing(
            num_rows=self.batch_tokens // setting.num_microbatches, width=self.width, element_bytes=2
        )
        each = zip(setting.codecs, self.links, strict=True)
        return setting.num_microbatches * max(
            8 * read_pair(codecs).forward_bytes(crossing) / (mbps * 1e6) for codecs, (mbps, _) in each
        )

    def text(self, data: Path, *, device: str, is_tiny: bool, num_steps: int) -> str:
        """The job file, with micro-batches, codecs and cut left open."""
        width, num_layers = (64, max(4, len(self.clouds))) if is_tiny else (self.width, self.num_layers)
        length = 64 if is_tiny else SEQUENCE_LENGTH
        heads = max(1, width // 64)
        config: dict[str, object] = {
            "model_type": self.family,
            "vocab_size": 512 if is_tiny else 32000,
            "hidden_size": width,
            "intermediate_size": 11 * width // 4,
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": length,
        }
        if self.family == "gpt2":
            config = {
                "model_type": "gpt2",
                "vocab_size": config["vocab_size"],
                "n_embd": width,
                "n_layer": num_layers,
                "n_head": heads,
                "n_positions": length,
            }
        return job_text(
            f"gpu-{self.name}",
            config=config,
            clouds=self.clouds,
            links=self.links,
            device=device,
            codec="auto",
            # The planner may choose whatever the sweep tries.
            limits={"codec_loss": "some"},
            data={"source": str(data), "sequence_length": length},
            train={
                "steps": num_steps,
                "batch_tokens": 32 * length if is_tiny else self.batch_tokens,
                "precision": "float32" if is_tiny else "bfloat16",
                "learning_rate": 1e-4,
                "evaluate_every": 0,
                "compile": self.compiles and not is_tiny,
            },
        )


JOBS: Final = (
    # The job that was planned with 256 micro-batches and took four times as long as predicted.
    GpuJob(
        name="launches", family="llama", width=2048, num_layers=16, links=((1000, 60),), batch_tokens=262144
    ),
    GpuJob(name="olmo2", family="olmo2", width=1536, num_layers=16, links=((500, 40),)),
    GpuJob(name="granite", family="granite", width=1024, num_layers=24, links=((2000, 20),)),
    GpuJob(name="thin", family="llama", width=1024, num_layers=16, links=((200, 100),)),
    GpuJob(name="compiled", family="llama", width=1536, num_layers=16, links=((10000, 20),), compiles=True),
    GpuJob(name="three", family="gpt2", width=1280, num_layers=18, links=((1000, 30), (400, 80))),
    GpuJob(
        name="three-compiled",
        family="olmo2",
        width=1280,
        num_layers=18,
        links=((4000, 20), (1000, 60)),
        compiles=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One job: its sealed prediction, and what was tried; the planned choice is the first."""

    job: str
    predicted_s: float
    sha256: str
    layers: tuple[int, ...]
    tried: tuple[Tried, ...]
    run_s: float | None = None
    """A step of `isthmus run` by the planned choice, where that was asked for."""

    @property
    def planned(self) -> Tried:
        """The planned choice."""
        return self.tried[0]

    @property
    def error(self) -> float:
        """Of the prediction."""
        return error_of(self.predicted_s, self.planned.step_s)

    @property
    def best(self) -> Tried:
        """The fastest of all."""
        return min(self.tried, key=lambda one: one.step_s)

    @property
    def share_of_best(self) -> float:
        """The throughput of the planned choice by that of the best."""
        return self.best.step_s / self.planned.step_s

    def record(self) -> dict[str, Any]:
        """All that is known of it."""
        return {**asdict(self), "error": self.error, "share_of_best": self.share_of_best}


def settings_of(decisions: Decisions, num_sequences: int, *, is_quick: bool) -> list[Setting]:
    """The planned choice; other micro-batches with its codecs; other codecs with its micro-batches."""
    number, codecs = decisions.num_microbatches, decisions.codecs
    factors = (0.5, 2.0) if is_quick else (0.25, 0.5, 2.0, 4.0)
    numbers = sorted({round(number * factor) for factor in factors} - {number})
    found = [Setting(num_microbatches=number, codecs=codecs)]
    found += [
        Setting(num_microbatches=one, codecs=codecs)
        for one in numbers
        if 2 <= one <= num_sequences and num_sequences % one == 0
    ]
    others = [(pair,) * len(codecs) for pair in (RAW, INT8, INT4)]
    return found + [Setting(num_microbatches=number, codecs=one) for one in others if one != codecs]


def worth_trying(job: GpuJob, settings: Sequence[Setting], predicted_s: float) -> list[Setting]:
    """Those that a patient user would try: the line alone does not take longer than the planned step."""
    hopeless = [one for one in settings if job.line_s(one) > MOST_ON_LINE * predicted_s]
    for one in hopeless:
        NOTES.print(f"{job.name}: {one.words} not tried, its bytes alone take {job.line_s(one):.2f} s")
    return [one for one in settings if one not in hopeless]


def write_data(folder: Path) -> Path:
    """Write the built-in tales so often that the largest batch can be read; returns the file."""
    path = folder / "tales.txt"
    if not path.exists():
        tales = "\n".join(str(row["text"]) for row in open_rows("builtin:tales"))
        path.write_text("\n".join([tales] * NUM_COPIES))
    return path


def outcome_of(job: GpuJob, given: argparse.Namespace, out: Path) -> Outcome:
    """Plan, seal the prediction, then try the choice and the others."""
    folder = out / job.name
    folder.mkdir()
    path = folder / "job.toml"
    path.write_text(job.text(write_data(out), device=given.device, is_tiny=given.tiny, num_steps=given.steps))
    loaded = load_job(path)
    begun_s = time.monotonic()
    planned = plan(loaded, is_quick=True, note=NOTES.print)
    if planned.decisions is None:
        raise CommandFailed(f"{job.name}: the plan is no pipeline")
    sealed = folder / "prediction.json"
    sealed.write_text(plan_to_json(planned))
    sha256 = hashlib.sha256(sealed.read_bytes()).hexdigest()
    NOTES.print(
        f"{job.name}: predicted {planned.estimate.step_s:.3f} s, sha256 {sha256}, "
        f"planned in {time.monotonic() - begun_s:.0f} s"
    )
    num_sequences = 32 if given.tiny else job.batch_tokens // SEQUENCE_LENGTH
    settings = settings_of(planned.decisions, num_sequences, is_quick=given.quick or job.compiles)
    if not given.tiny:
        settings[1:] = worth_trying(job, settings[1:], planned.estimate.step_s)
    tried = sweep(
        loaded,
        planned.decisions,
        settings if job.name in given.sweep else settings[:1],
        num_steps=given.steps,
        report=NOTES.print,
    )
    if not tried or tried[0].setting != settings[0]:
        raise CommandFailed(f"{job.name}: the planned choice did not run")
    commands = Commands(cache=Path(os.environ["XDG_CACHE_HOME"]), limit_s=given.limit_s)
    return Outcome(
        job=job.name,
        predicted_s=planned.estimate.step_s,
        sha256=sha256,
        layers=planned.decisions.layers,
        tried=tuple(tried),
        run_s=statistics.median(commands.run(path, folder / "runs")) if job.name in given.run else None,
    )


def table_row(one: Outcome) -> dict[str, str]:
    """The row of a job."""
    planned, best = one.planned.setting, one.best.setting
    return {
        "job": one.job,
        "micro-batches": str(planned.num_microbatches),
        "layers": " + ".join(map(str, one.layers)),
        "codec": planned.codecs[0][0],
        "predicted": f"{one.predicted_s:.3f} s",
        "measured": f"{one.planned.step_s:.3f} s",
        "error": f"{one.error:+.1%}",
        "isthmus run": "" if one.run_s is None else f"{one.run_s:.3f} s",
        "best by hand": f"{one.best.step_s:.3f} s ({best.num_microbatches}, {best.codecs[0][0]})",
        "share of the best": f"{one.share_of_best:.1%}",
    }


def run_all(given: argparse.Namespace, out: Path, deadline: Deadline) -> list[Outcome]:
    """All jobs, one after the other, while there is time."""
    found: list[Outcome] = []
    with shared_gpu(is_wanted=given.device != "cpu") as is_shared:
        for job in given.jobs:
            if not deadline.leaves():
                break
            if is_shared:
                share_among(len(job.clouds))
            try:
                found.append(outcome_of(job, given, out))
            except (CommandFailed, IsthmusError) as failed:
                NOTES.print(f"{job.name}: {failed}")
            else:
                tell(found[-1].record())
    return found


def main() -> None:
    """Plan, seal, sweep; print the table and a JSON line."""
    given = options(
        __doc__,
        jobs=Choice([one.name for one in JOBS], [one.name for one in JOBS]),
        run=Choice([], [one.name for one in JOBS]),
        sweep=Choice([one.name for one in JOBS], [*(one.name for one in JOBS), "none"]),
        quick=False,
        steps=NUM_WARM_UP_STEPS + 3,
        limit_s=300.0,
        deadline_s=float,
        device="cuda",
        tiny=False,
        out=Path("runs/plan-on-gpu"),
    )
    names, by_name = given.jobs, {one.name: one for one in JOBS}
    given.jobs = [by_name[name] for name in names]
    out = new_folder(given.out)
    os.environ["XDG_CACHE_HOME"] = str(out / "cache")
    start_server()
    found = run_all(given, out, Deadline.after(given.deadline_s))
    missing = sorted({*names} - {one.job for one in found})
    show([table_row(one) for one in found])
    finish(
        "plan_on_gpu",
        "torch",
        "transformers",
        device=given.device,
        is_tiny=given.tiny,
        jobs=[one.record() for one in found],
        missing=missing,
    )


def start_server() -> None:
    """Start the server from which ranks are forked, with all imports that they need, once for all jobs."""
    modules = ["isthmus.train.session", "isthmus.train.rehearsal", "swept"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()


if __name__ == "__main__":
    main()
