"""When to save: as rarely as the bound on lost work allows, and never more often than the cap on overhead.

A save stops a member for its stall, and is written beside the computation. With CheckFreq's rule the next one
waits until the former is written, and until the stall is a small enough share of the time in between:

    shortest = max(time of a save − stall, stall / overhead)
    interval = max(bound − time of a save, shortest)

All times are those of the slowest member, as measured at the last save.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from isthmus.plan.types import Count, Facts, NotStored, ScheduleError, Seconds, Stored
from isthmus.units import format_duration

# A note says nothing new before the interval or the share has changed by so much.
_TELLING: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving(Facts):
    """How saves go at some members: the slowest last one, and the newest step that all of them have saved."""

    save_s: Seconds = 0.0
    stall_s: Seconds = 0.0
    is_under_way: bool = False
    safe_step: Count = 0


def slowest(every: Iterable[Saving]) -> Saving:
    """What holds for all of several members."""
    found = tuple(every)
    return Saving(
        save_s=max(one.save_s for one in found),
        stall_s=max(one.stall_s for one in found),
        is_under_way=any(one.is_under_way for one in found),
        safe_step=min(one.safe_step for one in found),
    )


@dataclass(slots=True)
class Saves:
    """The saves of one member."""

    under_way: set[int] = field(default_factory=set)
    safe_step: int = 0
    _last: Stored = field(default_factory=Stored)

    def end(self, step: int, facts: Facts | None) -> None:
        """Take in that a step is in the store, or that it cannot be written."""
        if step not in self.under_way:
            raise ScheduleError(f"step {step} is reported as saved but was not being saved")
        self.under_way.remove(step)
        if not isinstance(facts, NotStored):
            self.safe_step = max(self.safe_step, step)
        if isinstance(facts, Stored):
            self._last = facts

    @property
    def facts(self) -> Saving:
        return Saving(
            save_s=self._last.save_s,
            stall_s=self._last.stall_s,
            is_under_way=bool(self.under_way),
            safe_step=self.safe_step,
        )


@dataclass(slots=True)
class SaveRule:
    """Decides at the end of each step whether to save; `every_s` bounds the work that may be lost."""

    every_s: float | None
    overhead: float
    """The share of the time that saves may take."""
    _begun_s: float = 0.0
    _told: tuple[float, float] = (0.0, 0.0)

    def begin(self, now_s: float) -> None:
        """Count the time to the next save from here."""
        self._begun_s = now_s

    def is_due(self, now_s: float, saving: Saving) -> bool:
        """Whether to save now; never while a member still writes the former save."""
        if self.every_s is None or saving.is_under_way:
            return False
        return now_s - self._begun_s >= self.interval_s(saving)

    def interval_s(self, saving: Saving) -> float:
        """The time from one save to the next; 0 where nothing bounds it."""
        shortest_s = max(saving.save_s - saving.stall_s, saving.stall_s / self.overhead)
        return max((self.every_s or 0.0) - saving.save_s, shortest_s)

    def note(self, saving: Saving) -> str | None:
        """What the run's log says of the interval, when it has changed."""
        every_s, interval_s = self.every_s, self.interval_s(saving)
        if every_s is None or not saving.save_s:
            return None
        share = saving.stall_s / max(interval_s, saving.stall_s)
        told_s, told_share = self._told
        if told_s / _TELLING <= interval_s <= told_s * _TELLING and share <= told_share * _TELLING:
            return None
        self._told = interval_s, share
        lost_s = interval_s + saving.save_s
        why = ""
        if lost_s > every_s * (1 + self.overhead):
            why = (
                f"; more than checkpoint.every = {format_duration(every_s)}, or saves would take more than "
                f"{self.overhead:.2g} of the time: raise checkpoint.overhead, or name a faster store"
            )
        return (
            f"saves every {format_duration(round(interval_s, 3))}: one stops the step for "
            f"{format_duration(round(saving.stall_s, 4))} ({share:.2%} of the time) and is written in "
            f"{format_duration(round(saving.save_s, 3))}; at most the work of "
            f"{format_duration(round(lost_s, 3))} and a step is lost{why}"
        )
