"""How the leader of a cloud makes all ranks run the same works: it orders them, its siblings follow.

A leader talks to other clouds and decides; its siblings hear from it alone, so they need no state:

    leader     ORDER ──► Run     at once, and meets its siblings in every group work
    sibling    ORDER ──► Run     in the order of the orders; Save, then RECORD to the leader; Stop

A sibling that has nothing to do waits for an order, not inside a collective, so a leader may wait for another
cloud for any time.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from isthmus.plan.end_of_step import Reduced, StepEnded, Updated, total_norm
from isthmus.plan.types import (
    Action,
    Arrived,
    Count,
    Done,
    Elapsed,
    Event,
    Facts,
    Gathered,
    Interrupted,
    Joined,
    Lost,
    Member,
    Message,
    MessageKind,
    NotStored,
    Outcome,
    Priority,
    Ran,
    Run,
    Save,
    Saved,
    ScheduleError,
    Send,
    Started,
    Stop,
    Tell,
    Work,
    WorkKind,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOrder(Facts):
    """One work that siblings run, together with their leader or each by itself."""

    kind: WorkKind
    step: Count
    item: Count = 0
    is_grouped: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders(Facts):
    """What siblings do next: these works, then a save, then the end."""

    works: tuple[WorkOrder, ...] = ()
    saves: Count | None = None
    stops: bool = False
    interrupted_at: Count | None = None
    """The step that is saved, where they stop before the end of the run."""


class Leader(ABC):
    """The scheduler of the leader of a cloud, which drives all ranks: steps, saves, the end.

    It runs one work after the other and collects its actions. Works that it runs on the host are no orders. A
    strategy is a subclass that says what follows from each event.
    """

    def __init__(self, group: tuple[Member, ...], save_every_s: float | None) -> None:
        self.group = group
        self.leader, *siblings = group
        self.running: Work | None = None
        self.is_stopped = False
        self.step = 0
        self.num_tokens = 0
        self.num_targets = 0
        self._siblings = tuple(siblings)
        self._save_every_s = save_every_s
        self._to_end: deque[WorkKind] = deque()
        """The works that are left to end the step."""
        self._loss_sum = self._norm = self._busy_s = 0.0
        self._begun_s = self._saved_s = 0.0
        self._missing: dict[int, int] = {}
        self._actions: list[Action] = []

    def on(self, event: Event, now_s: float) -> tuple[Action, ...]:
        """Take in what happened and say what to do now; once stopped, nothing more."""
        if self.is_stopped:
            return ()
        match event:
            case Started():
                self.step, self._begun_s, self._saved_s = event.step, now_s, now_s
                self._start(event)
            case Arrived(message=message):
                self._take_in(message)
            case Done(work=work, facts=facts):
                self._finish(work, facts, now_s)
            case Saved(step=step, facts=facts):
                self._count_saved(step, facts=facts)
            case Lost(member=member, final=True) if member in self.group:
                self.fail(f"{member} of this cloud is lost")
            case Interrupted():
                self._interrupt()
            case Lost() | Joined() | Elapsed():
                self._notice(event, now_s)
        if not self.is_stopped:
            self._next(now_s)
        actions, self._actions = tuple(self._actions), []
        return actions

    def _take_in(self, message: Message) -> None:
        if message.kind is MessageKind.RECORD:
            self._count_saved(message.step, message)
        else:
            self._arrive(message)

    # What a strategy says.

    @abstractmethod
    def _start(self, started: Started) -> None:
        """Begin, or begin again from what was saved."""

    @abstractmethod
    def _arrive(self, message: Message) -> None:
        """Take in a message of another cloud."""

    @abstractmethod
    def _finish(self, work: Work, facts: Facts | None, now_s: float) -> None:
        """Take in the end of a work."""

    @abstractmethod
    def _notice(self, event: Lost | Joined | Elapsed, now_s: float) -> None:
        """Take in that a member of another cloud is lost, or is there, or that a time has come."""

    @abstractmethod
    def _next(self, now_s: float) -> None:
        """Run what comes next, if nothing runs."""

    def _interrupt(self) -> None:  # noqa: B027 - a strategy may do without
        """Stop in order as soon as that can be."""

    def _saved(self, step: int) -> None:  # noqa: B027 - a strategy may do without
        """Take in that all ranks have saved a step."""

    # What it can do.

    @property
    def is_idle(self) -> bool:
        """Whether it may run a work."""
        return self.running is None and not self.is_stopped

    def act(self, *actions: Action) -> None:
        """Add actions."""
        self._actions += actions

    def order(self, works: Iterable[Work]) -> None:
        """Make the siblings run these works; the leader runs them one by one."""
        orders = (
            WorkOrder(kind=one.kind, step=one.step, item=one.item, is_grouped=bool(one.group))
            for one in works
        )
        self._tell_siblings(Orders(works=tuple(orders)))

    def run(self, work: Work) -> None:
        """Run a work at the leader."""
        self.running = work
        self.act(Run(work))

    def run_together(self, kind: WorkKind, item: int = 0, facts: Facts | None = None) -> None:
        """Run a work of this step on all ranks."""
        work = Work(kind, self.step, item, facts, self.group)
        self.order([work])
        self.run(work)

    def ended(self, work: Work, facts: Facts | None) -> tuple[Facts | None, ...]:
        """End the leader's work; the facts of all its ranks."""
        if work != self.running:
            raise ScheduleError(f"{work.name} is reported as done but does not run")
        self.running = None
        if isinstance(facts, Ran):
            self._busy_s += facts.busy_s
        return facts.of if isinstance(facts, Gathered) else (facts,)

    def end_step(self) -> None:
        """Reduce and update next."""
        self._to_end.extend((WorkKind.REDUCE, WorkKind.UPDATE))

    def run_end_of_step(self) -> bool:
        """Run what ends the step, if anything is left of it; whether the leader is busy."""
        if self._to_end:
            self.run_together(self._to_end.popleft())
        return not self.is_idle

    def is_step_over(self, work: Work, found: Sequence[Facts | None], now_s: float) -> bool:
        """Take in the end of a work; whether the step ended with it."""
        if work.kind is WorkKind.REDUCE:
            reduced = [one for one in found if isinstance(one, Reduced)]
            self._loss_sum = sum(one.loss_sum for one in reduced)
            self._norm = total_norm(reduced[0].squared_norms) if reduced else 0.0
            self._busy_s += sum(one.busy_s for one in reduced) / max(len(reduced), 1)
        if work.kind is not WorkKind.UPDATE:
            return False
        updated = next((one for one in found if isinstance(one, Updated)), None)
        ended = StepEnded(
            step=self.step,
            loss=self._loss_sum / max(self.num_targets or self.num_tokens, 1),
            norm=self._norm,
            learning_rate=0.0 if updated is None else updated.learning_rate,
            num_tokens=self.num_tokens,
            duration_s=now_s - self._begun_s,
            busy_s=(self._busy_s,),
            windows=(),
        )
        self.act(Tell(ended))
        self.step, self.num_tokens, self.num_targets = self.step + 1, 0, 0
        self._begun_s, self._busy_s = now_s, 0.0
        return True

    def is_save_due(self, now_s: float) -> bool:
        """Whether the last save is long enough ago."""
        return self._save_every_s is not None and now_s - self._saved_s >= self._save_every_s

    def note_save(self, now_s: float) -> None:
        """Count the time to the next save from now on."""
        self._saved_s = now_s

    def save(self, step: int, facts: Facts, now_s: float) -> None:
        """Save the state of all ranks under a number; the leader's part holds the scheduler's facts."""
        self.note_save(now_s)
        self._missing[step] = len(self.group)
        self._tell_siblings(Orders(saves=step))
        self.act(Save(step, facts))

    def _count_saved(self, step: int, record: Message | None = None, facts: Facts | None = None) -> None:
        """Count one rank that has saved a step, or end the run where it cannot be saved."""
        if isinstance(facts, NotStored):
            self.fail(facts.reason, facts.hint)
            return
        if record is not None and record.sender not in self.group:
            raise not_awaited(record)
        if step not in self._missing:
            raise ScheduleError(f"step {step} is reported as saved but was not to be")
        self._missing[step] -= 1
        if not self._missing[step]:
            del self._missing[step]
            self._saved(step)

    def finish(
        self, *, interrupted_at: int | None = None, reason: str = "", without: tuple[str, ...] = ()
    ) -> None:
        """End the run on all ranks, at its end or where it was interrupted and saved."""
        self.is_stopped = True
        orders = Orders(stops=True, interrupted_at=interrupted_at)
        self._tell_siblings(orders)
        self.act(_stop(orders, reason)._replace(without=without))

    def fail(self, reason: str, hint: str = "") -> None:
        """End the run here; siblings see that their leader is lost."""
        self.is_stopped = True
        self.act(Stop(Outcome.FAILED, reason, hint))

    def _tell_siblings(self, orders: Orders) -> None:
        if self._siblings:
            self.send(MessageKind.ORDER, 0, 0, self._siblings, orders)

    def send(
        self,
        kind: MessageKind,
        step: int,
        item: int,
        to: tuple[Member, ...],
        facts: Facts,
        priority: Priority = Priority.URGENT,
    ) -> Message:
        """Send a message with facts."""
        message = Message(kind, step, item, self.leader, to, facts, priority=priority)
        self.act(Send(message))
        return message


