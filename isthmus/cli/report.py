"""`isthmus report`: what a run did, beside what was predicted for it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console
from typer import Option

import isthmus
from isthmus.cli import output
from isthmus.cli.display import feed_figures
from isthmus.cli.output import duration, tabulate
from isthmus.observe.draw import Table, draw_chart, draw_curve, to_html
from isthmus.observe.report import Compared, Comparison, RunReport
from isthmus.observe.timeline import Waits
from isthmus.units import format_bytes

REPORT_FILE: Final = "report.html"
_WAITS: Final = ("for_data", "saving", "for_activations", "for_gradients", "for_other_stages", "other")


def report(
    run: output.RunArgument,
    beside: Annotated[
        Path | None, Option(metavar="RUN", help="Compare validation losses with this run after equal tokens.")
    ] = None,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="The page to write; report.html in RUN unless given.")
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Report the times, bubbles, waits and bytes of a run beside those that its plan predicted.

    Example: `isthmus report runs/demo --html demo.html`
    """
    found = isthmus.report(run, beside=beside)
    compared = found.comparison
    every = {**_tables(compared), **_outcome_tables(found)}
    tables = {heading: table for heading, table in every.items() if table.rows}
    console = Console(highlight=False, stderr=as_json)
    if as_json:
        output.print_json(_facts(found))
    else:
        output.print_tables(console, tables.values())
        console.print()
        if not found.has_plan:
            console.print("[dim]the run has no plan.json, so nothing is predicted[/]")
    shown = {**_pictures(compared), **{heading: [table.to_html()] for heading, table in tables.items()}}
    page = to_html(f"Run {found.run.parent.name}, {found.run.name}", shown)
    output.write_file(console, html or found.run / REPORT_FILE, page)


def _tables(found: Comparison) -> dict[str, Table]:
    times = [one for one in (found.step, *found.durations) if (one.measured, one.predicted) != (None, None)]
    return {
        "Times": _compared_table("time of one", times, duration),
        "Error by kind": _errors_table(found),
        "Where the time went": _waits_table(found),
        "Generators": tabulate(
            () if found.feed is None else found.feed.streams,
            {
                "generator": lambda one: one.cloud,
                "batches": lambda one: f"{one.num_batches:,}",
                "tokens": lambda one: f"{one.num_tokens:,}",
                "batches waiting": lambda one: f"{one.num_queued:.1f}",
                "staleness": lambda one: f"{one.staleness:.1f}",
            },
        ),
        "Discriminator": tabulate(
            () if found.feed is None else feed_figures(found.feed).items(),
            {"discriminator": lambda one: one[0], "": lambda one: one[1]},
        ),
        "Bytes a step": _compared_table("bytes a step", found.bytes_per_step, _size),
    }


def _outcome_tables(found: RunReport) -> dict[str, Table]:
    """Tables of what clouds agreed on, and of the loss beside another run."""
    rounds = found.rounds
    return {
        "Rounds": tabulate(
            () if rounds is None else (rounds,),
            {
                "rounds": lambda one: f"{one.num_rounds}",
                "clouds live": lambda one: f"{one.live:.3g}",
                "up to date": lambda one: f"{one.participating:.3g}",
                "averaged": lambda one: f"{one.averaged:.3g}",
                "unlike parameters after": lambda one: f"{one.num_unlike}",
            },
        ),
        "Quality": tabulate(
            found.quality,
            {
                "tokens": lambda one: f"{one.num_tokens:,}",
                "validation loss": lambda one: f"{one.loss:.4f}",
                "beside": lambda one: f"{one.loss_beside:.4f}",
                "difference": lambda one: f"{one.loss / one.loss_beside - 1:+.2%}",
            },
        ),
    }


def _compared_table(what: str, pairs: Sequence[Compared], show: Callable[[float], str]) -> Table:
    def name(one: Compared) -> str:
        return {"all": one.kind}.get(one.track, one.track if show is _size else f"{one.kind} {one.track}")

    return tabulate(
        pairs,
        {
            what: name,
            "predicted": lambda one: "–" if one.predicted is None else show(one.predicted),
            "measured": lambda one: "–" if one.measured is None else show(one.measured),
            "error": lambda one: "–" if one.error is None else f"{one.error:+.1%}",
        },
    )


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
    reasons = (name.removeprefix("for_").replace("_", " ") for name in names)
    header = ("cloud", "", "busy", "bubble", *reasons)
    return Table(header=header, rows=tuple(rows))


def _waits_row(waits: Waits, how: str, names: Sequence[str]) -> tuple[str, ...]:
    shares = [waits.busy, waits.bubble, *(getattr(waits, name) for name in names)]
    return (waits.cloud, how, *(f"{share:.1%}" for share in shares))


def _size(num_bytes: float) -> str:
    return format_bytes(round(num_bytes))


def _pictures(found: Comparison) -> dict[str, list[str]]:
    """Draw the step as predicted above that as measured, on one scale, and the loss."""
    charts = {"predicted": found.predicted_chart, "measured": found.measured_chart}
    shown = {word: chart for word, chart in charts.items() if chart is not None}
    end_s = max((chart.end_s for chart in shown.values()), default=0.0)
    drawn = [draw_chart(replace(chart, end_s=end_s), title=word) for word, chart in shown.items()]
    if len(found.losses) < 2:
        return {"One step": drawn}
    return {"One step": drawn, "Loss": [draw_curve(found.losses, width=760, height=220, word="step")]}


def _facts(report: RunReport) -> dict[str, Any]:
    found = report.comparison
    return {
        "run": str(report.run),
        "step": _pair_facts(found.step),
        "durations": [_pair_facts(one) for one in found.durations],
        "errors": {kind: found.error_of(kind) for kind in {one.kind for one in found.durations}},
        "bytes_per_step": [_pair_facts(one) for one in found.bytes_per_step],
        "waits": {
            "measured": [asdict(one) for one in found.measured_waits],
            "predicted": [asdict(one) for one in found.predicted_waits],
        },
        "losses": found.losses,
        "feed": None if found.feed is None else asdict(found.feed),
        "rounds": None if report.rounds is None else asdict(report.rounds),
        "quality": [asdict(one) for one in report.quality],
    }


def _pair_facts(pair: Compared) -> dict[str, Any]:
    return {**asdict(pair), "error": pair.error}
