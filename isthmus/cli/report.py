"""`isthmus report`: what a run did, laid over what was predicted for it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from isthmus.cli.options import JsonOption
from isthmus.cli.pictures import tell_written, write_file
from isthmus.cli.tables import as_rich, duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus.observe.compare import Comparison, Pair
    from isthmus.observe.drawing import Drawing
    from isthmus.observe.page import Section, Table
    from isthmus.observe.waits import Waits

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
    from rich.console import Console

    from isthmus.observe.compare import compare
    from isthmus.observe.page import to_html
    from isthmus.observe.recorded import find_run, read_run

    recorded = read_run(find_run(run))
    found = compare(recorded)
    console = Console(highlight=False, stderr=as_json)
    if as_json:
        typer.echo(json.dumps(_facts(recorded.run, found), indent=2))
    else:
        for table in _tables(found).values():
            console.print(as_rich(table))
            console.print()
        if recorded.planned is None:
            console.print("[dim]the run has no plan.json, so nothing is predicted[/]")
    page = to_html(f"Run {recorded.run.parent.name}, {recorded.run.name}", _sections(found))
    tell_written(console, [write_file(html or recorded.run / REPORT_FILE, page.encode())])


def _tables(found: "Comparison") -> "dict[str, Table]":
    tables = {
        "Times": _times_table(found),
        "Error by kind": _errors_table(found),
        "Where the time went": _waits_table(found),
        "Bubble as planned": _split_table(found),
        "Bytes a step": _bytes_table(found),
    }
    return {heading: table for heading, table in tables.items() if table.rows}


def _times_table(found: "Comparison") -> "Table":
    from isthmus.observe.page import Table

    pairs = (found.step, *found.durations)
    rows = [
        (one.kind if one.track == "all" else f"{one.kind} {one.track}", *_cells(one, duration))
        for one in pairs
        if one.measured is not None or one.predicted is not None
    ]
    return Table(header=("time of one", "predicted", "measured", "error"), rows=tuple(rows))


def _errors_table(found: "Comparison") -> "Table":
    from isthmus.observe.page import Table

    kinds = dict.fromkeys(one.kind for one in found.durations)
    errors = {"step": found.step.error, **{kind: found.error_of(kind) for kind in kinds}}
    rows = [(kind, f"{abs(error):.1%}") for kind, error in errors.items() if error is not None]
    return Table(header=("kind", "mean error"), rows=tuple(rows))


def _waits_table(found: "Comparison") -> "Table":
    from isthmus.observe.page import Table

    waits = (*found.measured_waits, *found.predicted_waits)
    names = [name for name in _WAITS if any(getattr(one, name) for one in waits)]
    rows = [
        *(_waits_row(one, "measured", names) for one in found.measured_waits),
        *(_waits_row(one, "predicted", names) for one in found.predicted_waits),
    ]
    header = ("cloud", "", "computes", "bubble, waiting", *(name.replace("_", " ") for name in names))
    return Table(header=header, rows=tuple(rows))


def _waits_row(waits: "Waits", how: str, names: "Sequence[str]") -> tuple[str, ...]:
    shares = [waits.busy, waits.bubble, *(getattr(waits, name) for name in names)]
    return (waits.cloud, how, *(f"{share:.1%}" for share in shares))


def _split_table(found: "Comparison") -> "Table":
    from isthmus.observe.page import Table

    rows = [(name, f"{share:.1%}") for name, share in found.bubble_split.items()]
    return Table(header=("predicted bubble", "share"), rows=tuple(rows))


def _bytes_table(found: "Comparison") -> "Table":
    from isthmus.observe.page import Table

    rows = [(one.track, *_cells(one, _size)) for one in found.bytes_per_step]
    return Table(header=("bytes a step", "predicted", "measured", "error"), rows=tuple(rows))


def _cells(pair: "Pair", show: Any) -> tuple[str, str, str]:
    values = ("–" if one is None else show(one) for one in (pair.predicted, pair.measured))
    predicted, measured = values
    return predicted, measured, "–" if pair.error is None else f"{pair.error:+.1%}"


def _size(num_bytes: float) -> str:
    from isthmus.units import format_bytes

    return format_bytes(round(num_bytes))


def _sections(found: "Comparison") -> "list[Section]":
    from isthmus.observe.drawing import draw_curve
    from isthmus.observe.page import Section

    sections = [Section(heading="One step", parts=tuple(_charts(found)))]
    if len(found.losses) > 1:
        curve = draw_curve(found.losses, width=760, height=220, word="step")
        sections.append(Section(heading="Loss", parts=(curve,)))
    return sections + [Section(heading=heading, parts=(table,)) for heading, table in _tables(found).items()]


def _charts(found: "Comparison") -> "Sequence[Drawing]":
    """Predicted above measured, on one scale."""
    from dataclasses import replace

    from isthmus.observe.drawing import draw_chart

    charts = {"predicted": found.predicted_chart, "measured": found.measured_chart}
    shown = {word: chart for word, chart in charts.items() if chart is not None}
    end_s = max((chart.end_s for chart in shown.values()), default=0.0)
    return [draw_chart(replace(chart, end_s=end_s), title=word) for word, chart in shown.items()]


def _facts(run: Path, found: "Comparison") -> dict[str, Any]:
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


def _pair_facts(pair: "Pair") -> dict[str, Any]:
    return {**asdict(pair), "error": pair.error}
