"""Plans of jobs on one GPU beside the best that a sweep by hand finds, with real kernels.

python benchmarks/plan_on_gpu.py [--jobs NAME,…] [--quick | --no-sweep] [--steps N] [--limit-s S]
                                 [--deadline-s S] [--device KIND] [--tiny] [--out DIR] [--json]

Clouds share one GPU by NVIDIA's MPS, each with an equal part of its multiprocessors, and are joined through
the emulated WAN. For each job, in this order: `isthmus plan` measures, chooses micro-batches, cut and codecs,
and its prediction is written to a file, whose hash is printed; `isthmus run` runs that choice; then a sweep
runs other micro-batches and codecs. The table says how near the prediction came, and what share of the best
throughput the planned choice reached. A job for which no time is left is named as missing: with --jobs a few
of them fit into ten minutes. With --device cpu --tiny the same is tried on small models.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench import Deadline, machine, tell
from mps import shared_gpu
from planned_runs import CommandFailed, Commands, Planned, error_of, job_text, middle
from rich.console import Console
from rich.table import Table

from isthmus.train.data.corpora import CORPORA

CLOUDS: Final = ("east", "west", "north")
RAW: Final = ("raw", "raw")
INT8: Final = ("rotate | int8", "rotate | int8(stochastic)")
INT4: Final = ("center | rotate | int4", "rotate | int4(stochastic)")
SEQUENCE_LENGTH: Final = 1024
# The tales are some 60,000 tokens, and a step reads up to 262,144.
NUM_COPIES: Final = 6


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
class Choice:
    """What was tried by hand."""

    num_microbatches: int
    codec: tuple[str, str]
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One job: planned, run as planned, and swept."""

    job: str
    planned: Planned
    measured_s: float
    tried: tuple[Choice, ...]

    @property
    def error(self) -> float:
        """Of the prediction."""
        return error_of(self.planned.step_s, self.measured_s)

    @property
    def best_s(self) -> float:
        """The shortest step of all, the planned one among them."""
        return min([self.measured_s, *(one.step_s for one in self.tried)])

    @property
    def share_of_best(self) -> float:
        """The throughput of the planned choice by that of the best."""
        return self.best_s / self.measured_s

    def record(self) -> dict[str, Any]:
        """All that is known of it."""
        return {
            **asdict(self),
            "error": self.error,
            "best_s": self.best_s,
            "share_of_best": self.share_of_best,
        }


def sweep(planned: Planned, num_sequences: int, *, is_quick: bool) -> Iterator[tuple[int, tuple[str, str]]]:
    """Other micro-batches with the planned codecs, and other codecs with the planned micro-batches."""
    factors = (0.5, 2.0) if is_quick else (0.25, 0.5, 2.0, 4.0)
    numbers = {round(planned.num_microbatches * factor) for factor in factors}
    own = planned.codecs[0]
    possible = sorted(one for one in numbers if 1 <= one <= num_sequences and num_sequences % one == 0)
    yield from ((number, own) for number in possible)
    others = [one for one in (RAW, INT8, INT4) if one != own]
    yield from ((planned.num_microbatches, codec) for codec in (others[:1] if is_quick else others))


def write_data(folder: Path) -> Path:
    """Write the built-in tales so often that the largest batch can be read; returns the file."""
    path = folder / "tales.txt"
    if not path.exists():
        tales = "\n".join(str(row["text"]) for row in CORPORA["tales"]())
        path.write_text("\n".join([tales] * NUM_COPIES))
    return path


def outcome_of(
    job: GpuJob, options: argparse.Namespace, out: Path, notes: Console, deadline: Deadline
) -> Outcome:
    """Plan, run the choice, sweep while there is time."""
    folder = out / job.name
    folder.mkdir()
    path = folder / "job.toml"
    text = job.text(write_data(out), device=options.device, is_tiny=options.tiny, num_steps=options.steps)
    path.write_text(text)
    commands = Commands(cache=folder / "cache", limit_s=options.limit_s)
    planned = commands.plan(path, folder / "prediction.json")
    notes.print(f"{job.name}: predicted, sha256 {planned.sha256}")
    measured_s = middle(commands.run(path, folder / "runs"))
    num_sequences = 32 if options.tiny else job.batch_tokens // SEQUENCE_LENGTH
    tried: list[Choice] = []
    longest_s = 0.0
    choices = () if options.no_sweep else sweep(planned, num_sequences, is_quick=options.quick)
    for number, codec in choices:
        if not deadline.leaves(longest_s):
            notes.print(f"{job.name}: no time was left for {number} micro-batches with {codec[0]}")
            break
        started_s = time.monotonic()
        notes.print(f"{job.name}: {number} micro-batches, {codec[0]}")
        try:
            swept, given = _swept(folder, planned, number, codec)
            steps_s = commands.run(swept, folder / "runs", "--no-profile", *given)
        except CommandFailed as failed:
            notes.print(f"{job.name}: {failed}")
        else:
            tried.append(Choice(num_microbatches=number, codec=codec, step_s=middle(steps_s)))
        longest_s = max(longest_s, time.monotonic() - started_s)
    return Outcome(job=job.name, planned=planned, measured_s=measured_s, tried=tuple(tried))


