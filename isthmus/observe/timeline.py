"""Spans laid out for drawing, how long several kinds of spans overlap, and what a rank waits for.

A chart has tracks in the order of the pipeline, boxes in rows, and bubbles between them.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from isthmus.events import COMPUTE_KINDS, WAITING_KIND, Span

if TYPE_CHECKING:
    from isthmus.plan.simulate import Timeline

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        elif end_s > start_s:
            merged.append((start_s, end_s))
    return merged


def total_s(intervals: Sequence[Interval]) -> float:
    """Return how long intervals that do not touch last together."""
    return sum(end_s - start_s for start_s, end_s in intervals)


def shared_s(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return the time that both cover."""
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
"""Stands between two clouds in the name of a line's track."""

_RANK_MARK: Final = "/"
_MAX_ROWS: Final = 6
_MAX_RANKS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One rank, or one direction of a line: rows of spans that do not overlap, and the bubbles between."""

    name: str
    rows: tuple[tuple[Span, ...], ...]
    bubbles: tuple[Interval, ...] = ()

    @property
    def is_line(self) -> bool:
        """Whether the spans are transfers, not computation."""
        return LINE_MARK in self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Tracks between two times, and the number of ranks that are left out."""

    start_s: float
    end_s: float
    tracks: tuple[Track, ...]
    num_hidden_ranks: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of the spans that can be seen."""
        spans = (span for track in self.tracks for row in track.rows for span in row)
        return frozenset(span.kind for span in spans if span.duration_s)


def lay_out(spans: Iterable[Span], *, start_s: float, end_s: float, order: Sequence[str] = ()) -> Chart:
    """Return the chart of what happens between two times, with at most two ranks of each cloud.

    `order` are the clouds along the pipeline; without it they are sorted by their first forward.
    """
    by_track: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda one: (one.start_s, one.end_s)):
        by_track[span.track].append(span)
    ranks = _ranks_by_cloud(by_track, order)
    num_hidden_ranks = sum(max(0, len(own) - _MAX_RANKS) for own in ranks.values())
    if num_hidden_ranks:
        _leave_out(by_track, {name for own in ranks.values() for name in own[:_MAX_RANKS]})
    names: list[str] = []
    for cloud, own in ranks.items():
        names += own[:_MAX_RANKS]
        names += _lines_from(cloud, by_track, names)
    return Chart(
        start_s=start_s,
        end_s=end_s,
        tracks=tuple(_track(name, by_track[name], start_s, end_s) for name in names),
        num_hidden_ranks=num_hidden_ranks,
    )


def _leave_out(by_track: dict[str, list[Span]], drawn: Collection[str]) -> None:
    """Leave on the lines only what the drawn ranks compute: hundreds of ranks share a line."""
    theirs = {microbatch_of(span) for name in drawn for span in by_track[name]}
    for name in by_track:
        if LINE_MARK in name:
            by_track[name] = [span for span in by_track[name] if microbatch_of(span) in theirs]


def chart_of_step(
    timeline: "Timeline", *, at_s: float | None = None, num_microbatches: int | None = None
) -> Chart:
    """Return the chart of one simulated step: that at a time, else the second, whose windows are measured.

    With `num_microbatches` it ends with the last of so many, so that each can be seen.
    """
    order = clouds_in_order(timeline.spans)
    if not timeline.steps:
        end_s = max((span.end_s for span in timeline.spans), default=0.0)
        return lay_out(timeline.spans, start_s=0.0, end_s=end_s, order=order)
    hit = [one for one in timeline.steps if at_s is not None and one.start_s <= at_s < one.end_s]
    step = hit[0] if hit else timeline.steps[min(1, len(timeline.steps) - 1)]
    spans = [
        one
        for one in shifted(timeline.spans, -step.start_s)
        if one.end_s > 0 and one.start_s < step.duration_s
    ]
    names = {f"{step.step}.{number}" for number in range(num_microbatches or 0)}
    first = [one.end_s for one in spans if one.name.partition(" ")[2] in names]
    end_s = min(step.duration_s, max(first, default=step.duration_s))
    return lay_out(spans, start_s=0.0, end_s=end_s, order=order)


def shifted(spans: Iterable[Span], by_s: float) -> list[Span]:
    """Return the same spans, later by so many seconds."""
    return [span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s) for span in spans]


def step_bounds(spans: Iterable[Span], *, track: str) -> list[Interval]:
    """Return when each step starts and ends on a track: from update to update."""
    computed = sorted(
        (span for span in spans if span.track == track and span.kind in COMPUTE_KINDS),
        key=lambda span: span.start_s,
    )
    ends_s = [span.end_s for span in computed if span.kind == "optimize"]
    return list(zip([computed[0].start_s, *ends_s[:-1]], ends_s, strict=True)) if ends_s else []


def clouds_in_order(spans: Iterable[Span]) -> list[str]:
    """Return the clouds along the pipeline, which is the order of their first forwards."""
    first_s: dict[str, float] = {}
    for span in spans:
        if span.kind == "forward":
            cloud = cloud_of(span.track)
            first_s[cloud] = min(span.start_s, first_s.get(cloud, span.start_s))
    return sorted(first_s, key=lambda cloud: first_s[cloud])


def cloud_of(track: str) -> str:
    """Return the cloud of a rank's track."""
    return track.partition(_RANK_MARK)[0]


