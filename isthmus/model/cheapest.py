"""The cheapest set of layers that frees enough memory: a knapsack, solved exactly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

# Costs are rounded to this many steps of the dearest; layers of one kind, measured apart, then cost the same.
_NUM_COST_STEPS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What recomputing one layer frees, and what it costs in whole units of time."""

    layer: int
    freed_bytes: int
    cost: int


def whole_costs(durations_s: Mapping[int, float]) -> dict[int, int]:
    """The time of each layer in whole units, at least one."""
    dearest_s = max(durations_s.values(), default=0.0) or 1.0
    return {layer: max(1, round(_NUM_COST_STEPS * one / dearest_s)) for layer, one in durations_s.items()}


def cheapest(savings: Sequence[Saving], needed_bytes: int) -> frozenset[int]:
    """The layers that free at least so much at the least cost; all of them if even that is too little.

    Dynamic programming over the total cost: how much can be freed for it. Among equals the earlier layers
    are taken, whose activations would be kept for longest.
    """
    useful = [one for one in savings if one.freed_bytes > 0]
    if needed_bytes <= 0:
        return frozenset()
    if sum(one.freed_bytes for one in useful) < needed_bytes:
        return frozenset(one.layer for one in useful)
    most = sum(one.cost for one in useful)
    freed = np.full(most + 1, -1, dtype=np.int64)
    freed[0] = 0
    takes = np.zeros((len(useful), most + 1), dtype=bool)
    for row, one in enumerate(reversed(useful)):
        reached = freed[: most + 1 - one.cost]
        offered = np.where(reached >= 0, reached + one.freed_bytes, -1)
        better = offered >= np.maximum(freed[one.cost :], 0)
        takes[row, one.cost :] = better
        freed[one.cost :] = np.where(better, offered, freed[one.cost :])
    cost = int(np.argmax(freed >= needed_bytes))
    return _taken(list(reversed(useful)), takes, cost)


def _taken(
    savings: Sequence[Saving], takes: "np.ndarray[tuple[int, int], np.dtype[np.bool_]]", cost: int
) -> frozenset[int]:
    chosen = set()
    for row in range(len(savings) - 1, -1, -1):
        if takes[row, cost]:
            chosen.add(savings[row].layer)
            cost -= savings[row].cost
    return frozenset(chosen)
