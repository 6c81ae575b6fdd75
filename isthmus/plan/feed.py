"""The schedule of generator–discriminator pre-training: generators feed a discriminator, one way.

    generator       GENERATE n ──► IDS n ──► queue ──► merge ──► DISCRIMINATE … REDUCE UPDATE ──► Save
                    keeps n          ◄── CREDIT: up to which number it may send
                    drops n          ◄── COVERED: a save holds everything below this number

Each generator numbers its batches. It runs ahead of the discriminator as far as credit allows, and credit
grows when the discriminator starts a batch, so no queue holds more than `max_queued`. The discriminator takes
the streams in turns by weight. The order follows from the numbers of batches taken so far and from nothing
else, so it is the same whatever arrives when.

A generator keeps a batch until a save of the discriminator covers it. After a crash the discriminator names
the number that it needs next, and gets the batches from there on again; what it has already is dropped. A
generator that crashes makes its batches again from its own save, and they are the same. So a crash of either
side leaves no batch out and trains on none twice.

The leader of each cloud decides; all works are works of all ranks of a cloud, by `plan/orders.py`.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from pydantic import Field

from isthmus.plan.end_of_step import Reduced
from isthmus.plan.orders import Leader, Orders, Sibling, not_awaited
from isthmus.plan.types import (
    Count,
    Drop,
    Elapsed,
    Facts,
    Joined,
    Lost,
    Member,
    Message,
    MessageKind,
    Scheduler,
    Send,
    Started,
    Tell,
    Wake,
    Work,
    WorkKind,
)

MAX_KEPT: Final = 4096
"""The most batches that a generator may keep: what it saves of them fits into its facts."""

Kept = Annotated[tuple[Count, ...], Field(max_length=MAX_KEPT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTag(Facts):
    """What IDS says of a batch."""

    generator: Count
    number: Count
    version: Count
    """How many updates the generator's weights had seen."""
    num_tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance(Facts):
    """What CREDIT allows: batches below `limit`. After a start or a loss a generator sends from `next` on."""

    next: Count
    limit: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredTo(Facts):
    """The first number that no save of the discriminator covers; `is_final` when the run has ended.

    With `stops` its sender was asked to stop in order: all others do, too.
    """

    number: Count
    is_final: bool = False
    stops: bool = False


