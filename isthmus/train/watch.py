"""Lets the ranks of a cloud meet and watch each other, so that none waits for one that is lost.

Rank 0 listens at the master's address. If a launcher's store listens there, rank 0 takes a free port and
writes it into that store. Every rank keeps a TCP connection to rank 0, at which both prove that they know the
cloud's secret. A process that ends closes it, and rank 0 tells the others; a silent one has frozen. A rank
that hears of it ends the run at its links with the reason, and then itself, since a collective that waits for
a lost rank cannot be cancelled.

    {"rank": 3, "nonce": "…"}                rank 3 connects
    {"nonce": "…", "proof": "…"}             rank 0 proves itself for both nonces
    {"proof": "…"}                           rank 3 proves itself
    {"welcome": true}                        both are authenticated
    {"store": 40123}                         every rank has come, and torch's store listens at this port
    (empty line)                             a heartbeat
    {"bye": true}                            the end, in order
    {"lost": "one sentence"}                 the end of the world, and why

The secret is derived from the cloud's private key, which all its ranks have. A store has no authentication,
so a port read from it needs a proof too; it may still be that of an earlier rank 0. Anybody can connect, so
connections without proof are limited in number and time, and have no effect.
"""

import hashlib
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

from isthmus.errors import RankLost, UserError
from isthmus.job.fields import Address
from isthmus.wan.handshake import EXIT_LOST, Seat
from isthmus.wan.limits import Complaints, Pending, source_of, why
from isthmus.wan.sockets import listen, own_address

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.1
MAX_LINE_BYTES: Final = 4096
_HANDSHAKE_S: Final = 5.0
_PORT_TAKEN_S: Final = 15.0
_NOTE_AFTER_S: Final = 10.0
_NONCE_BYTES: Final = 16
_KEY: Final = "watch"


class LauncherStore(Protocol):
    """The store of a launcher, such as torchrun's."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value; waits for it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether these keys have values."""


@dataclass(slots=True, eq=False)
class Peer:
    """One end of a connection; `rank` is set once it is proved, `claim` is what is to be proved."""

    socket: socket.socket
    host: str
    rank: int | None = None
    claim: "Claim | None" = None
    unread: bytes = b""
    heard_s: float = field(default_factory=time.monotonic)
    has_left: bool = False

    def read(self) -> None:
        """Take in what has come; ConnectionError at the end, or if a line is too long."""
        data = self.socket.recv(MAX_LINE_BYTES)
        if not data:
            raise ConnectionError("it has hung up")
        self.unread += data
        if len(self.unread) - (self.unread.rfind(b"\n") + 1) > MAX_LINE_BYTES:
            raise ConnectionError("it does not speak as a rank does")

    def next_line(self) -> bytes | None:
        """The next whole line that is not a mere sign of life, if one has come."""
        while b"\n" in self.unread:
            line, self.unread = self.unread.split(b"\n", 1)
            if line:
                return line
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The rank that a peer claims to be, and the nonces for which proofs are valid."""

    rank: int
    nonce: str
    leader_nonce: str = field(default_factory=lambda: secrets.token_hex(_NONCE_BYTES))

    def leader_proof(self, secret: bytes) -> str:
        """The proof of rank 0."""
        return prove(secret, "leader", self.rank, self.nonce, self.leader_nonce)

    def rank_proof(self, secret: bytes) -> str:
        """The proof of the rank."""
        return prove(secret, "rank", self.rank, self.nonce, self.leader_nonce)


class LateNote:
    """One line for people, once a wait has become long."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + _NOTE_AFTER_S

    def tell(self, text: str) -> None:
        """Say it if it is time, and only once."""
        if time.monotonic() > self._due_s:
            self._due_s = math.inf
            log.warning("%s", text)


def prove(secret: bytes, *words: object) -> str:
    """A proof that the sender of these words knows the secret."""
    return hmac.new(secret, json.dumps(words).encode(), hashlib.sha256).hexdigest()


def is_proof(proof: str, of: str) -> bool:
    """Whether a proof is the right one."""
    return proof.isascii() and hmac.compare_digest(proof, of)


