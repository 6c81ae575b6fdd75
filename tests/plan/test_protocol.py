"""Events that cannot be, and the loss of a peer."""

from collections.abc import Callable
from typing import Any

import pytest

from isthmus.errors import FrameError, IsthmusError
from isthmus.plan.codecs import Crossing, Cut
from isthmus.plan.end_of_step import Cosines, Evaluated, Seen, Verdict
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.scenario import Policy
from isthmus.plan.types import (
    Arrived,
    Done,
    Event,
    Facts,
    Gathered,
    Interrupted,
    Lost,
    Member,
    Message,
    MessageKind,
    Outcome,
    Ran,
    Saved,
    ScheduleError,
    Sent,
    Started,
    Stop,
    Work,
    WorkKind,
    unpack_facts,
)
from tests.plan.one_member import OneMember, pipeline_of, tally_of, verdict_of

ACTIVATION, EVALUATION, GRADIENT = MessageKind.ACTIVATION, MessageKind.EVALUATION, MessageKind.GRADIENT
TALLY, VERDICT, EVALUATED = MessageKind.TALLY, MessageKind.VERDICT, MessageKind.EVALUATED

Story = Callable[[OneMember], None]
Told = Callable[[OneMember], Event]


def arrived(kind: MessageKind, item: int = 0, *, step: int = 0, facts: Facts | None = None) -> Told:
    return lambda one: Arrived(one.message(kind, item, step=step, facts=facts))


def ran(kind: WorkKind, item: int = 0, *, step: int = 0) -> Told:
    return lambda _: Done(Work(kind, step, item))


def ended(facts: Facts | None) -> Told:
    """The end of what runs, with these facts."""
    return lambda one: Done(one.work, facts)


def sent(kind: MessageKind, item: int = 0, *, to: str = "cloud2") -> Told:
    return lambda one: Sent(Message(kind, 0, item, one.member, (Member(to),)))


def event(one: Event) -> Told:
    return lambda _: one


def nothing(one: OneMember) -> None:
    """Not even started."""


def started(one: OneMember) -> None:
    one.start()


def begun(one: OneMember) -> None:
    one.begin()


def one_arrived(one: OneMember) -> None:
    one.begin()
    one.arrived(ACTIVATION, 0)


def one_forward(one: OneMember) -> None:
    one_arrived(one)
    one.done()


def one_gradient(one: OneMember) -> None:
    one_forward(one)
    one.arrived(GRADIENT, 0)


def forwards(one: OneMember) -> None:
    one.begin()
    for item in range(2):
        one.arrived(ACTIVATION, item)
        one.done()


def passes(one: OneMember) -> None:
    forwards(one)
    one.pass_back()


def reduced(one: OneMember) -> None:
    passes(one)
    one.done()


def told(one: OneMember) -> None:
    reduced(one)
    one.arrived(TALLY)


def judged(one: OneMember) -> None:
    told(one)
    one.arrived(VERDICT)


def one_step(one: OneMember) -> None:
    forwards(one)
    one.finish_step()


def in_next_step(one: OneMember) -> None:
    one_step(one)
    one.done()


def saving(one: OneMember) -> None:
    forwards(one)
    one.finish_step(save=True)


def at_the_end(one: OneMember) -> None:
    for step in range(3):
        if step:
            one.done()
        else:
            one.begin()
        for item in range(2):
            one.arrived(ACTIVATION, item, step=step)
            one.done()
            one.sent(ACTIVATION, item, step=step)
        one.finish_step(step)
    one.done()
    for item in range(2):
        one.arrived(EVALUATION, item, step=3)
        one.done()


def scored(one: OneMember) -> None:
    at_the_end(one)
    one.arrived(EVALUATED, step=3)


CUT = Cut(crossing=Crossing(num_rows=8, width=64), name="a-b")
STAGES = pipeline_of((1, 1, 1)).stages


def middle(**changes: Any) -> OneMember:
    """The second of three stages, with three steps of two micro-batches and an evaluation behind them."""
    values: dict[str, Any] = {
        "num_steps": 3,
        "windows": (2, 2, 2),
        "evaluate_every": 9,
        "num_validation_microbatches": 2,
    }
    return OneMember(pipeline_of((1, 1, 1), **{**values, **changes}), Member("cloud1"))


