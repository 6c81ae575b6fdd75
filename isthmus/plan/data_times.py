"""What data parallel takes and sends, from given times and sizes: the strategy that the simulator runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.plan.data import data_scheduler
from isthmus.plan.end_of_step import Read, Reduced, Seen
from isthmus.plan.membership import DataParallel, Piece
from isthmus.plan.types import Costs, Facts, Member, Message, MessageKind, Scheduler, Work, WorkKind

REDUCED = Reduced(seen=Seen(), loss_sum=0.0, squared_norms=())


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCosts:
    """The costs of one member, by kinds of works."""

    works_s: Mapping[WorkKind, float]
    facts: Mapping[WorkKind, Facts]
    size: Callable[[Message], int]
    shard_coding_s: float = 0.0
    state_bytes: int = 0

    def work_s(self, work: Work) -> float:
        return self.works_s.get(work.kind, 0.0)

    def work_facts(self, work: Work, duration_s: float) -> Facts | None:  # noqa: ARG002 - as measured
        return self.facts.get(work.kind)

    def message_bytes(self, message: Message) -> int:
        return self.size(message)

    def coding_s(self, message: Message) -> float:
        return self.shard_coding_s if message.kind in (MessageKind.DELTA, MessageKind.COMMIT) else 0.0

    def saved_bytes(self) -> int:
        return self.state_bytes


@dataclass(frozen=True, slots=True)
class Simulated:
    """A strategy that the simulator runs."""

    members: Sequence[Member]
    scheduler: Callable[[Member], Scheduler]
    costs: Callable[[Member], Costs]


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


def simulated_data(spec: DataParallel, times: DataTimes) -> Simulated:
    fragment = times.num_parameters / spec.num_fragments / len(spec.clouds[0])
    num_tokens = spec.num_microbatches * times.microbatch_tokens

    def size(message: Message) -> int:
        match message.kind, message.facts:
            case MessageKind.DELTA, Piece(num_shards=num_shards):
                return round(fragment * times.delta_bits / 8 / num_shards)
            case MessageKind.COMMIT, _:
                return round(fragment * times.delta_bits / 8 / len(message.to))
            case MessageKind.STATE, _:
                return round(fragment * times.state_bits / 8)
        return 0

    def costs(member: Member) -> Costs:
        cloud = spec.cloud_of(member)
        works_s = {
            WorkKind.FORWARD: times.forward_s[cloud],
            WorkKind.BACKWARD: times.backward_s[cloud],
            WorkKind.UPDATE: times.update_s,
            WorkKind.DELTA: times.delta_s,
            WorkKind.SUM: times.sum_s,
            WorkKind.OUTER: times.outer_s,
            WorkKind.MIX: times.mix_s,
        }
        facts = {WorkKind.READ: Read(num_targets=num_tokens, num_tokens=num_tokens), WorkKind.REDUCE: REDUCED}
        return TableCosts(works_s=works_s, facts=facts, size=size, shard_coding_s=times.coding_s)

    return Simulated(spec.members, lambda member: data_scheduler(spec, member), costs)
