"""Lets the ranks of a cloud find rank 0 and authenticate each other.

Rank 0 listens at the master's address. If a launcher's store listens there, rank 0 takes a free port and
writes it into that store. Then a rank and rank 0 prove to each other that they know the cloud's secret:

    {"rank": 3, "nonce": "…"}                rank 3 connects
    {"nonce": "…", "proof": "…"}             rank 0 proves itself for both nonces
    {"proof": "…"}                           rank 3 proves itself
    {"welcome": true}                        both are authenticated

The secret is derived from the cloud's private key, which all its ranks have. A store has no authentication,
so a port read from it needs a proof too; it may still be that of an earlier rank 0.
"""

import hashlib
import hmac
import json
import logging
import math
import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import Final, Protocol

from isthmus.errors import RankLost, UserError
from isthmus.job.address import Address
from isthmus.wan.handshake import Seat
from isthmus.wan.relays.sockets import listen, own_address

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