FACTS: Final[dict[MessageKind, type[Facts]]] = {
    MessageKind.IDS: BatchTag,
    MessageKind.CREDIT: Allowance,
    MessageKind.COVERED: CoveredTo,
    MessageKind.ORDER: Orders,
}
"""The facts that the messages of this strategy carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated(Facts):
    """What GENERATE gives at one rank."""

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedReduced(Reduced):
    """What REDUCE found at one rank: tokens with a loss; at the discriminator also what it told apart."""

    num_correct: int = 0
    num_replaced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStep(Facts):
    """What the discriminator tells at the end of a step; of its queues one value for each generator."""

    step: int
    clouds: tuple[str, ...]
    num_batches: tuple[int, ...]
    """The batches of the step."""
    num_tokens: tuple[int, ...]
    num_queued: tuple[int, ...]
    staleness: tuple[int, ...]
    """By how many versions of the weights a batch was behind the newest that has arrived, at most."""
    waited_s: float
    """How long the discriminator had no batch to work on."""
    accuracy: float
    """The share of tokens that it told rightly, and below the share that it would by calling all original."""
    original_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorLost(Facts):
    """A generator does not take part until it returns; the discriminator has no batch from `next` on."""

    generator: int
    cloud: str
    next: int
    quota: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscriminatorState(Facts):
    """What the discriminator saves: the next number of each generator, and the state of the merge."""

    next: tuple[Count, ...]
    turns: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorState(Facts):
    """What a generator saves: its next number, and the tokens of each batch that it keeps below it."""

    next: Count
    kept_tokens: Kept = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorStream:
    """One generator: the ranks of its cloud, how many batches it makes, and its share of the stream."""

    members: tuple[Member, ...]
    quota: int
    weight: float = 1.0
    batches_per_step: int = 1
    """The batches after which the generator updates its own weights."""

    def __post_init__(self) -> None:
        if not self.members or min(self.quota, self.batches_per_step) < 1 or self.weight <= 0:
            raise ValueError("a generator needs members, a quota, batches in a step and a weight above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorDiscriminator:
    """What all members agree on."""

    discriminator: tuple[Member, ...]
    generators: tuple[GeneratorStream, ...]
    batches_per_step: int = 1
    max_queued: int = 8
    """The most batches of one generator that wait at the discriminator."""
    max_kept: int = MAX_KEPT
    """The most batches that a generator keeps; a save becomes due when half as many have been taken."""
    save_every_s: float | None = None
    on_lost: Literal["wait", "continue"] = "wait"
    wait_s: float = 3600.0
    """How long a lost member is waited for: then the run fails or, with "continue", ends without it."""

    def __post_init__(self) -> None:
        if not self.discriminator or not self.generators:
            raise ValueError("a discriminator and at least one generator are needed")
        if min(self.batches_per_step, self.max_queued) < 1:
            raise ValueError("a step and a queue hold one batch at least")
        if not max(2 * self.batches_per_step, self.max_queued) <= self.max_kept <= MAX_KEPT:
            raise ValueError(f"max_kept is from two steps and a full queue to {MAX_KEPT}")

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, the discriminator's first."""
        return self.discriminator + tuple(member for one in self.generators for member in one.members)

    def generator_of(self, cloud: str) -> int | None:
        """The number of the generator in a cloud."""
        found = (index for index, one in enumerate(self.generators) if one.members[0].cloud == cloud)
        return next(found, None)


def feed_scheduler(spec: GeneratorDiscriminator, member: Member) -> Scheduler:
    """A fresh scheduler of a member."""
    for group in (spec.discriminator, *(one.members for one in spec.generators)):
        if member in group[1:]:
            return Sibling(group, member)
    index = spec.generator_of(member.cloud)
    return DiscriminatorScheduler(spec) if index is None else GeneratorScheduler(spec, index)


