"""How the first stage comes to the micro-batches of a turn."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from isthmus.events import WAITING_KIND, Span
from isthmus.model.boundary import Batch
from isthmus.plan.types import Arrived, Pass, Started
from isthmus.train.crossing.cache import Foresight
from isthmus.train.crossing.messages import Microbatch
from isthmus.train.ranks.world import World

# Shorter waits for data are not worth a word.
_LEAST_WAIT_S: Final = 0.001


class Source(Protocol):
    """Where the first stage gets its micro-batches from."""

    def training(self, step: int) -> Sequence[Batch]:
        """The micro-batches of a step."""

    def validation(self) -> Sequence[Batch]:
        """The micro-batches of every evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The micro-batches of a turn at this rank; targets and tokens are those of all ranks."""

    microbatches: Mapping[Arrived, Microbatch]
    num_targets: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads for one rank of the first stage; tells how long it waited, under the rank's track."""

    source: Source
    world: World
    track: str
    on_span: Callable[[Span], None]
    is_plain: Callable[[Arrived], bool]
    foresight: Foresight | None = None

    def read(self, turn: Started) -> Reading:
        """Wait for the micro-batches of a turn; an evaluation has them once in each of its rounds."""
        batches = self._batches(turn)
        own = (sum(batch.num_targets for batch in batches), sum(_num_tokens(batch) for batch in batches))
        num_targets, num_tokens = self.world.totals(own)
        kind = Pass.EVALUATION if turn.evaluation else Pass.FORWARD
        num_rounds = max(1, len(turn.microbatches) // max(1, len(batches)))
        microbatches = {}
        for number, batch in zip(turn.microbatches, [*batches] * num_rounds, strict=True):
            key = Arrived(kind=kind, step=turn.step, microbatch=number)
            held = self._held(key, batch)
            microbatches[key] = Microbatch(batch=batch, num_step_targets=num_targets, held=held)
        return Reading(microbatches=microbatches, num_targets=num_targets, num_tokens=num_tokens)

    def _batches(self, turn: Started) -> Sequence[Batch]:
        asked_s = time.time()
        batches = self.source.validation() if turn.evaluation else self.source.training(turn.step)
        now_s = time.time()
        if now_s - asked_s >= _LEAST_WAIT_S:
            name = f"data {turn.step}"
            self.on_span(Span(track=self.track, name=name, kind=WAITING_KIND, start_s=asked_s, end_s=now_s))
        return batches

    def _held(self, key: Arrived, batch: Batch) -> tuple[int, ...]:
        return () if self.foresight is None or self.is_plain(key) else self.foresight.held(batch)


def _num_tokens(batch: Batch) -> int:
    return batch.ids.numel() if batch.mask is None else int(batch.mask.sum())
