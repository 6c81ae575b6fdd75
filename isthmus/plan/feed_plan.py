"""What a job asks of generators and discriminator, and what the simulator says a step of them takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean
from types import MappingProxyType
from typing import Final

from isthmus.errors import UserError
from isthmus.events import Span
from isthmus.job import GeneratorDiscriminatorStrategy, Job
from isthmus.job.sections import GeneratorSpec
from isthmus.plan.end_of_step import Reduced, Seen
from isthmus.plan.feed import (
    MAX_KEPT,
    FeedStep,
    Generated,
    GeneratorDiscriminator,
    GeneratorStream,
    feed_scheduler,
)
from isthmus.plan.scenario import Line
from isthmus.plan.simulate import Timeline, simulate
from isthmus.plan.types import Facts, Member, Message, MessageKind, Scheduler, Work, WorkKind

LENGTH_BYTES: Final = 4
"""The bytes in which the length of a sequence crosses."""
_LEAST_KEPT: Final = 64
_KEPT_BYTES: Final = 4 * 2**20
_NUM_STEPS: Final = 36
# The first steps wait for the first batches.
_NUM_DRAWN: Final = 4
_NUM_WARM_UP_STEPS: Final = 12
_FREE_BPS: Final = 1e15
_ALONE: Final[Mapping[str, int]] = MappingProxyType({})


def strategy_of(job: Job) -> GeneratorDiscriminatorStrategy:
    """The strategy of a job that is run as this kind."""
    if not isinstance(job.strategy, GeneratorDiscriminatorStrategy):
        raise TypeError(f"a job of kind {job.strategy.kind!r} has no discriminator")
    return job.strategy


def clouds_of(job: Job) -> tuple[str, ...]:
    """The discriminator's cloud, then those of the generators, in the order of the job."""
    strategy, names = strategy_of(job), [cloud.name for cloud in job.cloud]
    judge = job.cloud_named(strategy.discriminator_cloud or names[0]).name
    for name in strategy.generators:
        job.cloud_named(name)
    return (judge, *(name for name in names if name != judge))


def spec_of(strategy: GeneratorDiscriminatorStrategy, cloud: str) -> GeneratorSpec:
    """What a generator has of its own."""
    return strategy.generators.get(cloud, GeneratorSpec())


def batch_bytes(*, num_sequences: int, sequence_length: int, vocabulary_size: int) -> int:
    """The bytes of a batch without padding: a length for each sequence, an id and a label for each token."""
    num_bits = num_sequences * sequence_length * token_bits(vocabulary_size)
    return LENGTH_BYTES * num_sequences + ceil(num_bits / 8)


def token_bits(vocabulary_size: int) -> int:
    """The bits of a token: its id and one for the label."""
    return max(1, (vocabulary_size - 1).bit_length()) + 1


