"""Ranks of a cloud that watch each other, so that none waits for one that is gone.

Every rank keeps a TCP connection to rank 0. A process that ends closes it, whatever ended it, and rank 0
tells the others; a silent one has frozen. Whoever hears of it ends the run at its links with the reason, and
then itself, for a collective that waits for a lost rank cannot be called off.

    {"rank": 3, "token": "…"}     who it is, first of all
    {"welcome": "…"}              rank 0's answer, with the same token
    {"all": true}                 every rank has come
    (empty line)                  a sign of life
    {"bye": true}                 the end, in order
    {"lost": "one sentence"}      the end of the world, and why

Rank 0 leaves its port and a fresh token in the store that all ranks see. A launcher's store outlives a world,
so what is found there may be of a leader that is gone: it counts once that has answered with the token.
"""

import hmac
import json
import logging
import math
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

from isthmus.errors import RankLost
from isthmus.wan.seat import EXIT_LOST, Seat

log = logging.getLogger(__name__)

_SIGN_EVERY_S: Final = 1.0
_GRACE_S: Final = 5.0
_MAX_LINE_BYTES: Final = 4096
_MAX_REASON_LENGTH: Final = 500
_LOOK_EVERY_S: Final = 0.1
_CONNECT_S: Final = 5.0
_NOTE_AFTER_S: Final = 10.0
_KEY: Final = "watch"


class Store(Protocol):
    """Where ranks leave words for each other."""

    def set(self, key: str, value: str, /) -> None:
        """Leave a word."""

    def get(self, key: str, /) -> bytes:
        """Read a word; waits for it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether words are there."""


@dataclass(slots=True)
class _Peer:
    """One end of a connection."""

    socket: socket.socket
    rank: int | None = None
    unread: bytes = b""
    heard_s: float = field(default_factory=time.monotonic)
    has_left: bool = False


