"""Runs a strategy in the simulator and records every event and action, life by life, for oracles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from isthmus.plan.types import (
    Action,
    Costs,
    Event,
    Facts,
    Member,
    MessageKind,
    Outcome,
    Run,
    Save,
    Scheduler,
    Send,
    Started,
    Stop,
    Strategy,
    Work,
    pack_facts,
    unpack_facts,
)


@dataclass(slots=True)
class Life:
    """One scheduler from its start to its end, or to a crash."""

    member: Member
    scheduler: Scheduler
    log: list[tuple[Event, float, tuple[Action, ...]]] = field(default_factory=list)

    def on(self, event: Event, now_s: float) -> Sequence[Action]:
        actions = tuple(self.scheduler.on(event, now_s))
        self.log.append((event, now_s, actions))
        return actions

    @property
    def actions(self) -> Iterator[Action]:
        return (action for _, _, actions in self.log for action in actions)

    @property
    def events(self) -> list[Event]:
        return [event for event, _, _ in self.log]

    @property
    def started(self) -> Started:
        event = self.log[0][0]
        assert isinstance(event, Started)
        return event

    @property
    def outcome(self) -> Outcome | None:
        return next((one.outcome for one in self.actions if isinstance(one, Stop)), None)

    @property
    def group_works(self) -> list[tuple[str, int, int]]:
        runs = [one.work for one in self.actions if isinstance(one, Run)]
        return [_name(work) for work in runs if len(work.group) > 1]


class Recorded:
    """A strategy whose schedulers are recorded."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.lives: dict[Member, list[Life]] = {member: [] for member in strategy.members}

    @property
    def members(self) -> Sequence[Member]:
        return self._strategy.members

    def scheduler(self, member: Member) -> Scheduler:
        life = Life(member, self._strategy.scheduler(member))
        self.lives[member].append(life)
        return life

    def costs(self, member: Member) -> Costs:
        return self._strategy.costs(member)

    def outcome(self, member: Member) -> Outcome | None:
        return self.lives[member][-1].outcome

    def check(self, facts: dict[MessageKind, type[Facts]]) -> None:
        """What holds for every strategy: purity, one order of group works, facts that can be sent."""
        for member, lives in self.lives.items():
            for life in lives:
                fresh = self._strategy.scheduler(member)
                for event, now_s, actions in life.log:
                    assert tuple(fresh.on(event, now_s)) == actions, "a scheduler is pure"
                _check_facts(life, facts)
        clouds = {member.cloud for member in self.lives}
        for cloud in clouds:
            ranks = [lives for member, lives in self.lives.items() if member.cloud == cloud]
            for same_life in zip(*ranks, strict=True):
                _check_order([life.group_works for life in same_life])


def _check_order(works: list[list[tuple[str, int, int]]]) -> None:
    """Of two ranks one may be behind the other, and they differ in nothing else."""
    longest = max(works, key=len)
    for one in works:
        assert one == longest[: len(one)]


def _check_facts(life: Life, facts: dict[MessageKind, type[Facts]]) -> None:
    for action in life.actions:
        if isinstance(action, Send) and action.message.facts is not None:
            kind = facts[action.message.kind]
            assert unpack_facts(pack_facts(action.message.facts), kind) == action.message.facts
        if isinstance(action, Save) and action.facts is not None:
            assert unpack_facts(pack_facts(action.facts), type(action.facts)) == action.facts


def _name(work: Work) -> tuple[str, int, int]:
    return work.kind.value, work.step, work.item
