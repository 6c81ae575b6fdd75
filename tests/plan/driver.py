"""A driver on a virtual clock: stages that compute for a while, joined by duplex links."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from isthmus.plan.types import Action, Arrived, Done, Event, Pass, Scheduler, Send

MAX_NUM_EVENTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """How long an action takes at a stage; what is sent occupies the line, then travels."""

    compute_s: Callable[[int, Action], float]
    serialise_s: Callable[[int, Send], float]
    latency_s: Callable[[int, Send], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event at one stage, and the actions that answered it."""

    at_s: float
    stage: int
    event: Event
    actions: tuple[Action, ...]


class Driver:
    """Feeds events in the order of their times until nothing is left to happen."""

    def __init__(self, schedulers: Sequence[Scheduler], costs: Costs) -> None:
        self._schedulers = schedulers
        self._costs = costs
        self._pending: list[tuple[float, int, int, Event]] = []
        self._number = count()
        self._line_free_s: dict[tuple[int, bool], float] = {}

    def post(self, at_s: float, stage: int, event: Event) -> None:
        heapq.heappush(self._pending, (at_s, next(self._number), stage, event))

    def run(self) -> list[Entry]:
        log: list[Entry] = []
        while self._pending:
            assert len(log) < MAX_NUM_EVENTS
            at_s, _, stage, event = heapq.heappop(self._pending)
            actions = self._schedulers[stage].on(event)
            log.append(Entry(at_s=at_s, stage=stage, event=event, actions=actions))
            for action in actions:
                self._execute(at_s, stage, action)
        return log

    def _execute(self, at_s: float, stage: int, action: Action) -> None:
        if isinstance(action, Send):
            self._transfer(at_s, stage, action)
        else:
            self.post(at_s + self._costs.compute_s(stage, action), stage, Done(action=action))

    def _transfer(self, at_s: float, stage: int, send: Send) -> None:
        is_gradient = send.kind is Pass.BACKWARD
        line = (stage, is_gradient)
        sent_s = max(at_s, self._line_free_s.get(line, 0.0)) + self._costs.serialise_s(stage, send)
        self._line_free_s[line] = sent_s
        self.post(sent_s, stage, Done(action=send))
        arrived = Arrived(kind=send.kind, step=send.step, microbatch=send.microbatch)
        arrives_s = sent_s + self._costs.latency_s(stage, send)
        self.post(arrives_s, stage - 1 if is_gradient else stage + 1, arrived)
