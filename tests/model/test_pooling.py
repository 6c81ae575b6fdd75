"""What the ranks of a cloud have observed, put together: what one would have seen."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.codec.low_rank import Observed, TokenMeans
from isthmus.job.codec import BottleneckSpec
from isthmus.job.codec_steps import Anchor
from isthmus.model.bottleneck import Down
from tests.model.test_bottleneck import VOCABULARY_SIZE, WIDTH, Source


class Ranks:
    """Threads that add tensors up as the ranks of a cloud do."""

    def __init__(self, count: int) -> None:
        self._meeting = threading.Barrier(count)
        self._lock = threading.Lock()
        self._given: list[Tensor] = []

    def all_reduce(self, tensor: Tensor) -> None:
        with self._lock:
            self._given.append(tensor.clone())
        self._meeting.wait(10)
        # In one order, whoever came first.
        total = sum(sorted(self._given, key=lambda one: one.flatten().tolist()), torch.zeros_like(tensor))
        self._meeting.wait(10)
        tensor.copy_(total)
        self._given.clear()
        self._meeting.wait(10)


def pool(found: Sequence[Observed]) -> None:
    ranks = Ranks(len(found))
    with ThreadPoolExecutor(len(found)) as threads:
        for future in [threads.submit(one.pool, ranks.all_reduce) for one in found]:
            future.result()


def observed(*, by_id: bool, num_rows: int = VOCABULARY_SIZE) -> Observed:
    tokens = TokenMeans(vocabulary_size=VOCABULARY_SIZE, num_rows=num_rows, width=WIDTH)
    return Observed(width=WIDTH, tokens=tokens if by_id else None)


def state(one: Observed) -> dict[str, Tensor]:
    return dict(one.named_buffers())


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_pooled_means_and_covariances_are_those_of_one_who_saw_all(sizes: list[int], seed: int) -> None:
    source = Source(seed=seed)
    parts = [source.draw(batch=size) for size in sizes]
    found = [observed(by_id=False) for _ in parts]
    for one, (hidden, ids) in zip(found, parts, strict=True):
        one.add(hidden, ids, None)
    whole = observed(by_id=False)
    whole.add(torch.cat([hidden for hidden, _ in parts]), torch.cat([ids for _, ids in parts]), None)
    pool(found)
    for one in found:
        for name, tensor in state(whole).items():
            torch.testing.assert_close(state(one)[name], tensor, rtol=1e-4, atol=1e-3, msg=name)
            assert torch.equal(state(one)[name], state(found[0])[name]), name


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(0, 4), min_size=2, max_size=3), seed=st.integers(0, 99))
def test_pooled_means_of_ids_are_those_of_one_who_saw_all(sizes: list[int], seed: int) -> None:
    source = Source(seed=seed)
    parts = [source.draw(batch=size) for size in sizes]
    found, whole = [observed(by_id=True) for _ in parts], observed(by_id=True)
    for one, (hidden, ids) in zip(found, parts, strict=True):
        one.add(hidden, ids, None)
        whole.add(hidden, ids, None)
    pool(found)
    every = torch.arange(VOCABULARY_SIZE)
    assert whole.tokens is not None
    for one in found:
        assert one.tokens is not None
        assert torch.equal(one.tokens.weight_of(every), whole.tokens.weight_of(every))
        torch.testing.assert_close(
            one.tokens.deviations_of(every, one.mean_D), whole.tokens.deviations_of(every, whole.mean_D)
        )
        torch.testing.assert_close(one.tokens.covariance(one.mean_D), whole.tokens.covariance(whole.mean_D))
        assert torch.equal(one.tokens.row_of_V, found[0].tokens.row_of_V)  # type: ignore[union-attr]


def test_where_rows_are_few_the_most_frequent_ids_of_all_ranks_get_them() -> None:
    found = [observed(by_id=True, num_rows=2) for _ in range(2)]
    came = [[3, 3, 3, 5], [5, 5, 7, 7]]
    for one, ids in zip(found, came, strict=True):
        one.add(torch.ones(1, len(ids), WIDTH), torch.tensor([ids]), None)
    pool(found)
    for one in found:
        assert one.tokens is not None
        assert one.tokens.weight_of(torch.tensor([3, 5, 7])).tolist() == [3, 3, 0]
        assert one.tokens.num_K.tolist() == [3, 3, 2]


@pytest.mark.parametrize("anchor", Anchor)
def test_a_rank_that_saw_nothing_begins_like_the_others(anchor: Anchor) -> None:
    source, spec = Source(), BottleneckSpec(rank=4, anchor=anchor)
    downs = [Down(spec, width=WIDTH, vocabulary_size=VOCABULARY_SIZE, seed=3) for _ in range(3)]
    for _ in range(6):
        for down in downs[:2]:
            down.observe(*source.draw(), None)
    pool([down.observed for down in downs])
    first, *others = (down.begin() for down in downs)
    share = downs[0].explained_share
    assert share is not None
    assert share > 0.5
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())
