"""A device whose lanes note by its own events when they worked: what a profiler shows, without its weight."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.train.device import Device, Lane, Mark
from stages.trace import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    kind: str
    begun: Mark
    ended: Mark


class WatchedDevice:
    """Does what a device does, and keeps what its lanes noted since the last `begin`."""

    def __init__(self, device: Device) -> None:
        self.torch_device = device.torch_device
        self.is_accelerator = device.is_accelerator
        self._device = device
        self._origin = Mark()
        self._origin_s = 0.0
        self._notes: list[_Note] = []

    @property
    def name(self) -> str:
        """Of the device."""
        return self._device.name

    def mark(self, *, is_timed: bool = False) -> Mark:
        """The point that the computation started by this thread has come to."""
        return self._device.mark(is_timed=is_timed)

    def lane(self) -> "WatchedLane":
        """A new lane, watched."""
        return WatchedLane(self._device.lane(), self)

    def peak_bytes(self) -> int | None:
        """The most memory that tensors have taken so far."""
        return self._device.peak_bytes()

    def begin(self) -> None:
        """Forget what was noted, and set the device's clock by the host's."""
        self._notes.clear()
        self._origin = self._device.mark(is_timed=True)
        self._origin.wait()
        self._origin_s = time.time()

    def note(self, kind: str, begun: Mark, ended: Mark) -> None:
        """A lane has worked."""
        self._notes.append(_Note(kind=kind, begun=begun, ended=ended))

    def pieces(self) -> list[Piece]:
        """What lanes did, by the host's clock."""
        return [
            Piece(kind=one.kind, start_s=self._time_s(one.begun), end_s=self._time_s(one.ended))
            for one in list(self._notes)
        ]

    def _time_s(self, mark: Mark) -> float:
        return self._origin_s + mark.since_s(self._origin)


class WatchedLane:
    """Does what a lane does; work behind a mark is encoding, other work decoding."""

    def __init__(self, lane: Lane, device: WatchedDevice) -> None:
        self.torch_device: torch.device = lane.torch_device
        self._lane = lane
        self._device = device

    @contextmanager
    def work(self, *, after: Mark | None = None) -> Iterator[None]:
        """Work that begins on the device once `after` is reached, and is done when the block ends."""
        with self._lane.work(after=after):
            begun = self._device.mark(is_timed=True)
            yield
            ended = self._device.mark(is_timed=True)
        self._device.note("decode" if after is None else "codec", begun, ended)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, there when the work is done."""
        return self._lane.to_host(tensor)

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        return self._lane.to_device(tensor)

    def hand_over(self, tensor: Tensor) -> Tensor:
        """Let the computation use a tensor that was made here."""
        return self._lane.hand_over(tensor)
