"""Runs the schedulers of any strategy on a virtual clock, so that it takes every decision that workers take.

    clock ──► Arrived, Done, Sent ──► scheduler ──► Run     its end, after the time that its costs say
      ▲                                         ──► Send    coded, on the line, under way, Arrived
      └─────────────────────────────────────────┴─► Save    copied to another cloud in the background, Saved

There is one scheduler per member. While a member computes, its events wait, as they do in a worker. Messages
of one pair of members keep their order; pairs share their line, and clouds that no line joins send over
others, by `plan/lines.py`. Clouds fail and return by `plan/failures.py`.
"""

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from isthmus.events import Span
from isthmus.plan.end_of_step import StepEnded
from isthmus.plan.failures import Failures, Group, Node
from isthmus.plan.lines import Clock, Disturbance, Flow, Sight, Then, open_flows, pace_of
from isthmus.plan.scenario import Line
from isthmus.plan.types import (
    Action,
    Arrived,
    Carried,
    Done,
    Elapsed,
    Event,
    Facts,
    Gathered,
    Lane,
    Member,
    Message,
    Outcome,
    Priority,
    Run,
    Save,
    Saved,
    ScheduleError,
    Send,
    Sent,
    Started,
    Stop,
    Stored,
    Strategy,
    Tell,
    Wake,
    Work,
    WorkKind,
)

