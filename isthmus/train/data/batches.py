"""Makes the micro-batches of a step from samples, with the cursor behind it, ahead on a thread."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.model.heads import IGNORED, Head
from isthmus.model.stage import Batch
from isthmus.train.data.samples import Cursor, Integers, Order, Pick, Sample, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a step is divided into micro-batches, of so many sequences each."""

    num_microbatches: int
    num_sequences: int

    @property
    def step_sequences(self) -> int:
        """How many sequences are read in a step."""
        return self.num_microbatches * self.num_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """A rank's micro-batches of one step, and where the next one goes on."""

    microbatches: tuple[Batch, ...]
    num_targets: int
    """Labels that count in all of them: the step's loss is the mean over those of all ranks."""
    cursor: Cursor


def divide_batch(*, batch_tokens: int, sequence_length: int, num_microbatches: int) -> Layout:
    """The layout of a step of so many tokens, which must divide evenly."""
    unit = sequence_length * num_microbatches
    if batch_tokens % unit:
        parts = [f"{num_microbatches} micro-batches", f"sequences of {sequence_length} tokens"]
        near = max(unit, round(batch_tokens / unit) * unit)
        raise UserError(
            f"a batch of {batch_tokens} tokens cannot be divided into {' × '.join(parts)}",
            hint=f"set train.batch_tokens to a multiple of {unit}, such as {near}",
        )
    return Layout(num_microbatches=num_microbatches, num_sequences=batch_tokens // unit)


def check_enough(samples: Samples, layout: Layout) -> None:
    """Refuse data that cannot fill one step."""
    if len(samples) < layout.step_sequences:
        raise UserError(
            f"the data has {len(samples)} sequences to train on, but one step reads {layout.step_sequences}",
            hint="give more data, or lower train.batch_tokens or data.sequence_length",
        )


def read_steps(
    samples: Samples,
    *,
    order: Order,
    layout: Layout,
    head: Head,
    pad_id: int,
    cursor: Cursor,
    share: Callable[[int], Container[int]] | None = None,
    first_step: int = 0,
) -> Iterator[StepBatches]:
    """Steps without end from the cursor on; of each only the micro-batches in this rank's share, if given."""
    for step in itertools.count(first_step):
        wanted = range(layout.num_microbatches) if share is None else share(step)
        microbatches = []
        for number in range(layout.num_microbatches):
            picks, cursor = order.take(cursor, layout.num_sequences)
            if number in wanted:
                own = [samples.read(pick) for pick in picks]
                microbatches.append(collate(own, head=head, pad_id=pad_id))
        yield StepBatches(
            microbatches=tuple(microbatches),
            num_targets=sum(batch.num_targets for batch in microbatches),
            cursor=cursor,
        )


def read_once(samples: Samples, *, num_sequences: int, head: Head, pad_id: int) -> Iterator[Batch]:
    """All samples in their own order, the same each time; the last micro-batch may be smaller."""
    for start in range(0, len(samples), num_sequences):
        indices = range(start, min(start + num_sequences, len(samples)))
        own = [samples.read(Pick(epoch=0, index=index)) for index in indices]
        yield collate(own, head=head, pad_id=pad_id)


def collate(samples: Sequence[Sample], *, head: Head, pad_id: int) -> Batch:
    """One micro-batch, padded on the right up to its longest sequence."""
    lengths = [len(sample.ids) for sample in samples]
    is_padded = min(lengths) < max(lengths)
    labels = _pad([sample.labels for sample in samples], IGNORED)
    types = [sample.token_types for sample in samples if sample.token_types is not None]
    return Batch(
        ids=_pad([sample.ids for sample in samples], pad_id),
        num_targets=head.num_targets(labels),
        mask=_mask(lengths) if is_padded else None,
        token_type_ids=_pad(types, 0) if types else None,
        labels=labels,
    )


def _pad(rows: Sequence[Integers], fill: int) -> Tensor:
    """Rows of numbers side by side, or single numbers as one row."""
    if rows[0].ndim == 0:
        return torch.tensor([int(row) for row in rows])
    padded = torch.full((len(rows), max(map(len, rows))), fill, dtype=torch.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = torch.from_numpy(row.astype("int64"))
    return padded


def _mask(lengths: Sequence[int]) -> Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def without_targets(batch: Batch) -> Batch:
    """The same with no label that counts."""
    labels = None if batch.labels is None else torch.full_like(batch.labels, IGNORED)
    return replace(batch, labels=labels, num_targets=0)


T = TypeVar("T")


# Shorter waits are those of any thread for another.
_LEAST_WAIT_S: Final = 0.001
_NUM_CALM: Final = 64


class Prefetch(Iterator[T], Generic[T]):
    """The items of an iterator, a bounded number of them made ahead; its errors are raised here, in turn.

    Twice as many are made ahead after each wait for one, up to `max_depth`: a source that is slow now and
    then is evened out. After many items without a wait it is one less, down to `depth`.
    """

    def __init__(self, items: Iterator[T], *, depth: int, max_depth: int | None = None) -> None:
        self._items = items
        self._least = self.depth = depth
        """How many items are made ahead now."""
        self._most = max(depth, max_depth or depth)
        self._num_calm = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[T]] = deque(self._start() for _ in range(depth))

    def __next__(self) -> T:
        if not self._ahead:
            raise ValueError("a prefetch was read after its end")
        asked_s = time.monotonic()
        # What ends the items stays in front, to be met again by whoever asks again.
        item = self._ahead[0].result()
        self._ahead.popleft()
        self._adapt(time.monotonic() - asked_s)
        while len(self._ahead) < self.depth:
            self._ahead.append(self._start())
        return item

    def _adapt(self, waited_s: float) -> None:
        self._num_calm += 1
        if waited_s > _LEAST_WAIT_S:
            self.depth, self._num_calm = min(2 * self.depth, self._most), 0
        elif self._num_calm == _NUM_CALM:
            self.depth, self._num_calm = max(self.depth - 1, self._least), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, after the item it is at."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def _start(self) -> "Future[T]":
        return self._thread.submit(next, self._items)
