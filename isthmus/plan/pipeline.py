"""The schedule of a pipeline over clouds: GPipe, 1F1B, lock-step or WAN-1F1B, and what surrounds passes.

A micro-batch is in flight at a stage from the start of its forward to the end of its backward. Its
activations are kept that long, so the window, the number that may be in flight, also bounds the memory. The
four policies are two rules and that number:

    GPipe      window m       forward while the window is open, else backward, and wait for the one chosen
                              F0 F1 F2 F3 B0 B1 B2 B3
    1F1B       window p - i   the same rule; with window 2: warm-up, one forward one backward, drain
                              F0 F1 B0 F2 B1 F3 B2 B3
    lock-step  round trip     the same rule: the order of passes is fixed, the same on all ranks of a cloud
    WAN-1F1B   round trip     a gradient if one has arrived, else a forward if the window is open, else wait

Every stage runs its forwards and its backwards in the order of the micro-batches, whatever the order in which
they arrive, so gradients are summed as one process would sum them and the weights are equal to the bit.
Forwards must keep the order too: one that overtook would take the slot that the overtaken one needs in the
window, and the backward that could free it would not be the next one.

Where no gradient comes back, in evaluation and before the first trained stage, a micro-batch is in flight
until the link has taken its activation over, so a slow link or a slow peer slows this stage down.

A step, and an evaluation before it where one is due, have these phases:

    FIT (once) → READ → passes → REDUCE → tally up, verdict down → UPDATE → Save      a step
                 READ → passes → SCORE at the last stage → result up                  an evaluation
"""

from collections.abc import Iterator
from typing import Final, TypeVar

from isthmus.plan.codecs import RAW_PAIR, texts_of
from isthmus.plan.end_of_step import (
    Best,
    Evaluated,
    Note,
    Read,
    Reduced,
    Scored,
    StepEnded,
    StepMeter,
    Updated,
    Verdict,
    evaluations,
)
from isthmus.plan.pipeline_parts import (
    GRADIENT,
    HIDDEN,
    RECEIVING_HALF,
    SENDING_HALF,
    Arrivals,
    EndOfStep,
    Phase,
    Pipeline,
    PipelineState,
    StepState,
)
from isthmus.plan.saving import Saves
from isthmus.plan.types import (
    Action,
    Arrived,
    Carried,
    Done,
    Event,
    Facts,
    Gathered,
    Interrupted,
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
    Sent,
    Started,
    Stop,
    Tell,
    Work,
    WorkKind,
)

F = TypeVar("F", bound=Facts)

_RAW: Final = texts_of(RAW_PAIR)
_NO_CODECS: Final[tuple[tuple[str, str], ...]] = ()
_NOTHING: Final = Carried()


