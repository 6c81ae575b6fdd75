"""Draws charts, in a terminal and as SVG, and makes pages of them.

Lengths are in pixels. Kinds of spans differ by shape or hatching as well as by colour.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from rich.text import Text

from isthmus.events import Span
from isthmus.observe.timeline import Chart, Track, microbatch_of
from isthmus.units import format_bytes, format_duration, shorten

INK: Final = "#1b1f24"
_FAINT: Final = "#9aa4af"
_PAPER: Final = "#ffffff"
_SVG_HATCH: Final = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="5" stroke="#00000026" stroke-width="1.5"/>'
    "</pattern></defs>"
)


def box(
    x: float, y: float, width: float, height: float, colour: str, title: str = "", is_hatched: bool = False
) -> str:
    """Return a rectangle; a hatched one has thin lines across it, so that not only its colour differs."""
    place = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"'
    told = f"<title>{escape(title)}</title>" if title else ""
    filled = f'<rect {place} fill="{colour}">{told}</rect>'
    return f'{filled}<rect {place} fill="url(#hatch)" pointer-events="none"/>' if is_hatched else filled


def label(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 11.0,
    colour: str = INK,
    anchor: Literal["start", "middle", "end"] = "start",
) -> str:
    """Return a text on one line; `y` is its middle."""
    return (
        f'<text x="{_px(x)}" y="{_px(y)}" dominant-baseline="central" font-size="{_px(size)}" '
        f'text-anchor="{anchor}" fill="{colour}" pointer-events="none">{escape(text)}</text>'
    )


def line(*points: tuple[float, float], colour: str = _FAINT, thickness: float = 1.0) -> str:
    """Return a line through points."""
    places = " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{_px(thickness)}"/>'


def to_svg(width: float, height: float, shapes: Iterable[str]) -> str:
    """Return the text of an SVG file; later shapes cover earlier ones."""
    size = f'width="{_px(width)}" height="{_px(height)}" viewBox="0 0 {_px(width)} {_px(height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    paper = f'<rect width="100%" height="100%" fill="{_PAPER}"/>'
    return "\n".join([head, _SVG_HATCH, paper, *shapes, "</svg>\n"])


def ticks(start: float, end: float, *, about: int = 8) -> list[float]:
    """Return round numbers between two others, about so many of them."""
    if end <= start:
        return []
    rough = (end - start) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * one for one in (1, 2, 5, 10) if unit * one >= rough)
    return [number * step for number in range(math.ceil(start / step), math.floor(end / step) + 1)]


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


class _Look(NamedTuple):
    """The look of one kind of span in a picture (colour, hatching) and in a terminal (mark, style)."""

    word: str
    colour: str
    mark: str
    style: str
    is_hatched: bool = False
    ink: str = INK


_CODING: Final = _Look("coding", "#e07a3f", "~", "yellow", is_hatched=True)
_LOOKS: Final = MappingProxyType(
    {
        "forward": _Look("forward", "#8ecae6", "░", "black on cyan"),
        "backward": _Look("backward", "#2f6f9f", "▓", "white on blue", is_hatched=True, ink=_PAPER),
        "evaluation": _Look("evaluation", "#cdd6df", "▒", "black on white"),
        "optimize": _Look("update", "#8e4a9e", "█", "magenta", ink=_PAPER),
        "generate": _Look("generate", "#8ecae6", "░", "black on cyan"),
        "discriminate": _Look("discriminate", "#2f6f9f", "▓", "white on blue", is_hatched=True, ink=_PAPER),
        "transfer": _Look("under way", "#f4c95d", "─", "yellow"),
        "encode": _CODING,
        "decode": _CODING,
        "save": _Look("copy of a checkpoint", "#7fb069", "=", "green"),
    }
)
_BUBBLE: Final = _Look("bubble", "#eceff2", "·", "dim", is_hatched=True)
_MARGIN: Final = 12.0
_BAR: Final = 26.0
_THIN_BAR: Final = 12.0
_GAP: Final = 8.0
_LETTER: Final = 6.6
"""Width of a letter of 11 pixels."""
_SEAM: Final = 0.6
"""Between boxes that follow each other at once."""


def draw_chart(chart: Chart, *, width: float = 1200.0, title: str = "") -> str:
    """Return compute, transfers and bubbles along the time as SVG, one track below the other."""
    left = _MARGIN + max((len(track.name) for track in chart.tracks), default=0) * _LETTER + _GAP
    scale = (width - _MARGIN - left) / chart.duration_s if chart.duration_s else 0.0
    shapes: list[str] = []
    y = top = _MARGIN + (24 if title else 0)
    for track in chart.tracks:
        height = max(1, len(track.rows)) * _row_height(track)
        shapes += [
            label(_MARGIN, y + height / 2, track.name),
            *_draw_track(track, chart, left=left, top=y, scale=scale),
        ]
        y += height + _GAP
    heading = [label(_MARGIN, _MARGIN + 7, title, size=14)] if title else []
    axis = _axis(chart, left=left, scale=scale, top=top, bottom=y)
    return to_svg(width, y + 46, [*heading, *axis, *shapes, *_legend(chart, y=y + 30)])


def draw_curve(points: Sequence[tuple[float, float]], *, width: float, height: float, word: str) -> str:
    """Return a curve through (step, value), with its lowest and highest value beside it, as SVG."""
    left, right, bottom = _MARGIN + 56, width - _MARGIN, height - 28
    xs, ys = zip(*points, strict=True)
    low, high = min(ys), max(ys)
    across = (right - left) / ((max(xs) - min(xs)) or 1.0)
    up = (bottom - _MARGIN - 10) / ((high - low) or 1.0)
    shapes = (
        line((left, _MARGIN), (left, bottom), (right, bottom)),
        label(left - 6, bottom, f"{low:.4g}", anchor="end"),
        label(left - 6, bottom - (high - low) * up, f"{high:.4g}", anchor="end"),
        label(left, bottom + 14, f"{min(xs):g}"),
        label(right, bottom + 14, f"{max(xs):g}", anchor="end"),
        label((left + width) / 2, bottom + 14, word, anchor="middle"),
        line(
            *((left + (x - min(xs)) * across, bottom - (y - low) * up) for x, y in points),
            colour="#2f6f9f",
            thickness=1.8,
        ),
    )
    return to_svg(width, height, shapes)


def _row_height(track: Track) -> float:
    return _THIN_BAR if track.is_line else _BAR


def _draw_track(track: Track, chart: Chart, *, left: float, top: float, scale: float) -> Iterator[str]:
    row_height, size = _row_height(track), 9.0 if track.is_line else 11.0

    def place(start_s: float, end_s: float) -> tuple[float, float]:
        start_s, end_s = max(start_s, chart.start_s), min(end_s, chart.end_s)
        return left + (start_s - chart.start_s) * scale, max(0.5, (end_s - start_s) * scale - _SEAM)

    for start_s, end_s in track.bubbles:
        x, length = place(start_s, end_s)
        title = f"bubble, {_duration(end_s - start_s)}"
        yield box(x, top, length, row_height, _BUBBLE.colour, title, _BUBBLE.is_hatched)
    for number, row in enumerate(track.rows):
        y = top + number * row_height
        for span in (one for one in row if one.duration_s):
            x, length = place(span.start_s, span.end_s)
            look, text = _LOOKS[span.kind], microbatch_of(span)
            yield box(x, y, length, row_height - 1, look.colour, _title(span), look.is_hatched)
            if text and length > len(text) * _LETTER * size / 11 + 3:
                middle = (x + length / 2, y + (row_height - 1) / 2)
                yield label(*middle, text, size=size, colour=look.ink, anchor="middle")


def _title(span: Span) -> str:
    size = [format_bytes(span.num_bytes)] if span.num_bytes else []
    return ", ".join([f"{span.track}: {span.name}", span.kind, _duration(span.duration_s), *size])


def _axis(chart: Chart, *, left: float, scale: float, top: float, bottom: float) -> Iterator[str]:
    for at_s in ticks(chart.start_s, chart.end_s):
        x = left + (at_s - chart.start_s) * scale
        yield line((x, top), (x, bottom), colour="#d5dae0", thickness=0.5)
        yield label(x, bottom + 8, _duration(at_s), colour=_FAINT, anchor="middle")


def _legend(chart: Chart, *, y: float) -> Iterator[str]:
    x = _MARGIN
    for look in _looks_in(chart):
        yield box(x, y - 6, 18, 12, look.colour, is_hatched=look.is_hatched)
        yield label(x + 24, y, look.word)
        x += 24 + (len(look.word) + 3) * _LETTER
    if chart.num_hidden_ranks:
        yield label(x, y, f"ranks not shown: {chart.num_hidden_ranks}", colour=_FAINT)


def _looks_in(chart: Chart) -> list[_Look]:
    return [*dict.fromkeys(look for kind, look in _LOOKS.items() if kind in chart.kinds), _BUBBLE]


def _duration(seconds: float) -> str:
    return format_duration(shorten(max(seconds, 0.0)))


# In a terminal: one line of characters per track.

_SEVERAL: Final = "═"
_ARRIVAL: Final = ">"
_MIN_COLUMNS: Final = 20


def draw_text(chart: Chart, *, width: int) -> Text:
    """The chart in lines of at most `width` characters, with an axis and a legend."""
    margin = max((len(track.name) for track in chart.tracks), default=0) + 1
    num_columns = max(_MIN_COLUMNS, width - margin - 1)
    lines = [
        Text.assemble(f"{track.name:<{margin}}", _row(track, chart, num_columns)) for track in chart.tracks
    ]
    start, end = _duration(chart.start_s), _duration(chart.end_s)
    axis = Text(f"{'':<{margin}}{start} {end:>{num_columns - len(start) - 1}}", style="dim")
    return Text("\n").join([*lines, axis, _text_legend(chart)])


def _row(track: Track, chart: Chart, num_columns: int) -> Text:
    cells = [("", "") if track.is_line else (_BUBBLE.mark, _BUBBLE.style)] * num_columns
    scale = num_columns / chart.duration_s if chart.duration_s else 0.0
    for span in (span for row in track.rows for span in row if span.duration_s):
        first = max(0, round((span.start_s - chart.start_s) * scale))
        last = min(num_columns, max(first + 1, round((span.end_s - chart.start_s) * scale)))
        look = _LOOKS[span.kind]
        if track.is_line:
            marks = [_SEVERAL if mark else look.mark for mark, _ in cells[first:last]]
            if span.kind == "transfer" and marks:
                marks[-1] = _ARRIVAL
        else:
            number = microbatch_of(span)
            marks = list((number if len(number) < last - first else "").ljust(last - first, look.mark))
        cells[first:last] = [(mark, look.style) for mark in marks]
    return Text.assemble(*((mark or " ", style) for mark, style in cells))


def _text_legend(chart: Chart) -> Text:
    parts: list[str | tuple[str, str]] = []
    for look in _looks_in(chart):
        parts += [(look.mark * 2, look.style), f" {look.word}   "]
    if "transfer" in chart.kinds:
        parts += [(_SEVERAL * 2, _LOOKS["transfer"].style), " several under way   "]
    if chart.num_hidden_ranks:
        parts.append((f"(ranks not shown: {chart.num_hidden_ranks})", "dim"))
    return Text.assemble(*parts)


# A page that needs no other file.

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1f24 }
body { margin: 2rem auto; max-width: 1240px; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem .9rem .2rem 0; text-align: right }
th { font-weight: 600; border-bottom: 1px solid #9aa4af } td:first-child, th:first-child { text-align: left }
svg { max-width: 100%; height: auto } p { color: #4a5560 }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a header; the first column holds names."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_html(self) -> str:
        head = "".join(f"<th>{escape(one)}</th>" for one in self.header)
        rows = ("".join(f"<td>{escape(one)}</td>" for one in row) for row in self.rows)
        body = "\n".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def paragraph(text: str) -> str:
    """Return a text as a part of a page."""
    return f"<p>{escape(text)}</p>"


def to_html(title: str, sections: Mapping[str, Sequence[str]]) -> str:
    """Return a page of sections by heading, each of SVG and other parts in HTML."""
    body = "\n".join(
        "\n".join([f"<h2>{escape(heading)}</h2>", *parts]) for heading, parts in sections.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )
