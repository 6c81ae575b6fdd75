"""Properties of the pipeline schedules under random times, orders of arrival, windows and steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.pipeline import PipelineScheduler, Policy
from isthmus.plan.types import Arrived, Done, Optimize, Pass, Report, Resized, Run, Send, Started
from tests.plan.driver import Costs, Driver, Entry
from tests.plan.replay import Replay, replay

thorough = settings(deadline=None, max_examples=150)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline, what it is to do, and a seed for how long everything takes."""

    policy: Policy
    windows: tuple[int, ...]
    starts: tuple[Started, ...]
    seed: int = 0
    first_trained: int = 0

    def drive(self, *, resized: Sequence[int] = ()) -> list[Entry]:
        random = Random(self.seed)
        driver = Driver(self._schedulers(), _random_costs(random))
        for stage in range(len(self.windows)):
            gap_s = random.choice((0.0, 5.0))
            for turn, started in enumerate(self.starts):
                driver.post(turn * gap_s, stage, started)
            for window in resized:
                driver.post(10 * random.random(), stage, Resized(window=window))
        return driver.run()

    def replay(self, *, resized: Sequence[int] = ()) -> list[Replay]:
        return replay(self.drive(resized=resized), windows=self.windows, first_trained=self.first_trained)

    def _schedulers(self) -> list[PipelineScheduler]:
        return [
            PipelineScheduler(
                stage=stage,
                num_stages=len(self.windows),
                policy=self.policy,
                window=window,
                first_trained=self.first_trained,
            )
            for stage, window in enumerate(self.windows)
        ]


def _random_costs(random: Random) -> Costs:
    """Messages overtake each other, even within a stream."""
    return Costs(
        compute_s=lambda _stage, _action: random.choice((0.0, random.random())),
        serialise_s=lambda _stage, _send: 0.3 * random.random(),
        latency_s=lambda _stage, _send: random.choice((0.0, 1.0, 9.0)) * random.random(),
    )


def training(step: int, num_microbatches: int) -> Started:
    return Started(step=step, microbatches=tuple(range(num_microbatches)))


def evaluation(step: int, num_microbatches: int) -> Started:
    return Started(step=step, microbatches=tuple(range(num_microbatches)), evaluation=True)


@st.composite
def cases(draw: st.DrawFn, *, policies: Sequence[Policy] = tuple(Policy)) -> Case:
    num_stages = draw(st.integers(1, 6))
    policy = draw(st.sampled_from(policies))
    windows = draw(st.lists(st.integers(1, 18), min_size=num_stages, max_size=num_stages))
    if policy is not Policy.WAN_ONE_F_ONE_B:
        windows = list(accumulate(windows, min))
    starts: list[Started] = []
    for step in draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(sorted)):
        starts += [evaluation(step, number) for number in draw(st.lists(st.integers(0, 8), max_size=1))]
        starts.append(training(step, draw(st.integers(1, 16))))
    return Case(
        policy=policy,
        windows=tuple(windows),
        starts=tuple(starts),
        seed=draw(st.integers(0, 2**32)),
        first_trained=draw(st.integers(0, num_stages - 1)),
    )


def expected_passes(case: Case, stage: int, kind: Pass, started: Started) -> list[int]:
    is_due = {
        Pass.EVALUATION: started.evaluation,
        Pass.FORWARD: not started.evaluation,
        Pass.BACKWARD: not started.evaluation and stage >= case.first_trained,
    }[kind]
    return list(started.microbatches) if is_due else []


def assert_complete(case: Case, stages: Sequence[Replay]) -> None:
    """Every stage ends every step, and each micro-batch passes it once each way, in order."""
    for stage, seen in enumerate(stages):
        for kind in Pass:
            for step in {started.step for started in case.starts}:
                turns = [started for started in case.starts if started.step == step]
                expected = [number for one in turns for number in expected_passes(case, stage, kind, one)]
                assert seen.passes(kind, step) == expected
        assert seen.sends == [
            Send(kind=run.kind, step=run.step, microbatch=run.microbatch)
            for run in seen.computed
            if isinstance(run, Run)
            and (stage > case.first_trained if run.kind is Pass.BACKWARD else not seen.is_last)
        ]


@thorough
@given(cases())
def test_every_microbatch_passes_every_stage_once_in_order_and_within_the_window(case: Case) -> None:
    assert_complete(case, case.replay())


