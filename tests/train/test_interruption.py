"""A member that is asked to stop brings all to one saved step, from which the run continues unchanged."""

import threading
import time
from typing import Any

import pytest

from isthmus.plan.end_of_step import StepEnded
from isthmus.plan.types import Interrupted, Member, Outcome
from isthmus.wan.shaping import Shape
from tests.model.cases import blueprint
from tests.train.chain import CLOUDS, Chain, Given, assert_pure, chain, config
from tests.train.reference import assert_same, parameters_of
from tests.train.resuming import keep_all, take_up
from tests.train.test_codecs import BOTTLENECK, cut
from tests.train.test_exactness import batches

CODED = cut("subspace(6, every=2) | int8", "int8(stochastic)")
NARROW = cut("int4", "int4(stochastic)", boundary=BOTTLENECK)
CASES: dict[str, dict[str, Any]] = {
    "two stages": {"num_stages": 2},
    "three stages, coded": {"num_stages": 3, "cuts": (CODED, CODED)},
    "before a bottleneck": {"num_stages": 2, "cuts": (NARROW,)},
    "frozen": {"num_stages": 3, "first_trained": 1},
    "evaluating": {
        "num_stages": 3, "evaluate_every": 1, "num_validation_microbatches": 2,
        "evaluates_without_codecs": True,
    },
}  # fmt: skip


def run_of(case: dict[str, Any], **options: Any) -> Any:
    values = {"save_every_s": 1e6, **case}
    agreed = config(values.pop("num_stages"), 3, **values)
    return chain(blueprint("llama"), agreed, **options)


def given() -> Given:
    plan = blueprint("llama")
    return Given(batches(plan, 3), batches(plan, 2, num_steps=1)[0])


def interrupt_after(found: Chain, index: int, step: int) -> None:
    """Ask one member to stop when it has ended a step."""

    def stop(ended: StepEnded) -> None:
        if ended.step == step:
            found.loops[index].interrupt("SIGTERM")

    found.records[index].on_step = stop


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_run_saves_a_common_step_and_continues_from_there(name: str) -> None:
    case = CASES[name]
    with run_of(case) as whole:
        whole.run(given())
    expected = parameters_of(whole.stages)
    for index in range(case["num_stages"]):
        with run_of(case) as found:
            kept = keep_all(found)
            interrupt_after(found, index, step=0)
            found.run(given())
        (step,) = {one.step for record in found.records for one in record.saves}
        assert [stop.outcome for _, stop in sorted(found.stops.items())] == (
            [Outcome.INTERRUPTED] * case["num_stages"]
        )
        assert 1 <= step <= 3
        assert all(record.steps[-1].step == step - 1 for record in found.records)
        with run_of(case) as resumed:
            states = take_up(resumed, kept, step)
            resumed.run(given(), first_step=step, states=states)
        assert {stop.outcome for stop in resumed.stops.values()} == {Outcome.FINISHED}
        assert_same(parameters_of(resumed.stages), expected)
        for run in (found, resumed):
            assert_pure(run.config.pipeline, Member(CLOUDS[index]), run.records[index])


@pytest.mark.parametrize("index", range(3))
def test_an_interruption_may_come_at_any_time_and_from_any_thread(index: int) -> None:
    with run_of({"num_stages": 3}) as whole:
        whole.run(given())
    with run_of({"num_stages": 3}, shape=Shape(delay_s=0.01)) as found:
        kept = keep_all(found)
        ended = threading.Event()

        def interrupt() -> None:
            while index not in found.loops and not ended.is_set():
                time.sleep(0.001)
            ended.wait(0.1)
            found.loops[index].interrupt("SIGINT")

        thread = threading.Thread(target=interrupt)
        thread.start()
        found.run(given())
        ended.set()
        thread.join()
    (outcome,) = {stop.outcome for stop in found.stops.values()}
    (step,) = {record.saves[-1].step for record in found.records}
    was_told = any(isinstance(event, Interrupted) for event, *_ in found.records[index].log)
    assert was_told or outcome is Outcome.FINISHED
    if outcome is Outcome.INTERRUPTED:
        with run_of({"num_stages": 3}) as resumed:
            resumed.run(given(), first_step=step, states=take_up(resumed, kept, step))
        found = resumed
    assert_same(parameters_of(found.stages), parameters_of(whole.stages))


@pytest.mark.parametrize("index", range(2))
def test_an_interruption_behind_the_last_step_changes_nothing(index: int) -> None:
    with run_of({"num_stages": 2}) as found:
        interrupt_after(found, index, step=4)
        found.run(given())
    assert {stop.outcome for stop in found.stops.values()} == {Outcome.FINISHED}
    assert {one.step for record in found.records for one in record.saves} == {5}


@pytest.mark.parametrize("index", range(2))
def test_several_members_may_be_interrupted_more_than_once(index: int) -> None:
    with run_of({"num_stages": 2}) as found:
        for number in range(2):
            interrupt_after(found, number, step=1)
        found.records[index].on_save = lambda _: found.loops[index].interrupt("again")
        found.run(given())
    assert {stop.outcome for stop in found.stops.values()} == {Outcome.INTERRUPTED}
    (step,) = {one.step for record in found.records for one in record.saves}
    assert step <= 4