class Merge:
    """Takes streams in turns by weight: each gains its weight per turn, the one with most is next and pays.

    With weights 3 and 1: a a b a  a a b a …
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = tuple(weights)
        self.turns = [0.0] * len(self._weights)

    def choose(self, streams: Sequence[int]) -> int:
        """The next of these streams; the first of equals."""
        return max(streams, key=lambda one: (self.turns[one] + self._weights[one], -one))

    def take(self, stream: int, streams: Sequence[int]) -> None:
        """Count a turn of one of these streams."""
        for one in streams:
            self.turns[one] += self._weights[one]
        self.turns[stream] -= sum(self._weights[one] for one in streams)


@dataclass(slots=True)
class _Queue:
    """One generator as the discriminator sees it; numbers are those of its next batches."""

    leader: Member
    quota: int
    tags: deque[BatchTag] = field(default_factory=deque)
    arrived: int = 0
    started: int = 0
    asked: int = 0
    """Up to here a save has been asked for."""
    covered: int = 0
    version: int = 0
    lost_s: float | None = None
    is_suspected: bool = False
    """Whether its link does not answer, and no batch has come since."""
    staleness: int = 0
    num_in_step: int = 0
    tokens_in_step: int = 0
    refused: str = ""
    """Why nothing is taken from it until it joins again; empty while it keeps to the protocol."""

    @property
    def is_met(self) -> bool:
        return self.started == self.quota


class FeedLeader(Leader):
    """A leader that stops in order between two steps, once it has saved; each cloud saves for itself."""

    def __init__(self, group: tuple[Member, ...], save_every_s: float | None) -> None:
        super().__init__(group, save_every_s)
        self._wants_stop = False
        self._asked_step = self._saved_step = -1
        """The steps of the last save that was asked for, and of the last that is there."""

    def _interrupt(self) -> None:
        self._wants_stop = True

    def _start(self, started: Started) -> None:
        if started.facts is not None:
            self._asked_step = self._saved_step = started.step

    @abstractmethod
    def _save(self, now_s: float) -> None:
        """Save the state between two steps."""

    def save(self, step: int, facts: Facts, now_s: float) -> None:
        """Save the state of all ranks, and remember which step it is of."""
        self._asked_step = step
        super().save(step, facts, now_s)

    def _saved(self, step: int) -> None:
        self._saved_step = step

    def _stops(self, now_s: float, *, is_between_steps: bool) -> bool:
        """Whether nothing more is to run; within a step that cannot be ended what was saved last counts."""
        if not self._wants_stop or self.is_stopped:
            return self.is_stopped
        if is_between_steps and self._asked_step != self.step:
            self._save(now_s)
        if not is_between_steps or self._saved_step == self.step:
            self.finish(interrupted_at=max(self._saved_step, 0), reason="every cloud saves for itself")
        return True


class DiscriminatorScheduler(FeedLeader):
    """Decides what the leader of the discriminator's cloud runs, sends and saves."""

    def __init__(self, spec: GeneratorDiscriminator) -> None:
        super().__init__(spec.discriminator, spec.save_every_s)
        self._spec = spec
        self._queues = [_Queue(one.members[0], one.quota) for one in spec.generators]
        self._merge = Merge([one.weight for one in spec.generators])
        self._positions: dict[int, tuple[int, ...]] = {}
        self._final_step: int | None = None
        self._is_final = False
        self._idle_s: float | None = None
        self._waited_s = 0.0
        self._num_correct = self._num_replaced = 0

    def _start(self, started: Started) -> None:
        super()._start(started)
        if isinstance(started.facts, DiscriminatorState):
            self._merge.turns = list(started.facts.turns)
            for queue, number in zip(self._queues, started.facts.next, strict=True):
                queue.arrived = queue.started = queue.asked = queue.covered = number
        for queue in self._queues:
            self._greet(queue)

    def _greet(self, queue: _Queue) -> None:
        """Tell a generator where to go on, after a start or a loss of either side."""
        self._allow(queue)
        self._cover(queue)

    def _allow(self, queue: _Queue) -> None:
        facts = Allowance(next=queue.arrived, limit=queue.started + self._spec.max_queued)
        self._tell_generator(MessageKind.CREDIT, facts.limit, queue, facts)

    def _cover(self, queue: _Queue) -> None:
        facts = CoveredTo(number=queue.covered, is_final=self._is_final, stops=self._wants_stop)
        self._tell_generator(MessageKind.COVERED, queue.covered, queue, facts)

    def _tell_generator(self, kind: MessageKind, number: int, queue: _Queue, facts: Facts) -> None:
        if queue.lost_s is None:
            self.send(kind, 0, number, (queue.leader,), facts)

    def _interrupt(self) -> None:
        if not self._wants_stop:
            super()._interrupt()
            for queue in self._queues:
                self._cover(queue)

    def _notice(self, event: Lost | Joined | Elapsed, now_s: float) -> None:
        index = None if isinstance(event, Elapsed) else self._spec.generator_of(event.member.cloud)
        if index is None:
            return
        queue = self._queues[index]
        match event:
            case Lost(final=False):
                queue.is_suspected = True
            case Lost(reason=reason) if queue.lost_s is None:
                self._lose(index, now_s, reason)
            case Joined(member=queue.leader):
                queue.lost_s, queue.refused, queue.is_suspected = None, "", False
                self._greet(queue)

    def _lose(self, index: int, now_s: float, reason: str) -> None:
        queue = self._queues[index]
        queue.lost_s = now_s
        self.act(Wake(now_s + self._spec.wait_s))
        lost = GeneratorLost(
            generator=index,
            cloud=queue.leader.cloud,
            next=queue.arrived,
            quota=queue.quota,
            reason=reason,
        )
        self.act(Tell(lost))

    def _arrive(self, message: Message) -> None:
        index = self._spec.generator_of(message.sender.cloud)
        match message.kind, message.facts:
            case MessageKind.IDS, BatchTag() as tag if index is not None:
                self._take(message, tag, index)
            case MessageKind.COVERED, CoveredTo(stops=True) if index is not None:
                self._interrupt()
            case _:
                raise not_awaited(message)

    def _take(self, message: Message, tag: BatchTag, index: int) -> None:
        queue = self._queues[index]
        queue.is_suspected = False
        if queue.refused or tag.number < queue.arrived:
            self.act(Drop(message))
            return
        limit = min(queue.started + self._spec.max_queued, queue.quota)
        if tag.generator != index or tag.number != queue.arrived or tag.number >= limit:
            # A flood must not cost the others anything.
            queue.refused = f"sent {message.name}, which it may not send"
            self.act(Drop(message))
            return
        queue.arrived += 1
        queue.version = max(queue.version, tag.version)
        queue.tags.append(tag)

    # What to run.

    def _next(self, now_s: float) -> None:
        for index, queue in enumerate(self._queues):
            if queue.refused and queue.lost_s is None:
                self._lose(index, now_s, queue.refused)
        if not self.is_idle or self.run_end_of_step():
            return
        if not self._num_in_step and self._stops(now_s, is_between_steps=True):
            return
        streams = [index for index, queue in enumerate(self._queues) if self._takes_turns(queue)]
        if not streams:
            self._end_run(now_s)
            return
        index = self._merge.choose(streams)
        queue = self._queues[index]
        if queue.tags:
            self._merge.take(index, streams)
            self._discriminate(queue, now_s)
        elif self._stops(now_s, is_between_steps=False):
            return
        elif self._is_given_up(queue, now_s):
            cloud = queue.leader.cloud
            hint = f'start {cloud!r} again, or set strategy.on_lost = "continue"'
            self.fail(f"generator {cloud!r} {queue.refused or 'was lost and has not returned'}", hint)
        elif self._idle_s is None:
            self._idle_s = now_s

    def _takes_turns(self, queue: _Queue) -> bool:
        """Whether a stream takes its turns; one that is lost or silent does not, unless it is waited for."""
        if queue.is_met:
            return False
        is_here = queue.lost_s is None and not queue.is_suspected
        return self._spec.on_lost == "wait" or is_here or bool(queue.tags)

    def _is_given_up(self, queue: _Queue, now_s: float) -> bool:
        waited = queue.lost_s is not None and now_s >= queue.lost_s + self._spec.wait_s
        return waited or bool(queue.refused)

    def _discriminate(self, queue: _Queue, now_s: float) -> None:
        if self._idle_s is not None:
            self._waited_s += now_s - self._idle_s
            self._idle_s = None
        tag = queue.tags.popleft()
        self.run_together(WorkKind.DISCRIMINATE, self._num_in_step, tag)
        self.num_tokens += tag.num_tokens
        queue.started += 1
        queue.num_in_step += 1
        queue.tokens_in_step += tag.num_tokens
        queue.staleness = max(queue.staleness, queue.version - tag.version)
        self._allow(queue)

    @property
    def _num_in_step(self) -> int:
        return sum(queue.num_in_step for queue in self._queues)

    def _finish(self, work: Work, facts: Facts | None, now_s: float) -> None:
        found = self.ended(work, facts)
        if work.kind is WorkKind.DISCRIMINATE and self._num_in_step == self._spec.batches_per_step:
            self.end_step()
        if work.kind is WorkKind.REDUCE:
            reduced = [one for one in found if isinstance(one, FeedReduced)]
            self._num_correct = sum(one.num_correct for one in reduced)
            self._num_replaced = sum(one.num_replaced for one in reduced)
        if self.is_step_over(work, found, now_s):
            self._tell()
            num_taken = max(queue.started - queue.asked for queue in self._queues)
            if self.is_save_due(now_s) or num_taken >= self._spec.max_kept // 2:
                self._save(now_s)

    def _tell(self) -> None:
        queues = self._queues
        num_tokens = max(1, sum(queue.tokens_in_step for queue in queues))
        told = FeedStep(
            step=self.step - 1,
            clouds=tuple(queue.leader.cloud for queue in queues),
            num_batches=tuple(queue.num_in_step for queue in queues),
            num_tokens=tuple(queue.tokens_in_step for queue in queues),
            num_queued=tuple(len(queue.tags) for queue in queues),
            staleness=tuple(queue.staleness for queue in queues),
            waited_s=self._waited_s,
            accuracy=self._num_correct / num_tokens,
            original_share=1 - self._num_replaced / num_tokens,
        )
        self.act(Tell(told))
        self._waited_s = 0.0
        for queue in queues:
            queue.num_in_step = queue.tokens_in_step = queue.staleness = 0

    def _save(self, now_s: float) -> None:
        positions = tuple(queue.started for queue in self._queues)
        self._positions[self.step] = positions
        for queue in self._queues:
            queue.asked = queue.started
        self.save(self.step, DiscriminatorState(next=positions, turns=tuple(self._merge.turns)), now_s)

    def _saved(self, step: int) -> None:
        super()._saved(step)
        self._is_final = step == self._final_step
        for queue, number in zip(self._queues, self._positions.pop(step), strict=True):
            queue.covered = number
            self._cover(queue)
        if self._is_final:
            self.finish()

    def _end_run(self, now_s: float) -> None:
        """End the last step and save it, when no lost generator is waited for any more."""
        unmet = [queue for queue in self._queues if not queue.is_met]
        if self._final_step is not None or not all(self._is_given_up(queue, now_s) for queue in unmet):
            return
        if len(unmet) == len(self._queues):
            names = ", ".join(repr(queue.leader.cloud) for queue in unmet)
            hint = "start them again: the run continues from what was saved last"
            self.fail(f"all generators are lost: {names}", hint)
            return
        if self._num_in_step:
            self.end_step()
            self.run_end_of_step()
            return
        self._final_step = self.step
        if self._final_step not in self._positions:
            self._save(now_s)


