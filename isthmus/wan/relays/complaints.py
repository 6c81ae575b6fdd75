"""A complaint that comes again and again is told once, and then ever more rarely, with how often it came."""

import time
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_WAIT_S = 60.0
_MAX_WAIT_S = 3600.0
# Who tries again does so within seconds; what has rested for longer is news.
_REST_S = 30.0
_MAX_NUM_KEPT = 1024


@dataclass(slots=True)
class _Told:
    told_s: float
    heard_s: float
    wait_s: float = _FIRST_WAIT_S
    num_untold: int = 0


class Complaints:
    """Remembers what was told, so that a peer that tries every second does not fill the log."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[tuple[str, str], _Told] = {}

    def tell(self, who: str, what: str) -> str | None:
        """The complaint as it should be told now, or None where it was told lately."""
        now_s, key = self._clock(), (who, what)
        known = self._told.get(key)
        if known is None or now_s - known.heard_s > _REST_S:
            self._remember(key, _Told(told_s=now_s, heard_s=now_s))
            return what
        known.heard_s = now_s
        known.num_untold += 1
        if now_s - known.told_s < known.wait_s:
            return None
        words = f"{what} ({known.num_untold} times in {now_s - known.told_s:.0f} s)"
        known.told_s, known.num_untold = now_s, 0
        known.wait_s = min(2 * known.wait_s, _MAX_WAIT_S)
        return words

    def _remember(self, key: tuple[str, str], told: _Told) -> None:
        # Strangers choose what they say, so the oldest is forgotten.
        self._told.pop(key, None)
        if len(self._told) >= _MAX_NUM_KEPT:
            del self._told[next(iter(self._told))]
        self._told[key] = told
