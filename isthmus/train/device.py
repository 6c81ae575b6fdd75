"""The device that a cloud computes on, and the way of tensors between it and the host."""

import torch
from torch import Tensor

from isthmus.errors import UserError


class Device:
    """A device through `torch.accelerator`, or the CPU; copies run beside the computation, not behind it."""

    def __init__(self, kind: str = "auto") -> None:
        self.torch_device = _find(kind)
        self.is_accelerator = self.torch_device.type != "cpu"
        self._copies = torch.Stream(device=self.torch_device) if self.is_accelerator else None

    def synchronize(self) -> None:
        """Wait until all that was started has been computed, so that spans tell the truth."""
        if self.is_accelerator:
            torch.accelerator.synchronize(self.torch_device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in pinned host memory; the tensor must have been computed. On the CPU, the tensor itself."""
        if self._copies is None:
            return tensor
        with self._copies:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        self._copies.synchronize()
        return host

    def from_host(self, tensor: Tensor) -> Tensor:
        """A copy on the device, ready for use. On the CPU, the tensor itself."""
        if self._copies is None:
            return tensor
        with self._copies:
            copy = tensor.pin_memory().to(self.torch_device, non_blocking=True)
        self._copies.synchronize()
        return copy

    def peak_bytes(self) -> int | None:
        """The most memory that tensors have taken so far; unknown on the CPU."""
        if not self.is_accelerator:
            return None
        module = torch.get_device_module(self.torch_device)
        return int(module.max_memory_allocated(self.torch_device))


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
