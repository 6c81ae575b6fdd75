"""Measures what a forward pass keeps for its backward, layer by layer, and how long each layer takes.

Autograd says itself what it keeps, through its hooks for saved tensors, on every device and whatever the
kernels. Each layer is run once more for that, alone, and what it gave is dropped: a measured pass needs
no more memory than one that recomputes everything.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

_NUM_RUNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReading:
    """One layer: what it keeps for its backward unless it recomputes, and then only its input; its time."""

    kept_bytes: int
    input_bytes: int
    duration_s: float


class Meter:
    """Measures one pass of a stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept_bytes: dict[int, int] = {}
        self._input_bytes: dict[int, int] = {}
        self._times: dict[int, list[_Stopwatch]] = {}
        self._beside = _Saved()

    def layers(self) -> Mapping[int, LayerReading]:
        """What was measured of each layer; waits for the device."""
        return {
            index: LayerReading(
                kept_bytes=kept_bytes,
                input_bytes=self._input_bytes[index],
                # The first run may pay for what is done once, such as choosing a kernel.
                duration_s=min(watch.elapsed_s() for watch in self._times[index]),
            )
            for index, kept_bytes in self._kept_bytes.items()
        }

    @property
    def beside_bytes(self) -> int:
        """What is kept outside the layers: by embedding and head, and for the next stage."""
        return self._beside.num_bytes

    @contextmanager
    def beside(self, standing: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Note what is kept outside the layers within this block; what stands there anyway is not counted.

        It is asked for again and again, as gathered weights come and go.
        """
        self._beside.standing = standing
        with self._beside.noting():
            yield

    def keep(self, tensor: Tensor) -> None:
        """Note a tensor that stays, though no backward asks for it: what leaves for the next stage."""
        self._beside.note(tensor)

    def run_layer(
        self,
        index: int,
        run: Callable[[], Any],
        *,
        hidden: Tensor,
        others: Iterable[Tensor],
        seed: Callable[[], None],
    ) -> None:
        """Measure a layer: its input, and what it is given beside that, stand there anyway."""
        self._beside.leave_out([hidden])
        self._input_bytes[index] = hidden.untyped_storage().nbytes()
        self._times[index] = []
        for _ in range(_NUM_RUNS):
            seed()
            saved = _Saved()
            saved.leave_out(others)
            watch = _Stopwatch(self._device)
            with saved.noting():
                run()
            watch.stop()
            self._times[index].append(watch)
            self._kept_bytes[index] = saved.num_bytes


class _Saved:
    """Storages that autograd keeps; each counts once, however many tensors lie in it."""

    def __init__(self) -> None:
        self.standing: Callable[[], Iterable[Tensor]] = tuple
        self._bytes: dict[int, int] = {}
        self._left_out: set[int] = set()

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        self._left_out.update(map(_address, tensors))

    def note(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._left_out and address not in map(_address, self.standing()):
            self._bytes[address] = tensor.untyped_storage().nbytes()
        # An operation's own output, kept with its history, would never be freed.
        return tensor.detach()

    def noting(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.note, lambda tensor: tensor)


def _address(tensor: Tensor) -> int:
    """Where it lies; of a tensor that ranks share, this one's part."""
    with torch.no_grad():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.untyped_storage().data_ptr()


class _Stopwatch:
    """Times work on a device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._point()
        self._stop = self._start

    def stop(self) -> None:
        self._stop = self._point()

    def elapsed_s(self) -> float:
        start, stop = self._start, self._stop
        if isinstance(start, torch.Event) and isinstance(stop, torch.Event):
            stop.synchronize()
            return start.elapsed_time(stop) / 1000
        return float(stop) - float(start)

    def _point(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event
