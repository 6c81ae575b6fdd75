"""The schedule of data parallel between clouds: local steps, and rounds that synchronise the model.

    steps     READ (FORWARD BACKWARD)… REDUCE UPDATE      on all ranks of a cloud, one step after the other
    boundary  DELTA of a fragment, once every H / P steps
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

The exchange of one round between clouds:

DELTA    each cloud sends each owner its shard of the delta
    close    the primary closes the round when all have sent, or a quorum has and the grace period is over
    COMMIT   each owner sums its shard and sends the same bytes to all clouds, itself among them
    commit   a cloud that has all shards reports it; the primary commits the round when enough have them
    OUTER    every cloud applies committed rounds in order, so the outer parameters are equal everywhere

Nothing is applied before it is committed, so a round that loses its owner half-way is made again in the next
view, from the same deltas. A delta that comes too late is in no round: the next one of its fragment holds it.

A cloud that lacks rounds at the start of a view is behind. It waits for shards that are still under way. If
one cannot be, it gets the fragments that have changed from a donor, by STATE, in the background, and collects
the commits of rounds behind that; until then it counts for nothing. It keeps its local parameters if it has
run all the time and lacks one round of each fragment at most.
"""

from collections import defaultdict, deque
from dataclasses import replace
from typing import Final

from isthmus.plan.end_of_step import Evaluated, Read, Scored
from isthmus.plan.membership import (
    Applied,
    DataEnded,
    DataParallel,
    DataState,
    Ledger,
    Piece,
    Report,
    RoundCommit,
    RoundEnded,
    Ruling,
    Shards,
    Share,
    Snapshot,
    Taken,
    Views,
)
from isthmus.plan.orders import HostLane, Leader, Orders, not_awaited
from isthmus.plan.shards import AllRanks, Noted, ShardOrder, ShardSibling
from isthmus.plan.types import (
    Elapsed,
    Facts,
    Joined,
    Lane,
    Lost,
    Member,
    Message,
    MessageKind,
    NotDone,
    Priority,
    ScheduleError,
    Scheduler,
    Started,
    Tell,
    Wake,
    Work,
    WorkKind,
)

_BETWEEN_CLOUDS: Final[dict[MessageKind, type[Facts]]] = {
    MessageKind.DELTA: Piece,
    MessageKind.COMMIT: RoundCommit,
    MessageKind.STATE: Snapshot,
    MessageKind.TALLY: Report,
    MessageKind.VERDICT: Ruling,
}
FACTS: Final[dict[MessageKind, type[Facts]]] = {
    **_BETWEEN_CLOUDS,
    MessageKind.ORDER: Orders,
    MessageKind.SHARD: ShardOrder,
    MessageKind.NOTED: Noted,
}
"""The facts that messages carry, between clouds and between the ranks of one."""


