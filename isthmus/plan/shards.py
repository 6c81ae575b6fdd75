"""How all ranks of a cloud exchange their shards of the outer parameters, while their leader alone decides.

    leader     ShardOrder ──► sibling     a work on the host, or a message to the same rank of other clouds
    sibling    Noted ──► leader           a message has arrived here, a work is done, a cloud is lost or there

The leader takes in what has arrived, or is done on the host, once that is so at all ranks. Only shards cross,
from rank to rank, so no rank gathers the model.
"""

import hashlib
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field

from isthmus.plan.membership import Applied, Clouds, DataParallel, Piece, RoundCommit, Snapshot
from isthmus.plan.orders import Leader, Sibling, not_awaited
from isthmus.plan.types import (
    Action,
    Arrived,
    Count,
    Done,
    Event,
    Facts,
    Joined,
    Lane,
    Lost,
    Member,
    Message,
    MessageKind,
    NotDone,
    Priority,
    Run,
    Send,
    Work,
    WorkKind,
)

SHARDED: Final = frozenset({MessageKind.DELTA, MessageKind.COMMIT, MessageKind.STATE})
"""The messages that every rank sends for itself."""

_About = Piece | RoundCommit | Snapshot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOrder(Facts):
    """SHARD: what a rank does with its shard: a work on the host, or a message to these clouds."""

    work: WorkKind | None = None
    message: MessageKind | None = None
    to: Clouds = ()
    is_background: bool = False
    about: _About = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(Facts):
    """NOTED: what has come to pass at a rank; one of a message, a work, and a cloud that is there or not."""

    cloud: Count = 0
    message: MessageKind | None = None
    work: WorkKind | None = None
    is_there: bool = True
    about: _About = None
    content: Annotated[str, Field(max_length=64)] = ""
    is_done: bool = True


class AllRanks:
    """What has come to pass at the ranks of a cloud, as its leader knows it."""

    def __init__(self, spec: DataParallel, leader: Leader) -> None:
        self._spec = spec
        self._leader = leader
        self._own, *siblings = leader.group
        self._siblings = tuple(siblings)
        self._arrived: Counter[tuple[object, ...]] = Counter()
        self._ended: dict[int, Facts | None] = {}
        """How the work that runs on the host has ended, by rank."""
        self._away: defaultdict[int, set[int]] = defaultdict(set)
        """The ranks that have lost each cloud."""

    def order_work(self, work: Work) -> None:
        """Let the siblings run a work on the host, too."""
        about = work.facts if isinstance(work.facts, RoundCommit | Snapshot) else None
        self._order(work.step, work.item, ShardOrder(work=work.kind, about=about))

    def order_message(self, message: Message) -> None:
        """Let the siblings send their shards where the leader sends its own."""
        facts = message.facts
        if message.kind in SHARDED and isinstance(facts, Piece | RoundCommit | Snapshot):
            to = tuple(map(self._spec.cloud_of, message.to))
            is_background = message.priority is Priority.BACKGROUND
            order = ShardOrder(message=message.kind, to=to, is_background=is_background, about=facts)
            self._order(message.step, message.item, order)

    def _order(self, step: int, item: int, order: ShardOrder) -> None:
        if self._siblings:
            self._leader.send(MessageKind.SHARD, step, item, self._siblings, order)

    def has_arrived(self, message: Message) -> bool:
        """Count a message that has arrived at one rank; whether it is at all of them now."""
        if message.kind not in SHARDED:
            return True
        key = message.kind, message.step, message.item, message.sender.cloud, message.facts
        self._arrived[key] += 1
        if self._arrived[key] <= len(self._siblings):
            return False
        del self._arrived[key]
        return True

    def has_ended(self, rank: int, facts: Facts | None) -> bool:
        """Count the end of the work on the host at one rank; whether it has ended at all of them."""
        self._ended[rank] = facts
        return len(self._ended) > len(self._siblings)

    def take_ends(self) -> Facts | None:
        """How the work on the host has ended at all ranks, as one."""
        ends, self._ended = [self._ended[rank] for rank in sorted(self._ended)], {}
        if any(isinstance(one, NotDone) for one in ends):
            return NotDone()
        contents = [one.content for one in ends if isinstance(one, Applied)]
        if len(contents) < 2:
            return Applied(content=contents[0]) if contents else None
        return Applied(content=hashlib.blake2b("".join(contents).encode(), digest_size=8).hexdigest())

    def sees(self, cloud: int, rank: int, *, is_there: bool) -> bool:
        """Take in that a rank has lost a cloud, or meets it again; whether all ranks reach it."""
        if is_there:
            self._away[cloud].discard(rank)
        else:
            self._away[cloud].add(rank)
        return not self._away[cloud]

    def forget(self, view: int) -> None:
        """Forget what has arrived of older views."""
        for key in list(self._arrived):
            about = key[-1]
            if isinstance(about, Piece | RoundCommit | Snapshot) and about.view < view:
                del self._arrived[key]


