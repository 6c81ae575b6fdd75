"""Who takes which micro-batch."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.pipeline_parts import Routing, route, shares

speeds = st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0]), min_size=1, max_size=5)


@given(speeds, st.integers(0, 40), st.integers(0, 9))
def test_every_microbatch_has_one_rank_and_those_of_a_rank_ascend(
    speeds: list[float], num_microbatches: int, step: int
) -> None:
    ranks = route(speeds=speeds, num_microbatches=num_microbatches, step=step)
    taken = shares(ranks, num_ranks=len(speeds))
    assert sorted(one for share in taken for one in share) == list(range(num_microbatches))
    assert all(list(share) == sorted(share) for share in taken)
    assert all(ranks[one] == rank for rank, share in enumerate(taken) for one in share)


@settings(max_examples=40)
@given(st.lists(st.sampled_from([1.0, 1.7, 3.0]), min_size=1, max_size=3), st.integers(0, 6))
def test_no_other_choice_ends_sooner(speeds: list[float], num_microbatches: int) -> None:
    def takes_s(ranks: tuple[int, ...]) -> float:
        counts = Counter(ranks)
        return max((counts[rank] / speed for rank, speed in enumerate(speeds)), default=0.0)

    best_s = min(takes_s(one) for one in product(range(len(speeds)), repeat=num_microbatches))
    assert takes_s(route(speeds=speeds, num_microbatches=num_microbatches, step=0)) == pytest.approx(best_s)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 20))
def test_equal_ranks_take_turns_and_another_begins_each_step(
    num_ranks: int, num_microbatches: int, step: int
) -> None:
    ranks = route(speeds=[2.0] * num_ranks, num_microbatches=num_microbatches, step=step)
    assert ranks == tuple((step + one) % num_ranks for one in range(num_microbatches))


def test_a_rank_of_twice_the_speed_gets_twice_as_many() -> None:
    assert Counter(route(speeds=[1.0, 2.0, 1.0], num_microbatches=40, step=3)) == {0: 10, 1: 20, 2: 10}


@pytest.mark.parametrize("speeds", [[], [1.0, 0.0], [1.0, -1.0]])
def test_ranks_without_speed_are_refused(speeds: list[float]) -> None:
    with pytest.raises(ValueError, match="speeds"):
        route(speeds=speeds, num_microbatches=4, step=0)


def routing(*num_ranks: int, num_microbatches: int = 7, num_validation: int = 3) -> Routing:
    return Routing(
        speeds=tuple((1.0,) * number for number in num_ranks),
        num_microbatches=num_microbatches,
        num_validation_microbatches=num_validation,
    )


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.integers(1, 12), st.integers(0, 30))
def test_who_is_sent_a_micro_batch_is_started_with_it_and_knows_the_sender(
    num_ranks: list[int], num_microbatches: int, step: int
) -> None:
    found = routing(*num_ranks, num_microbatches=num_microbatches)
    for is_evaluation, count in ((False, num_microbatches), (True, 3)):
        for number in range(count):
            way = [
                found.ranks(stage, step=step, is_evaluation=is_evaluation)[number]
                for stage in range(len(num_ranks))
            ]
            for stage, rank in enumerate(way):
                assert number in found.share(stage, rank, step=step, is_evaluation=is_evaluation)
                for neighbour in {stage - 1, stage + 1} & set(range(len(way))):
                    assert way[neighbour] in found.peers(stage, rank, neighbour=neighbour)


def test_peers_know_each_other_and_leaders_always_do() -> None:
    found = routing(4, 3, num_microbatches=2, num_validation=0)
    for rank, other in product(range(4), range(3)):
        forth = other in found.peers(0, rank, neighbour=1)
        assert forth == (rank in found.peers(1, other, neighbour=0))
    assert routing(4, 4).peers(0, 2, neighbour=1) == (2,)
    assert 0 in routing(2, 2, num_microbatches=1).peers(0, 0, neighbour=1)
