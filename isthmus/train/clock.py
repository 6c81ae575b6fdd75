"""When passes run on a device, and when the next may be started behind one."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from isthmus.events import Span
from isthmus.train.device import Device, Mark

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    kind: str
    name: str
    begun: Mark
    ended: Mark


class PassClock:
    """Runs passes so that an accelerator never waits for the host between two of them.

    The host goes on as soon as a pass has come to its last layers: what has arrived by then decides what
    follows, and the device finds it queued when it is done. When a pass ran, by the host's clock, is told one
    pass later.
    """

    def __init__(self, device: Device, *, track: str, on_span: Callable[[Span], None]) -> None:
        self.busy_s = 0.0
        """How long the passes of this turn took that have been told of."""
        self._device = device
        self._track = track
        self._on_span = on_span
        self._origin = Mark()
        self._origin_s = 0.0
        self._near_end: Mark | None = None
        self._under_way: _UnderWay | None = None

    def begin(self) -> None:
        """Set the device's clock by the host's; a turn begins."""
        self._origin = self._device.mark(is_timed=True)
        self._origin.wait()
        self._origin_s = time.time()
        self.busy_s = 0.0

    def near_end(self) -> None:
        """The pass under way has come to its last layers."""
        if self._device.is_accelerator:
            self._near_end = self._device.mark()

    def run(self, kind: str, name: str, work: Callable[[], T]) -> tuple[T, Mark]:
        """Start work on the device; gives its result, and the mark at which that is there."""
        self._near_end = None
        begun = self._device.mark(is_timed=True)
        result = work()
        ended = self._device.mark(is_timed=True)
        before, self._under_way = self._under_way, _UnderWay(kind=kind, name=name, begun=begun, ended=ended)
        if self._near_end is not None:
            self._near_end.wait()
        self._settle(before)
        if self._near_end is None:
            self.settle()
        return result, ended

    def settle(self) -> None:
        """Wait for what is under way, and tell of it."""
        before, self._under_way = self._under_way, None
        self._settle(before)

    def _settle(self, lap: _UnderWay | None) -> None:
        if lap is not None:
            lap.ended.wait()
            start_s, end_s = self._time_s(lap.begun), self._time_s(lap.ended)
            self.busy_s += end_s - start_s
            self._on_span(Span(track=self._track, name=lap.name, kind=lap.kind, start_s=start_s, end_s=end_s))

    def _time_s(self, mark: Mark) -> float:
        return self._origin_s + mark.since_s(self._origin)
