"""What every possible stage of a model keeps in memory, as tables over its first layer and its end."""

from dataclasses import dataclass

import numpy as np

from isthmus.plan.costs.bottlenecks import HalfCosts
from isthmus.plan.costs.memory import Memory, Savers, stage_memory
from isthmus.plan.costs.parts import ModelCosts
from isthmus.plan.search.walks import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTables:
    """Bytes (a, b) of any stage: with nothing in flight, what each micro-batch adds, and at the update."""

    empty: Table
    each: Table
    update: Table

    @classmethod
    def of(
        cls, costs: ModelCosts, savers: Savers, *, up: HalfCosts | None = None, down: HalfCosts | None = None
    ) -> "MemoryTables":
        """Count the stages of a model, each kind of them once; `up` and `down` lie at their cuts."""
        size = costs.num_layers + 1
        tables = np.full((3, size, size), np.inf)
        known: dict[object, tuple[float, float, float]] = {}
        kinds = {id(layer): kind for kind, layer in enumerate(costs.layers)}
        sequence = [kinds[id(layer)] for layer in costs.layers]
        for start in range(size - 1):
            counts: dict[int, int] = {}
            for stop in range(start + 1, size):
                counts[sequence[stop - 1]] = counts.get(sequence[stop - 1], 0) + 1
                key = (start == 0, stop == size - 1, sequence[stop - 1], *sorted(counts.items()))
                if key not in known:
                    ends = (up if start > 0 else None, down if stop < size - 1 else None)
                    halves = [one for one in ends if one is not None]
                    layers = range(start, stop)
                    known[key] = _affine(stage_memory(costs, layers, window=1, savers=savers, halves=halves))
                tables[:, start, stop] = known[key]
        return cls(empty=tables[0], each=tables[1], update=tables[2])

    def held(self, room_bytes: int) -> Table:
        """Micro-batches in flight that fit into the room."""
        with np.errstate(invalid="ignore"):
            fitting = np.floor((room_bytes - self.empty) / self.each)
        return np.where(np.isfinite(self.each) & (self.update <= room_bytes), np.maximum(fitting, 0.0), 0.0)


def _affine(memory: Memory) -> tuple[float, float, float]:
    standing = memory.standing_bytes
    return standing + memory.working, max(1, memory.activations), standing + memory.update
