"""The members of a simulation, and what happens to them when clouds fail, return, or lose each other."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from isthmus.job.faults import CloudFault, CloudFaultKind
from isthmus.plan.lines import Clock, Disturbance, Pace, Sight, faults_between, outages_of, tells_of
from isthmus.plan.scenario import Line
from isthmus.plan.types import (
    Costs,
    Event,
    Facts,
    Joined,
    Lane,
    Lost,
    Member,
    Outcome,
    Scheduler,
    Started,
    Strategy,
)

Group = tuple[Member, int]
"""A group by its first member and its size."""


class Node:
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
        self.num_group_works: defaultdict[Group, int] = defaultdict(int)
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


class Failures:
    """Clouds that fail and return, and pairs of clouds between which nothing passes.

    `feed` tells a member of an event, `stop` ends the simulation of a run that cannot go on without a cloud.
    """

    def __init__(
        self,
        nodes: Mapping[Member, Node],
        clock: Clock,
        sight: Sight,
        strategy: Strategy,
        feed: Callable[..., None],
        stop: Callable[[str], None],
    ) -> None:
        self._nodes = nodes
        self._clouds = list(dict.fromkeys(member.cloud for member in nodes))
        self._clock = clock
        self._sight = sight
        self._strategy = strategy
        self._feed = feed
        self._stop = stop
        self._patience_s = 0.0
        self._num_returning = 0

    def plan(self, faults: Sequence[Disturbance], *, patience_s: float) -> None:
        """Let clouds fail when their faults say so; after `patience_s` the others give them up."""
        self._patience_s = patience_s
        for fault in faults:
            if isinstance(fault, CloudFault) and fault.kind in (CloudFaultKind.GONE, CloudFaultKind.KILL):
                self._clock.at(fault.at_s, self._lose, fault)

    def plan_silences(
        self, lines: Mapping[tuple[str, str], Line], faults: Sequence[Disturbance], *, patience_s: float
    ) -> None:
        """Let pairs of clouds lose each other while nothing passes between them."""
        outages = {
            pair: outages_of(faults_between(faults, *pair), latency_s=line.latency_s)
            for pair, line in lines.items()
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
        for pair in self._sight.routes_through(fault.cloud, self._clouds):
            self._sight.part(*pair)
        if fault.duration_s:
            self._num_returning += 1
            self._clock.at(self._clock.now_s + fault.duration_s, self._return, fault.cloud)
        if self._patience_s:
            self.tell_others(lost, final=False)
            self._clock.at(self._clock.now_s + self._patience_s, self._give_up, lost, lost[0].life)
        else:
            self._give_up(lost, lost[0].life)

    def _give_up(self, lost: list[Node], life: int) -> None:
        if not lost[0].is_gone or lost[0].life != life:
            return
        running = [node for node in self._nodes.values() if node.runs]
        self.tell_others(lost, final=True)
        is_over = not running and not any(node.outcome for node in self._nodes.values())
        if any(node.outcome in (Outcome.FAILED, Outcome.REFORM) for node in running) or (
            is_over and not self._num_returning
        ):
            self._stop(lost[0].member.cloud)
        for one, other in self._sight.routes_through(lost[0].member.cloud, self._clouds):
            self._tell_pair(one, other, True)

    def tell_others(self, lost: list[Node], *, final: bool) -> None:
        """Tell all members that some are lost."""
        for node in self._nodes.values():
            for one in lost:
                self._tell_now(node, Lost(one.member, final))

    def _tell_now(self, node: Node, event: Lost) -> None:
        """Tell a member of a loss at once, whatever it computes; what it had not seen yet is lost, too."""
        if event.final:
            node.waiting = deque(one for one in node.waiting if not tells_of(one, event.member.cloud))
        self._feed(node, event, at_once=True)

    def _part(self, one: str, other: str) -> None:
        if self._sight.part(one, other):
            self._tell_pair(one, other, True)

    def _rejoin(self, one: str, other: str) -> None:
        if self._sight.rejoin(one, other):
            for first, second in self._pairs(one, other):
                self._feed(first, Joined(second.member))

    def _tell_pair(self, one: str, other: str, final: bool) -> None:
        for first, second in self._pairs(one, other):
            self._tell_now(first, Lost(second.member, final))

    def _pairs(self, one: str, other: str) -> list[tuple[Node, Node]]:
        """All members of two clouds with each other, both ways, where both are there."""
        first, second = self._nodes_of(one), self._nodes_of(other)
        found = [(node, peer) for node in first for peer in second]
        return [pair for pair in (*found, *((b, a) for a, b in found)) if not pair[1].is_gone]

    def _nodes_of(self, cloud: str) -> list[Node]:
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
                    self._tell_now(one, Lost(node.member, True))
