"""One process per rank of each cloud on this machine, joined through the emulated WAN."""

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any, Protocol

from isthmus.errors import CloudFailed, IsthmusError, LinkError, RankLost
from isthmus.job import Job
from isthmus.wan.endpoint import Endpoint, Site
from isthmus.wan.handshake import EXIT_LOST, Seat
from isthmus.wan.local import LocalWan
from isthmus.wan.trust.certificates import Identity

_POLL_S = 0.2
_LAST_WORDS_S = 3.0

STOP_SIGNAL = signal.SIGUSR1
"""Asks a rank's process for an orderly stop."""

Report = Callable[[str], None]


class Work(Protocol):
    """What a rank's process does; it must be picklable, for the process is started afresh."""

    def __call__(self, job: Job, endpoint: Endpoint, *, cloud: str, report: Report) -> Any:
        """Do it and give the result."""


class RankWork(Protocol):
    """What a rank's process does where clouds may have several."""

    def __call__(self, job: Job, endpoint: Endpoint, *, cloud: str, report: Report, seat: Seat) -> Any:
        """Do it and give the result."""


class Stoppable(Protocol):
    """A request to stop in order, which the first process can honour while ranks run."""

    def honoured_by(self, honour: Callable[[], None]) -> AbstractContextManager[None]:
        """Within the block a request calls this, from any thread."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One process: a rank of a cloud."""

    cloud: str
    rank: int


@dataclass(frozen=True, slots=True)
class _Reported:
    place: _Place
    text: str


@dataclass(frozen=True, slots=True)
class _Done:
    place: _Place
    result: Any


@dataclass(frozen=True, slots=True)
class _Failed:
    place: _Place
    message: str
    hint: str | None
    is_echo: bool
    is_crash: bool = False


_Message = _Reported | _Done | _Failed


def run_clouds(
    job: Job, work: Work, wan: LocalWan, *, on_report: Callable[[str, str], None]
) -> dict[str, Any]:
    """Have every cloud of a job, of one rank each, do its work here; gives the results by cloud."""
    found = run_ranks(job, _AnyRank(work), wan, on_report=on_report)
    return {cloud: result for (cloud, _), result in found.items()}


def run_ranks(
    job: Job,
    work: RankWork,
    wan: LocalWan,
    *,
    on_report: Callable[[str, str], None],
    stop: Stoppable | None = None,
) -> dict[tuple[str, int], Any]:
    """Have every rank of every cloud do its work here and give the results; a failure of one ends all.

    A request to stop goes to the first process, as `STOP_SIGNAL`.
    """
    context = multiprocessing.get_context("spawn")
    messages: Queue[_Message] = context.Queue()
    processes: dict[_Place, BaseProcess] = {}
    several = {cloud.name for cloud in job.cloud if cloud.ranks > 1}
    try:
        for cloud in job.cloud:
            for rank in range(cloud.ranks):
                seat = wan.seat(cloud.name, rank)
                arguments = (
                    work,
                    job,
                    seat,
                    wan.identity(cloud.name),
                    wan.site(cloud.name, rank),
                    cloud.name,
                    messages,
                )
                process = context.Process(target=_be_rank, args=arguments, daemon=True)
                process.start()
                processes[_Place(cloud.name, rank)] = process
        first = next(iter(processes.values()))
        with nullcontext() if stop is None else stop.honoured_by(lambda: _ask(first)):
            return _collect(processes, messages, on_report, several)
    finally:
        _end(list(processes.values()))


@dataclass(frozen=True, slots=True)
class _AnyRank:
    """Work that does not ask for its seat."""

    work: Work

    def __call__(self, job: Job, endpoint: Endpoint, *, cloud: str, report: Report, seat: Seat) -> Any:
        del seat
        return self.work(job, endpoint, cloud=cloud, report=report)


def _be_rank(
    work: RankWork,
    job: Job,
    seat: Seat,
    identity: Identity,
    site: Site,
    cloud: str,
    messages: "Queue[_Message]",
) -> None:
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    place = _Place(cloud, seat.rank)

    def report(text: str) -> None:
        messages.put(_Reported(place, text))

    try:
        with Endpoint(job, cloud=cloud, rank=seat.rank, identity=identity, site=site) as endpoint:
            result = work(job, endpoint, cloud=cloud, report=report, seat=seat)
        messages.put(_Done(place, result))
    except IsthmusError as error:
        # A link or a world that ended is mostly the echo of what ended another process.
        is_echo = isinstance(error, LinkError | RankLost)
        messages.put(_Failed(place, error.message, error.hint, is_echo))


def _ask(process: BaseProcess) -> None:
    if process.pid is not None and process.exitcode is None:
        os.kill(process.pid, STOP_SIGNAL)


def _end_with_parent() -> None:
    """Leave no rank behind that trains on beside those of the next start, whatever ended the parent."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(EXIT_LOST)


def _collect(
    processes: dict[_Place, BaseProcess],
    messages: "Queue[_Message]",
    on_report: Callable[[str, str], None],
    several: set[str],
) -> dict[tuple[str, int], Any]:
    results: dict[_Place, Any] = {}
    failures: dict[_Place, _Failed] = {}
    last_words_until_s = float("inf")
    while len(results) + len(failures) < len(processes) and time.monotonic() < last_words_until_s:
        match _next_message(messages):
            case _Reported(place, text):
                on_report(f"{place.cloud}/{place.rank}" if place.rank else place.cloud, text)
            case _Done(place, result):
                results[place] = result
            case _Failed(place) as failed:
                failures[place] = failed
            case None:
                failures |= _crashed(processes, results.keys() | failures.keys())
        if failures:
            last_words_until_s = min(last_words_until_s, time.monotonic() + _LAST_WORDS_S)
    if failures:
        raise _first_cause(failures, several)
    return {(place.cloud, place.rank): result for place, result in results.items()}


def _first_cause(failures: dict[_Place, _Failed], several: set[str]) -> CloudFailed:
    first = min(failures.values(), key=lambda failed: failed.is_echo)
    rank = first.place.rank if first.place.cloud in several else None
    # Where there are only echoes, what they echo is not here, and may be over at another try.
    is_crash = first.is_crash or first.is_echo
    return CloudFailed(first.place.cloud, first.message, hint=first.hint, rank=rank, is_crash=is_crash)


def _next_message(messages: "Queue[_Message]") -> _Message | None:
    try:
        return messages.get(timeout=_POLL_S)
    except queue.Empty:
        return None


def _crashed(processes: dict[_Place, BaseProcess], heard: set[_Place]) -> dict[_Place, _Failed]:
    """Processes that ended without a word; their traceback is on standard error."""
    return {
        place: _Failed(
            place,
            f"its process ended with exit code {process.exitcode}",
            None,
            is_echo=process.exitcode == EXIT_LOST,
            is_crash=True,
        )
        for place, process in processes.items()
        if place not in heard and process.exitcode is not None
    }


def _end(processes: Sequence[BaseProcess]) -> None:
    """End all that still run; ranks ignore the signals that reach a whole process group."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
