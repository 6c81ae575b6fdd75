"""Pictures as a few kinds of shapes, which SVG and PNG both know; lengths are in pixels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from isthmus.events import Span
from isthmus.observe.timeline import Chart, Track, microbatch_of
from isthmus.units import format_bytes, format_duration, shorten

INK: Final = "#1b1f24"
FAINT: Final = "#9aa4af"
PAPER: Final = "#ffffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle; a hatched one has thin lines across it, so that colour is not all that tells it apart."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""
    is_hatched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A text on one line; `y` is its middle."""

    x: float
    y: float
    text: str
    size: float = 11.0
    colour: str = INK
    anchor: Literal["start", "middle", "end"] = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str = FAINT
    thickness: float = 1.0


Shape = Box | Label | Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Shapes in the order in which they cover each other."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    word: str
    colour: str
    is_hatched: bool = False
    ink: str = INK


_LOOKS: Final = MappingProxyType(
    {
        "forward": _Look(word="forward", colour="#8ecae6"),
        "backward": _Look(word="backward", colour="#2f6f9f", is_hatched=True, ink=PAPER),
        "evaluation": _Look(word="evaluation", colour="#cdd6df"),
        "optimize": _Look(word="update", colour="#8e4a9e", ink=PAPER),
        "transfer": _Look(word="under way", colour="#f4c95d"),
        "encode": _Look(word="coding", colour="#e07a3f", is_hatched=True),
        "decode": _Look(word="coding", colour="#e07a3f", is_hatched=True),
        "save": _Look(word="copy of a checkpoint", colour="#7fb069"),
    }
)
_BUBBLE: Final = _Look(word="bubble", colour="#eceff2", is_hatched=True)
_MARGIN: Final = 12.0
_BAR: Final = 26.0
_THIN_BAR: Final = 12.0
_GAP: Final = 8.0
_LETTER: Final = 6.6
"""Width of a letter of 11 pixels."""
_NUM_TICKS: Final = 8
_SEAM: Final = 0.6
"""Between boxes that follow each other at once."""


def draw_chart(chart: Chart, *, width: float = 1200.0, title: str = "") -> Drawing:
    """Compute, transfers and bubbles along the time, a track under the other."""
    left = _MARGIN + max((len(track.name) for track in chart.tracks), default=0) * _LETTER + _GAP
    right = width - _MARGIN
    scale = (right - left) / chart.duration_s if chart.duration_s else 0.0
    shapes: list[Shape] = []
    y = top = _MARGIN + (24 if title else 0)
    for track in chart.tracks:
        height = _track_height(track)
        shapes.append(Label(x=_MARGIN, y=y + height / 2, text=track.name))
        shapes += _draw_track(track, chart, left=left, top=y, scale=scale)
        y += height + _GAP
    heading = [Label(x=_MARGIN, y=_MARGIN + 7, text=title, size=14)] if title else []
    axis = _axis(chart, left=left, scale=scale, top=top, bottom=y)
    legend = _legend(chart, y=y + 30)
    return Drawing(width=width, height=y + 46, shapes=(*heading, *axis, *shapes, *legend))


def stack(drawings: Sequence[Drawing]) -> Drawing:
    """Drawings one under the other."""
    shapes: list[Shape] = []
    y = 0.0
    for drawing in drawings:
        shapes += [_moved(shape, y) for shape in drawing.shapes]
        y += drawing.height
    return Drawing(width=max(one.width for one in drawings), height=y, shapes=tuple(shapes))


def draw_curve(points: Sequence[tuple[float, float]], *, width: float, height: float, word: str) -> Drawing:
    """A curve through (step, value), with its first, lowest and last value written beside it."""
    left, bottom = _MARGIN + 56, height - 28
    xs, ys = zip(*points, strict=True)
    low, high = min(ys), max(ys)
    across = (width - _MARGIN - left) / ((max(xs) - min(xs)) or 1.0)
    up = (bottom - _MARGIN - 10) / ((high - low) or 1.0)
    path = tuple((left + (x - min(xs)) * across, bottom - (y - low) * up) for x, y in points)
    return Drawing(
        width=width,
        height=height,
        shapes=(
            Path(points=((left, _MARGIN), (left, bottom), (width - _MARGIN, bottom))),
            Label(x=left - 6, y=bottom, text=f"{low:.4g}", anchor="end"),
            Label(x=left - 6, y=bottom - (high - low) * up, text=f"{high:.4g}", anchor="end"),
            Label(x=left, y=bottom + 14, text=f"{min(xs):g}"),
            Label(x=width - _MARGIN, y=bottom + 14, text=f"{max(xs):g}", anchor="end"),
            Label(x=(left + width) / 2, y=bottom + 14, text=word, anchor="middle"),
            Path(points=path, colour="#2f6f9f", thickness=1.8),
        ),
    )


