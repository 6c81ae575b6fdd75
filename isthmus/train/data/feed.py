"""What the first stage reads while it trains: micro-batches step by step, and those of an evaluation."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from isthmus.model.stage import Batch
from isthmus.train.data.batches import Layout
from isthmus.train.data.order import Cursor
from isthmus.train.data.training_data import TrainingData


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What of the data one rank of the first stage reads."""

    training: Callable[[int], Container[int]]
    """Its micro-batches of a step."""
    validation: Container[int]


class Feed:
    """The steps of a run from a cursor on, read ahead on a thread until it is closed."""

    def __init__(
        self,
        data: TrainingData,
        layout: Layout,
        *,
        cursor: Cursor | None = None,
        share: Share | None = None,
        first_step: int = 0,
        num_in_step: int = 1,
    ) -> None:
        training = None if share is None else share.training
        self._steps = data.steps(layout, cursor=cursor, share=training, first_step=first_step)
        held_out = enumerate(
            data.validation_batches(num_sequences=layout.num_sequences, multiple_of=num_in_step)
        )
        self._validation = tuple(
            batch for number, batch in held_out if share is None or number in share.validation
        )
        self._cursor = cursor or Cursor()
        self._step: int | None = None

    @property
    def cursor(self) -> Cursor:
        """Where a run goes on that has taken all steps read so far."""
        return self._cursor

    def training(self, step: int) -> Sequence[Batch]:
        """The micro-batches of a step; steps are read one after the other, the first may have any number."""
        if self._step is not None and step != self._step + 1:
            raise ValueError(f"step {step} is read after step {self._step}")
        batches = next(self._steps)
        self._step, self._cursor = step, batches.cursor
        return batches.microbatches

    def validation(self) -> Sequence[Batch]:
        """The micro-batches of every evaluation; none where nothing is held out."""
        return self._validation

    def close(self) -> None:
        """End the thread."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