class Rounds:
    """The rounds as the leader of one cloud knows them; counts of rounds are from the first on."""

    def __init__(self, spec: DataParallel, cloud: int, leader: Leader, ranks: AllRanks) -> None:
        self._spec = spec
        self._ranks = ranks
        self._cloud = cloud
        self._leader = leader
        self.views = Views(spec, cloud, self._report)
        self.ledger = Ledger(num_clouds=len(spec.clouds), num_fragments=spec.num_fragments)
        self.complete = 0
        self.committed = 0
        self.opened = 0
        """The rounds of which another cloud's delta has arrived."""
        self.is_behind = False
        self.must_wait = False
        """Whether the local parameters are of no use before the donor's state is here."""
        self.has_new_state = False
        """Whether the outer parameters have been replaced, and the local ones not yet."""
        self.is_over = False
        self.wants_stop = False
        self.accepted: list[tuple[int, Share]] = []
        """Shares of this cloud that are in the outer parameters now, with their rounds; for its scheduler."""
        self.current_view = 0
        """The newest view in which the state was up to date."""
        self._is_restarted = False
        self._is_done = False
        self._commits: dict[int, RoundCommit] = {}
        """Rounds that are complete and not applied."""
        self._committed_in: dict[int, Ruling] = {}
        self._shards = Shards()
        self._owners_then = self._summing(self.views.members)
        """The clouds whose shards made rounds in the newest view in which this cloud was up to date."""
        self._interrupted: set[int] = set()
        """The clouds that have been lost or have returned since then; what they had sent may not arrive."""
        self._has_asked = False
        self._own: dict[int, Share] = {}
        self._content = ""
        """The digest of the fragment that the last round has changed."""
        self._contents: dict[int, str] = {}
        """The digests after so many rounds, here or at the primary."""
        self._ruling = Ruling(view=0, members=self.views.members, is_installed=True)
        self._ruling = replace(self._ruling, current=self.views.members)
        self._wanting: dict[int, Report] = {}
        self._arrived: defaultdict[int, set[int]] = defaultdict(set)
        """The fragments of the donor's state that have arrived, by the number of its rounds."""
        self._snapshot: Snapshot | None = None
        self._installing: Snapshot | None = None
        """The donor's state, while the host puts it in the place of the old one; no view begins meanwhile."""
        self._postponed: Ruling | None = None
        self._early: list[Message] = []
        self._host = HostLane(leader, on_run=ranks.order_work)
        self._forget_open_rounds()

    def _forget_open_rounds(self) -> None:
        self._pieces: defaultdict[int, dict[int, Share]] = defaultdict(dict)
        self._closed: dict[int, tuple[int, ...]] = {}
        self._summed: set[int] = set()

    # Starts, losses, returns.

    def start(self, state: DataState | None, *, restarts: int) -> None:
        """Begin, or begin again from what was saved."""
        if state is not None:
            self.complete = self.committed = state.rounds
            # Where all have forgotten their views, a new one must still be above all that were saved.
            self.current_view = self.views.number = state.view
            self.ledger.replace(state.rounds, state.digest, state.cursors)
        if restarts:
            # It takes part in no view, and does not compute, before the others have let it in.
            self._is_restarted = self.must_wait = True
            self.views.restart(restarts)

    def lose(self, cloud: int) -> None:
        """Take in that a cloud is lost."""
        self._interrupted.add(cloud)
        self.views.lose(cloud)

    def join(self, cloud: int) -> None:
        """Take in that a cloud is there."""
        self._interrupted.add(cloud)
        self.views.join(cloud)

    def can_be_saved(self, mixed: int) -> bool:
        """Whether the outer parameters are those after the rounds that all clouds save, and all mixed."""
        is_current = not self.is_behind and not self.has_new_state
        return is_current and mixed == self._ruling.saves == self.ledger.applied == self.committed

    # Deltas.

    def contribute(self, number: int, share: Share) -> None:
        """Send this cloud's delta of a round to the owners, unless it is of a state that was replaced."""
        if self.must_wait or self.has_new_state or number < self.committed:
            return
        self._own[number] = share
        self._offer(number)

    def _offer(self, number: int) -> None:
        if not self.views.is_installed or self.is_behind:
            return
        owners = self._owners
        to = [owners] if self._spec.gathers else [(owner,) for owner in owners]
        piece = Piece(view=self.views.number, share=self._own[number], shard=0, num_shards=len(to))
        for shard, receivers in enumerate(to):
            of_shard = replace(piece, shard=shard)
            self._send(MessageKind.DELTA, number, receivers, of_shard, Priority.NORMAL)

    def _summing(self, members: tuple[int, ...]) -> tuple[int, ...]:
        return (self._cloud,) if self._spec.gathers else members

    @property
    def _owners(self) -> tuple[Member, ...]:
        return self._spec.owners(self.views.members)

    # What arrives.

    def arrive(self, message: Message) -> None:
        """Take in a message of another cloud, or a commit of one's own."""
        facts = message.facts
        kind = _BETWEEN_CLOUDS.get(message.kind)
        if kind is None or not isinstance(facts, kind):
            raise not_awaited(message)
        sender = self._spec.cloud_of(message.sender)
        num_steps = self._spec.num_rounds + (not isinstance(facts, Piece | RoundCommit))
        if message.step >= num_steps or message.item >= self._spec.num_fragments:
            raise ScheduleError(f"{message.name} from {message.sender} is of no round")
        if isinstance(facts, Report):
            if self.views.take_report(sender, facts) and facts.wants_state:
                self._wanting[sender] = facts
        elif isinstance(facts, Ruling):
            if self.views.take_ruling(sender, facts):
                self._take_ruling(facts)
        else:
            self._take(message, sender)

    def _take(self, message: Message, sender: int) -> None:
        """Take in what belongs to a view: now, later if the view is not installed here yet, or not at all."""
        facts = message.facts
        if isinstance(facts, RoundCommit):
            # Rounds of the view before can still become complete.
            if facts.view >= self.current_view and message.step >= self.complete:
                self._shards.add(message.step, sender, facts)
            return
        if not isinstance(facts, Piece | Snapshot):
            return
        if facts.view != self.views.number or not self.views.is_installed:
            if facts.view >= self.views.number:
                self._early.append(message)
            return
        match facts:
            case Piece(share=share) if share.cloud == sender and message.step >= self.committed:
                self._pieces[message.step][sender] = share
                self.opened = max(self.opened, message.step + 1)
            case Snapshot() if self.is_behind and sender == self._ruling.donor:
                self._take_snapshot(message.item, facts)

    def _take_ruling(self, ruling: Ruling) -> None:
        if self.views.is_installed:
            self._follow(ruling)
        elif ruling.is_installed:
            self._postponed = ruling

    # What follows from it.

    def go_on(self, now_s: float) -> None:
        """Do all that can be done after an event, and send what others need to know."""
        if self._installing is None:
            self._begin_view()
        self._complete()
        if self.views.is_installed:
            self._catch_up()
            self._rule(now_s)
            for number in sorted(self._closed):
                self._sum(number)
            self._serve()
        for clouds, facts in self.views.outbox:
            kind = MessageKind.TALLY if isinstance(facts, Report) else MessageKind.VERDICT
            self._send(kind, 0, self._spec.owners(clouds), facts)
        self.views.outbox = []
        self._host.run_next()

    def _begin_view(self) -> None:
        postponed, self._postponed = self._postponed, None
        if postponed is not None and postponed.view == self.views.number and not self.views.is_installed:
            self._install(postponed)
        installed = self.views.ruling_to_install()
        if installed is not None:
            self._broadcast(installed)
            self._install(installed)

    def _install(self, ruling: Ruling) -> None:
        """Begin a view: from its base, without anything of rounds that older views have left open."""
        self.views.install()
        self._ranks.forget(self.current_view)
        self._ruling = ruling
        self._forget_open_rounds()
        self._contents = {}
        self._wanting = {one: of for one, of in self._wanting.items() if of.view == ruling.view}
        self._arrived.clear()
        self._snapshot = None
        self._has_asked = False
        self.opened = 0
        self._host.drop(WorkKind.SUM)
        self._shards.keep((self.current_view, ruling.view))
        is_same = self.current_view == ruling.base_view
        self.complete = max(min(self.complete, ruling.base) if is_same else 0, self.committed)
        self._commits = {one: commit for one, commit in self._commits.items() if one < self.complete}
        self._commit(self.complete)
        if self.complete > ruling.base or (self.complete == ruling.base and not self._is_at_base):
            self._disown_rounds()
        self.is_behind = True
        self._catch_up()
        early, self._early = self._early, []
        for message in early:
            self._take(message, self._spec.cloud_of(message.sender))

    @property
    def _is_at_base(self) -> bool:
        base = self._ruling.base
        return self.complete == base and self.ledger.knows(base, self._ruling.digest)

    def _catch_up(self) -> None:
        """Become up to date: as the view starts, by shards that were under way, or by the donor's state."""
        if not self.is_behind or self._installing is not None:
            return
        if self._is_at_base:
            self._be_current()
        elif self._snapshot is not None:
            self._put_in_place(self._snapshot)
        elif not self._has_asked and not self._is_under_way:
            self._has_asked = True
            self.views.outbox.append(((self._ruling.donor,), self._report(wants_state=True)))

    @property
    def _is_under_way(self) -> bool:
        """Whether all shards that this cloud lacks were sent to it and nothing keeps them from arriving."""
        if self._spec.gathers or self.must_wait or self.current_view != self._ruling.base_view:
            # Where clouds gather, what a lost one had sent to others alone is nowhere to be had.
            return False
        lacks = range(self.complete, self._ruling.base)
        missing = (self._shards.missing(self.current_view, one, self._owners_then) for one in lacks)
        return self._interrupted.isdisjoint(owner for owners in missing for owner in owners)

    def _disown_rounds(self) -> None:
        """Give up rounds that the others do not have: clouds continued in parts, or forgot them."""
        self.must_wait = True
        self.complete = self.committed = 0
        self.ledger.disown()
        self._commits = {}
        self._host.drop(WorkKind.OUTER, WorkKind.SUM)

    def _be_current(self) -> None:
        self.current_view = self.views.number
        self._owners_then = self._summing(self.views.members)
        self._interrupted = set()
        self.is_behind = self.must_wait = self._is_restarted = False
        self._own = {number: share for number, share in self._own.items() if number >= self.committed}
        self._tell_primary()
        for number in sorted(self._own):
            self._offer(number)

    def _report(self, *, wants_state: bool = False) -> Report:
        return Report(
            view=self.views.number,
            sees=self.views.sees,
            current_view=self.current_view,
            complete=self.complete,
            digest=self.ledger.digest(self.complete),
            is_restarted=self._is_restarted,
            is_done=self._is_done,
            wants_state=wants_state,
            wants_stop=self.wants_stop,
        )

    def _tell_primary(self) -> None:
        if self.views.is_primary:
            self.views.reports[self._cloud] = self._report()
        else:
            self.views.outbox.append(((self.views.primary,), self._report()))

    def _compare(self, rounds: int, content: str) -> None:
        """Fail if this cloud has other outer parameters than the primary after the same rounds."""
        if content and self._contents.setdefault(rounds, content) != content:
            pair = sorted((self._cloud, self.views.primary))
            one, other = (repr(self._spec.clouds[cloud][0].cloud) for cloud in pair)
            self._leader.fail(
                f"clouds {one} and {other} have other parameters after {rounds} rounds",
                "give both the same model: the same files behind model.source, and the same release",
            )
        oldest = self.committed - self._spec.num_fragments
        self._contents = {number: told for number, told in self._contents.items() if number >= oldest}

    def set_done(self, now_s: float) -> None:
        """Tell the primary that this cloud has run all its steps and mixed all rounds."""
        if not self._is_done:
            self._is_done = True
            self._tell_primary()
            self.go_on(now_s)

    def ask_to_stop(self) -> None:
        """Tell the primary that all clouds are to stop when they have saved."""
        self.wants_stop = True
        if self.views.is_installed:
            self._tell_primary()

    @property
    def stops(self) -> bool:
        """Whether all clouds stop once they have saved."""
        return self._ruling.stops

    @property
    def absent(self) -> tuple[str, ...]:
        """The clouds that are not in this view."""
        return tuple(
            cloud[0].cloud
            for number, cloud in enumerate(self._spec.clouds)
            if number not in self._ruling.members
        )

    # The primary decides.

    def _rule(self, now_s: float) -> None:
        if not self.views.is_primary:
            return
        is_open = (one for one in self._pieces if one >= self.committed and one not in self._closed)
        sent = {number: self._pieces[number] for number in sorted(is_open)}
        ruling = self.views.rule(self._ruling, sent, now_s)
        stops = ruling.stops or self.wants_stop or any(of.wants_stop for of in self.views.reports.values())
        if ruling.committed > self._ruling.committed and (self._leader.is_save_due(now_s) or stops):
            self._leader.note_save(now_s)
            ruling = replace(ruling, saves=ruling.committed, stops=stops)
        ruling = replace(ruling, applied=self.ledger.applied, content=self._content)
        for at_s in self.views.new_deadlines_s:
            self._leader.act(Wake(at_s))
        if ruling != self._ruling:
            self._broadcast(ruling)
            self._follow(ruling)

    def _broadcast(self, ruling: Ruling) -> None:
        others = tuple(one for one in self.views.members if one != self._cloud)
        if others:
            self._send(MessageKind.VERDICT, ruling.committed, self._spec.owners(others), ruling)

    def _follow(self, ruling: Ruling) -> None:
        self._ruling = ruling
        self._compare(ruling.applied, ruling.content)
        for one in ruling.closed:
            self._closed.setdefault(one.number, one.clouds)
        self.is_over = ruling.is_over
        self._commit(min(ruling.committed, self.complete))

    # Sums, commits, the outer step.

    def _sum(self, number: int) -> None:
        pieces = self._pieces[number]
        if number in self._summed or any(cloud not in pieces for cloud in self._closed[number]):
            return
        self._summed.add(number)
        shares = tuple(pieces[cloud] for cloud in self._closed[number])
        facts = RoundCommit(view=self.views.number, shares=shares)
        self._host.add(self._work(WorkKind.SUM, number, facts))

    def _complete(self) -> None:
        """Count the rounds of which all shards are here, and commit what the primary has committed."""
        before = self.complete
        while not self.must_wait and self._installing is None and not self._lacks_shards(self.complete):
            commit = self._shards.take(self.current_view, self.complete)
            self._commits[self.complete] = commit
            self.ledger.complete(self.complete, commit)
            self.complete += 1
        if self.complete > before and self.views.is_installed:
            self._tell_primary()
            self._commit(min(self._ruling.committed, self.complete))

    def _lacks_shards(self, number: int) -> bool:
        is_beyond = self.is_behind and number >= self._ruling.base
        return is_beyond or bool(self._shards.missing(self.current_view, number, self._owners_then))

    def _commit(self, number: int) -> None:
        while self.committed < number and not self.must_wait:
            commit = self._commits[self.committed]
            self._committed_in[self.committed] = self._ruling
            self._host.add(self._work(WorkKind.OUTER, self.committed, commit))
            self._closed.pop(self.committed, None)
            self._pieces.pop(self.committed, None)
            self._own.pop(self.committed, None)
            self.committed += 1

    def _work(self, kind: WorkKind, number: int, facts: Facts) -> Work:
        return Work(kind, number, self._spec.fragment(number), facts, lane=Lane.HOST)

    def end_on_host(self, work: Work, applied: Facts | None) -> None:
        """Take in the end of a work on the host."""
        facts = work.facts
        counts = self._host.end(work) and not isinstance(applied, NotDone)
        if isinstance(facts, Snapshot):
            self._replace_state(facts)
        elif counts and isinstance(facts, RoundCommit):
            if work.kind is WorkKind.OUTER:
                self._apply(work.step, facts, applied.content if isinstance(applied, Applied) else "")
            elif facts.view == self.views.number and self.views.is_installed:
                to = (self._leader.leader,) if self._spec.gathers else self._owners
                self._send(MessageKind.COMMIT, work.step, to, facts, Priority.NORMAL)

    def _apply(self, number: int, commit: RoundCommit, content: str) -> None:
        del self._commits[number]
        ruling = self._committed_in.pop(number)
        self.ledger.apply(number, commit)
        self._content = content
        self.accepted += [(number, share) for share in commit.shares if share.cloud == self._cloud]
        told = RoundEnded(
            number=number,
            view=commit.view,
            live=ruling.members,
            participating=ruling.current,
            shares=commit.shares,
            digest=self.ledger.digest(number + 1),
            content=content,
        )
        self._leader.act(Tell(told))
        self._compare(number + 1, content)

    # State for clouds that are behind.

    def _serve(self) -> None:
        applied = self.ledger.applied
        if self.is_behind or self._ruling.donor != self._cloud or applied < self._ruling.base:
            return
        wanting, self._wanting = self._wanting, {}
        for cloud, report in sorted(wanting.items()):
            is_whole = not self.ledger.knows(report.complete, report.digest)
            numbers = range(report.complete, applied)
            changed = {self._spec.fragment(number) for number in numbers}
            snapshot = Snapshot(
                view=self.views.number,
                rounds=applied,
                digest=self.ledger.digest(applied),
                fragments=tuple(range(self._spec.num_fragments) if is_whole else sorted(changed)),
                is_whole=is_whole,
                cursors=self.ledger.all_cursors,
            )
            for fragment in snapshot.fragments:
                to, background = self._spec.owners((cloud,)), Priority.BACKGROUND
                self._send(MessageKind.STATE, applied, to, snapshot, background, item=fragment)

    def _take_snapshot(self, fragment: int, snapshot: Snapshot) -> None:
        self._arrived[snapshot.rounds].add(fragment)
        if self._arrived[snapshot.rounds] >= set(snapshot.fragments):
            self._snapshot = snapshot

    def _put_in_place(self, snapshot: Snapshot) -> None:
        """Make the host put the donor's state in the place of the old one, when it has done with that."""
        if self._host.is_idle:
            self._installing, self._snapshot = snapshot, None
            self._host.add(Work(WorkKind.OUTER, snapshot.rounds, 0, snapshot, lane=Lane.HOST))

    def _replace_state(self, snapshot: Snapshot) -> None:
        """Continue from the donor's state."""
        self._installing, self._content = None, ""
        self.ledger.replace(snapshot.rounds, snapshot.digest, snapshot.cursors)
        lacks = snapshot.rounds - self.complete
        if self.must_wait or snapshot.is_whole or lacks > self._spec.num_fragments:
            self._own = {}
            self._is_done = False
            self.has_new_state = True
        self.accepted += [item for item in sorted(self._own.items()) if self._is_accepted(*item)]
        self.complete = self.committed = snapshot.rounds
        self._commits = {}
        if self.views.is_installed and self.views.number == snapshot.view:
            self._be_current()
        else:
            self.current_view = snapshot.view

    def _is_accepted(self, number: int, share: Share) -> bool:
        """Whether the donor's state holds a share of this cloud."""
        return self.ledger.cursors[self._cloud][self._spec.fragment(number)] == share.until

    def _send(
        self,
        kind: MessageKind,
        number: int,
        to: tuple[Member, ...],
        facts: Facts,
        priority: Priority = Priority.URGENT,
        *,
        item: int | None = None,
    ) -> None:
        item = self._spec.fragment(number) if item is None else item
        self._ranks.order_message(self._leader.send(kind, number, item, to, facts, priority))


