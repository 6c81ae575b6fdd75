"""Ranks that watch each other: a lost one is known to all at once, and an end in order to none."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from isthmus.job import Address
from isthmus.train.watch import Watch
from isthmus.wan.handshake import EXIT_LOST, RankSpec

PATIENCE_S = 60.0
SECRET = b"of cloud east"
PORT = 4711


@dataclass
class Words:
    """A launcher's store, of one process."""

    left: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: str, /) -> None:
        self.left[key] = value

    def get(self, key: str, /) -> bytes:
        return self.left[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.left for key in keys)


@dataclass
class Post:
    """One rank's watch, and what it told."""

    watch: Watch
    reasons: "queue.SimpleQueue[str]"
    exits: "queue.SimpleQueue[int]"


def post(rank: int, **changes: Any) -> Post:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    exits: queue.SimpleQueue[int] = queue.SimpleQueue()
    spec = RankSpec(rank=rank, num_ranks=3, master=Address(host="127.0.0.1", port=1), is_served=True)
    values: dict[str, Any] = {"secret": SECRET, "end": reasons.put, "exit_process": exits.put, **changes}
    return Post(Watch(spec, cloud="east", **values), reasons, exits)


@contextmanager
def ranks(**changes: Any) -> Iterator[list[Post]]:
    posts = [post(rank, **changes) for rank in range(3)]
    meet(posts, Words())
    yield posts


def meet(posts: list[Post], words: Words, *, patience_s: float = PATIENCE_S) -> list[int]:
    """Let ranks meet at once; gives the port that each was told."""
    with ThreadPoolExecutor(len(posts)) as pool:
        return list(pool.map(lambda one: meet_one(one.watch, words, patience_s), posts))


def meet_one(watch: Watch, words: Words, patience_s: float) -> int:
    watch.meet(words, patience_s=patience_s)
    if not watch.spec.is_leader:
        return watch.await_store(patience_s=patience_s)
    watch.announce_store(PORT)
    return PORT


def leave(posts: list[Post], error: BaseException | None = None) -> None:
    with ExitStack() as stack:
        for one in posts:
            done = threading.Thread(target=one.watch.__exit__, args=(type(error), error, None))
            done.start()
            stack.callback(done.join)


def drop(one: Post) -> None:
    """Let a process end without a word, as far as its siblings can tell."""
    one.watch._left.set()  # It must not see the ends of its own connections.
    for channel in [*one.watch._peers.values()]:
        one.watch._loop.call(channel._writer.transport.abort)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_rank_is_known_to_all_with_its_name(lost: int) -> None:
    with ranks() as posts:
        drop(posts[lost])
        others = [one for number, one in enumerate(posts) if number != lost]
        for one in others:
            found = one.reasons.get(timeout=10)
            if lost or one is not posts[0]:
                assert found == f"rank {lost} of cloud 'east' is lost: its process has ended"
        leave(posts, RuntimeError("over"))


def test_ranks_and_their_leader_hear_what_they_tell_each_other_in_order_and_then_the_end() -> None:
    with ranks() as posts:
        leader, first, second = (one.watch for one in posts)
        heard: dict[str, queue.SimpleQueue[Any]] = {
            name: queue.SimpleQueue() for name in ("leader", "first", "second")
        }
        leader.tell(1, {"works": 1})
        leader.tell(2, {"works": 2})
        leader.tell(1, {"works": 3})
        # What was told before anybody listened is not lost.
        first.hear(0, heard["first"].put)
        second.hear(0, heard["second"].put)
        leader.hear(2, heard["leader"].put)
        second.tell(0, "saved")
        found = [heard[name].get(timeout=10) for name in ("first", "first", "second", "leader")]
        assert found == [{"works": 1}, {"works": 3}, {"works": 2}, "saved"]
        leave(posts[:1], RuntimeError("over"))
        for name in ("first", "second"):
            assert str(heard[name].get(timeout=10)) == "over"
        leave(posts[1:], RuntimeError("over"))


def test_a_message_that_no_rank_would_read_is_the_callers_mistake() -> None:
    with ranks() as posts:
        with pytest.raises(ValueError, match="bytes"):
            posts[0].watch.tell(1, "x" * 40_000)
        leave(posts)


def test_an_error_of_one_rank_is_the_reason_at_all_others() -> None:
    with ranks() as posts:
        leave(posts[2:], RuntimeError("the disk is full"))
        assert [one.reasons.get(timeout=10) for one in posts[:2]] == ["the disk is full"] * 2
        assert posts[0].watch.reason(timeout_s=0) == "the disk is full"
        leave(posts[:2], RuntimeError("echo"))


def test_a_rank_that_leaves_in_order_is_not_lost() -> None:
    with ranks() as posts:
        leave(posts)
    assert all(one.reasons.empty() and one.watch.reason(timeout_s=0) is None for one in posts)


def test_a_frozen_rank_is_found_out_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(timeout_s=2.5) as posts:
        monkeypatch.setattr(posts[1].watch._peers[0].heartbeat, "due", list)
        found = posts[2].reasons.get(timeout=20)
        assert found == "rank 1 of cloud 'east' is lost: it has been silent for 2.5 s"
        leave(posts, RuntimeError("over"))


def test_a_process_that_cannot_end_by_itself_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.train.watch._GRACE_S", 0.1)
    with ranks() as posts:
        drop(posts[1])
        assert posts[2].exits.get(timeout=10) == EXIT_LOST
        leave(posts, RuntimeError("over"))
