"""Drawings as SVG: small, with a word on every box where the pointer rests."""

from html import escape
from typing import Final

from isthmus.observe.drawing import PAPER, Box, Drawing, Label, Path, Shape

_HATCH: Final = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="5" stroke="#00000026" stroke-width="1.5"/>'
    "</pattern></defs>"
)


def to_svg(drawing: Drawing) -> str:
    """The text of an SVG file."""
    size = f'width="{_number(drawing.width)}" height="{_number(drawing.height)}"'
    view = f'viewBox="0 0 {_number(drawing.width)} {_number(drawing.height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family="sans-serif">'
    paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    return "\n".join([head, _HATCH, paper, *map(_shape, drawing.shapes), "</svg>\n"])


def _shape(shape: Shape) -> str:
    match shape:
        case Box():
            return _box(shape)
        case Label():
            return (
                f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" dominant-baseline="central" '
                f'font-size="{_number(shape.size)}" text-anchor="{shape.anchor}" fill="{shape.colour}" '
                f'pointer-events="none">{escape(shape.text)}</text>'
            )
        case Path():
            points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
            return (
                f'<polyline points="{points}" fill="none" stroke="{shape.colour}" '
                f'stroke-width="{_number(shape.thickness)}"/>'
            )


def _box(box: Box) -> str:
    place = (
        f'x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" '
        f'height="{_number(box.height)}"'
    )
    title = f"<title>{escape(box.title)}</title>" if box.title else ""
    filled = f'<rect {place} fill="{box.colour}">{title}</rect>'
    if not box.is_hatched:
        return filled
    return f'{filled}<rect {place} fill="url(#hatch)" pointer-events="none"/>'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
