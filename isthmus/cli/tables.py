"""Tables of a page in a terminal, and numbers as people read them."""

from typing import TYPE_CHECKING

from isthmus.units import format_duration, shorten

if TYPE_CHECKING:
    import rich.table

    from isthmus.observe.page import Table


def as_rich(table: "Table") -> "rich.table.Table":
    """The table of a page as the terminal shows it."""
    from rich.table import Table as RichTable

    shown = RichTable(box=None, pad_edge=False)
    for place, word in enumerate(table.header):
        shown.add_column(word, justify="left" if place == 0 else "right")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def duration(seconds: float) -> str:
    """Three digits are enough for a person."""
    sign = "-" if seconds < 0 else ""
    return sign + format_duration(shorten(abs(seconds)))
