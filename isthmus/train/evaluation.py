"""What an evaluation gives: the losses of its rounds at every rank of the last stage, put together."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from isthmus.train.crossing.words import Evaluated
from isthmus.train.ranks.world import World

Round = tuple[Sequence[float], int, int]
"""Of one rank: the loss of each micro-batch, correct targets, and all targets."""


def put_together(step: int, rounds: Sequence[Round], world: World) -> Iterator[Evaluated]:
    """The result of each round over all ranks, at their leader; a second round is plain."""
    ranks = world.gather(rounds)
    for number, found in enumerate(zip(*ranks, strict=True) if ranks else ()):
        losses, num_correct, num_targets = zip(*found, strict=True)
        yield Evaluated(
            step=step,
            loss_sum=math.fsum(chain(*losses)),
            num_correct=sum(num_correct),
            num_targets=sum(num_targets),
            is_plain=number > 0,
        )
