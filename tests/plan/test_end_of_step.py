"""The end of a step over all stages: tallies, the verdict, and what goes wrong in it."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.plan.codecs import Crossing, Cut, CutState
from isthmus.plan.end_of_step import (
    Cosines,
    Evaluated,
    Reduced,
    Round,
    Scored,
    Seen,
    StepMeter,
    Tally,
    Verdict,
    condensed,
    evaluations,
    joined,
    stage_tally,
    total_norm,
)
from isthmus.plan.pipeline_parts import PipelineState
from isthmus.plan.saving import Saving
from isthmus.plan.scenario import Hop
from isthmus.plan.types import (
    Arrived,
    Carried,
    Done,
    Gathered,
    Member,
    MessageKind,
    Outcome,
    Save,
    Stop,
    WorkKind,
    pack_facts,
    unpack_facts,
)
from tests.plan.driver import Driver, Times
from tests.plan.one_member import OneMember, pipeline_of, tally_of


def settle(**changes: Any) -> OneMember:
    """A first stage alone, whose only step has been reduced."""
    one = OneMember(pipeline_of((1,), num_microbatches=1, **changes))
    one.begin()
    one.done()
    one.done()
    return one


def reduced(**changes: Any) -> Reduced:
    values = {"seen": Seen(busy_s=1.0), "loss_sum": 2.0, "squared_norms": (9.0, 16.0)}
    return Reduced(**{**values, **changes})


def end_reduce(one: OneMember, *members: Reduced) -> tuple[object, ...]:
    assert one.is_running(WorkKind.REDUCE)
    return one.feed(Done(one.work, Gathered(of=members)))


def test_the_first_stage_judges_alone() -> None:
    one = settle(save_every_s=0.0)
    end_reduce(one, reduced())
    verdict = one.work.facts
    assert one.is_running(WorkKind.UPDATE)
    assert isinstance(verdict, Verdict)
    assert (verdict.norm, verdict.windows, verdict.save) == (5.0, (1,), True)


@pytest.mark.parametrize(
    "changes", [{"loss_sum": math.nan}, {"squared_norms": (math.inf,)}, {"squared_norms": (1e308, 1e308)}]
)
def test_a_loss_that_is_not_finite_ends_the_run(changes: dict[str, Any]) -> None:
    (stop,) = end_reduce(settle(), reduced(**changes))
    assert isinstance(stop, Stop)
    assert stop.outcome is Outcome.FAILED
    assert "not finite" in stop.reason
    assert stop.hint


def windows(tally: Tally, **changes: Any) -> tuple[int, ...]:
    pipeline = pipeline_of((1,) * len(tally.busy_s), **{"num_microbatches": 10, **changes})
    return pipeline.next_windows(tally)


def test_windows_cover_the_round_trip_and_keep_the_cap() -> None:
    hop = Hop(forward_s=0.01, backward_s=0.01, latency_s=0.1)
    far = tally_of(2, busy_s=(1.0, 1.0), hops=(hop,))
    assert windows(far)[0] >= 2 + round(0.22 / 0.1)
    assert windows(far, max_in_flight=3)[0] == 3
    slow = replace(far, hops=(replace(hop, coding_s=0.1),))
    assert windows(slow)[0] == windows(far)[0] + 1
    assert windows(far, max_in_flight=(4, 1)) == (4, 1)
    near = replace(far, hops=(Hop(forward_s=0, backward_s=0, latency_s=0),))
    assert windows(near) == (3, 1)


def test_coding_is_the_mean_of_a_step_at_each_end() -> None:
    observed = StepMeter()
    for coding_s in (1.0, 2.0):
        observed.sent(Carried(coding_s=coding_s), is_gradient=False)
    observed.arrived(Carried(coding_s=3.0), 0.0, is_gradient=True)
    observed.arrived(Carried(coding_s=5.0), 0.0, is_gradient=False)
    seen = observed.seen(wants_stop=False, saving=Saving())
    assert seen.down_coding_s == 1.5 + 3.0
    assert seen.up_coding_s == 5.0
    assert StepMeter().seen(wants_stop=False, saving=Saving()).up_coding_s == 0.0


def test_what_comes_for_a_step_before_it_has_begun_counts_for_that_step() -> None:
    """While the optimizer is at work, while a checkpoint is written, or while an evaluation runs."""
    pipeline = pipeline_of(
        (1, 1),
        num_steps=2,
        num_microbatches=2,
        evaluate_every=1,
        num_validation_microbatches=1,
    )
    one = OneMember(pipeline, Member("cloud1"))

    def come(item: int, step: int, travel_s: float) -> None:
        message = one.message(MessageKind.ACTIVATION, item, step=step)
        one.feed(Arrived(message, travel_s, Carried()))

    one.begin()
    come(0, 0, 3.0)
    come(1, 0, 4.0)
    run_passes(one, 0)
    assert travel_of(one) == 3.0
    one.done()
    come(0, 1, 1.0)
    one.arrived(MessageKind.VERDICT)
    one.done()
    assert one.work.item == 1, "an evaluation is read"
    one.done()
    one.arrived(MessageKind.EVALUATION, step=1)
    one.done()
    one.done()
    one.done()
    come(1, 1, 5.0)
    run_passes(one, 1)
    assert travel_of(one) == 1.0


def run_passes(one: OneMember, step: int) -> None:
    while not one.is_running(WorkKind.REDUCE):
        if one.running is None:
            one.sent(MessageKind.GRADIENT, one.sending[-1].item, step=step)
        else:
            one.done()


def travel_of(one: OneMember) -> float | None:
    assert isinstance(one.work.facts, Seen)
    return one.work.facts.forward_travel_s


def test_ranks_of_a_stage_are_told_as_one() -> None:
    nothing = Seen(busy_s=1.0, wants_stop=True)
    something = Seen(
        forward_travel_s=2.0, busy_s=3.0, up_coding_s=0.5, backward_cosine=0.9, forward_cosine=0.8
    )
    told = stage_tally(7, [reduced(seen=nothing, busy_s=1.0), reduced(seen=something, squared_norms=())])
    assert told.loss_sum == 4.0
    assert told.busy_s == (2.5,), "ranks work side by side"
    assert (told.travel_s, told.coding_s, told.gradient_cosine) == (2.0, 0.5, 0.9)
    assert math.fsum(told.squared_norms) == 25.0, "the norms of the first rank, which are those of all"
    assert told.wants_stop


def test_a_tally_has_one_entry_for_each_stage_and_cut_behind() -> None:
    seen = Seen(backward_travel_s=0.3, rtt_s=0.2, down_coding_s=0.1, element_bytes=2, forward_cosine=0.7)
    behind = tally_of(2, travel_s=0.5, coding_s=0.05, gradient_cosine=0.6, loss_sum=3.0, wants_stop=True)
    members = [reduced(seen=seen)]
    found = joined(stage_tally(0, members), members, behind)
    assert found.loss_sum == 3.0, "only the last stage has a loss"
    assert len(found.busy_s) == 3
    hop, *others = found.hops
    assert others == list(behind.hops)
    assert (hop.forward_s, hop.backward_s) == pytest.approx((0.3, 0.3))
    assert (hop.latency_s, hop.coding_s) == pytest.approx((0.1, 0.15))
    assert found.cosines[0] == Cosines(forward=0.7, backward=0.6)
    assert found.element_bytes == (2, 4)
    assert found.wants_stop
    with pytest.raises(ValueError, match="step"):
        joined(stage_tally(1, members), members, behind)


def test_from_frozen_layers_nothing_comes_back() -> None:
    members = [reduced(seen=Seen(rtt_s=0.2))]
    found = joined(stage_tally(0, members), members, tally_of(1, travel_s=0.5))
    assert found.hops[0].forward_s == pytest.approx(0.4)


squares = st.lists(st.floats(0, 1e150) | st.floats(0, 1e-150) | st.floats(0, 10), max_size=12)


@given(squares, st.integers(0, 12))
def test_the_norm_does_not_depend_on_how_stages_are_cut(values: list[float], cut: int) -> None:
    first, second = condensed(values[:cut]), condensed(values[cut:])
    whole = condensed([*first, *second])
    assert sum(map(Fraction, whole)) == sum(map(Fraction, values))
    assert total_norm(whole) == total_norm(values)
    assert len(whole) <= 40


@pytest.mark.parametrize("values", [(math.nan,), (1.0, math.inf), (1e308, 1e308), (-1.0,)])
def test_a_norm_that_cannot_be_is_nan(values: tuple[float, ...]) -> None:
    assert math.isnan(total_norm(condensed(values)))
    assert math.isnan(total_norm(values))


def test_an_evaluation_is_told_round_by_round() -> None:
    def scored(*losses: float) -> Scored:
        return Scored(rounds=tuple(Round(losses=(one,), num_correct=1, num_targets=2) for one in losses))

    found = evaluations(5, [scored(1.0, 2.0), scored(3.0, 5.0)])
    assert found == [
        Evaluated(step=5, loss_sum=4.0, num_correct=2, num_targets=4),
        Evaluated(step=5, loss_sum=7.0, num_correct=2, num_targets=4, is_plain=True),
    ]
    assert found[1].loss == 1.75


def test_a_save_is_due_when_its_time_has_come_and_at_the_end() -> None:
    """Each of the five works of a step takes a second, and the fourth ends with the verdict."""
    times = Times(work_s=lambda *_: 1.0, sending_s=lambda _: 0.0, travel_s=lambda _: 0.0)
    driver = Driver(pipeline_of((1,), num_steps=5, num_microbatches=1, save_every_s=9.0), times)
    driver.start()
    driver.run()
    assert dict(driver.saved) == {Member("cloud0"): [2, 4, 5]}


def test_what_is_saved_is_the_codecs_in_force_and_how_they_came_about() -> None:
    cut = Cut(crossing=Crossing(num_rows=8, width=64), guard_every=1)
    pipeline = pipeline_of((1, 1), num_steps=2, num_microbatches=1, save_every_s=0.0, cuts=(cut,))
    one = OneMember(pipeline)
    one.begin()
    one.done()
    one.arrived(MessageKind.GRADIENT)
    one.done()
    one.done()
    one.arrived(MessageKind.TALLY)
    saves = [action for action in one.feed(one.end_of(one.work)) if isinstance(action, Save)]
    assert [save.step for save in saves] == [1]
    state = saves[0].facts
    assert isinstance(state, PipelineState)
    assert state.codecs == state.asked == (("raw", "raw"),)
    assert state.states == (CutState(codecs=("raw", "raw")),)
    assert unpack_facts(pack_facts(state), PipelineState) == state
