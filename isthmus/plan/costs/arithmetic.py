"""How a stage computes: the precision of its products, the type of its residual stream, and where it runs."""

import enum
from dataclasses import dataclass
from typing import Final

WIDE_BYTES: Final = 4
"""Of one element in float32."""


class Precision(enum.Enum):
    """Of the computation; weights are float32 in either."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Where and how exactly a stage computes, which decides what its operations keep."""

    precision: Precision = Precision.FLOAT32
    on_accelerator: bool = True
    is_gathered: bool = False
    """Whether weights are gathered from several ranks, in the precision of the computation."""

    @property
    def element_bytes(self) -> int:
        """Of what matrix products read and give."""
        return WIDE_BYTES if self.precision is Precision.FLOAT32 else 2

    @property
    def stream_bytes(self) -> int:
        """Of an element of the residual stream, and of the weights that are multiplied with."""
        return self.element_bytes if self.is_gathered else WIDE_BYTES

    @property
    def is_mixed(self) -> bool:
        """Whether weights and residual stream are wider than what is multiplied."""
        return self.element_bytes < self.stream_bytes
