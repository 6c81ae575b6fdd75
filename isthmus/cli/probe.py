"""`isthmus probe`: measure the links and, if asked to, write the figures into the job."""

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.options import NO_EMULATED_WAN, CloudOption, JobArgument, JsonOption, SetOption
from isthmus.units import format_bandwidth, format_duration, shorten

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.status import Status
    from rich.table import Table

    from isthmus.job import Job, LinkFigures
    from isthmus.wan.probe import Measurement

    Show = Callable[[str, str], None]


def probe(
    job: JobArgument,
    cloud: CloudOption = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="How long to load each direction.")] = 4.0,
    write: Annotated[bool, typer.Option("--write", help="Put the figures into the job file.")] = False,
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Faults of the emulated WAN, by time.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure round trip, jitter, handling and bandwidth of every link, over the real link layer.

    Without --cloud all clouds of the job run on this machine, joined through an emulated WAN that has the
    figures of the job. With --cloud this machine is that one cloud: start the same command at the others too.
    """
    from rich.console import Console

    from isthmus.errors import UserError
    from isthmus.job import load_job, update_job_file

    if cloud is not None and faults is not None:
        raise UserError(NO_EMULATED_WAN, hint="leave it out")
    loaded = load_job(job, overrides=overrides or ())
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with notes.status("starting") as status:
        show = functools.partial(_show_progress, status)
        if cloud is None:
            found = _probe_here(loaded, seconds, faults, show)
        else:
            found = _probe_as(loaded, cloud, seconds, show)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    else:
        Console(highlight=False).print(_table(loaded, found))
    if write:
        update_job_file(job, {one.between: _figures(one) for one in found})
        notes.print(f"[green]✓[/] {job} now holds these figures")
    elif not as_json:
        notes.print(f"[dim]next: isthmus probe {job} --write puts these figures into the job[/]")


def _show_progress(status: "Status", cloud: str, text: str) -> None:
    status.update(f"{cloud}: {text}")


def _probe_here(job: "Job", duration_s: float, faults: Path | None, show: "Show") -> list["Measurement"]:
    from isthmus.plan.faults import load_faults
    from isthmus.wan.local import LocalWan
    from isthmus.wan.probe import probe_cloud
    from isthmus.wan.processes import run_clouds

    script = load_faults(faults, links=[link.between for link in job.link]) if faults else ()
    with LocalWan(job) as wan:
        wan.play(script)
        work = functools.partial(probe_cloud, duration_s=duration_s)
        found: dict[str, list[Measurement]] = run_clouds(job, work, wan, on_report=show)
    by_link = {one.between: one for measurements in found.values() for one in measurements}
    return [by_link[link.between] for link in job.link]


def _probe_as(job: "Job", cloud: str, duration_s: float, show: "Show") -> list["Measurement"]:
    from isthmus.wan.endpoint import Endpoint
    from isthmus.wan.probe import probe_cloud
    from isthmus.wan.trust.certificates import read_identity

    identity = read_identity(Path(job.cloud_named(cloud).certificates), cloud)
    with Endpoint(job, cloud=cloud, identity=identity) as endpoint:
        return probe_cloud(
            job, endpoint, cloud=cloud, duration_s=duration_s, report=functools.partial(show, cloud)
        )


def _table(job: "Job", found: list["Measurement"]) -> "Table":
    from rich.table import Table

    header = ("link", "", "there", "back", "rtt", "jitter", "handling", "clock")
    table = Table(*header, box=None, pad_edge=False)
    for link, one in zip(job.link, found, strict=False):
        there, back = link.bandwidth_bps or (None, None)
        table.add_row(
            link.name,
            "in the job",
            *("–" if bps is None else format_bandwidth(bps) for bps in (there, back)),
            "–" if link.rtt_s is None else format_duration(link.rtt_s),
            format_duration(link.jitter_s),
            format_duration(link.handling_s),
            "",
        )
        table.add_row(
            "",
            "[bold]measured[/]",
            *(format_bandwidth(shorten(bps)) for bps in one.bandwidth_bps),
            format_duration(shorten(one.rtt_s)),
            format_duration(shorten(one.jitter_s)),
            format_duration(shorten(one.handling_s)),
            f"{1000 * one.clock_offset_s:+.2f} ms",
        )
    return table


def _figures(measurement: "Measurement") -> "LinkFigures":
    from isthmus.job import LinkFigures

    there, back = measurement.bandwidth_bps
    return LinkFigures(
        bandwidth_bps=(shorten(there), shorten(back)),
        rtt_s=shorten(measurement.rtt_s),
        jitter_s=shorten(measurement.jitter_s),
        handling_s=shorten(measurement.handling_s),
    )