_NUM_WARM_UP_STEPS: Final = 1
# Works that take no time are not shown, but for these.
_ALWAYS_SHOWN: Final = frozenset({WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.EVALUATE, WorkKind.UPDATE})


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step, from its start to the end of its update at the first stage.

    `busy_s` is how long a rank of each stage computed on average, `windows` what each rank kept in flight.
    """

    step: int
    start_s: float
    end_s: float
    busy_s: tuple[float, ...]
    windows: tuple[int, ...]

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of it in which each stage did not compute."""
        duration_s = self.duration_s
        return tuple(max(0.0, 1 - busy_s / duration_s) if duration_s else 0.0 for busy_s in self.busy_s)

    @property
    def bubble(self) -> float:
        """The mean over stages."""
        return statistics.fmean(self.bubbles)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTraffic:
    """What crossed one line: messages down and up the pipeline, and copies of checkpoints."""

    between: tuple[str, str]
    down_bytes: int
    up_bytes: int
    checkpoint_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A cloud has failed, which ends a pipeline; what was computed since the last safe step is lost."""

    cloud: str
    at_s: float
    step: int
    """The step that was under way."""
    safe_step: int
    """The step from which the run can go on: the last whose state is whole without that cloud, or 0."""
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A fact that a member told, and when."""

    member: Member
    at_s: float
    fact: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated run."""

    spans: tuple[Span, ...]
    steps: tuple[SimulatedStep, ...]
    traffic: tuple[LineTraffic, ...]
    stopped: Stopped | None = None
    told: tuple[Told, ...] = ()

    @property
    def step_s(self) -> float:
        """The median time of a step; the first, in which windows are not measured yet, counts only alone.

        NaN where not even one has ended.
        """
        durations_s = [step.duration_s for step in self.steps]
        return statistics.median(durations_s[_NUM_WARM_UP_STEPS:] or durations_s or [math.nan])

    def window(self, start_s: float, end_s: float) -> tuple[Span, ...]:
        """The spans between two times, as they would be seen from the first one on."""
        return tuple(
            one._replace(start_s=max(one.start_s, start_s) - start_s, end_s=min(one.end_s, end_s) - start_s)
            for one in self.spans
            if one.start_s < end_s and one.end_s > start_s
        )

    @property
    def bubble(self) -> float:
        """The mean over the steps that count for `step_s`."""
        bubbles = [step.bubble for step in self.steps]
        return statistics.fmean(bubbles[_NUM_WARM_UP_STEPS:] or bubbles or [math.nan])


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
    simulation = _Simulation(strategy, lines, seed, faults, background_share)
    return simulation.run(faults, patience_s, line_patience_s)


@dataclass(slots=True)
class _Parcel:
    """A message on its way: its sender and in which of its lives, and how many lines have to take it."""

    node: Node
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
        background_share: float,
    ) -> None:
        self._strategy = strategy
        self._clock = Clock()
        self._lines = lines
        self._flows = open_flows(self._clock, lines, seed=seed, faults=faults, share=background_share)
        self._sight = Sight(lines, self._flows)
        self._members = tuple(strategy.members)
        self._clouds = list(dict.fromkeys(member.cloud for member in self._members))
        self._nodes = self._make_nodes(faults)
        self._failures = Failures(self._nodes, self._clock, self._sight, strategy, self._feed, self._stop)
        self._meetings: dict[tuple[Group, int, int], list[tuple[Node, Work]]] = {}
        self._spans: list[Span] = []
        self._told: list[Told] = []
        self._busy_s: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._taken_s: dict[int, float] = {}
        """When the state of each step was first taken, to be saved."""
        self._stopped: Stopped | None = None

    def run(self, faults: Sequence[Disturbance], patience_s: float, line_patience_s: float) -> Timeline:
        """Let everything happen."""
        self._failures.plan(faults, patience_s=patience_s)
        self._failures.plan_silences(self._lines, faults, patience_s=line_patience_s)
        for node in self._nodes.values():
            self._feed(node, Started(0))
        self._clock.run()
        if self._stopped is None and any(node.runs for node in self._nodes.values()):
            raise ValueError("the members of this strategy wait for each other for ever")
        return Timeline(
            spans=tuple(self._spans),
            steps=tuple(self._steps()),
            traffic=tuple(map(self._traffic, self._lines)),
            stopped=self._stopped,
            told=tuple(self._told),
        )

    def _steps(self) -> Iterator[SimulatedStep]:
        """The steps of the run, which end as the first member tells it."""
        start_s, num_ranks = 0.0, Counter(member.cloud for member in self._members)
        for one in self._told:
            if isinstance(one.fact, StepEnded) and one.member == self._members[0]:
                step, windows = one.fact.step, one.fact.windows
                busy_s = tuple(self._busy_s[cloud, step] / number for cloud, number in num_ranks.items())
                yield SimulatedStep(
                    step=step, start_s=start_s, end_s=one.at_s, busy_s=busy_s, windows=windows
                )
                start_s = one.at_s

    def _traffic(self, pair: tuple[str, str]) -> LineTraffic:
        down, up = self._flows[pair], self._flows[pair[::-1]]
        return LineTraffic(
            between=pair,
            down_bytes=down.num_bytes,
            up_bytes=up.num_bytes,
            checkpoint_bytes=down.background_bytes + up.background_bytes,
        )

    def _make_nodes(self, faults: Sequence[Disturbance]) -> dict[Member, Node]:
        num_ranks = Counter(member.cloud for member in self._members)
        paces = {cloud: pace_of(faults, cloud) for cloud in self._clouds}
        return {
            member: Node(
                member,
                member.cloud if num_ranks[member.cloud] == 1 else str(member),
                paces[member.cloud],
                self._strategy.costs(member),
                self._strategy.scheduler(member),
            )
            for member in self._members
        }

    # Events to the schedulers, and their actions.

    def _feed(self, node: Node, event: Event, *, at_once: bool = False) -> None:
        """Tell a member what happened when it does not compute, or at once."""
        if node.is_gone or node.outcome is not None:
            return
        if Lane.COMPUTE in node.busy and not at_once:
            node.waiting.append(event)
            return
        for action in node.scheduler.on(event, self._clock.now_s):
            self._carry_out(node, action)

    def _carry_out(self, node: Node, action: Action) -> None:
        match action:
            case Run(work=work):
                self._run(node, work)
            case Send(message=message):
                self._send(node, message)
            case Tell(fact=fact):
                self._told.append(Told(member=node.member, at_s=self._clock.now_s, fact=fact))
            case Save(step=step, facts=facts):
                self._save(node, step, facts)
            case Wake(at_s=at_s):
                self._clock.at(at_s, self._if_alive, node, node.life, Elapsed())
            case Stop(outcome=outcome):
                node.outcome = outcome
                if outcome in (Outcome.FAILED, Outcome.REFORM):
                    self._clock.at(self._clock.now_s, partial(self._failures.tell_others, [node], final=True))

    # Works.

    def _run(self, node: Node, work: Work) -> None:
        if work.lane in node.busy:
            raise ScheduleError(f"{work.name} of {node.member} is to run beside another on its lane")
        node.busy.add(work.lane)
        present = [(node, work)] if len(work.group) < 2 else self._meet(node, work)
        if present:
            now_s = self._clock.now_s
            end_s = max(one.pace.end_s(now_s, one.costs.work_s(of)) for one, of in present)
            self._clock.at_end(end_s, self._ran, [(one, one.life, of) for one, of in present], now_s)

    def _meet(self, node: Node, work: Work) -> list[tuple[Node, Work]]:
        """All members of a group work with their works when the last has come to it, before that none."""
        group = work.group[0], len(work.group)
        key = group, node.life, node.num_group_works[group]
        node.num_group_works[group] += 1
        present = self._meetings.setdefault(key, [])
        present.append((node, work))
        if present[0][1].kind is not work.kind:
            raise ScheduleError(f"{work.name} of {node.member} meets {present[0][1].name} of its group")
        if len(present) < len(work.group):
            return []
        return sorted(self._meetings.pop(key), key=lambda one: one[0].member.rank)

    def _ran(self, present: list[tuple[Node, int, Work]], start_s: float) -> None:
        if any(node.life != life for node, life, _ in present):
            return
        found = tuple(self._account(node, work, start_s) for node, _, work in present)
        for node, _, work in present:
            self._end_work(node, work, Gathered(of=found) if work.group else found[0])

    def _account(self, node: Node, work: Work, start_s: float) -> Facts | None:
        """Note what a member did, and give the facts with which it ends."""
        now_s = self._clock.now_s
        if now_s > start_s or work.kind in _ALWAYS_SHOWN:
            self._spans.append(Span(node.track, work.name, str(work.kind), start_s, now_s, 0))
        if work.lane is Lane.COMPUTE:
            self._busy_s[node.member.cloud, work.step] += now_s - start_s
        return node.costs.work_facts(work, now_s - start_s)

    def _end_work(self, node: Node, work: Work, facts: Facts | None) -> None:
        """What arrived while the member computed goes before the end of what it computed."""
        node.busy.discard(work.lane)
        if work.lane is Lane.COMPUTE and node.waiting:
            waiting, node.waiting = node.waiting, deque()
            for event in waiting:
                self._feed(node, event)
        self._feed(node, Done(work, facts))

    # Messages.

    def _send(self, node: Node, message: Message) -> None:
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
        self._show(
            "encode", message.name, (message.sender.cloud, message.to[0].cloud), begun_s, parcel.num_bytes
        )
        self._put_on_lines(parcel)

    def _show(self, kind: str, name: str, between: tuple[str, str], start_s: float, num_bytes: int) -> None:
        """Note the span of something that crosses from one cloud to another and ends now."""
        track = self._sight.way(*between).track
        self._spans.append(Span(track, name, kind, start_s, self._clock.now_s, num_bytes))

    def _put_on_lines(self, parcel: _Parcel) -> None:
        if parcel.life == parcel.node.life:
            for to in parcel.message.to:
                self._put_on_line(parcel, self._nodes[to])

    def _put_on_line(self, parcel: _Parcel, peer: Node) -> None:
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

    def _epoch(self, node: Node, peer: Node) -> int:
        """Grows with every life of both ends and session between them; what was sent before is lost."""
        return node.life + peer.life + self._sight.session(node.member.cloud, peer.member.cloud)

    def _arrived(self, parcel: _Parcel, peer: Node, epoch: int, start_s: float) -> None:
        node, message, now_s = parcel.node, parcel.message, self._clock.now_s
        sender, receiver = node.member.cloud, peer.member.cloud
        if sender != receiver and parcel.num_bytes:
            self._show("transfer", message.name, (sender, receiver), start_s, parcel.num_bytes)
        if epoch == self._epoch(node, peer) and not self._sight.are_parted(sender, receiver):
            self._feed(peer, Arrived(message, now_s - start_s))

    def _if_alive(self, node: Node, life: int, event: Event) -> None:
        if node.life == life:
            self._feed(node, event)

    # Saving.

    def _save(self, node: Node, step: int, facts: Facts | None) -> None:
        now_s, cloud, num_bytes = self._clock.now_s, node.member.cloud, node.costs.saved_bytes()
        self._taken_s.setdefault(step, now_s)
        saved = partial(self._saved, node, node.life, step, facts, now_s)
        keeper = self._keeper_of(cloud) if num_bytes else None
        if keeper is None:
            self._clock.at(now_s, saved)
            return

        def arrived() -> None:
            self._show("save", f"save {step}", (cloud, keeper), now_s, num_bytes)
            saved()

        self._flows[cloud, keeper].send_in_background(num_bytes, arrived=arrived)

    def _saved(self, node: Node, life: int, step: int, facts: Facts | None, begun_s: float) -> None:
        if node.life == life:
            node.saved[step] = facts
            self._feed(node, Saved(step, Stored(save_s=self._clock.now_s - begun_s)))

    def _keeper_of(self, cloud: str) -> str | None:
        """The cloud that keeps a copy of this one's state: the next in order, or else the one before."""
        place = self._clouds.index(cloud)
        near = [*self._clouds[place + 1 : place + 2], *self._clouds[max(0, place - 1) : place]]
        return next((one for one in near if (cloud, one) in self._flows), None)

    def _stop(self, cloud: str) -> None:
        """End a run that cannot go on without a cloud; step 0 needs no copy to start from."""
        now_s = self._clock.now_s
        safe_step = max(set.intersection(*(set(node.saved) for node in self._nodes.values())), default=0)
        self._stopped = Stopped(
            cloud=cloud,
            at_s=now_s,
            step=sum(1 for _ in self._steps()),
            safe_step=safe_step,
            lost_s=now_s - self._taken_s.get(safe_step, 0.0),
        )
        self._clock.stop()
