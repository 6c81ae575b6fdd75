"""Properties of the pipeline schedules under random times, orders of arrival, windows and steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.end_of_step import Tally
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.scenario import Policy
from isthmus.plan.types import Member, MessageKind, Outcome, Stop, Work, WorkKind
from tests.plan.driver import Driver, Entry, random_times
from tests.plan.one_member import OneMember, pipeline_of
from tests.plan.replay import PASSES, Replay, replay, replays

thorough = settings(deadline=None, max_examples=150)

FORWARD, BACKWARD, EVALUATE = WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.EVALUATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline, the step it starts with, and a seed for how long everything takes."""

    pipeline: Pipeline
    first_step: int = 0
    seed: int = 0

    def drive(self) -> list[Entry]:
        random = Random(self.seed)
        driver = Driver(self.pipeline, random_times(random), random=random)
        driver.start(self.first_step)
        log = driver.run()
        assert driver.stops == dict.fromkeys(self.pipeline.members, Stop(Outcome.FINISHED))
        return log

    def replay(self) -> list[Replay]:
        return list(replay(self.drive(), self.pipeline).values())

    @property
    def turns(self) -> list[tuple[int, bool]]:
        """Every step, and whether it is an evaluation: before each so many, and at the end."""
        every = self.pipeline.evaluate_every if self.pipeline.num_validation_microbatches else None
        last = self.pipeline.num_steps
        found = []
        for step in range(self.first_step, last):
            found += [(step, True)] * bool(every and step > self.first_step and step % every == 0)
            found.append((step, False))
        return [*found, *[(last, True)] * bool(every)]


@st.composite
def cases(draw: st.DrawFn, *, policies: Sequence[Policy] = tuple(Policy)) -> Case:
    num_stages = draw(st.integers(1, 6))
    policy = draw(st.sampled_from(policies))
    windows = draw(st.lists(st.integers(1, 18), min_size=num_stages, max_size=num_stages))
    if policy is not Policy.WAN_ONE_F_ONE_B:
        windows = list(accumulate(windows, min))
    first_step = draw(st.integers(0, 3))
    pipeline = pipeline_of(
        (1,) * num_stages,
        num_steps=first_step + draw(st.integers(1, 3)),
        num_microbatches=draw(st.integers(1, 16)),
        policy=policy,
        windows=tuple(windows),
        first_trained=draw(st.integers(0, num_stages - 1)),
        evaluate_every=draw(st.sampled_from([None, 1, 2])),
        num_validation_microbatches=draw(st.integers(0, 8)),
        evaluates_without_codecs=draw(st.booleans()),
    )
    return Case(pipeline=pipeline, first_step=first_step, seed=draw(st.integers(0, 2**32)))


def expected_passes(case: Case, stage: int, kind: WorkKind) -> list[tuple[int, int]]:
    """Step and micro-batch of each; the second round of an evaluation has numbers of its own."""
    pipeline = case.pipeline
    if kind is EVALUATE:
        number = pipeline.num_validation_microbatches * (1 + pipeline.evaluates_without_codecs)
        return [(step, item) for step, is_evaluation in case.turns if is_evaluation for item in range(number)]
    if kind is BACKWARD and stage < pipeline.first_trained:
        return []
    steps = range(case.first_step, pipeline.num_steps)
    return [(step, item) for step in steps for item in range(pipeline.num_microbatches)]


def assert_complete(case: Case, stages: Sequence[Replay]) -> None:
    """Every stage ends every step, and each micro-batch passes it once each way, in order."""
    for stage, seen in enumerate(stages):
        for kind in PASSES:
            found = [(work.step, work.item) for work in seen.computed if work.kind is kind]
            assert found == expected_passes(case, stage, kind)
        assert [(one.kind.value, one.step, one.item) for one in seen.sends] == [
            (work.kind.value, work.step, work.item)
            for work in seen.computed
            if work.kind in PASSES
            and (stage > case.pipeline.first_trained if work.kind is BACKWARD else not seen.is_last)
        ]
        for message in seen.sends:
            behind = -1 if message.kind is MessageKind.GRADIENT else 1
            assert message.to == case.pipeline.stages[stage + behind]


@thorough
@given(cases())
def test_every_microbatch_passes_every_stage_once_in_order_and_within_the_window(case: Case) -> None:
    assert_complete(case, case.replay())


@dataclass(frozen=True, slots=True, kw_only=True)
class Resizing(Pipeline):
    """One whose windows after each step are any."""

    sizes: tuple[tuple[int, ...], ...]

    def next_windows(self, tally: Tally) -> tuple[int, ...]:
        return self.sizes[tally.step % len(self.sizes)]


