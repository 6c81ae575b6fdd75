"""Drawings as PNG, through Pillow, which is an extra."""

import importlib
import io
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.observe.drawing import PAPER, Box, Drawing, Label, Path
from isthmus.observe.timeline import LINE_MARK

_SCALE: Final = 2
"""Dots per pixel, so that small numbers can be read."""
_HATCH_EVERY: Final = 10
_HATCH_COLOUR: Final = (0, 0, 0, 38)
# The font that Pillow brings has no arrow.
_ARROW: Final = ">"
_ANCHORS: Final = {"start": "lm", "middle": "mm", "end": "rm"}


def to_png(drawing: Drawing) -> bytes:
    """The bytes of a PNG file."""
    image_module, pen_module, font_module = (_pillow(name) for name in ("Image", "ImageDraw", "ImageFont"))
    size = (round(drawing.width * _SCALE), round(drawing.height * _SCALE))
    image = image_module.new("RGB", size, PAPER)
    pen = pen_module.Draw(image, "RGBA")
    for shape in drawing.shapes:
        match shape:
            case Box():
                _draw_box(pen, shape)
            case Label():
                font = font_module.load_default(shape.size * _SCALE)
                place = (shape.x * _SCALE, shape.y * _SCALE)
                text = shape.text.replace(LINE_MARK, _ARROW)
                pen.text(place, text, fill=shape.colour, font=font, anchor=_ANCHORS[shape.anchor])
            case Path():
                points = [(x * _SCALE, y * _SCALE) for x, y in shape.points]
                pen.line(points, fill=shape.colour, width=max(1, round(shape.thickness * _SCALE)))
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()


def _draw_box(pen: Any, box: Box) -> None:
    left, top = box.x * _SCALE, box.y * _SCALE
    right, bottom = left + box.width * _SCALE, top + box.height * _SCALE
    pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), fill=box.colour)
    if not box.is_hatched:
        return
    height = bottom - top
    start = left - height
    while start < right:
        low, high = max(start, left), min(start + height, right)
        if high > low:
            pen.line(
                (low, bottom - (low - start), high, bottom - (high - start)), fill=_HATCH_COLOUR, width=2
            )
        start += _HATCH_EVERY


def _pillow(name: str) -> Any:
    try:
        return importlib.import_module(f"PIL.{name}")
    except ImportError:
        raise UserError(
            "a PNG picture needs Pillow, which is not installed",
            hint="pip install 'isthmus[pictures]', or write an SVG instead",
        ) from None
