"""Copies of the stages' state on their way to another cloud, behind all other traffic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from isthmus.plan.simulation.clockwork import Clock
from isthmus.plan.simulation.lines import Way, Ways

Note = Callable[[str, str, str, float, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Each stage's state goes to a neighbouring cloud after the first step that ends `every_s` later.

    It takes what messages leave of a line, and `share` of it at least. Of no bytes, it stays where it is.
    """

    every_s: float
    stage_bytes: tuple[int, ...]
    share: float = 0.1


@dataclass(slots=True, kw_only=True)
class _Copy:
    """The state from which a step begins, as of `taken_s`, and how many stages' parts are still under way."""

    taken_s: float
    num_missing: int


class Copies:
    """Knows from which step a run could go on without one of its clouds; step 0 needs no copy."""

    def __init__(
        self, clock: Clock, terms: Checkpointing | None, ways: Sequence[Ways], *, note: Note
    ) -> None:
        self._clock = clock
        self._terms = terms
        # Down to the next cloud; the last has only the one before it.
        self._ways: list[Way] = [one.down for one in ways] + [one.up for one in ways[-1:]]
        self._note = note
        self._taken_s = 0.0
        self._copies: dict[int, _Copy] = {}
        self.safe_step = 0
        self.safe_s = 0.0
        """When that step began."""

    def offer(self, stage: int, step: int) -> None:
        """Send this stage's state, from which the step begins, if the first stage finds it due."""
        if self._terms is None:
            return
        now_s = self._clock.now_s
        if stage == 0 and now_s >= self._taken_s + self._terms.every_s:
            self._taken_s = now_s
            self._copies[step] = _Copy(taken_s=now_s, num_missing=len(self._terms.stage_bytes))
        if step in self._copies:
            self._send(stage, step, self._terms.stage_bytes[stage])

    def _send(self, stage: int, step: int, num_bytes: int) -> None:
        arrived = partial(self._arrived, stage, step, num_bytes, self._clock.now_s)
        if self._ways and num_bytes:
            self._ways[stage].flow.send_in_background(num_bytes, arrived=arrived)
        else:
            self._clock.at(self._clock.now_s, arrived)

    def _arrived(self, stage: int, step: int, num_bytes: int, start_s: float) -> None:
        if self._ways and num_bytes:
            self._note(self._ways[stage].track, "save", f"save {step}", start_s, num_bytes)
        copy = self._copies[step]
        copy.num_missing -= 1
        if not copy.num_missing and step > self.safe_step:
            self.safe_step, self.safe_s = step, copy.taken_s
