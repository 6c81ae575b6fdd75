"""Draws charts: in a terminal, and as shapes that become SVG, PNG or part of an HTML page.

Lengths are in pixels. Kinds of spans differ by shape or hatching as well as by colour.
"""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import Final, Literal

from rich.text import Text

from isthmus.errors import import_extra
from isthmus.events import Span
from isthmus.observe.timeline import LINE_MARK, Chart, Track, microbatch_of
from isthmus.units import format_bytes, format_duration, shorten

INK: Final = "#1b1f24"
FAINT: Final = "#9aa4af"
PAPER: Final = "#ffffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle; a hatched one has thin lines across it, so that not only its colour differs."""

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
    """The look of one kind of span in a picture (colour, hatching) and in a terminal (mark, style)."""

    word: str
    colour: str
    mark: str
    style: str
    is_hatched: bool = False
    ink: str = INK


_CODING: Final = _Look(word="coding", colour="#e07a3f", is_hatched=True, mark="~", style="yellow")
_LOOKS: Final = MappingProxyType(
    {
        "forward": _Look(word="forward", colour="#8ecae6", mark="░", style="black on cyan"),
        "backward": _Look(
            word="backward", colour="#2f6f9f", is_hatched=True, ink=PAPER, mark="▓", style="white on blue"
        ),
        "evaluation": _Look(word="evaluation", colour="#cdd6df", mark="▒", style="black on white"),
        "optimize": _Look(word="update", colour="#8e4a9e", ink=PAPER, mark="█", style="magenta"),
        "generate": _Look(word="generate", colour="#8ecae6", mark="░", style="black on cyan"),
        "discriminate": _Look(
            word="discriminate", colour="#2f6f9f", is_hatched=True, ink=PAPER, mark="▓", style="white on blue"
        ),
        "transfer": _Look(word="under way", colour="#f4c95d", mark="─", style="yellow"),
        "encode": _CODING,
        "decode": _CODING,
        "save": _Look(word="copy of a checkpoint", colour="#7fb069", mark="=", style="green"),
    }
)
_BUBBLE: Final = _Look(word="bubble", colour="#eceff2", is_hatched=True, mark="·", style="dim")
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
    x = _MARGIN
    for look in _looks_in(chart):
        yield _box(look, x, y - 6, 18, 12, "")
        yield Label(x=x + 24, y=y, text=look.word)
        x += 24 + (len(look.word) + 3) * _LETTER
    if chart.num_hidden_ranks:
        yield Label(x=x, y=y, text=f"ranks not shown: {chart.num_hidden_ranks}", colour=FAINT)


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
    return Text("\n").join([*lines, _text_axis(chart, margin, num_columns), _text_legend(chart)])


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


def _text_axis(chart: Chart, margin: int, num_columns: int) -> Text:
    start, end = _duration(chart.start_s), _duration(chart.end_s)
    return Text(f"{'':<{margin}}{start} {end:>{num_columns - len(start) - 1}}", style="dim")


def _text_legend(chart: Chart) -> Text:
    parts: list[str | tuple[str, str]] = []
    for look in _looks_in(chart):
        parts += [(look.mark * 2, look.style), f" {look.word}   "]
    if "transfer" in chart.kinds:
        parts += [(_SEVERAL * 2, _LOOKS["transfer"].style), " several under way   "]
    if chart.num_hidden_ranks:
        parts.append((f"(ranks not shown: {chart.num_hidden_ranks})", "dim"))
    return Text.assemble(*parts)


# As SVG.

_SVG_HATCH: Final = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="5" stroke="#00000026" stroke-width="1.5"/>'
    "</pattern></defs>"
)


def to_svg(drawing: Drawing) -> str:
    """The text of an SVG file."""
    size = f'width="{_px(drawing.width)}" height="{_px(drawing.height)}"'
    view = f'viewBox="0 0 {_px(drawing.width)} {_px(drawing.height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family="sans-serif">'
    paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    return "\n".join([head, _SVG_HATCH, paper, *map(_svg_shape, drawing.shapes), "</svg>\n"])