def data_scheduler(spec: DataParallel, member: Member) -> Scheduler:
    """A fresh scheduler of a member."""
    group = spec.clouds[spec.cloud_of(member)]
    return DataScheduler(spec, group) if member == group[0] else ShardSibling(spec, group, member)


class DataScheduler(Leader):
    """Decides what the leader of a cloud runs, sends and saves."""

    def __init__(self, spec: DataParallel, group: tuple[Member, ...]) -> None:
        super().__init__(group, spec.save_every_s)
        self._spec = spec
        self._cloud = spec.cloud_of(group[0])
        self._ranks = AllRanks(spec, self)
        self._rounds = Rounds(spec, self._cloud, self, self._ranks)
        self._on_host: Work | None = None
        """The last work on the host that this rank has ended."""
        self._phase = 0
        """The step that all clouds count alike; `step` counts those that this cloud has read data for."""
        self._works: deque[Work] = deque()
        self._taken = 0
        """The rounds of which this cloud has taken its delta, or which have been committed without it."""
        self._mixed = 0
        self._evaluated = 0
        """The phase of the last evaluation."""
        self._since = [0] * spec.num_fragments
        self._num_tokens = [0] * spec.num_fragments
        """What this cloud's next share of each fragment holds: from which cursor on, and so many tokens."""
        self._saved_rounds = 0
        self._blocked_s: float | None = None

    def _start(self, started: Started) -> None:
        state = started.facts if isinstance(started.facts, DataState) else None
        if state is not None:
            self._phase = self._evaluated = state.step
            self._mixed, self._taken = state.mixed, state.rounds
            self._since, self._num_tokens = list(state.since), list(state.num_tokens)
            self._saved_rounds = state.rounds
        self.step = 0 if state is None else state.cursor
        self._rounds.start(state, restarts=started.restarts)

    def _interrupt(self) -> None:
        self._rounds.ask_to_stop()

    def _notice(self, event: Lost | Joined | Elapsed, now_s: float) -> None:  # noqa: ARG002 - no time is needed
        match event:
            case Lost(member=member, final=True):
                self._see(self._spec.cloud_of(member), 0, is_there=False)
            case Joined(member=member) if member.rank == 0:
                self._see(self._spec.cloud_of(member), 0, is_there=True)

    def _see(self, cloud: int, rank: int, *, is_there: bool) -> None:
        """Take in that one rank reaches another cloud, or not any more."""
        is_whole = self._ranks.sees(cloud, rank, is_there=is_there)
        if not is_there:
            self._rounds.lose(cloud)
        elif is_whole:
            self._rounds.join(cloud)

    def _arrive(self, message: Message) -> None:
        if isinstance(message.facts, Noted):
            self._take_note(message, message.facts)
        elif self._ranks.has_arrived(message):
            self._rounds.arrive(message)

    def _take_note(self, message: Message, note: Noted) -> None:
        """Take in what has come to pass at a sibling."""
        rank = message.sender.rank
        if message.sender not in self.group[1:] or note.cloud >= len(self._spec.clouds):
            raise not_awaited(message)
        if note.message is not None:
            sender, step, item = self._spec.clouds[note.cloud][0], message.step, message.item
            arrived = Message(note.message, step, item, sender, (self.leader,), note.about)
            if self._ranks.has_arrived(arrived):
                self._rounds.arrive(arrived)
        elif note.work is not None:
            self._end_on_host(rank, Applied(content=note.content) if note.is_done else NotDone())
        else:
            self._see(note.cloud, rank, is_there=note.is_there)

    def _end_on_host(self, rank: int, facts: Facts | None) -> None:
        if self._ranks.has_ended(rank, facts) and self._on_host is not None:
            self._rounds.end_on_host(self._on_host, self._ranks.take_ends())

    # What has ended.

    def _finish(self, work: Work, facts: Facts | None, now_s: float) -> None:
        if work.lane is Lane.HOST:
            self._on_host = work
            self._end_on_host(0, facts)
            return
        found = self.ended(work, facts)
        if work.kind is WorkKind.READ and not work.item:
            read = [one for one in found if isinstance(one, Read)]
            self.num_tokens = sum(one.num_tokens for one in read)
            self.num_targets = sum(one.num_targets for one in read)
        elif work.kind is WorkKind.SCORE:
            self._tell_score([one for one in found if isinstance(one, Scored)])
        elif work.kind is WorkKind.DELTA:
            norm = next((one.norm for one in found if isinstance(one, Taken)), 0.0)
            self._rounds.contribute(work.item, replace(self._share(work.item), norm=norm))
        elif work.kind is WorkKind.UPDATE:
            for fragment in range(self._spec.num_fragments):
                self._num_tokens[fragment] += self.num_targets
            self._phase += 1
        self.is_step_over(work, found, now_s)

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
            until=self.step,
            num_tokens=self._num_tokens[fragment],
        )

    def _tell_score(self, found: list[Scored]) -> None:
        if self._rounds.views.sees[0] != self._cloud:
            # All find the same.
            return
        rounds = [one for scored in found for one in scored.rounds]
        told = Evaluated(
            step=self._phase,
            loss_sum=sum(sum(one.losses) for one in rounds),
            num_correct=sum(one.num_correct for one in rounds),
            num_targets=sum(one.num_targets for one in rounds),
        )
        self.act(Tell(told))

    def _save_if_due(self, now_s: float) -> None:
        rounds, before = self._rounds, self._spec.mixed_at(self._saved_rounds)
        step = self._spec.mixed_at(rounds.ledger.applied)
        if not rounds.can_be_saved(self._mixed) or step <= before:
            return
        self._saved_rounds = rounds.ledger.applied
        state = DataState(
            view=rounds.current_view,
            rounds=rounds.ledger.applied,
            digest=rounds.ledger.digest(rounds.ledger.applied),
            cursors=rounds.ledger.all_cursors,
            step=self._phase,
            cursor=self.step,
            mixed=self._mixed,
            since=tuple(self._since),
            num_tokens=tuple(self._num_tokens),
        )
        self.save(step, state, now_s)

    def _saved(self, step: int) -> None:
        if self._rounds.stops and step == self._spec.mixed_at(self._saved_rounds):
            self.finish(interrupted_at=step, reason="every cloud has saved", without=self._rounds.absent)

    # What to run.

    def _next(self, now_s: float) -> None:
        """Run the next work of the step; between two steps take deltas, mix rounds, or wait."""
        self._rounds.go_on(now_s)
        self._count_accepted()
        if not self.is_idle:
            return
        if self._rounds.is_over:
            self._end()
        elif self._works:
            self.run(self._works.popleft())
        elif self._rounds.must_wait:
            self._wait(now_s)
        else:
            self._between_steps(now_s)

    def _between_steps(self, now_s: float) -> None:
        if self._rounds.has_new_state:
            self._adopt()
            return
        self._save_if_due(now_s)
        self._keep_phase()
        spec, applied, is_end = self._spec, self._rounds.ledger.applied, self._phase >= self._spec.num_steps
        is_delta_due = self._taken < spec.num_rounds and spec.due(self._taken) <= self._phase
        # A cloud that has just got a new state has no delta before its next step.
        is_delta_due = is_delta_due and (is_end or self._since[spec.fragment(self._taken)] < self.step)
        is_mix_due = is_end or spec.due(self._mixed) + spec.delay_steps <= self._phase
        if is_delta_due and self._mixed > self._taken - spec.num_fragments:
            # The round of this fragment before is mixed in, so it is known what the delta has to hold.
            self._taken += 1
            self._run(WorkKind.DELTA, self._taken - 1)
        elif is_mix_due and self._mixed < applied:
            self._mixed += 1
            self._run(WorkKind.MIX, self._mixed - 1)
        elif is_delta_due or (is_mix_due and self._mixed < self._taken):
            self._wait(now_s)
        elif self._is_evaluation_due(is_end):
            self._evaluate()
        elif is_end:
            self._rounds.set_done(now_s)
            self._wait(now_s)
        else:
            self._begin_step()

    def _is_evaluation_due(self, is_end: bool) -> bool:
        every = self._spec.evaluate_every
        if every is None or not self._spec.num_validation_microbatches or self._phase == self._evaluated:
            return False
        return is_end or self._phase // every > self._evaluated // every

    def _evaluate(self) -> None:
        self._blocked_s, self._evaluated = None, self._phase
        items = range(self._spec.num_validation_microbatches)
        works = [Work(WorkKind.READ, self.step, 1, group=self.group)]
        works += [Work(WorkKind.EVALUATE, self.step, item) for item in items]
        self._run_all([*works, Work(WorkKind.SCORE, self.step, group=self.group)])

    def _run_all(self, works: list[Work]) -> None:
        self.order(works)
        self._works.extend(works)
        self.run(self._works.popleft())

    def _keep_phase(self) -> None:
        """Continue from the newest boundary that another cloud has reached before this one."""
        self._taken = max(self._taken, self._rounds.committed)
        reached = max(self._taken, self._rounds.opened if self._spec.adapts else 0)
        if reached:
            self._phase = max(self._phase, self._spec.due(reached - 1))

    def _adopt(self) -> None:
        """Replace the local parameters by the new outer ones, and read on from the last cursor in them."""
        rounds = self._rounds
        rounds.has_new_state = False
        self._taken = self._mixed = rounds.ledger.applied
        self._phase = self._spec.due(self._taken - 1) if self._taken else 0
        self.step = min(rounds.ledger.cursors[self._cloud])
        self._since = [self.step] * self._spec.num_fragments
        self._num_tokens = [0] * self._spec.num_fragments
        self._saved_rounds = 0
        self._run(WorkKind.MIX, self._spec.num_rounds)

    def _run(self, kind: WorkKind, number: int) -> None:
        """Run a work of a round on all ranks; one beyond the last round is of all fragments."""
        self._blocked_s = None
        self.run_together(kind, number)

    def _begin_step(self) -> None:
        self._blocked_s = None
        cursor, group = self.step, self.group
        works = [Work(WorkKind.READ, cursor, group=group)]
        for item in range(self._spec.num_microbatches):
            works += [Work(WorkKind.FORWARD, cursor, item), Work(WorkKind.BACKWARD, cursor, item)]
        works += [Work(WorkKind.REDUCE, cursor, group=group)]
        # The learning rate is that of the phase.
        self._run_all([*works, Work(WorkKind.UPDATE, cursor, self._phase, group=group)])

    def _wait(self, now_s: float) -> None:
        """Wait for other clouds; not for ever."""
        if self._rounds.is_over:
            self._end()
        elif self._blocked_s is None:
            self._blocked_s = now_s
            self.act(Wake(now_s + self._spec.wait_s))
        elif now_s >= self._blocked_s + self._spec.wait_s:
            self._give_up()

    def _end(self) -> None:
        ledger = self._rounds.ledger
        digest = ledger.digest(ledger.applied)
        self.act(Tell(DataEnded(rounds=ledger.applied, digest=digest, cursor=self.step)))
        self.finish(without=self._rounds.absent)

    def _give_up(self) -> None:
        spec, views = self._spec, self._rounds.views
        if self._mixed == spec.num_rounds:
            # Everything is done here; only the others' word for it is missing.
            self._end()
            return
        seen = ", ".join(spec.clouds[cloud][0].cloud for cloud in views.sees)
        self.fail(
            f"waited {spec.wait_s:g} s for a round: of {len(spec.clouds)} clouds only {seen} are there",
            'start the others again, or set on_partition = "continue" or a smaller quorum',
        )