def microbatch_of(span: Span) -> str:
    """Return the number that a box shows: 3 of `forward 12.3`, nothing for what is about a whole step."""
    return span.name.partition(" ")[2].partition(".")[2]


def _ranks_by_cloud(by_track: dict[str, list[Span]], order: Sequence[str]) -> dict[str, list[str]]:
    clouds = order or clouds_in_order(span for spans in by_track.values() for span in spans)
    computing = [name for name, spans in by_track.items() if any(one.kind in COMPUTE_KINDS for one in spans)]
    return {
        cloud: sorted((one for one in computing if cloud_of(one) == cloud), key=lambda one: (len(one), one))
        for cloud in clouds
    }


def _lines_from(cloud: str, by_track: dict[str, list[Span]], known: Sequence[str]) -> list[str]:
    """Return the lines that join a cloud to others, those that lead away first."""
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
    """Put each span into the first row that is free; the last row takes what more than six overlap."""
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
    """Before a forward of the first stage that waits neither for data nor for a checkpoint."""

    @property
    def bubble(self) -> float:
        """The share of the time in which nothing is computed."""
        return 1 - self.busy


_REASONS: Final = tuple(one.name for one in fields(Waits) if one.name != "cloud")


def waits_of(
    spans: Iterable[Span], *, cloud: str, is_first: bool, starts_s: Sequence[float] = ()
) -> Waits | None:
    """Return where the time of a cloud went; None where it has not updated twice.

    The time between a stop and the start after it is left out.
    """
    by_rank: defaultdict[str, list[Span]] = defaultdict(list)
    saving: list[Interval] = []
    for span in spans:
        if span.kind == _SAVE_KIND and LINE_MARK not in span.track:
            # A simulated copy that crosses a line does so beside the computation.
            saving.append((span.start_s, span.end_s))
        elif cloud_of(span.track) == cloud:
            by_rank[span.track].append(span)
    found = (rank_time(own, saving=saving, is_first=is_first, starts_s=starts_s) for own in by_rank.values())
    spent = [one for one in found if one is not None]
    if not spent:
        return None
    shares = {reason: sum(one.shares[reason] for one in spent) / len(spent) for reason in _REASONS}
    return Waits(cloud=cloud, **shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """The time of a rank from the end of its first update to the end of its last, and the shares of it."""

    start_s: float
    end_s: float
    elapsed_s: float
    """Without the time in which the run was stopped."""
    shares: Mapping[str, float]


def rank_time(
    spans: Iterable[Span], *, saving: Sequence[Interval], is_first: bool, starts_s: Sequence[float]
) -> RankTime | None:
    """Return where the time of one rank went; None where it has not updated twice."""
    ordered = sorted(spans, key=lambda one: one.start_s)
    computed = [one for one in ordered if one.kind in COMPUTE_KINDS]
    reading = [(one.start_s, one.end_s) for one in ordered if one.kind == WAITING_KIND]
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
    if not elapsed_s:
        return None
    shares = {reason: amount_s / elapsed_s for reason, amount_s in spent_s.items()}
    return RankTime(start_s=measured[0].end_s, end_s=measured[-1].end_s, elapsed_s=elapsed_s, shares=shares)


def _reason(span: Span, is_first: bool) -> str:
    match span.kind:
        case "backward":
            return "for_gradients"
        case "optimize":
            return "for_other_stages"
    return "other" if is_first else "for_activations"
