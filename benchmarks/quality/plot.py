"""Quality against bytes as an SVG: what the seed's methods lose, and what ours do, at each byte budget."""

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from quality.report import TASKS, Line
from quality.rows import Side

_WIDTH, _HEIGHT = 380, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 40, 48
_COLOURS: Final = {
    Side.SEED: "#b3541e",
    Side.OURS: "#1f6f8b",
    Side.BOTTLENECK: "#4b8f3a",
    Side.CONTROL: "#a8a8a8",
    Side.RAW: "#555555",
}
_NAMES: Final = {
    Side.SEED: "seed's",
    Side.OURS: "ours",
    Side.BOTTLENECK: "ours, bottleneck",
    Side.CONTROL: "its anchors alone",
}
_LEGEND_PLACES: Final = (0, 60, 104, 212)
_RATIOS: Final = (1, 2, 4, 8, 16, 32, 64, 128)


def draw(panels: Sequence[Sequence[Line]]) -> str:
    """One panel a task, side by side."""
    drawn = [
        f'<g transform="translate({index * _WIDTH} 0)">{_Panel(lines).draw()}</g>'
        for index, lines in enumerate(panels)
    ]
    width = _WIDTH * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="#222222">'
        f'<rect width="{width}" height="{_HEIGHT}" fill="#ffffff"/>{"".join(drawn)}</svg>\n'
    )


class _Panel:
    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = [line for line in lines if line.lost is not None]
        ends = [end for line in self._lines if line.lost for end in (line.lost.low, line.lost.high)]
        self._low, self._high = min([*ends, -0.5]), max([*ends, 1.0])
        self._task = lines[0].task

    def draw(self) -> str:
        unit = "BLEU lost to raw" if self._task == "mt" else "loss above raw, %"
        parts = [
            _text(_WIDTH / 2, 16, TASKS[self._task], anchor="middle", weight="bold"),
            _text(_WIDTH / 2, _HEIGHT - 8, "bytes on the wire, times fewer than float32", anchor="middle"),
            f'<text transform="translate(12 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{unit}</text>',
            *self._grid(),
            *(self._front(side) for side in _NAMES),
            *(self._point(line) for line in self._lines),
            *self._legend(),
        ]
        return "".join(parts)

    def _x(self, ratio: float) -> float:
        share = math.log2(max(ratio, 0.9)) / math.log2(_RATIOS[-1])
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, lost: float) -> float:
        """Losses grow downwards, so that better stands higher."""
        share = (lost - self._low) / (self._high - self._low)
        return _TOP + share * (_HEIGHT - _TOP - _BOTTOM)

    def _grid(self) -> list[str]:
        parts = []
        for ratio in _RATIOS:
            parts.append(_line(self._x(ratio), _TOP, self._x(ratio), _HEIGHT - _BOTTOM, "#eeeeee"))
            parts.append(_text(self._x(ratio), _HEIGHT - _BOTTOM + 14, f"{ratio}×", anchor="middle"))
        for lost in _ticks(self._low, self._high):
            colour = "#999999" if lost == 0 else "#eeeeee"
            parts.append(_line(_LEFT, self._y(lost), _WIDTH - _RIGHT, self._y(lost), colour))
            parts.append(_text(_LEFT - 6, self._y(lost) + 4, f"{lost:g}", anchor="end"))
        return parts

    def _front(self, side: Side) -> str:
        lines = sorted(
            (line for line in self._lines if line.side is side and "subspace" not in line.row),
            key=lambda line: line.ratio_float32,
        )
        places = " ".join(
            f"{self._x(line.ratio_float32):.1f},{self._y(line.lost.mean):.1f}" for line in lines if line.lost
        )
        return f'<polyline points="{places}" fill="none" stroke="{_COLOURS[side]}" stroke-width="1.5"/>'

    def _point(self, line: Line) -> str:
        if line.lost is None:
            return ""
        x, colour = self._x(line.ratio_float32), _COLOURS[line.side]
        bar = _line(x, self._y(line.lost.low), x, self._y(line.lost.high), colour)
        title = f"<title>{escape(f'{line.row}: {line.lost.mean:+.2f}')}</title>"
        place = f'cx="{x:.1f}" cy="{self._y(line.lost.mean):.1f}"'
        return f'{bar}<circle {place} r="3" fill="{colour}">{title}</circle>'

    def _legend(self) -> list[str]:
        parts = []
        for place, (side, name) in zip(_LEGEND_PLACES, _NAMES.items(), strict=True):
            x = _LEFT + place
            parts.append(f'<circle cx="{x}" cy="{_TOP - 8}" r="3" fill="{_COLOURS[side]}"/>')
            parts.append(_text(x + 8, _TOP - 4, name))
        return parts


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [round(index * step, 6) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