def in_place(stage: int) -> OneMember:
    return OneMember(pipeline_of((1, 1, 1), num_steps=3, windows=(2, 2, 2)), STAGES[stage][0])


def second_rank() -> OneMember:
    return OneMember(pipeline_of((1, 2, 1), num_steps=3, windows=(2, 2, 2)), Member("cloud1", 1))


def from_member(sender: Member, kind: MessageKind) -> Told:
    return lambda one: Arrived(one.message(kind)._replace(sender=sender))


def evaluated(step: int, *, is_plain: bool = False) -> Evaluated:
    return Evaluated(step=step, loss_sum=1.0, num_correct=0, num_targets=1, is_plain=is_plain)


@pytest.mark.parametrize(
    ("story", "told", "make"),
    [
        # Tensors.
        pytest.param(one_arrived, arrived(ACTIVATION, 0), middle, id="arrival twice"),
        pytest.param(one_forward, arrived(ACTIVATION, 0), middle, id="arrival again after its run"),
        pytest.param(one_step, arrived(ACTIVATION, 0), middle, id="arrival of an ended step"),
        pytest.param(begun, arrived(ACTIVATION, 2), middle, id="arrival out of range"),
        pytest.param(begun, arrived(ACTIVATION, -1), middle, id="arrival of a negative micro-batch"),
        pytest.param(begun, arrived(ACTIVATION, 2, step=1), middle, id="early arrival out of range"),
        pytest.param(begun, arrived(ACTIVATION, step=2), middle, id="arrival two steps early"),
        pytest.param(begun, arrived(ACTIVATION, step=-1), middle, id="arrival of a negative step"),
        pytest.param(scored, arrived(ACTIVATION, step=3), middle, id="arrival behind the last step"),
        pytest.param(nothing, arrived(ACTIVATION), middle, id="arrival before the start"),
        pytest.param(begun, arrived(EVALUATION), middle, id="evaluation of a step in training"),
        pytest.param(begun, arrived(EVALUATION, 2, step=1), middle, id="early evaluation out of range"),
        pytest.param(begun, arrived(ACTIVATION), lambda: in_place(0), id="activation at the first stage"),
        pytest.param(one_forward, arrived(GRADIENT), lambda: in_place(2), id="gradient at the last stage"),
        pytest.param(begun, arrived(GRADIENT), middle, id="gradient before the forward"),
        pytest.param(one_forward, arrived(GRADIENT, 1), middle, id="gradient of another forward"),
        pytest.param(one_forward, arrived(GRADIENT, step=1), middle, id="gradient of another step"),
        pytest.param(one_gradient, arrived(GRADIENT), middle, id="gradient twice"),
        pytest.param(one_step, arrived(GRADIENT), middle, id="gradient of an ended step"),
        pytest.param(
            one_forward, arrived(GRADIENT), lambda: middle(first_trained=2), id="gradient at a frozen stage"
        ),
        pytest.param(begun, from_member(Member("cloud2"), ACTIVATION), middle, id="activation from behind"),
        pytest.param(
            one_forward, from_member(Member("cloud0"), GRADIENT), middle, id="gradient from the stage before"
        ),
        pytest.param(begun, from_member(Member("cloud0", 1), ACTIVATION), middle, id="from no rank"),
        pytest.param(begun, arrived(MessageKind.DELTA), middle, id="message of another strategy"),
        # Works, messages and saves of this member's own.
        pytest.param(begun, ran(WorkKind.FORWARD), middle, id="done without a run"),
        pytest.param(one_forward, ran(WorkKind.FORWARD), middle, id="done twice"),
        pytest.param(one_forward, sent(ACTIVATION, 1), middle, id="sent with no such send"),
        pytest.param(one_step, sent(ACTIVATION, 0, to="cloud0"), middle, id="sent to another member"),
        pytest.param(one_forward, ran(WorkKind.UPDATE), middle, id="updated too early"),
        pytest.param(one_step, ran(WorkKind.SCORE), middle, id="score of a training step"),
        pytest.param(passes, ended(None), middle, id="reduced to nothing"),
        pytest.param(passes, ended(Ran(busy_s=1.0)), middle, id="reduced to something else"),
        pytest.param(judged, ended(Gathered(of=())), middle, id="updated by nobody"),
        pytest.param(begun, event(Saved(1)), middle, id="saved without a save"),
        pytest.param(saving, event(Saved(2)), middle, id="another step saved"),
        pytest.param(nothing, event(Saved(0)), middle, id="saved before the start"),
        pytest.param(started, event(Started(0)), middle, id="started twice"),
        pytest.param(nothing, event(Started(-1)), middle, id="negative step"),
        pytest.param(nothing, event(Started(4)), middle, id="step behind the last"),
        # Tallies.
        pytest.param(nothing, arrived(TALLY), middle, id="tally before the start"),
        pytest.param(told, arrived(TALLY), middle, id="tally twice"),
        pytest.param(passes, arrived(TALLY, step=1), middle, id="tally of the next step"),
        pytest.param(in_next_step, arrived(TALLY), middle, id="tally of an ended step"),
        pytest.param(passes, arrived(TALLY, facts=tally_of(1, 1)), middle, id="tally about another step"),
        pytest.param(passes, arrived(TALLY, facts=tally_of(2)), middle, id="tally of too many stages"),
        pytest.param(passes, arrived(TALLY, facts=evaluated(0)), middle, id="tally that is none"),
        pytest.param(
            passes,
            arrived(TALLY, facts=tally_of(1, cosines=(Cosines(),))),
            middle,
            id="tally of too many cuts",
        ),
        pytest.param(begun, arrived(TALLY), lambda: in_place(2), id="tally at the last stage"),
        pytest.param(begun, arrived(TALLY), second_rank, id="tally at a rank that does not lead"),
        pytest.param(passes, from_member(Member("cloud0"), TALLY), middle, id="tally from the stage before"),
        # Verdicts.
        pytest.param(reduced, arrived(VERDICT), middle, id="verdict before the tally"),
        pytest.param(judged, arrived(VERDICT), middle, id="verdict twice"),
        pytest.param(told, arrived(VERDICT, step=1), middle, id="verdict on the next step"),
        pytest.param(in_next_step, arrived(VERDICT), middle, id="verdict on an ended step"),
        pytest.param(
            told,
            lambda one: arrived(VERDICT, facts=verdict_of(one.pipeline, windows=(1, 1)))(one),
            middle,
            id="verdict of too few stages",
        ),
        pytest.param(
            told,
            lambda one: arrived(VERDICT, facts=verdict_of(one.pipeline, codecs=(("raw", "raw"),)))(one),
            middle,
            id="verdict with codecs where nothing is coded",
        ),
        pytest.param(begun, arrived(VERDICT), lambda: in_place(0), id="verdict at the first stage"),
        pytest.param(begun, arrived(VERDICT), second_rank, id="verdict at a rank that does not lead"),
        pytest.param(told, from_member(Member("cloud2"), VERDICT), middle, id="verdict from behind"),
        # Results of evaluations.
        pytest.param(begun, arrived(EVALUATED), middle, id="result of no evaluation"),
        pytest.param(scored, arrived(EVALUATED, step=3), middle, id="result twice"),
        pytest.param(at_the_end, arrived(EVALUATED, step=2), middle, id="result of another step"),
        pytest.param(
            at_the_end, arrived(EVALUATED, step=3, facts=evaluated(2)), middle, id="result about another step"
        ),
        pytest.param(
            at_the_end,
            arrived(EVALUATED, step=3, facts=evaluated(3, is_plain=True)),
            middle,
            id="result of a round that is not run",
        ),
        pytest.param(at_the_end, arrived(EVALUATED, facts=tally_of(1)), middle, id="result that is none"),
        # A basis.
        pytest.param(started, arrived(MessageKind.BASIS), middle, id="basis of no bottleneck"),
        pytest.param(
            started,
            arrived(MessageKind.BASIS, step=1),
            lambda: middle(fit_step=0, bottlenecks=frozenset({0})),
            id="basis of another step",
        ),
        pytest.param(
            begun,
            arrived(MessageKind.BASIS),
            lambda: middle(fit_step=1, bottlenecks=frozenset({0})),
            id="basis too early",
        ),
    ],
)
def test_an_impossible_event_is_an_error(story: Story, told: Told, make: Callable[[], OneMember]) -> None:
    one = make()
    story(one)
    with pytest.raises(ScheduleError) as raised:
        one.feed(told(one))
    assert raised.value.hint


