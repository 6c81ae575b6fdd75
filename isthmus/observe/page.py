"""Pages of HTML that need nothing beside them: headings, tables and pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from isthmus.observe.drawing import Drawing
from isthmus.observe.svg import to_svg

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
    """What stands under one heading."""

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