class ShardSibling(Sibling):
    """The scheduler of a rank that exchanges its shards as its leader orders."""

    def __init__(self, spec: DataParallel, group: tuple[Member, ...], member: Member) -> None:
        super().__init__(group, member)
        self._spec = spec
        self._host: deque[Work] = deque()
        self._on_host: Work | None = None

    def on(self, event: Event, now_s: float) -> tuple[Action, ...]:
        """Take in what happened and say what to do now; once stopped, nothing more."""
        if self._is_stopped:
            return ()
        match event:
            case Arrived(message=message) if message.kind in SHARDED:
                about = message.facts if isinstance(message.facts, Piece | RoundCommit | Snapshot) else None
                cloud = self._spec.cloud_of(message.sender)
                found = [
                    self._note(
                        message.step, message.item, Noted(cloud=cloud, message=message.kind, about=about)
                    )
                ]
            case Arrived(message=message) if message.kind is MessageKind.SHARD:
                found = self._obey(message)
            case Done(work=work, facts=facts) if work.lane is Lane.HOST:
                self._on_host = None
                content = facts.content if isinstance(facts, Applied) else ""
                done = Noted(work=work.kind, content=content, is_done=not isinstance(facts, NotDone))
                found = [self._note(work.step, work.item, done)]
            case Lost(member=member) | Joined(member=member) if member.cloud != self._member.cloud:
                found = self._note_cloud(event, member)
            case _:
                found = list(super().on(event, now_s))
        # What is being saved must not change before all that was ordered ahead of it is done.
        if self._on_host is None and self._host and not self._then and not self._is_stopped:
            self._on_host = self._host.popleft()
            found.append(Run(self._on_host))
        return tuple(found)

    def _obey(self, message: Message) -> list[Action]:
        order = message.facts
        if message.sender != self._group[0] or not isinstance(order, ShardOrder):
            raise not_awaited(message)
        if order.work is not None:
            self._host.append(Work(order.work, message.step, message.item, order.about, lane=Lane.HOST))
        if order.message is None:
            return []
        to = tuple(self._spec.clouds[cloud][self._member.rank] for cloud in order.to)
        priority = Priority.BACKGROUND if order.is_background else Priority.NORMAL
        shard = Message(
            order.message, message.step, message.item, self._member, to, order.about, priority=priority
        )
        return [Send(shard)]

    def _note_cloud(self, event: Lost | Joined, member: Member) -> list[Action]:
        if isinstance(event, Lost) and not event.final:
            return []
        is_there = isinstance(event, Joined)
        return [self._note(0, 0, Noted(cloud=self._spec.cloud_of(member), is_there=is_there))]

    def _note(self, step: int, item: int, noted: Noted) -> Action:
        return Send(
            Message(
                MessageKind.NOTED, step, item, self._member, self._group[:1], noted, priority=Priority.URGENT
            )
        )
