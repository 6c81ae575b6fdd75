"""The real runs: worker, link, codecs and steering are the product's, put together as a session does it."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from predicted.cases import Case
from predicted.journey import Visit
from sleeping import Timer

from auto.planning import Prepared, TrialsByCase, read_plan
from auto.trials import CROSSING, SlowDown, Trial
from isthmus.plan.ladder import Pair
from isthmus.train.course import Course
from isthmus.train.crossing.cut import Cut, texts_of
from isthmus.train.crossing.steering import Steering
from isthmus.train.crossing.wiring import cuts_of, steering_terms
from isthmus.train.crossing.words import Tally
from isthmus.train.device import Device
from isthmus.train.observer import StepEnded
from isthmus.train.optimize.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import pipeline_worker

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
    """What came of a trial: the codecs it began and ended with, and its steps."""

    number: int
    trial: Trial
    first: tuple[str, str]
    last: tuple[str, str]
    since_step: int
    steps_s: tuple[float, ...]
    codecs: tuple[tuple[str, str], ...]
    """Those of each step."""
    reasons: tuple[str, ...]

    @property
    def steady_s(self) -> float:
        """The median of the last steps."""
        return statistics.median(self.steps_s[-NUM_STEADY_STEPS:])


class Watched:
    """Steers, and keeps what it says."""

    def __init__(self, steering: Steering) -> None:
        self.steering = steering
        self.found: list[tuple[str, str]] = []

    def __call__(self, tally: Tally) -> tuple[Pair, ...]:
        """The codecs of the next step."""
        (pair,) = self.steering(tally)
        self.found.append(texts_of(pair))
        return (pair,)


class Disturber(Timer):
    """Keeps each step, and slows the line down between two of them."""

    def __init__(self, visit: Visit, slow_down: SlowDown | None) -> None:
        super().__init__()
        self._visit = visit
        self._slow_down = slow_down

    def step_ended(self, ended: StepEnded) -> None:
        """Note how long it took; the line changes for the step behind."""
        super().step_ended(ended)
        slow_down, step = self._slow_down, len(self.steps)
        if slow_down is not None and step == slow_down.first_step:
            self._visit.slow_down(slow_down.factor, _UNTIL_TOLD_S)
        elif slow_down is not None and step == slow_down.end_step:
            self._visit.slow_down(1.0, 0.0)


def run(visit: Visit, *, trials: TrialsByCase, plans: Path) -> list[Ran]:
    """Run all trials on a line, one after the other."""
    found = []
    for case in visit.cases:
        for trial in trials[case.number]:
            visit.meet()
            if visit.post.index == 0:
                visit.report(f"{case.wan.name}: {trial.name}")
            found.append(_run_trial(case, trial, visit, read_plan(plans, case, trial)))
    visit.meet()
    return found


def _run_trial(case: Case, trial: Trial, visit: Visit, prepared: Prepared) -> Ran:
    course, stage = _course(prepared, trial), visit.stage(case)
    timer = Disturber(visit, trial.slow_down) if visit.post.index == 0 else Timer()
    reasons = [*prepared.setup.notes]
    steering = Watched(_steering(prepared, course, reasons))
    worker, traffic = pipeline_worker(
        course=course,
        post=visit.post,
        stage=stage,
        optimizer=Optimizer(_parameters(stage), schedule=Schedule(peak=1e-6, num_steps=1), max_norm=1.0),
        device=Device(case.stages.device),
        source=case.stages.source(course.num_microbatches) if visit.post.up is None else None,
        observer=timer,
        steer=steering,
    )
    with traffic:
        worker.run(course.turns())
    (standing,) = steering.steering.standings
    return Ran(
        number=case.number,
        trial=trial,
        first=texts_of(course.cut(0).codecs),
        last=texts_of(standing.pair),
        since_step=standing.since_step,
        steps_s=tuple(one.duration_s for one in timer.steps),
        codecs=(texts_of(course.cut(0).codecs), *steering.found[:-1]),
        reasons=tuple(one for one in reasons if "codec" in one or one.startswith("link")),
    )


def _course(prepared: Prepared, trial: Trial) -> Course:
    setup = prepared.setup
    cuts = cuts_of(prepared.job, setup.clouds, planned=setup.codecs)
    return Course(
        num_stages=len(setup.clouds),
        num_steps=_num_steps(trial, cuts),
        num_microbatches=setup.layout.num_microbatches,
        seed=0,
        max_in_flight=setup.max_in_flight,
        policy=setup.policy,
        cuts=cuts,
    )


def _num_steps(trial: Trial, cuts: Iterable[Cut]) -> int:
    if trial.slow_down is not None:
        return trial.slow_down.end_step + _NUM_LEARNING_STEPS + NUM_STEADY_STEPS
    is_learning = trial.mistake != 1.0 or any(cut.codecs.has_subspace for cut in cuts)
    num_steps = _NUM_LEARNING_STEPS if is_learning else _NUM_WARM_UP_STEPS
    if trial.rung is None:
        num_steps += _NUM_SETTLING_STEPS
    return num_steps + NUM_STEADY_STEPS


def _steering(prepared: Prepared, course: Course, reasons: list[str]) -> Steering:
    """As a session makes it."""
    terms = steering_terms(
        prepared.job,
        prepared.setup.clouds,
        course.cuts,
        num_rows=CROSSING.num_rows,
        num_microbatches=course.num_microbatches,
        # Runs end when they are steady; a basis counts by the steps that the job has.
        num_steps=prepared.job.train.steps,
        hidden_width=CROSSING.width,
        trained_from=course.first_trained,
    )
    return Steering(terms, num_microbatches=course.num_microbatches, note=reasons.append)


def _parameters(stage: Any) -> dict[str, Any]:
    return dict(stage.model.named_parameters())
