"""Quality against bytes as an SVG: what the seed's methods lose, and what ours do, at each byte budget."""

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from isthmus.observe.draw import label, line, ticks
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
        self._lines = [one for one in lines if one.lost is not None]
        ends = [end for one in self._lines if one.lost for end in (one.lost.low, one.lost.high)]
        self._low, self._high = min([*ends, -0.5]), max([*ends, 1.0])
        self._task = lines[0].task

    def draw(self) -> str:
        unit = "BLEU lost to raw" if self._task == "mt" else "loss above raw, %"
        parts = [
            label(_WIDTH / 2, 12, TASKS[self._task], size=13, anchor="middle"),
            label(_WIDTH / 2, _HEIGHT - 12, "bytes on the wire, times fewer than float32", anchor="middle"),
            f'<text transform="translate(12 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{unit}</text>',
            *self._grid(),
            *(self._front(side) for side in _NAMES),
            *map(self._point, self._lines),
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
            x = self._x(ratio)
            parts.append(line((x, _TOP), (x, _HEIGHT - _BOTTOM), colour="#eeeeee"))
            parts.append(label(x, _HEIGHT - _BOTTOM + 10, f"{ratio}×", anchor="middle"))
        for lost in ticks(self._low, self._high, about=6):
            y, colour = self._y(lost), "#999999" if round(lost, 6) == 0 else "#eeeeee"
            parts.append(line((_LEFT, y), (_WIDTH - _RIGHT, y), colour=colour))
            parts.append(label(_LEFT - 6, y, f"{round(lost, 6):g}", anchor="end"))
        return parts

    def _front(self, side: Side) -> str:
        lines = sorted(
            (one for one in self._lines if one.side is side and "subspace" not in one.row),
            key=lambda one: one.ratio_float32,
        )
        places = [(self._x(one.ratio_float32), self._y(one.lost.mean)) for one in lines if one.lost]
        return line(*places, colour=_COLOURS[side], thickness=1.5)

    def _point(self, one: Line) -> str:
        if one.lost is None:
            return ""
        x, colour = self._x(one.ratio_float32), _COLOURS[one.side]
        bar = line((x, self._y(one.lost.low)), (x, self._y(one.lost.high)), colour=colour)
        title = f"<title>{escape(f'{one.row}: {one.lost.mean:+.2f}')}</title>"
        place = f'cx="{x:.1f}" cy="{self._y(one.lost.mean):.1f}"'
        return f'{bar}<circle {place} r="3" fill="{colour}">{title}</circle>'

    def _legend(self) -> list[str]:
        parts = []
        for place, (side, name) in zip(_LEGEND_PLACES, _NAMES.items(), strict=True):
            x = _LEFT + place
            parts.append(f'<circle cx="{x}" cy="{_TOP - 8}" r="3" fill="{_COLOURS[side]}"/>')
            parts.append(label(x + 8, _TOP - 8, name))
        return parts
