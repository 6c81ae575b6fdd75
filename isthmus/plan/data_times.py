"""What data parallel takes and sends, from given times and sizes: the strategy that the simulator runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from isthmus.events import Span
from isthmus.job import CloudSpec
from isthmus.plan.data import data_scheduler
from isthmus.plan.end_of_step import Read, Reduced, Seen
from isthmus.plan.membership import DataParallel, Piece, RoundEnded
from isthmus.plan.scenario import Line
from isthmus.plan.simulate import Timeline, simulate
from isthmus.plan.types import Costs, Facts, Member, Message, MessageKind, Scheduler, Work, WorkKind

_FREE_BPS: Final = 1e15
# All fragments are synchronised so often before the time is taken, and once more.
_NUM_CYCLES: Final = 3
_NUM_EXACT_STEPS: Final = 8
_NUM_DRAWN: Final = 4

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


def are_alike(clouds: Iterable[CloudSpec]) -> bool:
    """Whether the job describes all clouds alike, so that those that are early wait for the others."""
    return (
        len({(one.device, one.accelerator, one.flops, one.ranks, one.profile is not None) for one in clouds})
        < 2
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataForecast:
    """What simulated steps come to, once every fragment has been synchronised twice."""

    step_s: float
    """The time in which all clouds together learn from the tokens of a step."""
    free_step_s: float
    """The same over lines without limits."""
    spans: tuple[Span, ...]
    """The steps before a round, some at most."""


def forecast_data(
    spec: DataParallel, times: DataTimes, lines: Mapping[tuple[str, str], Line]
) -> DataForecast:
    """Simulate some steps of these clouds, over their lines and over lines without limits."""
    every = spec.sync_every
    spec = replace(spec, num_steps=_NUM_EXACT_STEPS if every == 1 else _NUM_CYCLES * every)
    free = {
        pair: replace(line, down_bps=_FREE_BPS, up_bps=_FREE_BPS, latency_s=0.0, jitter_s=0.0)
        for pair, line in lines.items()
    }
    shaped, unshaped = (simulate(simulated_data(spec, times), one) for one in (lines, free))
    step_s, end_s = _step_s(shaped, spec, times.microbatch_tokens)
    return DataForecast(
        step_s=step_s,
        free_step_s=_step_s(unshaped, spec, times.microbatch_tokens)[0],
        spans=shaped.window(end_s - _NUM_DRAWN * step_s, end_s),
    )


def _step_s(timeline: Timeline, spec: DataParallel, microbatch_tokens: int) -> tuple[float, float]:
    """From the last round before the end, and the one before of its fragment, at the first cloud; its end."""
    first = spec.clouds[0][0]
    rounds = {
        one.fact.number: (one.at_s, one.fact)
        for one in timeline.told
        if isinstance(one.fact, RoundEnded) and one.member == first
    }
    last = max(number for number in rounds if spec.due(number) < spec.num_steps)
    (begin_s, _), (end_s, told) = rounds[last - spec.num_fragments], rounds[last]
    num_tokens = sum(share.num_tokens for share in told.shares)
    step_tokens = len(spec.members) * spec.num_microbatches * microbatch_tokens
    return (end_s - begin_s) * step_tokens / num_tokens, end_s
