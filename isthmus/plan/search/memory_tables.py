"""What every possible stage of a model keeps in memory, as tables over its first layer and its end."""

from dataclasses import dataclass

import numpy as np

from isthmus.plan.costs.bottlenecks import HalfCosts
from isthmus.plan.costs.memory import Savers, stages_memory
from isthmus.plan.costs.parts import ModelCosts
from isthmus.plan.costs.stages import Stages
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
        """Count the stages of a model, all at once; `up` and `down` lie at their cuts."""
        stages = Stages.every(costs.num_layers)
        ends = ((up, ~stages.are_first), (down, ~stages.are_last))
        halves = [(half, where) for half, where in ends if half is not None]
        found = stages_memory(costs, stages, window=1, savers=savers, halves=halves)
        standing, has_layers = found.standing_bytes, stages.starts < stages.stops
        return cls(
            empty=np.where(has_layers, standing + found.working, np.inf),
            each=np.where(has_layers, np.maximum(1.0, found.activations), np.inf),
            update=np.where(has_layers, standing + found.update, np.inf),
        )

    def held(self, room_bytes: int) -> Table:
        """Micro-batches in flight that fit into the room."""
        with np.errstate(invalid="ignore"):
            fitting = np.floor((room_bytes - self.empty) / self.each)
        return np.where(np.isfinite(self.each) & (self.update <= room_bytes), np.maximum(fitting, 0.0), 0.0)
