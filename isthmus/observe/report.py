"""What a run did, read from its directory: its figures, and its times beside those that were predicted."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.events import (
    CODING_KINDS,
    COMPUTE_KINDS,
    EVENTS_FOLDER,
    MEASURED_KIND,
    STARTED_KIND,
    WAITING_KIND,
    Event,
    Fact,
    Span,
    read_events,
)
from isthmus.observe.timeline import (
    LINE_MARK,
    Chart,
    Interval,
    Waits,
    chart_of_step,
    cloud_of,
    clouds_in_order,
    lay_out,
    shared_s,
    shifted,
    step_bounds,
    total_s,
    union,
    waits_of,
)
from isthmus.plan.plan import PLAN_FILE, scenario_of
from isthmus.plan.scenario import Scenario
from isthmus.plan.simulated import simulate_scenario
from isthmus.plan.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What was predicted: the scenario that drives the simulator, and the estimate as plan.json has it."""

    scenario: Scenario | None
    estimate: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What happened."""

    run: Path
    spans: tuple[Span, ...]
    facts: tuple[Fact, ...]
    planned: Planned | None

    @property
    def starts_s(self) -> tuple[float, ...]:
        """When ranks began, and when they went on after a stop."""
        return tuple(fact.at_s for fact in self.facts if fact.kind == STARTED_KIND)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """What was noted of each step."""
        return step_values(self.facts)


def find_run(folder: Path) -> Path:
    """The folder itself if it is a run, else the newest run in it."""
    runs = sorted(one.parent for one in folder.glob(f"*/{EVENTS_FOLDER}"))
    is_run = (folder / EVENTS_FOLDER).is_dir()
    if not is_run and not runs:
        raise UserError(f"{folder} holds no run", hint="give the folder of a run, runs/<name>/<id>")
    return folder if is_run else runs[-1]


def event_files(run: Path) -> list[Path]:
    """The events of a run, a file for each rank, by cloud and rank."""
    files = sorted((run / EVENTS_FOLDER).glob("*.jsonl"), key=_cloud_and_rank)
    if not files:
        raise UserError(f"{run} holds no events", hint="give the folder of a run, runs/<name>/<id>")
    return files


def step_values(facts: Iterable[Fact]) -> list[Mapping[str, Any]]:
    """What was noted of each step, in order; of one that was done again after a stop, the last."""
    by_step = {fact.values["step"]: fact.values for fact in facts if fact.kind == "step"}
    return list(by_step.values())


def read_run(run: Path) -> Recorded:
    """Read the events of all clouds that are here, and the plan if there is one."""
    events = [event for file in event_files(run) for event in read_events(file)]
    return Recorded(
        run=run,
        spans=tuple(event for event in events if isinstance(event, Span)),
        facts=tuple(sorted((one for one in events if isinstance(one, Fact)), key=lambda one: one.at_s)),
        planned=_read_plan(run / PLAN_FILE),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run did, and how that compares with its plan."""

    run: Path
    has_plan: bool
    summary: "Summary"
    comparison: "Comparison"


def report_on(run: Path) -> RunReport:
    """Read and compare a run."""
    recorded = read_run(run)
    return RunReport(
        run=run,
        has_plan=recorded.planned is not None,
        summary=summarize(run),
        comparison=compare(recorded),
    )


def _cloud_and_rank(file: Path) -> tuple[str, int]:
    cloud, _, rank = file.stem.partition(".")
    return cloud, int(rank or 0)


def _read_plan(path: Path) -> Planned | None:
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    scenario = scenario_of(text)
    estimate = json.loads(text).get("estimate")
    return Planned(scenario=scenario, estimate=estimate if isinstance(estimate, dict) else {})


_NUM_WARM_UP_STEPS: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudSummary:
    """One cloud: the share of time it did not compute, and of incoming transfers that it computed through."""

    cloud: str
    bubble: float
    hidden_share: float | None
    received_bytes: int
    coding_share: float = 0.0
    """Of the time, beside the computation."""
    data_share: float = 0.0
    """Of the time, waiting for data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingError:
    """The worst of the messages one way that their sender measured; an error of None lost everything."""

    track: str
    """Such as east→west."""
    relative_error: float | None
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A whole run; the first step, in which everything warms up, does not count for times."""

    num_steps: int
    step_s: float | None
    first_loss: float | None
    last_loss: float | None
    validation_loss: float | None
    clouds: tuple[CloudSummary, ...]
    plain_validation_loss: float | None = None
    """With everything crossing raw."""
    bits_per_element: float | None = None
    """Of what crossed between stages, with all that goes around it on the line."""
    ratio_to_float32: float | None = None
    ratio_to_bfloat16: float | None = None
    coding_errors: tuple[CodingError, ...] = ()

    @property
    def bubble(self) -> float | None:
        """The mean over clouds."""
        return statistics.fmean(one.bubble for one in self.clouds) if self.clouds else None

    @property
    def hidden_share(self) -> float | None:
        """The mean over clouds that receive something."""
        shares = [one.hidden_share for one in self.clouds if one.hidden_share is not None]
        return statistics.fmean(shares) if shares else None

    @property
    def num_bytes(self) -> int:
        """What crossed all links, without headers."""
        return sum(one.received_bytes for one in self.clouds)


