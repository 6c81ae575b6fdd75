"""The log of a real run, told to a fresh scheduler, gives the same actions: it decides by nothing else."""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from isthmus.plan.codecs import RAW_PAIR
from isthmus.plan.end_of_step import Evaluated, Note, StepEnded, Verdict
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.types import Arrived, Member, MessageKind, Outcome, Save, ScheduleError, Send, Stop
from isthmus.wan.shaping import Shape
from tests.model.cases import blueprint
from tests.train.chain import CLOUDS, Chain, CutCase, Given, Record, assert_pure, chain, config
from tests.train.test_codecs import cut
from tests.train.test_exactness import batches

NUM_STEPS = 9
# A micro-batch takes 80 ms of this line, and a few ms to compute.
THIN = Shape(bandwidth_bps=150e3, delay_s=0.002)
FREE = CutCase(codecs=RAW_PAIR, is_free=True, num_rows=18)
"""`auto` finds the line too thin for raw numbers."""
COARSE = cut("int2", "int4(stochastic)", guard_every=1)
"""The guard finds the codec too coarse."""


def eventful_run() -> Chain:
    """Three stages whose codecs change, that are saved and evaluated, with a link that is cut in between."""
    plan = blueprint("llama")
    agreed = config(
        3,
        4,
        num_steps=NUM_STEPS,
        cuts=(FREE, COARSE),
        save_every_s=1.0,
        evaluate_every=3,
        num_validation_microbatches=2,
        evaluates_without_codecs=True,
    )
    held_out = batches(plan, 2, num_steps=1)[0]
    with chain(plan, agreed, shape=THIN) as found:

        def cut_link(ended: StepEnded) -> None:
            if ended.step == 2:
                found.links[0].cut(0.4)

        found.records[0].on_step = cut_link
        found.run(Given(batches(plan, 4, num_steps=NUM_STEPS), held_out))
        assert found.links[0].end("north").counters().reconnects > 0
    return found


@pytest.fixture(scope="module")
def eventful() -> Chain:
    return eventful_run()


def assert_eventful(record: Record) -> None:
    """Everything that a scheduler decides has happened."""
    actions = [action for *_, several in record.log for action in several]
    saved = [action.step for action in actions if isinstance(action, Save)]
    assert len(saved) > 1
    assert saved[0] < NUM_STEPS
    assert saved[-1] == NUM_STEPS
    assert [action.outcome for action in actions if isinstance(action, Stop)] == [Outcome.FINISHED]


def test_codecs_changed_on_both_cuts(eventful: Chain) -> None:
    north, _, south = eventful.records
    notes = [one.text for one in north.told if isinstance(one, Note)]
    assert any("on the line" in text or "would take" in text for text in notes), notes
    assert any("guard_cosine" in text for text in notes), notes
    verdicts = [
        event.message.facts
        for event, *_ in south.log
        if isinstance(event, Arrived) and event.message.kind is MessageKind.VERDICT
    ]
    assert len({one.codecs for one in verdicts if isinstance(one, Verdict)}) > 1
    assert [(one.step, one.is_plain) for one in north.told if isinstance(one, Evaluated)] == [
        (step, is_plain) for step in (3, 6, 9) for is_plain in (False, True)
    ]
    sent = {
        action.message.codecs for *_, actions in north.log for action in actions if isinstance(action, Send)
    }
    assert len(sent) > 2


@pytest.mark.parametrize("index", range(3))
def test_a_log_gives_the_same_actions_to_a_fresh_scheduler(eventful: Chain, index: int) -> None:
    record = eventful.records[index]
    assert_eventful(record)
    assert_pure(eventful.config.pipeline, Member(CLOUDS[index]), record)


@pytest.mark.parametrize("index", range(3))
def test_a_log_with_other_times_gives_other_actions(eventful: Chain, index: int) -> None:
    log = eventful.records[index].log
    fresh = PipelineScheduler(eventful.config.pipeline, Member(CLOUDS[index]))
    try:
        answers = [fresh.on(event, 3 * now_s) for event, now_s, _ in log]
    except ScheduleError:
        # It has decided otherwise, and is told of what it did not send.
        return
    assert repr(answers) != repr([actions for *_, actions in log])


def test_facts_of_a_log_are_plain_values(eventful: Chain) -> None:
    """No event holds a tensor, a link or a clock."""
    for record in eventful.records:
        for event, *_ in record.log:
            for value in _leaves(event):
                assert value is None or isinstance(value, int | float | str), value


def _leaves(value: Any) -> list[Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return [leaf for one in fields(value) for leaf in _leaves(getattr(value, one.name))]
    if isinstance(value, tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    return [getattr(value, "value", value)]
