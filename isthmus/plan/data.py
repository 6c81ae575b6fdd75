"""The schedule of data parallel between clouds: local steps, and rounds that synchronise the model.

    steps     READ (FORWARD BACKWARD)… REDUCE UPDATE      on all ranks of a cloud, one step after the other
    boundary  DELTA of a fragment, once every H / P steps; the exchange is that of `plan/rounds.py`
    mixing    MIX of the round into the local parameters, τ steps behind its boundary

      step     0      3      6      9      12                 H = 12 steps, P = 4 fragments, τ = 2
      round           0      1      2      3
               ───────┬──────┬──────┬──────┬───
                      └─►mix └─►mix └─►mix └─►mix             the exchange is overlapped with steps

A cloud waits only if a round is not applied when it has to be mixed. A round opens when the first cloud
reaches its boundary. A slower cloud takes its delta at the end of the step it is in, and continues from that
boundary, so rounds end together and it runs fewer steps in each; deltas are weighted by their tokens. A cloud
that returns is in phase with the others again in the same way.

Steps are counted twice: `step` is the phase, the same at all clouds, and the cursor counts the steps that a
cloud has read data for. A share of a round says from which to which cursor it goes, so every local step is in
one share of each fragment. A cloud whose state is replaced reads again from the last cursor that is in all
fragments.
"""

from collections import deque

from isthmus.plan.data_spec import DataEnded, DataParallel, DataState, Share
from isthmus.plan.end_of_step import Read
from isthmus.plan.orders import Crew, LeaderSteps, Sibling
from isthmus.plan.rounds import Rounds
from isthmus.plan.types import (
    Action,
    Arrived,
    Done,
    Elapsed,
    Event,
    Facts,
    Joined,
    Lane,
    Lost,
    Member,
    Message,
    MessageKind,
    Saved,
    Scheduler,
    Started,
    Tell,
    Wake,
    Work,
    WorkKind,
)


def data_scheduler(spec: DataParallel, member: Member) -> Scheduler:
    """A fresh scheduler of a member."""
    group = spec.clouds[spec.cloud_of(member)]
    return DataScheduler(spec, group) if member == group[0] else Sibling(group, member)


