"""A chart in a terminal: one line of characters per track, told apart by shape as well as by colour."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rich.text import Text

from isthmus.events import Span
from isthmus.observe.timeline import Chart, Track, microbatch_of
from isthmus.units import format_duration, shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    mark: str
    style: str
    word: str


_LOOKS: Final = MappingProxyType(
    {
        "forward": _Look(mark="░", style="black on cyan", word="forward"),
        "backward": _Look(mark="▓", style="white on blue", word="backward"),
        "evaluation": _Look(mark="▒", style="black on white", word="evaluation"),
        "optimize": _Look(mark="█", style="magenta", word="update"),
        "transfer": _Look(mark="─", style="yellow", word="under way"),
        "encode": _Look(mark="~", style="yellow", word="coded"),
        "decode": _Look(mark="~", style="yellow", word="coded"),
        "save": _Look(mark="=", style="green", word="copy of a checkpoint"),
    }
)
_BUBBLE: Final = _Look(mark="·", style="dim", word="bubble")
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
    return Text("\n").join([*lines, _axis(chart, margin, num_columns), _legend(chart)])


def _row(track: Track, chart: Chart, num_columns: int) -> Text:
    cells = [("", "") if track.is_line else (_BUBBLE.mark, _BUBBLE.style)] * num_columns
    scale = num_columns / chart.duration_s if chart.duration_s else 0.0
    for span in (span for row in track.rows for span in row if span.duration_s):
        first = max(0, round((span.start_s - chart.start_s) * scale))
        last = min(num_columns, max(first + 1, round((span.end_s - chart.start_s) * scale)))
        if track.is_line:
            _put_travel(cells, span, first, last)
        else:
            _put_box(cells, span, first, last)
    return Text.assemble(*((mark or " ", style) for mark, style in cells))


def _put_box(cells: list[tuple[str, str]], span: Span, first: int, last: int) -> None:
    look = _LOOKS[span.kind]
    number = microbatch_of(span)
    text = number if len(number) < last - first else ""
    for place in range(first, last):
        letter = text[place - first] if place - first < len(text) else look.mark
        cells[place] = (letter, look.style)


def _put_travel(cells: list[tuple[str, str]], span: Span, first: int, last: int) -> None:
    look = _LOOKS[span.kind]
    for place in range(first, last):
        is_free = not cells[place][0]
        cells[place] = (look.mark if is_free else _SEVERAL, look.style)
    if span.kind == "transfer" and last > first:
        cells[last - 1] = (_ARRIVAL, look.style)


def _axis(chart: Chart, margin: int, num_columns: int) -> Text:
    start, end = (format_duration(shorten(max(one, 0.0))) for one in (chart.start_s, chart.end_s))
    room = num_columns - len(start) - len(end)
    return Text(" " * margin + start + " " * max(1, room) + end, style="dim")


def _legend(chart: Chart) -> Text:
    looks = {look.word: look for kind, look in _LOOKS.items() if kind in chart.kinds}
    parts: list[str | tuple[str, str]] = []
    for look in (*looks.values(), _BUBBLE):
        parts += [(look.mark * 2, look.style), f" {look.word}   "]
    if "transfer" in chart.kinds:
        parts += [(_SEVERAL * 2, _LOOKS["transfer"].style), " several under way   "]
    if chart.num_hidden_ranks:
        parts.append((f"({_hidden(chart.num_hidden_ranks)})", "dim"))
    return Text.assemble(*parts)


def _hidden(num_ranks: int) -> str:
    return "1 rank is not shown" if num_ranks == 1 else f"{num_ranks} ranks are not shown"
