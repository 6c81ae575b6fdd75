"""Event loops: one on a thread of its own, and one whose timers keep to the microsecond."""

import asyncio
import select
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for threads that have no event loop."""

    def __init__(self, *, name: str = "isthmus-wan", loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine; the future holds its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called on the loop, soon; nothing happens once the loop has ended."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run a coroutine to its end."""
        return self.submit(coroutine).result(timeout_s)

    def close(self) -> None:
        """End the loop and its thread; whatever still runs is cancelled."""
        if self.loop.is_closed():
            return
        self.run(_cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


# The kernel may stretch a wait by a thousandth; a wait that ends early is only begun again.
_SHORTENED = 0.999


class PreciseSelector(selectors.EpollSelector):
    """Epoll that waits by `select`: epoll alone rounds each time-out up to a whole millisecond."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, at the latest after `timeout` seconds."""
        if timeout is not None and timeout > 0:
            ready, _, _ = select.select([self.fileno()], [], [], timeout * _SHORTENED)
            if not ready:
                return []
            timeout = 0
        return super().select(timeout)


def precise_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop whose timers are late by microseconds, not by up to a millisecond."""
    return asyncio.SelectorEventLoop(PreciseSelector())
