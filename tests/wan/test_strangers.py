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


def hear(complaints: Complaints, clock: Clock, *, num_seconds: int, what: str = REASON) -> list[str]:
    """What is told while the same complaint comes every second."""
    told = []
    for _ in range(num_seconds):
        told.append(complaints.words(what, about="10.0.0.7", kind="refused"))
        clock.now_s += 1.0
    return [words for words in told if words is not None]


def test_a_complaint_is_told_once_and_then_ever_more_rarely_with_its_number() -> None:
    clock = Clock()
    complaints = Complaints(logging.getLogger(), clock=clock)
    assert hear(complaints, clock, num_seconds=60) == [REASON]
    assert hear(complaints, clock, num_seconds=130) == [
        f"{REASON} (60 times in 60 s)",
        f"{REASON} (120 times in 120 s)",
    ]
    assert len(hear(complaints, clock, num_seconds=24 * 3600)) < 32


def test_another_kind_another_peer_and_one_that_has_rested_are_news() -> None:
    clock = Clock()
    complaints = Complaints(logging.getLogger(), clock=clock)
    assert hear(complaints, clock, num_seconds=5) == [REASON]
    assert complaints.words("no hello", about="10.0.0.7", kind="hello") == "no hello"
    assert complaints.words(REASON, about="10.0.0.8", kind="refused") == REASON
    assert complaints.words(REASON, about="10.0.0.7", kind="refused") is None
    clock.now_s += 31.0
    assert complaints.words(REASON, about="10.0.0.7", kind="refused") == REASON


def test_words_that_a_stranger_chooses_are_no_news_and_are_cut_short() -> None:
    complaints = Complaints(logging.getLogger(), clock=Clock())
    told = [
        complaints.words(f"{number} is not the name of a rank", about="10.0.0.7", kind="refused")
        for number in range(5000)
    ]
    assert told[0] == "0 is not the name of a rank"
    assert not any(told[1:])
    longest = complaints.words("x" * 100_000, about="10.0.0.8", kind="refused")
    assert longest is not None
    assert len(longest) < 1000


def test_strangers_from_many_addresses_fill_neither_the_log_nor_the_memory() -> None:
    clock = Clock()
    complaints = Complaints(logging.getLogger(), clock=clock)
    told = []
    for number in range(50_000):
        told.append(
            complaints.words("?", about=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", kind="k")
        )
        clock.now_s += 0.001
    lines = [words for words in told if words is not None]
    assert len(lines) == 30
    assert len(complaints._told) <= 1024
    clock.now_s += 60.0
    assert complaints.words("late", about="10.9.9.9", kind="k") == "late (and 49970 complaints about others)"


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
