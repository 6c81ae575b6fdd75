"""The order of samples, and the thread that reads ahead."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.train.data.samples import Order
from isthmus.train.data.training_data import Prefetch

orders = st.builds(Order, num_samples=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1))


@settings(deadline=None, max_examples=40)
@given(orders, st.integers(0, 1000))
def test_an_epoch_has_every_sample_once(order: Order, epoch: int) -> None:
    indices = order.permute(np.arange(order.num_samples), epoch=epoch)
    assert sorted(indices) == list(range(order.num_samples))


@settings(deadline=None, max_examples=40)
@given(orders, st.integers(1, 50), st.lists(st.integers(1, 50), max_size=5))
def test_it_does_not_matter_where_a_run_was_stopped(order: Order, first: int, counts: list[int]) -> None:
    whole = order.take(0, first + sum(counts))
    read = order.take(0, first)
    for count in counts:
        read += order.take(len(read), count)
    assert read == whole
    assert [one.epoch for one in whole] == [number // order.num_samples for number in range(len(whole))]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    positions = np.arange(1000)
    orders = [
        Order(num_samples=1000, seed=seed).permute(positions, epoch=epoch)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4
    for order in orders:
        # Of a fair shuffle 10 of 1000 neighbours stay within 5 of each other, give or take 3.
        assert np.count_nonzero(np.abs(np.diff(order)) <= 5) < 30
        assert abs(np.corrcoef(positions, order)[0, 1]) < 0.15


def test_the_order_never_changes() -> None:
    order = Order(num_samples=10, seed=7)
    assert order.permute(np.arange(10), epoch=3).tolist() == [3, 6, 1, 5, 0, 9, 2, 7, 4, 8]


def test_a_large_order_needs_no_memory() -> None:
    picks = Order(num_samples=10**12, seed=0).take(10**12 - 2, 3)
    assert [one.epoch for one in picks] == [0, 0, 1]
    assert len(set(picks)) == 3


def test_prefetch_gives_all_items_and_then_ends() -> None:
    with Prefetch(iter(range(10)), depth=3) as items:
        assert list(items) == list(range(10))
        assert list(items) == []


def test_prefetch_is_bounded() -> None:
    made = []

    def make() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    with Prefetch(make(), depth=3) as items:
        assert next(items) == 0
    assert len(made) <= 4


def test_errors_surface_where_items_are_read() -> None:
    def make() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    with Prefetch(make(), depth=2) as items:
        assert next(items) == 1
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(items)


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    items = Prefetch(iter(range(10)), depth=2)
    assert threading.active_count() == before + 1
    items.close()
    items.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="after its end"):
        next(items)
