"""A pipeline with the times and sizes of a scenario, as the simulator runs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.plan.codecs import Crossing, Cut, read_pair
from isthmus.plan.end_of_step import Read, Reduced, Round, Scored, Seen, Updated, Verdict
from isthmus.plan.lines import Disturbance
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.pipeline_parts import GRADIENT, HIDDEN, Pipeline
from isthmus.plan.scenario import Line, Scenario
from isthmus.plan.simulate import Timeline, simulate
from isthmus.plan.types import Costs, Facts, Member, Message, MessageKind, Ran, Work, WorkKind


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
        index, hops, checkpoint = self.pipeline.stage_of(member), self._scenario.hops, self._checkpoint
        load, is_leader = self._scenario.stages[index], member == self.pipeline.stages[index][0]
        found = _StageCosts(
            works_s={
                WorkKind.FORWARD: load.forward_s,
                WorkKind.EVALUATE: load.forward_s,
                WorkKind.BACKWARD: load.backward_s,
                WorkKind.UPDATE: load.update_s,
            },
            state_bytes=checkpoint.stage_bytes[index] if checkpoint is not None and is_leader else 0,
        )
        if index < len(hops):
            size = self._coded[index].forward_bytes if self._coded else hops[index].forward_bytes
            for kind in (MessageKind.ACTIVATION, MessageKind.EVALUATION):
                found.sizes[kind], found.codings_s[kind] = size, hops[index].forward_coding_s
        if index:
            size = self._coded[index - 1].backward_bytes if self._coded else hops[index - 1].backward_bytes
            found.sizes[MessageKind.GRADIENT] = size
            found.codings_s[MessageKind.GRADIENT] = hops[index - 1].backward_coding_s
        return found


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
    """The costs of one member of a stage, by the kinds of works and messages."""

    works_s: Mapping[WorkKind, float]
    state_bytes: int
    sizes: dict[MessageKind, int | Callable[[Message], int]] = field(default_factory=dict)
    codings_s: dict[MessageKind, float] = field(default_factory=dict)

    def work_s(self, work: Work) -> float:
        return self.works_s.get(work.kind, 0.0)

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
        size = self.sizes.get(message.kind, 0)
        return size if isinstance(size, int) else size(message)

    def coding_s(self, message: Message) -> float:
        return self.codings_s.get(message.kind, 0.0)

    def saved_bytes(self) -> int:
        return self.state_bytes
