"""How memory grows with the size of the input: measured at some sizes, a quadratic of the length between."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from isthmus.model.stage import InputSize

_NUM_TERMS: Final = 3


@dataclass(slots=True)
class Growth:
    """Bytes as a constant, so many per token and so many per pair of tokens, fitted to what was measured.

    Fewer than three sizes tell no quadratic: then what a larger size has taken bounds a smaller one.
    """

    _measured: dict[InputSize, float] = field(default_factory=dict)
    _factors: "NDArray[np.float64] | None" = None
    _slack: float = 0.0

    def add(self, size: InputSize, num_bytes: float) -> None:
        """Learn what was measured at a size."""
        self._measured[size] = max(num_bytes, self._measured.get(size, 0.0))
        if len(self._measured) >= _NUM_TERMS:
            self._fit()

    def at(self, size: InputSize) -> float:
        """The bytes at a size, rather too many than too few."""
        if size in self._measured:
            return self._measured[size]
        if self._factors is not None:
            return max(0.0, float(_terms(size) @ self._factors) + self._slack)
        covering = [value for one, value in self._measured.items() if one.covers(size)]
        return min(covering) if covering else self._scaled(size)

    def _fit(self) -> None:
        terms = np.stack([_terms(size) for size in self._measured])
        values = np.array(list(self._measured.values()))
        scale = np.abs(terms).max(axis=0)
        self._factors = np.linalg.lstsq(terms / scale, values, rcond=None)[0] / scale
        self._slack = max(0.0, float((values - terms @ self._factors).max()))

    def _scaled(self, size: InputSize) -> float:
        """Beyond all that was measured: as if all of it grew with the pairs."""
        return max((value * _ratio(size, one) for one, value in self._measured.items()), default=0.0)


def _terms(size: InputSize) -> "NDArray[np.float64]":
    return np.array([1.0, size.num_tokens, size.num_pairs])


def _ratio(size: InputSize, measured: InputSize) -> float:
    return max(size.num_tokens / measured.num_tokens, size.num_pairs / measured.num_pairs, 1.0)
