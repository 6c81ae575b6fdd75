"""Spans and facts of a run, simulated or real; a file holds one JSON object a line."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from isthmus.errors import UserError

__version__ = "0.1.0"
"""The release, which all clouds of a run must share."""
EVENTS_FOLDER: Final = "events"
COMPUTE_KINDS: Final = frozenset(
    {"forward", "backward", "evaluation", "optimize", "generate", "discriminate"}
)
"""The kinds of spans in which a device is at work; `transfer` is another."""
WAITING_KIND: Final = "data"
"""The kind of spans in which the first stage waits for its data."""
CODING_KINDS: Final = frozenset({"encode", "decode"})
"""The kinds of spans in which what crosses is coded, beside the computation."""

MEASURED_KIND: Final = "measured"
"""The kind of facts that tell what coding has changed of a message."""
STARTED_KIND: Final = "started"
"""The kind of facts that a rank writes when it starts, or continues after a stop."""


_ANCHOR_NS: Final = time.time_ns() - time.monotonic_ns()


def steady_ns() -> int:
    """Return the time of day by a clock that never jumps, also when the system clock is set during a run."""
    return _ANCHOR_NS + time.monotonic_ns()


def steady_s() -> float:
    """`steady_ns` in seconds."""
    return steady_ns() / 1e9


class Span(NamedTuple):
    """Something that took time on one track, by the clock of the first cloud."""

    track: str
    name: str
    kind: str
    start_s: float
    end_s: float
    num_bytes: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that was found at one time, such as the loss of a step."""

    kind: str
    at_s: float
    values: Mapping[str, object]


Event = Span | Fact


class EventLog:
    """Appends events to a file, from any thread; `clock_offset_s` leads to the first cloud's clock."""

    def __init__(self, path: Path, *, clock_offset_s: float = 0.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._clock_offset_s = clock_offset_s
        _drop_cut_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def span(self, span: Span) -> None:
        """Write a span whose times are of this cloud's clock."""
        shifted = span._asdict()
        for key in ("start_s", "end_s"):
            shifted[key] = round(shifted[key] + self._clock_offset_s, 6)
        self._write({"event": "span", **shifted})

    def fact(self, kind: str, values: Mapping[str, object]) -> None:
        """Write something found now."""
        at_s = round(steady_s() + self._clock_offset_s, 6)
        self._write({"event": "fact", "kind": kind, "at_s": at_s, "values": dict(values)}, flushes=True)

    def close(self) -> None:
        """Write out what is left."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, record: Mapping[str, object], *, flushes: bool = False) -> None:
        line = json.dumps(record, separators=(",", ":"))
        with self._lock:
            # A link may still report when the run has ended.
            if not self._file.closed:
                self._file.write(line + "\n")
                if flushes:
                    self._file.flush()


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of one file; a last line that a crash has cut short is left out."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            yield _parse(line, path, number)


def _drop_cut_line(path: Path) -> None:
    """Take off the last line of a file if a crash has cut it short: what comes next would be lost with it."""
    num_bytes = path.stat().st_size if path.exists() else 0
    if num_bytes == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.seek(0)
            last = deque(file, maxlen=1).pop()
            file.truncate(num_bytes - len(last))


def _parse(line: str, path: Path, number: int) -> Event:
    try:
        record = json.loads(line)
        kind = record.pop("event")
        return Span(**record) if kind == "span" else Fact(**record)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"line {number} of {path} is no event", hint="delete the line, or the file") from None


class StopRequest:
    """A request to stop in order; calls what can fulfil it at the time."""

    def __init__(self) -> None:
        # A signal may come while its own thread registers.
        self._lock = threading.RLock()
        self._honour: Callable[[], None] | None = None
        self.is_asked = False
        self.abort: Callable[[str], None] | None = None
        """Ends the run at all links, with a reason; for one that cannot wait for the computing thread."""

    def ask(self) -> bool:
        """Ask for a stop; False where nobody can honour it yet."""
        with self._lock:
            honour = self._honour
        if honour is None:
            return False
        self.is_asked = True
        honour()
        return True

    @contextmanager
    def honoured_by(self, honour: Callable[[], None]) -> Iterator[None]:
        """Within the block a request calls `honour`, from any thread."""
        with self._lock:
            self._honour = honour
        try:
            yield
        finally:
            with self._lock:
                self._honour = None
