"""Which rank of each stage takes which micro-batch: a fixed function of the step, known to every rank.

Nobody has to ask: whoever knows how fast the ranks were planned to be knows where each micro-batch goes. Each
goes to the rank that would be done with it first, so the step ends as early as it can with whole
micro-batches. Ranks of equal speed take turns, and another one begins in every step, so that what is left
over does not fall to the same ranks again and again.
"""

import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def route(*, speeds: Sequence[float], num_microbatches: int, step: int) -> tuple[int, ...]:
    """The rank of each micro-batch of a step at one stage; a rank's speed is its micro-batches per time."""
    if not speeds or min(speeds) <= 0:
        raise ValueError(f"ranks of speeds {list(speeds)}")
    num_ranks = len(speeds)
    queue = [(1 / speed, (rank - step) % num_ranks, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(queue)
    counts = [1] * num_ranks
    ranks = []
    for _ in range(num_microbatches):
        _, turn, rank = queue[0]
        ranks.append(rank)
        counts[rank] += 1
        heapq.heapreplace(queue, (counts[rank] / speeds[rank], turn, rank))
    return tuple(ranks)


def shares(ranks: Sequence[int], *, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The micro-batches of each rank, in ascending order, from the rank of each micro-batch."""
    taken: list[list[int]] = [[] for _ in range(num_ranks)]
    for microbatch, rank in enumerate(ranks):
        taken[rank].append(microbatch)
    return tuple(tuple(one) for one in taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The ways of all micro-batches of a run; `speeds` are of the ranks of each stage.

    All evaluations go the same ways, and their second, plain, round those of the first.
    """

    speeds: tuple[tuple[float, ...], ...]
    num_microbatches: int
    num_validation_microbatches: int = 0

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """How many ranks each stage has."""
        return tuple(len(one) for one in self.speeds)

    def rank(self, stage: int, *, step: int, microbatch: int, is_evaluation: bool) -> int:
        """The rank of a stage that takes a micro-batch."""
        ranks = self._ranks(stage, step, is_evaluation)
        return ranks[microbatch % len(ranks)]

    def share(self, stage: int, rank: int, *, step: int, is_evaluation: bool = False) -> tuple[int, ...]:
        """The micro-batches of a step, or of an evaluation, that a rank takes."""
        ranks = self._ranks(stage, step, is_evaluation)
        return tuple(number for number, taker in enumerate(ranks) if taker == rank)

    def peers(self, stage: int, rank: int, *, neighbour: int) -> tuple[int, ...]:
        """The ranks of a neighbouring stage that a rank ever speaks to; leaders always do."""
        found = {0} if rank == 0 else set()
        for own, other in self._ways(stage, neighbour):
            found |= {there for here, there in zip(own, other, strict=True) if here == rank}
        return tuple(sorted(found))

    def _ways(self, stage: int, neighbour: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        # Routes come again when every rank of both stages has been the first.
        period = math.lcm(len(self.speeds[stage]), len(self.speeds[neighbour]))
        for step in range(period):
            yield self._ranks(stage, step, False), self._ranks(neighbour, step, False)
        if self.num_validation_microbatches:
            yield self._ranks(stage, 0, True), self._ranks(neighbour, 0, True)

    def _ranks(self, stage: int, step: int, is_evaluation: bool) -> tuple[int, ...]:
        speeds = self.speeds[stage]
        if is_evaluation:
            return _route(speeds, self.num_validation_microbatches, 0)
        return _route(speeds, self.num_microbatches, step % len(speeds))


@functools.lru_cache(maxsize=1024)
def _route(speeds: tuple[float, ...], num_microbatches: int, step: int) -> tuple[int, ...]:
    return route(speeds=speeds, num_microbatches=num_microbatches, step=step)
