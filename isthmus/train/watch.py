"""Lets the ranks of a cloud meet and watch each other, so that none waits for one that is lost.

Rank 0 listens at the master's address. If a launcher's store listens there, rank 0 takes a free port and
writes it into that store. Every rank keeps a TCP connection to rank 0, at which both prove that they know the
cloud's secret. A process that ends closes it, and rank 0 tells the others; a silent one has frozen. A rank
that hears of it ends the run at its links with the reason, and then itself, since a collective that waits for
a lost rank cannot be cancelled. The frames are those of links:

    Notice(rank=3, nonce="…")                rank 3 connects
    Notice(nonce="…", proof="…")             rank 0 proves itself for both nonces
    Notice(proof="…")                        rank 3 proves itself
    Notice(welcome=True)                     both are authenticated
    Notice(store=40123)                      every rank has come, and torch's store listens at this port
    Notice(message={…})                      what rank 0 orders, and what others answer
    Ping, Pong                               heartbeats
    Close                                    the end, in order
    Abort(reason)                            the end of the world, and why

The secret is derived from the cloud's private key, which all its ranks have. A store has no authentication,
so a port read from it needs a proof too; it may still be that of an earlier rank 0. Anybody can connect, so
connections without proof are limited in number and time, and have no effect.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self

from pydantic import JsonValue

from isthmus.errors import FrameError, RankLost, UserError
from isthmus.job.fields import Address
from isthmus.wan.handshake import EXIT_LOST, RankSpec
from isthmus.wan.heartbeat import MAX_LINE_BYTES, Channel, Heartbeat
from isthmus.wan.packet import Abort, Close, ControlFrame, Frame, Notice, encode
from isthmus.wan.sockets import Complaints, LoopThread, evict, listen, own_address, source_of, why

log = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 0.1
_HEARTBEAT_S: Final = 1.0
_HANDSHAKE_S: Final = 5.0
_PORT_TAKEN_S: Final = 15.0
_NOTE_AFTER_S: Final = 10.0
_GRACE_S: Final = 5.0
_NUM_UNPROVEN: Final = 32
_NONCE_BYTES: Final = 16
_MAX_NONCE_LENGTH: Final = 128
_MAX_REASON_LENGTH: Final = 500
_KEY: Final = "watch"

Taker = Callable[[JsonValue | RankLost], None]
"""Takes in what another rank tells, or that the world has ended."""


class LauncherStore(Protocol):
    """The store of a launcher, such as torchrun's."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value; waits for it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether these keys have values."""


def prove(secret: bytes, *words: object) -> str:
    """A proof that the sender of these words knows the secret."""
    return hmac.new(secret, json.dumps(words).encode(), hashlib.sha256).hexdigest()


def is_proof(proof: str, of: str) -> bool:
    """Whether a proof is the right one."""
    return proof.isascii() and hmac.compare_digest(proof, of)


def inside_host(spec: RankSpec) -> str:
    """The inside address at which rank 0 listens; empty for all, where the host names no single one."""
    return own_address(_master(spec).host) or ""


def first_line(error: BaseException) -> str:
    """An error in one line that a rank can be told; torch adds pages to its own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_MAX_REASON_LENGTH]


def publish_port(store: LauncherStore, port: int, secret: bytes) -> None:
    """Write the port of rank 0 into a launcher's store, with a proof."""
    store.set(_KEY, f"{port} {prove(secret, _KEY, port)}")


def _read_port(store: LauncherStore, secret: bytes) -> int | None:
    """The port of rank 0, if the store has one with a valid proof."""
    if not store.check([_KEY]):
        return None
    port, _, proof = store.get(_KEY)[:MAX_LINE_BYTES].decode(errors="replace").partition(" ")
    if not re.fullmatch("[0-9]{1,5}", port) or not is_proof(proof, prove(secret, _KEY, int(port))):
        return None
    return int(port)


def _master(spec: RankSpec) -> Address:
    if spec.master is None:
        raise ValueError("several ranks need an address to meet at")
    return spec.master


