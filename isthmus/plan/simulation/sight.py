"""Which clouds reach each other: routes over lines, and pairs of clouds that have given each other up."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise

from isthmus.plan.simulation.flows import Flow, Outage
from isthmus.plan.types import Arrived, Carried, Event, Joined


class Way:
    """The lines from one cloud to another, none inside a cloud, and what wires measure on them."""

    def __init__(self, track: str, flows: Sequence[Flow]) -> None:
        self.track = track
        self.flows = flows
        self._rtt_s = 2 * sum(flow.latency_s for flow in flows)
        self._facts: dict[tuple[float, int], Carried] = {}

    def facts(self, coding_s: float, num_bytes: int) -> Carried:
        """What a wire measures, which is the same for most messages."""
        known = self._facts.get((coding_s, num_bytes))
        if known is None:
            known = Carried(coding_s=coding_s, rtt_s=self._rtt_s, num_bytes=num_bytes)
            self._facts[coding_s, num_bytes] = known
        return known


class Sight:
    """Routes messages over the fewest lines, and counts the sessions of each pair of clouds.

    What was sent in one session does not arrive in the next: a link drops it.
    """

    def __init__(self, lines: Iterable[tuple[str, str]], flows: Mapping[tuple[str, str], Flow]) -> None:
        self._flows = flows
        self._ways: dict[tuple[str, str], Way] = {}
        self._neighbours: defaultdict[str, list[str]] = defaultdict(list)
        for first, second in lines:
            self._neighbours[first].append(second)
            self._neighbours[second].append(first)
        self._routes: dict[tuple[str, str], tuple[str, ...]] = {}
        self._sessions: Counter[frozenset[str]] = Counter()
        self._causes: Counter[frozenset[str]] = Counter()

    def way(self, sender: str, receiver: str) -> Way:
        """The lines from one cloud to another."""
        known = self._ways.get((sender, receiver))
        if known is None:
            clouds = self.route(sender, receiver) if sender != receiver else ()
            known = Way(f"{sender}→{receiver}", [self._flows[hop] for hop in pairwise(clouds)])
            self._ways[sender, receiver] = known
        return known

    def route(self, sender: str, receiver: str) -> tuple[str, ...]:
        """The clouds that a message passes, its sender and its receiver among them."""
        known = self._routes.get((sender, receiver))
        if known is None:
            known = self._routes[sender, receiver] = self._search(sender, receiver)
        return known

    def routes_through(self, cloud: str, clouds: Sequence[str]) -> list[tuple[str, str]]:
        """The pairs of other clouds whose messages this one passes on."""
        return [pair for pair in combinations(clouds, 2) if cloud in self.route(*pair)[1:-1]]

    def session(self, one: str, other: str) -> int:
        """The number of the session between two clouds."""
        return self._sessions[frozenset((one, other))] if self._sessions else 0

    def part(self, one: str, other: str) -> bool:
        """Count one more cause why two clouds do not reach each other; True for the first."""
        pair = frozenset((one, other))
        self._sessions[pair] += 1
        self._causes[pair] += 1
        return self._causes[pair] == 1

    def rejoin(self, one: str, other: str) -> bool:
        """Count one cause less; True where two clouds reach each other again, in a new session."""
        pair = frozenset((one, other))
        self._sessions[pair] += 1
        self._causes[pair] -= 1
        return not self._causes[pair]

    def are_parted(self, one: str, other: str) -> bool:
        """Whether two clouds have given each other up."""
        return bool(self._causes) and self._causes[frozenset((one, other))] > 0

    def silences(
        self, clouds: Sequence[str], outages: Mapping[tuple[str, str], Sequence[Outage]]
    ) -> Iterator[tuple[str, str, float, float]]:
        """From when to when no message gets from one cloud of a pair to the other, for each pair."""
        for one, other in combinations(clouds, 2):
            on_route = [
                outage
                for first, second in pairwise(self.route(one, other))
                for outage in outages.get((first, second)) or outages.get((second, first)) or ()
            ]
            for start_s, end_s in _merged(on_route):
                yield one, other, start_s, end_s

    def _search(self, sender: str, receiver: str) -> tuple[str, ...]:
        before = {sender: sender}
        queue = deque([sender])
        while queue and receiver not in before:
            cloud = queue.popleft()
            for near in self._neighbours[cloud]:
                if near not in before:
                    before[near] = cloud
                    queue.append(near)
        if receiver not in before:
            raise ValueError(f"no line joins {sender} and {receiver}")
        route = [receiver]
        while route[-1] != sender:
            route.append(before[route[-1]])
        return tuple(reversed(route))


def tells_of(event: Event, cloud: str) -> bool:
    """Whether a cloud is there by this event, or has sent it."""
    match event:
        case Arrived(message=message):
            return message.sender.cloud == cloud
        case Joined(member=member):
            return member.cloud == cloud
        case _:
            return False


def _merged(outages: Iterable[Outage]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for outage in sorted(outages, key=lambda one: one.start_s):
        if merged and outage.start_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], outage.end_s)
        else:
            merged.append((outage.start_s, outage.end_s))
    return merged
