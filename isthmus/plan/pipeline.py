"""The schedule of one pipeline stage: GPipe, 1F1B, lock-step or WAN-1F1B, in training and in evaluation.

A micro-batch is in flight at a stage from the start of its forward to the end of its backward. Its
activations are kept that long, so the window, the number that may be in flight, also bounds the memory. The
four policies are two rules and that number:

    GPipe      window m       forward while the window is open, else backward, and wait for the one chosen
                              F0 F1 F2 F3 B0 B1 B2 B3
    1F1B       window p - i   the same rule; with window 2: warm-up, one forward one backward, drain
                              F0 F1 B0 F2 B1 F3 B2 B3
    lock-step  round trip     the same rule: the order of passes is fixed, and so all ranks of a cloud keep it
    WAN-1F1B   round trip     a gradient if one has come, else a forward if the window is open, else wait

Every stage runs its forwards and its backwards in the order of the micro-batches, whatever the order in which
they arrive, so gradients are summed as one process would sum them and the weights are equal to the bit.
Forwards must keep the order too: one that overtook would hold the place that the overtaken one needs in the
window, and the backward that could free it would not be its turn.

Where no gradient comes back, in evaluation and before the first trained stage, a micro-batch is in flight
until the link has taken its activation over, so a slow link or a slow peer slows this stage down.
"""

import enum
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from isthmus.plan.arrivals import Arrivals
from isthmus.plan.types import (
    Action,
    Arrived,
    Done,
    Event,
    Lost,
    Optimize,
    Pass,
    Report,
    Resized,
    Run,
    ScheduleError,
    Send,
    Started,
    Stop,
)