def words_of(line: bytes) -> object:
    """What a line says; None if it is no JSON."""
    try:
        words: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return words


def inside_host(seat: Seat) -> str:
    """The inside address at which rank 0 listens; empty for all, where the host names no single one."""
    return own_address(_master(seat).host) or ""


def listen_for_ranks(seat: Seat, *, cloud: str) -> socket.socket:
    """Listen for the other ranks; an earlier rank 0 may still need a moment to close the port."""
    port = 0 if seat.is_served else _master(seat).port
    until_s = time.monotonic() + _PORT_TAKEN_S
    while True:
        try:
            return listen(inside_host(seat), port)
        except UserError as error:
            if time.monotonic() > until_s:
                raise RankLost(f"rank 0 of cloud {cloud!r} {error.message}", hint=error.hint) from error
            time.sleep(LOOK_EVERY_S)


def publish_port(store: LauncherStore, port: int, secret: bytes) -> None:
    """Write the port of rank 0 into a launcher's store, with a proof."""
    store.set(_KEY, f"{port} {prove(secret, _KEY, port)}")


def find_leader(
    seat: Seat, store: LauncherStore | None, *, cloud: str, secret: bytes, until_s: float
) -> Peer:
    """Connect to rank 0; retries until a rank 0 of this cloud answers, or the time is over."""
    note = LateNote()
    problem = "it has not come"
    while time.monotonic() < until_s:
        try:
            port = _master(seat).port if store is None else _read_port(store, secret)
            if port is not None:
                return _call(seat, port, secret)
        except OSError as error:
            problem = error.strerror or str(error)
            note.tell(f"rank 0 of cloud {cloud!r} cannot be reached: {problem}; trying again")
        time.sleep(LOOK_EVERY_S)
    raise RankLost(f"rank 0 of cloud {cloud!r} cannot be reached: {problem}")


def _master(seat: Seat) -> Address:
    if seat.master is None:
        raise ValueError("several ranks need an address to meet at")
    return seat.master


def _read_port(store: LauncherStore, secret: bytes) -> int | None:
    """The port of rank 0, if the store has one with a valid proof."""
    if not store.check([_KEY]):
        return None
    port, _, proof = store.get(_KEY)[:MAX_LINE_BYTES].decode(errors="replace").partition(" ")
    if not (port.isascii() and port.isdigit() and len(port) <= 5):
        return None
    return int(port) if is_proof(proof, prove(secret, _KEY, int(port))) else None


def _call(seat: Seat, port: int, secret: bytes) -> Peer:
    host = _master(seat).host
    peer = Peer(socket.create_connection((host, port), _HANDSHAKE_S), host)
    try:
        _prove_each_other(peer, seat.rank, secret)
    except OSError:
        peer.socket.close()
        raise
    peer.rank = 0
    return peer


def _prove_each_other(peer: Peer, rank: int, secret: bytes) -> None:
    until_s = time.monotonic() + _HANDSHAKE_S
    nonce = secrets.token_hex(_NONCE_BYTES)
    _say(peer, {"rank": rank, "nonce": nonce})
    match _answer(peer, until_s):
        case {"nonce": str(leader_nonce), "proof": str(proof)}:
            claim = Claim(rank=rank, nonce=nonce, leader_nonce=leader_nonce)
        case _:
            raise ConnectionError("another process listens at its port")
    if not is_proof(proof, claim.leader_proof(secret)):
        raise ConnectionError("another process, or a rank with another key, listens at its port")
    _say(peer, {"proof": claim.rank_proof(secret)})
    if _answer(peer, until_s) != {"welcome": True}:
        raise ConnectionError("it does not answer as a rank of this cloud does")


def _say(peer: Peer, words: dict[str, object]) -> None:
    peer.socket.sendall(json.dumps(words).encode() + b"\n")


def _answer(peer: Peer, until_s: float) -> object:
    while (line := peer.next_line()) is None:
        peer.socket.settimeout(max(until_s - time.monotonic(), 0.001))
        peer.read()
    return words_of(line)


