"""Plays a file of faults in a run on this machine: links, processes, and what is saved.

cut, blackhole, slow-down, corrupt   the relay of the link
kill, freeze                         SIGKILL; SIGSTOP and, later, SIGCONT
fill-disk                            while a marker lies in the run directory, the cloud can store nothing
spoil                                a bit of the cloud's newest record is flipped
"""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isthmus.job import Job
from isthmus.job.faults import CloudFault, CloudFaultKind, Fault
from isthmus.plan.types import Member
from isthmus.train.store import CHECKPOINTS_FOLDER, Store
from isthmus.wan.local import LocalWan
from isthmus.wan.packet import Buffer

_FULL: Final = ".full-"

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
        self._ended = threading.Event()
        self._has_started = False

    def start(self) -> None:
        """Count the times of the script from now on; once."""
        if self._has_started:
            return
        self._has_started = True
        self._wan.play(one for one in self._faults if isinstance(one, Fault))
        threading.Thread(target=self._play, name="faults", daemon=True).start()

    def close(self) -> None:
        """Play nothing more."""
        self._ended.set()

    def _play(self) -> None:
        started_s = time.monotonic()
        calls = [call for one in self._faults if isinstance(one, CloudFault) for call in self._calls(one)]
        for at_s, call in sorted(calls, key=lambda one: one[0]):
            if self._ended.wait(max(0.0, started_s + at_s - time.monotonic())):
                return
            call()

    def _calls(self, fault: CloudFault) -> Iterator[tuple[float, Callable[[], None]]]:
        end_s = fault.at_s + fault.duration_s
        match fault.kind:
            case CloudFaultKind.KILL:
                yield fault.at_s, lambda: self._signal(fault, signal.SIGKILL, "is killed")
            case CloudFaultKind.FREEZE:
                yield fault.at_s, lambda: self._signal(fault, signal.SIGSTOP, "is frozen")
                yield end_s, lambda: self._signal(fault, signal.SIGCONT, "is let go on")
            case CloudFaultKind.FILL_DISK:
                marker = self._run / f"{_FULL}{fault.cloud}"
                yield fault.at_s, lambda: self._tell(fault, "has no room on its disk", marker.touch)
                yield (
                    end_s,
                    lambda: self._tell(
                        fault, "has room on its disk again", lambda: marker.unlink(missing_ok=True)
                    ),
                )
            case CloudFaultKind.SPOIL:
                yield fault.at_s, lambda: self._tell(fault, "has a spoilt checkpoint", self._spoil(fault))

    def _signal(self, fault: CloudFault, number: int, what: str) -> None:
        ranks = range(self._job.cloud_named(fault.cloud).ranks) if fault.rank is None else [fault.rank]
        members = [Member(fault.cloud, rank) for rank in ranks]
        self._tell(fault, what, lambda: self._wan.signal(members, number))

    def _tell(self, fault: CloudFault, what: str, call: Callable[[], object]) -> None:
        of = "" if fault.rank is None else f"rank {fault.rank} of "
        self._note(fault.cloud, f"fault: {of}cloud {fault.cloud!r} {what}")
        call()

    def _spoil(self, fault: CloudFault) -> Callable[[], None]:
        def spoil() -> None:
            found = sorted((self._run / CHECKPOINTS_FOLDER).glob(f"step-*/{fault.cloud}*/*.safetensors"))
            if found:
                flip_a_bit(found[-1])

        return spoil


def flip_a_bit(file: Path) -> None:
    """Change the last byte of a file."""
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([byte ^ 1]))


@dataclass(frozen=True, slots=True)
class FillableStore:
    """A store that takes nothing while the disk of its cloud is said to be full."""

    store: Store
    marker: Path

    @property
    def place(self) -> str:
        """Where the store is."""
        return self.store.place

    def list(self) -> dict[str, int]:
        """All files, with their sizes."""
        return self.store.list()

    def put(self, name: str, data: Iterable[Buffer]) -> None:
        """Write a file, unless the disk is full."""
        if self.marker.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        self.store.put(name, data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """A part of a file."""
        return self.store.get(name, start, stop)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.store.remove(name)


def fillable(store: Store, run: Path, cloud: str) -> Store:
    """The store of a cloud whose disk a script of faults may fill."""
    return FillableStore(store, run / f"{_FULL}{cloud}")