@dataclass(eq=False)
class Watch:
    """Watches from meeting to leaving; `end` is told once why the world has ended."""

    spec: RankSpec
    _: KW_ONLY
    cloud: str
    secret: bytes
    end: Callable[[str], None]
    timeout_s: float = 60.0
    exit_process: Callable[[int], object] = os._exit

    def __post_init__(self) -> None:
        self._loop = LoopThread(name="watch")
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers: dict[int, Channel] = {}
        self._unproven: dict[Channel, str] = {}
        self._complaints = Complaints(log)
        self._ended, self._left, self._all_met = (threading.Event() for _ in range(3))
        self._met: set[int] = set()
        self._store_port = 0
        self._num_left = 0
        self._reason: str | None = None
        self._problem = ""
        self._takers: dict[int, Taker] = {}
        self._early: defaultdict[int, list[JsonValue]] = defaultdict(list)

    def tell(self, rank: int, message: Any) -> None:
        """Send a few JSON values to a rank; only rank 0 speaks to all."""
        frame = Notice({"message": message})
        if len(encode(frame)) >= MAX_LINE_BYTES:
            raise ValueError(f"a message of more than {MAX_LINE_BYTES} bytes to rank {rank}")
        self._loop.call(self._write, rank, frame)

    def hear(self, rank: int, take: Taker) -> None:
        """Take in what a rank tells, on another thread: first what it has told already."""
        self._loop.call(self._hand_to, rank, take)

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
            self._tell_all(Abort(self.cloud, self._reason or first_line(error)))
        elif self.spec.is_leader:
            # It stays until every other rank has left.
            self._ended.wait(self.timeout_s)
        else:
            # First of all, since the leader may be gone as soon as it has heard.
            self._left.set()
            self._tell_all(Close())
        self._left.set()
        if self._server is not None:
            self._loop.call(self._server.close)
        self._loop.close()

    # Meeting.

    def meet(self, store: LauncherStore | None, *, patience_s: float) -> None:
        """At rank 0, wait for every other rank; at others, find rank 0, by the launcher's store if given."""
        if self.spec.is_leader:
            self._lead(store, patience_s)
        else:
            self._find_leader(store, patience_s)

    def announce_store(self, port: int) -> None:
        """Tell the other ranks the port of torch's store."""
        self._tell_all(Notice({"store": port}))

    def await_store(self, *, patience_s: float) -> int:
        """Wait for the port of torch's store, which rank 0 tells once all ranks have come."""
        for _ in self._tries(patience_s, f"rank 0 of cloud {self.cloud!r} is silent"):
            if self._all_met.wait(_LOOK_EVERY_S):
                break
        return self._store_port

    def _lead(self, store: LauncherStore | None, patience_s: float) -> None:
        listener = self._listen()
        port = listener.getsockname()[1]
        serving = asyncio.start_server(self._accept, sock=listener, limit=MAX_LINE_BYTES)
        self._server = self._loop.run(serving)
        for _ in self._tries(patience_s):
            self._problem = f"{self._missing()} has not come"
            if store is not None:
                # Again and again, since anybody may write there.
                publish_port(store, port, self.secret)
            if self._all_met.wait(_LOOK_EVERY_S):
                return

    def _listen(self) -> socket.socket:
        """Listen for the other ranks; an earlier rank 0 may still need a moment to close the port."""
        port = 0 if self.spec.is_served else _master(self.spec).port
        for _ in self._tries(_PORT_TAKEN_S):
            try:
                return listen(inside_host(self.spec), port)
            except UserError as error:
                self._problem = f"rank 0 of cloud {self.cloud!r} {error.message}"
                time.sleep(_LOOK_EVERY_S)
        raise AssertionError("tries end with RankLost")

    def _find_leader(self, store: LauncherStore | None, patience_s: float) -> None:
        """Connect to rank 0; retries until a rank 0 of this cloud answers, or the time is over."""
        start = f"rank 0 of cloud {self.cloud!r} cannot be reached"
        for _ in self._tries(patience_s, f"{start}: it has not come"):
            try:
                port = _master(self.spec).port if store is None else _read_port(store, self.secret)
                if port is not None:
                    self._loop.run(self._join(port))
                    return
            except (OSError, FrameError) as error:
                self._problem = f"{start}: {error.message if isinstance(error, FrameError) else why(error)}"
            time.sleep(_LOOK_EVERY_S)

    def _tries(self, patience_s: float, problem: str = "") -> Iterator[None]:
        """Try until a rank is lost, or the time is over; log the problem once a wait has become long."""
        started_s, is_told, self._problem = time.monotonic(), False, problem
        while self._reason is None and (waited_s := time.monotonic() - started_s) < patience_s:
            yield
            if waited_s > _NOTE_AFTER_S and not is_told:
                is_told = True
                log.warning("%s; trying again", self._problem)
        raise RankLost(self._reason or self._problem)

    def _missing(self) -> str:
        missing = sorted({*range(1, self.spec.num_ranks)} - self._met)
        ranks = "ranks" if len(missing) > 1 else "rank"
        return f"{ranks} {', '.join(map(str, missing))} of cloud {self.cloud!r}"

    # On the watch's own thread.

    def _write(self, rank: int, frame: ControlFrame) -> None:
        if rank in self._peers:
            self._peers[rank].write(frame)

    def _hand_to(self, rank: int, take: Taker) -> None:
        self._takers[rank] = take
        for message in self._early.pop(rank, ()):
            take(message)
        if self._reason is not None:
            take(RankLost(self._reason))

    async def _join(self, port: int) -> None:
        """Connect to rank 0 and prove each other."""
        async with asyncio.timeout(_HANDSHAKE_S):
            channel = self._channel(
                *await asyncio.open_connection(_master(self.spec).host, port, limit=MAX_LINE_BYTES)
            )
            try:
                await self._prove_to_leader(channel)
            except (OSError, FrameError, asyncio.CancelledError):
                channel.close()
                raise
        self._start(self._follow(0, channel))

    async def _prove_to_leader(self, channel: Channel) -> None:
        rank, nonce = self.spec.rank, secrets.token_hex(_NONCE_BYTES)
        channel.write(Notice({"rank": rank, "nonce": nonce}))
        match await channel.read():
            case Notice({"nonce": str(leader_nonce), "proof": str(proof)}):
                words = (rank, nonce, leader_nonce)
            case _:
                raise FrameError("another process listens at its port")
        if not is_proof(proof, prove(self.secret, "leader", *words)):
            raise FrameError("another process, or a rank with another key, listens at its port")
        channel.write(Notice({"proof": prove(self.secret, "rank", *words)}))
        if await channel.read() != Notice({"welcome": True}):
            raise FrameError("it does not answer as a rank of this cloud does")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: the task that asyncio makes of one logs a traceback when it is cancelled.
        self._start(self._receive(reader, writer))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection in, and follow the rank that it has proved to be."""
        channel = self._channel(reader, writer)
        self._unproven[channel] = source_of(channel.host)
        num_missing = self.spec.num_ranks - 1 - len(self._met)
        for late in evict(
            self._unproven,
            max_num=_NUM_UNPROVEN + num_missing,
            max_num_per_source=_NUM_UNPROVEN // 2 + num_missing,
        ):
            late.close()
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                rank = await self._check_proof(channel)
            self._unproven.pop(channel, None)
            await self._welcome(rank, channel)
        except (OSError, FrameError):
            text = f"closed a connection from {channel.host} that has not proved to be a rank of this cloud"
            self._complaints.tell(text, about=channel.host, kind="proof")
        finally:
            self._unproven.pop(channel, None)
            channel.close()

    async def _check_proof(self, channel: Channel) -> int:
        match await channel.read():
            case Notice({"rank": int(rank), "nonce": str(nonce)}) if len(nonce) <= _MAX_NONCE_LENGTH:
                words = (rank, nonce, secrets.token_hex(_NONCE_BYTES))
            case _:
                raise FrameError("it does not say which rank it is")
        if isinstance(rank, bool) or not 0 < rank < self.spec.num_ranks:
            raise FrameError("there is no such rank")
        channel.write(Notice({"nonce": words[-1], "proof": prove(self.secret, "leader", *words)}))
        match await channel.read():
            case Notice({"proof": str(proof)}) if is_proof(proof, prove(self.secret, "rank", *words)):
                return rank
        raise FrameError("it does not know the secret")

    async def _welcome(self, rank: int, channel: Channel) -> None:
        if rank in self._peers:
            self._lose(f"rank {rank} of cloud {self.cloud!r} is lost: it has been started again")
        if rank in self._met:
            return
        channel.write(Notice({"welcome": True}))
        self._met.add(rank)
        if len(self._met) == self.spec.num_ranks - 1:
            self._all_met.set()
        await self._follow(rank, channel)

    async def _follow(self, rank: int, channel: Channel) -> None:
        """Listen to a rank until it leaves; one that ends or falls silent before is lost."""
        self._peers[rank] = channel
        try:
            while self._hear(rank, await channel.read()):
                continue
        except TimeoutError as error:
            self._lose(f"rank {rank} of cloud {self.cloud!r} is lost: {error}")
        except (OSError, FrameError):
            self._lose(f"rank {rank} of cloud {self.cloud!r} is lost: its process has ended")
        finally:
            del self._peers[rank]
            channel.close()

    def _hear(self, rank: int, frame: Frame) -> bool:
        """Take in what a rank says; False if it was the last."""
        match frame:
            case Notice({"store": int(port)}) if rank == 0:
                self._store_port = port
                self._all_met.set()
                return True
            case Notice({"message": message}):
                self._takers.get(rank, self._early[rank].append)(message)
                return True
            case Close():
                self._num_left += 1
                if self._num_left == self.spec.num_ranks - 1:
                    self._ended.set()
            case Abort(reason=reason):
                self._lose(reason)
            case _:
                raise FrameError(f"rank {rank} says what no rank says")
        return False

    def _lose(self, reason: str) -> None:
        if self._reason is not None or self._left.is_set():
            return
        log.error("%s", reason)
        self._reason = reason
        for take in self._takers.values():
            take(RankLost(reason))
        for channel in self._peers.values():
            channel.write(Abort(self.cloud, reason))
        self._ended.set()
        # A peer that cannot be told keeps nobody here.
        for target in (partial(self.end, reason), self._end_process):
            threading.Thread(target=target, name="watch-end", daemon=True).start()

    def _end_process(self) -> None:
        """End the process if it cannot end by itself."""
        if not self._left.wait(_GRACE_S):
            self.exit_process(EXIT_LOST)

    def _channel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
        heartbeat = Heartbeat(interval_s=_HEARTBEAT_S, timeout_s=self.timeout_s)
        return Channel(reader, writer, heartbeat)

    # From any thread.

    def _tell_all(self, frame: ControlFrame) -> None:
        async def tell() -> None:
            for channel in self._peers.values():
                channel.write(frame)

        self._loop.run(tell())
