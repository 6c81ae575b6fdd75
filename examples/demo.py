"""Trains one model twice over the same thin link, and prints both runs side by side.

python examples/demo.py

Two clouds on this machine are joined by an emulated WAN of 20 Mbit/s and 60 ms. The first run is the pipeline
that most would write: 1F1B, hidden states as they are. The second one is examples/thin-link.toml as it
stands: Isthmus's schedule, which keeps the link busy, and four bits for each number that crosses.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isthmus import load_job, report, run
from isthmus.observe.report import RunReport

JOB = Path(__file__).parent / "thin-link.toml"
SHORT = ["train.steps=24", "train.evaluate_every=24", "train.evaluate_without_codec=false"]
USUAL = ["strategy.policy=1f1b", "link.0.codec=raw"]
MIB = 2**20


def train(title: str, overrides: list[str]) -> RunReport:
    print(f"\n{title}")

    def show(cloud: str, told: Mapping[str, Any]) -> None:
        if cloud == "east" and told["kind"] == "step" and told["step"] % 6 == 5:
            print(f"  step {told['step'] + 1:3}  loss {told['loss']:.3f}  {told['duration_s']:.2f} s a step")

    with tempfile.TemporaryDirectory() as folder:
        trained = run(
            load_job(JOB, overrides=[*SHORT, *overrides]), runs=folder, measure=False, on_report=show
        )
        return report(trained.run)


def row(
    title: str, both: tuple[RunReport, RunReport], figure: Callable[[RunReport], float], form: str
) -> str:
    first, second = (figure(one) for one in both)
    return f"{title:30} {form.format(first):>14} {form.format(second):>14}"


def main() -> None:
    usual = train("1F1B, hidden states as they are", USUAL)
    ours = train("Isthmus: WAN-1F1B, rotate | int4", [])
    both = usual, ours
    print(f"\nover 20 Mbit/s and 60 ms, 24 steps\n{'':30} {'1F1B, raw':>14} {'Isthmus':>14}")
    print(row("a step takes", both, lambda one: one.summary.step_s or 0.0, "{:.2f} s"))
    print(row("of it a cloud waits", both, lambda one: one.summary.bubble or 0.0, "{:.0%}"))
    print(row("crosses the WAN in all", both, lambda one: one.summary.num_bytes / MIB, "{:.1f} MiB"))
    print(row("training loss at the end", both, lambda one: one.summary.last_loss or 0.0, "{:.3f}"))
    print(row("validation loss", both, lambda one: one.summary.validation_loss or 0.0, "{:.3f}"))
    if usual.summary.step_s and ours.summary.step_s:
        print(f"\nIsthmus is {usual.summary.step_s / ours.summary.step_s:.1f} times as fast.")


# Every rank is a process of its own, which imports this file again.
if __name__ == "__main__":
    main()
