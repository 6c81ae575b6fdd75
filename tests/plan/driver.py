"""A driver on a virtual clock: members that compute for a while, and messages that take their time."""

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

from isthmus.plan.end_of_step import Read, Reduced, Round, Scored, Seen, Updated, Verdict
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.types import (
    Action,
    Arrived,
    Carried,
    Done,
    Event,
    Facts,
    Gathered,
    Member,
    Message,
    Ran,
    Run,
    Save,
    Saved,
    Send,
    Sent,
    Started,
    Stop,
    Work,
    WorkKind,
)

MAX_NUM_EVENTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long works and messages take; a message that is being sent occupies its line, then travels.

    With `keeps_order`, messages of one kind from one member to another arrive as they were sent.
    """

    work_s: Callable[[Member, Work], float]
    sending_s: Callable[[Message], float]
    travel_s: Callable[[Message], float]
    keeps_order: bool = False


def random_times(random: Random, *, keeps_order: bool = False, scales: tuple[float, ...] = (1.0,)) -> Times:
    """Times of which many are equal; without `keeps_order` messages overtake each other.

    Every member, and every pair of them, has one of the `scales`.
    """
    scale: defaultdict[object, float] = defaultdict(lambda: random.choice(scales))
    return Times(
        work_s=lambda member, _: scale[member] * random.choice((0.0, random.random())),
        sending_s=lambda message: scale[message.sender, message.to] * 0.3 * random.random(),
        travel_s=lambda message: scale[message.to] * random.choice((0.0, 1.0, 9.0)) * random.random(),
        keeps_order=keeps_order,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event at one member, and the actions that answered it."""

    at_s: float
    member: Member
    event: Event
    actions: tuple[Action, ...]


class Driver:
    """Feeds events in the order of their times until nothing is left to happen.

    A member that has stopped gets no more events, and what the link has not taken over from it is lost.
    """

    def __init__(self, pipeline: Pipeline, times: Times, *, random: Random | None = None) -> None:
        self.log: list[Entry] = []
        self.stops: dict[Member, Stop] = {}
        self.saved: defaultdict[Member, list[int]] = defaultdict(list)
        self._pipeline = pipeline
        self._times = times
        self._random = random or Random(0)
        self._schedulers = {member: PipelineScheduler(pipeline, member) for member in pipeline.members}
        self._pending: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        self._line_free_s: dict[tuple[Member, Member], float] = {}
        self._arrival_s: defaultdict[tuple[object, ...], float] = defaultdict(float)
        self._meetings: defaultdict[tuple[Member, ...], dict[Member, Work]] = defaultdict(dict)

    def post(self, at_s: float, member: Member, event: Event) -> None:
        self._at(at_s, partial(self._feed, member, event))

    def start(self, step: int = 0) -> None:
        for member in self._pipeline.members:
            self.post(0.0, member, Started(step))

    def run(self) -> list[Entry]:
        while self._pending:
            assert len(self.log) < MAX_NUM_EVENTS
            at_s, _, call = heapq.heappop(self._pending)
            call(at_s)
        return self.log

    def _at(self, at_s: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._pending, (at_s, next(self._number), call))

    def _feed(self, member: Member, event: Event, at_s: float) -> None:
        if member in self.stops:
            return
        actions = self._schedulers[member].on(event, at_s)
        self.log.append(Entry(at_s=at_s, member=member, event=event, actions=actions))
        for action in actions:
            self._execute(at_s, member, action)

    def _execute(self, at_s: float, member: Member, action: Action) -> None:
        match action:
            case Send(message=message):
                self._send(at_s, member, message)
            case Run(work=work) if work.group:
                self._meet(at_s, member, work)
            case Run(work=work):
                end_s = at_s + self._times.work_s(member, work)
                self.post(end_s, member, Done(work, facts_of(self._pipeline, work)))
            case Save(step=step):
                self.saved[member].append(step)
                self.post(at_s + self._random.random(), member, Saved(step))
            case Stop():
                self.stops[member] = action

    def _meet(self, at_s: float, member: Member, work: Work) -> None:
        """Start a group work when all its members have come to it; each learns of its end by itself."""
        present = self._meetings[work.group]
        present[member] = work
        if len(present) < len(work.group):
            return
        del self._meetings[work.group]
        assert len({(one.kind, one.step) for one in present.values()}) == 1, "a group runs one work"
        facts = Gathered(of=tuple(facts_of(self._pipeline, present[one]) for one in work.group))
        for one, of in present.items():
            self.post(at_s + self._times.work_s(one, of), one, Done(of, facts))

    def _send(self, at_s: float, member: Member, message: Message) -> None:
        line = (member, message.to[0])
        sent_s = max(at_s, self._line_free_s.get(line, 0.0)) + self._times.sending_s(message)
        self._line_free_s[line] = sent_s
        self._at(sent_s, partial(self._sent, member, message))

    def _sent(self, member: Member, message: Message, at_s: float) -> None:
        if member in self.stops:
            return
        self._feed(member, Sent(message, Carried()), at_s)
        travel_s = self._times.travel_s(message)
        arrival_s = at_s + travel_s
        if self._times.keeps_order:
            stream = (member, message.to[0], message.kind)
            arrival_s = self._arrival_s[stream] = max(arrival_s, self._arrival_s[stream])
        self.post(arrival_s, message.to[0], Arrived(message, travel_s, Carried()))


def facts_of(pipeline: Pipeline, work: Work) -> Facts | None:
    """What an actor would report at the end of a work, with losses and norms of one."""
    match work.kind:
        case WorkKind.READ:
            return Read(num_targets=1, num_tokens=1)
        case WorkKind.REDUCE:
            seen = work.facts if isinstance(work.facts, Seen) else Seen()
            return Reduced(seen=seen, loss_sum=1.0, squared_norms=(1.0,))
        case WorkKind.UPDATE:
            return Updated(verdict=work.facts if isinstance(work.facts, Verdict) else None)
        case WorkKind.SCORE:
            one = Round(losses=(1.0,), num_correct=1, num_targets=1)
            return Scored(rounds=(one,) * (1 + pipeline.evaluates_without_codecs))
        case WorkKind.FORWARD | WorkKind.BACKWARD:
            return Ran(busy_s=0.1)
        case _:
            return None
