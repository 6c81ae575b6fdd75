"""The main path: one stage of a pipeline at work.

The scheduler decides, the worker does. This thread computes and nothing else; couriers carry tensors to and
from the neighbouring stages on threads of their own, and what they bring waits in one mailbox as events:

    events ──► scheduler ──► Run       forward or backward, here and now, then Done into the mailbox
       ▲                 ──► Send      to a courier, then Done into the mailbox
       │                 ──► Optimize  settle the step with the other stages, update the weights
       └── couriers: Arrived           the next turn

A turn is one training step, or one evaluation. What arrived while a pass ran is seen before the next is
chosen, so a gradient is taken as soon as it has come.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import compress

from torch import Tensor

from isthmus.errors import PeerLost
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.types import (
    Action,
    Arrived,
    Done,
    Event,
    Optimize,
    Pass,
    Report,
    Resized,
    Run,
    Send,
    Started,
    Stop,
)
from isthmus.train.clock import PassClock
from isthmus.train.crossing.courier import Mailbox
from isthmus.train.crossing.messages import Gradient, Microbatch
from isthmus.train.crossing.traffic import Delivery, Traffic
from isthmus.train.crossing.words import Tally, Verdict
from isthmus.train.device import Device, Mark
from isthmus.train.evaluation import Round, put_together
from isthmus.train.observer import Observer, StepEnded
from isthmus.train.optimize.optimizer import Optimizer
from isthmus.train.passes import Passes
from isthmus.train.ranks.reduction import Reduction
from isthmus.train.ranks.world import World
from isthmus.train.reading import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a rank is to its pipeline."""

    track: str
    """Its name in spans."""
    index: int
    """Of its stage."""
    is_last: bool
    is_frozen: bool = False
    begins_at: int | None = None
    """The step with which bottlenecks begin, if there are any."""
    evaluates_plain: bool = False
    """Whether each evaluation has a second round, with everything raw."""
    is_plain: Callable[[Run], bool] = lambda _: False
    """Whether a pass belongs to such a round."""


@dataclass(slots=True, kw_only=True)
class _Turn:
    """What adds up in the course of a turn."""

    started_s: float = field(default_factory=time.monotonic)
    num_targets: int = 0
    """Of all ranks; known where the data is."""
    num_tokens: int = 0
    evaluated: list[Run] = field(default_factory=list)
    num_evaluated_targets: int = 0
    """At this rank, in one round."""


