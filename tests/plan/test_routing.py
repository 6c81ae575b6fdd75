"""Who takes which micro-batch."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from isthmus.plan.pipeline_parts import Routing


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 20))
def test_ranks_take_turns_and_another_begins_each_step(
    num_ranks: int, num_microbatches: int, step: int
) -> None:
    found = routing(num_ranks, num_microbatches=num_microbatches)
    ranks = [found.rank(0, item, step=step) for item in range(num_microbatches)]
    assert ranks == [(step + one) % num_ranks for one in range(num_microbatches)]
    taken = [found.share(0, rank, step=step) for rank in range(num_ranks)]
    assert sorted(one for share in taken for one in share) == list(range(num_microbatches))
    assert all(list(share) == sorted(share) for share in taken)
    assert all(ranks[one] == rank for rank, share in enumerate(taken) for one in share)


def test_both_rounds_of_an_evaluation_are_routed_alike() -> None:
    found = routing(2, num_validation=3)
    assert [found.rank(0, item, step=7, is_evaluation=True) for item in range(6)] == [0, 1, 0] * 2


def routing(*num_ranks: int, num_microbatches: int = 7, num_validation: int = 3) -> Routing:
    return Routing(
        num_ranks=num_ranks,
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
                found.rank(stage, number, step=step, is_evaluation=is_evaluation)
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