def test_an_evaluation_that_is_not_due_is_an_error_as_soon_as_its_step_begins() -> None:
    one = middle()
    begun(one)
    one.arrived(EVALUATION, step=1)
    for item in range(2):
        one.arrived(ACTIVATION, item)
        one.done()
    with pytest.raises(ScheduleError):
        one.finish_step()


def test_a_basis_may_come_before_its_step() -> None:
    one = middle(fit_step=1, bottlenecks=frozenset({0}))
    forwards(one)
    one.arrived(MessageKind.BASIS, step=1)
    one.finish_step()
    assert one.is_running(WorkKind.FIT)
    late = middle(fit_step=1, bottlenecks=frozenset({0}))
    late.start(2)
    with pytest.raises(ScheduleError):
        late.arrived(MessageKind.BASIS, step=1)


def test_a_basis_comes_once() -> None:
    one = middle(fit_step=0, bottlenecks=frozenset({0}))
    assert one.start() == []
    assert one.arrived(MessageKind.BASIS) == [WorkKind.FIT]
    with pytest.raises(ScheduleError):
        one.arrived(MessageKind.BASIS)


@pytest.mark.parametrize("codecs", [("int1", "raw"), ("subspace(32) | int2", "int2")])
def test_codecs_that_the_job_does_not_allow_are_refused(codecs: tuple[str, str]) -> None:
    one = middle(cuts=(CUT, CUT))
    told(one)
    facts = verdict_of(one.pipeline, codecs=(("raw", "raw"), codecs))
    with pytest.raises((ScheduleError, FrameError)):
        one.feed(arrived(VERDICT, facts=facts)(one))


