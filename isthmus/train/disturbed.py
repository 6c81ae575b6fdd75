"""Plays a file of faults in a run on this machine: links, processes, and what is saved.

cut, blackhole, slow-down, corrupt   the relay of the link
kill, freeze                         SIGKILL; SIGSTOP and, later, SIGCONT
fill-disk                            while a marker lies in the run directory, the cloud can store nothing
spoil                                a bit of the cloud's newest record is flipped
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from isthmus.job import Job
from isthmus.job.faults import CloudFault, CloudFaultKind, Fault
from isthmus.plan.types import Member
from isthmus.train.records import CHECKPOINTS_FOLDER
from isthmus.wan.local import LocalWan

Note = Callable[[str, str], None]
"""Is told the cloud that a fault happens to, and what it is."""


class Player:
    """Plays faults from the moment that it is started, on a thread of its own."""

    def __init__(
        self, job: Job, faults: Sequence[Fault | CloudFault], *, wan: LocalWan, run: Path, note: Note
    ) -> None:
        self._job = job
        self._wan = wan
        self._run = run
        self._note = note
        self._faults = faults
        self._has_started = False

    def start(self) -> None:
        """Count the times of the script from now on; once."""
        if self._has_started:
            return
        self._has_started = True
        self._wan.play(one for one in self._faults if isinstance(one, Fault))
        threading.Thread(target=self._play, name="faults", daemon=True).start()

    def _play(self) -> None:
        started_s = time.monotonic()
        calls = [call for one in self._faults if isinstance(one, CloudFault) for call in self._calls(one)]
        for at_s, call in sorted(calls, key=lambda one: one[0]):
            time.sleep(max(0.0, started_s + at_s - time.monotonic()))
            call()

    def _calls(self, fault: CloudFault) -> Iterator[tuple[float, Callable[[], None]]]:
        end_s = fault.at_s + fault.duration_s
        match fault.kind:
            case CloudFaultKind.KILL:
                yield fault.at_s, partial(self._signal, fault, signal.SIGKILL, "is killed")
            case CloudFaultKind.FREEZE:
                yield fault.at_s, partial(self._signal, fault, signal.SIGSTOP, "is frozen")
                yield end_s, partial(self._signal, fault, signal.SIGCONT, "is let go on")
            case CloudFaultKind.FILL_DISK:
                marker = full_marker(self._run, fault.cloud)
                yield fault.at_s, partial(self._tell, fault, "has no room on its disk", marker.touch)
                yield end_s, partial(self._tell, fault, "has room on its disk again", marker.unlink)
            case CloudFaultKind.SPOIL:
                spoil = partial(self._spoil, fault.cloud)
                yield fault.at_s, partial(self._tell, fault, "has a spoilt checkpoint", spoil)

    def _signal(self, fault: CloudFault, number: int, what: str) -> None:
        ranks = range(self._job.cloud_named(fault.cloud).ranks) if fault.rank is None else [fault.rank]
        members = [Member(fault.cloud, rank) for rank in ranks]
        self._tell(fault, what, lambda: self._wan.signal(members, number))

    def _tell(self, fault: CloudFault, what: str, call: Callable[[], object]) -> None:
        of = "" if fault.rank is None else f"rank {fault.rank} of "
        self._note(fault.cloud, f"fault: {of}cloud {fault.cloud!r} {what}")
        call()

    def _spoil(self, cloud: str) -> None:
        """Flip a bit of the newest record of a cloud."""
        found = sorted((self._run / CHECKPOINTS_FOLDER).glob(f"step-*/{cloud}/*.safetensors"))
        if found:
            data = found[-1].read_bytes()
            found[-1].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def full_marker(run: Path, cloud: str) -> Path:
    """While there is this file, the store of a cloud takes nothing."""
    return run / f".full-{cloud}"
