"""Ranks of a cloud that watch each other, so that none waits for one that is gone.

Every rank keeps a TCP connection to rank 0. A process that ends closes it, whatever ended it, and rank 0
tells the others; a silent one has frozen. Whoever hears of it ends the run at its links with the reason, and
then itself, for a collective that waits for a lost rank cannot be called off.

    {"rank": 3, "token": "…"}     who it is, first of all
    (empty line)                  a sign of life
    {"bye": true}                 the end, in order
    {"lost": "one sentence"}      the end of the world, and why
"""

import hmac
import json
import logging
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

from isthmus.wan.seat import EXIT_LOST, Seat

log = logging.getLogger(__name__)

_SIGN_EVERY_S: Final = 1.0
_GRACE_S: Final = 5.0
_MAX_LINE_BYTES: Final = 4096
_KEY: Final = "watch"


class Store(Protocol):
    """Where ranks leave words for each other."""

    def set(self, key: str, value: str, /) -> None:
        """Leave a word."""

    def get(self, key: str, /) -> bytes:
        """Read a word; waits for it."""


@dataclass(slots=True)
class _Peer:
    """One end of a connection."""

    socket: socket.socket
    rank: int | None = None
    unread: bytes = b""
    heard_s: float = field(default_factory=time.monotonic)
    has_left: bool = False


class Watch:
    """Watches from entering to leaving; `end` is told once why the world has ended."""

    def __init__(
        self,
        seat: Seat,
        *,
        cloud: str,
        store: Store,
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
        self._num_left = 0
        self._reason: str | None = None
        self._meet(store)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def reason(self, *, timeout_s: float) -> str | None:
        """Why the world has ended; waits a little for the word, None if none comes."""
        self._ended.wait(timeout_s)
        return self._reason

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._tell_all({"lost": self._reason or str(error) or type(error).__name__})
        else:
            self._say_goodbye()
        self._left.set()
        self._thread.join()
        for peer in self._peers:
            peer.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    # Meeting.

    def _meet(self, store: Store) -> None:
        if self._seat.is_leader:
            self._token = secrets.token_hex(16)
            self._listener = socket.create_server(("", 0), backlog=self._seat.num_ranks)
            self._selector.register(self._listener, selectors.EVENT_READ)
            store.set(_KEY, f"{self._listener.getsockname()[1]} {self._token}")
            return
        if self._seat.master is None:
            raise ValueError("several ranks need an address to meet at")
        port, self._token = store.get(_KEY).decode().split()
        peer = _Peer(socket.create_connection((self._seat.master.host, int(port)), self._timeout_s), rank=0)
        self._add(peer)
        self._tell(peer, {"rank": self._seat.rank, "token": self._token})

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
        try:
            words = json.loads(line)
        except ValueError:
            words = None
        match words:
            case {"rank": int(rank), "token": str(token)} if hmac.compare_digest(token, self._token):
                peer.rank = rank
            case {"bye": True} if peer.rank is not None:
                peer.has_left = True
                self._num_left += 1
            case {"lost": str(reason)} if peer.rank is not None:
                self._lose(reason)
            case _:
                self._drop(peer)

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