def _draw_track(track: Track, chart: Chart, *, left: float, top: float, scale: float) -> Iterator[Shape]:
    row_height = _THIN_BAR if track.is_line else _BAR
    for start_s, end_s in track.bubbles:
        x, length = _place(start_s, end_s, chart, left, scale)
        title = f"bubble, {_duration(end_s - start_s)}"
        yield _box(_BUBBLE, x, top, length, row_height, title)
    for number, row in enumerate(track.rows):
        for span in (one for one in row if one.duration_s):
            x, length = _place(span.start_s, span.end_s, chart, left, scale)
            look, y = _LOOKS[span.kind], top + number * row_height
            yield _box(look, x, y, length, row_height - 1, _title(span))
            text = microbatch_of(span)
            size = 9.0 if track.is_line else 11.0
            if text and length > len(text) * _LETTER * size / 11 + 3:
                middle = y + (row_height - 1) / 2
                yield Label(
                    x=x + length / 2, y=middle, text=text, size=size, colour=look.ink, anchor="middle"
                )


def _place(start_s: float, end_s: float, chart: Chart, left: float, scale: float) -> tuple[float, float]:
    start_s, end_s = max(start_s, chart.start_s), min(end_s, chart.end_s)
    return left + (start_s - chart.start_s) * scale, max(0.5, (end_s - start_s) * scale - _SEAM)


def _box(look: _Look, x: float, y: float, width: float, height: float, title: str) -> Box:
    return Box(
        x=x, y=y, width=width, height=height, colour=look.colour, title=title, is_hatched=look.is_hatched
    )


def _title(span: Span) -> str:
    parts = [f"{span.track}: {span.name}", span.kind, _duration(span.duration_s)]
    if span.num_bytes:
        parts.append(format_bytes(span.num_bytes))
    return ", ".join(parts)


def _track_height(track: Track) -> float:
    return max(1, len(track.rows)) * (_THIN_BAR if track.is_line else _BAR)


def _axis(chart: Chart, *, left: float, scale: float, top: float, bottom: float) -> Iterator[Shape]:
    for at_s in _ticks(chart):
        x = left + (at_s - chart.start_s) * scale
        yield Path(points=((x, top), (x, bottom)), colour="#d5dae0", thickness=0.5)
        yield Label(x=x, y=bottom + 8, text=_duration(at_s), colour=FAINT, anchor="middle")


def _ticks(chart: Chart) -> list[float]:
    """Round times, about eight of them."""
    if not chart.duration_s:
        return []
    rough_s = chart.duration_s / _NUM_TICKS
    unit_s = 10.0 ** math.floor(math.log10(rough_s))
    step_s = next(unit_s * one for one in (1, 2, 5, 10) if unit_s * one >= rough_s)
    first = math.ceil(chart.start_s / step_s)
    last = math.floor(chart.end_s / step_s)
    return [number * step_s for number in range(first, last + 1)]


def _legend(chart: Chart, *, y: float) -> Iterator[Shape]:
    looks = {look.word: look for kind, look in _LOOKS.items() if kind in chart.kinds}
    x = _MARGIN
    for look in (*looks.values(), _BUBBLE):
        yield _box(look, x, y - 6, 18, 12, "")
        yield Label(x=x + 24, y=y, text=look.word)
        x += 24 + (len(look.word) + 3) * _LETTER
    if chart.num_hidden_ranks:
        yield Label(x=x, y=y, text=f"ranks not shown: {chart.num_hidden_ranks}", colour=FAINT)


def _moved(shape: Shape, down: float) -> Shape:
    match shape:
        case Path(points=points, colour=colour, thickness=thickness):
            moved = tuple((x, y + down) for x, y in points)
            return Path(points=moved, colour=colour, thickness=thickness)
        case Box() | Label():
            return replace(shape, y=shape.y + down)


def _duration(seconds: float) -> str:
    return format_duration(shorten(max(seconds, 0.0)))
