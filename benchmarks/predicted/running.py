"""The real runs: the product's worker over the product's link, with nothing of the predictions."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench import Deadline
from member import pipeline_config, run_member

from isthmus.plan.codecs import Crossing
from isthmus.plan.scenario import Policy
from isthmus.train.build import AUTOCAST
from isthmus.train.device import Device
from predicted.cases import Case
from predicted.journey import Visit
from predicted.predicting import NUM_STEPS, NUM_WARM_UP_STEPS

_IDLE: Final = 3  # as proc(5) numbers the columns of /proc/stat


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step at the first stage: how long it took, how long each stage computed, its windows."""

    duration_s: float
    busy_s: tuple[float, ...]
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The steps of one case that count."""

    number: int
    steps: tuple[MeasuredStep, ...]
    idle_share: float | None
    """Of all processors of the machine; None where it cannot be told."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Measured":
        """From plain values."""
        steps = tuple(
            MeasuredStep(
                duration_s=one["duration_s"], busy_s=tuple(one["busy_s"]), windows=tuple(one["windows"])
            )
            for one in values["steps"]
        )
        return cls(number=values["number"], steps=steps, idle_share=values["idle_share"])

    @property
    def median(self) -> MeasuredStep:
        """The step in the middle."""
        return sorted(self.steps, key=lambda step: step.duration_s)[len(self.steps) // 2]


def run(visit: Visit, *, deadline: Deadline) -> None:
    """Run the cases of a WAN, one after the other, while there is time, and tell of each."""
    longest_s = 0.0
    for case in visit.cases:
        stage = visit.stage(case)
        if not visit.meet(goes_on=deadline.leaves(longest_s)):
            break
        if visit.index == 0:
            visit.report(f"running case {case.number}")
        started_s = time.monotonic()
        measured = _run_case(case, visit, stage)
        longest_s = max(longest_s, time.monotonic() - started_s)
        if visit.index == 0:
            visit.ended(asdict(measured))
    visit.meet()


def _run_case(case: Case, visit: Visit, stage: Any) -> Measured:
    size, width = case.stages.size, stage.model.config.hidden_size
    config = pipeline_config(
        case.wan.clouds,
        pair=case.pair,
        crossing=Crossing(num_rows=size.num_sequences * size.sequence_length, width=width),
        num_steps=NUM_WARM_UP_STEPS + NUM_STEPS,
        num_microbatches=case.num_microbatches,
        max_in_flight=case.num_microbatches,
        policy=Policy(case.policy),
    )
    before = _ticks()
    record = run_member(
        config,
        visit.cloud,
        visit.links,
        stage=stage,
        device=Device(case.stages.device),
        source=case.stages.source(case.num_microbatches) if visit.index == 0 else None,
        autocast=AUTOCAST[size.precision.value],
    )
    after = _ticks()
    return Measured(
        number=case.number,
        idle_share=_idle_share(before, after),
        steps=tuple(
            MeasuredStep(duration_s=one.duration_s, busy_s=one.busy_s, windows=one.windows)
            for one in record.steps[NUM_WARM_UP_STEPS:]
        ),
    )


def _ticks() -> list[int]:
    """What Linux has counted of its processors' time, by what they did; nothing elsewhere."""
    path = Path("/proc/stat")
    return [int(one) for one in path.read_text().split("\n", 1)[0].split()[1:]] if path.exists() else []


def _idle_share(before: list[int], after: list[int]) -> float | None:
    passed = [late - early for early, late in zip(before, after, strict=True)]
    return passed[_IDLE] / sum(passed) if passed else None
