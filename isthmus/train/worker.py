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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from typing import Final, Protocol

from torch import Tensor

from isthmus.errors import PeerLost
from isthmus.events import WAITING_KIND, Span
from isthmus.model.boundary import Batch
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
from isthmus.train.crossing.bench import Volume
from isthmus.train.crossing.cache import Foresight
from isthmus.train.crossing.courier import Mailbox
from isthmus.train.crossing.cut import SavedCuts
from isthmus.train.crossing.messages import Evaluated, Gradient, Microbatch, Tally, Verdict
from isthmus.train.crossing.traffic import Delivery, Traffic
from isthmus.train.device import Device, Mark
from isthmus.train.optimize.optimizer import Optimizer
from isthmus.train.passes import Passes
from isthmus.train.ranks.reduction import Reduction
from isthmus.train.ranks.world import World
from isthmus.train.settlement import Settlement

# Shorter waits for data are not worth a word.
_LEAST_WAIT_S: Final = 0.001


class Source(Protocol):
    """Where the first stage gets its micro-batches from."""

    def training(self, step: int) -> Sequence[Batch]:
        """The micro-batches of a step."""

    def validation(self) -> Sequence[Batch]:
        """The micro-batches of every evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """What a stage knows at the end of a step; the loss, per target, is known to the first stage alone."""

    step: int
    loss: float
    norm: float
    learning_rate: float
    num_targets: int
    num_tokens: int
    duration_s: float
    busy_s: tuple[float, ...]
    windows: tuple[int, ...]
    save: bool
    cuts: SavedCuts | None = None
    """Where it is time to save: the codes of the next step."""
    sent: Volume = field(default_factory=Volume)
    """What has crossed from this stage since the step before."""


class Observer(Protocol):
    """Who wants to know what happens."""

    def span(self, span: Span) -> None:
        """Something took its time; times are of this cloud's clock."""

    def step_ended(self, ended: StepEnded) -> None:
        """The weights are updated."""

    def evaluated(self, found: Evaluated) -> None:
        """An evaluation has come to the first stage."""


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
        settlement: Settlement,
        traffic: Traffic,
        events: "Mailbox[Event | Delivery]",
        device: Device,
        source: Source | None,
        observer: Observer,
        world: World,
        reduction: Reduction,
        foresight: Foresight | None = None,
    ) -> None:
        self._role = role
        self._begins_at = role.begins_at
        self._clock = PassClock(device, tell=self._note_span)
        self._passes = passes
        self._passes.window = window
        self._passes.on_near_end = self._clock.near_end
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._window = window
        self._settlement = settlement
        self._traffic = traffic
        self._events = events
        self._source = source
        self._observer = observer
        self._world = world
        self._reduction = reduction
        self._foresight = foresight
        self._microbatches: dict[Arrived, Microbatch] = {}
        self._gradients: dict[Arrived, Tensor] = {}
        self._outgoing: dict[Send, tuple[Microbatch | Gradient, Mark]] = {}
        self._ending: Optimize | Report | None = None
        self._evaluated: list[Run] = []
        self._busy_s = 0.0
        self._num_targets = 0
        self._num_own_targets = 0
        self._num_tokens = 0

    def run(self, turns: Iterable[Started]) -> None:
        """Take every turn, one after the other."""
        num_reports = 0
        for number, turn in enumerate(turns):
            started_s = time.monotonic()
            if number == 0:
                self._traffic.begin(turn.step)
            self._begin(turn)
            while self._ending is None:
                self._feed(self._next_event())
            num_reports += self._end(self._ending, started_s)
        self._traffic.await_evaluations(num_reports)

    def _begin(self, turn: Started) -> None:
        self._ending = None
        self._clock.begin()
        self._busy_s = 0.0
        self._num_targets = 0
        self._num_own_targets = 0
        self._evaluated.clear()
        self._traffic.forget_travels()
        self._begin_bottlenecks(turn)
        self._reduction.begin(is_training=not turn.evaluation)
        self._passes.set_training(not turn.evaluation)
        if self._source is not None:
            self._read(turn, self._source)
        self._feed(turn)

    def _begin_bottlenecks(self, turn: Started) -> None:
        """Begin with what was observed, before anything of that step is computed."""
        if turn.step != self._begins_at:
            return
        self._begins_at = None
        tensors = self._passes.begin_sending(self._world)
        if tensors is not None and self._world.seat.is_leader:
            self._traffic.send_beginning(tensors)
        self._passes.begin_receiving(self._world, self._traffic.take_beginning)

    def _read(self, turn: Started, source: Source) -> None:
        asked_s = time.time()
        batches = source.validation() if turn.evaluation else source.training(turn.step)
        self._note_wait(f"data {turn.step}", asked_s)
        own = (sum(batch.num_targets for batch in batches), sum(_num_tokens(batch) for batch in batches))
        self._num_targets, self._num_tokens = self._world.totals(own)
        kind = Pass.EVALUATION if turn.evaluation else Pass.FORWARD
        num_rounds = max(1, len(turn.microbatches) // max(1, len(batches)))
        for number, batch in zip(turn.microbatches, [*batches] * num_rounds, strict=True):
            key = Arrived(kind=kind, step=turn.step, microbatch=number)
            self._microbatches[key] = Microbatch(batch=batch, num_step_targets=self._num_targets)

    def _next_event(self) -> Event:
        found = self._events.take()
        if not isinstance(found, Delivery):
            return found
        if isinstance(found.content, Microbatch):
            self._microbatches[found.arrived] = found.content
        else:
            self._gradients[found.arrived] = found.content
        return found.arrived

    def _feed(self, event: Event) -> None:
        for action in self._scheduler.on(event):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Run():
                self._compute(action)
                self._events.put(Done(action=action))
            case Send():
                then = functools.partial(self._events.put, Done(action=action))
                content, mark = self._outgoing.pop(action)
                self._traffic.send(action, content, after=mark, then=then)
            case Optimize() | Report():
                self._ending = action
            case Stop(peer=peer):
                raise PeerLost(peer, "it left the pipeline")

    # A pass.

    def _compute(self, run: Run) -> None:
        work = functools.partial(self._backward if run.kind is Pass.BACKWARD else self._forward, run)
        result, mark = self._clock.run(run.kind.value, f"{run.kind.value} {run.step}.{run.microbatch}", work)
        if result is not None:
            send = Send(kind=run.kind, step=run.step, microbatch=run.microbatch)
            self._outgoing[send] = (result, mark)

    def _forward(self, run: Run) -> Microbatch | None:
        microbatch = self._microbatches.pop(_needed_by(run))
        if not self._role.is_plain(run):
            self._num_own_targets += microbatch.batch.num_targets
        if self._foresight is not None and not self._role.is_plain(run):
            microbatch = replace(microbatch, held=self._foresight.held(microbatch.batch))
        if run.kind is Pass.EVALUATION:
            self._evaluated.append(run)
        if self._role.is_frozen and microbatch.is_held:
            return microbatch
        crossing = self._passes.forward(run, microbatch)
        return None if crossing is None else replace(microbatch, crossing=crossing.detach())

    def _backward(self, run: Run) -> Gradient | None:
        return self._passes.backward(run, self._gradients.pop(_needed_by(run), None))

    def _note_wait(self, name: str, asked_s: float) -> None:
        now_s = time.time()
        if now_s - asked_s >= _LEAST_WAIT_S:
            self._observer.span(
                Span(track=self._role.track, name=name, kind=WAITING_KIND, start_s=asked_s, end_s=now_s)
            )

    def _note_span(self, kind: str, name: str, *, start_s: float, end_s: float) -> None:
        self._busy_s += end_s - start_s
        self._observer.span(Span(track=self._role.track, name=name, kind=kind, start_s=start_s, end_s=end_s))

    # The end of a turn.

    def _end(self, ending: Optimize | Report, started_s: float) -> int:
        """End a turn; gives how many results of evaluations the stages behind will report."""
        self._clock.settle()
        if isinstance(ending, Report):
            num_reports = self._report(ending.step)
            self._feed(Done(action=ending))
            return num_reports
        tally, verdict = self._settle(ending.step)
        self._traffic.follow(verdict)
        update = functools.partial(self._optimizer.update, ending.step, norm=verdict.norm)
        self._clock.run("optimize", f"optimize {ending.step}", update)
        self._feed(Done(action=ending))
        self._resize(verdict.windows[self._role.index])
        self._observer.step_ended(self._ended(tally, verdict, time.monotonic() - started_s))
        return 0

    def _resize(self, window: int) -> None:
        if window != self._window:
            self._window = window
            self._passes.window = window
            self._feed(Resized(window=window))

    def _settle(self, step: int) -> tuple[Tally, Verdict]:
        self._reduction.reduce()
        if self._world.seat.num_ranks > 1:
            self._traffic.await_gradients(step)
        own = Tally(
            step=step,
            loss_sum=math.fsum(self._passes.losses()),
            squared_norms=self._reduction.squared_norms(self._optimizer.squared_norms()),
            busy_s=(self._busy_s,),
            hops=(),
            travel_s=self._traffic.shortest_travel_s(Pass.FORWARD) or 0.0,
        )
        return self._settlement.settle(
            own, seen=self._traffic.seen(), up=self._traffic.up, down=self._traffic.down
        )

    def _ended(self, tally: Tally, verdict: Verdict, duration_s: float) -> StepEnded:
        return StepEnded(
            step=tally.step,
            loss=tally.loss_sum / max(self._num_targets, 1),
            norm=verdict.norm,
            learning_rate=self._optimizer.schedule.at(tally.step),
            num_targets=self._num_targets or self._num_own_targets,
            num_tokens=self._num_tokens,
            duration_s=duration_s,
            busy_s=tally.busy_s,
            windows=verdict.windows,
            save=verdict.save,
            cuts=self._traffic.saved_cuts(tally.step + 1) if verdict.save else None,
            sent=self._traffic.take_volume(),
        )

    def _report(self, step: int) -> int:
        """Report the losses of an evaluation, if they are here: with codecs, and then plain if it is so."""
        num_rounds = 1 + self._role.evaluates_plain
        if not self._role.is_last:
            return num_rounds
        ranks = self._world.gather([self._found(plain=bool(plain)) for plain in range(num_rounds)])
        for plain, found in enumerate(zip(*ranks, strict=True) if ranks else ()):
            losses, num_correct, num_targets = zip(*found, strict=True)
            self._traffic.evaluated(
                Evaluated(
                    step=step,
                    loss_sum=math.fsum(chain(*losses)),
                    num_correct=sum(num_correct),
                    num_targets=sum(num_targets),
                    is_plain=bool(plain),
                )
            )
        return num_rounds

    def _found(self, *, plain: bool) -> tuple[list[float], int, int]:
        """Losses, correct and all targets of one round of an evaluation at this rank."""
        own = [plain == self._role.is_plain(run) for run in self._evaluated]
        losses = list(compress(self._passes.losses(), own))
        return losses, sum(compress(self._passes.num_correct(), own)), self._num_own_targets


def _needed_by(run: Run) -> Arrived:
    return Arrived(kind=run.kind, step=run.step, microbatch=run.microbatch)


def _num_tokens(batch: Batch) -> int:
    return batch.ids.numel() if batch.mask is None else int(batch.mask.sum())