class Policy(enum.Enum):
    """Which pass goes first where there is a choice."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    LOCK_STEP = "lock-step"
    WAN_ONE_F_ONE_B = "wan-1f1b"

    @property
    def keeps_order(self) -> bool:
        """Whether passes have one order, whatever arrives when."""
        return self is not Policy.WAN_ONE_F_ONE_B

    @property
    def hides_round_trips(self) -> bool:
        """Whether windows are as large as measured round trips ask for."""
        return self in (Policy.LOCK_STEP, Policy.WAN_ONE_F_ONE_B)


@dataclass(slots=True, kw_only=True)
class _Step:
    """How far a step, or its evaluation, has come at this stage; a pass counts when it has ended."""

    started: Started
    has_backwards: bool
    num_forwards: int = 0
    num_backwards: int = 0

    @property
    def has_forwards_left(self) -> bool:
        return self.num_forwards < len(self.started.microbatches)

    @property
    def is_complete(self) -> bool:
        num_ended = self.num_backwards if self.has_backwards else self.num_forwards
        return num_ended == len(self.started.microbatches)


class PipelineScheduler:
    """Decides what one stage runs and sends; compute is one resource, and sends never delay it.

    Steps follow each other without a barrier: a stage goes on as soon as its own weights are updated, and
    holds what arrives before its turn. Stages before `first_trained` are frozen: they run forwards only, and
    no gradient is sent to them.
    """

    def __init__(
        self, *, stage: int, num_stages: int, policy: Policy, window: int, first_trained: int = 0
    ) -> None:
        if not 0 <= stage < num_stages or not 0 <= first_trained < num_stages:
            raise ValueError(f"no stage {stage} or first trained stage {first_trained} among {num_stages}")
        if window < 1:
            raise ValueError(f"a window of {window} micro-batches")
        self._is_first = stage == 0
        self._is_last = stage == num_stages - 1
        self._is_trained = stage >= first_trained
        self._sends_gradients = stage > first_trained
        self._policy = policy
        self._window = window
        self._queue: deque[Started] = deque()
        self._step: _Step | None = None
        self._arrivals = Arrivals()
        self._running: Run | Optimize | Report | None = None
        self._sending: set[Send] = set()
        self._is_stopped = False

    def on(self, event: Event) -> tuple[Action, ...]:
        """Take in what happened and say what to do now; once stopped, nothing more."""
        if self._is_stopped:
            return ()
        sends: tuple[Send, ...] = ()
        match event:
            case Started():
                self._arrivals.open(event)
                self._queue.append(event)
            case Arrived():
                self._check_awaited(event)
                self._arrivals.hold(event)
            case Done(action=action):
                sends = self._finish(action)
            case Resized(window=window):
                self._resize(window)
            case Lost(peer=peer):
                self._is_stopped = True
                return (Stop(peer=peer),)
        return (*sends, *self._next())

    # What to compute now.

    def _next(self) -> tuple[Action, ...]:
        if self._step is None and self._queue:
            self._step = self._begin(self._queue.popleft())
        if self._step is None or self._running is not None:
            return ()
        self._running = self._end(self._step) if self._step.is_complete else self._choose(self._step)
        return () if self._running is None else (self._running,)

    def _begin(self, started: Started) -> _Step:
        return _Step(started=started, has_backwards=self._is_trained and not started.evaluation)

    def _end(self, step: _Step) -> Optimize | Report:
        started = step.started
        return Report(step=started.step) if started.evaluation else Optimize(step=started.step)

    def _choose(self, step: _Step) -> Run | None:
        if self._policy.keeps_order:
            return self._forward(step) if self._may_forward(step) else self._backward(step)
        return self._backward(step) or self._forward(step)

    def _may_forward(self, step: _Step) -> bool:
        return step.has_forwards_left and self._num_in_flight(step) < self._window

    def _num_in_flight(self, step: _Step) -> int:
        if step.has_backwards:
            return step.num_forwards - step.num_backwards
        return sum(send.kind is not Pass.BACKWARD for send in self._sending)

    def _forward(self, step: _Step) -> Run | None:
        if not self._may_forward(step):
            return None
        kind = Pass.EVALUATION if step.started.evaluation else Pass.FORWARD
        return self._run(kind, step, step.num_forwards, needs_arrival=not self._is_first)

    def _backward(self, step: _Step) -> Run | None:
        if not step.has_backwards or step.num_backwards == step.num_forwards:
            return None
        return self._run(Pass.BACKWARD, step, step.num_backwards, needs_arrival=not self._is_last)

    def _run(self, kind: Pass, step: _Step, position: int, *, needs_arrival: bool) -> Run | None:
        number, microbatch = step.started.step, step.started.microbatches[position]
        if needs_arrival and Arrived(kind=kind, step=number, microbatch=microbatch) not in self._arrivals:
            return None
        return Run(kind=kind, step=number, microbatch=microbatch)

    # What has happened, and whether it can be.

    def _finish(self, action: Action) -> tuple[Send, ...]:
        if isinstance(action, Send) and action in self._sending:
            self._sending.remove(action)
            return ()
        if self._step is None or action != self._running:
            raise ScheduleError(f"{action} is reported as done but is not under way")
        self._running = None
        if isinstance(action, Run):
            return self._pass_on(action, self._step)
        self._arrivals.close(self._step.started)
        self._step = None
        return ()

    def _pass_on(self, run: Run, step: _Step) -> tuple[Send, ...]:
        if run.kind is Pass.BACKWARD:
            step.num_backwards += 1
            has_receiver = self._sends_gradients
        else:
            step.num_forwards += 1
            has_receiver = not self._is_last
        if not has_receiver:
            return ()
        send = Send(kind=run.kind, step=run.step, microbatch=run.microbatch)
        self._sending.add(send)
        return (send,)

    def _check_awaited(self, arrived: Arrived) -> None:
        is_gradient = arrived.kind is Pass.BACKWARD
        is_awaited = self._awaits_gradient(arrived) if is_gradient else not self._is_first
        if not is_awaited:
            raise ScheduleError(f"{arrived} is not awaited here")

    def _awaits_gradient(self, arrived: Arrived) -> bool:
        step = self._step
        if self._is_last or step is None or not step.has_backwards or arrived.step != step.started.step:
            return False
        microbatches = step.started.microbatches
        place = bisect_left(microbatches, arrived.microbatch, hi=step.num_forwards)
        return place < step.num_forwards and microbatches[place] == arrived.microbatch

    def _resize(self, window: int) -> None:
        if not self._policy.hides_round_trips:
            raise ScheduleError(f"the window of {self._policy.value} is fixed")
        if window < 1:
            raise ScheduleError(f"a window of {window} micro-batches")
        self._window = window
