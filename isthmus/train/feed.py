"""What the first stage reads while it trains: micro-batches step by step, and those of an evaluation."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from isthmus.model.boundary import Batch
from isthmus.train.batches import Layout
from isthmus.train.data import TrainingData
from isthmus.train.order import Cursor


class Feed:
    """The steps of a run from a cursor on, read ahead on a thread until it is closed."""

    def __init__(self, data: TrainingData, layout: Layout, *, cursor: Cursor | None = None) -> None:
        self._steps = data.steps(layout, cursor=cursor)
        self._validation = tuple(data.validation_batches(num_sequences=layout.num_sequences))
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
