"""The rows of the comparison: what crosses the cut, and through which codecs."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Side(StrEnum):
    """Whose method a row is."""

    RAW = "raw"
    SEED = "seed"
    OURS = "ours"
    BOTTLENECK = "ours, trained"
    CONTROL = "control"
    """Not a method: it tells what a row's parameters are worth without its codec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way over the cut; `shrink` divides the width by a trained bottleneck, 0 for none."""

    name: str
    side: Side
    forward: str
    backward: str
    shrink: int = 0
    is_headline: bool = False

    @property
    def label(self) -> str:
        """The row in words, with the codecs of both directions."""
        codecs = self.forward if self.forward == self.backward else f"{self.forward} + {self.backward}"
        return f"bottleneck(d/{self.shrink}), {codecs}" if self.shrink else codecs

    @property
    def is_exact(self) -> bool:
        """Whether what crosses arrives as it is."""
        return self.forward == self.backward == "raw"


_INT8: Final = "int8(scale=tensor)"
_INT4: Final = "rotate | int4"
_INT4_BACK: Final = "rotate | int4(stochastic)"


def _svd(ratio: float) -> Row:
    return Row(name=f"svd{ratio}", side=Side.SEED, forward=f"svd({ratio}) | fp16", backward=_INT8)


def _bottleneck(name: str, shrink: int, *, bits: int = 4, is_headline: bool) -> Row:
    return Row(
        name=name,
        side=Side.BOTTLENECK,
        forward=f"rotate | int{bits}",
        backward=f"rotate | int{bits}(stochastic)",
        shrink=shrink,
        is_headline=is_headline,
    )


def _subspace(name: str, rank: int) -> Row:
    space = f"subspace({rank}, anchor=tokens)"
    return Row(name=name, side=Side.OURS, forward=f"{space} | int4", backward=f"{space} | int4(stochastic)")


_ALL: Final = (
    Row(name="raw", side=Side.RAW, forward="raw", backward="raw", is_headline=True),
    Row(name="fp16", side=Side.SEED, forward="fp16", backward=_INT8),
    _svd(0.8),
    _svd(0.6),
    _svd(0.4),
    _svd(0.2),
    Row(name="4x", side=Side.OURS, forward="rotate | int8", backward="rotate | int8"),
    Row(name="int4", side=Side.OURS, forward=f"center | {_INT4}", backward=_INT4_BACK),
    _bottleneck("7.5x", 2, bits=8, is_headline=True),
    _bottleneck("15x", 2, is_headline=False),
    _bottleneck("30x", 4, is_headline=True),
    _bottleneck("60x", 8, is_headline=True),
    _bottleneck("120x", 16, is_headline=True),
    Row(name="anchored", side=Side.CONTROL, forward="raw", backward="raw", shrink=1),
    Row(name="uncentred", side=Side.OURS, forward=_INT4, backward=_INT4_BACK),
    Row(name="int4-there", side=Side.OURS, forward=f"center | {_INT4}", backward="raw"),
    Row(name="int4-back", side=Side.OURS, forward="raw", backward=_INT4_BACK),
    _subspace("subspace128", 128),
    _subspace("subspace64", 64),
)
ROWS: Final[Mapping[str, Row]] = MappingProxyType({row.name: row for row in _ALL})
_EXTRA: Final = ("anchored", "uncentred", "int4-there", "int4-back", "subspace128", "subspace64")
"""What takes the rows apart, trained when asked for: "anchored" has the parameters of a bottleneck alone."""
MAIN_ROWS: Final = tuple(name for name in ROWS if name not in _EXTRA)
