"""Spans laid out for drawing, how long several kinds of spans overlap, and what a rank waits for.

A chart has tracks in the order of the pipeline, boxes in rows, and bubbles between them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from isthmus.events import COMPUTE_KINDS, WAITING_KIND, Span
from isthmus.plan.timeline import Timeline

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        elif end_s > start_s:
            merged.append((start_s, end_s))
    return merged


def total_s(intervals: Sequence[Interval]) -> float:
    """How long intervals that do not touch last together."""
    return sum(end_s - start_s for start_s, end_s in intervals)


def shared_s(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """For how long both go on."""
    ours, theirs = union(first), union(second)
    shared, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        shared += max(0.0, min(ours[i][1], theirs[j][1]) - max(ours[i][0], theirs[j][0]))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return shared


LINE_MARK: Final = "→"
"""What the track of a line has in its name, between the clouds."""

_RANK_MARK: Final = "/"
_MAX_ROWS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One rank, or one direction of a line: rows of spans that do not overlap, and when it did nothing."""

    name: str
    rows: tuple[tuple[Span, ...], ...]
    bubbles: tuple[Interval, ...] = ()

    @property
    def is_line(self) -> bool:
        """Whether things travel here, rather than being computed."""
        return LINE_MARK in self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn: tracks between two times, and how many ranks are left out."""

    start_s: float
    end_s: float
    tracks: tuple[Track, ...]
    num_hidden_ranks: int = 0

    @property
    def duration_s(self) -> float:
        """How long a time it shows."""
        return self.end_s - self.start_s

    @property
    def kinds(self) -> frozenset[str]:
        """Of the spans that can be seen."""
        spans = (span for track in self.tracks for row in track.rows for span in row)
        return frozenset(span.kind for span in spans if span.duration_s)


def lay_out(
    spans: Iterable[Span], *, start_s: float, end_s: float, order: Sequence[str] = (), max_ranks: int = 2
) -> Chart:
    """The chart of what happens between two times, with at most so many ranks of each cloud.

    `order` are the clouds along the pipeline; without it they come as their first forwards do.
    """
    by_track: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda one: (one.start_s, one.end_s)):
        by_track[span.track].append(span)
    ranks = _ranks_by_cloud(by_track, order)
    names: list[str] = []
    for cloud, own in ranks.items():
        names += own[:max_ranks]
        names += _lines_from(cloud, by_track, names)
    return Chart(
        start_s=start_s,
        end_s=end_s,
        tracks=tuple(_track(name, by_track[name], start_s, end_s) for name in names),
        num_hidden_ranks=sum(max(0, len(own) - max_ranks) for own in ranks.values()),
    )


def chart_of_step(timeline: Timeline, *, max_ranks: int = 2) -> Chart:
    """A step of a simulated run from its start: the second, whose windows are measured, if there is one."""
    if not timeline.steps:
        end_s = max((span.end_s for span in timeline.spans), default=0.0)
        return lay_out(timeline.spans, start_s=0.0, end_s=end_s, max_ranks=max_ranks)
    step = timeline.steps[min(1, len(timeline.steps) - 1)]
    spans = shifted(timeline.spans, -step.start_s)
    order = clouds_in_order(timeline.spans)
    return lay_out(spans, start_s=0.0, end_s=step.duration_s, order=order, max_ranks=max_ranks)


def shifted(spans: Iterable[Span], by_s: float) -> list[Span]:
    """The same spans at other times."""
    return [span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s) for span in spans]


def step_bounds(spans: Iterable[Span], *, track: str) -> list[Interval]:
    """When each step begins and ends on a track: from update to update, the first from its first pass on."""
    computed = sorted(
        (span for span in spans if span.track == track and span.kind in COMPUTE_KINDS),
        key=lambda span: span.start_s,
    )
    ends_s = [span.end_s for span in computed if span.kind == "optimize"]
    return list(zip([computed[0].start_s, *ends_s[:-1]], ends_s, strict=True)) if ends_s else []


def clouds_in_order(spans: Iterable[Span]) -> list[str]:
    """The clouds along the pipeline: an activation comes to the next one later."""
    first_s: dict[str, float] = {}
    for span in spans:
        if span.kind == "forward":
            cloud = cloud_of(span.track)
            first_s[cloud] = min(span.start_s, first_s.get(cloud, span.start_s))
    return sorted(first_s, key=lambda cloud: first_s[cloud])


def cloud_of(track: str) -> str:
    """The cloud of a rank's track."""
    return track.partition(_RANK_MARK)[0]


def microbatch_of(span: Span) -> str:
    """The number that a box shows: 3 of `forward 12.3`, nothing for what is about a whole step."""
    return span.name.partition(" ")[2].partition(".")[2]


def _ranks_by_cloud(by_track: dict[str, list[Span]], order: Sequence[str]) -> dict[str, list[str]]:
    clouds = order or clouds_in_order(span for spans in by_track.values() for span in spans)
    computing = [name for name, spans in by_track.items() if any(one.kind in COMPUTE_KINDS for one in spans)]
    return {
        cloud: sorted((one for one in computing if cloud_of(one) == cloud), key=lambda one: (len(one), one))
        for cloud in clouds
    }