def not_awaited(message: Message) -> ScheduleError:
    """The error of a message that does not belong here."""
    return ScheduleError(f"{message.name} from {message.sender} is not awaited here")


def _stop(orders: Orders, reason: str = "") -> Stop:
    if orders.interrupted_at is None:
        return Stop(Outcome.FINISHED, reason)
    return Stop(Outcome.INTERRUPTED, reason, step=orders.interrupted_at)


class HostLane:
    """The works that a leader runs on the host, one after the other, beside the computation."""

    def __init__(self, leader: Leader, *, on_run: Callable[[Work], None] = lambda _: None) -> None:
        self._leader = leader
        self._on_run = on_run
        self._works: deque[Work] = deque()
        self._running: Work | None = None
        self._is_stale = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or is to run."""
        return self._running is None and not self._works

    def add(self, work: Work) -> None:
        """Run a work behind those before it."""
        self._works.append(work)

    def drop(self, *kinds: WorkKind) -> None:
        """Do not run works of these kinds; the end of one that runs counts for nothing."""
        self._works = deque(work for work in self._works if work.kind not in kinds)
        self._is_stale = self._running is not None and self._running.kind in kinds

    def run_next(self) -> None:
        """Run the next work, if none runs."""
        if self._running is None and self._works:
            self._running = self._works.popleft()
            self._on_run(self._running)
            self._leader.act(Run(self._running))

    def end(self, work: Work) -> bool:
        """Take in the end of a work; whether it counts."""
        if work != self._running:
            raise ScheduleError(f"{work.name} is reported as done but does not run")
        counts, self._is_stale, self._running = not self._is_stale, False, None
        return counts


class Sibling:
    """The scheduler of a rank that follows the leader of its cloud."""

    def __init__(self, group: tuple[Member, ...], member: Member) -> None:
        self._group = group
        self._member = member
        self._works: deque[Work] = deque()
        self._then: deque[tuple[int, Orders]] = deque()
        """Orders to save or to stop, each with the number of works to end before it."""
        self._num_ordered = 0
        self._num_done = 0
        self._running: Work | None = None
        self._is_stopped = False

    def on(self, event: Event, now_s: float) -> tuple[Action, ...]:  # noqa: ARG002 - a sibling needs no time
        """Take in what happened and say what to do now; once stopped, nothing more."""
        actions: list[Action] = []
        if self._is_stopped:
            return ()
        match event:
            case Arrived(message=message):
                self._take(message)
            case Done(work=work):
                self._finish(work)
            case Saved(facts=NotStored(reason=reason, hint=hint)):
                self._is_stopped = True
                return (Stop(Outcome.FAILED, reason, hint),)
            case Saved(step=step):
                record = MessageKind.RECORD
                actions.append(Send(Message(record, step, 0, self._member, self._group[:1])))
            case Lost(member=lost, final=True) if lost.cloud == self._member.cloud:
                self._is_stopped = True
                return (Stop(Outcome.FAILED, f"{lost} of this cloud is lost"),)
        self._next(actions)
        return tuple(actions)

    def _take(self, message: Message) -> None:
        orders = message.facts
        if message.sender != self._group[0] or not isinstance(orders, Orders):
            raise not_awaited(message)
        for one in orders.works:
            group = self._group if one.is_grouped else ()
            self._works.append(Work(one.kind, one.step, one.item, None, group))
        self._num_ordered += len(orders.works)
        if orders.saves is not None or orders.stops:
            self._then.append((self._num_ordered, orders))

    def _finish(self, work: Work) -> None:
        if work != self._running:
            raise ScheduleError(f"{work.name} is reported as done but does not run")
        self._running = None
        self._num_done += 1

    def _next(self, actions: list[Action]) -> None:
        while self._then and self._then[0][0] <= self._num_done:
            _, orders = self._then.popleft()
            if orders.saves is not None:
                actions.append(Save(orders.saves))
            if orders.stops:
                self._is_stopped = True
                actions.append(_stop(orders))
                return
        if self._running is None and self._works:
            self._running = self._works.popleft()
            actions.append(Run(self._running))
