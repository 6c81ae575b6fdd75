"""`isthmus probe` measures links, `isthmus profile` measures layers; both write figures for the job."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Option

from isthmus.cli import output
from isthmus.cli.output import duration, tabulate
from isthmus.errors import UserError
from isthmus.job import Job, LinkSpec, load_job
from isthmus.job.faults import Fault, load_faults
from isthmus.job.load import replace_file, update_job_file
from isthmus.observe.draw import Table
from isthmus.plan.times import PassTimes, Profile, write_profile
from isthmus.plan.types import Member
from isthmus.units import format_bandwidth, shorten

if TYPE_CHECKING:
    from isthmus.wan.probe import Measurement

Show = Callable[[str, str], None]


def probe(
    job: output.JobArgument,
    cloud: output.CloudOption = None,
    seconds: Annotated[float, Option(min=0.5, max=600, help="How long each direction is loaded.")] = 4.0,
    write: Annotated[bool, Option("--write", help="Write the figures into the job file.")] = False,
    faults: output.FaultsOption = None,
    overrides: output.SetOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Measure the bandwidth, round trip, jitter and handling time of every link.

    Without --cloud all clouds run on this machine, joined by an emulated WAN with the figures of the job.
    With --cloud this machine is that one cloud: start the same command at the other clouds too.

    Example: `isthmus probe job.toml --cloud west --write`
    """
    if cloud is not None and faults is not None:
        raise UserError(output.NO_EMULATED_WAN, hint="leave it out")
    loaded = load_job(job, overrides=overrides or ())
    notes = output.console_for_notes()
    with notes.status("starting") as status:

        def show(name: str, text: str) -> None:
            status.update(f"{name}: {text}")

        if cloud is None:
            found = _probe_here(loaded, seconds, faults, show)
        else:
            found = _probe_as(loaded, cloud, seconds, partial(show, cloud))
    if as_json:
        output.print_json([asdict(one) for one in found])
    else:
        output.print_tables(Console(highlight=False), [_links_table(loaded, found)])
    if write:
        names = [link.between for link in loaded.link]
        update_job_file(job, {f"link.{names.index(one.between)}": _figures(one) for one in found})
        notes.print(f"[green]✓[/] {job} now holds these figures")
    elif not as_json:
        notes.print(f"[dim]next: isthmus probe {job} --write puts these figures into the job[/]")


def _probe_here(job: Job, duration_s: float, faults: Path | None, show: Show) -> "list[Measurement]":
    from isthmus.wan.local import LocalWan, run_ranks
    from isthmus.wan.probe import probe_cloud

    with LocalWan(job) as wan:
        if faults is not None:
            links = [link.between for link in job.link]
            script = load_faults(faults, links=links, clouds={}, verb="probe")
            wan.play(one for one in script if isinstance(one, Fault))
        work = partial(probe_cloud, duration_s=duration_s)
        found: dict[Member, list[Measurement]] = run_ranks(job, work, wan, on_report=show)
    by_link = {one.between: one for measurements in found.values() for one in measurements}
    return [by_link[link.between] for link in job.link]


def _probe_as(job: Job, cloud: str, duration_s: float, report: Callable[[str], None]) -> "list[Measurement]":
    from isthmus.wan.certificates import read_identity
    from isthmus.wan.endpoint import Endpoint
    from isthmus.wan.probe import probe_cloud

    identity = read_identity(Path(job.cloud_named(cloud).certificates), cloud)
    with Endpoint(job, cloud=cloud, identity=identity) as endpoint:
        return probe_cloud(job, endpoint, cloud=cloud, duration_s=duration_s, report=report)


def _links_table(job: Job, found: "list[Measurement]") -> Table:
    rows = [row for link, one in zip(job.link, found, strict=False) for row in ((link, None), (link, one))]
    return Table(
        header=("link", "", "there", "back", "rtt", "jitter", "handling", "clock"),
        rows=tuple(_link_row(link, one) for link, one in rows),
    )


def _link_row(link: LinkSpec, one: "Measurement | None") -> tuple[str, ...]:
    """Return what was measured on a link, or what the job says of it."""
    figures = one or link
    there, back = figures.bandwidth_bps or (None, None)
    times_s = (figures.rtt_s, figures.jitter_s, figures.handling_s)
    return (
        "" if one else link.name,
        "[bold]measured[/]" if one else "in the job",
        *("–" if bps is None else format_bandwidth(shorten(bps)) for bps in (there, back)),
        *("–" if seconds is None else duration(seconds) for seconds in times_s),
        f"{1000 * one.clock_offset_s:+.2f} ms" if one else "",
    )