class PipelineScheduler:
    """Decides what one member of a pipeline runs, sends and saves; computing is one resource.

    Steps follow each other without a barrier: a member continues as soon as its own weights are updated, and
    keeps what arrives for the next one.
    """

    def __init__(self, pipeline: Pipeline, member: Member) -> None:
        self._pipeline = pipeline
        self._member = member
        self._index = pipeline.stage_of(member)
        self._group = pipeline.stages[self._index]
        self._pass_group = self._group if self._index in pipeline.grouped_stages else ()
        self._routing = pipeline.routing
        self._is_leader = member == self._group[0]
        self._is_first = self._index == 0
        self._is_last = self._index == len(pipeline.stages) - 1
        self._before = () if self._is_first else pipeline.stages[self._index - 1]
        self._behind = () if self._is_last else pipeline.stages[self._index + 1]
        self._is_trained = self._index >= pipeline.first_trained
        self._sends_gradients = self._index > pipeline.first_trained
        self._keeps_order = pipeline.policy.keeps_order
        self._windows = pipeline.first_windows()
        self._codecs = pipeline.codecs
        self._end = EndOfStep(pipeline, self._index)
        self._upcoming: Iterator[tuple[int, bool]] = iter(())
        self._current: StepState | None = None
        self._arrivals = Arrivals(pipeline)
        self._has_basis = False
        self._early = StepMeter()
        self._running: Work | None = None
        self._sending: list[Message] = []
        self._results_due: set[tuple[int, bool]] = set()
        """Evaluations whose result has not come from behind: the step, and whether it is without codecs."""
        self._saves = Saves()
        self._best: Best | None = None
        self._wants_stop = False
        self.stopped_at: int | None = None
        """The step that is saved where an orderly stop was asked for."""
        self._is_stopped = False
        self._actions: list[Action] = []

    def on(self, event: Event, now_s: float) -> tuple[Action, ...]:
        """Take in what happened and say what to do now; once stopped, nothing more."""
        if self._is_stopped:
            return ()
        self._actions = []
        match event:
            case Arrived():
                self._arrive(event)
            case Done(work=work, facts=facts):
                self._finish(work, facts, now_s)
            case Sent(message=message, facts=facts):
                self._note_sent(message, facts)
                if self._current is not None and self._current.has_passes_left:
                    # Passes of a trained stage do not wait for the link.
                    return ()
            case Started():
                self._start(event, now_s)
            case Interrupted():
                self._wants_stop = True
            case Saved(step=step, facts=facts):
                self._note_saved(step, facts)
            case Lost(member=lost, final=True):
                self._stop(Outcome.REFORM, f"cloud {lost.cloud!r} left the pipeline")
        self._next(now_s)
        return tuple(self._actions)

    # From step to step.

    def _start(self, started: Started, now_s: float) -> None:
        if self._arrivals.has_started or not 0 <= started.step <= self._pipeline.num_steps:
            raise ScheduleError(f"a pipeline of {self._pipeline.num_steps} steps starts at {started.step}")
        self._arrivals.start(started.step)
        self._saves.safe_step = started.step
        self._upcoming = self._all_steps(started.step)
        self._end.start(now_s)
        if isinstance(started.facts, PipelineState):
            self._restore(started.facts, started.step)

    def _restore(self, state: PipelineState, step: int) -> None:
        """Continue with the codecs of a checkpoint, but for cuts to which the job gives others now."""
        self._best = state.best
        if len(state.codecs) != len(self._codecs):
            return
        own = list(zip(self._pipeline.cuts, state.asked, state.codecs, strict=True))
        self._codecs = tuple(
            codecs if asked == texts_of(cut.codecs) else texts_of(cut.codecs) for cut, asked, codecs in own
        )
        if self._end.steering is not None:
            asked = [one == texts_of(cut.codecs) for cut, one, _ in own]
            self._end.steering.restore(state.states, is_same=asked, step=step)
            self._tell_notes()

    def _all_steps(self, first_step: int) -> Iterator[tuple[int, bool]]:
        """Every step, an evaluation before each so many, and one at the end: (step, is evaluation)."""
        pipeline = self._pipeline
        for step in range(first_step, pipeline.num_steps):
            # A run that judges its weights was saved before it has judged these.
            if pipeline.is_evaluated(step) and (step > first_step or pipeline.keep_best):
                yield step, True
            yield step, False
        if pipeline.is_evaluated(pipeline.num_steps):
            yield pipeline.num_steps, True

    def _next(self, now_s: float) -> None:
        """Choose what to run now, if nothing runs."""
        while self._running is None and not self._is_stopped:
            current = self._current
            if current is None:
                if not self._begin(now_s):
                    return
                continue
            work = self._choose(current, now_s)
            if work is not None:
                self._running = work
                self._actions.append(Run(work))
            elif self._current is not None:
                return

    def _begin(self, now_s: float) -> bool:
        found = None if self.stopped_at is not None else next(self._upcoming, None)
        if found is None:
            self._end_run()
            return False
        step, is_evaluation = found
        self._current = StepState(
            step=step,
            is_evaluation=is_evaluation,
            has_backwards=self._is_trained and not is_evaluation,
            microbatches=self._microbatches(step, is_evaluation),
            started_s=now_s,
        )
        if is_evaluation:
            self._expect_results(step)
        else:
            self._current.observed, self._early = self._early, StepMeter()
            if step == self._pipeline.fit_step:
                self._current.phase = Phase.FIT_SENDING
        self._arrivals.open(self._current)
        return True

    def _microbatches(self, step: int, is_evaluation: bool) -> tuple[int, ...]:
        share = self._routing.share(self._index, self._member.rank, step=step, is_evaluation=is_evaluation)
        if not is_evaluation:
            return share
        number = self._pipeline.num_validation_microbatches
        rounds = range(self._pipeline.num_rounds)
        return tuple(one * number + microbatch for one in rounds for microbatch in share)

    def _expect_results(self, step: int) -> None:
        if self._is_leader and not self._is_last:
            self._results_due.update((step, bool(one)) for one in range(self._pipeline.num_rounds))

    def _end_run(self) -> None:
        """Stop when all is saved, all that was sent is taken over and every evaluation is passed on."""
        if self._sending or self._saves.under_way or self._results_due or not self._arrivals.has_started:
            return
        if self.stopped_at is None:
            self._finish_run()
        else:
            reason = f"stopped; step {self.stopped_at} is saved on every cloud"
            self._stop(Outcome.INTERRUPTED, reason, step=self.stopped_at)

    def _finish_run(self) -> None:
        best = self._best if self._pipeline.keep_best else None
        if best is not None and self._is_first and self._is_leader:
            text = f"the best {best.metric} was {best.value:.4f}, at step {best.step}, which is exported"
            self._actions.append(Tell(Note(text=text)))
        self._stop(Outcome.FINISHED, step=0 if best is None else best.step)

    def _stop(self, outcome: Outcome, reason: str = "", hint: str = "", step: int = 0) -> None:
        self._is_stopped = True
        self._actions.append(Stop(outcome, reason, hint, step))

    # What to run in a step or an evaluation.

    def _choose(self, current: StepState, now_s: float) -> Work | None:
        """The next work, None to wait; a step or an evaluation whose last phase is over ends here."""
        match current.phase:
            case Phase.PASSES:
                return self._end_passes(current) if current.are_passes_over else self._choose_pass(current)
            case Phase.FIT_SENDING:
                return self._fit(current, SENDING_HALF, Phase.FIT_RECEIVING)
            case Phase.FIT_RECEIVING:
                return self._fit(current, RECEIVING_HALF, Phase.READ)
            case Phase.READ:
                return self._group_work(WorkKind.READ, current)
            case Phase.SETTLE:
                return self._settle(current, now_s)
            case _:
                return None

    def _tell_notes(self) -> None:
        if self._is_leader:
            self._actions += [Tell(Note(text=text)) for text in self._end.take_notes()]

    def _group_work(
        self, kind: WorkKind, current: StepState, facts: Facts | None = None, item: int = 0
    ) -> Work:
        item = int(current.is_evaluation) if kind is WorkKind.READ else item
        return Work(kind, current.step, item, facts, self._group)

    def _fit(self, current: StepState, half: int, following: Phase) -> Work | None:
        cut = self._index if half == SENDING_HALF else self._index - 1
        if cut not in self._pipeline.bottlenecks:
            current.phase = following
            return self._choose(current, current.started_s)
        if half == RECEIVING_HALF and self._is_leader and not self._has_basis:
            return None
        return self._group_work(WorkKind.FIT, current, item=half)

    def _choose_pass(self, current: StepState) -> Work | None:
        if self._keeps_order:
            return self._forward(current) if self._may_forward(current) else self._backward(current)
        return self._backward(current) or self._forward(current)

    def _may_forward(self, current: StepState) -> bool:
        if current.num_forwards == len(current.microbatches):
            return False
        if current.has_backwards:
            num_in_flight = current.num_forwards - current.num_backwards
        else:
            num_in_flight = sum(message.kind in _ACTIVATIONS for message in self._sending)
        return num_in_flight < self._windows[self._index]

    def _forward(self, current: StepState) -> Work | None:
        if not self._may_forward(current):
            return None
        microbatch = current.microbatches[current.num_forwards]
        message, work = _FORWARD[current.is_evaluation]
        if not self._is_first and not self._arrivals.has(message, current.step, microbatch):
            return None
        return self._pass(work, current, microbatch)

    def _backward(self, current: StepState) -> Work | None:
        if not current.has_backwards or current.num_backwards == current.num_forwards:
            return None
        microbatch = current.microbatches[current.num_backwards]
        if not self._is_last and not self._arrivals.has(MessageKind.GRADIENT, current.step, microbatch):
            return None
        return self._pass(WorkKind.BACKWARD, current, microbatch)

    def _pass(self, kind: WorkKind, current: StepState, microbatch: int) -> Work:
        return Work(kind, current.step, microbatch, None, self._pass_group)

    def _end_passes(self, current: StepState) -> Work | None:
        if current.is_evaluation:
            if self._is_last:
                return self._group_work(WorkKind.SCORE, current)
            self._close(current)
            return None
        if any(message.kind is MessageKind.GRADIENT for message in self._sending):
            # The last gradients are still being coded, and their errors belong to this step.
            return None
        seen = current.observed.seen(wants_stop=self._wants_stop, saving=self._saves.facts)
        return self._group_work(WorkKind.REDUCE, current, seen)

    def _settle(self, current: StepState, now_s: float) -> Work | None:
        """Update once the verdict is known; the other members of the group get it from their leader."""
        if not self._is_leader:
            return self._group_work(WorkKind.UPDATE, current)
        verdict = self._end.settle(current.step, current.reduced, now_s, current.read)
        for kind, stage, facts in self._end.outgoing:
            self._send(kind, current.step, stage, facts=facts)
        self._end.outgoing.clear()
        self._tell_notes()
        if self._end.failure is not None:
            self._is_stopped = True
            self._actions.append(self._end.failure)
        if verdict is None:
            return None
        current.verdict = verdict
        return self._group_work(WorkKind.UPDATE, current, verdict)

    # What has happened, and whether it can be.

    def _finish(self, work: Work, facts: Facts | None, now_s: float) -> None:
        current = self._current
        if current is None or work != self._running:
            raise ScheduleError(f"{work.name} is reported as done but does not run")
        self._running = None
        if isinstance(facts, Ran):
            current.observed.busy_s += facts.busy_s
        match work.kind:
            case WorkKind.FORWARD | WorkKind.EVALUATE:
                self._forward_done(current, work)
            case WorkKind.BACKWARD:
                self._backward_done(current, work)
            case WorkKind.READ:
                current.read = _all_of(Read, work, facts)[0] if self._is_first else None
                current.phase = Phase.PASSES
            case WorkKind.FIT:
                self._fitted(current, work.item)
            case WorkKind.REDUCE:
                current.reduced = _all_of(Reduced, work, facts) if self._is_leader else ()
                current.phase = Phase.SETTLE
            case WorkKind.SCORE:
                self._scored(current, _all_of(Scored, work, facts))
            case WorkKind.UPDATE:
                self._updated(current, _all_of(Updated, work, facts)[0], now_s)

    def _forward_done(self, current: StepState, work: Work) -> None:
        current.num_forwards += 1
        if self._is_last:
            return
        kind = MessageKind.EVALUATION if current.is_evaluation else MessageKind.ACTIVATION
        self._send_tensor(kind, current, work, self._index + 1)

    def _backward_done(self, current: StepState, work: Work) -> None:
        current.num_backwards += 1
        if self._sends_gradients:
            self._send_tensor(MessageKind.GRADIENT, current, work, self._index - 1)

    def _fitted(self, current: StepState, half: int) -> None:
        if half == RECEIVING_HALF:
            current.phase = Phase.READ
            return
        current.phase = Phase.FIT_RECEIVING
        if self._is_leader:
            self._send(MessageKind.BASIS, current.step, self._index + 1, priority=Priority.NORMAL)

    def _scored(self, current: StepState, members: tuple[Scored, ...]) -> None:
        if any(len(one.rounds) != self._pipeline.num_rounds for one in members):
            raise ScheduleError(f"the evaluation of step {current.step} has another number of rounds")
        if self._is_leader:
            for found in evaluations(current.step, members):
                self._pass_evaluation_on(found)
        self._close(current)

    def _pass_evaluation_on(self, found: Evaluated) -> None:
        metric = self._pipeline.keep_best
        # What is exported has no codecs, so that round counts where there is one.
        if metric is not None and found.is_plain == self._pipeline.evaluates_without_codecs:
            judged = Best.of(found, metric)
            self._best = judged if judged is not None and judged.beats(self._best) else self._best
        if self._is_first:
            self._actions.append(Tell(found))
        else:
            self._send(MessageKind.EVALUATED, found.step, self._index - 1, facts=found)

    def _updated(self, current: StepState, updated: Updated, now_s: float) -> None:
        verdict = current.verdict or updated.verdict
        if verdict is None:
            raise ScheduleError(f"the update of step {current.step} ended without a verdict")
        self._actions.append(Tell(self._step_ended(current, verdict, updated, now_s)))
        self._windows = verdict.windows
        self._codecs = verdict.codecs or self._codecs
        if verdict.save:
            asked = self._pipeline.codecs
            best = self._best
            state = PipelineState(asked=asked, codecs=self._codecs, states=self._end.states, best=best)
            self._saves.under_way.add(current.step + 1)
            best_step = None if best is None else best.step
            self._actions.append(Save(current.step + 1, state, verdict.safe_step, best_step))
        if verdict.stop:
            self.stopped_at = current.step + 1
        self._close(current)

    def _step_ended(self, current: StepState, verdict: Verdict, updated: Updated, now_s: float) -> StepEnded:
        tally = self._end.take_tally() if self._is_leader else None
        return StepEnded(
            step=current.step,
            loss=verdict.loss,
            norm=verdict.norm,
            learning_rate=updated.learning_rate,
            num_tokens=verdict.num_tokens,
            duration_s=now_s - current.started_s,
            busy_s=() if tally is None else tally.busy_s,
            windows=self._windows,
            num_elements=current.observed.num_elements,
            num_bytes=current.observed.num_bytes,
        )

    def _close(self, current: StepState) -> None:
        """End a step or an evaluation: nothing more may arrive for it."""
        self._arrivals.close()
        if current.is_evaluation:
            # What an evaluation sent counts for the step behind it.
            self._early.num_elements += current.observed.num_elements
            self._early.num_bytes += current.observed.num_bytes
        self._current = None

    def _note_saved(self, step: int, facts: Facts | None) -> None:
        self._saves.end(step, facts)
        if isinstance(facts, NotStored):
            self._stop(Outcome.FAILED, facts.reason, facts.hint)

    def _note_sent(self, message: Message, facts: Facts | None) -> None:
        try:
            self._sending.remove(message)
        except ValueError:
            raise ScheduleError(f"{message.name} is reported as sent but was not being sent") from None
        current = self._current
        if current is None or not isinstance(facts, Carried):
            return
        if message.kind in _TENSORS and not self._pipeline.is_without_codecs(message):
            current.observed.sent(facts, is_gradient=message.kind is MessageKind.GRADIENT)

    # What arrives.

    def _arrive(self, event: Arrived) -> None:
        message = event.message
        match message.kind:
            case MessageKind.ACTIVATION | MessageKind.EVALUATION | MessageKind.GRADIENT:
                self._tensor_arrived(message, event)
            case MessageKind.TALLY if self._is_from_leader(message, 1):
                self._end.tally_arrived(message, step=self._step_at_hand(message))
            case MessageKind.VERDICT if self._is_from_leader(message, -1):
                self._end.verdict_arrived(message, step=self._step_at_hand(message))
            case MessageKind.EVALUATED if self._is_from_leader(message, 1):
                self._result_arrived(message)
            case MessageKind.BASIS if self._is_from_leader(message, -1):
                self._basis_arrived(message)
            case _:
                raise _not_awaited(message)

    def _is_from_leader(self, message: Message, direction: int) -> bool:
        """Whether this is a leader, to whom that of the stage before (-1) or behind (1) speaks."""
        stage, stages = self._index + direction, self._pipeline.stages
        is_known = 0 <= stage < len(stages) and message.sender == stages[stage][0]
        return self._is_leader and is_known

    def _step_at_hand(self, message: Message) -> int | None:
        """The step of a message, None where this member is not in its training."""
        is_due = self._current is not None and self._current.place == (message.step, True)
        return message.step if is_due else None

    def _result_arrived(self, message: Message) -> None:
        facts = message.facts
        if not isinstance(facts, Evaluated) or facts.step != message.step:
            raise _not_awaited(message)
        if (facts.step, facts.is_plain) not in self._results_due:
            raise _not_awaited(message)
        self._results_due.remove((facts.step, facts.is_plain))
        self._pass_evaluation_on(facts)

    def _basis_arrived(self, message: Message) -> None:
        current, step = self._current, message.step
        is_due = current is not None and step == self._pipeline.fit_step and current.place <= (step, True)
        if not is_due or self._has_basis or self._index - 1 not in self._pipeline.bottlenecks:
            raise _not_awaited(message)
        self._has_basis = True

    def _tensor_arrived(self, message: Message, event: Arrived) -> None:
        is_gradient = message.kind is MessageKind.GRADIENT
        is_awaited = (
            self._awaits_gradient(message) if is_gradient else _is_among(self._before, message.sender)
        )
        if not is_awaited:
            raise _not_awaited(message)
        is_early = self._arrivals.keep(message.kind, message.step, message.item)
        observed = self._early if is_early or self._current is None else self._current.observed
        facts = event.facts if isinstance(event.facts, Carried) else _NOTHING
        if message.kind is not MessageKind.EVALUATION:
            observed.arrived(facts, event.travel_s, is_gradient=is_gradient)

    def _awaits_gradient(self, message: Message) -> bool:
        current = self._current
        if current is None or not current.has_backwards or message.step != current.step:
            return False
        is_known = _is_among(self._behind, message.sender)
        return is_known and current.has(message.item, among=current.num_forwards)

    # What is sent.

    def _send_tensor(self, kind: MessageKind, current: StepState, work: Work, stage: int) -> None:
        rank = self._routing.rank(stage, work.item, step=current.step, is_evaluation=current.is_evaluation)
        to = (self._pipeline.stages[stage][rank],)
        codecs = self._codecs_of(kind, work, min(stage, self._index)) if self._codecs else _NO_CODECS
        self._put(Message(kind, work.step, work.item, self._member, to, None, codecs))

    def _codecs_of(self, kind: MessageKind, work: Work, cut: int) -> tuple[tuple[str, str], ...]:
        is_raw = (
            self._pipeline.is_without_codecs(work) or work.step < self._pipeline.cuts[cut].num_warmup_steps
        )
        forward, backward = _RAW if is_raw else self._codecs[cut]
        if kind is MessageKind.GRADIENT:
            return ((HIDDEN, backward),)
        return ((HIDDEN, forward), (GRADIENT, backward))

    def _send(
        self,
        kind: MessageKind,
        step: int,
        stage: int,
        *,
        facts: Facts | None = None,
        priority: Priority = Priority.URGENT,
    ) -> None:
        to = (self._pipeline.stages[stage][0],)
        self._put(Message(kind, step, 0, self._member, to, facts, _NO_CODECS, priority))

    def _put(self, message: Message) -> None:
        self._sending.append(message)
        self._actions.append(Send(message))


_ACTIVATIONS: Final = frozenset({MessageKind.ACTIVATION, MessageKind.EVALUATION})
_TENSORS: Final = _ACTIVATIONS | {MessageKind.GRADIENT}
_FORWARD: Final = {
    False: (MessageKind.ACTIVATION, WorkKind.FORWARD),
    True: (MessageKind.EVALUATION, WorkKind.EVALUATE),
}


def _is_among(members: tuple[Member, ...], one: Member) -> bool:
    """Whether a member has its place in a stage, by its rank."""
    return 0 <= one.rank < len(members) and members[one.rank] == one


def _all_of(kind: type[F], work: Work, facts: Facts | None) -> tuple[F, ...]:
    every = facts.of if isinstance(facts, Gathered) else (facts,)
    found = tuple(one for one in every if isinstance(one, kind))
    if not found:
        raise ScheduleError(f"{work.name} ended without {kind.__name__}")
    return found


def _not_awaited(message: Message) -> ScheduleError:
    return ScheduleError(f"{message.name} from {message.sender} is not awaited here")
