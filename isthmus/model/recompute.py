"""Which layers compute their activations again in the backward pass instead of keeping them.

A stage asks for each micro-batch as its forward begins. The answer is a stay: what the micro-batch may keep
in memory until the end of its backward.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from isthmus.model.meter import Meter


@dataclass(frozen=True, slots=True, order=True)
class InputSize:
    """The shape of a micro-batch, padding included."""

    num_sequences: int
    length: int

    @property
    def num_tokens(self) -> int:
        """What most activations grow with."""
        return self.num_sequences * self.length

    @property
    def num_pairs(self) -> int:
        """What scores of attention grow with, where they are kept."""
        return self.num_sequences * self.length**2

    def covers(self, other: "InputSize") -> bool:
        """Whether nothing takes more memory at the other size than at this one."""
        return self.num_sequences >= other.num_sequences and self.length >= other.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """One micro-batch in the memory of a stage, from its forward to the end of its backward."""

    recomputed: frozenset[int] = frozenset()
    """Layers, by their number in the model, that compute again."""
    meter: Meter | None = None
    """Measures this forward, where that is wanted."""
    measured: Callable[[Meter], None] = field(default=lambda _: None)
    """To be called with the meter when the forward has ended."""
    end: Callable[[], None] = field(default=lambda: None)
    """To be called when the backward has ended."""


class Recompute(Protocol):
    """Chooses for each micro-batch."""

    def begin(self, size: InputSize, *, window: int) -> Stay:
        """Let a micro-batch in, where at most `window` of them are in flight at a time."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same layers whatever comes."""

    layers: frozenset[int] = frozenset()

    def begin(self, size: InputSize, *, window: int) -> Stay:  # noqa: ARG002 a budget does
        """Let a micro-batch in."""
        return Stay(recomputed=self.layers)
