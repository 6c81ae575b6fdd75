"""Reading ahead on a thread, so that computing does not wait for data."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T], Generic[T]):
    """The items of an iterator, a bounded number of them made ahead; its errors are raised here, in turn."""

    def __init__(self, items: Iterator[T], *, depth: int) -> None:
        self._items = items
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[T]] = deque(self._start() for _ in range(depth))

    def __next__(self) -> T:
        if not self._ahead:
            raise ValueError("a prefetch was read after its end")
        # What ends the items stays in front, to be met again by whoever asks again.
        item = self._ahead[0].result()
        self._ahead.popleft()
        self._ahead.append(self._start())
        return item

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