@thorough
@given(
    sizes=st.lists(st.tuples(*[st.integers(1, 18)] * 3), min_size=1, max_size=4),
    m=st.integers(1, 16),
    first_trained=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_the_window_may_change_at_every_step(
    sizes: list[tuple[int, int, int]], m: int, first_trained: int, seed: int
) -> None:
    pipeline = Resizing(
        stages=pipeline_of((1, 1, 1)).stages,
        num_steps=4,
        num_microbatches=m,
        windows=(3, 2, 1),
        first_trained=first_trained,
        sizes=tuple(sizes),
    )
    case = Case(pipeline=pipeline, seed=seed)
    found = case.replay()
    assert_complete(case, found)
    assert tuple(seen.window for seen in found) == sizes[3 % len(sizes)]


@thorough
@given(cases())
def test_a_step_begins_only_when_the_one_before_has_ended(case: Case) -> None:
    for seen in case.replay():
        taken = [(work.step, _is_evaluation(work)) for work in seen.computed]
        assert [turn for place, turn in enumerate(taken) if taken[place - 1 : place] != [turn]] == case.turns
        begins = [work for work in seen.computed if work.kind is WorkKind.READ]
        assert [(work.step, bool(work.item)) for work in begins] == case.turns
        ends = [(work.step, work.kind) for work in seen.computed if work.kind in ENDS]
        assert ends == [(step, kind) for step, of in case.turns for kind in _ends(of, seen)]


ENDS = (WorkKind.REDUCE, WorkKind.UPDATE, WorkKind.SCORE)


def _ends(is_evaluation: bool, seen: Replay) -> list[WorkKind]:
    if is_evaluation:
        return [WorkKind.SCORE] if seen.is_last else []
    return [WorkKind.REDUCE, WorkKind.UPDATE]


def _is_evaluation(work: Work) -> bool:
    return work.kind in (EVALUATE, WorkKind.SCORE) or (work.kind is WorkKind.READ and work.item == 1)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 16), st.integers(0, 2**32))
def test_wan_1f1b_never_idles_while_it_could_work(windows: list[int], m: int, seed: int) -> None:
    pipeline = pipeline_of((1,) * len(windows), num_microbatches=m, windows=tuple(windows))
    members = replays(pipeline)
    for entry in Case(pipeline=pipeline, seed=seed).drive():
        seen = members[entry.member]
        seen.happened(entry.event)
        for action in entry.actions:
            seen.asked(action)
        assert seen.running is not None or not could_work(seen, m)


def could_work(seen: Replay, num_microbatches: int) -> bool:
    if not seen.computed or seen.computed[-1].kind in ENDS:
        return False
    num_forwards, num_backwards = (len(seen.passes(kind, 0)) for kind in (FORWARD, BACKWARD))
    has_gradient = seen.is_last or (BACKWARD.value, 0, num_backwards) in seen.inputs
    has_input = seen.is_first or (FORWARD.value, 0, num_forwards) in seen.inputs
    has_room = num_forwards < num_microbatches and len(seen.kept) < seen.window
    return (num_backwards < num_forwards and has_gradient) or (has_room and has_input)


def orders(case: Case) -> list[str]:
    """The passes of each member in a few letters."""
    letters = {FORWARD: "F", BACKWARD: "B", EVALUATE: "E"}
    return [
        " ".join(f"{letters[work.kind]}{work.item}" for work in seen.computed if work.kind in letters)
        for seen in case.replay()
    ]


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    case = Case(pipeline=pipeline_of((1, 1), num_microbatches=3, policy=Policy.GPIPE))
    assert orders(case) == ["F0 F1 F2 B0 B1 B2"] * 2


