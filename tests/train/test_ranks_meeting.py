"""Ranks that meet: only those of one world, whatever an earlier one has left behind."""

import json
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from isthmus.errors import RankLost
from isthmus.train.ranks import watch as watch_module
from isthmus.train.ranks.watch import Watch
from isthmus.wan.seat import Seat
from tests.train.test_watch import PATIENCE_S, Post, Words, drop, leave, meet, post

Answer = Callable[[socket.socket], object]


@contextmanager
def stranger(answer: Answer) -> Iterator[tuple[int, "queue.SimpleQueue[bytes]"]]:
    """A process that listens where an earlier leader did; gives its port, and what it hears."""
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            # The end of the test ends this wait.
            with suppress(OSError):
                while True:
                    kept.append(listener.accept()[0])
                    heard.put(kept[-1].recv(4096))
                    answer(kept[-1])

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        try:
            yield listener.getsockname()[1], heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join(PATIENCE_S)
            for one in kept:
                one.close()


def welcome(token: str) -> Answer:
    return lambda connection: connection.sendall(json.dumps({"welcome": token}).encode() + b"\n")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def finish_meeting(words: Words, followers: list[Post], started: "queue.SimpleQueue[bytes] | None") -> None:
    """Let followers meet words of an earlier world, and only then let their leader come."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, followers, words)
        if started is not None:
            assert json.loads(started.get(timeout=PATIENCE_S))["token"] == "old"
        leader = post(0)
        tokens = meet([leader], words)
        assert tokens * 2 == waiting.result(timeout=PATIENCE_S)
    assert tokens != ["old"]
    leave([leader, *followers])


@pytest.mark.parametrize(
    "answer",
    [socket.socket.close, lambda _: None, welcome("other"), lambda connection: connection.sendall(b"?\n")],
    ids=["closes", "silent", "another world", "another protocol"],
)
def test_who_listens_in_the_place_of_an_earlier_leader_is_left_for_the_new_one(answer: Answer) -> None:
    with stranger(answer) as (port, heard):
        finish_meeting(Words({"watch": f"{port} old"}), [post(1), post(2)], heard)


def test_an_earlier_leader_that_is_gone_is_passed_over() -> None:
    finish_meeting(Words({"watch": f"{free_port()} old"}), [post(1), post(2)], None)


def test_a_leader_that_never_comes_is_lost_in_one_sentence() -> None:
    with pytest.raises(RankLost, match=r"^rank 0 of cloud 'east' cannot be reached: it has not come$"):
        meet([post(1)], Words(), patience_s=0.3)
    with pytest.raises(RankLost, match=r"^rank 0 of cloud 'east' cannot be reached: Connection refused$"):
        meet([post(1)], Words({"watch": f"{free_port()} old"}), patience_s=0.3)


def test_a_leader_that_cannot_be_reached_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "_NOTE_AFTER_S", 0.1)
    with pytest.raises(RankLost):
        meet([post(1)], Words({"watch": f"{free_port()} old"}), patience_s=0.6)
    assert caplog.messages == [
        "rank 0 of cloud 'east' cannot be reached: Connection refused; trying again",
    ]


def test_the_leader_says_once_whom_it_waits_for_and_all_hear_of_its_giving_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "_NOTE_AFTER_S", 0.3)
    words, came = Words(), [post(0), post(2)]
    lost = "the ranks of this cloud have waited in vain for rank 1 of cloud 'east'"

    def wait(one: Post) -> str:
        with pytest.raises(RankLost) as caught, one.watch as watch:
            watch.meet(words, patience_s=1.5)
        return caught.value.message

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wait, came)) == [lost] * 2
    assert caplog.messages.count("waiting for rank 1 of cloud 'east'") == 1


def test_several_missing_ranks_are_named() -> None:
    watch = Watch(Seat(rank=0, num_ranks=5), cloud="east", end=lambda _: None)
    watch._met |= {2, 4}
    assert watch._missing() == "ranks 1, 3 of cloud 'east'"


def test_a_rank_that_comes_again_ends_the_world_that_has_not_missed_it() -> None:
    words, posts = Words(), [post(rank) for rank in range(3)]
    meet(posts, words)
    with pytest.raises(RankLost, match="rank 0 of cloud 'east' cannot be reached"):
        meet([post(1)], words, patience_s=1.0)
    lost = "rank 1 of cloud 'east' is lost: it has been started again"
    assert [one.reasons.get(timeout=PATIENCE_S) for one in posts] == [lost] * 3
    leave(posts, RuntimeError("over"))


def test_a_rank_lost_while_others_are_awaited_ends_the_wait() -> None:
    words, first, second = Words(), post(0), post(1)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(meet, [one], words) for one in (first, second)]
        while 1 not in first.watch._met:
            assert not waits[0].done()
            threading.Event().wait(0.02)
        drop(second)
        with pytest.raises(RankLost, match="rank 1 of cloud 'east' is lost: its process has ended"):
            waits[0].result(timeout=PATIENCE_S)
        leave([first], RuntimeError("over"))
        second.watch._all_met.set()
    leave([second], RuntimeError("over"))


@pytest.mark.parametrize(
    "line", [b"[" * 4000, b'{"rank": 1, "token": "\\ud800"}', b'{"rank": 9, "token": "%s"}', b'{"all": true}']
)
def test_what_a_stranger_says_to_the_leader_ends_only_its_own_connection(line: bytes) -> None:
    words, posts = Words(), [post(rank) for rank in range(3)]
    meet(posts, words)
    port, token = words.left["watch"].split()
    with socket.create_connection(("127.0.0.1", int(port)), PATIENCE_S) as connection:
        connection.sendall(line.replace(b"%s", token.encode()) + b"\n")
        assert connection.recv(4096) == b""
    leave(posts)
    assert all(one.watch.reason(timeout_s=0) is None for one in posts)
