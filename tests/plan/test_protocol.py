"""Events that cannot be, and the loss of a peer."""

import pytest

from isthmus.errors import IsthmusError
from isthmus.plan.arrivals import Arrivals
from isthmus.plan.pipeline import PipelineScheduler, Policy
from isthmus.plan.types import (
    Arrived,
    Done,
    Event,
    Lost,
    Optimize,
    Pass,
    Report,
    Resized,
    Run,
    ScheduleError,
    Send,
    Started,
    Stop,
)

FORWARD, BACKWARD, EVALUATION = Pass.FORWARD, Pass.BACKWARD, Pass.EVALUATION


def start(step: int, *microbatches: int, evaluation: bool = False) -> Started:
    return Started(step=step, microbatches=microbatches, evaluation=evaluation)


def arrived(kind: Pass, microbatch: int, *, step: int = 0) -> Arrived:
    return Arrived(kind=kind, step=step, microbatch=microbatch)


def ran(kind: Pass, microbatch: int, *, step: int = 0) -> Done:
    return Done(action=Run(kind=kind, step=step, microbatch=microbatch))


def sent(kind: Pass, microbatch: int, *, step: int = 0) -> Done:
    return Done(action=Send(kind=kind, step=step, microbatch=microbatch))


def middle(
    *events: Event, policy: Policy = Policy.WAN_ONE_F_ONE_B, first_trained: int = 0
) -> PipelineScheduler:
    return place(1, *events, policy=policy, first_trained=first_trained)


def place(
    stage: int, *events: Event, policy: Policy = Policy.WAN_ONE_F_ONE_B, first_trained: int = 0
) -> PipelineScheduler:
    """A stage of three to which something has happened already."""
    scheduler = PipelineScheduler(
        stage=stage, num_stages=3, policy=policy, window=2, first_trained=first_trained
    )
    for event in events:
        scheduler.on(event)
    return scheduler


ONE_FORWARD = (start(0, 0, 1), arrived(FORWARD, 0), ran(FORWARD, 0))
ONE_STEP = (
    start(0, 0),
    arrived(FORWARD, 0),
    ran(FORWARD, 0),
    arrived(BACKWARD, 0),
    ran(BACKWARD, 0),
    Done(action=Optimize(step=0)),
)