@thorough
@given(cases(policies=[Policy.WAN_ONE_F_ONE_B]), st.lists(st.integers(1, 18), max_size=4))
def test_the_window_may_change_at_any_time(case: Case, resized: list[int]) -> None:
    assert_complete(case, case.replay(resized=resized))


@thorough
@given(cases())
def test_a_step_begins_only_when_the_one_before_has_ended(case: Case) -> None:
    turns = [(started.step, started.evaluation) for started in case.starts]
    for seen in case.replay():
        taken = [(one.step, _is_evaluation(one)) for one in seen.computed]
        assert [turn for place, turn in enumerate(taken) if taken[place - 1 : place] != [turn]] == turns
        ends = [one for one in seen.computed if not isinstance(one, Run)]
        assert [(end.step, _is_evaluation(end)) for end in ends] == turns


def _is_evaluation(one: Run | Optimize | Report) -> bool:
    return isinstance(one, Report) or (isinstance(one, Run) and one.kind is Pass.EVALUATION)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 16), st.integers(0, 2**32))
def test_wan_1f1b_never_idles_while_it_could_work(windows: list[int], m: int, seed: int) -> None:
    policy = Policy.WAN_ONE_F_ONE_B
    case = Case(policy=policy, windows=tuple(windows), starts=(training(0, m),), seed=seed)
    log = case.drive()
    for num_entries, entry in enumerate(log, start=1):
        seen = replay(log[:num_entries], windows=case.windows)[entry.stage]
        assert seen.running is not None or seen.computed[-1:] == [Optimize(step=0)] or not could_work(seen, m)


def could_work(seen: Replay, num_microbatches: int) -> bool:
    num_forwards, num_backwards = (len(seen.passes(kind, 0)) for kind in (Pass.FORWARD, Pass.BACKWARD))
    has_gradient = seen.is_last or (Pass.BACKWARD, 0, num_backwards) in seen.inputs
    has_input = seen.is_first or (Pass.FORWARD, 0, num_forwards) in seen.inputs
    has_room = num_forwards < num_microbatches and len(seen.kept) < seen.window
    return (num_backwards < num_forwards and has_gradient) or (has_room and has_input)


def order(case: Case, stage: int) -> str:
    letters = {Pass.FORWARD: "F", Pass.BACKWARD: "B", Pass.EVALUATION: "E"}
    runs = [one for one in case.replay()[stage].computed if isinstance(one, Run)]
    return " ".join(f"{letters[run.kind]}{run.microbatch}" for run in runs)


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    case = Case(policy=Policy.GPIPE, windows=(3, 3), starts=(training(0, 3),))
    assert [order(case, stage) for stage in (0, 1)] == ["F0 F1 F2 B0 B1 B2"] * 2