_SIGN_EVERY_S: Final = 1.0
_GRACE_S: Final = 5.0
_PROOF_S: Final = 5.0
_NUM_UNPROVEN: Final = 32
_MAX_REASON_LENGTH: Final = 500
_MAX_NONCE_LENGTH: Final = 128


class Watch:
    """Watches from meeting to leaving; `end` is told once why the world has ended."""

    def __init__(
        self,
        seat: Seat,
        *,
        cloud: str,
        secret: bytes,
        end: Callable[[str], None],
        timeout_s: float = 60.0,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._seat = seat
        self._cloud = cloud
        self._secret = secret
        self._end = end
        self._timeout_s = timeout_s
        self._exit_process = exit_process
        self._peers: list[Peer] = []
        self._unproven: Pending[Peer] = Pending()
        self._complaints = Complaints()
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._left = threading.Event()
        self._all_met = threading.Event()
        self._met: set[int] = set()
        self._store_port = 0
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

    def meet(self, store: LauncherStore | None, *, patience_s: float) -> None:
        """At rank 0, wait for every other rank; at others, find rank 0, by the launcher's store if given."""
        until_s = time.monotonic() + patience_s
        if self._seat.is_leader:
            self._listener = listen_for_ranks(self._seat, cloud=self._cloud)
            self._selector.register(self._listener, selectors.EVENT_READ)
        else:
            leader = find_leader(self._seat, store, cloud=self._cloud, secret=self._secret, until_s=until_s)
            self._add(leader)
            # More may have come with its welcome.
            self._hear_all(leader)
        self._thread.start()
        if self._listener is not None:
            self._await_all(self._listener, store, until_s)

    def announce_store(self, port: int) -> None:
        """Tell the other ranks the port of torch's store."""
        self._tell_all({"store": port})

    def await_store(self, *, patience_s: float) -> int:
        """Wait for the port of torch's store, which rank 0 tells once all ranks have come."""
        until_s = time.monotonic() + patience_s
        while not self._all_met.wait(LOOK_EVERY_S):
            if self._reason is not None:
                raise RankLost(self._reason)
            if time.monotonic() > until_s:
                raise RankLost(f"rank 0 of cloud {self._cloud!r} is silent")
        return self._store_port

    def _await_all(self, listener: socket.socket, store: LauncherStore | None, until_s: float) -> None:
        note = LateNote()
        left_s = 0.0
        while not self._all_met.wait(LOOK_EVERY_S):
            if self._reason is not None:
                raise RankLost(self._reason)
            if store is not None and time.monotonic() - left_s > _SIGN_EVERY_S:
                # Again and again, since anybody may write there.
                left_s = time.monotonic()
                publish_port(store, listener.getsockname()[1], self._secret)
            note.tell(f"waiting for {self._missing()}")
            if time.monotonic() > until_s:
                raise RankLost(f"the ranks of this cloud have waited in vain for {self._missing()}")

    def _missing(self) -> str:
        missing = sorted({*range(1, self._seat.num_ranks)} - self._met)
        numbers = ", ".join(map(str, missing))
        return f"rank{'s' if len(missing) > 1 else ''} {numbers} of cloud {self._cloud!r}"

    def _add(self, peer: Peer) -> None:
        peer.socket.settimeout(self._timeout_s)
        self._peers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    # On the watch's own thread.

    def _run(self) -> None:
        signed_s = 0.0
        while not self._left.is_set() and self._reason is None:
            for key, _ in self._selector.select(timeout=0.1):
                if key.data is None:
                    self._accept(key.fileobj)
                elif key.data in self._peers:
                    self._read(key.data)
            if time.monotonic() - signed_s > _SIGN_EVERY_S:
                signed_s = time.monotonic()
                self._tell_all(None)
                self._check_silent()
        if self._reason is not None:
            self._finish(self._reason)

    def _accept(self, listener: object) -> None:
        if not isinstance(listener, socket.socket):
            return
        try:
            sock, place = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptor is free, say: that must neither end the watch nor make it spin.
            self._complain("nobody", f"cannot accept a connection: {why(error)}", kind="accept")
            time.sleep(LOOK_EVERY_S)
            return
        peer = Peer(sock, str(place[0]))
        self._add(peer)
        self._unproven.add(peer, source=source_of(peer.host))
        num_missing = self._seat.num_ranks - 1 - len(self._met)
        for late in self._unproven.evict(
            max_num=_NUM_UNPROVEN + num_missing, max_num_per_source=_NUM_UNPROVEN // 2 + num_missing
        ):
            self._turn_away(late, "there are too many connections without proof")

    def _read(self, peer: Peer) -> None:
        try:
            peer.read()
        except OSError:
            self._drop(peer)
            return
        peer.heard_s = peer.heard_s if peer.rank is None else time.monotonic()
        self._hear_all(peer)

    def _hear_all(self, peer: Peer) -> None:
        while peer in self._peers and (line := peer.next_line()) is not None:
            self._hear(peer, line)

    def _hear(self, peer: Peer, line: bytes) -> None:
        match words_of(line):
            case {"store": int(port)} if peer.rank == 0:
                self._store_port = port
                self._all_met.set()
            case {"bye": True} if peer.rank is not None:
                peer.has_left = True
                self._num_left += 1
            case {"lost": str(reason)} if peer.rank is not None:
                self._lose(reason)
            case {"rank": int(rank), "nonce": str(nonce)} if self._may_claim(peer, rank, nonce):
                peer.claim = Claim(rank=rank, nonce=nonce)
                proof = peer.claim.leader_proof(self._secret)
                self._tell(peer, {"nonce": peer.claim.leader_nonce, "proof": proof})
            case {"proof": str(proof)} if peer.claim and is_proof(proof, peer.claim.rank_proof(self._secret)):
                self._welcome(peer, peer.claim.rank)
            case _:
                self._turn_away(peer, "it has not proved to be a rank of this cloud")

    def _may_claim(self, peer: Peer, rank: int, nonce: str) -> bool:
        is_new = self._seat.is_leader and peer.rank is None and peer.claim is None
        is_rank = not isinstance(rank, bool) and 0 < rank < self._seat.num_ranks
        return is_new and is_rank and len(nonce) <= _MAX_NONCE_LENGTH

    def _turn_away(self, peer: Peer, reason: str) -> None:
        if peer.rank is None:
            self._complain(
                peer.host, f"closed a connection from {peer.host} to the ranks' watch: {reason}", kind="away"
            )
        self._drop(peer)

    def _complain(self, who: str, what: str, *, kind: str) -> None:
        words = self._complaints.tell(who, what, kind=kind)
        if words is not None:
            log.warning("%s", words)

    def _welcome(self, peer: Peer, rank: int) -> None:
        if rank in self._met:
            self._drop(peer)
            if any(one.rank == rank and not one.has_left for one in self._peers):
                self._lose(f"rank {rank} of cloud {self._cloud!r} is lost: it has been started again")
            return
        # Before the rank is known, so that nothing else is said to it first.
        self._tell(peer, {"welcome": True})
        peer.rank, peer.claim, peer.heard_s = rank, None, time.monotonic()
        self._unproven.discard(peer)
        self._met.add(rank)
        if len(self._met) == self._seat.num_ranks - 1:
            self._all_met.set()

    def _drop(self, peer: Peer) -> None:
        """Forget a connection that has ended; a rank that did not say goodbye is lost."""
        self._unproven.discard(peer)
        if peer not in self._peers:
            return
        self._selector.unregister(peer.socket)
        self._peers.remove(peer)
        peer.socket.close()
        if peer.rank is not None and not peer.has_left:
            self._lose(f"rank {peer.rank} of cloud {self._cloud!r} is lost: its process has ended")

    def _check_silent(self) -> None:
        for peer in list(self._peers):
            silent_s = time.monotonic() - peer.heard_s
            if peer.rank is None:
                if silent_s > _PROOF_S:
                    self._turn_away(peer, f"it has not proved who it is within {_PROOF_S:g} s")
            elif silent_s > self._timeout_s:
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

    def _tell(self, peer: Peer, words: dict[str, object] | None) -> None:
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