def _figures(one: "Measurement") -> dict[str, object]:
    """Return the keys of a [[link]] table."""
    there, back = (format_bandwidth(shorten(bps)) for bps in one.bandwidth_bps)
    times_s = {"rtt": one.rtt_s, "jitter": one.jitter_s, "handling": one.handling_s}
    return {
        "bandwidth": there if there == back else [there, back],
        **{key: duration(seconds) for key, seconds in times_s.items()},
    }


def profile(
    job: output.JobArgument,
    cloud: output.CloudOption = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="The file to write; NAME.profile.json unless given.")
    ] = None,
    overrides: output.SetOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Measure layers, optimizer and codecs of a job on this machine.

    With --cloud this machine is that one cloud. Without it all clouds share this machine, as in `isthmus run
    JOB`, and are measured at the same time. Name the files in the job (`cloud.profile`): then plans use these
    figures, not those of the catalogue.

    Example: `isthmus profile job.toml --cloud west`
    """
    loaded = load_job(job, overrides=overrides or ())
    paths = _paths(loaded, cloud, out)
    output.check_folders(*paths.values())
    notes = output.console_for_notes()
    with notes.status("starting") as status:
        found = _measure(loaded, list(paths), lambda what: status.update(f"measuring {what}"))
    texts = {name: write_profile(one) for name, one in found.items()}
    for name, text in texts.items():
        replace_file(paths[name], text)
    if as_json:
        facts = {name: json.loads(text) for name, text in texts.items()}
        output.print_json(facts if len(facts) > 1 else facts.popitem()[1])
    else:
        console = Console(highlight=False, soft_wrap=True)
        for name, one in found.items():
            console.print(f"[bold]{name}[/]: {_about(one)}")
            output.print_tables(console, [_samples_table(one)])
    for name, path in paths.items():
        notes.print(f"[green]✓[/] {path} holds the figures of {name}")
        if loaded.cloud_named(name).profile != str(path):
            notes.print(f'[dim]next: add profile = "{path}" to cloud {name} of {job}[/]')


def _paths(job: Job, cloud: str | None, out: Path | None) -> dict[str, Path]:
    """Return the file of each cloud that is measured."""
    if cloud is None and len(job.cloud) > 1 and out is not None:
        what = f"--out names one file, and the job has {len(job.cloud)} clouds"
        raise UserError(what, hint="leave it out, or name the cloud with --cloud")
    chosen = job.cloud if cloud is None else (job.cloud_named(cloud),)
    return {one.name: out or Path(f"{one.name}.profile.json") for one in chosen}


def _measure(job: Job, clouds: list[str], report: Callable[[str], None]) -> dict[str, Profile]:
    from isthmus.train.profiling import THOROUGH, measure, require_certain
    from isthmus.train.rehearsal import measure_together

    if len(clouds) == 1:
        name = clouds[0]
        found = {name: measure(job, job.cloud_named(name), effort=THOROUGH, report=report)}
    else:
        found = measure_together(job, effort=THOROUGH, report=report)
    for one in found.values():
        require_certain(one)
    return found


def _about(profile: Profile) -> str:
    threads = "" if profile.num_threads is None else f", {profile.num_threads} threads"
    sharing = "" if profile.num_sharing == 1 else f", {profile.num_sharing} ranks at the same time"
    update_ns = 1e9 * profile.update_s_per_parameter
    return (
        f"{profile.device}{threads}{sharing}; forward + backward; the update takes {update_ns:.3g} ns per "
        f"parameter; medians are certain to {profile.scatter:.0%}"
    )


def _samples_table(profile: Profile) -> Table:
    def shown(times: PassTimes) -> str:
        return f"{1000 * times.forward_s:.3g} + {1000 * times.backward_s:.3g} ms"

    return tabulate(
        profile.samples,
        {
            "sequences": lambda sample: f"{sample.num_sequences} × {sample.sequence_length}",
            "precision": lambda sample: sample.precision.value,
            "embedding": lambda sample: shown(sample.embedding),
            "a layer": lambda sample: shown(sample.layers[len(sample.layers) // 2]),
            "head": lambda sample: shown(sample.head),
            "beside": lambda sample: shown(sample.beside),
        },
    )
