"""Measured beside predicted: how far off each kind of span, the step, the bubble and the bytes were."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from isthmus.events import Span
from isthmus.intervals import Interval
from isthmus.observe.recorded import Recorded
from isthmus.observe.timeline import (
    LINE_MARK,
    Chart,
    chart_of_step,
    cloud_of,
    clouds_in_order,
    lay_out,
    shifted,
    step_bounds,
)
from isthmus.observe.waits import Waits, waits_of
from isthmus.plan.scenario import Scenario
from isthmus.plan.simulated_pipeline import simulate_scenario
from isthmus.plan.simulation.timeline import Timeline

_KINDS: Final = ("forward", "backward", "optimize", "encode", "transfer", "decode")
_NUM_WARM_UP_STEPS: Final = 1
_NUM_PREDICTED_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One figure, predicted and measured; None where there is none."""

    kind: str
    track: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """How much too long, or too short below 0, the prediction was."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run beside what was predicted for it; without a plan only the measured part is there."""

    clouds: tuple[str, ...]
    step: Pair
    durations: tuple[Pair, ...]
    """Median seconds of one span, by kind and track."""
    bytes_per_step: tuple[Pair, ...]
    measured_waits: tuple[Waits, ...]
    predicted_waits: tuple[Waits, ...]
    losses: tuple[tuple[int, float], ...]
    measured_chart: Chart | None
    predicted_chart: Chart | None
    bubble_split: Mapping[str, float]
    """The predicted bubble by what it is spent on, as the plan has it."""

    def error_of(self, kind: str) -> float | None:
        """The mean size of the errors of a kind over its tracks."""
        errors = [abs(one.error) for one in self.durations if one.kind == kind and one.error is not None]
        return statistics.fmean(errors) if errors else None


def compare(recorded: Recorded) -> Comparison:
    """Lay what was measured over what the plan's scenario predicts."""
    scenario = None if recorded.planned is None else recorded.planned.scenario
    timeline = None if scenario is None else simulate_scenario(scenario, num_steps=_NUM_PREDICTED_STEPS)
    clouds = _clouds(recorded, scenario)
    measured = _measured_spans(recorded.spans)
    predicted = _measured_spans(timeline.spans) if timeline is not None else []
    steps = recorded.steps
    return Comparison(
        clouds=clouds,
        step=Pair(
            kind="step", track="all", predicted=_predicted_s(recorded, timeline), measured=_step_s(steps)
        ),
        durations=tuple(_pairs(_durations_s(predicted), _durations_s(measured))),
        bytes_per_step=tuple(_pairs(_bytes_per_step(predicted), _bytes_per_step(measured))),
        measured_waits=_waits(recorded.spans, clouds, starts_s=recorded.starts_s),
        predicted_waits=() if timeline is None else _waits(timeline.spans, clouds),
        losses=tuple((int(one["step"]), float(one["loss"])) for one in steps),
        measured_chart=_measured_chart(recorded.spans, clouds),
        predicted_chart=None if timeline is None else chart_of_step(timeline),
        bubble_split=_bubble_split(recorded),
    )


def _clouds(recorded: Recorded, scenario: Scenario | None) -> tuple[str, ...]:
    if scenario is not None:
        return tuple(stage.cloud for stage in scenario.stages)
    return tuple(clouds_in_order(recorded.spans))


def _predicted_s(recorded: Recorded, timeline: Timeline | None) -> float | None:
    if timeline is not None:
        return timeline.step_s
    estimate = {} if recorded.planned is None else recorded.planned.estimate
    step_s = estimate.get("step_s")
    return float(step_s) if isinstance(step_s, int | float) else None


def _step_s(steps: Sequence[Mapping[str, Any]]) -> float | None:
    durations_s = [float(one["duration_s"]) for one in steps]
    counted = durations_s[_NUM_WARM_UP_STEPS:] or durations_s
    return statistics.median(counted) if counted else None


def _measured_spans(spans: Iterable[Span]) -> list[Span]:
    """Without evaluations, and without the first steps, in which everything warms up."""
    return [
        span
        for span in spans
        if span.kind in _KINDS
        and not span.name.startswith("evaluation")
        and _step_of(span) >= _NUM_WARM_UP_STEPS
    ]


def _step_of(span: Span) -> int:
    number = span.name.partition(" ")[2].partition(".")[0]
    return int(number) if number.isdigit() else -1


Figures = Mapping[tuple[str, str], float]


def _durations_s(spans: Iterable[Span]) -> Figures:
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans:
        found[span.kind, _place(span)].append(span.duration_s)
    return {key: statistics.median(durations_s) for key, durations_s in found.items()}


def _bytes_per_step(spans: Iterable[Span]) -> Figures:
    totals: defaultdict[tuple[str, str], int] = defaultdict(int)
    steps: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for span in spans:
        if span.kind == "transfer":
            totals["transfer", span.track] += span.num_bytes
            steps["transfer", span.track].add(_step_of(span))
    return {key: total / len(steps[key]) for key, total in totals.items()}


def _place(span: Span) -> str:
    return span.track if LINE_MARK in span.track else cloud_of(span.track)


def _pairs(predicted: Figures, measured: Figures) -> list[Pair]:
    keys = sorted(predicted.keys() | measured.keys(), key=lambda key: (_KINDS.index(key[0]), key[1]))
    return [
        Pair(
            kind=kind,
            track=track,
            predicted=predicted.get((kind, track)),
            measured=measured.get((kind, track)),
        )
        for kind, track in keys
    ]


def _waits(
    spans: Sequence[Span], clouds: Sequence[str], *, starts_s: Sequence[float] = ()
) -> tuple[Waits, ...]:
    found = [waits_of(spans, cloud=cloud, is_first=cloud == clouds[0], starts_s=starts_s) for cloud in clouds]
    return tuple(one for one in found if one is not None)


def _measured_chart(spans: Sequence[Span], clouds: Sequence[str]) -> Chart | None:
    """A step as long as most are."""
    if not clouds:
        return None
    ranks = sorted({span.track for span in spans if cloud_of(span.track) == clouds[0]})
    bounds = step_bounds(spans, track=ranks[0]) if ranks else []
    if not bounds:
        return None
    start_s, end_s = _usual(bounds[_NUM_WARM_UP_STEPS:] or bounds)
    near = [span for span in spans if span.end_s > start_s and span.start_s < end_s]
    return lay_out(shifted(near, -start_s), start_s=0.0, end_s=end_s - start_s, order=clouds)


def _usual(bounds: Sequence[Interval]) -> Interval:
    median_s = statistics.median_low([end_s - start_s for start_s, end_s in bounds])
    return next(one for one in bounds if one[1] - one[0] == median_s)


def _bubble_split(recorded: Recorded) -> Mapping[str, float]:
    estimate = {} if recorded.planned is None else recorded.planned.estimate
    split = estimate.get("bubble")
    if not isinstance(split, dict):
        return {}
    return {name: float(share) for name, share in split.items() if isinstance(share, int | float)}