@pytest.mark.parametrize(
    ("scheduler", "event"),
    [
        pytest.param(middle(start(0, 0, 1), arrived(FORWARD, 0)), arrived(FORWARD, 0), id="arrival twice"),
        pytest.param(middle(*ONE_FORWARD), arrived(FORWARD, 0), id="arrival again after its run"),
        pytest.param(middle(*ONE_STEP), arrived(FORWARD, 0), id="arrival of an ended step"),
        pytest.param(middle(arrived(FORWARD, 5)), arrived(FORWARD, 5), id="early arrival twice"),
        pytest.param(middle(start(0, 0, 1)), arrived(FORWARD, 2), id="arrival out of range"),
        pytest.param(middle(arrived(FORWARD, 2)), start(0, 0, 1), id="early arrival out of range"),
        pytest.param(middle(arrived(EVALUATION, 0)), start(0, 0, 1), id="evaluation that was never started"),
        pytest.param(middle(start(0, 0)), arrived(EVALUATION, 0), id="evaluation of a step in training"),
        pytest.param(place(0, start(0, 0, 1)), arrived(FORWARD, 0), id="activation at the first stage"),
        pytest.param(
            place(2, start(0, 0), arrived(FORWARD, 0), ran(FORWARD, 0)),
            arrived(BACKWARD, 0),
            id="gradient at the last stage",
        ),
        pytest.param(middle(start(0, 0)), arrived(BACKWARD, 0), id="gradient before the forward"),
        pytest.param(middle(*ONE_FORWARD), arrived(BACKWARD, 1), id="gradient of another forward"),
        pytest.param(middle(*ONE_FORWARD), arrived(BACKWARD, 0, step=1), id="gradient of another step"),
        pytest.param(middle(*ONE_FORWARD, arrived(BACKWARD, 0)), arrived(BACKWARD, 0), id="gradient twice"),
        pytest.param(middle(*ONE_STEP), arrived(BACKWARD, 0), id="gradient of an ended step"),
        pytest.param(
            middle(*ONE_FORWARD, first_trained=2), arrived(BACKWARD, 0), id="gradient at a frozen stage"
        ),
        pytest.param(middle(start(0, 0, 1)), ran(FORWARD, 0), id="done without a run"),
        pytest.param(middle(*ONE_FORWARD), ran(FORWARD, 0), id="done twice"),
        pytest.param(middle(*ONE_FORWARD), sent(FORWARD, 1), id="done with no such send"),
        pytest.param(middle(*ONE_FORWARD, sent(FORWARD, 0)), sent(FORWARD, 0), id="sent twice"),
        pytest.param(middle(*ONE_FORWARD), Done(action=Optimize(step=0)), id="optimized too early"),
        pytest.param(middle(*ONE_STEP), Done(action=Report(step=0)), id="report of a training step"),
        pytest.param(middle(start(1, 0)), start(1, 0), id="step twice"),
        pytest.param(middle(start(1, 0)), start(0, 0), id="steps backwards"),
        pytest.param(middle(start(1, 0)), start(1, 0, evaluation=True), id="evaluation after its step"),
        pytest.param(middle(), start(-1, 0), id="negative step"),
        pytest.param(middle(), start(0, 1, 0), id="micro-batches out of order"),
        pytest.param(middle(), start(0, 1, 1), id="micro-batch twice in a step"),
        pytest.param(middle(), start(0, -1, 0), id="negative micro-batch"),
        pytest.param(middle(), Resized(window=0), id="no window"),
        pytest.param(middle(policy=Policy.GPIPE), Resized(window=3), id="window of a fixed order"),
        pytest.param(middle(policy=Policy.ONE_F_ONE_B), Resized(window=3), id="window of 1F1B"),
    ],
)
def test_an_impossible_event_is_an_error(scheduler: PipelineScheduler, event: Event) -> None:
    with pytest.raises(ScheduleError):
        scheduler.on(event)


def test_the_error_names_the_event_and_a_cure() -> None:
    with pytest.raises(IsthmusError) as raised:
        middle(start(0, 0), arrived(FORWARD, 0)).on(arrived(FORWARD, 0))
    assert raised.value.message == "Arrived(kind=FORWARD, step=0, microbatch=0) has come before"
    assert raised.value.hint


def test_what_came_for_an_ended_step_is_let_go() -> None:
    arrivals = Arrivals()
    arrivals.open(start(0, 0))
    arrivals.hold(arrived(FORWARD, 0))
    arrivals.hold(arrived(FORWARD, 0, step=1))
    arrivals.close(start(0, 0))
    assert arrived(FORWARD, 0) not in arrivals
    assert arrived(FORWARD, 0, step=1) in arrivals


def test_a_lost_peer_stops_the_stage_for_good() -> None:
    scheduler = middle(*ONE_FORWARD)
    assert scheduler.on(Lost(peer="west")) == (Stop(peer="west"),)
    assert scheduler.on(arrived(BACKWARD, 0)) == ()
    assert scheduler.on(sent(FORWARD, 0)) == ()


@pytest.mark.parametrize(
    ("stage", "num_stages", "window", "first_trained"),
    [(2, 2, 1, 0), (-1, 2, 1, 0), (0, 2, 0, 0), (0, 2, 1, 2), (0, 2, 1, -1)],
)
def test_a_scheduler_that_cannot_be_is_refused(
    stage: int, num_stages: int, window: int, first_trained: int
) -> None:
    with pytest.raises(ValueError, match=r"stage|window"):
        PipelineScheduler(
            stage=stage,
            num_stages=num_stages,
            policy=Policy.GPIPE,
            window=window,
            first_trained=first_trained,
        )
