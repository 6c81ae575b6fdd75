"""Options of verbs that draw, and the files they ask for."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from isthmus.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from isthmus.observe.drawing import Drawing
    from isthmus.observe.page import Section

_WHERE: Final = "name a file in a folder that exists and can be written to"

SvgOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it as SVG.")]
PngOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it as PNG; needs Pillow.")]
HtmlOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with all of it.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Where a user wants pictures."""

    svg: Path | None = None
    png: Path | None = None
    html: Path | None = None

    def write(self, drawing: "Drawing", *, title: str, sections: "Sequence[Section]" = ()) -> list[Path]:
        """Write those that were asked for; the page has the drawing above its sections."""
        from isthmus.observe.page import Section, to_html
        from isthmus.observe.png import to_png
        from isthmus.observe.svg import to_svg

        written = []
        if self.svg is not None:
            written.append(write_file(self.svg, to_svg(drawing).encode()))
        if self.png is not None:
            written.append(write_file(self.png, to_png(drawing)))
        if self.html is not None:
            page = to_html(title, [Section(heading="One step", parts=(drawing,)), *sections])
            written.append(write_file(self.html, page.encode()))
        return written


def check_folder(path: Path) -> None:
    """Refuse a file in a folder that cannot take it, before anything is measured for it."""
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written", hint=_WHERE)


def write_file(path: Path, content: bytes) -> Path:
    """Write a file that a user has named."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", hint=_WHERE) from None
    return path


def tell_written(console: "Console", written: Sequence[Path]) -> None:
    """Say which files there are now."""
    for path in written:
        console.print(f"[green]✓[/] wrote {path}", soft_wrap=True)
