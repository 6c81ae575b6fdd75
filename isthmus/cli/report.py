"""`isthmus report`: what a run did, beside what was predicted for it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

import isthmus
from isthmus.cli.output import JsonOption, duration, percent, print_tables, write_file
from isthmus.observe.draw import Drawing, Section, Table, draw_chart, draw_curve, to_html
from isthmus.observe.report import Compared, Comparison
from isthmus.observe.timeline import Waits
from isthmus.units import format_bytes

REPORT_FILE: Final = "report.html"
_WAITS: Final = ("for_data", "saving", "for_activations", "for_gradients", "for_other_stages", "other")


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, runs/NAME/ID, or runs/NAME.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the page; report.html of the run.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell how a run went: time, bubbles, waiting and bytes, beside what its plan predicted."""
    found = isthmus.report(run)
    compared = found.comparison
    tables = {heading: table for heading, table in _tables(compared).items() if table.rows}
    console = Console(highlight=False, stderr=as_json)
    if as_json:
        typer.echo(json.dumps(_facts(found.run, compared), indent=2))
    else:
        print_tables(console, tables.values())
        console.print()
        if not found.has_plan:
            console.print("[dim]the run has no plan.json, so nothing is predicted[/]")
    page = to_html(f"Run {found.run.parent.name}, {found.run.name}", _sections(compared, tables))
    write_file(console, html or found.run / REPORT_FILE, page.encode())


def _tables(found: Comparison) -> dict[str, Table]:
    split = tuple((name, percent(share, digits=1)) for name, share in found.bubble_split.items())
    sizes = tuple((one.track, *_cells(one, _size)) for one in found.bytes_per_step)
    return {
        "Times": _times_table(found),
        "Error by kind": _errors_table(found),
        "Where the time went": _waits_table(found),
        "Bubble as planned": Table(header=("predicted bubble", "share"), rows=split),
        "Bytes a step": Table(header=("bytes a step", "predicted", "measured", "error"), rows=sizes),
    }


def _times_table(found: Comparison) -> Table:
    pairs = (found.step, *found.durations)
    rows = [
        (one.kind if one.track == "all" else f"{one.kind} {one.track}", *_cells(one, duration))
        for one in pairs
        if one.measured is not None or one.predicted is not None
    ]
    return Table(header=("time of one", "predicted", "measured", "error"), rows=tuple(rows))


def _errors_table(found: Comparison) -> Table:
    kinds = dict.fromkeys(one.kind for one in found.durations)
    errors = {"step": found.step.error, **{kind: found.error_of(kind) for kind in kinds}}
    rows = [(kind, f"{abs(error):.1%}") for kind, error in errors.items() if error is not None]
    return Table(header=("kind", "mean error"), rows=tuple(rows))


def _waits_table(found: Comparison) -> Table:
    waits = (*found.measured_waits, *found.predicted_waits)
    names = [name for name in _WAITS if any(getattr(one, name) for one in waits)]
    rows = [
        *(_waits_row(one, "measured", names) for one in found.measured_waits),
        *(_waits_row(one, "predicted", names) for one in found.predicted_waits),
    ]
    header = ("cloud", "", "computes", "bubble, waiting", *(name.replace("_", " ") for name in names))
    return Table(header=header, rows=tuple(rows))


def _waits_row(waits: Waits, how: str, names: Sequence[str]) -> tuple[str, ...]:
    shares = [waits.busy, waits.bubble, *(getattr(waits, name) for name in names)]
    return (waits.cloud, how, *(f"{share:.1%}" for share in shares))


def _cells(pair: Compared, show: Callable[[float], str]) -> tuple[str, str, str]:
    values = ("–" if one is None else show(one) for one in (pair.predicted, pair.measured))
    predicted, measured = values
    return predicted, measured, "–" if pair.error is None else f"{pair.error:+.1%}"


def _size(num_bytes: float) -> str:
    return format_bytes(round(num_bytes))


def _sections(found: Comparison, tables: dict[str, Table]) -> list[Section]:
    sections = [Section(heading="One step", parts=tuple(_charts(found)))]
    if len(found.losses) > 1:
        curve = draw_curve(found.losses, width=760, height=220, word="step")
        sections.append(Section(heading="Loss", parts=(curve,)))
    return sections + [Section(heading=heading, parts=(table,)) for heading, table in tables.items()]


def _charts(found: Comparison) -> Sequence[Drawing]:
    """Predicted above measured, on one scale."""
    charts = {"predicted": found.predicted_chart, "measured": found.measured_chart}
    shown = {word: chart for word, chart in charts.items() if chart is not None}
    end_s = max((chart.end_s for chart in shown.values()), default=0.0)
    return [draw_chart(replace(chart, end_s=end_s), title=word) for word, chart in shown.items()]


def _facts(run: Path, found: Comparison) -> dict[str, Any]:
    return {
        "run": str(run),
        "step": _pair_facts(found.step),
        "durations": [_pair_facts(one) for one in found.durations],
        "errors": {kind: found.error_of(kind) for kind in {one.kind for one in found.durations}},
        "bytes_per_step": [_pair_facts(one) for one in found.bytes_per_step],
        "waits": {
            "measured": [asdict(one) for one in found.measured_waits],
            "predicted": [asdict(one) for one in found.predicted_waits],
        },
        "bubble_split": dict(found.bubble_split),
        "losses": found.losses,
    }


def _pair_facts(pair: Compared) -> dict[str, Any]:
    return {**asdict(pair), "error": pair.error}
