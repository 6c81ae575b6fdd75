"""An event loop whose timers keep to the microsecond."""

import asyncio
import select
import selectors

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
