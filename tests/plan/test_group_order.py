"""All members of a group get group works in one order, and every run ends, whatever arrives when."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.scenario import Policy
from isthmus.plan.types import Interrupted, Member, Outcome, Run, Stop, WorkKind
from tests.plan.driver import Driver, random_times
from tests.plan.one_member import pipeline_of
from tests.plan.replay import replay

GroupWork = tuple[WorkKind, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline, the step it starts with, when which members are interrupted, and how times are drawn."""

    pipeline: Pipeline
    first_step: int
    interruptions: tuple[tuple[float, int], ...]
    seed: int
    keeps_order: bool

    def drive(self) -> Driver:
        random = Random(self.seed)
        times = random_times(random, keeps_order=self.keeps_order, scales=(0.01, 1.0, 1.0, 100.0))
        driver = Driver(self.pipeline, times, random=random)
        driver.start(self.first_step)
        for at_s, number in self.interruptions:
            members = self.pipeline.members
            driver.post(at_s, members[number % len(members)], Interrupted("SIGTERM"))
        driver.run()
        return driver


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_stages = draw(st.integers(1, 4))
    policy = draw(st.sampled_from(list(Policy)))
    first_step = draw(st.integers(0, 2))
    num_steps = first_step + draw(st.integers(1, 3))
    num_ranks = draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))
    counts: Sequence[int] = (draw(st.integers(1, 9)), draw(st.integers(0, 4)))
    changes: dict[str, Any] = {}
    if policy.keeps_order and draw(st.booleans()):
        # Ranks that share every pass need as many micro-batches each, in every stage.
        num_ranks = [num_ranks[0]] * num_stages
        counts = [number * num_ranks[0] for number in counts]
        changes["grouped_stages"] = frozenset(draw(st.sets(st.integers(0, num_stages - 1))))
    if num_stages > 1:
        changes["bottlenecks"] = frozenset(draw(st.sets(st.integers(0, num_stages - 2))))
        changes["fit_step"] = draw(st.none() | st.integers(0, num_steps))
    pipeline = pipeline_of(
        tuple(num_ranks),
        num_steps=num_steps,
        num_microbatches=counts[0],
        policy=policy,
        max_in_flight=draw(st.none() | st.integers(1, 5)),
        first_trained=draw(st.integers(0, num_stages - 1)),
        evaluate_every=draw(st.sampled_from([None, 1, 2])),
        num_validation_microbatches=counts[1],
        evaluates_without_codecs=draw(st.booleans()),
        save_every_s=draw(st.sampled_from([None, 0.0, 2.0])),
        **changes,
    )
    return Case(
        pipeline=pipeline,
        first_step=first_step,
        interruptions=tuple(draw(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 11)), max_size=2))),
        seed=draw(st.integers(0, 2**32)),
        keeps_order=draw(st.booleans()),
    )


def group_works(driver: Driver) -> dict[Member, list[GroupWork]]:
    found: dict[Member, list[GroupWork]] = {}
    for entry in driver.log:
        works = [action.work for action in entry.actions if isinstance(action, Run) and action.work.group]
        found.setdefault(entry.member, []).extend((work.kind, work.step) for work in works)
    return found


@settings(deadline=None, max_examples=300)
@given(cases())
def test_a_group_works_in_one_order_and_all_members_come_to_the_same_end(case: Case) -> None:
    driver = case.drive()
    replay(driver.log, case.pipeline)
    works = group_works(driver)
    for group in case.pipeline.stages:
        assert len({tuple(works[member]) for member in group}) == 1
    assert driver.stops.keys() == set(case.pipeline.members), "some wait for ever"
    (stop,) = set(driver.stops.values())
    saved = {tuple(driver.saved[member]) for member in case.pipeline.members}
    assert len(saved) == 1
    if stop.outcome is Outcome.INTERRUPTED:
        assert case.interruptions
        assert str(saved.pop()[-1]) in stop.reason
    else:
        assert stop == Stop(Outcome.FINISHED)
