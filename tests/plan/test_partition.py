"""The partition is the best one there is: held to all of them, one by one."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.search import partition
from isthmus.plan.search.partition import Partition, best_partitions, measure
from isthmus.plan.search.walks import Offer, Passage, Problem, Route

NUM_LAYERS = st.integers(1, 6)
TIMES = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 7.0])


def offer(
    layer_s: list[float], *, rounds: int, most: int, update_s: float = 0.0, room: float = math.inf
) -> Offer:
    """A cloud with a time for each layer, which holds a limited number of them; `room` is for activations."""
    ends = np.concatenate([[0.0], np.cumsum(layer_s)])
    once_s = ends[None, :] - ends[:, None]
    num_held = np.arange(len(ends))[None, :] - np.arange(len(ends))[:, None]
    once_s = np.where((num_held >= 1) & (num_held <= most), once_s, np.inf)
    held = np.floor(room / np.maximum(num_held, 1)) if math.isfinite(room) else np.full(once_s.shape, np.inf)
    once_s = np.where(held >= 1, once_s, np.inf)
    return Offer(once_s=once_s, pace_s=(rounds - 1) * once_s + update_s, held=held)


@st.composite
def problems(draw: st.DrawFn, max_clouds: int = 4) -> Problem:
    num_layers, num_clouds = draw(NUM_LAYERS), draw(st.integers(1, max_clouds))
    layer_s = draw(st.lists(TIMES, min_size=num_layers, max_size=num_layers))
    offers = [
        offer(
            [one * draw(TIMES) for one in layer_s],
            rounds=draw(st.integers(2, 9)),
            most=draw(st.integers(1, num_layers)),
            update_s=draw(st.sampled_from([0.0, 1.0])),
            room=draw(st.sampled_from([2.0, 4.0, 6.0, math.inf])),
        )
        for _ in range(num_clouds)
    ]
    pairs = list(permutations(range(num_clouds), 2))
    linked = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    passages, one_way = (
        {pair: Passage(once_s=draw(TIMES), pace_s=draw(TIMES) * 4) for pair in pairs}
        for pairs in (linked, [pair for pair in linked if draw(st.booleans())])
    )
    return Problem(
        offers=offers,
        passages=passages,
        num_microbatches=draw(st.integers(2, 16)),
        uses_all=draw(st.booleans()),
        num_frozen=draw(st.integers(0, num_layers)),
        one_way=one_way,
        has_narrow_windows=draw(st.booleans()),
    )


def every_route(problem: Problem, *, in_row: bool = False) -> Iterator[Route]:
    num_clouds, num_layers = len(problem.offers), problem.num_layers
    for size in range(1, min(num_clouds, num_layers) + 1):
        for order in permutations(range(num_clouds), size):
            if any(pair not in problem.passages for pair in pairwise(order)):
                continue
            if (problem.uses_all and size < num_clouds) or (in_row and list(order) != sorted(order)):
                continue
            for inner in combinations(range(1, num_layers), size - 1):
                route = list(zip(order, (*inner, num_layers), strict=True))
                if all(is_possible(problem, *ends) for ends in pairwise(route)):
                    yield route


def is_possible(problem: Problem, first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Some links do not take what comes from frozen layers."""
    return first[1] > problem.num_frozen or (first[0], second[0]) in problem.one_way


def brute_force_s(problem: Problem, *, in_row: bool = False) -> float:
    every = (measure(problem, route).step_s for route in every_route(problem, in_row=in_row))
    return min(every, default=math.inf)


def best_s(found: list[Partition]) -> float:
    return found[0].step_s if found else math.inf


