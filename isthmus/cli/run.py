"""`isthmus run`: train, with all clouds here over an emulated WAN, or as one cloud for real."""

import functools
import json
import os
import signal
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from isthmus.cli.options import (
    NO_EMULATED_WAN,
    CloudOption,
    JobArgument,
    JsonOption,
    ProfileOption,
    SetOption,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from isthmus.cli.display import Display
    from isthmus.cli.ending import Ending
    from isthmus.job import Job
    from isthmus.train.session import Place, Trained
    from isthmus.wan.endpoint import Endpoint
    from isthmus.wan.handshake import Seat
    from isthmus.wan.local import LocalWan
    from isthmus.wan.processes import Report


_GO_ON: Final = "mend that and start the same command again: it goes on from what all clouds have saved"


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
    restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Start all ranks here again, up to N times, after a crash."),
    ] = 0,
    track: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="tensorboard, wandb, mlflow or trackio.")
    ] = None,
    profile: ProfileOption = True,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the model of a job across its clouds.

    Without --cloud all clouds of the job run on this machine, joined through an emulated WAN that has the
    figures of the job. With --cloud this machine is that one cloud: start the same command at the others too.
    A cloud of several ranks is started by torchrun, Slurm or Kubernetes, one process for each.
    """
    from rich.console import Console

    from isthmus.cli.display import Display
    from isthmus.cli.ending import EXIT_TERMINATED, Ending, stopped_at, stopped_by
    from isthmus.cli.launch import find_seat
    from isthmus.errors import Aborted, CloudFailed, PeerLost, Terminated
    from isthmus.job import load_job

    if cloud is not None:
        _check_real(faults, restarts)
    loaded = load_job(job, overrides=overrides or ()).used()
    console = Console(stderr=as_json, highlight=False)
    seat = None if cloud is None else find_seat(os.environ, loaded.cloud_named(cloud))
    if seat is not None and not seat.is_leader:
        # Rank 0 speaks for its cloud; of the others only errors are heard.
        console = Console(quiet=True)
    try:
        with Ending(console) as ending, Display(console, num_steps=loaded.train.steps, site=cloud) as display:
            if cloud is None or seat is None:
                trained = _run_here(
                    loaded,
                    runs,
                    resume == "auto",
                    tuple(track or ()),
                    faults,
                    display,
                    ending,
                    restarts=restarts,
                    is_profiled=profile,
                )
            else:
                trained = _run_as(
                    loaded,
                    cloud,
                    seat,
                    runs,
                    resume == "auto",
                    tuple(track or ()),
                    display,
                    ending,
                    is_profiled=profile,
                )
    except KeyboardInterrupt:
        console.print(stopped_by(signal.SIGINT), soft_wrap=True)
        raise
    except Terminated as terminated:
        console.print(stopped_by(signal.SIGTERM), soft_wrap=True)
        raise typer.Exit(EXIT_TERMINATED) from terminated
    except (Aborted, PeerLost, CloudFailed) as ended:
        if ending.stop.is_asked and isinstance(ended, CloudFailed):
            # The request came before there was anything to save.
            console.print(stopped_by(signal.SIGINT), soft_wrap=True)
            raise typer.Exit(EXIT_TERMINATED) from ended
        ended.hint = ended.hint or _GO_ON
        raise
    if trained.stopped_at is not None:
        console.print(stopped_at(trained.stopped_at), soft_wrap=True)
        raise typer.Exit(EXIT_TERMINATED)
    if seat is None or seat.is_leader:
        _conclude(console, trained.run, as_json=as_json)


def _conclude(console: "Console", folder: Path, *, as_json: bool) -> None:
    """Tell what a run came to."""
    from isthmus.cli.display import show_summary
    from isthmus.observe.summary import summarize

    summary = summarize(folder)
    if as_json:
        typer.echo(json.dumps({"run": str(folder), **asdict(summary)}, indent=2))
    else:
        show_summary(console, summary)
        console.print(f"the run is in [bold]{folder}[/]", soft_wrap=True)


def _check_real(faults: Path | None, restarts: int) -> None:
    from isthmus.errors import UserError

    if faults is not None:
        raise UserError(NO_EMULATED_WAN, hint="leave it out")
    if restarts:
        raise UserError(
            "--restarts starts all clouds on this machine again, and with --cloud there is one",
            hint="let the launcher do it: torchrun --max-restarts, Slurm --requeue, Kubernetes backoffLimit",
        )


def _run_here(
    job: "Job",
    root: Path,
    resume: bool,
    trackers: tuple[str, ...],
    faults: Path | None,
    display: "Display",
    ending: "Ending",
    *,
    restarts: int,
    is_profiled: bool,
) -> "Trained":
    from isthmus.cli.measuring import cost_source, new_profiler
    from isthmus.observe.trackers import check_trackers, open_trackers
    from isthmus.plan.faults import load_faults
    from isthmus.train.preflight import check_all_devices, choose_run
    from isthmus.train.profiles import is_open
    from isthmus.train.profiling import threads_here
    from isthmus.train.runs import writing_to
    from isthmus.train.session import Place
    from isthmus.wan.local import LocalWan

    check_trackers(trackers)
    check_all_devices(job)
    script = load_faults(faults, links=[link.between for link in job.link]) if faults else ()
    note = functools.partial(_tell, display, job.cloud[0].name)
    opens = functools.partial(open_trackers, names=trackers, project=job.name)
    profiler = new_profiler(is_wanted=is_profiled and is_open(job), note=note)
    source = cost_source()
    chosen = choose_run(job, root=root, resume=resume, note=note, learn=profiler.all_here, source=source)
    with writing_to(root), chosen as folder:
        place = Place(root=root, run_id=folder.name, open_trackers=opens, num_threads=threads_here(job))
        with LocalWan(job) as wan:
            wan.play(script)
            return _run_until_done(job, wan, place, display, ending, restarts=restarts)


def _tell(display: "Display", cloud: str, text: str) -> None:
    display.hear(cloud, json.dumps({"kind": "note", "text": text}))


def _run_until_done(
    job: "Job", wan: "LocalWan", place: "Place", display: "Display", ending: "Ending", *, restarts: int
) -> "Trained":
    """Start all ranks, again after a crash, each time from the newest state that all clouds have saved."""
    from isthmus.errors import CloudFailed
    from isthmus.wan.processes import run_ranks

    attempt = 0
    while True:
        work = functools.partial(_be_rank_here, place=place)
        try:
            found = run_ranks(job, work, wan, on_report=display.hear, stop=ending.stop)
        except CloudFailed as failed:
            if not failed.is_crash or attempt == restarts or ending.stop.is_asked:
                raise
            attempt += 1
            _tell(display, failed.cloud, f"{failed.message}; starting again, {attempt} of {restarts}")
        else:
            first: Trained = next(iter(found.values()))
            return first


def _be_rank_here(
    job: "Job", endpoint: "Endpoint", *, cloud: str, report: "Report", seat: "Seat", place: "Place"
) -> "Trained":
    from isthmus.errors import Terminated
    from isthmus.events import StopRequest
    from isthmus.train.runs import writing_to
    from isthmus.train.session import train_cloud
    from isthmus.wan.processes import STOP_SIGNAL

    stop = StopRequest()

    def ask(*_: object) -> None:
        if not stop.ask():
            raise Terminated

    # Signals may reach the whole process group; the command that started us ends us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(STOP_SIGNAL, ask)
    with writing_to(place.root):
        return train_cloud(job, endpoint, cloud=cloud, report=report, place=place, seat=seat, stop=stop)


def _run_as(
    job: "Job",
    cloud: str,
    seat: "Seat",
    root: Path,
    resume: bool,
    trackers: tuple[str, ...],
    display: "Display",
    ending: "Ending",
    *,
    is_profiled: bool,
) -> "Trained":
    from isthmus.cli.measuring import cost_source, new_profiler
    from isthmus.job.rundir import lock_site
    from isthmus.observe.trackers import check_trackers, open_trackers
    from isthmus.train.preflight import check_device, check_unplanned, choose_run
    from isthmus.train.profiles import is_open, unpack_profile
    from isthmus.train.runs import find_unfinished, writing_to
    from isthmus.train.session import Place, train_cloud
    from isthmus.train.setup import may_plan, set_up
    from isthmus.wan.endpoint import Endpoint
    from isthmus.wan.trust.certificates import read_identity

    identity = read_identity(Path(job.cloud_named(cloud).certificates), cloud)
    check_device(job.cloud_named(cloud), seat)
    chooses = seat.is_leader and set_up(job, plans=False).clouds[0] == cloud
    check_trackers(trackers if chooses else ())
    note = functools.partial(_tell, display, cloud)
    opens = functools.partial(open_trackers, names=trackers, project=job.name)
    report = functools.partial(display.hear, cloud)
    profiler, source = new_profiler(is_wanted=is_profiled, note=note), cost_source()

    def learn(found: "Mapping[str, str]", known: "Job") -> "Job":
        profiles = {name: unpack_profile(text, cloud=name) for name, text in found.items()}
        return profiler.with_profiles(known, profiles)

    with ExitStack() as stack:
        stack.enter_context(writing_to(root))
        stack.enter_context(lock_site(root, job, cloud=cloud, rank=seat.rank, note=note))

        def choose(found: "Mapping[str, str]") -> str:
            chosen = choose_run(
                job,
                root=root,
                resume=resume,
                note=note,
                is_shared=True,
                learn=functools.partial(learn, found),
                source=source,
            )
            return stack.enter_context(chosen).name

        is_new = not resume or find_unfinished(root, job) is None
        is_measured = chooses and is_profiled and is_new and is_open(job) and may_plan(job, source)
        if is_measured:
            check_unplanned(job, root=root, note=note)
        place = Place(
            root=root,
            run_id=choose({}) if chooses and not is_measured else None,
            open_trackers=opens,
            choose=choose if is_measured else None,
            profile=functools.partial(profiler.text_of, job, cloud),
        )
        endpoint = stack.enter_context(Endpoint(job, cloud=cloud, rank=seat.rank, identity=identity))
        ending.tell_peers_of(endpoint)
        # Peers are to read in our words what is wrong with the disk.
        stack.enter_context(writing_to(root))
        return train_cloud(
            job, endpoint, cloud=cloud, report=report, place=place, seat=seat, stop=ending.stop
        )