@pytest.mark.parametrize("seed", range(5))
def test_1f1b_warms_up_alternates_and_drains_whatever_the_times(seed: int) -> None:
    case = Case(policy=Policy.ONE_F_ONE_B, windows=(3, 2, 1), starts=(training(0, 4),), seed=seed)
    assert [order(case, stage) for stage in (0, 1, 2)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("policy", list(Policy))
def test_one_microbatch_is_model_parallel(policy: Policy) -> None:
    case = Case(policy=policy, windows=(1, 1, 1), starts=(evaluation(0, 1), training(0, 1)))
    assert [order(case, stage) for stage in (0, 1, 2)] == ["E0 F0 B0"] * 3


@pytest.mark.parametrize("policy", list(Policy))
def test_one_stage_needs_no_peer(policy: Policy) -> None:
    case = Case(policy=policy, windows=(1,), starts=(training(0, 2), evaluation(1, 2)))
    assert order(case, 0) == "F0 B0 F1 B1 E0 E1"
    assert not case.replay()[0].sends


def test_a_rank_runs_only_what_is_routed_to_it() -> None:
    started = Started(step=0, microbatches=(1, 4, 6))
    case = Case(policy=Policy.WAN_ONE_F_ONE_B, windows=(1, 1), starts=(started,))
    assert order(case, 0) == "F1 B1 F4 B4 F6 B6"


def test_a_step_without_microbatches_still_ends() -> None:
    scheduler = PipelineScheduler(stage=1, num_stages=3, policy=Policy.GPIPE, window=1)
    assert scheduler.on(Started(step=0, microbatches=())) == (Optimize(step=0),)


def test_a_frozen_stage_runs_ahead_as_far_as_the_link_takes_its_activations() -> None:
    scheduler = PipelineScheduler(
        stage=0, num_stages=2, policy=Policy.WAN_ONE_F_ONE_B, window=2, first_trained=1
    )
    sends = []
    actions = scheduler.on(training(0, 3))
    while actions:
        *sent, run = actions
        sends += sent
        actions = scheduler.on(Done(action=run))
        if len(actions) == 1:
            sends += actions
            break
    assert sends == [Send(kind=Pass.FORWARD, step=0, microbatch=number) for number in (0, 1)]
    assert scheduler.on(Done(action=sends[0])) == (Run(kind=Pass.FORWARD, step=0, microbatch=2),)


def test_a_larger_window_takes_effect_at_once_and_a_smaller_one_as_backwards_end() -> None:
    scheduler = PipelineScheduler(stage=0, num_stages=2, policy=Policy.WAN_ONE_F_ONE_B, window=1)
    forward = [Run(kind=Pass.FORWARD, step=0, microbatch=number) for number in range(4)]
    backward = [Run(kind=Pass.BACKWARD, step=0, microbatch=number) for number in range(4)]
    gradient = [Arrived(kind=Pass.BACKWARD, step=0, microbatch=number) for number in range(4)]
    assert scheduler.on(training(0, 4)) == (forward[0],)
    assert scheduler.on(Done(action=forward[0]))[1:] == ()
    assert scheduler.on(Resized(window=2)) == (forward[1],)
    assert scheduler.on(Resized(window=1)) == ()
    assert scheduler.on(Done(action=forward[1]))[1:] == ()
    assert scheduler.on(gradient[0]) == (backward[0],)
    assert scheduler.on(Done(action=backward[0])) == ()
    assert scheduler.on(gradient[1]) == (backward[1],)
    assert scheduler.on(Done(action=backward[1])) == (forward[2],)


def test_gradients_that_overtake_are_summed_in_order() -> None:
    scheduler = PipelineScheduler(stage=0, num_stages=2, policy=Policy.WAN_ONE_F_ONE_B, window=2)
    actions = scheduler.on(training(0, 2))
    for _ in range(2):
        actions = scheduler.on(Done(action=actions[-1]))
    assert scheduler.on(Arrived(kind=Pass.BACKWARD, step=0, microbatch=1)) == ()
    first = Run(kind=Pass.BACKWARD, step=0, microbatch=0)
    assert scheduler.on(Arrived(kind=Pass.BACKWARD, step=0, microbatch=0)) == (first,)
    assert scheduler.on(Done(action=first)) == (Run(kind=Pass.BACKWARD, step=0, microbatch=1),)


def test_wan_1f1b_takes_a_gradient_before_a_forward() -> None:
    scheduler = PipelineScheduler(stage=0, num_stages=2, policy=Policy.WAN_ONE_F_ONE_B, window=3)
    (first,) = scheduler.on(training(0, 3))
    _, second = scheduler.on(Done(action=first))
    assert scheduler.on(Arrived(kind=Pass.BACKWARD, step=0, microbatch=0)) == ()
    assert scheduler.on(Done(action=second))[-1] == Run(kind=Pass.BACKWARD, step=0, microbatch=0)


def test_gradients_under_way_do_not_delay_an_evaluation() -> None:
    scheduler = PipelineScheduler(stage=1, num_stages=3, policy=Policy.WAN_ONE_F_ONE_B, window=1)
    scheduler.on(training(0, 1))
    (forward,) = scheduler.on(Arrived(kind=Pass.FORWARD, step=0, microbatch=0))
    (sent,) = scheduler.on(Done(action=forward))
    scheduler.on(Done(action=sent))
    (backward,) = scheduler.on(Arrived(kind=Pass.BACKWARD, step=0, microbatch=0))
    _unsent, optimize = scheduler.on(Done(action=backward))
    assert optimize == Optimize(step=0)
    scheduler.on(evaluation(1, 1))
    scheduler.on(Arrived(kind=Pass.EVALUATION, step=1, microbatch=0))
    assert scheduler.on(Done(action=optimize)) == (Run(kind=Pass.EVALUATION, step=1, microbatch=0),)
