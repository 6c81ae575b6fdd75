"""A scheduler decides by its events and their times alone: the log of a run gives the same actions again."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from isthmus.plan.end_of_step import Evaluated, Note, StepEnded
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.simulate import Timeline, simulate
from isthmus.plan.simulated import Checkpointing, ScenarioPipeline
from isthmus.plan.types import Action, Costs, Event, Interrupted, Member, Outcome, Save, Scheduler, Stop
from tests.plan.test_simulated_codecs import cut, scenario, slow_from

INTERRUPTED_S = 15.0
LATER_S = 1e6
NUM_STEPS = 40


@dataclass(slots=True)
class Logged:
    """A scheduler that keeps its log, and is interrupted with the first event that comes late enough."""

    scheduler: Scheduler
    interrupted_s: float
    log: list[tuple[Event, float, tuple[Action, ...]]] = field(default_factory=list)

    def on(self, event: Event, now_s: float) -> Sequence[Action]:
        actions: list[Action] = []
        if now_s >= self.interrupted_s:
            self.interrupted_s = LATER_S
            actions += self._on(Interrupted("SIGTERM"), now_s)
        return [*actions, *self._on(event, now_s)]

    def _on(self, event: Event, now_s: float) -> Sequence[Action]:
        actions = tuple(self.scheduler.on(event, now_s))
        self.log.append((event, now_s, actions))
        return actions


@dataclass(slots=True)
class LoggedPipeline:
    """A pipeline of which one member is interrupted."""

    strategy: ScenarioPipeline
    interrupted: Member | None
    logs: dict[Member, Logged] = field(default_factory=dict)

    @property
    def members(self) -> Sequence[Member]:
        return self.strategy.members

    def scheduler(self, member: Member) -> Logged:
        at_s = INTERRUPTED_S if member == self.interrupted else LATER_S
        self.logs[member] = Logged(self.strategy.scheduler(member), at_s)
        return self.logs[member]

    def costs(self, member: Member) -> Costs:
        return self.strategy.costs(member)


def run(*, num_ranks: int, interrupted: Member | None) -> tuple[LoggedPipeline, Timeline]:
    plain = scenario(3)
    stages = tuple(
        replace(one, num_ranks=num_ranks, forward_s=num_ranks * one.forward_s) for one in plain.stages
    )
    strategy = ScenarioPipeline(
        replace(plain, stages=stages),
        num_steps=NUM_STEPS,
        checkpoint=Checkpointing(every_s=2.0, stage_bytes=(10_000, 0, 20_000)),
        cuts=[cut(), cut()],
        evaluate_every=4,
        num_validation_microbatches=3,
    )
    logged = LoggedPipeline(strategy, interrupted)
    timeline = simulate(logged, strategy.lines, faults=[slow_from(2.0, 28.0)])
    return logged, timeline


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("interrupted", [None, Member("0"), Member("1"), Member("2")])
def test_a_log_gives_the_same_actions_to_a_fresh_scheduler(
    num_ranks: int, interrupted: Member | None
) -> None:
    logged, timeline = run(num_ranks=num_ranks, interrupted=interrupted)
    assert_eventful(logged, timeline, is_interrupted=interrupted is not None)
    for member, found in logged.logs.items():
        fresh = PipelineScheduler(logged.strategy.pipeline, member)
        for event, now_s, actions in found.log:
            assert fresh.on(event, now_s) == actions


def assert_eventful(logged: LoggedPipeline, timeline: Timeline, *, is_interrupted: bool) -> None:
    """Everything that a scheduler decides has happened in the run."""
    told = {type(one.fact) for one in timeline.told}
    assert {StepEnded, Evaluated, Note} <= told
    assert len({step.windows for step in timeline.steps}) > 1
    ends = set()
    for found in logged.logs.values():
        actions = [action for *_, several in found.log for action in several]
        assert sum(isinstance(action, Save) for action in actions) > 1
        ends |= {action.outcome for action in actions if isinstance(action, Stop)}
    assert ends == {Outcome.INTERRUPTED if is_interrupted else Outcome.FINISHED}
    assert (len(timeline.steps) < NUM_STEPS) == is_interrupted
