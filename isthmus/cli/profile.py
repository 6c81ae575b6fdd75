"""`isthmus profile`: what the job's layers take on the device at hand."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.options import JobArgument, JsonOption, SetOption
from isthmus.cli.pictures import check_folder
from isthmus.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from isthmus.job import CloudSpec, Job
    from isthmus.plan.costs.profile import PassTimes, Profile, Sample


def profile(
    job: JobArgument,
    cloud: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The cloud that this machine stands for, where there are several."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it; NAME.profile.json unless given.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the layers, the embedding, the head and the optimizer of the job's model on this device.

    Start it on one device of each cloud and name its file in the job, so that plans rest on what was measured
    and not on the catalogue.
    """
    from rich.console import Console

    from isthmus.job import load_job
    from isthmus.job.write import replace_file
    from isthmus.plan.costs.profile import write_profile
    from isthmus.train.profiling import measure

    loaded = load_job(job, overrides=overrides or ())
    chosen = _cloud(loaded, cloud)
    path = out or Path(f"{chosen.name}.profile.json")
    check_folder(path)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with notes.status("starting") as status:
        found = measure(loaded, chosen, report=lambda what: status.update(f"measuring {what}"))
    text = write_profile(found)
    replace_file(path, text)
    if as_json:
        typer.echo(text, nl=False)
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(_table(found))
        update_ns = 1e9 * found.update_s_per_parameter
        console.print(
            f"{found.device}; forward + backward; the update takes {update_ns:.3g} ns per parameter"
        )
    notes.print(f"[green]✓[/] {path} holds these figures")
    if chosen.profile != str(path):
        notes.print(f'[dim]next: add profile = "{path}" to cloud {chosen.name} of {job}[/]')


def _cloud(job: "Job", name: str | None) -> "CloudSpec":
    """The cloud of that name, or the only one."""
    if name is not None:
        return job.cloud_named(name)
    if len(job.cloud) > 1:
        names = [cloud.name for cloud in job.cloud]
        raise UserError(
            f"the job has {len(names)} clouds, and this machine stands for one of them",
            hint=f"say which: --cloud {' or --cloud '.join(names)}",
        )
    return job.cloud[0]


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
    return f"{1000 * times.forward_s:.3g} + {1000 * times.backward_s:.3g} ms"
