"""Clouds that hail each other: at a start, and where one of them trains already."""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.errors import PeerLost
from isthmus.plan.types import Member
from isthmus.train.rejoin import Hail, Rejoin, hail_all, say
from isthmus.wan.link import Link
from isthmus.wan.memory import MemoryLink

PATIENCE_S = 30.0
TRAINING = Hail(is_training=True, epoch=3, config="agreed")


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    with MemoryLink("east", "west") as link:
        yield link.end("east"), link.end("west")


class Training:
    """A cloud that trains, and has lost the other one."""

    def __init__(self, link: Link) -> None:
        self.met: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self.notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.rejoin = Rejoin(
            cloud="east",
            renew=lambda _member, _reason: link,
            hail=TRAINING,
            on_met=self.met.put,
            note=self.notes.put,
        )


def test_where_none_trains_all_start_together(ends: tuple[Link, Link]) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda link: hail_all({"other": link}, on_waiting=lambda _: None), ends)
        assert list(found) == [None, None]


def test_a_cloud_that_comes_back_hears_what_is_agreed_and_is_met_once_it_takes_part(
    ends: tuple[Link, Link],
) -> None:
    here, there = ends
    training = Training(here)
    with training.rejoin:
        training.rejoin.expect(Member("west"), PeerLost("west", "it is silent"))
        found = hail_all({"east": there}, on_waiting=lambda _: None)
        assert found is not None
        assert (found.clouds, found.hail.config, found.hail.epoch, found.life > 0) == (
            ("east",),
            "agreed",
            4,
            True,
        )
        # It builds its model meanwhile, and nobody waits for it.
        assert training.met.empty()
        say(there, Hail(is_training=True, epoch=4, config=found.hail.config))
        assert training.met.get(timeout=PATIENCE_S) is here
    assert "the others continue" in training.notes.get()
    assert training.notes.get() == "cloud 'west' is there again"


def test_two_that_train_meet_at_once_and_one_of_another_run_is_left_out(ends: tuple[Link, Link]) -> None:
    training = Training(ends[0])
    with training.rejoin:
        training.rejoin.begin([], [Member("west")])
        say(ends[1], Hail(is_training=True, config="another"))
        assert "trains another run" in training.notes.get(timeout=PATIENCE_S)
    assert training.met.empty()


def test_who_waits_for_nobody_any_more_ends() -> None:
    with MemoryLink("east", "west") as link, Training(link.end("east")).rejoin as rejoin:
        rejoin.begin([], [Member("west")])


def test_a_cloud_that_does_not_come_is_named(ends: tuple[Link, Link]) -> None:
    with pytest.raises(PeerLost, match="cloud 'west' is lost: it has not come back within"):
        hail_all({"west": ends[0]}, on_waiting=lambda _: None, until_s=0.0)