def _svg_shape(shape: Shape) -> str:
    match shape:
        case Box():
            return _svg_box(shape)
        case Label():
            return (
                f'<text x="{_px(shape.x)}" y="{_px(shape.y)}" dominant-baseline="central" '
                f'font-size="{_px(shape.size)}" text-anchor="{shape.anchor}" fill="{shape.colour}" '
                f'pointer-events="none">{escape(shape.text)}</text>'
            )
        case Path():
            points = " ".join(f"{_px(x)},{_px(y)}" for x, y in shape.points)
            return (
                f'<polyline points="{points}" fill="none" stroke="{shape.colour}" '
                f'stroke-width="{_px(shape.thickness)}"/>'
            )


def _svg_box(box: Box) -> str:
    place = f'x="{_px(box.x)}" y="{_px(box.y)}" width="{_px(box.width)}" height="{_px(box.height)}"'
    title = f"<title>{escape(box.title)}</title>" if box.title else ""
    filled = f'<rect {place} fill="{box.colour}">{title}</rect>'
    if not box.is_hatched:
        return filled
    return f'{filled}<rect {place} fill="url(#hatch)" pointer-events="none"/>'


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


# As PNG, by Pillow, which is an extra.

_SCALE: Final = 2
"""Dots per pixel, so that small numbers can be read."""
_HATCH_EVERY: Final = 10
_HATCH_DARKNESS: Final = 38
# The font that Pillow brings has no arrow.
_ARROW: Final = ">"
_ANCHORS: Final = {"start": "lm", "middle": "mm", "end": "rm"}


def to_png(drawing: Drawing) -> bytes:
    """The bytes of a PNG file."""
    image_module, pen_module, font_module = (
        import_extra(
            f"PIL.{name}", extra="pictures", what="a PNG picture by Pillow", otherwise=", or write an SVG"
        )
        for name in ("Image", "ImageDraw", "ImageFont")
    )
    size = (round(drawing.width * _SCALE), round(drawing.height * _SCALE))
    image = image_module.new("RGB", size, PAPER)
    pen, hatch = pen_module.Draw(image), image_module.new("L", size)
    for start in range(-size[1], size[0], _HATCH_EVERY):
        pen_module.Draw(hatch).line((start, size[1], start + size[1], 0), fill=_HATCH_DARKNESS, width=2)
    for shape in drawing.shapes:
        match shape:
            case Box():
                left, top = round(shape.x * _SCALE), round(shape.y * _SCALE)
                right = left + max(1, round(shape.width * _SCALE))
                place = (left, top, right, top + max(1, round(shape.height * _SCALE)))
                image.paste(shape.colour, place)
                if shape.is_hatched:
                    image.paste("black", place, hatch.crop(place))
            case Label():
                font = font_module.load_default(shape.size * _SCALE)
                text = shape.text.replace(LINE_MARK, _ARROW)
                pen.text(
                    (shape.x * _SCALE, shape.y * _SCALE),
                    text,
                    fill=shape.colour,
                    font=font,
                    anchor=_ANCHORS[shape.anchor],
                )
            case Path():
                points = [(x * _SCALE, y * _SCALE) for x, y in shape.points]
                pen.line(points, fill=shape.colour, width=max(1, round(shape.thickness * _SCALE)))
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()


# As part of a page that needs no other file.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page under one heading."""

    heading: str
    parts: tuple[str | Table | Drawing, ...]


def to_html(title: str, sections: Sequence[Section]) -> str:
    """The text of a page."""
    body = "\n".join(_section(one) for one in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _section(section: Section) -> str:
    return "\n".join([f"<h2>{escape(section.heading)}</h2>", *map(_part, section.parts)])


def _part(part: str | Table | Drawing) -> str:
    match part:
        case str():
            return f"<p>{escape(part)}</p>"
        case Table():
            head = "".join(f"<th>{escape(one)}</th>" for one in part.header)
            rows = "\n".join(
                "<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>" for row in part.rows
            )
            return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"
        case Drawing():
            return to_svg(part)
