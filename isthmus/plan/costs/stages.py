"""Figures of one stage of a model or of all that it can have, as arrays that one formula serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Figures = NDArray[np.float64]
"""One for each stage: whole numbers, which are exact up to 9 PB and never overflow."""
Mask = NDArray[np.bool_]
"""Whether something holds, for each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Some stages of a model: those that hold the layers from each of `starts` to before each of `stops`.

    Both broadcast. Figures are given for each part of the model: embedding, layers, head.
    """

    num_layers: int
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def one(cls, layers: range, *, num_layers: int) -> Self:
        """The stage that holds these layers."""
        return cls(num_layers=num_layers, starts=np.array(layers.start), stops=np.array(layers.stop))

    @classmethod
    def every(cls, num_layers: int) -> Self:
        """All that there can be, as a table (a, b); where a is not before b its figures mean nothing."""
        ends = np.arange(num_layers + 1)
        return cls(num_layers=num_layers, starts=ends[:, None], stops=ends[None, :])

    @property
    def are_first(self) -> Mask:
        """Those with the embedding."""
        return np.asarray(self.starts == 0)

    @property
    def are_last(self) -> Mask:
        """Those with the head."""
        return np.asarray(self.stops == self.num_layers)

    @property
    def are_whole(self) -> Mask:
        """Those with all of the model."""
        return self.are_first & self.are_last

    def total(self, figures: Sequence[float]) -> Figures:
        """The sum over the parts of each stage."""
        sums = np.cumsum(np.array([0, *figures], dtype=np.float64))
        begin, end = self._bounds
        return np.asarray(sums[end] - sums[begin])

    def largest(self, figures: Sequence[float]) -> Figures:
        """The largest of the parts of each stage, by asking which of the few kinds of parts it has."""
        figures, found = [*map(float, figures)], np.full((), -np.inf)
        for figure in sorted(set(figures)):
            found = np.where(self.total([one == figure for one in figures]) > 0, figure, found)
        return found

    def peak(self, kept: Sequence[float], above: Sequence[float]) -> Figures:
        """The highest point of each stage: what its parts up to one keep, and what that one has above it."""
        sums = np.cumsum(np.array([0, *kept], dtype=np.float64))
        points = sums[1:] + np.array(above, dtype=np.float64)
        # A row for each part that a stage may begin with: the highest point up to each part from there on.
        places = np.arange(len(points))
        rows = np.where(places[None, :] >= places[:, None], points[None, :], -np.inf)
        highest = np.maximum.accumulate(rows, axis=1)
        begin, end = self._bounds
        return np.asarray(highest[np.minimum(begin, len(points) - 1), end - 1] - sums[begin])

    @property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first part of each stage, and the one behind its last."""
        begin = np.where(self.are_first, 0, self.starts + 1)
        return begin, np.where(self.are_last, self.num_layers + 2, self.stops + 1)


def given(where: Mask, figure: float) -> Figures:
    """This figure at stages where something holds, and 0 elsewhere."""
    return np.where(where, float(figure), 0.0)
