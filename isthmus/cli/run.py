"""`isthmus run`: train, with all clouds here over an emulated WAN, or as one cloud for real.

SIGTERM and Ctrl-C end it in order, and soon even while torch blocks its main thread: the first signal asks
the run to save a common step and to stop, once it trains; the second ends it at once.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final, Literal, NoReturn, Self

import typer
from rich.console import Console
from typer import Option

import isthmus
from isthmus.cli import output
from isthmus.cli.display import Display, show_summary
from isthmus.errors import Aborted, CloudFailed, PeerLost, Terminated, UserError
from isthmus.events import StopRequest

EXIT_TERMINATED: Final = 128 + signal.SIGTERM
_CONTINUE: Final = "fix that and start the same command again: it continues from what all clouds have saved"
_GRACE_S: Final = 5.0
_LAST_WORD_S: Final = 5.0
_SAME_SIGNAL_S: Final = 1.0
_REASONS: Final = {
    signal.SIGINT: "it was stopped by its user",
    signal.SIGTERM: Terminated().message,
}


def run(
    job: output.JobArgument,
    cloud: output.CloudOption = None,
    faults: output.FaultsOption = None,
    resume: Annotated[
        Literal["auto", "never"], Option(help="auto: continue the newest unfinished run.")
    ] = "auto",
    runs: Annotated[Path, Option(metavar="FOLDER", help="The folder of run directories.")] = Path("runs"),
    restarts: Annotated[
        int, Option(min=0, metavar="N", help="Start again what has crashed, up to N times.")
    ] = 0,
    track: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Send figures to tensorboard, wandb, mlflow or trackio."),
    ] = None,
    profile: output.ProfileOption = True,
    overrides: output.SetOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Train the model of a job across its clouds.

    Without --cloud all clouds run on this machine, joined by an emulated WAN with the figures of the job.
    With --cloud this machine is that one cloud: start the same command at the other clouds, in any order. If
    a cloud has several ranks, start one process for each with torchrun, Slurm or Kubernetes.

    Example: `isthmus run job.toml --set train.steps=100`
    """
    if cloud is not None:
        _check_real(faults, restarts)
    loaded = isthmus.load_job(job, overrides=overrides or ())
    from isthmus.train.launch import find_rank

    console = Console(stderr=as_json, highlight=False)
    spec = None if cloud is None else find_rank(os.environ, loaded.cloud_named(cloud))
    is_heard = spec is None or spec.is_leader
    if not is_heard:
        # Rank 0 speaks for its cloud; the others print errors only.
        console = Console(quiet=True)
    ending = Ending(console)
    try:
        with ending, Display(console, num_steps=loaded.train.steps, site=cloud) as display:
            trained = isthmus.run(
                loaded,
                cloud=cloud,
                runs=runs,
                resume=resume == "auto",
                faults=faults,
                restarts=restarts,
                trackers=track or (),
                measure=profile,
                on_report=display.hear,
                stop=ending.stop,
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
        ended.hint = ended.hint or _CONTINUE
        raise
    if trained.stopped_at is not None:
        console.print(_stopped_at(trained.stopped_at), soft_wrap=True)
        raise typer.Exit(EXIT_TERMINATED)
    if is_heard:
        _conclude(console, trained.run, as_json=as_json)


def _conclude(console: Console, folder: Path, *, as_json: bool) -> None:
    from isthmus.observe.report import read_run, summarize

    summary = summarize(read_run(folder))
    if as_json:
        output.print_json({"run": str(folder), **asdict(summary)})
    else:
        show_summary(console, summary)
        console.print(f"the run is in [bold]{folder}[/]", soft_wrap=True)


def _check_real(faults: Path | None, restarts: int) -> None:
    if faults is not None:
        raise UserError(output.NO_EMULATED_WAN, hint="leave it out")
    if restarts:
        raise UserError(
            "--restarts starts all clouds on this machine again, and with --cloud there is one",
            hint="let the launcher do it: torchrun --max-restarts, Slurm --requeue, Kubernetes backoffLimit",
        )


def stopped_by(number: signal.Signals) -> str:
    what = "Ctrl-C" if number == signal.SIGINT else number.name
    return f"stopped by {what}; the same command continues from what was saved last"


def _stopped_at(step: int) -> str:
    return f"stopped after step {step}, which every cloud has saved; the same command continues from there"


class Ending:
    """Asks for an orderly stop at a signal, or raises in the main thread, or ends the process if that hangs.

    Python runs a handler between two instructions of its own, and one call into torch, where ranks wait for
    each other, may last half an hour. So another thread reads the numbers of signals as they come.
    """

    def __init__(self, console: Console) -> None:
        self.stop = StopRequest()
        self._asked_s = 0.0
        self._console = console
        self._heard = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def __enter__(self) -> Self:
        # What the shell has a command in the background ignore, stays ignored.
        heeded = [number for number in _REASONS if signal.getsignal(number) is not signal.SIG_IGN]
        self._handlers_before = {number: signal.signal(number, self._hear) for number in heeded}
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="ending", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self._writer.close()

    def _hear(self, number: int, _: object) -> None:
        self._heard.set()
        if self._ask():
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        # A launcher that asks twice must not disturb the end that it asked for.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    def _ask(self) -> bool:
        """Ask for an orderly stop, once, where there is something to save."""
        now_s = time.monotonic()
        if self.stop.is_asked:
            # Some launchers send a signal to the process and to its group.
            return now_s - self._asked_s < _SAME_SIGNAL_S
        if not self.stop.ask():
            return False
        self._asked_s = now_s
        self._console.print("stopping when this step has ended and is saved; a second signal stops at once")
        return True

    def _watch(self) -> None:
        with self._reader:
            while number := self._reader.recv(1):
                if number[0] not in _REASONS:
                    continue
                if not self._heard.wait(_GRACE_S) and not self._ask():
                    self._end(signal.Signals(number[0]))
                self._heard.clear()

    def _end(self, number: signal.Signals) -> NoReturn:
        try:
            self._console.show_cursor()
            self._console.print(stopped_by(number), soft_wrap=True)
            if self.stop.abort is not None:
                self._tell(self.stop.abort, _REASONS[number])
        finally:
            os._exit(128 + number)

    def _tell(self, abort: Callable[[str], None], reason: str) -> None:
        """End the run at all links, without waiting for a peer that does not answer."""
        last_word = threading.Thread(target=abort, args=(reason,), name="last-word", daemon=True)
        last_word.start()
        last_word.join(_LAST_WORD_S)
