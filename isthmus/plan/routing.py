"""Which rank of each stage takes which micro-batch: a fixed function of the step, known to every rank.

Nobody has to ask: whoever knows how fast the ranks were planned to be knows where each micro-batch goes. Each
goes to the rank that would be done with it first, so the step ends as early as it can with whole
micro-batches. Ranks of equal speed take turns, and another one begins in every step, so that what is left
over does not fall to the same ranks again and again.
"""

import heapq
from collections.abc import Sequence


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
