"""`isthmus probe` measures links, `isthmus profile` measures layers; both write figures for the job."""

import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from isthmus.cli.output import (
    NO_EMULATED_WAN,
    CloudOption,
    FaultsOption,
    JobArgument,
    JsonOption,
    SetOption,
    check_folder,
    console_for_notes,
    duration,
    print_tables,
)
from isthmus.errors import UserError
from isthmus.job import Job, LinkSpec, load_job, update_job_file
from isthmus.job.faults import load_faults
from isthmus.job.load import replace_file
from isthmus.observe.draw import Table
from isthmus.plan.times import PassTimes, Profile, Sample, write_profile
from isthmus.plan.types import Member
from isthmus.units import format_bandwidth, shorten

if TYPE_CHECKING:
    from isthmus.wan.probe import Measurement

Show = Callable[[str, str], None]


def probe(
    job: JobArgument,
    cloud: CloudOption = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="How long to load each direction.")] = 4.0,
    write: Annotated[bool, typer.Option("--write", help="Put the figures into the job file.")] = False,
    faults: FaultsOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure round trip, jitter, handling and bandwidth of every link, over the real link layer.

    Without --cloud all clouds of the job run on this machine, joined through an emulated WAN that has the
    figures of the job. With --cloud this machine is that one cloud: start the same command at the others too.
    """
    if cloud is not None and faults is not None:
        raise UserError(NO_EMULATED_WAN, hint="leave it out")
    loaded = load_job(job, overrides=overrides or ())
    notes = console_for_notes()
    with notes.status("starting") as status:

        def show(name: str, text: str) -> None:
            status.update(f"{name}: {text}")

        found = (
            _probe_here(loaded, seconds, faults, show)
            if cloud is None
            else _probe_as(loaded, cloud, seconds, show)
        )
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    else:
        print_tables(Console(highlight=False), [_links_table(loaded, found)])
    if write:
        names = [link.between for link in loaded.link]
        update_job_file(job, {f"link.{names.index(one.between)}": _figures(one) for one in found})
        notes.print(f"[green]✓[/] {job} now holds these figures")
    elif not as_json:
        notes.print(f"[dim]next: isthmus probe {job} --write puts these figures into the job[/]")


def _probe_here(job: Job, duration_s: float, faults: Path | None, show: Show) -> "list[Measurement]":
    from isthmus.wan.local import LocalWan, run_ranks
    from isthmus.wan.probe import probe_cloud

    script = load_faults(faults, links=[link.between for link in job.link]) if faults else ()
    with LocalWan(job) as wan:
        wan.play(script)
        work = functools.partial(probe_cloud, duration_s=duration_s)
        found: dict[Member, list[Measurement]] = run_ranks(job, work, wan, on_report=show)
    by_link = {one.between: one for measurements in found.values() for one in measurements}
    return [by_link[link.between] for link in job.link]


def _probe_as(job: Job, cloud: str, duration_s: float, show: Show) -> "list[Measurement]":
    from isthmus.wan.certificates import read_identity
    from isthmus.wan.endpoint import Endpoint
    from isthmus.wan.probe import probe_cloud

    identity = read_identity(Path(job.cloud_named(cloud).certificates), cloud)
    with Endpoint(job, cloud=cloud, identity=identity) as endpoint:
        return probe_cloud(
            job, endpoint, cloud=cloud, duration_s=duration_s, report=functools.partial(show, cloud)
        )


def _links_table(job: Job, found: "list[Measurement]") -> Table:
    pairs = zip(job.link, found, strict=False)
    rows = [row for link, one in pairs for row in (_given_row(link), _measured_row(one))]
    return Table(header=("link", "", "there", "back", "rtt", "jitter", "handling", "clock"), rows=tuple(rows))


def _given_row(link: LinkSpec) -> tuple[str, ...]:
    return (
        link.name,
        "in the job",
        *("–" if bps is None else format_bandwidth(bps) for bps in link.bandwidth_bps or (None, None)),
        "–" if link.rtt_s is None else duration(link.rtt_s),
        duration(link.jitter_s),
        duration(link.handling_s),
        "",
    )


def _measured_row(one: "Measurement") -> tuple[str, ...]:
    return (
        "",
        "[bold]measured[/]",
        *(format_bandwidth(shorten(bps)) for bps in one.bandwidth_bps),
        *(duration(seconds) for seconds in (one.rtt_s, one.jitter_s, one.handling_s)),
        f"{1000 * one.clock_offset_s:+.2f} ms",
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
    job: JobArgument,
    cloud: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The cloud that this machine stands for; without it all clouds are here."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write one cloud's; NAME.profile.json unless given."),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the layers, the embedding, the head, the optimizer and the codecs of a job on this machine.

    With --cloud this machine is that one cloud, as in `isthmus run JOB --cloud NAME`. Without it all clouds
    share this machine, as in `isthmus run JOB`, and are measured at the same time. Name the files in the job,
    so that plans rest on what was measured and not on the catalogue.
    """
    loaded = load_job(job, overrides=overrides or ())
    paths = _paths(loaded, cloud, out)
    for path in paths.values():
        check_folder(path)
    notes = console_for_notes()
    with notes.status("starting") as status:
        found = _measure(loaded, list(paths), lambda what: status.update(f"measuring {what}"))
    texts = {name: write_profile(one) for name, one in found.items()}
    for name, text in texts.items():
        replace_file(paths[name], text)
    if as_json:
        only = next(iter(texts.values()))
        typer.echo(only if len(texts) == 1 else _all_json(texts), nl=False)
    else:
        console = Console(highlight=False, soft_wrap=True)
        for name, one in found.items():
            console.print(f"[bold]{name}[/]: {_about(one)}")
            print_tables(console, [_samples_table(one)])
    for name, path in paths.items():
        notes.print(f"[green]✓[/] {path} holds the figures of {name}")
        if loaded.cloud_named(name).profile != str(path):
            notes.print(f'[dim]next: add profile = "{path}" to cloud {name} of {job}[/]')


