"""A device whose lanes note by its own events when they worked: what a profiler shows, without its weight."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from isthmus.events import steady_s
from isthmus.train.device import Device, Mark, SideStream
from stages.trace import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    kind: str
    begun: Mark
    ended: Mark


class WatchedDevice(Device):
    """Keeps what its lanes noted since the last `begin`."""

    def __init__(self, kind: str = "auto") -> None:
        super().__init__(kind)
        self._origin = Mark()
        self._origin_s = 0.0
        self._notes: list[_Note] = []

    def side_stream(self) -> SideStream:
        """A new stream, watched."""
        return _WatchedLane(self)

    def begin(self) -> None:
        """Forget what was noted, and set the device's clock by the host's."""
        self._notes.clear()
        self._origin = self.mark(is_timed=True)
        self._origin.wait()
        self._origin_s = steady_s()

    def note(self, kind: str, begun: Mark, ended: Mark) -> None:
        """Keep when a lane worked."""
        self._notes.append(_Note(kind=kind, begun=begun, ended=ended))

    def pieces(self) -> list[Piece]:
        """What lanes did, by the host's clock."""
        return [
            Piece(kind=one.kind, start_s=self._time_s(one.begun), end_s=self._time_s(one.ended))
            for one in list(self._notes)
        ]

    def _time_s(self, mark: Mark) -> float:
        return self._origin_s + mark.since_s(self._origin)


class _WatchedLane(SideStream):
    """Notes its work: behind a mark it is encoding, else decoding."""

    def __init__(self, device: WatchedDevice) -> None:
        super().__init__(device)
        self._watched = device

    @contextmanager
    def work(self, *, after: Mark | None = None) -> Iterator[None]:
        """Work that begins on the device once `after` is reached, and is done when the block ends."""
        with super().work(after=after):
            begun = self._watched.mark(is_timed=True)
            yield
            ended = self._watched.mark(is_timed=True)
        self._watched.note("decode" if after is None else "codec", begun, ended)