class Worker:
    """Drives one stage through turns."""

    def __init__(
        self,
        role: Role,
        *,
        passes: Passes,
        optimizer: Optimizer,
        scheduler: PipelineScheduler,
        window: int,
        traffic: Traffic,
        events: "Mailbox[Event | Delivery]",
        device: Device,
        reader: Reader | None,
        observer: Observer,
        world: World,
        reduction: Reduction,
    ) -> None:
        self._role = role
        self._begins_at = role.begins_at
        self._clock = PassClock(device, track=role.track, on_span=observer.span)
        self._passes = passes
        self._passes.window = window
        self._passes.on_near_end = self._clock.near_end
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._window = window
        self._traffic = traffic
        self._events = events
        self._reader = reader
        self._observer = observer
        self._world = world
        self._reduction = reduction
        self._microbatches: dict[Arrived, Microbatch] = {}
        self._gradients: dict[Arrived, Tensor] = {}
        self._outgoing: dict[Send, tuple[Microbatch | Gradient, Mark]] = {}
        self._turn = _Turn()
        self._ending: Optimize | Report | None = None
        self._num_reports = 0

    def run(self, turns: Iterable[Started]) -> None:
        """Take every turn, one after the other."""
        for number, turn in enumerate(turns):
            if number == 0:
                self._traffic.begin(turn.step)
            self._begin(turn)
            match self._compute(turn):
                case Optimize(step=step):
                    self._end_step(step)
                case Report(step=step):
                    self._end_evaluation(step)
        self._traffic.await_evaluations(self._num_reports)

    # The start of a turn.

    def _begin(self, turn: Started) -> None:
        self._turn = _Turn()
        self._clock.begin()
        self._begin_bottlenecks(turn)
        self._reduction.begin(is_training=not turn.evaluation)
        self._passes.set_training(not turn.evaluation)
        if self._reader is not None:
            found = self._reader.read(turn)
            self._microbatches.update(found.microbatches)
            self._turn.num_targets, self._turn.num_tokens = found.num_targets, found.num_tokens

    def _begin_bottlenecks(self, turn: Started) -> None:
        """Begin with what was observed, before anything of that step is computed."""
        if turn.step != self._begins_at:
            return
        self._begins_at = None
        tensors = self._passes.begin_sending(self._world)
        if tensors is not None and self._world.seat.is_leader:
            self._traffic.send_beginning(tensors)
        self._passes.begin_receiving(self._world, self._traffic.take_beginning)

    # Its passes: events to the scheduler, its actions carried out, until one of them ends the turn.

    def _compute(self, turn: Started) -> Optimize | Report:
        self._ending = None
        self._feed(turn)
        while self._ending is None:
            self._feed(self._next_event())
        self._clock.settle()
        return self._ending

    def _feed(self, event: Event) -> None:
        for action in self._scheduler.on(event):
            self._carry_out(action)

    def _next_event(self) -> Event:
        found = self._events.take()
        if not isinstance(found, Delivery):
            return found
        if isinstance(found.content, Microbatch):
            self._microbatches[found.arrived] = found.content
        else:
            self._gradients[found.arrived] = found.content
        return found.arrived

    def _carry_out(self, action: Action) -> None:
        match action:
            case Run():
                self._run_pass(action)
                self._events.put(Done(action=action))
            case Send():
                then = functools.partial(self._events.put, Done(action=action))
                content, mark = self._outgoing.pop(action)
                self._traffic.send(action, content, after=mark, then=then)
            case Optimize() | Report():
                self._ending = action
            case Stop(peer=peer):
                raise PeerLost(peer, "it left the pipeline")

    def _run_pass(self, run: Run) -> None:
        work = functools.partial(self._backward if run.kind is Pass.BACKWARD else self._forward, run)
        result, mark = self._clock.run(run.kind.value, f"{run.kind.value} {run.step}.{run.microbatch}", work)
        if result is not None:
            send = Send(kind=run.kind, step=run.step, microbatch=run.microbatch)
            self._outgoing[send] = (result, mark)

    def _forward(self, run: Run) -> Microbatch | None:
        microbatch = self._microbatches.pop(_needed_by(run))
        if run.kind is Pass.EVALUATION:
            self._turn.evaluated.append(run)
            self._turn.num_evaluated_targets += (
                0 if self._role.is_plain(run) else microbatch.batch.num_targets
            )
        if self._role.is_frozen and microbatch.is_held:
            return microbatch
        crossing = self._passes.forward(run, microbatch)
        return None if crossing is None else replace(microbatch, crossing=crossing.detach())

    def _backward(self, run: Run) -> Gradient | None:
        return self._passes.backward(run, self._gradients.pop(_needed_by(run), None))

    # The end of a turn.

    def _end_step(self, step: int) -> None:
        """Settle with all stages, update the weights, and go on as the verdict says."""
        self._reduction.reduce()
        tally, verdict = self._traffic.settle(self._tally(step))
        self._traffic.follow(verdict)
        update = functools.partial(self._optimizer.update, step, norm=verdict.norm)
        self._clock.run("optimize", f"optimize {step}", update)
        self._feed(Done(action=Optimize(step=step)))
        self._resize(verdict.windows[self._role.index])
        self._observer.step_ended(self._ended(tally, verdict))

    def _tally(self, step: int) -> Tally:
        return Tally(
            step=step,
            loss_sum=math.fsum(self._passes.losses()),
            squared_norms=self._reduction.squared_norms(self._optimizer.squared_norms()),
            busy_s=(self._clock.busy_s,),
        )

    def _resize(self, window: int) -> None:
        if window != self._window:
            self._window = window
            self._passes.window = window
            self._feed(Resized(window=window))

    def _ended(self, tally: Tally, verdict: Verdict) -> StepEnded:
        return StepEnded(
            step=tally.step,
            loss=tally.loss_sum / max(self._turn.num_targets, 1),
            norm=verdict.norm,
            learning_rate=self._optimizer.schedule.at(tally.step),
            num_tokens=self._turn.num_tokens,
            duration_s=time.monotonic() - self._turn.started_s,
            busy_s=tally.busy_s,
            windows=verdict.windows,
            save=verdict.save,
            cuts=self._traffic.saved_cuts(tally.step + 1) if verdict.save else None,
            sent=self._traffic.take_volume(),
        )

    def _end_evaluation(self, step: int) -> None:
        """Report the losses, if they are here: with codecs, and then plain if it is so."""
        rounds = (False, True)[: 1 + self._role.evaluates_plain]
        if self._role.is_last:
            for found in put_together(step, [self._round(plain=plain) for plain in rounds], self._world):
                self._traffic.evaluated(found)
        self._num_reports += len(rounds)
        self._feed(Done(action=Report(step=step)))

    def _round(self, *, plain: bool) -> Round:
        own = [plain == self._role.is_plain(run) for run in self._turn.evaluated]
        losses = list(compress(self._passes.losses(), own))
        num_correct = sum(compress(self._passes.num_correct(), own))
        return losses, num_correct, self._turn.num_evaluated_targets


def _needed_by(run: Run) -> Arrived:
    return Arrived(kind=run.kind, step=run.step, microbatch=run.microbatch)
