"""`isthmus run`: train, with all clouds here over an emulated WAN, or as one cloud for real."""

import functools
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from isthmus.cli.options import CloudOption, JobArgument, JsonOption, SetOption

if TYPE_CHECKING:
    from isthmus.cli.display import Display
    from isthmus.job import Job
    from isthmus.train.session import Place
    from isthmus.wan.endpoint import Endpoint
    from isthmus.wan.processes import Report


def run(
    job: JobArgument,
    cloud: CloudOption = None,
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Faults of the emulated WAN, by time.")
    ] = None,
    resume: Annotated[
        Literal["auto", "never"],
        typer.Option(help="Go on with an unfinished run of this job, or start anew."),
    ] = "auto",
    runs: Annotated[Path, typer.Option(metavar="FOLDER", help="Where run directories are.")] = Path("runs"),
    track: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="tensorboard, wandb, mlflow or trackio.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the model of a job across its clouds.

    Without --cloud all clouds of the job run on this machine, joined through an emulated WAN that has the
    figures of the job. With --cloud this machine is that one cloud: start the same command at the others too.
    """
    from rich.console import Console

    from isthmus.cli.display import Display, show_summary
    from isthmus.job import load_job
    from isthmus.observe.summary import summarize

    loaded = load_job(job, overrides=overrides or ()).used()
    console = Console(stderr=as_json, highlight=False)
    with Display(console, num_steps=loaded.train.steps) as display:
        if cloud is None:
            folder = _run_here(loaded, runs, resume == "auto", tuple(track or ()), faults, display)
        else:
            folder = _run_as(loaded, cloud, runs, resume == "auto", tuple(track or ()), display)
    summary = summarize(folder)
    if as_json:
        typer.echo(json.dumps({"run": str(folder), **asdict(summary)}, indent=2))
    else:
        show_summary(console, summary)
        console.print(f"the run is in [bold]{folder}[/]", soft_wrap=True)


def _run_here(
    job: "Job", root: Path, resume: bool, trackers: tuple[str, ...], faults: Path | None, display: "Display"
) -> Path:
    from isthmus.observe.trackers import open_trackers
    from isthmus.plan.faults import load_faults
    from isthmus.train.session import Place, choose_run
    from isthmus.wan.local import LocalWan
    from isthmus.wan.processes import run_clouds

    script = load_faults(faults, links=[link.between for link in job.link]) if faults else ()
    folder = choose_run(job, root=root, resume=resume)
    num_threads = max(1, (os.cpu_count() or 1) // len(job.cloud))
    opens = functools.partial(open_trackers, names=trackers, project=job.name)
    place = Place(root=root, run_id=folder.name, open_trackers=opens, num_threads=num_threads)
    with LocalWan(job) as wan:
        wan.play(script)
        run_clouds(job, functools.partial(_be_cloud_here, place=place), wan, on_report=display.hear)
    return folder


def _be_cloud_here(job: "Job", endpoint: "Endpoint", *, cloud: str, report: "Report", place: "Place") -> Path:
    from isthmus.train.session import train_cloud

    # Ctrl-C reaches the whole process group; the command that started us ends us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return train_cloud(job, endpoint, cloud=cloud, report=report, place=place)


def _run_as(
    job: "Job", cloud: str, root: Path, resume: bool, trackers: tuple[str, ...], display: "Display"
) -> Path:
    from isthmus.observe.trackers import open_trackers
    from isthmus.train.session import Place, choose_run, train_cloud
    from isthmus.train.setup import set_up
    from isthmus.wan.certificates import read_identity
    from isthmus.wan.endpoint import Endpoint

    identity = read_identity(Path(job.cloud_named(cloud).certificates), cloud)
    is_first = set_up(job).clouds[0] == cloud
    run_id = choose_run(job, root=root, resume=resume).name if is_first else None
    opens = functools.partial(open_trackers, names=trackers, project=job.name)
    place = Place(root=root, run_id=run_id, open_trackers=opens)
    with Endpoint(job, cloud=cloud, identity=identity) as endpoint:
        report = functools.partial(display.hear, cloud)
        return train_cloud(job, endpoint, cloud=cloud, report=report, place=place)