@pytest.mark.parametrize("seed", range(5))
def test_1f1b_warms_up_alternates_and_drains_whatever_the_times(seed: int) -> None:
    pipeline = pipeline_of((1, 1, 1), num_microbatches=4, policy=Policy.ONE_F_ONE_B)
    assert orders(Case(pipeline=pipeline, seed=seed)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("policy", list(Policy))
def test_one_microbatch_is_model_parallel(policy: Policy) -> None:
    pipeline = pipeline_of(
        (1, 1, 1), num_microbatches=1, policy=policy, evaluate_every=1, num_validation_microbatches=1
    )
    assert orders(Case(pipeline=pipeline)) == ["F0 B0 E0"] * 3


@pytest.mark.parametrize("policy", list(Policy))
def test_one_stage_needs_no_peer(policy: Policy) -> None:
    pipeline = pipeline_of(
        (1,),
        num_microbatches=2,
        policy=policy,
        windows=(1,),
        evaluate_every=1,
        num_validation_microbatches=2,
    )
    case = Case(pipeline=pipeline)
    assert orders(case) == ["F0 B0 F1 B1 E0 E1"]
    assert not case.replay()[0].sends


def test_a_rank_runs_only_what_is_routed_to_it() -> None:
    pipeline = pipeline_of((2, 3), num_steps=2, num_microbatches=5, windows=(1, 1))
    found = replay(Case(pipeline=pipeline).drive(), pipeline)
    forwards = {str(member): seen.passes(FORWARD, 1) for member, seen in found.items()}
    # Another rank begins in every step.
    assert forwards == {
        "cloud0/0": [1, 3],
        "cloud0/1": [0, 2, 4],
        "cloud1/0": [2],
        "cloud1/1": [0, 3],
        "cloud1/2": [1, 4],
    }
    sends = found[Member("cloud0", 1)].sends
    to = {one.item: str(one.to[0]) for one in sends if one.step == 1}
    assert to == {0: "cloud1/1", 2: "cloud1/0", 4: "cloud1/2"}


def test_a_step_without_microbatches_still_ends() -> None:
    one = OneMember(pipeline_of((1, 3, 1), num_microbatches=1, policy=Policy.GPIPE), Member("cloud1", 2))
    one.start()
    assert one.done() == [WorkKind.REDUCE]
    assert one.done() == [WorkKind.UPDATE]


def test_a_frozen_stage_runs_ahead_as_far_as_the_link_takes_its_activations() -> None:
    one = OneMember(pipeline_of((1, 1), num_microbatches=3, windows=(2, 2), first_trained=1))
    one.begin()
    assert one.done() == [MessageKind.ACTIVATION, FORWARD]
    assert one.done() == [MessageKind.ACTIVATION]
    assert one.running is None
    assert one.sent(MessageKind.ACTIVATION, 0) == [FORWARD]
    assert one.work.item == 2


def test_windows_of_a_verdict_hold_from_the_next_step_on() -> None:
    pipeline = pipeline_of((1, 1, 1), num_steps=2, num_microbatches=4, windows=(3, 3, 3))
    middle = OneMember(pipeline, Member("cloud1"))
    middle.begin()
    for item in range(4):
        middle.arrived(MessageKind.ACTIVATION, item)
    for _ in range(3):
        middle.done()
    assert middle.running is None, "three are in flight"
    middle.finish_step(windows=(1, 1, 1))
    middle.done()
    for item in range(2):
        middle.arrived(MessageKind.ACTIVATION, item, step=1)
    assert middle.work.kind is FORWARD
    assert middle.done() == [MessageKind.ACTIVATION]
    assert middle.running is None, "one is in flight"


def test_gradients_that_overtake_are_summed_in_order() -> None:
    one = OneMember(pipeline_of((1, 1), num_microbatches=2, windows=(2, 2)))
    one.begin()
    one.done()
    one.done()
    assert one.arrived(MessageKind.GRADIENT, 1) == []
    assert one.arrived(MessageKind.GRADIENT, 0) == [BACKWARD]
    assert one.work.item == 0
    assert one.done() == [BACKWARD]
    assert one.work.item == 1


def test_wan_1f1b_takes_a_gradient_before_a_forward() -> None:
    one = OneMember(pipeline_of((1, 1), num_microbatches=3, windows=(3, 3)))
    one.begin()
    one.done()
    assert one.arrived(MessageKind.GRADIENT, 0) == []
    assert one.done() == [MessageKind.ACTIVATION, BACKWARD]


def test_what_ends_a_step_and_is_under_way_does_not_delay_an_evaluation() -> None:
    pipeline = pipeline_of(
        (1, 1, 1), num_microbatches=1, windows=(1, 1, 1), evaluate_every=1, num_validation_microbatches=1
    )
    one = OneMember(pipeline, Member("cloud1"))
    one.begin()
    one.arrived(MessageKind.ACTIVATION, 0)
    one.done()
    one.sent(MessageKind.ACTIVATION, 0)
    one.finish_step()
    assert {message.kind for message in one.sending} == {MessageKind.TALLY, MessageKind.VERDICT}
    one.done()
    assert one.arrived(MessageKind.EVALUATION, 0, step=1) == [EVALUATE]


def test_a_step_is_not_reduced_before_its_gradients_are_coded() -> None:
    """What their coding lost belongs to the step's tally."""
    one = OneMember(pipeline_of((1, 1), num_microbatches=1), Member("cloud1"))
    one.begin()
    one.arrived(MessageKind.ACTIVATION, 0)
    one.done()
    assert one.done() == [MessageKind.GRADIENT]
    assert one.sent(MessageKind.GRADIENT, 0) == [WorkKind.REDUCE]


def test_the_round_without_codecs_of_an_evaluation_goes_the_same_ways() -> None:
    pipeline = pipeline_of(
        (2, 3), evaluate_every=1, num_validation_microbatches=5, evaluates_without_codecs=True
    )
    found = replay(Case(pipeline=pipeline).drive(), pipeline)
    ways = {one.item: (one.sender, one.to) for seen in found.values() for one in seen.sends if one.step == 1}
    assert ways.keys() == set(range(10))
    assert all(ways[item] == ways[item + 5] for item in range(5))
    assert len({to for _, to in ways.values()}) == 3
