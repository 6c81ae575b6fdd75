"""Options that several commands share, and how all of them print tables and write files."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import rich.table
import typer
from rich.console import Console
from typer import Argument, Option

import isthmus
from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.spec import job_schema
from isthmus.observe.draw import Table, to_html
from isthmus.units import format_bytes, format_duration, shorten

if TYPE_CHECKING:
    from isthmus.plan.plan import Plan

JobArgument = Annotated[Path, Argument(metavar="JOB", help="The job file.")]
RunArgument = Annotated[
    Path, Argument(metavar="RUN", help="The folder of a run, runs/NAME/ID, or runs/NAME.")
]
CloudOption = Annotated[
    str | None, Option(metavar="NAME", help="Run as this one cloud; without it all clouds run here.")
]
SetOption = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Override a key of the job, such as seed=7; repeatable."),
]
ProfileOption = Annotated[
    bool,
    Option(
        "--profile/--no-profile", help="Measure clouds that have no profile, where all are on this machine."
    ),
]
FaultsOption = Annotated[Path | None, Option(metavar="FILE", help="Play the faults of this file.")]
JsonOption = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
SvgOption = Annotated[Path | None, Option(metavar="FILE", help="Draw one step as SVG.")]
HtmlOption = Annotated[
    Path | None, Option(metavar="FILE", help="Write a page with the picture and the figures.")
]

T = TypeVar("T")

NO_EMULATED_WAN: Final = "--faults disturbs the emulated WAN, and with --cloud there is none"
_WHERE: Final = "name a file in a folder that exists and can be written to"


def console_for_notes() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def make_plan(job: Job, notes: Console, *, is_profiled: bool, is_quick: bool = False) -> "Plan":
    """Plan a job, and say where its times come from."""
    if not is_profiled and any(cloud.profile is None for cloud in job.cloud):
        notes.print("times are those of the catalogue, since --no-profile was given")
    with notes.status("planning") as status:
        return isthmus.plan(
            job, measure=is_profiled, is_quick=is_quick, note=notes.print, progress=status.update
        )


def print_tables(console: Console, tables: Iterable[Table]) -> None:
    """Print tables, with a line between two of them; those without rows are left out."""
    for number, table in enumerate(table for table in tables if table.rows):
        if number:
            console.print()
        # A line may be too long for the terminal, but no word is broken.
        columns = zip(table.header, *table.rows, strict=True)
        least = [max((len(word) for cell in one for word in cell.split()), default=0) for one in columns]
        gap = 2 if sum(least) + 2 * len(least) - 2 <= console.width else 1
        shown = rich.table.Table(
            box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=any(table.header)
        )
        for place, (word, width) in enumerate(zip(table.header, least, strict=True)):
            shown.add_column(word, justify="right" if place else "left", min_width=width)
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown, width=max(console.width, sum(least) + gap * (len(least) - 1)), crop=False)


def tabulate(items: Iterable[T], columns: Mapping[str, Callable[[T], str]]) -> Table:
    """Return a table with a row for each item, whose cells are made by the functions of the columns."""
    rows = (tuple(cell(one) for cell in columns.values()) for one in items)
    return Table(header=tuple(columns), rows=tuple(rows))


def duration(seconds: float) -> str:
    """Return a duration with three digits."""
    sign = "-" if seconds < 0 else ""
    return sign + format_duration(shorten(abs(seconds)))


def size(num_bytes: float) -> str:
    """Return a size with four digits."""
    return format_bytes(int(shorten(num_bytes)))


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def write_pictures(
    console: Console, drawing: str, *, title: str, about: Sequence[str], svg: Path | None, html: Path | None
) -> None:
    """Write the files that were asked for; the page has what is told `about` the drawing below it."""
    if svg is not None:
        write_file(console, svg, drawing)
    if html is not None:
        write_file(console, html, to_html(title, {"One step": [drawing], "Figures": about}))


def check_folders(*paths: Path | None) -> None:
    """Refuse files in folders that cannot take them, before anything is measured for them."""
    for path in paths:
        if path and (not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise UserError(f"{path} cannot be written", hint=_WHERE)


def write_file(console: Console, path: Path, text: str) -> None:
    """Write a file that a user has named, and say so."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", hint=_WHERE) from None
    console.print(f"[green]✓[/] wrote {path}", soft_wrap=True)


def schema() -> None:
    """Print the JSON schema of a job file, for editors that complete and check it.

    Example: `isthmus schema > job.schema.json`
    """
    print_json(job_schema())


def print_json(facts: object) -> None:
    """Print facts for programs, on standard output."""
    typer.echo(json.dumps(facts, indent=2, ensure_ascii=False, default=str))
