"""The device that a cloud computes on, and work beside the computation: codecs, and copies to the host."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.events import Span, steady_s


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in what a device computes, reached when all that was started before it is done."""

    event: torch.Event | None = None
    """None on the CPU, where everything is done at once."""
    made_s: float = field(default_factory=steady_s)

    def wait(self) -> None:
        """Wait on the host; work beside the computation is not waited for."""
        if self.event is not None:
            self.event.synchronize()

    def since_s(self, earlier: "Mark") -> float:
        """The time from an earlier mark to this one; both are timed and reached."""
        if self.event is None or earlier.event is None:
            return self.made_s - earlier.made_s
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class Device:
    """A device through `torch.accelerator`, or the CPU; of several in a machine, that of the local rank."""

    def __init__(self, kind: str = "auto", *, local_rank: int | None = None) -> None:
        self.torch_device = _find(kind)
        self.is_accelerator = self.torch_device.type != "cpu"
        if self.torch_device.type == "cuda":
            # Its backward pass gives NaN for some shapes and masks (pytorch issue 196678); flash attention,
            # which is as fast, is taken instead.
            torch.backends.cuda.enable_cudnn_sdp(False)
        if self.is_accelerator and local_rank is not None:
            index = local_rank % torch.accelerator.device_count()
            self.torch_device = torch.device(self.torch_device.type, index)
            torch.accelerator.set_device_index(index)

    def mark(self, *, is_timed: bool = False) -> Mark:
        """The point that the computation started by this thread has come to."""
        if not self.is_accelerator:
            return Mark()
        event = torch.Event(device=self.torch_device, enable_timing=is_timed)
        event.record(torch.accelerator.current_stream(self.torch_device))
        return Mark(event)

    @property
    def name(self) -> str:
        """The maker's name of the device, or cpu."""
        module = torch.get_device_module(self.torch_device)
        return str(module.get_device_name(self.torch_device)) if self.is_accelerator else "cpu"

    @property
    def identity(self) -> str:
        """Distinguishes it from all others of its machine, also where every process sees only one."""
        if not self.is_accelerator:
            return "cpu"
        module = torch.get_device_module(self.torch_device)
        return str(getattr(module.get_device_properties(self.torch_device), "uuid", self.torch_device))

    def side_stream(self) -> "SideStream":
        """A new stream beside the computation."""
        return SideStream(self)

    def memory_bytes(self) -> int:
        """All memory of the device, or of the machine."""
        if not self.is_accelerator:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(torch.get_device_module(self.torch_device).mem_get_info(self.torch_device)[1])

    def peak_bytes(self) -> int | None:
        """The most memory that tensors have taken so far; unknown on the CPU."""
        if not self.is_accelerator:
            return None
        module = torch.get_device_module(self.torch_device)
        return int(module.max_memory_allocated(self.torch_device))


class SideStream:
    """Work beside the computation, on a stream of its own: what one cut codes and copies.

    All of a cut's work is in one stream, so that what a codec keeps on the device is only ever used in order.
    It belongs to the thread that makes it, which computes.
    """

    def __init__(self, device: Device) -> None:
        self.torch_device = device.torch_device
        self._device = device
        self._stream = torch.Stream(device=device.torch_device) if device.is_accelerator else None
        self._computing = torch.accelerator.current_stream(device.torch_device) if self._stream else None

    @contextmanager
    def work(self, *, after: Mark | None = None) -> Iterator[None]:
        """Work that begins on the device once `after` is reached, and is done when the block ends."""
        with torch.no_grad():
            if self._stream is None:
                yield
                return
            with self._stream:
                if after is not None and after.event is not None:
                    self._stream.wait_event(after.event)
                yield
                done = self._device.mark()
        done.wait()

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in pinned host memory, there when the work is done; on the CPU the tensor itself."""
        if self._stream is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy on the device; on the CPU the tensor itself."""
        if self._stream is None:
            return tensor
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def hand_over(self, tensor: Tensor) -> Tensor:
        """Let the computation use a tensor that was made here: its memory is not given away before that."""
        if self._computing is not None:
            tensor.record_stream(self._computing)
        return tensor


def _find(kind: str) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind == "auto":
        return found or torch.device("cpu")
    if kind != "cpu" and (found is None or found.type != kind):
        here = "no accelerator" if found is None else found.type
        raise UserError(
            f"device {kind!r} is asked for, but torch finds {here} here",
            hint=f'set device = "{found.type if found else "cpu"}", or install torch for {kind}',
        )
    return torch.device(kind)


T = TypeVar("T")


class PassClock:
    """Runs passes so that an accelerator never waits for the host between two of them.

    The host continues as soon as a pass has come to its last layers: what has arrived by then decides what
    follows, and the device finds it queued when it is done. The span of a pass, by the host's clock, is
    reported one pass later.
    """

    def __init__(self, device: Device, *, track: str, on_span: Callable[[Span], None]) -> None:
        self._busy_s = 0.0
        self._device = device
        self._track = track
        self._on_span = on_span
        self._origin = Mark()
        self._origin_s = 0.0
        self._near_end: Mark | None = None
        self._report_last: Callable[[], None] = _nothing

    def begin(self) -> None:
        """Set the device's clock by the host's, at the start of a step or an evaluation."""
        self._origin = self._device.mark(is_timed=True)
        self._origin.wait()
        self._origin_s = steady_s()
        self._busy_s = 0.0

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
        before, self._report_last = self._report_last, partial(self._report, kind, name, begun, ended)
        if self._near_end is not None:
            self._near_end.wait()
        before()
        if self._near_end is None:
            self.settle()
        return result, ended

    def take_busy_s(self) -> float:
        """How long the passes took that were reported since the last call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def settle(self) -> None:
        """Wait for the pass under way, and report it."""
        before, self._report_last = self._report_last, _nothing
        before()

    def _report(self, kind: str, name: str, begun: Mark, ended: Mark) -> None:
        ended.wait()
        start_s, end_s = self._time_s(begun), self._time_s(ended)
        self._busy_s += end_s - start_s
        self._on_span(Span(track=self._track, name=name, kind=kind, start_s=start_s, end_s=end_s))

    def _time_s(self, mark: Mark) -> float:
        return self._origin_s + mark.since_s(self._origin)


def _nothing() -> None:
    """No pass is under way."""
