"""The parts of a pipeline's scheduler: what members agree on, routing, and a leader's end of a step."""

import enum
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

from pydantic import AliasChoices, Field

from isthmus.plan.codecs import Cut, CutState, Steering, read_pair, texts_of
from isthmus.plan.end_of_step import (
    Best,
    Evaluated,
    Read,
    Reduced,
    StepMeter,
    Tally,
    Texts,
    Verdict,
    joined,
    stage_tally,
    total_norm,
)
from isthmus.plan.saving import SaveRule
from isthmus.plan.scenario import Caps, Measured, Policy, first_windows, next_windows
from isthmus.plan.types import (
    Facts,
    Member,
    Message,
    MessageKind,
    Outcome,
    ScheduleError,
    Stop,
    Work,
    WorkKind,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which rank of each stage takes which micro-batch: a fixed function of the step, known to every member.

    The ranks of a stage take one micro-batch after the other. Another rank starts in every step, so that what
    is left over does not always fall to the same ranks. All evaluations are routed alike, and their second
    round as their first.
    """

    num_ranks: tuple[int, ...]
    num_microbatches: int
    num_validation_microbatches: int = 0

    def rank(self, stage: int, item: int, *, step: int, is_evaluation: bool = False) -> int:
        """The rank of a stage that takes a micro-batch."""
        place = item % self.num_validation_microbatches if is_evaluation else item + step
        return place % self.num_ranks[stage]

    def share(self, stage: int, rank: int, *, step: int, is_evaluation: bool = False) -> tuple[int, ...]:
        """The micro-batches of a step, or of one round of an evaluation, that a rank takes."""
        num_ranks = self.num_ranks[stage]
        if is_evaluation:
            return tuple(range(rank, self.num_validation_microbatches, num_ranks))
        return tuple(range((rank - step) % num_ranks, self.num_microbatches, num_ranks))

    def peers(self, stage: int, rank: int, *, neighbour: int) -> tuple[int, ...]:
        """The ranks of a neighbouring stage that a rank ever speaks to; leaders always do."""
        found = {0} if rank == 0 else set()
        # Routes repeat when every rank of both stages has been the first.
        for step in range(math.lcm(self.num_ranks[stage], self.num_ranks[neighbour])):
            found |= {self.rank(neighbour, item, step=step) for item in self.share(stage, rank, step=step)}
        items = self.share(stage, rank, step=0, is_evaluation=True)
        found |= {self.rank(neighbour, item, step=0, is_evaluation=True) for item in items}
        return tuple(sorted(found))


HIDDEN: Final = "hidden"
"""The name of the tensor that crosses a cut."""
GRADIENT: Final = "gradient"
"""Names the codec of the gradient in the message of its activation, which may settle a part of it."""
SENDING_HALF: Final = 0
RECEIVING_HALF: Final = 1
"""The items of FIT: the half of a bottleneck behind this stage, and of the one before it."""

FACTS: Final[dict[MessageKind, type[Facts]]] = {
    MessageKind.TALLY: Tally,
    MessageKind.VERDICT: Verdict,
    MessageKind.EVALUATED: Evaluated,
}
"""The facts that the messages of a pipeline carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What all members of a pipeline agree on."""

    stages: tuple[tuple[Member, ...], ...]
    """The members of each stage, one cloud each."""
    num_steps: int
    num_microbatches: int
    policy: Policy = Policy.WAN_ONE_F_ONE_B
    max_in_flight: Caps | None = None
    windows: tuple[int, ...] | None = None
    """Fixed windows of each stage's ranks; None lets them follow what is measured."""
    first_trained: int = 0
    """Stages before this one are frozen: they run forwards only, and no gradient is sent to them."""
    grouped_stages: frozenset[int] = frozenset()
    """Stages that are fully sharded, so that every pass is a work of all their ranks."""
    evaluate_every: int | None = None
    num_validation_microbatches: int = 0
    evaluates_without_codecs: bool = False
    """Whether each evaluation has a second round in which everything crosses raw."""
    keep_best: str | None = None
    """The metric by which the best weights are kept; all that are evaluated are saved for it."""
    fit_step: int | None = None
    """The step with which bottlenecks start."""
    bottlenecks: frozenset[int] = frozenset()
    """The cuts that have one, by the stage before them."""
    save_every_s: float | None = None
    """Bounds the work that may be lost; None saves nothing."""
    save_overhead: float = 0.01
    """The share of the time that saves may take."""
    cuts: tuple[Cut, ...] = ()
    """One for each cut, in order; none where hidden states cross raw everywhere."""

    def __post_init__(self) -> None:
        if not self.stages or not 0 <= self.first_trained < len(self.stages):
            raise ValueError(f"no first trained stage {self.first_trained} among {len(self.stages)}")
        if self.windows is not None and min(self.windows, default=0) < 1:
            raise ValueError(f"windows of {self.windows} micro-batches")
        if self.cuts and len(self.cuts) != len(self.stages) - 1:
            raise ValueError(f"{len(self.stages)} stages with {len(self.cuts)} cuts")

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, stage by stage."""
        return tuple(member for stage in self.stages for member in stage)

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """The number of ranks of each stage."""
        return tuple(map(len, self.stages))

    @property
    def routing(self) -> Routing:
        """Which rank takes which micro-batch."""
        return Routing(
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_validation_microbatches=self.num_validation_microbatches,
        )

    @property
    def codecs(self) -> tuple[Texts, ...]:
        """The codecs with which each cut starts."""
        return tuple((str(cut.codecs.forward), str(cut.codecs.backward)) for cut in self.cuts)

    def stage_of(self, member: Member) -> int:
        """The stage of a member."""
        for index, stage in enumerate(self.stages):
            if member.cloud == stage[0].cloud and member in stage:
                return index
        raise ValueError(f"{member} is in no stage of this pipeline")

    @property
    def num_rounds(self) -> int:
        """The rounds of an evaluation; the second is without codecs."""
        return 1 + self.evaluates_without_codecs

    def is_evaluated(self, step: int) -> bool:
        """Whether the weights that a step starts from are evaluated."""
        if not self.evaluate_every or not self.num_validation_microbatches or step == 0:
            return False
        return step == self.num_steps or step % self.evaluate_every == 0

    def is_without_codecs(self, about: Work | Message) -> bool:
        """Whether something belongs to the second round of an evaluation, in which everything crosses raw."""
        is_evaluation = about.kind in (WorkKind.EVALUATE, MessageKind.EVALUATION)
        return is_evaluation and about.item >= self.num_validation_microbatches

    def has(self, kind: MessageKind, step: int, item: int) -> bool:
        """Whether there is such an activation."""
        if kind is not MessageKind.EVALUATION:
            return step < self.num_steps and 0 <= item < self.num_microbatches
        return step <= self.num_steps and 0 <= item < self.num_rounds * self.num_validation_microbatches

    def first_windows(self) -> tuple[int, ...]:
        """Windows before anything is measured: as if a message took as long as a pass."""
        if self.windows is not None:
            return self.windows
        return first_windows(self, max_in_flight=self.max_in_flight)

    def next_windows(self, tally: Tally) -> tuple[int, ...]:
        """Windows of the next step, from what was measured in one."""
        if self.windows is not None:
            return self.windows
        busy = zip(tally.busy_s, self.num_ranks, strict=True)
        pass_s = tuple(number * busy_s / self.num_microbatches for busy_s, number in busy)
        measured = Measured(pass_s=pass_s, hops=tally.hops)
        return next_windows(self, measured, max_in_flight=self.max_in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState(Facts):
    """What a scheduler saves: the codecs of all cuts, and at the first stage how they came about."""

    asked: tuple[Texts, ...] = ()
    """The codecs with which the job let each cut start."""
    codecs: tuple[Texts, ...] = ()
    states: Annotated[tuple[CutState, ...], Field(validation_alias=AliasChoices("states", "standings"))] = ()
    best: Best | None = None


Place = tuple[int, bool]
"""The place of a step, or of the evaluation before it, in the run: the step, and whether it trains."""


def place_of(kind: MessageKind, step: int) -> Place:
    """The place of the step or evaluation to which a message belongs."""
    return step, kind is not MessageKind.EVALUATION


class Phase(enum.Enum):
    """What a member does next in a step or an evaluation."""

    FIT_SENDING = enum.auto()
    FIT_RECEIVING = enum.auto()
    READ = enum.auto()
    PASSES = enum.auto()
    SETTLE = enum.auto()
    """Wait for the tally from behind and for the verdict."""


@dataclass(slots=True, kw_only=True)
class StepState:
    """How far a step, or an evaluation, has come at this member; a pass counts when it has ended."""

    step: int
    is_evaluation: bool
    has_backwards: bool
    microbatches: tuple[int, ...]
    started_s: float
    phase: Phase = Phase.READ
    num_forwards: int = 0
    num_backwards: int = 0
    read: Read | None = None
    reduced: tuple[Reduced, ...] = ()
    verdict: Verdict | None = None
    observed: StepMeter = field(default_factory=StepMeter)

    @property
    def place(self) -> tuple[int, bool]:
        """Its place in the run; the evaluation of a step comes before its training."""
        return self.step, not self.is_evaluation

    @property
    def are_passes_over(self) -> bool:
        """Whether every micro-batch of this member has run its last pass."""
        num_ended = self.num_backwards if self.has_backwards else self.num_forwards
        return num_ended == len(self.microbatches)

    @property
    def has_passes_left(self) -> bool:
        """Whether this member still has backwards to run."""
        return self.has_backwards and self.num_backwards < len(self.microbatches)

    def has(self, microbatch: int, *, among: int) -> bool:
        """Whether a micro-batch is one of the first so many of this member."""
        place = bisect_left(self.microbatches, microbatch, hi=among)
        return place < among and self.microbatches[place] == microbatch


class Arrivals:
    """Activations and gradients that have arrived: each once, also before its step, never after."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._kept: set[tuple[MessageKind, int, int]] = set()
        self._current: StepState | None = None
        self._newest: Place | None = None

    @property
    def has_started(self) -> bool:
        """Whether it is known with which step the run starts."""
        return self._newest is not None

    def start(self, step: int) -> None:
        """Learn with which step the run starts."""
        self._newest = (step - 1, True)

    def has(self, kind: MessageKind, step: int, item: int) -> bool:
        """Whether something has arrived."""
        return (kind, step, item) in self._kept

    def open(self, current: StepState) -> None:
        """Learn the micro-batches of a step or an evaluation; what has arrived before it must fit."""
        self._current, self._newest = current, current.place
        for kept in self._kept:
            self._check(*kept)

    def keep(self, kind: MessageKind, step: int, item: int) -> bool:
        """Keep what has arrived; True where its step or evaluation has not begun."""
        key = (kind, step, item)
        if key in self._kept:
            raise ScheduleError(f"{kind.value} {step}.{item} has arrived before")
        is_early = self._check(kind, step, item)
        self._kept.add(key)
        return is_early

    def close(self) -> None:
        """End a step or an evaluation: nothing more may arrive for it."""
        place = None if self._current is None else self._current.place
        self._current = None
        self._kept = {one for one in self._kept if place_of(one[0], one[1]) != place}

    def _check(self, kind: MessageKind, step: int, item: int) -> bool:
        """Refuse what belongs to a step that is over, or too far ahead, or to another member; True if early.

        A stage cannot be more than a step ahead of the one behind it, whose tally it needs.
        """
        current, newest, is_evaluation = self._current, self._newest, kind is MessageKind.EVALUATION
        if newest is None:
            raise ScheduleError(f"{kind.value} {step}.{item} has arrived before the start")
        if current is not None and current.step == step and current.is_evaluation == is_evaluation:
            if not current.has(item, among=len(current.microbatches)):
                raise ScheduleError(f"{kind.value} {step}.{item} is no micro-batch of this member")
            return False
        if (step, not is_evaluation) <= newest:
            raise ScheduleError(f"{kind.value} {step}.{item} belongs to a step that is over")
        if step > newest[0] + 1 or not self._pipeline.has(kind, step, item):
            raise ScheduleError(f"{kind.value} {step}.{item} is not of the next step")
        return True


Outgoing = tuple[MessageKind, int, Facts]
"""A message to the leader of a stage."""


class EndOfStep:
    """Settles one step after the other, at the leader of a stage."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        self.steering: Steering | None = None
        """Chooses codecs, at the first stage alone."""
        if index == 0 and pipeline.cuts:
            self.steering = Steering(pipeline.cuts, num_microbatches=pipeline.num_microbatches)
        self.outgoing: list[Outgoing] = []
        """Messages that the end of a step needs sent; the scheduler takes them."""
        self.failure: Stop | None = None
        self._pipeline = pipeline
        self._index = index
        self._is_first = index == 0
        self._is_last = index == len(pipeline.stages) - 1
        self._tally: Tally | None = None
        """That of the step at hand, of this stage and all behind it."""
        self._behind: Tally | None = None
        self._verdict: Verdict | None = None
        self._rule = SaveRule(pipeline.save_every_s, pipeline.save_overhead)
        self._notes: list[str] = []

    @property
    def states(self) -> tuple[CutState, ...]:
        """How the codecs of all cuts came about, for a checkpoint; known to the first stage alone."""
        return () if self.steering is None else self.steering.states

    def start(self, now_s: float) -> None:
        """Count the time to the first save from here."""
        self._rule.begin(now_s)

    def take_notes(self) -> list[str]:
        """What people should read of the decisions taken, at the first stage alone."""
        notes, self._notes = self._notes, []
        if self.steering is not None:
            notes += self.steering.notes
            self.steering.notes.clear()
        return notes

    def settle(
        self, step: int, members: Sequence[Reduced], now_s: float, read: Read | None = None
    ) -> Verdict | None:
        """The verdict on a step, None while it is not known; may be asked again and again."""
        if self._tally is None:
            own = stage_tally(step, members)
            if not self._is_last:
                if self._behind is None:
                    return None
                own = joined(own, members, self._behind)
            self._tally = own
            if not self._is_first:
                self.outgoing.append((MessageKind.TALLY, self._index - 1, own))
        verdict = self._judge(self._tally, now_s, read) if self._is_first else self._verdict
        if verdict is not None and not self._is_last:
            self.outgoing.append((MessageKind.VERDICT, self._index + 1, verdict))
        return verdict

    def take_tally(self) -> Tally:
        """The tally of the step that was settled, which is over."""
        tally, self._tally, self._behind, self._verdict = self._tally, None, None, None
        if tally is None:
            raise ValueError("a step ends that was not settled")
        return tally

    def tally_arrived(self, message: Message, *, step: int | None) -> None:
        """Keep the tally of the stages behind, which may come before this stage's own."""
        facts = message.facts
        if not isinstance(facts, Tally) or facts.step != step or self._behind is not None:
            raise ScheduleError(f"{message.name} is not awaited here")
        if len(facts.busy_s) != len(self._pipeline.stages) - self._index - 1:
            raise ScheduleError(f"{message.name} is not of all stages behind this one")
        if not len(facts.hops) == len(facts.cosines) == len(facts.element_bytes) == len(facts.busy_s) - 1:
            raise ScheduleError(f"{message.name} is not of all cuts behind this stage")
        self._behind = facts

    def verdict_arrived(self, message: Message, *, step: int | None) -> None:
        """Keep the verdict on the step at hand, which must cover all stages and keep to the cuts' bounds."""
        facts, pipeline = message.facts, self._pipeline
        if not isinstance(facts, Verdict) or facts.step != step or self._verdict is not None:
            raise ScheduleError(f"{message.name} is not awaited here")
        if self._tally is None:
            raise ScheduleError(f"{message.name} judges a step before this stage has told of it")
        if len(facts.windows) != len(pipeline.stages) or len(facts.codecs) != len(pipeline.cuts):
            raise ScheduleError(f"{message.name} is not of all stages and cuts")
        for cut, codecs in zip(pipeline.cuts, facts.codecs, strict=True):
            if not cut.allows(read_pair(codecs)):
                raise ScheduleError(f"{message.name} asks for codecs {codecs} at {cut.name}")
        self._verdict = facts

    def _judge(self, tally: Tally, now_s: float, read: Read | None) -> Verdict | None:
        pipeline, norm = self._pipeline, total_norm(tally.squared_norms)
        if not math.isfinite(norm) or not math.isfinite(tally.loss_sum):
            self.failure = Stop(
                Outcome.FAILED,
                f"the loss or its gradient is not finite any more at step {tally.step + 1}",
                "lower train.learning_rate; the weights are as the last checkpoint has them",
            )
            return None
        return Verdict(
            step=tally.step,
            norm=norm,
            windows=pipeline.next_windows(tally),
            save=self._is_save_due(tally, now_s) or tally.wants_stop,
            safe_step=tally.saving.safe_step,
            stop=tally.wants_stop,
            codecs=() if self.steering is None else tuple(map(texts_of, self.steering(tally))),
            loss=tally.loss_sum / max(tally.num_targets, 1),
            num_tokens=0 if read is None else read.num_tokens,
        )

    def _is_save_due(self, tally: Tally, now_s: float) -> bool:
        if note := self._rule.note(tally.saving):
            self._notes.append(note)
        is_last = tally.step == self._pipeline.num_steps - 1 and self._rule.every_s is not None
        is_judged = self._pipeline.keep_best is not None and self._pipeline.is_evaluated(tally.step + 1)
        if not is_last and not is_judged and not self._rule.is_due(now_s, tally.saving):
            return False
        self._rule.begin(now_s)
        return True