def _paths(job: Job, cloud: str | None, out: Path | None) -> dict[str, Path]:
    """The file of each cloud that is measured."""
    if cloud is None and len(job.cloud) > 1 and out is not None:
        names = [one.name for one in job.cloud]
        raise UserError(
            f"--out names one file, and the job has {len(names)} clouds",
            hint=f"leave it out, or say which: --cloud {' or --cloud '.join(names)}",
        )
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


def _all_json(texts: dict[str, str]) -> str:
    return json.dumps({name: json.loads(text) for name, text in texts.items()}, indent=2) + "\n"


def _about(profile: Profile) -> str:
    threads = "" if profile.num_threads is None else f", {profile.num_threads} threads"
    sharing = "" if profile.num_sharing == 1 else f", {profile.num_sharing} ranks at the same time"
    update_ns = 1e9 * profile.update_s_per_parameter
    return (
        f"{profile.device}{threads}{sharing}; forward + backward; the update takes {update_ns:.3g} ns per "
        f"parameter; medians are certain to {profile.scatter:.0%}"
    )


def _samples_table(profile: Profile) -> Table:
    header = ("sequences", "precision", "embedding", "a layer", "head", "beside")
    return Table(header=header, rows=tuple(map(_sample_row, profile.samples)))


def _sample_row(sample: Sample) -> tuple[str, ...]:
    middle = sample.layers[len(sample.layers) // 2]
    times = (sample.embedding, middle, sample.head, sample.beside)
    size = f"{sample.num_sequences} × {sample.sequence_length}"
    return (size, sample.precision.value, *map(_shown, times))


def _shown(times: PassTimes) -> str:
    shown = f"{1000 * times.forward_s:.3g} + {1000 * times.backward_s:.3g} ms"
    if times.forward_launch_s or times.backward_launch_s:
        launches = f"{1000 * times.forward_launch_s:.3g} + {1000 * times.backward_launch_s:.3g}"
        return f"{shown} (launching {launches})"
    return shown
