"""The windows of a simulation are those of the workers, and with several ranks they keep every rank busy."""

from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isthmus.plan.pipeline import Policy
from isthmus.plan.planner import plan
from isthmus.plan.rank_windows import Measured, at_worst, expected, first_windows, next_windows
from isthmus.plan.scenario import Scenario
from isthmus.plan.simulate import simulate
from isthmus.plan.window import Hop
from isthmus.train.course import Course
from isthmus.train.crossing.courier import Courier
from isthmus.train.crossing.settlement import Seen, Settlement, Terms
from isthmus.train.crossing.words import Tally, pack_tally
from tests.plan.jobs import two_clouds
from tests.plan.scenarios import hop, pipeline, stage

# Sums and differences of these are exact.
times = st.integers(1, 600).map(lambda number: number / 64)


@dataclass
class Behind:
    """The stage behind, as far as the first stage sees it."""

    rtt_s: float
    sent: list[str] = field(default_factory=list)

    def send(self, stream: str, _make: object, **_: object) -> None:
        self.sent.append(stream)


def tally(busy_s: tuple[float, ...], hops: tuple[Hop, ...] = (), travel_s: float = 0.0) -> Tally:
    return Tally(step=0, loss_sum=1.0, squared_norms=(1.0,), busy_s=busy_s, hops=hops, travel_s=travel_s)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(times, min_size=2, max_size=4),
    st.lists(st.tuples(times, times), min_size=3, max_size=3),
    st.integers(1, 64),
)
def test_windows_are_those_that_workers_settle_on(
    busy_s: list[float], found: list[tuple[float, float]], num_microbatches: int
) -> None:
    hops = [Hop(forward_s=one, backward_s=one, latency_s=other) for one, other in found][: len(busy_s) - 1]
    first, *behind = hops
    down = Behind(rtt_s=2 * first.latency_s)
    settlement = Settlement(terms=Terms(num_microbatches=num_microbatches, max_in_flight=num_microbatches))
    travel_s = first.forward_s + first.latency_s
    settlement.on_tally(pack_tally(tally(tuple(busy_s[1:]), tuple(behind), travel_s)))
    _, verdict = settlement.settle(
        tally((busy_s[0],)), seen=Seen(gradient_travel_s=travel_s), up=None, down=cast("Courier", down)
    )
    measured = Measured(pass_s=tuple(one / num_microbatches for one in busy_s), hops=tuple(hops))
    scenario = pipeline(len(busy_s), num_microbatches)
    assert next_windows(scenario, measured) == verdict.windows
    assert down.sent == ["verdict"]


@given(st.integers(1, 5), st.integers(1, 20), st.sampled_from(list(Policy)))
def test_first_windows_are_those_that_workers_begin_with(p: int, m: int, policy: Policy) -> None:
    course = Course(num_stages=p, num_steps=1, num_microbatches=m, seed=0, max_in_flight=m, policy=policy)
    assert first_windows(pipeline(p, m, policy=policy)) == course.first_windows()


@pytest.mark.parametrize("ranks", [(2, 2, 2), (4, 1, 2), (1, 4, 1), (2, 3, 1)])
def test_ranks_with_measured_windows_are_as_busy_as_with_all_in_flight(ranks: tuple[int, ...]) -> None:
    """Stages of several ranks, each so much slower that all stages keep step."""
    plain = pipeline(3, 48, serialise_s=0.1, latency_s=2.0)
    loads = zip(plain.stages, ranks, strict=True)
    scenario = replace(
        plain,
        stages=tuple(
            replace(one, num_ranks=number, forward_s=float(number), backward_s=2.0 * number)
            for one, number in loads
        ),
    )
    found = simulate(scenario, num_steps=3).steps[-1]
    unbounded = simulate(replace(scenario, windows=(48, 48, 48))).steps[-1]
    assert found.duration_s <= 1.02 * unbounded.duration_s
    assert found.windows[0] * ranks[0] < 48


