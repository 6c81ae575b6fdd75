"""The real runs: worker, link, codecs and steering are the product's, put together as a session does it."""

import statistics
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from member import Record, run_member
from predicted.cases import Case
from predicted.journey import Visit

from auto.planning import Prepared, TrialsByCase, read_plan
from auto.trials import SlowDown, Trial
from isthmus.plan.codecs import Cut, texts_of
from isthmus.plan.end_of_step import Note, StepEnded, Texts, Verdict
from isthmus.plan.types import Event, Sent
from isthmus.train.build import blueprint_of
from isthmus.train.device import Device
from isthmus.train.pipeline import PipelineConfig
from isthmus.train.pipeline_config import run_config

NUM_STEADY_STEPS: Final = 4
_UNTIL_TOLD_S: Final = 600.0
# The windows are those of the first steps.
_NUM_WARM_UP_STEPS: Final = 2
# A basis is sent anew after 1, 2, 4 and 8 steps.
_NUM_LEARNING_STEPS: Final = 9
# Measured figures may decide after four steps, before a basis is due again in step 16.
_NUM_SETTLING_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of a trial: its steps, and their codecs."""

    number: int
    trial: Trial
    steps_s: tuple[float, ...]
    codecs: tuple[Texts, ...]
    """Those of each step, and those that the step behind the last would have."""
    reasons: tuple[str, ...]

    @property
    def first(self) -> Texts:
        """The codecs with which it began."""
        return self.codecs[0]

    @property
    def last(self) -> Texts:
        """The codecs with which it ended."""
        return self.codecs[-1]

    @property
    def since_step(self) -> int:
        """The first step with the codecs of the end."""
        changes = [step for step, (one, other) in enumerate(pairwise(self.codecs), 1) if one != other]
        return max(changes, default=0)

    @property
    def steady_s(self) -> float:
        """The median of the last steps."""
        return statistics.median(self.steps_s[-NUM_STEADY_STEPS:])


@dataclass(slots=True)
class Watch:
    """Keeps the codecs of each verdict, and slows the line down between two steps."""

    visit: Visit
    slow_down: SlowDown | None
    codecs: list[Texts] = field(default_factory=list)

    def event(self, event: Event, _now_s: float) -> None:
        """Keep the codecs of a verdict that was sent."""
        if isinstance(event, Sent) and isinstance(event.message.facts, Verdict):
            self.codecs += event.message.facts.codecs

    def step_ended(self, ended: StepEnded) -> None:
        """Change the line for the step behind."""
        slow_down, number = self.slow_down, ended.step + 1
        if slow_down is not None and number == slow_down.first_step:
            self.visit.slow_down(slow_down.factor, _UNTIL_TOLD_S)
        elif slow_down is not None and number == slow_down.end_step:
            self.visit.slow_down(1.0, 0.0)


def run(visit: Visit, *, trials: TrialsByCase, plans: Path) -> list[Ran]:
    """Run all trials on a line, one after the other."""
    found = []
    for case in visit.cases:
        for trial in trials[case.number]:
            visit.meet()
            if visit.index == 0:
                visit.report(f"{case.wan.name}: {trial.name}")
            found.append(_run_trial(case, trial, visit, read_plan(plans, case, trial)))
    visit.meet()
    return found


def _run_trial(case: Case, trial: Trial, visit: Visit, prepared: Prepared) -> Ran:
    config, is_first = _config(prepared, trial), visit.index == 0
    watch = Watch(visit, trial.slow_down if is_first else None)
    record = run_member(
        config,
        visit.cloud,
        visit.links,
        stage=visit.stage(case),
        device=Device(case.stages.device),
        source=case.stages.source(config.pipeline.num_microbatches) if is_first else None,
        record=Record(on_step=watch.step_ended),
        on_event=watch.event,
    )
    reasons = [*prepared.decisions.reasons, *(fact.text for fact in record.told if isinstance(fact, Note))]
    return Ran(
        number=case.number,
        trial=trial,
        steps_s=tuple(one.duration_s for one in record.steps),
        codecs=(texts_of(config.pipeline.cuts[0].codecs), *watch.codecs),
        reasons=tuple(one for one in reasons if "codec" in one or one.startswith("link")),
    )


def _config(prepared: Prepared, trial: Trial) -> PipelineConfig:
    """What a session makes of the job; it ends when it is steady, though its codecs count on all steps."""
    blueprint = blueprint_of(prepared.job, config={}, num_labels=None)
    config = run_config(prepared.job, prepared.decisions, blueprint, num_validation_microbatches=0)
    num_steps = _num_steps(trial, config.pipeline.cuts[0])
    pipeline = replace(config.pipeline, num_steps=num_steps, save_every_s=None)
    return replace(config, pipeline=pipeline, seed=0)


def _num_steps(trial: Trial, cut: Cut) -> int:
    if trial.slow_down is not None:
        return trial.slow_down.end_step + _NUM_LEARNING_STEPS + NUM_STEADY_STEPS
    is_learning = trial.mistake != 1.0 or cut.codecs.subspace is not None
    num_steps = _NUM_LEARNING_STEPS if is_learning else _NUM_WARM_UP_STEPS
    if trial.rung is None:
        num_steps += _NUM_SETTLING_STEPS
    return num_steps + NUM_STEADY_STEPS