def summarize(run: Path) -> Summary:
    """Read the events of all clouds that are here."""
    by_cloud = {file.stem: list(read_events(file)) for file in event_files(run)}
    facts = [event for events in by_cloud.values() for event in events if isinstance(event, Fact)]
    steps = step_values(facts)
    losses = [_number(step["loss"]) for step in steps]
    durations_s = [_number(step["duration_s"]) for step in steps][_NUM_WARM_UP_STEPS:]
    evaluations = [fact.values for fact in facts if fact.kind == "evaluation"]
    validation = [_number(one["loss"]) for one in evaluations if not one.get("is_plain")]
    plain = [_number(one["loss"]) for one in evaluations if one.get("is_plain")]
    bits = bits_per_element(facts)
    return Summary(
        num_steps=len(steps),
        step_s=statistics.median(durations_s) if durations_s else None,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        validation_loss=validation[-1] if validation else None,
        clouds=tuple(summarize_cloud(cloud, events) for cloud, events in by_cloud.items()),
        plain_validation_loss=plain[-1] if plain else None,
        bits_per_element=bits,
        ratio_to_float32=32 / bits if bits else None,
        ratio_to_bfloat16=16 / bits if bits else None,
        coding_errors=coding_errors(facts),
    )


def coding_errors(facts: Iterable[Fact]) -> tuple[CodingError, ...]:
    """The worst measured message of each way over a cut."""
    worst: dict[str, CodingError] = {}
    for values in (fact.values for fact in facts if fact.kind == MEASURED_KIND):
        error = values["relative_error"]
        found = CodingError(
            track=str(values["track"]),
            relative_error=None if error is None else _number(error),
            cosine=_number(values["cosine"]),
        )
        known = worst.get(found.track)
        if known is None or found.cosine < known.cosine:
            worst[found.track] = found
    return tuple(worst.values())


def bits_per_element(facts: Iterable[Fact]) -> float | None:
    """What one number that crossed between stages took on the line; None if nothing crossed."""
    sent = [fact.values for fact in facts if fact.kind == "sent"]
    num_elements = sum(_number(one["num_elements"]) for one in sent)
    return 8 * sum(_number(one["num_bytes"]) for one in sent) / num_elements if num_elements else None


def summarize_cloud(cloud: str, events: Iterable[Event]) -> CloudSummary:
    """What one cloud's spans say, from the end of its first step to the end of its last."""
    listed = list(events)
    spans = [event for event in listed if isinstance(event, Span)]
    updates = [span.end_s for span in spans if span.kind == "optimize"]
    measured = _within(spans, updates)
    busy = union((one.start_s, one.end_s) for one in measured if one.kind in COMPUTE_KINDS)
    moving = union((one.start_s, one.end_s) for one in measured if one.kind == "transfer")
    coding_s = sum(one.duration_s for one in measured if one.kind in CODING_KINDS)
    data_s = sum(one.duration_s for one in measured if one.kind == WAITING_KIND)
    elapsed_s = 0.0
    if len(updates) > _NUM_WARM_UP_STEPS:
        elapsed_s = updates[-1] - updates[0] - _stopped_s(listed, since_s=updates[0])
    return CloudSummary(
        cloud=cloud,
        bubble=max(0.0, 1 - total_s(busy) / elapsed_s) if elapsed_s else 0.0,
        hidden_share=shared_s(moving, busy) / total_s(moving) if moving else None,
        received_bytes=sum(span.num_bytes for span in spans if span.kind == "transfer"),
        coding_share=coding_s / elapsed_s if elapsed_s else 0.0,
        data_share=data_s / elapsed_s if elapsed_s else 0.0,
    )


def _stopped_s(events: Iterable[Event], *, since_s: float) -> float:
    """How long no process was there, between a stop since that moment and the start after it."""
    total_s, last_s = 0.0, math.inf
    for event in events:
        if isinstance(event, Span):
            last_s = event.end_s
        elif event.kind == STARTED_KIND and last_s >= since_s:
            total_s += max(0.0, event.at_s - last_s)
    return total_s


def _within(spans: Sequence[Span], updates: Sequence[float]) -> list[Span]:
    if len(updates) <= _NUM_WARM_UP_STEPS:
        return []
    return [span for span in spans if updates[0] <= span.start_s and span.end_s <= updates[-1]]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


_KINDS: Final = ("forward", "backward", "optimize", "encode", "transfer", "decode")
_NUM_PREDICTED_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
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
    step: Compared
    durations: tuple[Compared, ...]
    """Median seconds of one span, by kind and track."""
    bytes_per_step: tuple[Compared, ...]
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
        step=Compared(
            kind="step", track="all", predicted=_predicted_s(recorded, timeline), measured=_step_s(steps)
        ),
        durations=tuple(_compared(_durations_s(predicted), _durations_s(measured))),
        bytes_per_step=tuple(_compared(_bytes_per_step(predicted), _bytes_per_step(measured))),
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
        found[span.kind, _where(span)].append(span.duration_s)
    return {key: statistics.median(durations_s) for key, durations_s in found.items()}


def _bytes_per_step(spans: Iterable[Span]) -> Figures:
    totals: defaultdict[tuple[str, str], int] = defaultdict(int)
    steps: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for span in spans:
        if span.kind == "transfer":
            totals["transfer", span.track] += span.num_bytes
            steps["transfer", span.track].add(_step_of(span))
    return {key: total / len(steps[key]) for key, total in totals.items()}


def _where(span: Span) -> str:
    return span.track if LINE_MARK in span.track else cloud_of(span.track)


def _compared(predicted: Figures, measured: Figures) -> list[Compared]:
    keys = sorted(predicted.keys() | measured.keys(), key=lambda key: (_KINDS.index(key[0]), key[1]))
    return [
        Compared(
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
