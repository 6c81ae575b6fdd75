"""Random numbers that no cut changes: each depends on the seed and on the place where it is drawn.

Dropout is drawn for an `RngKey` and a layer, initial weights for the full name of a module.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RngKey:
    """The pass for which random numbers are drawn: a micro-batch of a step of a run."""

    seed: int
    step: int
    microbatch: int

    def seed_place(self, place: str, device: torch.device) -> None:
        """Start the device's generator, and the host's, for one place of the model."""
        seed_generators(seed_from("draw", self.seed, self.step, self.microbatch, place), device)


def seed_from(*parts: object) -> int:
    """A seed of 63 bits that depends on every part."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the host's generator and the device's; `torch.manual_seed` would go through all back ends."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators as they were found."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield
