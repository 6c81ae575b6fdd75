"""Strangers at a port: few at a time, few from one source, and few words about them."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.wan.sockets import Complaints, evict, num_files_left, source_of

REASON = "rank 1 of east has not registered"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tell(
    complaints: Complaints, what: str = REASON, *, about: str = "10.0.0.7", kind: str = "refused"
) -> None:
    complaints.tell(what, about=about, kind=kind)


def test_a_complaint_is_told_once_in_ten_minutes_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    complaints = Complaints(logging.getLogger(), clock=clock)
    for _ in range(1201):
        tell(complaints)
        clock.now_s += 1.0
    assert caplog.messages == [REASON, *[f"{REASON} (599 times more before)"] * 2]


def test_another_kind_and_another_peer_are_news(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(logging.getLogger(), clock=Clock())
    for about, kind in [("10.0.0.7", "refused"), ("10.0.0.7", "hello"), ("10.0.0.8", "refused")] * 2:
        tell(complaints, about=about, kind=kind)
    assert caplog.messages == [REASON] * 3


def test_words_that_a_stranger_chooses_are_no_news_and_are_cut_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    complaints = Complaints(logging.getLogger(), clock=Clock())
    for number in range(5000):
        tell(complaints, f"{number} is not the name of a rank")
    assert caplog.messages == ["0 is not the name of a rank"]
    tell(complaints, "x" * 100_000, about="10.0.0.8")
    assert len(caplog.messages[-1]) < 1000


def test_strangers_from_many_addresses_fill_neither_the_log_nor_the_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    complaints = Complaints(logging.getLogger(), clock=clock)
    for number in range(5_000):
        tell(complaints, about=f"10.0.{number >> 8}.{number & 255}")
        clock.now_s += 0.01
    assert len(caplog.messages) == 30
    assert len(complaints._told) == 30
    clock.now_s += 60.0
    tell(complaints, about="10.9.9.9")
    assert len(caplog.messages) == 31


def test_the_oldest_of_the_source_that_has_most_must_go() -> None:
    pending = dict(enumerate("abbbac"))
    assert evict(pending, max_num=6, max_num_per_source=6) == []
    assert evict(pending, max_num=6, max_num_per_source=2) == [1]
    assert evict(pending, max_num=4, max_num_per_source=2) == [0]
    assert sorted(pending) == [2, 3, 4, 5]


@given(st.lists(st.sampled_from("aaaaaaaabc"), max_size=60), st.integers(1, 20), st.integers(1, 8))
def test_a_flood_of_one_source_never_pushes_out_a_lone_connection_of_another(
    sources: list[str], max_num: int, max_num_per_source: int
) -> None:
    pending: dict[tuple[int, str], str] = {}
    gone: list[tuple[int, str]] = []
    for number, source in enumerate(sources):
        pending[number, source] = source
        held = [one for _, one in pending]
        for victim in evict(pending, max_num=max_num, max_num_per_source=max_num_per_source):
            gone.append(victim)
            assert held.count(victim[1]) == max(held.count(one) for one in held)
            held.remove(victim[1])
        assert len(pending) <= max_num
        assert max(map(held.count, held)) <= max_num_per_source
    assert sorted([*pending, *gone]) == list(enumerate(sources))


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:0:7:1:2:3:4", "2001:db8:0:7::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_source_is_an_address_or_the_network_that_one_user_owns(host: str, source: str) -> None:
    assert source_of(host) == source


def test_descriptors_are_kept_for_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    assert num_files_left(num_reserved=256) == 768
    assert num_files_left(num_reserved=2000) == 1
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert num_files_left(num_reserved=256) > 1_000_000
