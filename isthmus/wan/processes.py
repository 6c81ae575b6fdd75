"""One process per cloud on this machine, joined through the emulated WAN."""

import multiprocessing
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any, Protocol

from isthmus.errors import CloudFailed, IsthmusError, LinkError
from isthmus.job import Job
from isthmus.wan.certificates import Identity
from isthmus.wan.endpoint import Endpoint, Site
from isthmus.wan.local import LocalWan

_POLL_S = 0.2
_LAST_WORDS_S = 3.0

Report = Callable[[str], None]


class Work(Protocol):
    """What a cloud's process does; it must be picklable, for the process is started afresh."""

    def __call__(self, job: Job, endpoint: Endpoint, *, cloud: str, report: Report) -> Any:
        """Do it and give the result."""


@dataclass(frozen=True, slots=True)
class _Reported:
    cloud: str
    text: str


@dataclass(frozen=True, slots=True)
class _Done:
    cloud: str
    result: Any


@dataclass(frozen=True, slots=True)
class _Failed:
    cloud: str
    message: str
    hint: str | None
    is_echo: bool


_Message = _Reported | _Done | _Failed


def run_clouds(
    job: Job, work: Work, wan: LocalWan, *, on_report: Callable[[str, str], None]
) -> dict[str, Any]:
    """Have every cloud of a job do its work here and give the results; a cloud's failure ends all."""
    context = multiprocessing.get_context("spawn")
    messages: Queue[_Message] = context.Queue()
    processes: dict[str, BaseProcess] = {}
    for cloud in (spec.name for spec in job.cloud):
        arguments = (work, job, cloud, wan.identity(cloud), wan.site(cloud), messages)
        processes[cloud] = context.Process(target=_be_cloud, args=arguments, daemon=True)
        processes[cloud].start()
    try:
        return _collect(processes, messages, on_report)
    finally:
        for process in processes.values():
            process.terminate()
            process.join()


def _be_cloud(
    work: Work, job: Job, cloud: str, identity: Identity, site: Site, messages: "Queue[_Message]"
) -> None:
    def report(text: str) -> None:
        messages.put(_Reported(cloud, text))

    try:
        with Endpoint(job, cloud=cloud, identity=identity, site=site) as endpoint:
            result = work(job, endpoint, cloud=cloud, report=report)
        messages.put(_Done(cloud, result))
    except IsthmusError as error:
        # A link that ended is mostly the echo of what ended another cloud.
        messages.put(_Failed(cloud, error.message, error.hint, isinstance(error, LinkError)))


def _collect(
    processes: dict[str, BaseProcess], messages: "Queue[_Message]", on_report: Callable[[str, str], None]
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    failures: dict[str, _Failed] = {}
    last_words_until_s = float("inf")
    while len(results) + len(failures) < len(processes) and time.monotonic() < last_words_until_s:
        match _next_message(messages):
            case _Reported(cloud, text):
                on_report(cloud, text)
            case _Done(cloud, result):
                results[cloud] = result
            case _Failed(cloud) as failed:
                failures[cloud] = failed
            case None:
                failures |= _crashed(processes, results.keys() | failures.keys())
        if failures:
            last_words_until_s = min(last_words_until_s, time.monotonic() + _LAST_WORDS_S)
    if failures:
        first = min(failures.values(), key=lambda failed: failed.is_echo)
        raise CloudFailed(first.cloud, first.message, hint=first.hint)
    return results


def _next_message(messages: "Queue[_Message]") -> _Message | None:
    try:
        return messages.get(timeout=_POLL_S)
    except queue.Empty:
        return None


def _crashed(processes: dict[str, BaseProcess], heard: set[str]) -> dict[str, _Failed]:
    """Processes that ended without a word; their traceback is on standard error."""
    return {
        cloud: _Failed(cloud, f"its process ended with exit code {process.exitcode}", None, is_echo=False)
        for cloud, process in processes.items()
        if cloud not in heard and process.exitcode is not None
    }
