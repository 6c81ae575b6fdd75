"""Reading ahead on a thread, so that computing does not wait for data."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

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