def _lines_from(cloud: str, by_track: dict[str, list[Span]], known: Sequence[str]) -> list[str]:
    """The lines that join a cloud to others, those that lead away first."""
    lines = [name for name in by_track if LINE_MARK in name and cloud in name.split(LINE_MARK)]
    return sorted(
        (name for name in lines if name not in known), key=lambda one: one.split(LINE_MARK)[0] != cloud
    )


def _track(name: str, spans: Sequence[Span], start_s: float, end_s: float) -> Track:
    shown = [one for one in spans if one.end_s > start_s and one.start_s < end_s]
    if LINE_MARK in name:
        return Track(name=name, rows=_in_rows(shown))
    shown = [one for one in shown if one.kind in COMPUTE_KINDS]
    return Track(name=name, rows=_in_rows(shown), bubbles=tuple(_gaps(shown, start_s, end_s)))


def _in_rows(spans: Sequence[Span]) -> tuple[tuple[Span, ...], ...]:
    """Each span in the first row that is free; where more overlap than rows fit, the last takes the rest."""
    rows: list[list[Span]] = []
    for span in spans:
        free = (row for row in rows if row[-1].end_s <= span.start_s)
        row = next(free, None)
        if row is None and len(rows) < _MAX_ROWS:
            row = []
            rows.append(row)
        (rows[-1] if row is None else row).append(span)
    return tuple(tuple(row) for row in rows)


def _gaps(spans: Sequence[Span], start_s: float, end_s: float) -> list[Interval]:
    free_s, gaps = start_s, []
    for busy_s, until_s in union((one.start_s, one.end_s) for one in spans):
        if busy_s > free_s:
            gaps.append((free_s, busy_s))
        free_s = max(free_s, until_s)
    return [*gaps, (free_s, end_s)] if free_s < end_s else gaps


_SAVE_KIND: Final = "save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """One cloud between its first update and its last, as shares of that time, mean over its ranks."""

    cloud: str
    busy: float
    for_data: float
    saving: float
    """While this cloud, or one that it waits for, writes a checkpoint."""
    for_activations: float
    for_gradients: float
    for_other_stages: float
    """From the last backward to the update."""
    other: float
    """Of the first stage before a forward, where it waits neither for data nor for a checkpoint."""

    @property
    def bubble(self) -> float:
        """All of it."""
        return 1 - self.busy


_REASONS: Final = (
    "busy",
    "for_data",
    "saving",
    "for_activations",
    "for_gradients",
    "for_other_stages",
    "other",
)


def waits_of(
    spans: Iterable[Span], *, cloud: str, is_first: bool, starts_s: Sequence[float] = ()
) -> Waits | None:
    """Where the time of a cloud went; None where it has not updated twice.

    Nobody waits between a stop and the start after it.
    """
    computed: defaultdict[str, list[Span]] = defaultdict(list)
    reading: defaultdict[str, list[Interval]] = defaultdict(list)
    saving: list[Interval] = []
    for span in sorted(spans, key=lambda one: one.start_s):
        if span.kind == _SAVE_KIND and LINE_MARK not in span.track:
            # A simulated copy that crosses a line does so beside the computation.
            saving.append((span.start_s, span.end_s))
        elif cloud_of(span.track) != cloud:
            continue
        elif span.kind in COMPUTE_KINDS:
            computed[span.track].append(span)
        elif span.kind == WAITING_KIND:
            reading[span.track].append((span.start_s, span.end_s))
    found = [
        _shares_of_time(own, reading[track], saving, is_first, starts_s) for track, own in computed.items()
    ]
    totals = [one for one in found if one is not None]
    if not totals:
        return None
    shares = {reason: sum(one[reason] for one in totals) / len(totals) for reason in _REASONS}
    return Waits(cloud=cloud, **shares)


def _shares_of_time(
    computed: Sequence[Span],
    reading: Sequence[Interval],
    saving: Sequence[Interval],
    is_first: bool,
    starts_s: Sequence[float],
) -> dict[str, float] | None:
    updates = [place for place, span in enumerate(computed) if span.kind == "optimize"]
    if len(updates) < 2:
        return None
    measured = computed[updates[0] : updates[-1] + 1]
    elapsed_s = measured[-1].end_s - measured[0].end_s
    gaps: defaultdict[str, list[Interval]] = defaultdict(list)
    for before, span in pairwise(measured):
        if any(before.end_s < start_s <= span.start_s for start_s in starts_s):
            elapsed_s -= span.start_s - before.end_s
        elif span.start_s > before.end_s:
            gaps[_reason(span, is_first)].append((before.end_s, span.start_s))
    spent_s = dict.fromkeys(_REASONS, 0.0) | {"busy": sum(span.duration_s for span in measured[1:])}
    for reason, own in gaps.items():
        data_s = shared_s(own, reading)
        told_s = shared_s(own, [*reading, *saving])
        spent_s["for_data"] += data_s
        spent_s["saving"] += told_s - data_s
        spent_s[reason] += total_s(own) - told_s
    return {reason: amount_s / elapsed_s for reason, amount_s in spent_s.items()} if elapsed_s else None


def _reason(span: Span, is_first: bool) -> str:
    match span.kind:
        case "backward":
            return "for_gradients"
        case "optimize":
            return "for_other_stages"
    return "other" if is_first else "for_activations"