def feed_of(
    strategy: GeneratorDiscriminatorStrategy,
    clouds: Sequence[str],
    *,
    num_steps: int,
    max_bytes: int,
    save_every_s: float | None = None,
    num_ranks: Mapping[str, int] = _ALONE,
) -> GeneratorDiscriminator:
    """The schedule of these clouds, of which the first discriminates."""
    _, *others = clouds
    discriminator, *groups = [
        tuple(Member(name, rank) for rank in range(num_ranks.get(name, 1))) for name in clouds
    ]
    given, weights = [spec_of(strategy, name).quota for name in others], shares(strategy, clouds)
    quotas = shared_out(num_steps * strategy.batches, weights, given=given)
    streams = tuple(
        GeneratorStream(members=group, quota=quota, weight=weight)
        for group, quota, weight in zip(groups, quotas, weights, strict=True)
    )
    least = max(2 * strategy.batches, strategy.max_queued, _LEAST_KEPT)
    if least > MAX_KEPT:
        raise UserError(
            f"{least} batches would have to be kept, and {MAX_KEPT} can be",
            hint="lower strategy.batches or strategy.max_queued",
        )
    return GeneratorDiscriminator(
        discriminator=discriminator,
        generators=streams,
        batches_per_step=strategy.batches,
        max_queued=strategy.max_queued,
        max_kept=max(least, min(MAX_KEPT, _KEPT_BYTES // max_bytes)),
        save_every_s=save_every_s,
        on_lost=strategy.on_lost,
        wait_s=strategy.wait_s,
    )


def shares(strategy: GeneratorDiscriminatorStrategy, clouds: Sequence[str]) -> list[float]:
    """The share of each generator in the stream; the first cloud discriminates."""
    weights = [spec_of(strategy, name).size ** strategy.size_exponent for name in clouds[1:]]
    return [one / sum(weights) for one in weights]


def shared_out(total: int, weights: Sequence[float], *, given: Sequence[int | None]) -> list[int]:
    """Batches of each generator: as given, or what is left by weight, and one at least."""
    left = max(0, total - sum(one or 0 for one in given))
    open_weight = sum(weight for weight, one in zip(weights, given, strict=True) if one is None)
    end, quotas = 0.0, []
    for weight, one in zip(weights, given, strict=True):
        start = round(end)
        end += 0.0 if one is not None else left * weight / open_weight
        quotas.append(one if one is not None else max(1, round(end) - start))
    return quotas


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


@dataclass(frozen=True, slots=True)
class SimulatedFeed:
    """Generators and discriminator with given times, for the simulator."""

    spec: GeneratorDiscriminator
    times: FeedTimes

    @property
    def members(self) -> Sequence[Member]:
        """The discriminator's members, then those of each generator."""
        return self.spec.members

    def scheduler(self, member: Member) -> Scheduler:
        """The scheduler that workers run."""
        return feed_scheduler(self.spec, member)

    def costs(self, member: Member) -> "FeedCosts":
        """The costs of a member."""
        return FeedCosts(self.spec, self.times, member)


@dataclass(frozen=True, slots=True)
class FeedCosts:
    """The costs of one member."""

    spec: GeneratorDiscriminator
    times: FeedTimes
    member: Member

    def work_s(self, work: Work) -> float:
        """The time of a batch or of an update; reductions are a part of them."""
        match work.kind:
            case WorkKind.GENERATE:
                return self.times.generate_s[self.spec.generator_of(self.member.cloud) or 0]
            case WorkKind.DISCRIMINATE:
                return self.times.discriminate_s
            case WorkKind.UPDATE:
                return self.times.update_s
        return 0.0

    def work_facts(self, work: Work, duration_s: float) -> Facts | None:  # noqa: ARG002 - as given
        """The tokens of a batch, of which each rank has its share."""
        index = self.spec.generator_of(self.member.cloud)
        group = self.spec.discriminator if index is None else self.spec.generators[index].members
        match work.kind:
            case WorkKind.GENERATE:
                return Generated(num_tokens=self.times.batch_tokens // len(group))
            case WorkKind.REDUCE:
                return Reduced(seen=Seen(), loss_sum=0.0, squared_norms=())
        return None

    def message_bytes(self, message: Message) -> int:
        """The size of a batch; all else is small."""
        return self.times.batch_bytes if message.kind is MessageKind.IDS else 0

    def coding_s(self, message: Message) -> float:  # noqa: ARG002 - bits are packed in no time
        """Nothing."""
        return 0.0

    def saved_bytes(self) -> int:
        """What the discriminator copies."""
        return self.times.state_bytes if self.member == self.spec.discriminator[0] else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForecast:
    """What was simulated of a feed, once its queues are in their steady state."""

    step_s: float
    unshaped_s: float
    """The time of a step over lines without limits."""
    waited_s: float
    """How long the discriminator waits for batches in a step."""
    spans: tuple[Span, ...]
    """The last steps."""

    @property
    def throughput_ratio(self) -> float:
        """The throughput over these lines, by that over lines without limits."""
        return self.unshaped_s / self.step_s


def forecast(
    strategy: GeneratorDiscriminatorStrategy,
    clouds: Sequence[str],
    times: FeedTimes,
    lines: Mapping[tuple[str, str], Line],
) -> FeedForecast:
    """Simulate some steps of these clouds, over their lines and over lines without limits."""
    given = {name: one.model_copy(update={"quota": None}) for name, one in strategy.generators.items()}
    own = strategy.model_copy(update={"generators": given})
    spec = feed_of(own, clouds, num_steps=_NUM_STEPS, max_bytes=max(1, times.batch_bytes))
    shaped = simulate(SimulatedFeed(spec, times), lines)
    free = {
        pair: replace(line, down_bps=_FREE_BPS, up_bps=_FREE_BPS, latency_s=0.0, jitter_s=0.0)
        for pair, line in lines.items()
    }
    end_s = shaped.steps[-1].end_s
    waits = [one.fact.waited_s for one in shaped.told if isinstance(one.fact, FeedStep)]
    return FeedForecast(
        step_s=_step_s(shaped),
        unshaped_s=_step_s(simulate(SimulatedFeed(spec, times), free)),
        waited_s=fmean(waits[_NUM_WARM_UP_STEPS:]),
        spans=shaped.window(end_s - _NUM_DRAWN * _step_s(shaped), end_s),
    )


def _step_s(timeline: Timeline) -> float:
    """The mean: streams of unlike speed make steps of unlike length."""
    return fmean(step.duration_s for step in timeline.steps[_NUM_WARM_UP_STEPS:])
