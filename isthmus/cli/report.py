"""`isthmus report`: what a run did, beside what was predicted for it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Final

from rich.console import Console
from typer import Option

import isthmus
from isthmus.cli import output
from isthmus.cli.display import feed_figures
from isthmus.cli.output import duration, tabulate
from isthmus.observe.draw import Table, draw_chart, draw_curve, to_html
from isthmus.observe.report import Compared, RunReport
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
    tables = {heading: table for heading, table in _tables(found).items() if table.rows}
    console = Console(highlight=False, stderr=as_json)
    if as_json:
        output.print_json({key: value for key, value in asdict(found).items() if key != "charts"})
    else:
        output.print_tables(console, tables.values())
        console.print()
        if not found.has_plan:
            console.print("[dim]the run has no plan.json, so nothing is predicted[/]")
    shown = {**_pictures(found), **{heading: [table.to_html()] for heading, table in tables.items()}}
    page = to_html(f"Run {found.run.parent.name}, {found.run.name}", shown)
    output.write_file(console, html or found.run / REPORT_FILE, page)


def _tables(found: RunReport) -> dict[str, Table]:
    times = [one for one in (found.step, *found.durations) if (one.measured, one.predicted) != (None, None)]
    feed = found.summary.feed
    return {
        "Times": _compared_table("time of one", times, duration),
        "Where the time went": _waits_table(found),
        "Generators": tabulate(
            () if feed is None else feed.streams,
            {
                "generator": lambda one: one.cloud,
                "batches": lambda one: f"{one.num_batches:,}",
                "tokens": lambda one: f"{one.num_tokens:,}",
                "batches waiting": lambda one: f"{one.num_queued:.1f}",
                "staleness": lambda one: f"{one.staleness:.1f}",
            },
        ),
        "Discriminator": tabulate(
            () if feed is None else feed_figures(feed).items(),
            {"discriminator": lambda one: one[0], "": lambda one: one[1]},
        ),
        "Bytes a step": _compared_table("bytes a step", found.bytes_per_step, _size),
        "Rounds": tabulate(
            () if found.rounds is None else (found.rounds,),
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


def _waits_table(found: RunReport) -> Table:
    waits = [(one, how) for how, clouds in found.waits.items() for one in clouds]
    names = ["busy", "bubble", *(name for name in _WAITS if any(getattr(one, name) for one, _ in waits))]
    return Table(
        header=("cloud", "", *(name.removeprefix("for_").replace("_", " ") for name in names)),
        rows=tuple((one.cloud, how, *(f"{getattr(one, name):.1%}" for name in names)) for one, how in waits),
    )


def _size(num_bytes: float) -> str:
    return format_bytes(round(num_bytes))


def _pictures(found: RunReport) -> dict[str, list[str]]:
    """Draw the step as predicted above that as measured, on one scale, and the loss."""
    end_s = max((chart.end_s for chart in found.charts.values()), default=0.0)
    drawn = [draw_chart(replace(chart, end_s=end_s), title=how) for how, chart in found.charts.items()]
    if len(found.losses) < 2:
        return {"One step": drawn}
    return {"One step": drawn, "Loss": [draw_curve(found.losses, width=760, height=220, word="step")]}
