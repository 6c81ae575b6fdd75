"""AdamW with its moments on the host: they come to the device a slice at a time, and go back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from isthmus.train.optimize.adamw import Group, State, set_rate, torch_adamw

# Of so many parameters the moments are on the device at a time, and of as many on their way: 1 GiB in all.
_SLICE_PARAMETERS: Final = 2**26


class OnHost:
    """In float32 on the host; copies run beside the update of the slice before.

    What is computed is what `OnDevice` computes, to the bit.
    """

    def __init__(self, groups: Sequence[Group], *, slice_parameters: int = _SLICE_PARAMETERS) -> None:
        slices = [one for group in groups for one in _sliced(group, slice_parameters)]
        self._slices = [torch_adamw([one]) for one in slices]
        self._members = [list(one.parameters) for one in slices]
        self._host: dict[nn.Parameter, State] = {}
        self._ferry = _Ferry(self._members[0][0].device)

    def step(self, learning_rate: float) -> None:
        """Update the parameters with their gradients."""
        self._ferry.begin()
        self._fetch(0)
        for number, adamw in enumerate(self._slices):
            self._fetch(number + 1)
            self._ferry.await_slice(number)
            set_rate(adamw, learning_rate)
            adamw.step()
            self._put_back(number)

    def state(self, parameter: nn.Parameter) -> State:
        """What is remembered of a parameter; waits until it is on the host."""
        self._ferry.finish()
        return dict(self._host.get(parameter, {}))

    def load(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Take up again what was remembered of a parameter."""
        self._ferry.finish()
        self._host[parameter] = {key: self._ferry.to_host(one, None) for key, one in state.items()}

    def _fetch(self, number: int) -> None:
        if number == len(self._slices):
            return
        with self._ferry.inward(number):
            for parameter in self._members[number]:
                if parameter in self._host:
                    self._slices[number].state[parameter] = {
                        key: self._ferry.to_device(one) for key, one in self._host[parameter].items()
                    }

    def _put_back(self, number: int) -> None:
        with self._ferry.outward():
            for parameter in self._members[number]:
                state = self._slices[number].state.pop(parameter, None)
                if state:
                    old = self._host.get(parameter, {})
                    self._host[parameter] = {
                        key: self._ferry.to_host(one, old.get(key)) for key, one in state.items()
                    }


class _Ferry:
    """Copies between a device and the host beside what the device computes; on a CPU, plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inward = torch.Stream(device=device) if device.type != "cpu" else None
        self._outward = torch.Stream(device=device) if device.type != "cpu" else None
        self._arrived: dict[int, torch.Event] = {}

    def begin(self) -> None:
        """Start a step: what left for the host in the last one is there before anything is fetched."""
        if self._inward is not None and self._outward is not None:
            self._inward.wait_stream(self._outward)

    def finish(self) -> None:
        """Wait on the host for all that left for it."""
        if self._outward is not None:
            self._outward.synchronize()

    @contextmanager
    def inward(self, number: int) -> Iterator[None]:
        """Copy a slice towards the device."""
        if self._inward is None:
            yield
            return
        with self._inward:
            yield
        self._arrived[number] = self._inward.record_event()

    def await_slice(self, number: int) -> None:
        """Let what is computed from now on wait for a slice."""
        if number in self._arrived:
            torch.accelerator.current_stream(self._device).wait_event(self._arrived.pop(number))

    @contextmanager
    def outward(self) -> Iterator[None]:
        """Copy towards the host, once all that was computed so far is done."""
        if self._outward is None:
            yield
            return
        self._outward.wait_stream(torch.accelerator.current_stream(self._device))
        with self._outward:
            yield

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy on the device for the computation to use."""
        copy = torch.empty_like(tensor, device=self._device).copy_(tensor, non_blocking=True)
        self._lend(copy, torch.accelerator.current_stream(self._device) if self._inward else None)
        return copy

    def to_host(self, tensor: Tensor, old: Tensor | None) -> Tensor:
        """A copy on the host, in the place of the old one, if any; both are of one shape."""
        host = old
        if host is None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._outward is not None)
        self._lend(tensor, self._outward)
        return host.copy_(tensor, non_blocking=True)

    def _lend(self, tensor: Tensor, stream: torch.Stream | None) -> None:
        """Keep a tensor's memory from others until the stream is done with it."""
        if stream is not None and tensor.device.type != "cpu":
            tensor.record_stream(stream)


def _sliced(group: Group, max_parameters: int) -> Iterator[Group]:
    """The parameters of a group in order, some at a time; a large one may be alone."""
    taken: list[nn.Parameter] = []
    for parameter in group.parameters:
        if taken and sum(one.numel() for one in taken) + parameter.numel() > max_parameters:
            yield Group(parameters=taken, weight_decay=group.weight_decay)
            taken = []
        taken.append(parameter)
    yield Group(parameters=taken, weight_decay=group.weight_decay)