@pytest.mark.parametrize("size", [0, -1])
def test_a_verdict_with_no_window_cannot_be_read(size: int) -> None:
    text = f'{{"step": 0, "norm": 1.0, "windows": [1, {size}]}}'
    with pytest.raises(FrameError, match="Verdict"):
        unpack_facts(text, Verdict)
    assert unpack_facts(text.replace(str(size), "1"), Verdict).windows == (1, 1)


def test_the_error_names_the_event_and_a_cure() -> None:
    one = middle()
    one_arrived(one)
    with pytest.raises(IsthmusError) as raised:
        one.arrived(ACTIVATION, 0)
    assert raised.value.message == "forward 0.0 has arrived before"
    assert raised.value.hint


def test_what_came_for_an_ended_step_is_let_go_and_what_came_early_is_kept() -> None:
    one = middle()
    forwards(one)
    one.arrived(ACTIVATION, 0, step=1)
    one.finish_step()
    assert one.done() == [WorkKind.FORWARD]
    assert (one.work.step, one.work.item) == (1, 0)
    with pytest.raises(ScheduleError, match="over"):
        one.arrived(ACTIVATION, 0)


def test_a_lost_peer_stops_the_stage_for_good() -> None:
    one = middle()
    one_forward(one)
    assert one.feed(Lost(Member("west"), final=False)) == ()
    assert one.feed(Lost(Member("west"))) == (Stop(Outcome.REFORM, "cloud 'west' left the pipeline"),)
    assert one.arrived(GRADIENT, 0) == []
    assert one.sent(ACTIVATION, 0) == []


def test_an_interruption_before_the_start_is_kept_for_the_first_step() -> None:
    one = middle()
    assert one.feed(Interrupted("SIGTERM")) == ()
    passes(one)
    assert isinstance(one.work.facts, Seen)
    assert one.work.facts.wants_stop


@pytest.mark.parametrize("unsent", [TALLY, VERDICT])
def test_an_interrupted_member_stops_when_it_has_saved_and_the_link_has_what_it_sent(
    unsent: MessageKind,
) -> None:
    one = middle()
    forwards(one)
    one.finish_step(save=True, stop=True)
    first = [message for message in one.sending if message.kind is not unsent]
    for message in first:
        assert one.feed(Sent(message)) == ()
    assert one.feed(Saved(1)) == ()
    assert one.sent(unsent) == [Stop]


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": (), "windows": ()},
        {"windows": (0, 1)},
        {"first_trained": 2},
        {"first_trained": -1},
        {"cuts": (CUT, CUT)},
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"stage|window"):
        pipeline_of((1, 1), policy=Policy.GPIPE, **changes)


def test_a_member_of_another_pipeline_is_refused() -> None:
    pipeline: Pipeline = pipeline_of((1, 1))
    with pytest.raises(ValueError, match="cloud9"):
        PipelineScheduler(pipeline, Member("cloud9"))
