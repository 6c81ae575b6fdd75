"""The main path: one member of a run at work.

The scheduler decides, the actor computes, wires carry. This thread computes and nothing else; what arrives
waits in the inbox:

    inbox ──► scheduler.on(event, now_s) ──► Run     the actor computes, here and now, then Done; works on the
                                                     host run on a thread beside
      ▲                                  ──► Send    the wire codes and sends, on its own threads, then Sent
      │                                  ──► Save    a thread copies and writes the state, then Saved
      └── wires: Arrived, Sent           ──► Stop    the end

What arrived while a pass ran is taken in before the next is chosen, so a gradient is used as soon as it is
there. A work that changes what is being saved waits until that has been copied.
"""

import functools
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

from torch import Tensor

from isthmus.errors import BadUpdate, FrameError, IsthmusError, LinkError
from isthmus.plan.types import (
    Action,
    Arrived,
    Carried,
    Done,
    Drop,
    Elapsed,
    Event,
    Facts,
    Interrupted,
    Joined,
    Lane,
    Lost,
    Member,
    Message,
    NotDone,
    Outcome,
    Run,
    Save,
    Saved,
    Scheduler,
    Send,
    Started,
    Stop,
    Tell,
    Wake,
    Work,
    WorkKind,
)
from isthmus.train.device import Mark
from isthmus.train.wire import AnyWire, Delivery, Failure, Inbox, Met

# Works that change nothing that is saved, but for buffers of the stage.
_KEEPS_STATE: Final = frozenset(
    {WorkKind.READ, WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.EVALUATE, WorkKind.SCORE, WorkKind.REDUCE}
    | {WorkKind.DISCRIMINATE}
)


class Actor(Protocol):
    """Handles the tensors of a strategy."""

    def run(self, work: Work) -> Facts | None:
        """Carry out a work; only REDUCE and SCORE may read the device."""

    def tensors(self, message: Message) -> tuple[Mapping[str, Tensor], Mark]:
        """The tensors of a message, and when they are ready on the device."""

    def take(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        """Keep what has arrived until a work needs it."""

    def drop(self, message: Message) -> None:
        """Forget what was kept of a message, sent or arrived."""


OnEvent = Callable[[Event | Failure], None]
"""Takes in what has ended on another thread."""
Saver = Callable[[Save, OnEvent], Callable[[], None]]
"""Begins a save, whose end it reports; gives what waits until the state has been copied."""


def save_nothing(action: Save, done: OnEvent) -> Callable[[], None]:
    """Report a save that is none."""
    done(Saved(action.step))
    return lambda: None


@dataclass(slots=True, eq=False)
class Loop:
    """Drives one member from its first step to its end."""

    scheduler: Scheduler
    actor: Actor
    wires: Mapping[Member, AnyWire]
    inbox: Inbox
    _: KW_ONLY
    tell: Callable[[Facts], None]
    save: Saver = save_nothing
    on_event: Callable[[Event, float], None] = lambda _event, _now_s: None
    on_lost: Callable[[Member, LinkError], None] = lambda _member, _error: None
    """Is told who is lost; a new wire to that member may be put into the inbox as `Met`."""
    lost: set[Member] = field(default_factory=set)
    """The members that are not there."""
    _wake_s: float | None = field(default=None, init=False)
    _stop: Stop | None = field(default=None, init=False)
    _failure: LinkError | None = field(default=None, init=False)
    _host: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="host")
    )
    _settle: Callable[[], None] | None = field(default=None, init=False)

    def run(self, step: int = 0, facts: Facts | None = None, *, restarts: int = 0) -> Stop:
        """Work from a step on until the scheduler stops; a failure is raised."""
        for wire in self.wires.values():
            wire.open()
        self._feed(Started(step, facts, restarts))
        for member in tuple(self.lost):
            self._feed(Lost(member))
        while self._stop is None:
            self._feed(self._next())
        if self._stop.outcome in (Outcome.FAILED, Outcome.REFORM):
            raise self._failure or IsthmusError(self._stop.reason, hint=self._stop.hint or None)
        return self._stop

    def interrupt(self, reason: str) -> None:
        """Ask for an orderly stop, from any thread: a common step is saved first."""
        self.inbox.put(Interrupted(reason))

    def _feed(self, event: Event) -> None:
        now_s = time.monotonic()
        self.on_event(event, now_s)
        for action in self.scheduler.on(event, now_s):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Run(work=work):
                if self._settle is not None and work.kind not in _KEEPS_STATE:
                    self._settle()
                    self._settle = None
                self._run(work)
            case Send(message=message):
                self._send(message)
            case Drop(message=message):
                self.actor.drop(message)
            case Tell(fact=fact):
                self.tell(fact)
            case Save():
                self._settle = self.save(action, self.inbox.put)
            case Wake(at_s=at_s):
                self._wake_s = at_s
            case Stop():
                self._stop = action

    def _run(self, work: Work) -> None:
        if work.lane is Lane.HOST:
            done = functools.partial(self._host_done, work)
            self._host.submit(self.actor.run, work).add_done_callback(done)
        else:
            self.inbox.put(Done(work, self.actor.run(work)))

    def _send(self, message: Message) -> None:
        tensors, ready = self.actor.tensors(message)
        for to in message.to:
            if to == message.sender:
                own = Delivery(message=message, tensors=tensors, travel_s=0.0, facts=Carried())
                self.inbox.put(own)
            elif to not in self.lost:
                self.wires[to].send(message, tensors, ready)

    def _host_done(self, work: Work, future: "Future[Facts | None]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self.inbox.put(Done(work, future.result()))
        else:
            # What a peer has sent may turn out to be of no use when it is summed.
            peers = [one for one in self.wires if isinstance(error, BadUpdate) and one.cloud == error.cloud]
            self.inbox.put(Failure(member=peers[0] if peers else Member(""), error=error))
            if peers:
                self.inbox.put(Done(work, NotDone()))

    def _next(self) -> Event:
        """The next event; waits for it, at most until the scheduler wants to be woken."""
        left_s = None if self._wake_s is None else max(0.0, self._wake_s - time.monotonic())
        try:
            item = self.inbox.get(timeout=left_s)
        except queue.Empty:
            self._wake_s = None
            return Elapsed()
        match item:
            case Delivery(message=message):
                try:
                    self.actor.take(message, item.tensors)
                except FrameError as error:
                    return self._lost(message.sender, error)
                return Arrived(message, item.travel_s, item.facts)
            case Failure(member=member, error=error):
                if not isinstance(error, LinkError) or not member.cloud:
                    raise error
                return self._lost(member, error)
            case Met(wire=wire):
                self.wires = {**self.wires, wire.peer: wire}
                self.lost.discard(wire.peer)
                self._failure = None
                wire.open()
                return Joined(wire.peer)
            case _:
                return item

    def _lost(self, member: Member, error: LinkError) -> Lost:
        """Take in nothing more of a member that is lost."""
        if member in self.wires:
            self.wires[member].abandon()
        self._failure = error
        if member not in self.lost:
            self.lost.add(member)
            self.on_lost(member, error)
        return Lost(member, reason=error.message)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what is left and end the threads; after an error nobody may wait for a peer any more."""
        self._host.shutdown(wait=error is None, cancel_futures=error is not None)
        for wire in self.wires.values():
            if error is None:
                wire.close()
            else:
                wire.abandon()
