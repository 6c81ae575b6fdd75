"""Ranks that meet: only those of one cloud, whatever an earlier world has left behind and whoever comes."""

import errno
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from pydantic import JsonValue

from isthmus.errors import RankLost
from isthmus.job import Address
from isthmus.train import watch as watch_module
from isthmus.train.watch import Watch, prove, publish_port
from isthmus.wan.handshake import RankSpec
from isthmus.wan.packet import Abort, Close, ControlFrame, Notice, decode, encode
from isthmus.wan.sockets import listening_sockets
from tests.train.test_watch import PATIENCE_S, PORT, SECRET, Post, Words, drop, leave, meet, meet_one, post

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


def line_of(frame: ControlFrame) -> bytes:
    return encode(frame) + b"\n"


def notice(**values: JsonValue) -> bytes:
    return line_of(Notice(values))


def saying(line: bytes) -> Answer:
    return lambda connection: connection.sendall(line)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def words_of_a_leader_at(port: int) -> Words:
    words = Words()
    publish_port(words, port, SECRET)
    return words


def finish_meeting(words: Words, followers: list[Post], started: "queue.SimpleQueue[bytes] | None") -> None:
    """Let followers meet words of an earlier world, and only then let their leader come."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, followers, words)
        if started is not None:
            first = decode(started.get(timeout=PATIENCE_S).splitlines()[0])
            assert isinstance(first, Notice)
            assert first.values["rank"] in (1, 2)
        leader = post(0)
        assert meet([leader], words) * 2 == waiting.result(timeout=PATIENCE_S)
    leave([leader, *followers])


@pytest.mark.parametrize(
    "answer",
    [
        socket.socket.close,
        lambda _: None,
        saying(notice(nonce="n", proof=prove(b"of cloud west", "leader", 1, "n", "n"))),
        saying(notice(welcome=True)),
        saying(notice(nonce=1, proof="?").replace(b"?", rb"\ud800")),
        saying(b"x" * 100_000),
    ],
    ids=["closes", "silent", "another cloud", "without proof", "no text", "endless"],
)
def test_who_listens_in_the_place_of_an_earlier_leader_is_left_for_the_new_one(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "_HANDSHAKE_S", 0.5)
    with stranger(answer) as (port, heard):
        finish_meeting(words_of_a_leader_at(port), [post(1), post(2)], heard)


def test_an_earlier_leader_that_is_gone_is_passed_over() -> None:
    finish_meeting(words_of_a_leader_at(free_port()), [post(1), post(2)], None)


@pytest.mark.parametrize("left", ["{port} old", "{port}", "", "x y", "99999999999 y", "4711 \ud800"])
def test_words_in_a_launchers_store_count_only_with_a_proof(left: str) -> None:
    with stranger(lambda _: None) as (port, heard):
        words = Words({"watch": left.format(port=port).encode(errors="replace").decode()})
        finish_meeting(words, [post(1), post(2)], None)
        assert heard.empty()


def test_a_stranger_that_writes_into_a_launchers_store_delays_a_meeting_by_a_second_at_most() -> None:
    words, leader = Words(), post(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, [leader], words)
        while "watch" not in words.left:
            assert not waiting.done()
            threading.Event().wait(0.02)
        words.left["watch"] = "1 forged"
        followers = [post(1), post(2)]
        assert meet(followers, words) == [PORT, PORT]
        waiting.result(timeout=PATIENCE_S)
    leave([leader, *followers])


def test_a_rank_with_another_key_never_joins() -> None:
    words, leader = Words(), post(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, [leader], words)
        while "watch" not in words.left:
            threading.Event().wait(0.02)
        port = int(words.left["watch"].split()[0])
        foreign = Words()
        publish_port(foreign, port, b"of cloud west")
        with pytest.raises(
            RankLost, match="another process, or a rank with another key, listens at its port"
        ):
            meet([post(1, secret=b"of cloud west")], foreign, patience_s=0.5)
        assert not leader.watch._met
        followers = [post(1), post(2)]
        meet(followers, words)
        waiting.result(timeout=PATIENCE_S)
    leave([leader, *followers])


def test_without_a_launchers_store_ranks_meet_at_the_masters_address_and_nowhere_else() -> None:
    master = Address(host="127.0.0.1", port=free_port())
    watches = [
        Watch(
            RankSpec(rank=rank, num_ranks=2, master=master), cloud="east", secret=SECRET, end=lambda _: None
        )
        for rank in range(2)
    ]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(watches[0].meet, None, patience_s=PATIENCE_S)
        watches[1].meet(None, patience_s=PATIENCE_S)
        first.result(timeout=PATIENCE_S)
    places = {one.getsockname() for one in listening_sockets() if one.getsockname()[1] == master.port}
    assert places == {("127.0.0.1", master.port)}
    watches[0].announce_store(7)
    assert watches[1].await_store(patience_s=PATIENCE_S) == 7
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda watch: watch.__exit__(None, None, None), watches))


def test_a_port_that_stays_taken_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_PORT_TAKEN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        master = Address(host="127.0.0.1", port=taken.getsockname()[1])
        spec = RankSpec(rank=0, num_ranks=2, master=master)
        watch = Watch(spec, cloud="east", secret=SECRET, end=lambda _: None)
        reason = f"rank 0 of cloud 'east' cannot listen at {master}: Address already in use"
        with pytest.raises(RankLost, match=reason):
            watch.meet(None, patience_s=PATIENCE_S)


def test_a_leader_that_never_comes_is_lost_in_one_sentence() -> None:
    with pytest.raises(RankLost, match=r"^rank 0 of cloud 'east' cannot be reached: it has not come$"):
        meet([post(1)], Words(), patience_s=0.3)
    with pytest.raises(RankLost, match=r"^rank 0 of cloud 'east' cannot be reached: Connection refused$"):
        meet([post(1)], words_of_a_leader_at(free_port()), patience_s=0.3)


def test_a_leader_that_cannot_be_reached_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "_NOTE_AFTER_S", 0.1)
    with pytest.raises(RankLost):
        meet([post(1)], words_of_a_leader_at(free_port()), patience_s=0.6)
    assert caplog.messages == [
        "rank 0 of cloud 'east' cannot be reached: Connection refused; trying again",
    ]


def test_the_leader_says_once_whom_it_waits_for_and_all_hear_of_its_giving_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "_NOTE_AFTER_S", 0.3)
    words, came = Words(), [post(0), post(2)]
    lost = "rank 1 of cloud 'east' has not come"

    def wait(one: Post) -> str:
        with pytest.raises(RankLost) as caught, one.watch as watch:
            meet_one(watch, words, 1.5)
        return caught.value.message

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wait, came)) == [lost] * 2
    assert caplog.messages.count("rank 1 of cloud 'east' has not come; trying again") == 1


def test_several_missing_ranks_are_named() -> None:
    watch = Watch(RankSpec(rank=0, num_ranks=5), cloud="east", secret=SECRET, end=lambda _: None)
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
        while not second.watch._peers:
            assert not waits[0].done()
            threading.Event().wait(0.02)
        drop(second)
        with pytest.raises(RankLost, match="rank 1 of cloud 'east' is lost: its process has ended"):
            waits[0].result(timeout=PATIENCE_S)
        leave([first], RuntimeError("over"))
        second.watch._all_met.set()
    leave([second], RuntimeError("over"))


def is_closed(one: socket.socket) -> bool:
    """Whether a connection is closed, behind heartbeats."""
    with suppress(ConnectionError):
        while one.recv(4096):
            continue
    return True


def port_of(words: Words) -> int:
    return int(words.left["watch"].split()[0])


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 4000,
        notice(rank=1, token="old"),
        notice(rank=1, nonce="n") + notice(proof="?").replace(b"?", rb"\ud800"),
        notice(rank=1, nonce="n") + notice(proof="00"),
        notice(rank=1, nonce="n") + notice(rank=2, nonce="n"),
        notice(rank=9, nonce="n"),
        notice(rank=True, nonce="n"),
        notice(rank=1, nonce="n" * 1000),
        notice(store=1),
        line_of(Close()),
        line_of(Abort("east", "I say so")),
        b"x" * 100_000,
    ],
)
def test_what_a_stranger_says_to_the_leader_ends_only_its_own_connection(line: bytes) -> None:
    words, posts = Words(), [post(rank) for rank in range(3)]
    meet(posts, words)
    place = ("127.0.0.1", port_of(words))
    with socket.create_connection(place, PATIENCE_S) as connection, suppress(ConnectionError):
        connection.sendall(line + b"\n")
        while connection.recv(4096):
            continue
    leave(posts)
    assert all(one.watch.reason(timeout_s=0) is None for one in posts)


def test_a_proof_that_was_overheard_is_of_no_use_again() -> None:
    words, posts = Words(), [post(rank) for rank in range(3)]
    meet(posts, words)
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", port_of(words)), PATIENCE_S) as connection:
            connection.sendall(notice(rank=1, nonce="n"))
            lines = connection.makefile("rb")
            answers = (decode(line) for line in lines)
            answer = next(one for one in answers if isinstance(one, Notice))
            # What rank 0 has said is no proof of another rank.
            connection.sendall(notice(proof=answer.values["proof"]))
            assert not any(isinstance(one, Notice) for one in answers)
    leave(posts)
    assert all(one.watch.reason(timeout_s=0) is None for one in posts)


def test_strangers_at_the_watch_are_few(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "_HANDSHAKE_S", 1000.0)
    words, posts = Words(), [post(rank) for rank in range(3)]
    meet(posts, words)
    place = ("127.0.0.1", port_of(words))
    lone = socket.create_connection(place, PATIENCE_S, source_address=("127.0.0.2", 0))
    many = [socket.create_connection(place, PATIENCE_S) for _ in range(200)]
    assert all(is_closed(one) for one in many[:-16])
    unproven = [channel.host for channel in posts[0].watch._unproven]
    assert sorted(unproven) == ["127.0.0.1"] * 16 + ["127.0.0.2"]
    for one in [*many, lone]:
        one.close()
    assert sum("closed a connection from 127.0.0.1" in line for line in caplog.messages) == 1
    leave(posts)
    assert all(one.watch.reason(timeout_s=0) is None for one in posts)


def test_strangers_at_the_watch_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    words, posts = Words(), [post(rank) for rank in range(3)]
    meet(posts, words)
    monkeypatch.setattr(watch_module, "_HANDSHAKE_S", 0.2)
    with socket.create_connection(("127.0.0.1", port_of(words)), PATIENCE_S) as stranger:
        assert is_closed(stranger)
    leave(posts)
    assert all(one.watch.reason(timeout_s=0) is None for one in posts)


def test_a_watch_without_a_free_descriptor_goes_on_and_does_not_spin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words, posts = Words(), [post(rank) for rank in range(3)]
    meet(posts, words)

    def refuse(_: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", refuse)
    with socket.create_connection(("127.0.0.1", port_of(words)), PATIENCE_S):
        while "socket.accept() out of system resource" not in caplog.text:
            threading.Event().wait(0.02)
    monkeypatch.undo()
    leave(posts)
    assert all(one.watch.reason(timeout_s=0) is None for one in posts)
