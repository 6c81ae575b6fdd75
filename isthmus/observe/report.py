"""Reads a run directory: the figures of the run, and its times beside those that were predicted."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.events import (
    CODING_KINDS,
    COMPUTE_KINDS,
    EVENTS_FOLDER,
    MEASURED_KIND,
    STARTED_KIND,
    Event,
    Fact,
    Span,
    read_events,
)
from isthmus.job.rundir import job_of
from isthmus.observe.timeline import (
    LINE_MARK,
    Chart,
    Waits,
    chart_of_step,
    cloud_of,
    clouds_in_order,
    lay_out,
    rank_time,
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

_NO_RUN: Final = "give the folder of a run, runs/<name>/<id>"
_NUM_WARM_UP_STEPS: Final = 1
_NUM_PREDICTED_STEPS: Final = 3
_KINDS: Final = (
    "forward",
    "backward",
    "generate",
    "discriminate",
    "optimize",
    "encode",
    "transfer",
    "decode",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The events of a run by rank, and what was predicted for it, as plan.json has it."""

    run: Path
    by_rank: Mapping[str, Sequence[Event]]
    """By the names of the files: east for rank 0 of cloud east, east.1 for rank 1."""
    scenario: Scenario | None
    estimate: Mapping[str, Any] | None

    @property
    def spans(self) -> list[Span]:
        """The spans of all ranks."""
        return [one for events in self.by_rank.values() for one in events if isinstance(one, Span)]

    @property
    def facts(self) -> list[Fact]:
        """The facts of all ranks."""
        return [one for events in self.by_rank.values() for one in events if isinstance(one, Fact)]

    def values(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the values of all facts of a kind."""
        return [fact.values for fact in self.facts if fact.kind == kind]

    @property
    def starts_s(self) -> tuple[float, ...]:
        """The times at which ranks started, or continued after a stop."""
        return tuple(fact.at_s for fact in self.facts if fact.kind == STARTED_KIND)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The facts of each step, in order; of one that was repeated after a stop, the last."""
        return list({values["step"]: values for values in self.values("step")}.values())


def find_run(folder: Path) -> Path:
    """Return the folder itself if it is a run, else the newest run in it."""
    runs = sorted(one.parent for one in folder.glob(f"*/{EVENTS_FOLDER}"))
    is_run = (folder / EVENTS_FOLDER).is_dir()
    if not is_run and not runs:
        raise UserError(f"{folder} holds no run", hint=_NO_RUN)
    return folder if is_run else runs[-1]


def read_run(run: Path) -> Recorded:
    """Read the events of all clouds that are here, and the plan if there is one."""
    files = sorted((run / EVENTS_FOLDER).glob("*.jsonl"), key=_cloud_and_rank)
    if not files:
        raise UserError(f"{run} holds no events", hint=_NO_RUN)
    plan = run / PLAN_FILE
    text = plan.read_text(encoding="utf-8") if plan.exists() else None
    return Recorded(
        run=run,
        by_rank={file.stem: tuple(read_events(file)) for file in files},
        scenario=None if text is None else scenario_of(text),
        estimate=None if text is None else json.loads(text).get("estimate", {}),
    )


def _cloud_and_rank(file: Path) -> tuple[str, int]:
    cloud, _, rank = file.stem.partition(".")
    return cloud, int(rank or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The validation losses of two runs after as many tokens."""

    num_tokens: int
    loss: float
    loss_beside: float


def compare_quality(recorded: Recorded, beside: Recorded) -> tuple[Quality, ...]:
    """Pair the evaluations of two runs that were made after equal tokens."""
    losses, others = _losses_by_tokens(recorded), _losses_by_tokens(beside)
    if not losses.keys() & others.keys():
        raise UserError(
            f"{recorded.run} and {beside.run} have no evaluation after equal tokens",
            hint="run both with the same train.batch_tokens and train.evaluate_every",
        )
    return tuple(
        Quality(num_tokens=number, loss=loss, loss_beside=others[number])
        for number, loss in sorted(losses.items())
        if number in others
    )


def _losses_by_tokens(recorded: Recorded) -> dict[int, float]:
    job = job_of(recorded.run)
    if job is None:
        raise UserError(f"{recorded.run} has no job that this version reads", hint=_NO_RUN)
    tokens = job.train.batch_tokens
    every = recorded.values("evaluation")
    return {int(one["step"]) * tokens: float(one["loss"]) for one in every if not one.get("is_plain")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsSummary:
    """The rounds of data parallel: how many, over how many clouds on average, and whether all agreed."""

    num_rounds: int
    live: float
    participating: float
    averaged: float
    num_unlike: int
    """Rounds after which two clouds had other parameters."""


def summarize_rounds(recorded: Recorded) -> RoundsSummary | None:
    """Return what the rounds of a run say; None where there are none."""
    rounds = recorded.values("round")
    if not rounds:
        return None
    contents: defaultdict[int, set[str]] = defaultdict(set)
    for one in rounds:
        contents[one["number"]].add(one["content"])
    live, participating, averaged = (
        statistics.fmean(one[key] for one in rounds) for key in ("live", "participating", "averaged")
    )
    return RoundsSummary(
        num_rounds=len(contents),
        live=live,
        participating=participating,
        averaged=averaged,
        num_unlike=sum(len(one) > 1 for one in contents.values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudSummary:
    """One rank: the share of time it did not compute, and of incoming transfers that it computed through."""

    cloud: str
    bubble: float
    overlapped_share: float | None
    received_bytes: int
    coding_share: float = 0.0
    """The share of the time in which something was coded, beside the computation."""
    data_share: float = 0.0
    """The share of the time in which the rank waited for data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingError:
    """The worst measured message of one direction; None stands for an error that left nothing."""

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
    """Bits on the line, with all headers, for each number that crossed between stages."""
    ratio_to_float32: float | None = None
    ratio_to_bfloat16: float | None = None
    coding_errors: tuple[CodingError, ...] = ()
    feed: "FeedSummary | None" = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last evaluation."""

    @property
    def bubble(self) -> float | None:
        """The mean bubble of all ranks."""
        return statistics.fmean(one.bubble for one in self.clouds) if self.clouds else None

    @property
    def overlapped_share(self) -> float | None:
        """The mean overlapped share of the ranks that receive something."""
        shares = [one.overlapped_share for one in self.clouds if one.overlapped_share is not None]
        return statistics.fmean(shares) if shares else None

    @property
    def num_bytes(self) -> int:
        """Bytes that crossed all links, without headers."""
        return sum(one.received_bytes for one in self.clouds)


def summarize(recorded: Recorded) -> Summary:
    """Return the figures of a run."""
    steps = recorded.steps
    evaluations = recorded.values("evaluation")
    validation, plain = (
        [one for one in evaluations if bool(one.get("is_plain")) is is_plain] for is_plain in (False, True)
    )
    sent = recorded.values("sent")
    num_elements = sum(one["num_elements"] for one in sent)
    bits = 8 * sum(one["num_bytes"] for one in sent) / num_elements if num_elements else None
    return Summary(
        num_steps=len(steps),
        step_s=_median_s(steps[_NUM_WARM_UP_STEPS:]),
        first_loss=_loss(steps[:1]),
        last_loss=_loss(steps),
        validation_loss=_loss(validation),
        clouds=tuple(summarize_rank(name, events) for name, events in recorded.by_rank.items()),
        plain_validation_loss=_loss(plain),
        bits_per_element=bits,
        ratio_to_float32=32 / bits if bits else None,
        ratio_to_bfloat16=16 / bits if bits else None,
        coding_errors=_coding_errors(recorded.values(MEASURED_KIND)),
        feed=summarize_feed(recorded.values("feed")),
        metrics=dict(validation[-1].get("metrics", {})) if validation else {},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSummary:
    """What came from one generator, and the means over steps of its queue and its staleness."""

    cloud: str
    num_batches: int
    num_tokens: int
    num_queued: float
    staleness: float
    """By how many updates the stalest batch of a step was behind the newest that had arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSummary:
    """What a discriminator reports: its accuracy in the last tenth of all steps, and how long it waited."""

    streams: tuple[StreamSummary, ...]
    accuracy: float
    original_share: float
    """The accuracy of calling all tokens original."""
    waited_s: float


def summarize_feed(told: Sequence[Mapping[str, Any]]) -> FeedSummary | None:
    """Return what the steps of a discriminator say, the last word on each; None where there are none."""
    steps = list({one["step"]: one for one in told}.values())
    if not steps:
        return None
    last = steps[-max(1, len(steps) // 10) :]
    batches, tokens, queued, staleness = (
        zip(*(one[key] for one in steps), strict=True)
        for key in ("num_batches", "num_tokens", "num_queued", "staleness")
    )
    by_cloud = zip(steps[-1]["clouds"], batches, tokens, queued, staleness, strict=True)
    return FeedSummary(
        streams=tuple(
            StreamSummary(
                cloud=cloud,
                num_batches=sum(batches),
                num_tokens=sum(tokens),
                num_queued=statistics.fmean(queued),
                staleness=statistics.fmean(staleness),
            )
            for cloud, batches, tokens, queued, staleness in by_cloud
        ),
        accuracy=statistics.fmean(one["accuracy"] for one in last),
        original_share=statistics.fmean(one["original_share"] for one in last),
        waited_s=sum(one["waited_s"] for one in steps),
    )


def _loss(values: Sequence[Mapping[str, Any]]) -> float | None:
    return float(values[-1]["loss"]) if values else None


def _median_s(steps: Sequence[Mapping[str, Any]]) -> float | None:
    return statistics.median(float(one["duration_s"]) for one in steps) if steps else None


def _coding_errors(measured: Iterable[Mapping[str, Any]]) -> tuple[CodingError, ...]:
    """Return the worst measured message of each way over a cut."""
    worst: dict[str, CodingError] = {}
    for values in measured:
        found = CodingError(**{key: values[key] for key in ("track", "relative_error", "cosine")})
        known = worst.setdefault(found.track, found)
        worst[found.track] = min(known, found, key=lambda one: one.cosine)
    return tuple(worst.values())


def summarize_rank(name: str, events: Iterable[Event]) -> CloudSummary:
    """Return what one rank's events say, from the end of its first step to the end of its last."""
    listed = list(events)
    spans = [one for one in listed if isinstance(one, Span)]
    starts_s = [one.at_s for one in listed if isinstance(one, Fact) and one.kind == STARTED_KIND]
    time = rank_time(spans, saving=(), is_first=False, starts_s=starts_s)
    received_bytes = sum(span.num_bytes for span in spans if span.kind == "transfer")
    if time is None:
        return CloudSummary(cloud=name, bubble=0.0, overlapped_share=None, received_bytes=received_bytes)
    measured = [one for one in spans if time.start_s <= one.start_s and one.end_s <= time.end_s]
    busy = [(one.start_s, one.end_s) for one in measured if one.kind in COMPUTE_KINDS]
    moving = union((one.start_s, one.end_s) for one in measured if one.kind == "transfer")
    coding_s = sum(one.duration_s for one in measured if one.kind in CODING_KINDS)
    return CloudSummary(
        cloud=name,
        bubble=max(0.0, 1 - time.shares["busy"]),
        overlapped_share=shared_s(moving, busy) / total_s(moving) if moving else None,
        received_bytes=received_bytes,
        coding_share=coding_s / time.elapsed_s,
        data_share=time.shares["for_data"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure, predicted and measured; None where there is none."""

    kind: str
    track: str
    predicted: float | None
    measured: float | None
    error: float | None
    """The share by which the prediction was too long, negative if it was too short."""


def _pair(kind: str, track: str, predicted: float | None, measured: float | None) -> Compared:
    error = None if predicted is None or not measured else predicted / measured - 1
    return Compared(kind=kind, track=track, predicted=predicted, measured=measured, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run beside what was predicted for it; without a plan only the measured part is there."""

    run: Path
    has_plan: bool
    summary: Summary
    step: Compared
    durations: tuple[Compared, ...]
    """Median seconds of one span, by kind and track."""
    bytes_per_step: tuple[Compared, ...]
    waits: Mapping[str, tuple[Waits, ...]]
    """Where the time of each cloud went, "measured" and "predicted"."""
    losses: tuple[tuple[int, float], ...]
    charts: Mapping[str, Chart]
    """One step, "predicted" and "measured"."""
    rounds: RoundsSummary | None
    quality: tuple[Quality, ...]


def report_on(run: Path, *, beside: Path | None = None) -> RunReport:
    """Compare a run with what its plan's scenario predicts, and, in quality, with another run."""
    recorded = read_run(run)
    scenario, spans, steps = recorded.scenario, recorded.spans, recorded.steps
    timeline = None if scenario is None else simulate_scenario(scenario, num_steps=_NUM_PREDICTED_STEPS)
    clouds = [stage.cloud for stage in scenario.stages] if scenario else clouds_in_order(spans)
    measured, predicted = _counted_spans(spans), _counted_spans(timeline.spans if timeline else ())
    charts = {
        "predicted": None if timeline is None else chart_of_step(timeline),
        "measured": _measured_chart(spans, clouds),
    }
    step_s = timeline.step_s if timeline is not None else (recorded.estimate or {}).get("step_s")
    return RunReport(
        run=run,
        has_plan=recorded.estimate is not None,
        summary=summarize(recorded),
        step=_pair("step", "all", step_s, _median_s(steps[_NUM_WARM_UP_STEPS:] or steps)),
        durations=_compared(_durations_s(predicted), _durations_s(measured)),
        bytes_per_step=_compared(_bytes_per_step(predicted), _bytes_per_step(measured)),
        waits={
            "measured": _waits(spans, clouds, starts_s=recorded.starts_s),
            "predicted": _waits(timeline.spans, clouds) if timeline is not None else (),
        },
        losses=tuple((int(one["step"]), float(one["loss"])) for one in steps),
        charts={name: chart for name, chart in charts.items() if chart is not None},
        rounds=summarize_rounds(recorded),
        quality=() if beside is None else compare_quality(recorded, read_run(beside)),
    )


def _counted_spans(spans: Iterable[Span]) -> list[Span]:
    """Leave out evaluations, and the first steps, in which everything warms up."""
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
        where = span.track if LINE_MARK in span.track else cloud_of(span.track)
        found[span.kind, where].append(span.duration_s)
    return {key: statistics.median(durations_s) for key, durations_s in found.items()}


def _bytes_per_step(spans: Iterable[Span]) -> Figures:
    by_step: defaultdict[tuple[str, str], defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for span in spans:
        if span.kind == "transfer":
            by_step[span.kind, span.track][_step_of(span)] += span.num_bytes
    return {key: statistics.fmean(sizes.values()) for key, sizes in by_step.items()}


def _compared(predicted: Figures, measured: Figures) -> tuple[Compared, ...]:
    keys = sorted(predicted.keys() | measured.keys(), key=lambda key: (_KINDS.index(key[0]), key[1]))
    return tuple(_pair(*key, predicted.get(key), measured.get(key)) for key in keys)


def _waits(
    spans: Sequence[Span], clouds: Sequence[str], *, starts_s: Sequence[float] = ()
) -> tuple[Waits, ...]:
    found = [waits_of(spans, cloud=cloud, is_first=cloud == clouds[0], starts_s=starts_s) for cloud in clouds]
    return tuple(one for one in found if one is not None)


def _measured_chart(spans: Sequence[Span], clouds: Sequence[str]) -> Chart | None:
    """Return the chart of the step of median length."""
    ranks = sorted({span.track for span in spans if cloud_of(span.track) in clouds[:1]})
    bounds = step_bounds(spans, track=ranks[0]) if ranks else []
    if not bounds:
        return None
    by_length = sorted(bounds[_NUM_WARM_UP_STEPS:] or bounds, key=lambda one: one[1] - one[0])
    start_s, end_s = by_length[(len(by_length) - 1) // 2]
    near = [span for span in spans if span.end_s > start_s and span.start_s < end_s]
    return lay_out(shifted(near, -start_s), start_s=0.0, end_s=end_s - start_s, order=clouds)
