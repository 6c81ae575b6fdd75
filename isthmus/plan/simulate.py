"""Runs the schedulers of any strategy on a virtual clock, so that it takes every decision that workers take.

    clock ──► Arrived, Done, Sent ──► scheduler ──► Run     its end, after the time that its costs say
      ▲                                         ──► Send    coded, on the line, under way, Arrived
      └─────────────────────────────────────────┴─► Save    copied to another cloud in the background, Saved

There is one scheduler per member. While a member computes, its events wait, as they do in a worker. Messages
of one pair of members keep their order; pairs share their line, and clouds that no line joins send over
others, by `plan/lines.py`.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from isthmus.job.faults import CloudFault, CloudFaultKind
from isthmus.plan.lines import (
    Clock,
    Disturbance,
    Flow,
    Pace,
    Sight,
    Then,
    faults_between,
    open_flows,
    outages_of,
    pace_of,
    tells_of,
)
from isthmus.plan.scenario import Line
from isthmus.plan.timeline import LineTraffic, Recording, SafeStep, Stopped, Timeline
from isthmus.plan.types import (
    Action,
    Arrived,
    Carried,
    Costs,
    Done,
    Elapsed,
    Event,
    Facts,
    Gathered,
    Joined,
    Lane,
    Lost,
    Member,
    Message,
    Outcome,
    Priority,
    Run,
    Save,
    Saved,
    ScheduleError,
    Scheduler,
    Send,
    Sent,
    Started,
    Stop,
    Strategy,
    Tell,
    Wake,
    Work,
    WorkKind,
)

# Works that take no time are not shown, but for these.
_ALWAYS_SHOWN: Final = frozenset({WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.EVALUATE, WorkKind.UPDATE})


def simulate(
    strategy: Strategy,
    lines: Mapping[tuple[str, str], Line],
    *,
    seed: int = 0,
    faults: Sequence[Disturbance] = (),
    patience_s: float = 0.0,
    line_patience_s: float = math.inf,
    background_share: float = 0.1,
) -> Timeline:
    """Run a strategy to its end; the seed draws the jitter, and nothing else is random.

    `lines` join clouds, each seen from the first of its pair. A cloud that vanishes is suspected at once and
    given up after `patience_s`; it comes back after the duration of its fault, if that has one. Two clouds
    between which nothing passes for `line_patience_s` give each other up until something does. Copies of
    saved state and other messages in the background take `background_share` of each line at least.
    """
    simulation = _Simulation(strategy, lines, seed, faults, patience_s, background_share)
    simulation.part_clouds(faults, line_patience_s)
    return simulation.run()


_Group = tuple[Member, int]
"""A group by its first member and its size."""


class _Node:
    """One member: its scheduler, what it runs, and the events that wait while it computes."""

    def __init__(self, member: Member, track: str, pace: Pace, costs: Costs, scheduler: Scheduler) -> None:
        self.member = member
        self.track = track
        self.pace = pace
        self.costs = costs
        self.scheduler = scheduler
        self.busy: set[Lane] = set()
        self.waiting: deque[Event] = deque()
        self.coded_s: defaultdict[str, float] = defaultdict(float)
        self.num_group_works: defaultdict[_Group, int] = defaultdict(int)
        self.life = 0
        """Changes when it vanishes and when it returns: what an earlier life left behind counts no more."""
        self.num_restarts = 0
        self.is_gone = False
        self.saved: dict[int, Facts | None] = {}
        """What the store has of it, by step."""
        self.outcome: Outcome | None = None

    @property
    def runs(self) -> bool:
        """Whether it is there and has not stopped."""
        return not self.is_gone and self.outcome is None

    def vanish(self) -> None:
        """Lose everything but what was saved."""
        self.is_gone = True
        self.life += 1
        self.waiting.clear()
        self.busy.clear()
        self.coded_s.clear()
        self.num_group_works.clear()


@dataclass(slots=True)
class _Parcel:
    """A message on its way: its sender and in which of its lives, and how many lines have to take it."""

    node: _Node
    life: int
    message: Message
    num_bytes: int
    coding_s: float
    num_left: int


class _Simulation:
    """One run from its start to its end."""

    def __init__(
        self,
        strategy: Strategy,
        lines: Mapping[tuple[str, str], Line],
        seed: int,
        faults: Sequence[Disturbance],
        patience_s: float,
        background_share: float,
    ) -> None:
        self._strategy = strategy
        self._clock = Clock()
        self._patience_s = patience_s
        self._lines = lines
        self._flows = open_flows(self._clock, lines, seed=seed, faults=faults, share=background_share)
        self._sight = Sight(lines, self._flows)
        self._members = tuple(strategy.members)
        self._clouds = list(dict.fromkeys(member.cloud for member in self._members))
        self._nodes = self._make_nodes(faults)
        self._meetings: dict[tuple[_Group, int], list[tuple[_Node, Work]]] = {}
        self._recording = Recording(self._members)
        self._safe = SafeStep(len(self._nodes))
        self._num_returning = 0
        self._stopped: Stopped | None = None
        for fault in faults:
            if isinstance(fault, CloudFault) and fault.kind is CloudFaultKind.GONE:
                self._clock.at(fault.at_s, self._lose, fault)

    def run(self) -> Timeline:
        """Let everything happen."""
        for node in self._nodes.values():
            self._feed(node, Started(0))
        self._clock.run()
        if self._stopped is None and any(node.runs for node in self._nodes.values()):
            raise ValueError("the members of this strategy wait for each other for ever")
        return self._recording.timeline(traffic=self._traffic(), stopped=self._stopped)

    def _traffic(self) -> list[LineTraffic]:
        return [
            LineTraffic(
                between=pair,
                down_bytes=down.num_bytes,
                up_bytes=up.num_bytes,
                checkpoint_bytes=down.background_bytes + up.background_bytes,
            )
            for pair in self._lines
            for down, up in [(self._flows[pair], self._flows[pair[::-1]])]
        ]

    def _make_nodes(self, faults: Sequence[Disturbance]) -> dict[Member, _Node]:
        num_ranks = Counter(member.cloud for member in self._members)
        paces = {cloud: pace_of(faults, cloud) for cloud in self._clouds}
        return {
            member: _Node(
                member,
                member.cloud if num_ranks[member.cloud] == 1 else str(member),
                paces[member.cloud],
                self._strategy.costs(member),
                self._strategy.scheduler(member),
            )
            for member in self._members
        }

    # Events to the schedulers, and their actions.

    def _feed(self, node: _Node, event: Event) -> None:
        if node.is_gone or node.outcome is not None:
            return
        if Lane.COMPUTE in node.busy:
            node.waiting.append(event)
            return
        for action in node.scheduler.on(event, self._clock.now_s):
            self._carry_out(node, action)

    def _carry_out(self, node: _Node, action: Action) -> None:
        match action:
            case Run(work=work):
                self._run(node, work)
            case Send(message=message):
                self._send(node, message)
            case Tell(fact=fact):
                self._recording.tell(node.member, self._clock.now_s, fact)
            case Save(step=step, facts=facts):
                self._save(node, step, facts)
            case Wake(at_s=at_s):
                self._clock.at(at_s, self._if_alive, node, node.life, Elapsed())
            case Stop(outcome=outcome):
                node.outcome = outcome
                if outcome is Outcome.FAILED:
                    self._clock.at(self._clock.now_s, partial(self._tell_others, [node], final=True))

    # Works.

    def _run(self, node: _Node, work: Work) -> None:
        if work.lane in node.busy:
            raise ScheduleError(f"{work.name} of {node.member} is to run beside another on its lane")
        node.busy.add(work.lane)
        if len(work.group) > 1:
            self._meet(node, work)
            return
        now_s = self._clock.now_s
        end_s = node.pace.end_s(now_s, node.costs.work_s(work))
        self._clock.at_end(end_s, self._ran, node, node.life, work, now_s)

    def _ran(self, node: _Node, life: int, work: Work, start_s: float) -> None:
        if node.life != life:
            return
        facts = self._account(node, work, start_s)
        self._end_work(node, work, Gathered(of=(facts,)) if work.group else facts)

    def _account(self, node: _Node, work: Work, start_s: float) -> Facts | None:
        """Note what a member did, and give the facts with which it ends."""
        now_s = self._clock.now_s
        if now_s > start_s or work.kind in _ALWAYS_SHOWN:
            self._recording.note(now_s, node.track, str(work.kind), work.name, start_s)
        if work.lane is Lane.COMPUTE:
            self._recording.compute(node.member.cloud, work.step, now_s - start_s)
        return node.costs.work_facts(work, now_s - start_s)

    def _end_work(self, node: _Node, work: Work, facts: Facts | None) -> None:
        """What arrived while the member computed goes before the end of what it computed."""
        node.busy.discard(work.lane)
        if work.lane is Lane.COMPUTE and node.waiting:
            waiting, node.waiting = node.waiting, deque()
            for event in waiting:
                self._feed(node, event)
        self._feed(node, Done(work, facts))

    def _meet(self, node: _Node, work: Work) -> None:
        """Start a group work when all its members have come to it."""
        group = work.group[0], len(work.group)
        number = node.num_group_works[group]
        node.num_group_works[group] = number + 1
        present = self._meetings.setdefault((group, number), [])
        present.append((node, work))
        if present[0][1].kind is not work.kind:
            raise ScheduleError(f"{work.name} of {node.member} meets {present[0][1].name} of its group")
        if len(present) < len(work.group):
            return
        del self._meetings[group, number]
        now_s = self._clock.now_s
        end_s = max(one.pace.end_s(now_s, one.costs.work_s(of)) for one, of in present)
        self._clock.at_end(end_s, self._met, [(one, one.life, of) for one, of in present], now_s)

    def _met(self, present: list[tuple[_Node, int, Work]], start_s: float) -> None:
        if any(node.life != life for node, life, _ in present):
            return
        present = sorted(present, key=lambda one: one[0].member.rank)
        facts = Gathered(of=tuple(self._account(node, work, start_s) for node, _, work in present))
        for node, _, work in present:
            self._end_work(node, work, facts)

    # Messages.

    def _send(self, node: _Node, message: Message) -> None:
        coding_s, num_bytes = node.costs.coding_s(message), node.costs.message_bytes(message)
        parcel = _Parcel(node, node.life, message, num_bytes, coding_s, len(message.to))
        if not coding_s:
            self._put_on_lines(parcel)
            return
        cloud = message.to[0].cloud
        begun_s = max(self._clock.now_s, node.coded_s[cloud])
        node.coded_s[cloud] = begun_s + coding_s
        self._clock.at(begun_s + coding_s, self._coded, parcel, begun_s)

    def _coded(self, parcel: _Parcel, begun_s: float) -> None:
        message = parcel.message
        track = self._sight.way(message.sender.cloud, message.to[0].cloud).track
        self._recording.note(self._clock.now_s, track, "encode", message.name, begun_s, parcel.num_bytes)
        self._put_on_lines(parcel)

    def _put_on_lines(self, parcel: _Parcel) -> None:
        if parcel.life == parcel.node.life:
            for to in parcel.message.to:
                self._put_on_line(parcel, self._nodes[to])

    def _put_on_line(self, parcel: _Parcel, peer: _Node) -> None:
        now_s, node = self._clock.now_s, parcel.node
        way = self._sight.way(node.member.cloud, peer.member.cloud)
        arrived: Then = partial(self._arrived, parcel, peer, self._epoch(node, peer), now_s)
        sent = partial(self._sent, parcel, way.facts(parcel.coding_s, parcel.num_bytes))
        if not way.flows:
            self._clock.at(now_s, sent)
            self._clock.at(now_s, arrived)
            return
        for flow in reversed(way.flows[1:]):
            arrived = partial(self._pass_on, flow, parcel, peer.member, lambda: None, arrived)
        self._pass_on(way.flows[0], parcel, peer.member, sent, arrived)

    def _sent(self, parcel: _Parcel, facts: Carried) -> None:
        """Count the receivers of a message; it is sent when the lines to all of them have taken it."""
        parcel.num_left -= 1
        if not parcel.num_left and parcel.node.life == parcel.life:
            self._feed(parcel.node, Sent(parcel.message, facts))

    def _pass_on(self, flow: Flow, parcel: _Parcel, to: Member, sent: Then, arrived: Then) -> None:
        """Send a message over one line of its route."""
        message, num_bytes = parcel.message, parcel.num_bytes
        if message.priority is Priority.URGENT and not num_bytes:
            flow.whisper(arrived)
            self._clock.at(self._clock.now_s, sent)
        elif message.priority is Priority.BACKGROUND:
            flow.send_in_background(num_bytes, arrived=arrived)
            self._clock.at(self._clock.now_s, sent)
        else:
            flow.send((message.sender, to), num_bytes, sent=sent, arrived=arrived)

    def _epoch(self, node: _Node, peer: _Node) -> int:
        """Grows with every life of both ends and session between them; what was sent before is lost."""
        return node.life + peer.life + self._sight.session(node.member.cloud, peer.member.cloud)

    def _arrived(self, parcel: _Parcel, peer: _Node, epoch: int, start_s: float) -> None:
        node, message, now_s = parcel.node, parcel.message, self._clock.now_s
        sender, receiver = node.member.cloud, peer.member.cloud
        if sender != receiver and parcel.num_bytes:
            track = self._sight.way(sender, receiver).track
            self._recording.note(now_s, track, "transfer", message.name, start_s, parcel.num_bytes)
        if epoch == self._epoch(node, peer) and not self._sight.are_parted(sender, receiver):
            self._feed(peer, Arrived(message, now_s - start_s))

    def _if_alive(self, node: _Node, life: int, event: Event) -> None:
        if node.life == life:
            self._feed(node, event)

    # Saving, and clouds that vanish.

    def _save(self, node: _Node, step: int, facts: Facts | None) -> None:
        num_bytes = node.costs.saved_bytes()
        self._safe.expect(step, at_s=self._clock.now_s)
        saved = partial(self._saved, node, node.life, step, facts, num_bytes, self._clock.now_s)
        to = self._keeper_of(node.member.cloud)
        if num_bytes and to is not None:
            self._flows[node.member.cloud, to].send_in_background(num_bytes, arrived=saved)
        else:
            self._clock.at(self._clock.now_s, saved)

    def _saved(
        self, node: _Node, life: int, step: int, facts: Facts | None, num_bytes: int, start_s: float
    ) -> None:
        to = self._keeper_of(node.member.cloud)
        if num_bytes and to is not None:
            track = self._sight.way(node.member.cloud, to).track
            self._recording.note(self._clock.now_s, track, "save", f"save {step}", start_s, num_bytes)
        if node.life == life:
            node.saved[step] = facts
            self._safe.arrive(step)
            self._feed(node, Saved(step))

    def _keeper_of(self, cloud: str) -> str | None:
        """The cloud that keeps a copy of this one's state: the next in order, or else the one before."""
        place = self._clouds.index(cloud)
        near = [*self._clouds[place + 1 : place + 2], *self._clouds[max(0, place - 1) : place]]
        return next((one for one in near if (cloud, one) in self._flows), None)

    def part_clouds(self, faults: Sequence[Disturbance], patience_s: float) -> None:
        """Let pairs of clouds lose each other while nothing passes between them."""
        outages = {
            pair: outages_of(faults_between(faults, *pair), latency_s=line.latency_s)
            for pair, line in self._lines.items()
        }
        if not any(outages.values()):
            return
        for one, other, start_s, end_s in self._sight.silences(self._clouds, outages):
            if end_s - start_s > patience_s:
                self._clock.at(start_s, self._tell_pair, one, other, False)
                self._clock.at(start_s + patience_s, self._part, one, other)
                self._clock.at(end_s, self._rejoin, one, other)

    def _lose(self, fault: CloudFault) -> None:
        lost = self._nodes_of(fault.cloud)
        if not any(node.runs for node in self._nodes.values()) or not lost or lost[0].is_gone:
            return
        for node in lost:
            node.vanish()
        self._meetings = {key: of for key, of in self._meetings.items() if key[0][0].cloud != fault.cloud}
        for pair in self._sight.routes_through(fault.cloud, self._clouds):
            self._sight.part(*pair)
        if fault.duration_s:
            self._num_returning += 1
            self._clock.at(self._clock.now_s + fault.duration_s, self._return, fault.cloud)
        if self._patience_s:
            self._tell_others(lost, final=False)
            self._clock.at(self._clock.now_s + self._patience_s, self._give_up, lost, lost[0].life)
        else:
            self._give_up(lost, lost[0].life)

    def _give_up(self, lost: list[_Node], life: int) -> None:
        if not lost[0].is_gone or lost[0].life != life:
            return
        running = [node for node in self._nodes.values() if node.runs]
        self._tell_others(lost, final=True)
        is_over = not running and not any(node.outcome for node in self._nodes.values())
        if any(node.outcome is Outcome.FAILED for node in running) or (is_over and not self._num_returning):
            self._end(lost[0].member.cloud)
        for one, other in self._sight.routes_through(lost[0].member.cloud, self._clouds):
            self._tell_pair(one, other, True)

    def _tell_others(self, lost: list[_Node], *, final: bool) -> None:
        for node in self._nodes.values():
            for one in lost:
                self._feed_now(node, Lost(one.member, final))

    def _feed_now(self, node: _Node, event: Lost) -> None:
        """Tell a member of a loss at once, whatever it computes; what it had not seen yet is lost, too."""
        if not node.runs:
            return
        if event.final:
            node.waiting = deque(one for one in node.waiting if not tells_of(one, event.member.cloud))
        for action in node.scheduler.on(event, self._clock.now_s):
            self._carry_out(node, action)

    def _part(self, one: str, other: str) -> None:
        if self._sight.part(one, other):
            self._tell_pair(one, other, True)

    def _rejoin(self, one: str, other: str) -> None:
        if self._sight.rejoin(one, other):
            for first, second in self._pairs(one, other):
                self._feed(first, Joined(second.member))

    def _tell_pair(self, one: str, other: str, final: bool) -> None:
        for first, second in self._pairs(one, other):
            self._feed_now(first, Lost(second.member, final))

    def _pairs(self, one: str, other: str) -> list[tuple[_Node, _Node]]:
        """All members of two clouds with each other, both ways, where both are there."""
        first, second = self._nodes_of(one), self._nodes_of(other)
        found = [(node, peer) for node in first for peer in second]
        return [pair for pair in (*found, *((b, a) for a, b in found)) if not pair[1].is_gone]

    def _nodes_of(self, cloud: str) -> list[_Node]:
        return [node for node in self._nodes.values() if node.member.cloud == cloud]

    def _return(self, cloud: str) -> None:
        """The members of a cloud start again from what all of them have saved, and meet the others."""
        self._num_returning -= 1
        back = self._nodes_of(cloud)
        others = [node for node in self._nodes.values() if node not in back]
        if any(node.outcome for node in back) or any(one.outcome is Outcome.FINISHED for one in others):
            # It has stopped before, or the run is over.
            return
        step = max(set.intersection(*(set(node.saved) for node in back)), default=0)
        for node in back:
            node.is_gone = False
            node.life += 1
            node.num_restarts += 1
            node.scheduler = self._strategy.scheduler(node.member)
        for pair in self._sight.routes_through(cloud, self._clouds):
            self._rejoin(*pair)
        in_sight = [node for node in others if not self._sight.are_parted(cloud, node.member.cloud)]
        for node in in_sight:
            for one in back:
                self._feed(node, Joined(one.member))
        for one in back:
            self._feed(one, Started(step, one.saved.get(step), one.num_restarts))
            for node in others:
                if not node.runs or node not in in_sight:
                    self._feed_now(one, Lost(node.member, True))

    def _end(self, cloud: str) -> None:
        now_s, (step, taken_s) = self._clock.now_s, self._safe.newest
        self._stopped = Stopped(
            cloud=cloud, at_s=now_s, step=self._recording.num_steps, safe_step=step, lost_s=now_s - taken_s
        )
        self._clock.stop()
