"""The difference of a row to raw over paired seeds, with its interval."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_CONFIDENCE: Final = 0.95
_MAX_EXACT_SEEDS: Final = 6
_NUM_RESAMPLES: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean over seeds of row minus raw, and the ends of its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    num_seeds: int


def paired_difference(row: Mapping[int, float], raw: Mapping[int, float]) -> Difference | None:
    """The difference over the seeds that both have; None if they share none."""
    seeds = sorted(row.keys() & raw.keys())
    if not seeds:
        return None
    differences = [row[seed] - raw[seed] for seed in seeds]
    means = _resampled_means(differences)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return Difference(
        mean=float(np.mean(differences)), low=float(low), high=float(high), num_seeds=len(seeds)
    )


def _resampled_means(values: Sequence[float]) -> np.ndarray:
    """Means of all ways to draw as many seeds again; of many random ones where there are too many ways."""
    if len(values) <= _MAX_EXACT_SEEDS:
        draws = np.array(list(itertools.product(values, repeat=len(values))))
    else:
        draws = np.random.default_rng(0).choice(np.array(values), (_NUM_RESAMPLES, len(values)))
    means: np.ndarray = draws.mean(1)
    return means