class _LateNote:
    """One line for people, once a wait has become long."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + _NOTE_AFTER_S

    def tell(self, text: str) -> None:
        """Say it if it is time, and only once."""
        if time.monotonic() > self._due_s:
            self._due_s = math.inf
            log.warning("%s", text)


class Watch:
    """Watches from meeting to leaving; `end` is told once why the world has ended."""

    def __init__(
        self,
        seat: Seat,
        *,
        cloud: str,
        end: Callable[[str], None],
        timeout_s: float = 60.0,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._seat = seat
        self._cloud = cloud
        self._end = end
        self._timeout_s = timeout_s
        self._exit_process = exit_process
        self._token = ""
        self._peers: list[_Peer] = []
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._left = threading.Event()
        self._all_met = threading.Event()
        self._met: set[int] = set()
        self._num_left = 0
        self._reason: str | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def reason(self, *, timeout_s: float) -> str | None:
        """Why the world has ended; waits a little for the word, None if none comes."""
        self._ended.wait(timeout_s)
        return self._reason

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._tell_all({"lost": self._reason or first_line(error)})
        else:
            self._say_goodbye()
        self._left.set()
        if self._thread.is_alive():
            self._thread.join()
        for peer in self._peers:
            peer.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    # Meeting.

    def meet(self, store: Store, *, patience_s: float) -> str:
        """Wait until every rank has come; gives a token that no other world has."""
        until_s = time.monotonic() + patience_s
        if self._seat.is_leader:
            self._open(store)
        else:
            self._add(self._find_leader(store, until_s))
        self._thread.start()
        self._await_all(until_s)
        return self._token

    def _open(self, store: Store) -> None:
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("", 0), backlog=self._seat.num_ranks)
        self._selector.register(self._listener, selectors.EVENT_READ)
        store.set(_KEY, f"{self._listener.getsockname()[1]} {self._token}")

    def _find_leader(self, store: Store, until_s: float) -> _Peer:
        """Connect to the leader; words of an earlier one lead nowhere until its successor replaces them."""
        note = _LateNote()
        problem = "it has not come"
        while time.monotonic() < until_s:
            if store.check([_KEY]):
                try:
                    return self._call(store, until_s)
                except OSError as error:
                    problem = error.strerror or str(error)
                    note.tell(f"rank 0 of cloud {self._cloud!r} cannot be reached: {problem}; trying again")
            time.sleep(_LOOK_EVERY_S)
        raise RankLost(f"rank 0 of cloud {self._cloud!r} cannot be reached: {problem}")

    def _call(self, store: Store, until_s: float) -> _Peer:
        if self._seat.master is None:
            raise ValueError("several ranks need an address to meet at")
        words = store.get(_KEY)
        port, self._token = words.decode().split()
        peer = _Peer(socket.create_connection((self._seat.master.host, int(port)), _CONNECT_S), rank=0)
        try:
            self._tell(peer, {"rank": self._seat.rank, "token": self._token})
            self._await_welcome(peer, lambda: time.monotonic() < until_s and store.get(_KEY) == words)
        except OSError:
            peer.socket.close()
            raise
        return peer

    def _await_welcome(self, peer: _Peer, is_worth_waiting: Callable[[], bool]) -> None:
        peer.socket.settimeout(_LOOK_EVERY_S)
        while b"\n" not in peer.unread:
            try:
                data = peer.socket.recv(_MAX_LINE_BYTES)
            except TimeoutError:
                if is_worth_waiting():
                    continue
                raise
            peer.unread += data
            if not data or len(peer.unread) > _MAX_LINE_BYTES:
                raise ConnectionError("it does not answer as a rank of this cloud does")
        line, peer.unread = peer.unread.split(b"\n", 1)
        if _words(line) != {"welcome": self._token}:
            raise ConnectionError("another process listens at its port")

    def _await_all(self, until_s: float) -> None:
        note = _LateNote()
        while not self._all_met.wait(_LOOK_EVERY_S):
            if self._reason is not None:
                raise RankLost(self._reason)
            # The others hear from the leader whom it waits for in vain.
            if self._seat.is_leader:
                note.tell(f"waiting for {self._missing()}")
                if time.monotonic() > until_s:
                    raise RankLost(f"the ranks of this cloud have waited in vain for {self._missing()}")

    def _missing(self) -> str:
        missing = sorted({*range(1, self._seat.num_ranks)} - self._met)
        numbers = ", ".join(map(str, missing))
        return f"rank{'s' if len(missing) > 1 else ''} {numbers} of cloud {self._cloud!r}"

    def _add(self, peer: _Peer) -> None:
        peer.socket.settimeout(self._timeout_s)
        self._peers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    # On the watch's own thread.

    def _run(self) -> None:
        signed_s = 0.0
        while not self._left.is_set() and self._reason is None:
            for key, _ in self._selector.select(timeout=0.1):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            if time.monotonic() - signed_s > _SIGN_EVERY_S:
                signed_s = time.monotonic()
                self._tell_all(None)
                self._check_silent()
        if self._reason is not None:
            self._finish(self._reason)

    def _accept(self) -> None:
        if self._listener is not None:
            self._add(_Peer(self._listener.accept()[0]))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(_MAX_LINE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        peer.heard_s = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        if len(peer.unread) > _MAX_LINE_BYTES:
            self._drop(peer)
        for line in filter(None, lines):
            self._hear(peer, line)

    def _hear(self, peer: _Peer, line: bytes) -> None:
        match _words(line):
            case {"rank": int(rank), "token": str(token)} if self._is_ours(rank, token):
                self._welcome(peer, rank)
            case {"all": True} if peer.rank == 0:
                self._all_met.set()
            case {"bye": True} if peer.rank is not None:
                peer.has_left = True
                self._num_left += 1
            case {"lost": str(reason)} if peer.rank is not None:
                self._lose(reason)
            case _:
                self._drop(peer)

    def _is_ours(self, rank: int, token: str) -> bool:
        is_known = token.isascii() and hmac.compare_digest(token, self._token)
        return is_known and self._seat.is_leader and 0 < rank < self._seat.num_ranks

    def _welcome(self, peer: _Peer, rank: int) -> None:
        if rank in self._met:
            self._drop(peer)
            if any(one.rank == rank and not one.has_left for one in self._peers):
                self._lose(f"rank {rank} of cloud {self._cloud!r} is lost: it has been started again")
            return
        # Before the rank is known, so that nothing else is said to it first.
        self._tell(peer, {"welcome": self._token})
        peer.rank = rank
        self._met.add(rank)
        if len(self._met) == self._seat.num_ranks - 1:
            self._tell_all({"all": True})
            self._all_met.set()

    def _drop(self, peer: _Peer) -> None:
        """Forget a connection that has ended; a rank that did not say goodbye is lost."""
        if peer not in self._peers:
            return
        self._selector.unregister(peer.socket)
        self._peers.remove(peer)
        peer.socket.close()
        if peer.rank is not None and not peer.has_left:
            self._lose(f"rank {peer.rank} of cloud {self._cloud!r} is lost: its process has ended")

    def _check_silent(self) -> None:
        for peer in list(self._peers):
            if time.monotonic() - peer.heard_s < self._timeout_s:
                continue
            if peer.rank is None:
                self._drop(peer)
            else:
                what = f"it has been silent for {self._timeout_s:g} s"
                self._lose(f"rank {peer.rank} of cloud {self._cloud!r} is lost: {what}")

    def _lose(self, reason: str) -> None:
        if self._reason is None and not self._left.is_set():
            log.error("%s", reason)
            self._reason = reason
            self._tell_all({"lost": reason})
            self._ended.set()

    def _finish(self, reason: str) -> None:
        """End the run at all links, and the process if it cannot end by itself."""
        # A peer that cannot be told keeps nobody here.
        threading.Thread(target=self._end, args=(reason,), name="last-word", daemon=True).start()
        if not self._left.wait(_GRACE_S):
            self._exit_process(EXIT_LOST)

    # Speaking, from any thread.

    def _tell_all(self, words: dict[str, object] | None) -> None:
        for peer in list(self._peers):
            if peer.rank is not None:
                self._tell(peer, words)

    def _tell(self, peer: _Peer, words: dict[str, object] | None) -> None:
        line = (b"" if words is None else json.dumps(words).encode()) + b"\n"
        try:
            with self._lock:
                peer.socket.sendall(line)
        except OSError as error:
            # What ended the connection is heard on the reading side.
            log.debug("rank %s does not hear: %s", peer.rank, error)

    def _say_goodbye(self) -> None:
        """Leave in order; the leader stays until everyone else has left."""
        if not self._seat.is_leader:
            # First of all, since the leader may be gone as soon as it has heard.
            self._left.set()
            self._tell_all({"bye": True})
            return
        until_s = time.monotonic() + self._timeout_s
        while self._reason is None and time.monotonic() < until_s:
            if self._num_left == self._seat.num_ranks - 1:
                return
            time.sleep(0.02)


def first_line(error: BaseException) -> str:
    """An error in one line that a rank can be told; torch adds pages to its own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_MAX_REASON_LENGTH]


def _words(line: bytes) -> object:
    try:
        words: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return words
