"""Many small trainings share one device: processes that each take the next run of one list."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, Protocol

import torch
from bench import Deadline

from quality.fitting import Found, Run

_MEMORY_SHARE: Final = 0.95
_MARGIN: Final = 1.3
"""A run is given so much more time than the latest of its task has taken: rows differ by a fifth."""


class Task(Protocol):
    """Trains the rows of one task."""

    def train(self, run: Run) -> Found:
        """One training, and its quality."""
        ...


TaskMaker = Callable[[str, Path, torch.device], Task]
"""Makes the task of a name from the folder of prepared data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that has ended; without anything found if its process died."""

    run: Run
    found: Found | None
    duration_s: float


@dataclass(slots=True)
class Clock:
    """How long runs take, and whether one more would end in time."""

    deadline: Deadline
    durations_s: dict[str, float] = field(default_factory=dict)

    def note(self, ended: Ended) -> None:
        """Remember the latest run of each task: it shared the device with as many as the next will."""
        self.durations_s[ended.run.task] = ended.duration_s

    def allows(self, run: Run) -> bool:
        """Whether a run started now would end before the deadline, as far as is known."""
        unknown_s = max(self.durations_s.values(), default=0.0)
        return self.deadline.leaves(_MARGIN * self.durations_s.get(run.task, unknown_s))


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    run: Run
    started_s: float


def train_all(
    runs: list[Run], make_task: TaskMaker, folder: Path, *, num_workers: int, deadline: Deadline
) -> Iterator[Ended]:
    """Train every run that ends in time, and give each as it ends."""
    clock = Clock(deadline)
    waiting = list(runs)
    context = multiprocessing.get_context("spawn")
    num_workers = min(num_workers, len(runs))

    def start() -> _Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, make_task, folder, num_workers), daemon=True)
        process.start()
        theirs.close()
        return _give(_Worker(process, ours, waiting[0], 0.0), waiting.pop(0))

    workers = [start() for _ in range(num_workers)]
    while workers:
        for pipe in wait([worker.pipe for worker in workers]):
            worker = next(one for one in workers if one.pipe is pipe)
            workers.remove(worker)
            ended = _take(worker)
            clock.note(ended)
            yield ended
            waiting = [run for run in waiting if clock.allows(run)]
            if not waiting:
                _end(worker)
            elif ended.found is None:
                workers.append(start())
            else:
                workers.append(_give(worker, waiting.pop(0)))


def _give(worker: _Worker, run: Run) -> _Worker:
    worker.run, worker.started_s = run, time.monotonic()
    worker.pipe.send(run)
    return worker


def _take(worker: _Worker) -> Ended:
    try:
        found: Found | None = worker.pipe.recv()
    except EOFError:
        # What it died of stands on its standard error.
        found = None
    return Ended(run=worker.run, found=found, duration_s=time.monotonic() - worker.started_s)


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.join(30)


def _work(pipe: Connection, make_task: TaskMaker, folder: Path, num_workers: int) -> None:
    """Train what comes through the pipe until it closes."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        torch.cuda.set_per_process_memory_fraction(_MEMORY_SHARE / num_workers)
        # It plans anew for each of the many shapes.
        torch.backends.cuda.enable_cudnn_sdp(False)
    tasks: dict[str, Task] = {}
    while True:
        try:
            run: Run = pipe.recv()
        except EOFError:
            return
        if run.task not in tasks:
            tasks[run.task] = make_task(run.task, folder, device)
        pipe.send(tasks[run.task].train(run))
