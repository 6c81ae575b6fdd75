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

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import Choice, Deadline, finish, options, show, tell
from memory.cases import LEARNS, MODELS, SHARDINGS, Case, cases
from memory.measuring import measure, predict

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


def table_row(one: Found) -> dict[str, str]:
    case = one.case
    return {
        "model": case.model,
        "stage": case.place,
        "learns": case.learns,
        "sharding": case.sharding.value,
        "precision": case.precision.value,
        "recompute": "yes" if case.recompute else "no",
        "in flight": str(case.window),
        "predicted": f"{one.predicted.total_bytes / MIB:.1f} MiB",
        "allocator": f"{one.num_bytes / MIB:.1f} MiB",
        "error": f"{one.error:+.1%}",
    }


def main() -> None:
    """Predict, measure, print the table and a JSON line."""
    given = options(
        __doc__,
        device="auto",
        quick=False,
        models=Choice([], list(MODELS)),
        learns=Choice(list(LEARNS), LEARNS),
        sharding=Choice(list(SHARDINGS), SHARDINGS),
        deadline_s=float,
    )
    models = given.models or (["llama", "gpt2", "bert"] if given.quick else list(MODELS))
    device = Device(given.device)
    chosen = [
        case
        for case in cases(models, is_quick=given.quick, on_accelerator=device.is_accelerator)
        if case.learns in given.learns and case.sharding in given.sharding
    ]
    found = measure_all(chosen, device, Deadline.after(given.deadline_s))
    show([table_row(one) for one in found])
    errors = [abs(one.error) for one in found]
    if errors:
        print(
            f"{len(found)} of {len(chosen)} cases: mean error {statistics.mean(errors):.1%}, "
            f"worst {max(errors):.1%}"
        )
    finish(
        "memory_prediction",
        "torch",
        "transformers",
        device=str(device.torch_device),
        num_cases_wanted=len(chosen),
        cases=[one.record() for one in found],
    )


if __name__ == "__main__":
    main()