@settings(max_examples=300, deadline=None)
@given(problems())
def test_it_equals_brute_force(problem: Problem) -> None:
    found_s, least_s = best_s(best_partitions(problem, tolerance=0.001)), brute_force_s(problem)
    window = problem.window(2)
    is_bounded = any(one.turns(problem.num_microbatches, window).any() for one in problem.offers)
    assert found_s == pytest.approx(least_s, rel=0.001 if is_bounded else 1e-9)
    assert found_s >= least_s * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_many_clouds_keep_their_order(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "MAX_ANY_ORDER", 0)
        # Where clouds may be skipped, nobody knows how many stages are left.
        problem = replace(problem, has_narrow_windows=problem.has_narrow_windows and problem.uses_all)
        found = best_partitions(problem)
    assert best_s(found) == pytest.approx(brute_force_s(problem, in_row=True), rel=0.001)


@settings(max_examples=60, deadline=None)
@given(problems(), st.floats(0, 100))
def test_a_cutoff_leaves_nothing_or_the_best(problem: Problem, cutoff_s: float) -> None:
    best = brute_force_s(problem)
    found = best_partitions(problem, cutoff_s=cutoff_s)
    if best < cutoff_s * 0.998:
        assert best_s(found) == pytest.approx(best, rel=0.001)
    if best >= cutoff_s:
        assert not found


@settings(max_examples=60, deadline=None)
@given(problems())
def test_every_partition_is_one(problem: Problem) -> None:
    for one in best_partitions(problem, num_found=99):
        route = list(zip(one.clouds, one.stops, strict=True))
        assert route in list(every_route(problem))
        assert measure(problem, route) == one
        assert math.isfinite(one.step_s)
        assert [layer for layers in one.ranges for layer in layers] == list(range(problem.num_layers))


def test_the_slow_link_is_not_used() -> None:
    offers = [offer([1.0] * 6, rounds=16, most=2)] * 3
    slow, fast = Passage(once_s=5, pace_s=50), Passage(once_s=1, pace_s=5)
    passages = {(0, 1): slow, (1, 0): slow, (0, 2): fast, (2, 0): fast, (1, 2): fast, (2, 1): fast}
    best, *_ = best_partitions(Problem(offers=offers, passages=passages, num_microbatches=16))
    assert best.clouds[1] == 2
    assert best.stops == (2, 4, 6)


def test_a_fast_cloud_takes_more_layers() -> None:
    offers = [offer([3.0] * 8, rounds=32, most=8), offer([1.0] * 8, rounds=32, most=8)]
    passage = Passage(once_s=1, pace_s=1)
    best, *_ = best_partitions(Problem(offers=offers, passages={(0, 1): passage}, num_microbatches=32))
    assert best.stops == (2, 8)


def test_a_link_that_costs_more_than_a_cloud_brings_is_left_alone() -> None:
    offers = [offer([1.0] * 4, rounds=8, most=4)] * 2
    passages = {(0, 1): Passage(once_s=9, pace_s=99)}
    best, *_ = best_partitions(Problem(offers=offers, passages=passages, num_microbatches=8))
    assert best.clouds in ((0,), (1,))


def test_a_cut_behind_frozen_layers_is_taken_where_the_way_back_is_slow() -> None:
    offers = [offer([1.0] * 8, rounds=16, most=8)] * 2
    there_and_back, there = Passage(once_s=2, pace_s=200), Passage(once_s=1, pace_s=5)
    free, frozen = (
        best_partitions(
            Problem(
                offers=offers,
                passages={(0, 1): there_and_back},
                num_microbatches=16,
                uses_all=True,
                num_frozen=number,
                one_way={(0, 1): there},
            )
        )[0]
        for number in (0, 3)
    )
    assert frozen.stops == (3, 8)
    assert frozen.step_s < free.step_s


def test_a_stage_without_room_for_the_round_trip_takes_fewer_layers() -> None:
    passages = {(0, 1): Passage(once_s=20, pace_s=1)}
    offers = [offer([1.0] * 8, rounds=32, most=8, room=room) for room in (16, math.inf)]
    best, *_ = best_partitions(Problem(offers=offers, passages=passages, num_microbatches=32, uses_all=True))
    assert best.stops[0] < 4