def test_what_is_expected_is_what_is_measured() -> None:
    coded = replace(pipeline(3, 24), hops=(hop(0.5, 1.0, coding_s=2.0),) * 2)
    slow = replace(coded.hops[0], line=replace(coded.hops[0].line, handling_s=0.25))
    scenario = replace(coded, hops=(slow, *coded.hops[1:]))
    assert next_windows(scenario, expected(scenario)) == simulate(scenario, num_steps=2).steps[-1].windows


@pytest.mark.parametrize("ranks", [(4, 4), (8, 2), (2, 8), (16, 16)])
def test_ranks_that_meet_on_the_line_have_what_hides_it(ranks: tuple[int, int]) -> None:
    """Half of each rank's time a line is taken, and all ranks send at once."""
    scenario = Scenario(
        stages=tuple(
            stage(index, forward_s=float(one), backward_s=2.0 * one, num_ranks=one)
            for index, one in enumerate(ranks)
        ),
        hops=(hop(1.5, 3.0),),
        num_microbatches=64,
    )
    planned = next_windows(scenario, expected(scenario))
    most = next_windows(scenario, at_worst(scenario))
    found = simulate(scenario, num_steps=3).steps[-1]
    widest = simulate(replace(scenario, windows=(64, 64))).steps[-1].duration_s
    as_planned = simulate(replace(scenario, windows=planned)).steps[-1].duration_s
    assert as_planned <= 1.02 * widest
    assert found.duration_s <= 1.02 * widest
    assert all(one <= other for one, other in zip(found.windows, most, strict=True))


@settings(deadline=None, max_examples=40)
@given(
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    num_microbatches=st.integers(1, 12),
    caps=st.integers(1, 6) | st.tuples(*[st.integers(1, 6)] * 3),
    policy=st.sampled_from(list(Policy)),
)
@example(ranks=[1, 2, 1], num_microbatches=2, caps=(1, 1, 2), policy=Policy.GPIPE)
def test_nobody_waits_for_what_cannot_come(
    ranks: list[int], num_microbatches: int, caps: int | tuple[int, ...], policy: Policy
) -> None:
    scenario = Scenario(
        stages=tuple(stage(index, num_ranks=one) for index, one in enumerate(ranks)),
        hops=(hop(0.25, 0.5),) * (len(ranks) - 1),
        num_microbatches=num_microbatches,
        policy=policy,
        max_in_flight=caps[: len(ranks)] if isinstance(caps, tuple) else caps,
    )
    steps = simulate(scenario, num_steps=2).steps
    assert len(steps) == 2
    each = caps if isinstance(caps, tuple) else (caps,) * 3
    assert all(window <= cap for window, cap in zip(steps[-1].windows, each, strict=False))


@pytest.mark.parametrize("ranks", [(1, 1), (4, 4), (8, 2), (2, 8)])
@pytest.mark.parametrize("memory", ["40 GiB", "9 GiB"])
def test_plan_and_simulation_take_the_same_time(ranks: tuple[int, int], memory: str) -> None:
    clouds = [f"cloud.{name}.ranks={one}" for name, one in zip(("east", "west"), ranks, strict=True)]
    clouds += [f"cloud.{name}.memory={memory}" for name in ("east", "west")]
    chosen = plan(two_clouds("strategy.kind=pipeline", "link.0.rtt=200 ms", *clouds), is_quick=True)
    assert chosen.scenario is not None
    assert chosen.decisions is not None
    assert chosen.scenario.max_in_flight == chosen.decisions.max_in_flight, "workers are bound alike"
    timeline = simulate(chosen.scenario, num_steps=4)
    assert chosen.estimate.step_s == pytest.approx(timeline.step_s, rel=1e-3)
    for step in timeline.steps:
        caps = chosen.scenario.max_in_flight or 64
        each = caps if isinstance(caps, tuple) else (caps, caps)
        assert all(window <= cap for window, cap in zip(step.windows, each, strict=True))
