"""What a simulated run came to: spans as the workers write them, steps, traffic, and what a fault cost."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from isthmus.events import Span
from isthmus.plan.end_of_step import StepEnded
from isthmus.plan.types import Facts, Member

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
    """A cloud has failed, which ends a pipeline; what was computed since the last safe step is lost."""

    cloud: str
    at_s: float
    step: int
    """The step that was under way."""
    safe_step: int
    """The step from which the run can go on: the last whose state is whole without that cloud, or 0."""
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A fact that a member told, and when."""

    member: Member
    at_s: float
    fact: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated run."""

    spans: tuple[Span, ...]
    steps: tuple[SimulatedStep, ...]
    traffic: tuple[LineTraffic, ...]
    stopped: Stopped | None = None
    told: tuple[Told, ...] = ()

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


class Recording:
    """Collects what happens in a simulated run; steps end as the first member tells it."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._first = members[0]
        self._num_ranks = Counter(member.cloud for member in members)
        self._spans: list[Span] = []
        self._told: list[Told] = []
        self._ended: list[tuple[float, StepEnded]] = []
        self._busy_s: defaultdict[tuple[str, int], float] = defaultdict(float)

    @property
    def num_steps(self) -> int:
        """How many steps have ended."""
        return len(self._ended)

    def note(
        self, end_s: float, track: str, kind: str, name: str, start_s: float, num_bytes: int = 0
    ) -> None:
        """Note a span that ends now."""
        self._spans.append(Span(track, name, kind, start_s, end_s, num_bytes))

    def compute(self, cloud: str, step: int, busy_s: float) -> None:
        """Count what one rank of a cloud computed for a step."""
        self._busy_s[cloud, step] += busy_s

    def tell(self, member: Member, at_s: float, fact: Facts) -> None:
        """Note a fact that a member tells."""
        self._told.append(Told(member=member, at_s=at_s, fact=fact))
        if isinstance(fact, StepEnded) and member == self._first:
            self._ended.append((at_s, fact))

    def timeline(self, *, traffic: Iterable[LineTraffic], stopped: Stopped | None) -> Timeline:
        """The timeline of what was recorded."""
        return Timeline(
            spans=tuple(self._spans),
            steps=tuple(self._steps()),
            traffic=tuple(traffic),
            stopped=stopped,
            told=tuple(self._told),
        )

    def _steps(self) -> Iterator[SimulatedStep]:
        starts_s = [0.0, *(at_s for at_s, _ in self._ended)]
        for start_s, (end_s, fact) in zip(starts_s, self._ended, strict=False):
            busy_s = (self._busy_s[one, fact.step] / number for one, number in self._num_ranks.items())
            yield SimulatedStep(
                step=fact.step, start_s=start_s, end_s=end_s, busy_s=tuple(busy_s), windows=fact.windows
            )


class SafeStep:
    """Knows from which step a run could continue without one of its clouds; step 0 needs no copy."""

    def __init__(self, num_members: int) -> None:
        self._num_members = num_members
        self._missing: dict[int, int] = {}
        self._taken_s: dict[int, float] = {}
        self.newest = (0, 0.0)
        """The step, and when its state was taken."""

    def expect(self, step: int, *, at_s: float) -> None:
        """A member saves the state of a step; the first to do so sets its time."""
        self._missing.setdefault(step, self._num_members)
        self._taken_s.setdefault(step, at_s)

    def arrive(self, step: int) -> None:
        """One member's state has arrived where it is kept."""
        self._missing[step] -= 1
        if not self._missing[step] and step > self.newest[0]:
            self.newest = (step, self._taken_s[step])
