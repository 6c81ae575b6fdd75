"""Generator–discriminator pre-training with given times and sizes, as the simulator runs it."""

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.end_of_step import Reduced, Seen
from isthmus.plan.feed import feed_scheduler
from isthmus.plan.feed_spec import Generated, GeneratorDiscriminator
from isthmus.plan.types import Costs, Facts, Member, Message, MessageKind, Scheduler, Work, WorkKind


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedTimes:
    """What works and messages take; the ranks of a cloud share a batch, so times are those of a cloud."""

    generate_s: tuple[float, ...]
    """The time of one batch at each generator."""
    discriminate_s: float
    update_s: float = 0.0
    batch_tokens: int = 1
    batch_bytes: int = 0
    """The size of a batch on the wire."""
    state_bytes: int = 0
    """What the discriminator copies to another cloud when it saves."""


class SimulatedFeed:
    """The strategy that the simulator runs."""

    def __init__(self, spec: GeneratorDiscriminator, times: FeedTimes) -> None:
        if len(times.generate_s) != len(spec.generators):
            raise ValueError(f"{len(spec.generators)} generators with {len(times.generate_s)} times")
        self.spec = spec
        self._times = times

    @property
    def members(self) -> Sequence[Member]:
        """All members, the discriminator's first."""
        return self.spec.members

    def scheduler(self, member: Member) -> Scheduler:
        """A fresh scheduler of a member."""
        return feed_scheduler(self.spec, member)

    def costs(self, member: Member) -> Costs:
        """The times and sizes of a member."""
        index = self.spec.generator_of(member.cloud)
        is_first = member == self.spec.discriminator[0]
        return _FeedCosts(
            times=self._times,
            generate_s=0.0 if index is None else self._times.generate_s[index],
            num_ranks=len(self.spec.discriminator if index is None else self.spec.generators[index].members),
            state_bytes=self._times.state_bytes if is_first else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FeedCosts:
    """The costs of one member."""

    times: FeedTimes
    generate_s: float
    num_ranks: int
    state_bytes: int

    def work_s(self, work: Work) -> float:
        match work.kind:
            case WorkKind.GENERATE:
                return self.generate_s
            case WorkKind.DISCRIMINATE:
                return self.times.discriminate_s
            case WorkKind.UPDATE:
                return self.times.update_s
            case _:
                return 0.0

    def work_facts(self, work: Work, duration_s: float) -> Facts | None:  # noqa: ARG002 - as measured
        match work.kind:
            case WorkKind.GENERATE:
                return Generated(num_tokens=self.times.batch_tokens // self.num_ranks)
            case WorkKind.REDUCE:
                return Reduced(seen=Seen(), loss_sum=0.0, squared_norms=())
            case _:
                return None

    def message_bytes(self, message: Message) -> int:
        return self.times.batch_bytes if message.kind is MessageKind.IDS else 0

    def coding_s(self, message: Message) -> float:  # noqa: ARG002 - ids are packed as they are made
        return 0.0

    def saved_bytes(self) -> int:
        return self.state_bytes
