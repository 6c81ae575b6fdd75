"""`isthmus profile`: what the job's layers take on the device at hand."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.options import JobArgument, JsonOption, SetOption
from isthmus.cli.pictures import check_folder
from isthmus.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from isthmus.job import Job
    from isthmus.plan.costs.profile import PassTimes, Profile, Sample


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
    from rich.console import Console

    from isthmus.job import load_job
    from isthmus.job.write import replace_file
    from isthmus.plan.costs.profile import write_profile

    loaded = load_job(job, overrides=overrides or ())
    paths = _paths(loaded, cloud, out)
    for path in paths.values():
        check_folder(path)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
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
            console.print(_table(one))
    for name, path in paths.items():
        notes.print(f"[green]✓[/] {path} holds the figures of {name}")
        if loaded.cloud_named(name).profile != str(path):
            notes.print(f'[dim]next: add profile = "{path}" to cloud {name} of {job}[/]')


def _paths(job: "Job", cloud: str | None, out: Path | None) -> dict[str, Path]:
    """The file of each cloud that is measured."""
    if cloud is None and len(job.cloud) > 1 and out is not None:
        names = [one.name for one in job.cloud]
        raise UserError(
            f"--out names one file, and the job has {len(names)} clouds",
            hint=f"leave it out, or say which: --cloud {' or --cloud '.join(names)}",
        )
    chosen = job.cloud if cloud is None else (job.cloud_named(cloud),)
    return {one.name: out or Path(f"{one.name}.profile.json") for one in chosen}


def _measure(job: "Job", clouds: list[str], report: "Callable[[str], None]") -> "dict[str, Profile]":
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


def _about(profile: "Profile") -> str:
    threads = "" if profile.num_threads is None else f", {profile.num_threads} threads"
    sharing = "" if profile.num_sharing == 1 else f", {profile.num_sharing} ranks at the same time"
    update_ns = 1e9 * profile.update_s_per_parameter
    return (
        f"{profile.device}{threads}{sharing}; forward + backward; the update takes {update_ns:.3g} ns per "
        f"parameter; medians are certain to {profile.scatter:.0%}"
    )


def _table(profile: "Profile") -> "Table":
    from rich.table import Table

    table = Table(
        "sequences", "precision", "embedding", "a layer", "head", "beside", box=None, pad_edge=False
    )
    for sample in profile.samples:
        table.add_row(*_row(sample))
    return table


def _row(sample: "Sample") -> tuple[str, ...]:
    middle = sample.layers[len(sample.layers) // 2]
    times = (sample.embedding, middle, sample.head, sample.beside)
    size = f"{sample.num_sequences} × {sample.sequence_length}"
    return (size, sample.precision.value, *map(_shown, times))


def _shown(times: "PassTimes") -> str:
    shown = f"{1000 * times.forward_s:.3g} + {1000 * times.backward_s:.3g} ms"
    if times.forward_launch_s or times.backward_launch_s:
        launches = f"{1000 * times.forward_launch_s:.3g} + {1000 * times.backward_launch_s:.3g}"
        return f"{shown} (launching {launches})"
    return shown
