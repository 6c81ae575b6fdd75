"""An event loop whose timers keep to the microsecond, and an alarm that is set again and again."""

import asyncio
import select
import selectors
from collections.abc import Callable

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


class Alarm:
    """Calls `ring` in the running loop at the time that was set last."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._has_rung = False

    @property
    def due_s(self) -> float | None:
        """The time that was set last, by the loop's clock, though it may be over."""
        return None if self._timer is None else self._timer.when()

    def set(self, due_s: float | None) -> None:
        """Ring at this time instead, or not at all."""
        if due_s == self.due_s and not self._has_rung:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._has_rung = False
        self._timer = None if due_s is None else self._loop.call_at(due_s, self._fire)

    def _fire(self) -> None:
        self._has_rung = True
        self._ring()