def _swept(folder: Path, planned: Planned, number: int, codec: tuple[str, str]) -> tuple[Path, list[str]]:
    """The job with these codecs, and options that leave nothing else open."""
    path = folder / "swept.toml"
    both = f'codec = {{ forward = "{codec[0]}", backward = "{codec[1]}" }}'
    path.write_text((folder / "job.toml").read_text().replace('codec = "auto"', both))
    layers = ", ".join(map(str, planned.layers))
    return path, ["--set", f"strategy.microbatches={number}", "--set", f"strategy.layers=[{layers}]"]


def show(found: Sequence[Outcome]) -> Table:
    """The table."""
    columns = ("job", "micro-batches", "layers", "codec", "predicted", "measured", "error")
    table = Table(*columns, "best by hand", "share of the best")
    for one in found:
        best = min(one.tried, key=lambda choice: choice.step_s, default=None)
        by_hand = "" if best is None else f"{best.step_s:.3f} s ({best.num_microbatches}, {best.codec[0]})"
        table.add_row(
            one.job,
            str(one.planned.num_microbatches),
            " + ".join(map(str, one.planned.layers)),
            one.planned.codecs[0][0],
            f"{one.planned.step_s:.3f} s",
            f"{one.measured_s:.3f} s",
            f"{one.error:+.0%}",
            by_hand,
            f"{one.share_of_best:.0%}",
        )
    return table


def chosen_jobs(options: argparse.Namespace) -> list[GpuJob]:
    """The jobs that were asked for."""
    known: Mapping[str, GpuJob] = {one.name: one for one in JOBS}
    return [known[name] for name in options.jobs.split(",")] if options.jobs else list(JOBS)


def run_all(options: argparse.Namespace, out: Path, notes: Console, deadline: Deadline) -> list[Outcome]:
    """All jobs, one after the other, while there is time."""
    found: list[Outcome] = []
    for job in chosen_jobs(options):
        if not deadline.leaves():
            break
        with shared_gpu(is_wanted=options.device != "cpu", max_percent=100 // len(job.clouds)):
            try:
                found.append(outcome_of(job, options, out, notes, deadline))
            except CommandFailed as failed:
                notes.print(f"{job.name}: {failed}")
            else:
                tell(found[-1].record())
    return found


def main() -> None:
    """Plan, run, sweep; print the table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", help=f"names, separated by commas: {', '.join(one.name for one in JOBS)}")
    parser.add_argument("--quick", action="store_true", help="a smaller sweep")
    parser.add_argument("--no-sweep", action="store_true", help="run the planned choice alone")
    parser.add_argument(
        "--steps", type=int, default=7, help="of a run, the first three of which do not count"
    )
    parser.add_argument("--limit-s", type=float, default=150.0, help="for each command")
    parser.add_argument("--deadline-s", type=float, help="start nothing that would end later than that")
    parser.add_argument("--device", default="cuda", help="as in a job; cpu only to try it")
    parser.add_argument("--tiny", action="store_true", help="small models, to try it")
    parser.add_argument("--out", type=Path, default=Path("runs/plan-on-gpu"), help="folder of files")
    parser.add_argument("--json", action="store_true", help="nothing but JSON lines")
    options = parser.parse_args()
    out = (options.out / time.strftime("%Y%m%d-%H%M%S")).resolve()
    out.mkdir(parents=True)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    found = run_all(options, out, notes, Deadline.after(options.deadline_s))
    missing = sorted({one.name for one in chosen_jobs(options)} - {one.job for one in found})
    if missing:
        notes.print(f"missing: {', '.join(missing)}")
    if not options.json:
        Console(width=150).print(show(found))
    tell(
        {
            "benchmark": "plan_on_gpu",
            **machine("torch", "transformers"),
            "device": options.device,
            "is_tiny": options.tiny,
            "jobs": [one.record() for one in found],
            "missing": missing,
        }
    )


if __name__ == "__main__":
    main()
