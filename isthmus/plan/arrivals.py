"""What has come to a stage: each thing once, also before its turn, never after."""

from isthmus.plan.types import Arrived, Pass, ScheduleError, Started

Turn = tuple[int, bool]


def turn(event: Started | Arrived) -> Turn:
    """The place of its step in the run; the evaluation of a step comes before its training."""
    is_evaluation = event.evaluation if isinstance(event, Started) else event.kind is Pass.EVALUATION
    return event.step, not is_evaluation


class Arrivals:
    """Activations and gradients that have come, kept until their turn ends."""

    def __init__(self) -> None:
        self._held: set[Arrived] = set()
        self._open: dict[Turn, frozenset[int]] = {}
        self._newest: Turn = (-1, True)

    def __contains__(self, arrived: Arrived) -> bool:
        return arrived in self._held

    def open(self, started: Started) -> None:
        """Learn the micro-batches of a turn; what has come before it must fit."""
        microbatches = started.microbatches
        if turn(started) <= self._newest:
            raise ScheduleError(f"{started} is out of turn")
        if list(microbatches) != sorted(set(microbatches)) or min(microbatches, default=0) < 0:
            raise ScheduleError(f"{started} has micro-batches that do not ascend from 0")
        self._newest = turn(started)
        self._open[self._newest] = frozenset(microbatches)
        for arrived in self._held:
            self._check(arrived)

    def hold(self, arrived: Arrived) -> None:
        """Keep what has come."""
        if arrived in self._held:
            raise ScheduleError(f"{arrived} has come before")
        self._check(arrived)
        self._held.add(arrived)

    def close(self, started: Started) -> None:
        """End a turn: nothing more may come for it."""
        ended = turn(started)
        del self._open[ended]
        self._held = {arrived for arrived in self._held if turn(arrived) != ended}

    def _check(self, arrived: Arrived) -> None:
        place = turn(arrived)
        if place > self._newest:
            return
        if place not in self._open:
            raise ScheduleError(f"{arrived} belongs to a step that is over or never started here")
        if arrived.microbatch not in self._open[place]:
            raise ScheduleError(f"{arrived} is no micro-batch of this step here")
