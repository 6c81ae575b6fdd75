"""The search finds the best setting and partition there are: held to all of them, one by one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.scenario import HopLoad, Line
from isthmus.plan.search.partition import measure
from isthmus.plan.search.settings import (
    Constraints,
    Setting,
    StageTable,
    build_problem,
    divisors,
    measure_with,
    passage,
    search,
)
from isthmus.plan.search.walks import Route

NUM_SEQUENCES = 12
NUM_LEVELS = 3


@dataclass(frozen=True, kw_only=True)
class ToyCloud:
    """Speed and memory of one rank, in layers of one sequence per second, and in layers' weights."""

    num_ranks: int
    speed: float
    memory: float


@dataclass(frozen=True, kw_only=True)
class ToySupply:
    """Equal layers; every level halves what activations take and adds a fifth to the time of a pass."""

    clouds: tuple[ToyCloud, ...]
    hops: dict[tuple[int, int], Line]
    num_layers: int
    num_frozen: int = 0

    @property
    def num_ranks(self) -> tuple[int, ...]:
        return tuple(cloud.num_ranks for cloud in self.clouds)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.hops)

    def table(self, cloud: int, setting: Setting) -> StageTable:
        one = self.clouds[cloud]
        sequences = NUM_SEQUENCES / setting.num_microbatches
        ends = np.arange(self.num_layers + 1.0)
        num_held = np.maximum(ends[None, :] - ends[:, None], 0.0)
        pass_s = (0.01 + sequences / one.speed) * num_held * (1 + 0.2 * setting.level)
        room = one.memory - num_held
        flight = np.maximum(num_held, 1.0) * sequences * 0.25 / 2**setting.level
        return StageTable(
            forward_s=pass_s / 3,
            backward_s=pass_s * 2 / 3,
            update_s=0.1 * num_held,
            held=np.maximum(0.0, np.floor(room / flight)),
        )

    def hop(self, pair: tuple[int, int], setting: Setting, *, has_gradient: bool = True) -> HopLoad:
        num_bytes = 1000 * NUM_SEQUENCES // setting.num_microbatches
        back_bytes = num_bytes if has_gradient else 0
        return HopLoad(line=self.hops[pair], forward_bytes=num_bytes, backward_bytes=back_bytes)


@st.composite
def supplies(draw: st.DrawFn) -> ToySupply:
    clouds = draw(
        st.lists(
            st.builds(
                ToyCloud,
                num_ranks=st.sampled_from([1, 2, 3]),
                speed=st.sampled_from([1.0, 2.0, 5.0]),
                memory=st.sampled_from([1.5, 3.0, 5.0, 9.0, 99.0]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    pairs = list(permutations(range(len(clouds)), 2))
    linked = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    line = st.builds(
        Line,
        down_bps=st.sampled_from([2e3, 2e4, 2e6]),
        up_bps=st.sampled_from([2e3, 2e4, 2e6]),
        latency_s=st.sampled_from([0.0, 0.3, 2.0]),
    )
    hops = {pair: draw(line) for pair in linked}
    num_layers = draw(st.integers(1, 5))
    num_frozen = draw(st.integers(0, num_layers))
    return ToySupply(clouds=tuple(clouds), hops=hops, num_layers=num_layers, num_frozen=num_frozen)


def every_route(supply: ToySupply) -> Iterator[Route]:
    for size in range(1, min(len(supply.clouds), supply.num_layers) + 1):
        for order in permutations(range(len(supply.clouds)), size):
            if all(pair in supply.hops for pair in pairwise(order)):
                for inner in combinations(range(1, supply.num_layers), size - 1):
                    yield list(zip(order, (*inner, supply.num_layers), strict=True))


def brute_force_s(supply: ToySupply) -> float:
    settings_ = [
        Setting(num_microbatches=number, level=level)
        for number, level in product(divisors(NUM_SEQUENCES), range(NUM_LEVELS))
    ]
    problems = [build_problem(supply, setting, Constraints()) for setting in settings_]
    return min(
        (measure(problem, route).step_s for problem, route in product(problems, list(every_route(supply)))),
        default=math.inf,
    )


@settings(max_examples=150, deadline=None)
@given(supplies(), st.booleans())
def test_it_equals_brute_force(supply: ToySupply, keeps_every_set: bool) -> None:
    found = search(
        supply,
        microbatches=divisors(NUM_SEQUENCES),
        num_levels=NUM_LEVELS,
        keeps_every_set=keeps_every_set,
    )
    best_s = found[0].partition.step_s if found else math.inf
    assert best_s == pytest.approx(brute_force_s(supply), rel=0.001)


def two_clouds(**changes: float) -> ToySupply:
    cloud = ToyCloud(num_ranks=1, speed=2.0, memory=changes.get("memory", 99.0))
    line = Line(down_bps=1e6, up_bps=1e6, latency_s=0.1)
    return ToySupply(clouds=(cloud, cloud), hops={(0, 1): line, (1, 0): line}, num_layers=4)


def test_memory_is_spared_only_where_it_helps() -> None:
    def levels(supply: ToySupply) -> set[int]:
        return {one.setting.level for one in search(supply, microbatches=[4], num_levels=3)}

    assert levels(two_clouds(memory=99.0)) == {0}
    assert max(levels(two_clouds(memory=3.0))) > 0


def test_a_row_with_its_stops_is_the_only_one() -> None:
    constraints = Constraints(in_row=True, stops=(3, 4))
    found = search(two_clouds(), microbatches=[2, 4], num_levels=1, constraints=constraints)
    assert {(one.partition.clouds, one.partition.stops) for one in found} == {((0, 1), (3, 4))}


def test_cuts_only_where_they_are_allowed() -> None:
    constraints = Constraints(cuts=frozenset({1}), uses_all=True)
    found = search(two_clouds(), microbatches=[4], num_levels=1, constraints=constraints)
    assert {one.partition.stops for one in found} == {(1, 4)}


def test_milder_codecs_can_be_measured_on_the_same_partition() -> None:
    supply = two_clouds()
    setting = Setting(num_microbatches=4)
    problem = build_problem(supply, setting, Constraints(uses_all=True))
    best = search(supply, microbatches=[4], num_levels=1, constraints=Constraints(uses_all=True))[0].partition
    hop = supply.hop((0, 1), setting)
    assert measure_with(problem, best, [hop], [1, 1]) == best
    heavy = HopLoad(line=hop.line, forward_bytes=10**7, backward_bytes=0)
    assert measure_with(problem, best, [heavy], [1, 1]).pace_s == passage(heavy, 4).pace_s > best.pace_s


def test_handling_counts_as_latency_does() -> None:
    plain = two_clouds().hop((0, 1), Setting(num_microbatches=4))
    slow = replace(plain, line=replace(plain.line, handling_s=0.5))
    assert passage(slow, 4).once_s == pytest.approx(passage(plain, 4).once_s + 1.0)
    assert passage(slow, 4).pace_s == passage(plain, 4).pace_s


def test_levels_may_be_searched_from_a_later_one_on() -> None:
    found = search(two_clouds(memory=99.0), microbatches=[4], num_levels=3, first_level=1)
    assert {one.setting.level for one in found} == {1}


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