class GeneratorScheduler(FeedLeader):
    """Decides what the leader of a generator's cloud runs, sends, keeps and saves."""

    def __init__(self, spec: GeneratorDiscriminator, index: int) -> None:
        super().__init__(spec.generators[index].members, spec.save_every_s)
        self._spec = spec
        self._index = index
        self._stream = spec.generators[index]
        self._number = 0
        """The number of the next batch."""
        self._sent = 0
        self._limit = 0
        self._is_open = False
        """Whether the discriminator has said where to go on since the last start or loss."""
        self._covered = 0
        self._kept: dict[int, Message] = {}
        self._lost_s: float | None = None
        self._is_final = False
        self._final_step: int | None = None
        self._is_saved = False

    def _start(self, started: Started) -> None:
        super()._start(started)
        if isinstance(started.facts, GeneratorState):
            self._number = started.facts.next
            self._covered = self._number - len(started.facts.kept_tokens)
            for number, num_tokens in enumerate(started.facts.kept_tokens, self._covered):
                self._keep(number, number // self._stream.batches_per_step, num_tokens)
            self._is_saved = self._number == self._stream.quota

    def _keep(self, number: int, version: int, num_tokens: int) -> None:
        tag = BatchTag(generator=self._index, number=number, version=version, num_tokens=num_tokens)
        to = self._spec.discriminator[:1]
        self._kept[number] = Message(MessageKind.IDS, version, number, self.leader, to, tag)

    def _notice(self, event: Lost | Joined | Elapsed, now_s: float) -> None:
        match event:
            case Joined(member=member) if member == self._spec.discriminator[0]:
                self._is_open, self._lost_s = False, None
            case Lost(member=member, final=True) if member in self._spec.discriminator:
                if self._lost_s is None:
                    self._is_open, self._lost_s = False, now_s
                    self.act(Wake(now_s + self._spec.wait_s))

    def _arrive(self, message: Message) -> None:
        is_awaited = message.sender == self._spec.discriminator[0]
        match message.kind, message.facts:
            case MessageKind.CREDIT, Allowance() as facts if is_awaited:
                self._allow(facts)
            case MessageKind.COVERED, CoveredTo() as facts if is_awaited:
                self._cover(facts)
            case _:
                raise not_awaited(message)

    def _allow(self, facts: Allowance) -> None:
        if self._is_open:
            self._limit = max(self._limit, facts.limit)
        else:
            self._is_open, self._limit = True, facts.limit
            self._sent = min(facts.next, self._number)

    def _interrupt(self) -> None:
        super()._interrupt()
        facts = CoveredTo(number=0, stops=True)
        self.send(MessageKind.COVERED, 0, 0, self._spec.discriminator[:1], facts)

    def _cover(self, facts: CoveredTo) -> None:
        self._wants_stop |= facts.stops
        self._covered = max(self._covered, facts.number)
        for old in [one for one in self._kept if one < facts.number]:
            self.act(Drop(self._kept.pop(old)))
        if facts.is_final:
            # The discriminator needs no batch any more, but the generator's own training goes to its quota.
            self._is_final, self._limit = True, self._stream.quota

    def _saved(self, step: int) -> None:
        super()._saved(step)
        self._is_saved = step == self._final_step

    def _next(self, now_s: float) -> None:
        if self._lost_s is not None and now_s >= self._lost_s + self._spec.wait_s:
            cloud = self._spec.discriminator[0].cloud
            hint = f"start {cloud!r} again; if its run has finished, nothing is left to do"
            self.fail(f"discriminator {cloud!r} was lost and has not returned", hint)
            return
        self._send_allowed()
        if not self.is_idle or self.run_end_of_step():
            return
        is_between_steps = self._number % self._stream.batches_per_step == 0
        if is_between_steps and self._stops(now_s, is_between_steps=True):
            return
        limit = min(self._limit, self._stream.quota, self._covered + self._spec.max_kept)
        if (self._is_open or self._is_final) and self._number < limit:
            self.run_together(WorkKind.GENERATE, self._number)
        elif self._is_saved and self._is_final:
            self.finish()
        else:
            self._stops(now_s, is_between_steps=False)

    def _send_allowed(self) -> None:
        """Send what was made and is allowed; what is covered need not be sent any more."""
        while self._is_open and self._sent < min(self._number, self._limit):
            message = self._kept.get(self._sent)
            if message is not None:
                self.act(Send(message, keeps=True))
            self._sent += 1

    def _finish(self, work: Work, facts: Facts | None, now_s: float) -> None:
        found = self.ended(work, facts)
        if work.kind is WorkKind.GENERATE:
            num_tokens = sum(one.num_tokens for one in found if isinstance(one, Generated))
            self._made(num_tokens)
        if work.kind is WorkKind.REDUCE:
            self.num_targets = sum(one.num_targets for one in found if isinstance(one, FeedReduced))
        is_last = self._number == self._stream.quota
        if self.is_step_over(work, found, now_s) and (is_last or self.is_save_due(now_s)):
            self._final_step = self.step if is_last else None
            self._save(now_s)

    def _save(self, now_s: float) -> None:
        kept_tokens = tuple(_num_tokens(self._kept[one]) for one in sorted(self._kept))
        self.save(self.step, GeneratorState(next=self._number, kept_tokens=kept_tokens), now_s)

    def _made(self, num_tokens: int) -> None:
        if self._number >= self._covered:
            self._keep(self._number, self.step, num_tokens)
        self.num_tokens += num_tokens
        self._number += 1
        if self._number % self._stream.batches_per_step == 0 or self._number == self._stream.quota:
            self.end_step()


def _num_tokens(message: Message) -> int:
    return message.facts.num_tokens if isinstance(message.facts, BatchTag) else 0
