"""Memory that the planner predicts for a stage, beside what the allocator reports for the real one.

python benchmarks/memory_prediction.py [--device auto|cpu|cuda] [--quick] [--models llama gpt2 ...]
                                       [--learns all adapters frozen] [--sharding none optimizer full]
                                       [--deadline-s S]

Each case is one stage of a real model in training: passes, optimizer, several micro-batches in flight. The
prediction is made from the configuration alone, before the stage is built. Some stages train adapters alone,
have frozen layers, or are dealt out by FSDP2, to one rank. The allocator's word is torch's: its memory events
on a CPU, the peak of what is allocated on an accelerator. A case runs two steps, and the second, when the
optimizer's state is there, is measured. A case that is done is a JSON line; what there is no time for is
named.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deadline import Deadline, tell
from machine import machine
from memory.cases import LEARNS, MODELS, SHARDINGS, Case, cases
from memory.measuring import measure, predict
from rich.console import Console
from rich.table import Table

from isthmus.plan.memory import Memory
from isthmus.train.device import Device

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A case, what was predicted, and what the allocator says."""

    case: Case
    predicted: Memory
    num_bytes: int

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted.total_bytes / self.num_bytes - 1

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **asdict(self.case),
            "precision": self.case.precision.value,
            "lora": self.case.lora and self.case.lora.model_dump(),
            "predicted": asdict(self.predicted),
            "bytes": self.num_bytes,
            "error": self.error,
        }


def measure_all(chosen: Sequence[Case], device: Device, deadline: Deadline) -> list[Found]:
    """Predict and measure the cases that there is time for."""
    found: list[Found] = []
    longest_s = 0.0
    for case in chosen:
        if not deadline.leaves(longest_s):
            break
        started_s = time.monotonic()
        predicted = predict(case, on_accelerator=device.is_accelerator)
        found.append(Found(case=case, predicted=predicted, num_bytes=measure(case, device)))
        longest_s = max(longest_s, time.monotonic() - started_s)
        tell(found[-1].record())
    return found


def show(console: Console, rows: Sequence[Found], num_wanted: int) -> None:
    """The table, and the errors in a line."""
    header = ("model", "stage", "learns", "sharding", "precision", "recompute", "in flight")
    table = Table(*header, "predicted", "allocator", "error")
    for one in rows:
        case = one.case
        table.add_row(
            case.model,
            case.place,
            case.learns,
            case.sharding.value,
            case.precision.value,
            "yes" if case.recompute else "no",
            str(case.window),
            f"{one.predicted.total_bytes / MIB:.1f} MiB",
            f"{one.num_bytes / MIB:.1f} MiB",
            f"{one.error:+.1%}",
        )
    console.print(table)
    errors = [abs(one.error) for one in rows]
    console.print(f"{len(rows)} cases: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}")
    if len(rows) < num_wanted:
        console.print(f"cut off by the deadline: {num_wanted} cases were wanted")


def main() -> None:
    """Predict, measure, print the table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL")
    parser.add_argument("--learns", nargs="+", choices=LEARNS, default=LEARNS, help="what is trained")
    parser.add_argument(
        "--sharding", nargs="+", choices=SHARDINGS, default=SHARDINGS, help="what FSDP2 deals out"
    )
    parser.add_argument("--deadline-s", type=float, help="begin no case that would end later than that")
    options = parser.parse_args()
    deadline = Deadline.after(options.deadline_s)
    models = options.models or (["llama", "gpt2", "bert"] if options.quick else list(MODELS))
    device = Device(options.device)
    chosen = [
        case
        for case in cases(models, is_quick=options.quick, on_accelerator=device.is_accelerator)
        if case.learns in options.learns and case.sharding in options.sharding
    ]
    found = measure_all(chosen, device, deadline)
    if found:
        show(Console(width=120), found, len(chosen))
    about = {"device": str(device.torch_device), "num_cases_wanted": len(chosen)}
    line = {**machine("torch", "transformers"), **about, "cases": [one.record() for one in found]}
    tell({"benchmark": "memory_prediction", **line})


if __name__ == "__main__":
    main()
