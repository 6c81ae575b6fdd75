"""Data parallel and generator–discriminator pre-training with given times and sizes, for the simulator."""

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.data import data_scheduler
from isthmus.plan.end_of_step import Read, Reduced, Seen
from isthmus.plan.feed import Generated, GeneratorDiscriminator, feed_scheduler
from isthmus.plan.membership import DataParallel, Piece
from isthmus.plan.types import Costs, Facts, Member, Message, MessageKind, Scheduler, Work, WorkKind


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTimes:
    """What works and messages take; passes are those of one micro-batch at a rank of each cloud."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float = 0.0
    delta_s: float = 0.0
    sum_s: float = 0.0
    outer_s: float = 0.0
    mix_s: float = 0.0
    microbatch_tokens: int = 1
    num_parameters: int = 0
    delta_bits: float = 4.0
    """The bits of a parameter in DELTA and COMMIT, and in STATE with its outer momentum."""
    state_bits: float = 64.0
    coding_s: float = 0.0
    """What it takes to code one shard."""

    def step_s(self, spec: DataParallel, cloud: int) -> float:
        """The computation of one local step."""
        passes_s = self.forward_s[cloud] + self.backward_s[cloud]
        return spec.num_microbatches * passes_s + self.update_s


class SimulatedData:
    """The strategy that the simulator runs."""

    def __init__(self, spec: DataParallel, times: DataTimes) -> None:
        if not len(times.forward_s) == len(times.backward_s) == len(spec.clouds):
            raise ValueError(f"{len(spec.clouds)} clouds with {len(times.forward_s)} times")
        self.spec = spec
        self._times = times

    @property
    def members(self) -> Sequence[Member]:
        """All members, cloud by cloud."""
        return self.spec.members

    def scheduler(self, member: Member) -> Scheduler:
        """A fresh scheduler of a member."""
        return data_scheduler(self.spec, member)

    def costs(self, member: Member) -> Costs:
        """The times and sizes of a member."""
        return _DataCosts(spec=self.spec, times=self._times, cloud=self.spec.cloud_of(member))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataCosts:
    """The costs of one member."""

    spec: DataParallel
    times: DataTimes
    cloud: int

    def work_s(self, work: Work) -> float:
        times = self.times
        by_kind = {
            WorkKind.FORWARD: times.forward_s[self.cloud],
            WorkKind.BACKWARD: times.backward_s[self.cloud],
            WorkKind.UPDATE: times.update_s,
            WorkKind.DELTA: times.delta_s,
            WorkKind.SUM: times.sum_s,
            WorkKind.OUTER: times.outer_s,
            WorkKind.MIX: times.mix_s,
        }
        return by_kind.get(work.kind, 0.0)

    def work_facts(self, work: Work, duration_s: float) -> Facts | None:  # noqa: ARG002 - as measured
        match work.kind:
            case WorkKind.READ:
                num_tokens = self.spec.num_microbatches * self.times.microbatch_tokens
                return Read(num_targets=num_tokens, num_tokens=num_tokens)
            case WorkKind.REDUCE:
                return Reduced(seen=Seen(), loss_sum=0.0, squared_norms=())
            case _:
                return None

    def message_bytes(self, message: Message) -> int:
        """A shard for DELTA and COMMIT, a fragment for STATE."""
        num_parameters = self.times.num_parameters / self.spec.num_fragments
        match message.kind, message.facts:
            case MessageKind.DELTA, Piece(num_shards=num_shards):
                return round(num_parameters * self.times.delta_bits / 8 / num_shards)
            case MessageKind.COMMIT, _:
                return round(num_parameters * self.times.delta_bits / 8 / len(message.to))
            case MessageKind.STATE, _:
                return round(num_parameters * self.times.state_bits / 8)
            case _:
                return 0

    def coding_s(self, message: Message) -> float:
        is_coded = message.kind in (MessageKind.DELTA, MessageKind.COMMIT)
        return self.times.coding_s if is_coded else 0.0

    def saved_bytes(self) -> int:
        """Each cloud saves in its own store: the outer parameters are everywhere."""
        return 0


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
