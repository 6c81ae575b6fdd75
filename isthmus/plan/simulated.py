"""The three strategies with given times and sizes, as the simulator runs them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from isthmus.plan.codecs import Crossing, read_pair
from isthmus.plan.data import data_scheduler
from isthmus.plan.end_of_step import Read, Reduced, Round, Scored, Seen, Updated, Verdict
from isthmus.plan.feed import Generated, GeneratorDiscriminator, feed_scheduler
from isthmus.plan.lines import Disturbance
from isthmus.plan.membership import DataParallel, Piece
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.pipeline_parts import GRADIENT, HIDDEN, Pipeline
from isthmus.plan.scenario import HopLoad, Line, Scenario, StageLoad
from isthmus.plan.simulate import simulate
from isthmus.plan.steering import Cut
from isthmus.plan.timeline import Timeline
from isthmus.plan.types import Costs, Facts, Member, Message, MessageKind, Ran, Scheduler, Work, WorkKind

_DOWN: Final = frozenset({MessageKind.ACTIVATION, MessageKind.EVALUATION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Each stage's state is copied to a neighbouring cloud after the first step that ends `every_s` later.

    Copies take what messages leave of a line, and `share` of it at least. Of no bytes, state stays where it
    is.
    """

    every_s: float
    stage_bytes: tuple[int, ...]
    share: float = 0.1


def simulate_scenario(
    scenario: Scenario,
    *,
    num_steps: int = 1,
    seed: int = 0,
    faults: Sequence[Disturbance] = (),
    checkpoint: Checkpointing | None = None,
    cuts: Sequence[Cut] = (),
) -> Timeline:
    """Simulate so many steps of a scenario; with `cuts` codecs are steered, and messages sized by them."""
    strategy = ScenarioPipeline(scenario, num_steps=num_steps, checkpoint=checkpoint, cuts=cuts)
    share = 0.1 if checkpoint is None else checkpoint.share
    return simulate(strategy, strategy.lines, seed=seed, faults=faults, background_share=share)


class ScenarioPipeline:
    """The strategy of a scenario: its clouds as stages, with one member for each rank.

    Where `cuts` are given, one for each hop, codecs change as workers change them, and a message takes the
    bytes of its codecs instead of those of the scenario.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        num_steps: int = 1,
        checkpoint: Checkpointing | None = None,
        cuts: Sequence[Cut] = (),
        evaluate_every: int | None = None,
        num_validation_microbatches: int = 0,
    ) -> None:
        self._scenario = scenario
        self._checkpoint = checkpoint
        self._coded = tuple(_Coded(crossing=cut.crossing) for cut in cuts)
        stages = [[Member(one.cloud, rank) for rank in range(one.num_ranks)] for one in scenario.stages]
        self.pipeline = Pipeline(
            stages=tuple(map(tuple, stages)),
            num_steps=num_steps,
            num_microbatches=scenario.num_microbatches,
            policy=scenario.policy,
            max_in_flight=scenario.max_in_flight,
            windows=scenario.windows,
            first_trained=scenario.first_trained,
            save_every_s=None if checkpoint is None else checkpoint.every_s,
            cuts=tuple(cuts),
            evaluate_every=evaluate_every,
            num_validation_microbatches=num_validation_microbatches,
        )

    @property
    def members(self) -> Sequence[Member]:
        """All members, stage by stage."""
        return self.pipeline.members

    @property
    def lines(self) -> dict[tuple[str, str], Line]:
        """The lines between neighbouring clouds, seen along the pipeline."""
        clouds = [stage.cloud for stage in self._scenario.stages]
        pairs = zip(clouds, clouds[1:], self._scenario.hops, strict=False)
        return {(first, second): hop.line for first, second, hop in pairs}

    def scheduler(self, member: Member) -> PipelineScheduler:
        """A fresh scheduler of a member."""
        return PipelineScheduler(self.pipeline, member)

    def costs(self, member: Member) -> Costs:
        """The times and sizes of a member's stage."""
        index = self.pipeline.stage_of(member)
        hops, checkpoint = self._scenario.hops, self._checkpoint
        is_leader = member == self.pipeline.stages[index][0]
        return _StageCosts(
            load=self._scenario.stages[index],
            down=hops[index] if index < len(hops) else None,
            up=hops[index - 1] if index else None,
            coded_down=self._coded[index] if index < len(self._coded) else None,
            coded_up=self._coded[index - 1] if index and self._coded else None,
            state_bytes=checkpoint.stage_bytes[index] if checkpoint is not None and is_leader else 0,
        )


@dataclass(slots=True, kw_only=True)
class _Coded:
    """The bytes of messages over one cut, by the codecs that they name."""

    crossing: Crossing
    _bytes: dict[tuple[tuple[str, str], ...], tuple[int, int]] = field(default_factory=dict)
    _at_step: dict[int, int] = field(default_factory=dict)
    """The bytes of a gradient, by its step: its message does not name the codec of its activation."""

    def forward_bytes(self, message: Message) -> int:
        sizes = self._bytes.get(message.codecs)
        if sizes is None:
            named = dict(message.codecs)
            pair = read_pair((named[HIDDEN], named[GRADIENT]))
            sizes = pair.forward_bytes(self.crossing), pair.backward_bytes(self.crossing)
            self._bytes[message.codecs] = sizes
        if message.kind is MessageKind.ACTIVATION:
            self._at_step[message.step] = sizes[1]
        return sizes[0]

    def backward_bytes(self, message: Message) -> int:
        return self._at_step[message.step]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageCosts:
    """The costs of one member of a stage."""

    load: StageLoad
    down: HopLoad | None
    up: HopLoad | None
    coded_down: _Coded | None
    coded_up: _Coded | None
    state_bytes: int

    def work_s(self, work: Work) -> float:
        match work.kind:
            case WorkKind.FORWARD | WorkKind.EVALUATE:
                return self.load.forward_s
            case WorkKind.BACKWARD:
                return self.load.backward_s
            case WorkKind.UPDATE:
                return self.load.update_s
            case _:
                return 0.0

    def work_facts(self, work: Work, duration_s: float) -> Facts | None:
        match work.kind:
            case WorkKind.FORWARD | WorkKind.BACKWARD:
                return Ran(busy_s=duration_s)
            case WorkKind.READ:
                return Read(num_targets=1, num_tokens=0)
            case WorkKind.REDUCE:
                seen = work.facts if isinstance(work.facts, Seen) else Seen()
                return Reduced(seen=seen, loss_sum=0.0, squared_norms=())
            case WorkKind.UPDATE:
                return Updated(verdict=work.facts if isinstance(work.facts, Verdict) else None)
            case WorkKind.SCORE:
                return Scored(rounds=(Round(losses=(), num_correct=0, num_targets=0),))
            case _:
                return None

    def message_bytes(self, message: Message) -> int:
        if message.kind in _DOWN and self.down is not None:
            coded = self.coded_down
            return self.down.forward_bytes if coded is None else coded.forward_bytes(message)
        if message.kind is MessageKind.GRADIENT and self.up is not None:
            coded = self.coded_up
            return self.up.backward_bytes if coded is None else coded.backward_bytes(message)
        return 0

    def coding_s(self, message: Message) -> float:
        if message.kind in _DOWN and self.down is not None:
            return self.down.forward_coding_s
        if message.kind is MessageKind.GRADIENT and self.up is not None:
            return self.up.backward_coding_s
        return 0.0

    def saved_bytes(self) -> int:
        return self.state_bytes


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