class DataScheduler:
    """Decides what the leader of a cloud runs, sends and saves."""

    def __init__(self, spec: DataParallel, group: tuple[Member, ...]) -> None:
        self._spec = spec
        self._cloud = spec.cloud_of(group[0])
        self._crew = Crew(group)
        self._steps = LeaderSteps(self._crew, spec.save_every_s)
        self._rounds = Rounds(spec, self._cloud, self._crew)
        self._step = 0
        self._works: deque[Work] = deque()
        self._taken = 0
        """The rounds of which this cloud has taken its delta, or which have been committed without it."""
        self._mixed = 0
        self._since = [0] * spec.num_fragments
        self._num_tokens = [0] * spec.num_fragments
        """What this cloud's next share of each fragment holds: from which cursor on, and so many tokens."""
        self._saved_rounds = 0
        self._blocked_s: float | None = None

    def on(self, event: Event, now_s: float) -> tuple[Action, ...]:
        """Take in what happened and say what to do now; once stopped, nothing more."""
        if self._crew.is_stopped:
            return ()
        match event:
            case Started():
                self._start(event, now_s)
            case Arrived(message=message):
                self._arrive(message, now_s)
            case Done(work=work, facts=facts):
                self._finish(work, facts, now_s)
            case Saved(step=step):
                self._crew.is_saved(step)
            case Lost(member=member, final=True):
                self._lose(member, now_s)
            case Joined(member=member) if member.rank == 0:
                self._rounds.join(self._spec.cloud_of(member), now_s)
            case Elapsed():
                self._rounds.elapse(now_s)
        self._count_accepted()
        if self._crew.is_idle:
            self._next(now_s)
        return self._crew.acted()

    def _start(self, started: Started, now_s: float) -> None:
        state = started.facts if isinstance(started.facts, DataState) else None
        if state is not None:
            self._step, self._mixed, self._taken = state.step, state.mixed, state.rounds
            self._since, self._num_tokens = list(state.since), list(state.num_tokens)
            self._saved_rounds = state.rounds
        self._steps.start(0 if state is None else state.cursor, now_s)
        self._rounds.start(state, restarts=started.restarts, now_s=now_s)

    def _lose(self, member: Member, now_s: float) -> None:
        if member in self._crew.group:
            self._crew.fail(f"{member} of this cloud is lost")
        else:
            self._rounds.lose(self._spec.cloud_of(member), now_s)

    def _arrive(self, message: Message, now_s: float) -> None:
        if message.kind is MessageKind.RECORD and message.sender in self._crew.group:
            self._crew.is_saved(message.step)
        else:
            self._rounds.arrive(message, now_s)

    # What has ended.

    def _finish(self, work: Work, facts: Facts | None, now_s: float) -> None:
        if work.lane is Lane.HOST:
            self._rounds.end_on_host(work, now_s)
            return
        found = self._crew.end(work, facts)
        if work.kind is WorkKind.READ:
            self._steps.num_tokens = sum(one.num_tokens for one in found if isinstance(one, Read))
        elif work.kind is WorkKind.DELTA:
            self._rounds.contribute(work.item, self._share(work.item), now_s)
        elif work.kind is WorkKind.UPDATE:
            for fragment in range(self._spec.num_fragments):
                self._num_tokens[fragment] += self._steps.num_tokens
            self._step += 1
        if self._steps.is_over(work, found, now_s):
            self._save_if_due(now_s)

    def _count_accepted(self) -> None:
        for number, share in self._rounds.accepted:
            fragment = self._spec.fragment(number)
            self._since[fragment] = share.until
            self._num_tokens[fragment] -= share.num_tokens
        self._rounds.accepted.clear()

    def _share(self, number: int) -> Share:
        fragment = self._spec.fragment(number)
        return Share(
            cloud=self._cloud,
            since=self._since[fragment],
            until=self._steps.step,
            num_tokens=self._num_tokens[fragment],
        )

    def _save_if_due(self, now_s: float) -> None:
        rounds = self._rounds
        is_new = rounds.can_be_saved and rounds.ledger.applied > self._saved_rounds
        if not is_new or not self._steps.is_save_due(now_s):
            return
        self._saved_rounds = rounds.ledger.applied
        state = DataState(
            view=rounds.current_view,
            rounds=rounds.ledger.applied,
            digest=rounds.ledger.digest(rounds.ledger.applied),
            cursors=rounds.ledger.all_cursors,
            step=self._step,
            cursor=self._steps.step,
            mixed=self._mixed,
            since=tuple(self._since),
            num_tokens=tuple(self._num_tokens),
        )
        self._steps.save(state, now_s, step=rounds.ledger.applied)

    # What to run.

    def _next(self, now_s: float) -> None:
        """Run the next work of the step; between two steps take deltas, mix rounds, or wait."""
        if self._rounds.is_over:
            self._end()
        elif self._works:
            self._crew.run(self._works.popleft())
        elif self._rounds.must_wait:
            self._wait(now_s)
        else:
            self._between_steps(now_s)

    def _between_steps(self, now_s: float) -> None:
        if self._rounds.has_new_state:
            self._adopt()
            return
        self._keep_phase()
        spec, applied, is_end = self._spec, self._rounds.ledger.applied, self._step >= self._spec.num_steps
        is_delta_due = self._taken < spec.num_rounds and spec.due(self._taken) <= self._step
        # A cloud that has just got a new state has no delta before its next step.
        is_delta_due = is_delta_due and (is_end or self._since[spec.fragment(self._taken)] < self._steps.step)
        is_mix_due = is_end or spec.due(self._mixed) + spec.delay_steps <= self._step
        if is_delta_due and applied > self._taken - spec.num_fragments:
            # The round of this fragment before has ended, so it is known what the delta has to hold.
            self._taken += 1
            self._run(WorkKind.DELTA, self._taken - 1)
        elif is_mix_due and self._mixed < applied:
            self._mixed += 1
            self._run(WorkKind.MIX, self._mixed - 1)
        elif is_delta_due or (is_mix_due and self._mixed < self._taken):
            self._wait(now_s)
        elif is_end:
            self._rounds.set_done(now_s)
            self._wait(now_s)
        else:
            self._begin_step()

    def _keep_phase(self) -> None:
        """Continue from the newest boundary that another cloud has reached before this one."""
        self._taken = max(self._taken, self._rounds.committed)
        reached = max(self._taken, self._rounds.opened)
        if reached:
            self._step = max(self._step, self._spec.due(reached - 1))

    def _adopt(self) -> None:
        """Replace the local parameters by the new outer ones, and read on from the last cursor in them."""
        rounds = self._rounds
        rounds.has_new_state = False
        self._taken = self._mixed = rounds.ledger.applied
        self._step = self._spec.due(self._taken - 1) if self._taken else 0
        self._steps.step = min(rounds.ledger.cursors[self._cloud])
        self._since = [self._steps.step] * self._spec.num_fragments
        self._num_tokens = [0] * self._spec.num_fragments
        self._saved_rounds = 0
        self._run(WorkKind.MIX, self._spec.num_rounds)

    def _run(self, kind: WorkKind, number: int) -> None:
        """Run a work of a round on all ranks; one beyond the last round is of all fragments."""
        self._blocked_s = None
        self._steps.run(kind, number)

    def _begin_step(self) -> None:
        self._blocked_s = None
        cursor, group = self._steps.step, self._crew.group
        works = [Work(WorkKind.READ, cursor, group=group)]
        for item in range(self._spec.num_microbatches):
            works += [Work(WorkKind.FORWARD, cursor, item), Work(WorkKind.BACKWARD, cursor, item)]
        works += [Work(WorkKind.REDUCE, cursor, group=group), Work(WorkKind.UPDATE, cursor, group=group)]
        self._crew.order(works)
        self._works.extend(works)
        self._crew.run(self._works.popleft())

    def _wait(self, now_s: float) -> None:
        """Wait for other clouds; not for ever."""
        if self._rounds.is_over:
            self._end()
        elif self._blocked_s is None:
            self._blocked_s = now_s
            self._crew.act(Wake(now_s + self._spec.wait_s))
        elif now_s >= self._blocked_s + self._spec.wait_s:
            self._give_up()

    def _end(self) -> None:
        ledger = self._rounds.ledger
        digest = ledger.digest(ledger.applied)
        self._crew.act(Tell(DataEnded(rounds=ledger.applied, digest=digest, cursor=self._steps.step)))
        self._crew.finish()

    def _give_up(self) -> None:
        spec, views = self._spec, self._rounds.views
        if self._mixed == spec.num_rounds:
            # Everything is done here; only the others' word for it is missing.
            self._end()
            return
        seen = ", ".join(spec.clouds[cloud][0].cloud for cloud in views.sees)
        self._crew.fail(
            f"waited {spec.wait_s:g} s for a round: of {len(spec.clouds)} clouds only {seen} are there",
            'start the others again, or set on_partition = "continue" or a smaller quorum',
        )
