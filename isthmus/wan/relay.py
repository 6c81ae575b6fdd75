"""Forwards TCP connections by TLS server name without ending TLS; shaped, it is a WAN in a box."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

from isthmus.errors import FrameError, IsthmusError, Refused, UserError
from isthmus.job import Address
from isthmus.job.faults import Fault, FaultKind
from isthmus.wan.client_hello import parse_client_hello
from isthmus.wan.limits import Complaints, Pending, source_of, why
from isthmus.wan.loop import LoopThread, precise_loop
from isthmus.wan.pipes import Pipe, Relayed
from isthmus.wan.shaping import Direction, Shape
from isthmus.wan.sockets import Acceptor, connect, ends_at, listen, peer_name, reset_on_close, tune


class Disturbed(Protocol):
    """A link that can be disturbed at any time."""

    def cut(self, duration_s: float) -> None:
        """Reset every connection now, and every new one until the time is over."""

    def blackhole(self, duration_s: float) -> None:
        """Let nothing pass: connections stay, new ones hang, and all goes on when the time is over."""

    def slow_down(self, factor: float, duration_s: float) -> None:
        """Divide the bandwidth of both directions by `factor` for this long."""

    def corrupt(self, direction: Direction, num_bytes: int = 1) -> None:
        """Flip bytes of the next bulk data that goes this way."""


def inject(fault: Fault, link: Disturbed, *, dialer: str) -> None:
    """Let a fault happen now on a link that the cloud `dialer` dials."""
    match fault.kind:
        case FaultKind.CUT:
            link.cut(fault.duration_s)
        case FaultKind.BLACKHOLE:
            link.blackhole(fault.duration_s)
        case FaultKind.SLOW_DOWN:
            link.slow_down(fault.factor, fault.duration_s)
        case FaultKind.CORRUPT:
            sender = fault.sender or fault.between[0]
            link.corrupt(Direction.UP if sender == dialer else Direction.DOWN, fault.num_bytes)


_HELLO_READ_BYTES = 4096
# The kernel's own buffer counts as bottleneck too; above this, what it adds to a fast line does not matter.
_MAX_RECEIVE_BYTES = 1 << 20

_log = logging.getLogger(__name__)

T = TypeVar("T")
Route = Callable[[str], Address | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """What a relay allows before it drops a connection.

    A connection waits until its hello has come and its target has answered. For `unproven_s` after that it
    still counts as unauthenticated: in that time the target disconnects a peer without a valid certificate.
    At most `max_num_waiting` connections wait, and as many are unproven; per source likewise.
    """

    hello_timeout_s: float = 5.0
    dial_timeout_s: float = 10.0
    unproven_s: float = 0.0
    max_num_waiting: int = 256
    max_num_waiting_per_source: int = 256
    max_num_open: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayCounters:
    """What a relay has done so far: payload bytes delivered each way, and connections."""

    up_bytes: int
    down_bytes: int
    num_open: int
    num_relayed: int
    num_dropped: int


class Relay:
    """Accepts connections, asks `route` for the address behind the server name, and passes bytes both ways.

    `route` may return None or raise Refused with the reason. With `reads_hello` off it is asked with an empty
    name as soon as a connection comes, which suits plain TCP. Must be made inside a running event loop.
    """

    def __init__(
        self,
        route: Route,
        *,
        up: Shape | None = None,
        down: Shape | None = None,
        seed: int = 0,
        reads_hello: bool = True,
        limits: RelayLimits | None = None,
    ) -> None:
        self._route = route
        self._reads_hello = reads_hello
        self._limits = limits or RelayLimits()
        self._up = Pipe(up or Shape(), seed=2 * seed)
        self._down = Pipe(down or Shape(), seed=2 * seed + 1)
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None
        self._waiting: Pending[asyncio.Task[None]] = Pending()
        self._evicted: set[asyncio.Task[None]] = set()
        self._unproven: Pending[Relayed] = Pending()
        self._open: set[Relayed] = set()
        self._own_ends: set[tuple[str, int]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._complaints = Complaints(_log)
        self._num_relayed = 0
        self._num_dropped = 0
        self._cut_until_s = 0.0
        self._silent_until_s = 0.0

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Listen, on all interfaces if `host` is empty, and return the address that was bound."""
        self._listener = listen(host, port)
        self._acceptor = Acceptor(self._listener, self._receive)
        bound = self._listener.getsockname()
        return Address(host=bound[0], port=bound[1])

    async def close(self) -> None:
        """Stop listening and reset every connection."""
        for timer in self._timers:
            timer.cancel()
        if self._acceptor is not None:
            self._acceptor.close()
        ends = [*self._waiting, *(connection.closed for connection in self._open)]
        self._reset_all()
        await asyncio.gather(*ends, return_exceptions=True)
        self._up.close()
        self._down.close()

    def counters(self) -> RelayCounters:
        """Return what the relay has done so far."""
        return RelayCounters(
            up_bytes=self._up.num_bytes,
            down_bytes=self._down.num_bytes,
            num_open=len(self._open),
            num_relayed=self._num_relayed,
            num_dropped=self._num_dropped,
        )

    def cut(self, duration_s: float) -> None:
        """Reset every connection now, and every new one until the time is over."""
        self._cut_until_s = max(self._cut_until_s, self._loop.time() + duration_s)
        self._reset_all()

    def blackhole(self, duration_s: float) -> None:
        """Let nothing pass: connections stay, new ones hang, and all goes on when the time is over."""
        self._silent_until_s = max(self._silent_until_s, self._loop.time() + duration_s)
        for pipe in (self._up, self._down):
            pipe.line.silence(self._silent_until_s)
            pipe.run()

    def slow_down(self, factor: float, duration_s: float) -> None:
        """Divide the bandwidth of both directions by `factor` for this long."""
        self._check_can_slow_down()
        for pipe in (self._up, self._down):
            pipe.line.slow_down(factor, self._loop.time() + duration_s)

    def corrupt(self, direction: Direction, num_bytes: int = 1) -> None:
        """Flip bytes of the next bulk data that goes this way."""
        pipe = self._up if direction is Direction.UP else self._down
        pipe.line.corrupt(num_bytes)

    def play(self, faults: Sequence[Fault], *, dialer: str) -> None:
        """Let faults happen at their times from now on; `dialer` is the cloud whose connections come here."""
        if any(fault.kind is FaultKind.SLOW_DOWN for fault in faults):
            self._check_can_slow_down()
        for fault in faults:
            self._timers.append(self._loop.call_later(fault.at_s, self._happen, fault, dialer))

    def _receive(self, client: socket.socket, place: tuple[str, int]) -> None:
        if place in self._own_ends:
            self._own_ends.discard(place)
            client.close()
        elif self._loop.time() < self._cut_until_s:
            self._drop(client, "the link is cut", kind="cut", level=logging.INFO)
        elif len(self._open) >= self._limits.max_num_open:
            self._drop(client, f"{len(self._open)} connections are open already", kind="open")
        else:
            source = source_of(place[0])
            task = self._loop.create_task(self._join(client, source))
            self._waiting.add(task, source=source)
            task.add_done_callback(partial(self._settle, client))
            for late in self._evict_from(self._waiting):
                self._evicted.add(late)
                late.cancel()

    def _evict_from(self, pending: Pending[T]) -> list[T]:
        limits = self._limits
        return pending.evict(
            max_num=limits.max_num_waiting, max_num_per_source=limits.max_num_waiting_per_source
        )

    def _settle(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        # Not in the task itself: one that is cancelled before its first step would leave the socket open.
        self._waiting.discard(task)
        if task in self._evicted:
            self._evicted.discard(task)
            self._drop(client, f"{len(self._waiting)} connections are waiting already", kind="waiting")
            return
        error = ConnectionError("the link is cut") if task.cancelled() else task.exception()
        match error:
            case FrameError() | Refused():
                self._drop(client, error.message, kind=type(error).__name__)
            case OSError():
                # A rank that has not started yet, or a client that has left, is nobody's misdeed.
                self._drop(client, why(error), kind="network", level=logging.INFO)
            case BaseException():
                client.close()
                raise error

    async def _join(self, client: socket.socket, source: str) -> None:
        tune(client, receive_bytes=_receive_bytes(self._up))
        name, hello = await self._read_hello(client) if self._reads_hello else ("", b"")
        address = self._route(name)
        if address is None:
            raise Refused(f"no route to {name!r}")
        await self._pass_handshake()
        server = await self._dial(address)
        tune(server, receive_bytes=_receive_bytes(self._down))
        await self._open_connection(source).start(client, server, hello)

    def _open_connection(self, source: str) -> Relayed:
        # From here on a cut goes by way of the connection; cancelling the task would leave a socket open.
        if (task := asyncio.current_task()) is not None:
            self._waiting.discard(task)
        connection = Relayed(up=self._up, down=self._down)
        self._open.add(connection)
        connection.closed.add_done_callback(lambda _: self._forget(connection))
        self._num_relayed += 1
        if self._limits.unproven_s:
            self._put_unproven(connection, source)
        return connection

    def _put_unproven(self, connection: Relayed, source: str) -> None:
        self._unproven.add(connection, source=source)
        for late in self._evict_from(self._unproven):
            self._num_dropped += 1
            late.reset()
        self._loop.call_later(self._limits.unproven_s, self._unproven.discard, connection)

    def _forget(self, connection: Relayed) -> None:
        self._open.discard(connection)
        self._unproven.discard(connection)

    async def _read_hello(self, client: socket.socket) -> tuple[str, bytes]:
        hello = bytearray()
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                while (name := parse_client_hello(hello)) is None:
                    received = await self._loop.sock_recv(client, _HELLO_READ_BYTES)
                    if not received:
                        raise FrameError(f"closed after {len(hello)} bytes, before the TLS hello was whole")
                    hello += received
        except TimeoutError:
            raise FrameError(f"no whole TLS hello within {self._limits.hello_timeout_s:g} s") from None
        return name, bytes(hello)

    async def _pass_handshake(self) -> None:
        # On a real path TCP's own handshake takes a round trip, and hangs while the path is silent.
        await asyncio.sleep(self._up.line.shape.delay_s + self._down.line.shape.delay_s)
        await asyncio.sleep(max(0.0, self._silent_until_s - self._loop.time()))

    async def _dial(self, address: Address) -> socket.socket:
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                server = await connect(address)
        except TimeoutError:
            raise ConnectionError(f"{address} did not answer in {self._limits.dial_timeout_s:g} s") from None
        except OSError as error:
            raise ConnectionError(f"cannot reach {address}: {why(error)}") from None
        if self._listener is not None and ends_at(server, self._listener):
            self._own_ends.add(server.getsockname()[:2])
            server.close()
            raise Refused(f"{address} leads back to this relay")
        return server

    def _drop(self, client: socket.socket, reason: str, *, kind: str, level: int = logging.WARNING) -> None:
        self._num_dropped += 1
        peer = peer_name(client)
        text = f"dropped a connection from {peer}: {reason}"
        self._complaints.tell(text, about=peer.rpartition(":")[0], kind=kind, level=level)
        reset_on_close(client)
        client.close()

    def _happen(self, fault: Fault, dialer: str) -> None:
        _log.info("fault: %s", fault.kind)
        inject(fault, self, dialer=dialer)

    def _check_can_slow_down(self) -> None:
        if not any(pipe.line.shape.has_limit for pipe in (self._up, self._down)):
            raise UserError("a link without bandwidth cannot slow down", hint="give the link a bandwidth")

    def _reset_all(self) -> None:
        for task in self._waiting:
            task.cancel()
        for connection in [*self._open]:
            connection.reset()


def _receive_bytes(pipe: Pipe) -> int | None:
    num_bytes = pipe.line.buffer_bytes
    return num_bytes if pipe.line.shape.bandwidth_bps and num_bytes <= _MAX_RECEIVE_BYTES else None


class RelayThread:
    """A relay in a thread of its own, for synchronous callers; every method may be called from any thread."""

    def __init__(
        self,
        route: Route,
        *,
        up: Shape | None = None,
        down: Shape | None = None,
        seed: int = 0,
        reads_hello: bool = True,
        limits: RelayLimits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        async def start() -> tuple[Relay, Address]:
            relay = Relay(route, up=up, down=down, seed=seed, reads_hello=reads_hello, limits=limits)
            return relay, await relay.start(host, port)

        self._thread = LoopThread(name="isthmus-relay", loop=precise_loop())
        try:
            self._relay, self.address = self._thread.run(start())
        except IsthmusError:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def counters(self) -> RelayCounters:
        """Return what the relay has done so far."""
        return self._ask(self._relay.counters)

    def cut(self, duration_s: float) -> None:
        """Reset every connection now, and every new one until the time is over."""
        self._ask(partial(self._relay.cut, duration_s))

    def blackhole(self, duration_s: float) -> None:
        """Let nothing pass: connections stay, new ones hang, and all goes on when the time is over."""
        self._ask(partial(self._relay.blackhole, duration_s))

    def slow_down(self, factor: float, duration_s: float) -> None:
        """Divide the bandwidth of both directions by `factor` for this long."""
        self._ask(partial(self._relay.slow_down, factor, duration_s))

    def corrupt(self, direction: Direction, num_bytes: int = 1) -> None:
        """Flip bytes of the next bulk data that goes this way."""
        self._ask(partial(self._relay.corrupt, direction, num_bytes))

    def play(self, faults: Sequence[Fault], *, dialer: str) -> None:
        """Let faults happen at their times from now on; `dialer` is the cloud whose connections come here."""
        self._ask(partial(self._relay.play, faults, dialer=dialer))

    def close(self) -> None:
        """Reset every connection and end the thread; closing twice is fine."""
        if not self._thread.loop.is_closed():
            self._thread.run(self._relay.close())
            self._thread.close()

    def _ask(self, question: Callable[[], T]) -> T:
        async def answer() -> T:
            return question()

        return self._thread.run(answer())
