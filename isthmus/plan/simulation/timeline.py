"""What a simulated run came to: spans as the workers write them, steps, traffic, and what a fault cost."""

import math
import statistics
from dataclasses import dataclass
from typing import Final

from isthmus.events import Span

_NUM_WARM_UP_STEPS: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step, from its start to the end of its update at the first stage.

    `busy_s` is how long a rank of each stage computed on average, `windows` what each rank kept in flight.
    """

    step: int
    start_s: float
    end_s: float
    busy_s: tuple[float, ...]
    windows: tuple[int, ...]

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of it in which each stage did not compute."""
        duration_s = self.duration_s
        return tuple(max(0.0, 1 - busy_s / duration_s) if duration_s else 0.0 for busy_s in self.busy_s)

    @property
    def bubble(self) -> float:
        """The mean over stages."""
        return statistics.fmean(self.bubbles)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTraffic:
    """What crossed one line: messages down and up the pipeline, and copies of checkpoints."""

    between: tuple[str, str]
    down_bytes: int
    up_bytes: int
    checkpoint_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A cloud was gone, which ends a pipeline; what was computed since the last safe step is lost."""

    cloud: str
    at_s: float
    step: int
    """The step that was under way."""
    safe_step: int
    """The step from which the run can go on: the last whose state is whole without that cloud, or 0."""
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated run."""

    spans: tuple[Span, ...]
    steps: tuple[SimulatedStep, ...]
    traffic: tuple[LineTraffic, ...]
    stopped: Stopped | None = None

    @property
    def step_s(self) -> float:
        """The median time of a step; the first, in which windows are not measured yet, counts only alone.

        NaN where not even one has ended.
        """
        durations_s = [step.duration_s for step in self.steps]
        return statistics.median(durations_s[_NUM_WARM_UP_STEPS:] or durations_s or [math.nan])

    @property
    def bubble(self) -> float:
        """The mean over the steps that count for `step_s`."""
        bubbles = [step.bubble for step in self.steps]
        return statistics.fmean(bubbles[_NUM_WARM_UP_STEPS:] or bubbles or [math.nan])
