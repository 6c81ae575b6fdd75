"""When to save: within the bound on lost work, within the cap on overhead, and never two at a time."""

from itertools import pairwise
from typing import Any

import pytest

from isthmus.plan.end_of_step import Note, Reduced, Seen, joined, stage_tally
from isthmus.plan.saving import SaveRule, Saves, Saving, slowest
from isthmus.plan.simulated import Checkpointing, simulate_scenario
from isthmus.plan.types import NotStored, Outcome, Save, Saved, ScheduleError, Stop, Stored, WorkKind
from tests.plan.one_member import OneMember, pipeline_of, tally_of
from tests.plan.test_simulate import HAND


def test_without_a_measurement_the_bound_is_the_interval() -> None:
    rule = SaveRule(60.0, 0.01)
    rule.begin(100.0)
    assert [rule.is_due(now_s, Saving()) for now_s in (100.0, 159.0, 160.0)] == [False, False, True]
    assert not SaveRule(None, 0.01).is_due(1e9, Saving())


@pytest.mark.parametrize(
    ("save_s", "stall_s", "interval_s"),
    [
        (10.0, 0.1, 50.0),  # what is lost is counted until the store has it
        (10.0, 0.9, 90.0),  # no more than a hundredth of the time
        (45.0, 0.1, 44.9),  # the next one waits for the one before
        (300.0, 0.1, 299.9),
    ],
)
def test_the_interval_keeps_the_cap_and_then_the_bound(
    save_s: float, stall_s: float, interval_s: float
) -> None:
    rule = SaveRule(60.0, 0.01)
    saving = Saving(save_s=save_s, stall_s=stall_s)
    assert rule.interval_s(saving) == pytest.approx(interval_s)
    assert stall_s / rule.interval_s(saving) <= 0.01 + 1e-9
    if save_s + rule.interval_s(saving) > 60.0 * 1.01:
        assert "more than checkpoint.every = 60 s" in str(rule.note(saving))


def test_nothing_is_saved_while_a_member_still_writes() -> None:
    rule = SaveRule(0.0, 0.01)
    assert rule.is_due(1.0, Saving())
    assert not rule.is_due(1e6, Saving(is_under_way=True))


def test_the_slowest_member_counts_and_the_oldest_step() -> None:
    one = Saving(save_s=3.0, stall_s=0.1, safe_step=20)
    other = Saving(save_s=1.0, stall_s=0.5, safe_step=10, is_under_way=True)
    assert slowest([one, other]) == Saving(save_s=3.0, stall_s=0.5, safe_step=10, is_under_way=True)


def test_the_interval_is_told_when_it_changes() -> None:
    rule = SaveRule(60.0, 0.01)
    assert rule.note(Saving()) is None
    text = rule.note(Saving(save_s=10.0, stall_s=0.1))
    assert text is not None
    assert text.startswith("saves every 50 s: one stops the step for 100 ms (0.20% of the time)")
    assert text.endswith("at most the work of 60 s and a step is lost")
    assert rule.note(Saving(save_s=11.0, stall_s=0.1)) is None
    assert rule.note(Saving(save_s=50.0, stall_s=0.6)) is not None


def test_a_member_counts_its_saves() -> None:
    saves = Saves()
    saves.under_way |= {3, 5}
    saves.end(5, Stored(save_s=2.0, stall_s=0.5))
    assert saves.facts == Saving(save_s=2.0, stall_s=0.5, is_under_way=True, safe_step=5)
    saves.end(3, NotStored(reason="full"))
    assert saves.facts == Saving(save_s=2.0, stall_s=0.5, safe_step=5)
    with pytest.raises(ScheduleError, match="step 3 is reported as saved"):
        saves.end(3, None)


def end_of_first_step(**changes: Any) -> tuple[OneMember, Save]:
    """One stage alone that saves after its first step."""
    one = OneMember(
        pipeline_of((1,), **{"num_steps": 9, "num_microbatches": 1, "save_every_s": 0.0, **changes})
    )
    one.begin()
    for _ in range(3):
        one.done()
    (save,) = [action for action in one.feed(one.end_of(one.work)) if isinstance(action, Save)]
    return one, save


def to_reduce(one: OneMember) -> Seen:
    while not one.is_running(WorkKind.REDUCE):
        one.done()
    assert isinstance(one.work.facts, Seen)
    return one.work.facts


def test_what_was_saved_everywhere_comes_with_the_next_save() -> None:
    one, first = end_of_first_step()
    assert (first.step, first.safe_step) == (1, 0)
    one.feed(Saved(1, Stored(save_s=0.0)))
    assert to_reduce(one).saving == Saving(safe_step=1)
    one.done()
    (second,) = [action for action in one.feed(one.end_of(one.work)) if isinstance(action, Save)]
    assert (second.step, second.safe_step) == (2, 1)


def test_a_save_under_way_puts_the_next_one_off_but_for_the_last() -> None:
    one, _ = end_of_first_step(num_steps=3)
    for step in (1, 2):
        assert to_reduce(one).saving == Saving(is_under_way=True)
        one.done()
        saves = [action.step for action in one.feed(one.end_of(one.work)) if isinstance(action, Save)]
        assert saves == ([] if step == 1 else [3])
    assert not one.feed(Saved(1))
    assert Stop(Outcome.FINISHED) in one.feed(Saved(3))


def test_a_save_that_cannot_be_written_ends_the_run() -> None:
    one, _ = end_of_first_step()
    assert one.feed(Saved(1, NotStored(reason="the disk is full", hint="make room"))) == (
        Stop(Outcome.FAILED, "the disk is full", "make room"),
    )


def test_the_verdict_names_the_newest_step_that_all_clouds_have() -> None:
    behind = tally_of(1, saving=Saving(safe_step=4, save_s=7.0))
    own = stage_tally(0, [Reduced(seen=Seen(saving=Saving(safe_step=6)), loss_sum=0.0, squared_norms=())])
    found = joined(own, [Reduced(seen=Seen(), loss_sum=0.0, squared_norms=())], behind)
    assert found.saving == Saving(safe_step=4, save_s=7.0)


def test_the_simulator_saves_by_the_same_rule() -> None:
    """A copy of 2 MB takes 16 s of the line's share; saves follow each other no faster."""
    saving = Checkpointing(every_s=1.0, stage_bytes=(2_000_000, 2_000_000), share=0.5)
    timeline = simulate_scenario(HAND, num_steps=12, checkpoint=saving)
    spans = [one for one in timeline.spans if one.kind == "save"]
    names = list(dict.fromkeys(one.name for one in sorted(spans, key=lambda one: one.start_s)))
    assert len(names) > 2
    # The last step is saved in any case.
    for before, after in pairwise(names[:-1]):
        end_s = max(one.end_s for one in spans if one.name == before)
        assert min(one.start_s for one in spans if one.name == after) >= end_s
    told = [one.fact.text for one in timeline.told if isinstance(one.fact, Note)]
    assert any(text.startswith("saves every ") for text in told)
