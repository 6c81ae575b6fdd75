"""Forwards TCP connections by TLS server name without ending TLS; shaped, it is a WAN in a box.

client ──▶ Side ──▶ Pipe up ───▶ Side ──▶ server          a Pipe is one direction, shared by all connections;
client ◀── Side ◀── Pipe down ◀── Side ◀── server          a Side is one socket, `other` its counterpart
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from isthmus.errors import FrameError, Refused
from isthmus.job import Address
from isthmus.job.faults import Fault, FaultKind
from isthmus.wan.handshake import parse_client_hello
from isthmus.wan.shaping import Direction, Disturbed, DrivenLine, End, Piece, Shape, ShapedFlow, ShapedLine
from isthmus.wan.sockets import (
    LISTEN_BACKLOG,
    Closing,
    Complaints,
    HostPort,
    LoopThread,
    PreciseSelector,
    evict,
    listen,
    plain_host,
    reset_on_close,
    source_of,
    tune,
    why,
)

_LATE_S = 0.001
_MAX_LATE_S = 0.5
_CATCH_UP_S = 0.05
_MAX_PAUSE_S = 0.005
_WRITE_BUFFER_BYTES = 262_144
# The kernel's own buffer counts as bottleneck too; above this, what it adds to a fast line does not matter.
_MAX_RECEIVE_BYTES = 1 << 20

_HELLO_READ_BYTES = 4096
_DIAL_TIMEOUT_S = 10.0
_CUT = "the link is cut"

_log = logging.getLogger(__name__)

Route = Callable[[str], Address | None]


class Pipe(DrivenLine):
    """One direction of a relay: a line and the sides that it joins, fed as fast as the line has room."""

    def __init__(self, shape: Shape, loop: asyncio.AbstractEventLoop, *, seed: int) -> None:
        super().__init__(ShapedLine(shape, seed=seed), loop)
        has_bandwidth = shape.bandwidth_bps is not None
        buffer_bytes = self.line.buffer_bytes
        # A receiver that is late now and then must not cost the line its rate.
        self.write_buffer_bytes = max(_WRITE_BUFFER_BYTES, buffer_bytes if has_bandwidth else 0)
        is_small = has_bandwidth and buffer_bytes <= _MAX_RECEIVE_BYTES
        self.receive_bytes = buffer_bytes if is_small else None
        self._lateness = _Lateness()
        self._starved: deque[Side] = deque()

    def start(self, source: "Side", first: bytes = b"") -> None:
        """Begin to read from a side, of which `first` has been read already."""
        source.flow.sink = source.other.deliver
        if first:
            self.line.offer(source.flow, memoryview(first), self.now_s())
        self._starved.append(source)
        self.run()

    def take(self, source: "Side", piece: Piece) -> None:
        """Take what a side has read, and let it read on when there is room."""
        now_s = self.now_s()
        came_s = now_s if self._lateness.since_s is None else self._lateness.since_s
        # Had this thread not been late, it would have read a sender that presses in time.
        came_s = came_s if source.was_pressing(came_s) else now_s
        self.line.offer(source.flow, piece, now_s, came_s=came_s)
        self.run()
        if self.line.room_bytes(source.flow) < self.line.quantum_bytes:
            source.pause_reading()
            self._starved.append(source)
        else:
            source.ready_s = now_s

    def run(self) -> None:
        """Deliver what has arrived, let sides read on, and come back when there is more."""
        super().run()
        for _ in range(len(self._starved)):
            side = self._starved.popleft()
            if self.line.room_bytes(side.flow) >= self.line.quantum_bytes:
                side.ready_s = self._loop.time()
                side.resume_reading()
            else:
                self._starved.append(side)

    def now_s(self) -> float:
        """The time of the loop; notes whether this thread is late."""
        now_s = super().now_s()
        self._lateness.note(now_s, due_s=self._due_s, has_caught_up=self.line.is_busy(now_s))
        return now_s


class _Lateness:
    """Since when the thread has been kept from running, until it has caught up."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self._looked_s = 0.0

    def note(self, now_s: float, *, due_s: float | None, has_caught_up: bool) -> None:
        if now_s - self._looked_s > _CATCH_UP_S:
            self.since_s = None
        self._looked_s = now_s
        if due_s is not None and now_s - due_s > _LATE_S:
            self.since_s = self.since_s or max(due_s, now_s - _MAX_LATE_S)
        elif has_caught_up:
            self.since_s = None


class Side(asyncio.BufferedProtocol):
    """One socket of a relayed connection: its reads go into `inward`, `outward` comes out at it.

    The side that is made first makes the other. Until they are joined, nothing is read but by `hear`.
    """

    _transport: asyncio.Transport

    def __init__(
        self,
        *,
        inward: Pipe,
        outward: Pipe,
        made: "Callable[[Side], None] | None" = None,
        other: "Side | None" = None,
    ) -> None:
        self.other = other or Side(inward=outward, outward=inward, other=self)
        self.hello = bytearray()
        self._heard: asyncio.Event | None = asyncio.Event()
        self._made = made
        self.flow = ShapedFlow()
        self.ready_s = 0.0
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inward = inward
        self._outward = outward
        self._buffer = bytearray(_HELLO_READ_BYTES)
        self._is_open = False
        self.is_reset = False
        self._presses = False
        self._has_read_all = False
        self._has_written_all = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stay quiet until both sides are there."""
        self._transport = cast("asyncio.Transport", transport)
        self._is_open = True
        tune(transport.get_extra_info("socket"), receive_bytes=self._inward.receive_bytes)
        self._transport.set_write_buffer_limits(high=self._outward.write_buffer_bytes)
        self._transport.pause_reading()
        if self.is_reset:
            self.reset()
        if self._made is not None:
            self._made(self)

    @property
    def peer(self) -> HostPort:
        """The address from which the socket was dialled, or which it has dialled."""
        host, port = self._transport.get_extra_info("peername")[:2]
        return plain_host(host), port

    async def hear(self) -> None:
        """Add what comes next to `hello`."""
        self._heard = asyncio.Event()
        self._transport.resume_reading()
        await self._heard.wait()
        if self.lost.done():
            raise ConnectionError("it has left")
        if self._has_read_all:
            raise FrameError(f"closed after {len(self.hello)} bytes, before the TLS hello was whole")

    def join(self) -> None:
        """Read from now on into the line, what was heard first."""
        self._heard = None
        self._buffer = bytearray(self._inward.line.max_read_bytes)
        self._inward.start(self, bytes(self.hello))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return as much buffer as the line has room for."""
        return memoryview(self._buffer)[: max(self._inward.line.room_bytes(self.flow), 1)]

    def buffer_updated(self, num_bytes: int) -> None:
        """Pass on what was read; a small piece is copied, so that it does not keep a large buffer alive."""
        if num_bytes < len(self._buffer) // 4:
            piece = memoryview(self._buffer[:num_bytes])
        else:
            piece = memoryview(self._buffer)[:num_bytes]
            self._buffer = bytearray(len(self._buffer))
        if self._heard is None:
            self._inward.take(self, piece)
        else:
            self.hello += piece
            self._transport.pause_reading()
            self._heard.set()

    def eof_received(self) -> bool:
        """Pass on the half-close; the other direction lives on."""
        self._has_read_all = True
        if self._heard is None:
            self._inward.take(self, End.EOF)
            self._close_if_done()
        else:
            self._heard.set()
        return True

    def pause_writing(self) -> None:
        """Hold the line for this connection: its receiver is not reading."""
        self._outward.line.hold(self.other.flow)

    def resume_writing(self) -> None:
        """Let the line serve this connection again."""
        self._outward.release(self.other.flow)

    def connection_lost(self, error: Exception | None) -> None:
        """Pass a reset on as a reset."""
        if error is not None:
            self._inward.break_off(self.flow)
        self._outward.part(self.other.flow)
        self.lost.set_result(None)
        if self._heard is not None:
            self._heard.set()

    def was_pressing(self, at_s: float) -> bool:
        """Return whether the sender had more than the line takes, up to that time and without a pause."""
        self._presses = self._presses and at_s - self.ready_s < _MAX_PAUSE_S
        return self._presses

    def pause_reading(self) -> None:
        """Leave further bytes with the sender."""
        self._presses = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless the sender has finished."""
        if not self._has_read_all:
            self._transport.resume_reading()

    def deliver(self, piece: Piece) -> None:
        """Write what came out of the line."""
        if self._transport.is_closing():
            return
        if piece is End.RESET:
            self.reset()
        elif piece is End.EOF:
            self._has_written_all = True
            # A peer that has reset meanwhile cannot be shut down; its reset is on its way to us.
            with contextlib.suppress(OSError):
                self._transport.write_eof()
            self._close_if_done()
        else:
            self._transport.write(piece)

    def reset(self) -> None:
        """End the socket at once, or as soon as it is there, so that its peer sees a reset."""
        self.is_reset = True
        if self._is_open and not self.lost.done():
            reset_on_close(self._transport.get_extra_info("socket"))
            self._transport.abort()

    def reset_both(self) -> None:
        """End the connection."""
        self.reset()
        self.other.reset()

    def _close_if_done(self) -> None:
        if self._has_read_all and self._has_written_all:
            self._transport.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """What a relay allows before it drops a connection.

    A connection waits until its hello has come and its target has answered. For `unproven_s` after that it
    still counts as unauthenticated: in that time the target disconnects a peer without a valid certificate.
    At most `max_num_waiting` connections wait, and as many are unproven; per source likewise.
    """

    hello_timeout_s: float = 5.0
    unproven_s: float = 0.0
    max_num_waiting: int = 256
    max_num_waiting_per_source: int = 256
    max_num_open: int = 2048


class Relay(Disturbed, Closing):
    """Accepts connections, asks `route` for the address behind the server name, and passes bytes both ways.

    It runs on a thread of its own. `route`, which is called there, may return None or raise Refused with the
    reason. With `reads_hello` off it is asked with an empty name as soon as a connection comes, which suits
    plain TCP. It listens on all interfaces if `host` is empty.
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
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._route = route
        self._reads_hello = reads_hello
        self._limits = limits or RelayLimits()
        self._waiting: dict[Side, str] = {}
        self._unproven: dict[Side, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[Side] = set()
        self._complaints = Complaints(_log)
        self.num_relayed = 0
        self.num_dropped = 0
        listener = listen(host, port)
        self.address = Address(host=listener.getsockname()[0], port=listener.getsockname()[1])
        thread = LoopThread(name="isthmus-relay", loop=asyncio.SelectorEventLoop(PreciseSelector()))
        self._up = Pipe(up or Shape(), thread.loop, seed=2 * seed)
        self._down = Pipe(down or Shape(), thread.loop, seed=2 * seed + 1)
        super().__init__(thread, self._up, self._down)
        accepted = partial(Side, inward=self._up, outward=self._down, made=self._receive)
        self._server = thread.run(self._loop.create_server(accepted, sock=listener, backlog=LISTEN_BACKLOG))

    @property
    def num_open(self) -> int:
        """The number of connections that are relayed now."""
        return len(self._open)

    def num_bytes(self, direction: Direction) -> int:
        """The payload bytes that have come out of one direction."""
        return self._line(direction).line.num_bytes

    def close(self) -> None:
        """Stop listening, reset every connection and end the thread; closing twice is fine."""
        if not self._loop.is_closed():
            self._thread.run(self._close())
            self._thread.close()

    def play(self, faults: Sequence[Fault], *, dialer: str) -> None:
        """Let faults happen at their times from now on; `dialer` is the cloud whose connections come here."""
        if any(fault.kind is FaultKind.SLOW_DOWN for fault in faults):
            self._check_can_slow_down()
        for fault in faults:
            self._thread.call(self._loop.call_later, fault.at_s, self._happen, fault, dialer)

    # On the relay's own thread.

    def _happen(self, fault: Fault, dialer: str) -> None:
        _log.info("fault: %s", fault.kind)
        self.disturb(fault, dialer=dialer)

    async def _close(self) -> None:
        self._server.close()
        ends = [side.lost for client in self._open for side in (client, client.other)]
        ends += [client.lost for client in self._waiting]
        self._reset_all()
        await asyncio.gather(*ends)

    def _receive(self, client: Side) -> None:
        if self._loop.time() < self._cut_until_s:
            self._drop(client, _CUT, kind="cut", level=logging.INFO)
        elif self.num_open >= self._limits.max_num_open:
            self._drop(client, f"{self.num_open} connections are open already", kind="open")
        else:
            task = self._loop.create_task(self._join(client))
            self._tasks.add(task)
            task.add_done_callback(partial(self._settle, client))
            self._count(client, among=self._waiting)

    def _count(self, client: Side, *, among: dict[Side, str]) -> None:
        """Count an unauthenticated connection, and drop those beyond the limits."""
        among[client] = source_of(client.peer[0])
        limits = self._limits
        for late in evict(
            among, max_num=limits.max_num_waiting, max_num_per_source=limits.max_num_waiting_per_source
        ):
            self._drop(late, f"{len(among)} connections are waiting already", kind="waiting")

    def _settle(self, client: Side, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._waiting.pop(client, None)
        self._unproven.pop(client, None)
        if task.cancelled() or client.is_reset:
            return
        match error := task.exception():
            case FrameError() | Refused():
                self._drop(client, error.message, kind=type(error).__name__)
            case OSError():
                # A rank that has not started yet, or a client that has left, is nobody's misdeed.
                self._drop(client, why(error), kind="network", level=logging.INFO)
            case BaseException():
                client.reset_both()
                raise error

    async def _join(self, client: Side) -> None:
        name = await self._read_hello(client) if self._reads_hello else ""
        address = self._route(name)
        if address is None:
            raise Refused(f"no route to {name!r}")
        await self._travel()
        await self._dial(address, client.other)
        if client.lost.done():
            raise ConnectionError("it has left")
        self.num_relayed += 1
        self._open.add(client)
        closed = asyncio.gather(client.lost, client.other.lost)
        closed.add_done_callback(lambda _: self._open.discard(client))
        client.join()
        client.other.join()
        self._waiting.pop(client, None)
        self._count(client, among=self._unproven)
        await asyncio.wait([closed], timeout=self._limits.unproven_s)

    async def _read_hello(self, client: Side) -> str:
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                while (name := parse_client_hello(client.hello)) is None:
                    await client.hear()
        except TimeoutError:
            raise FrameError(f"no whole TLS hello within {self._limits.hello_timeout_s:g} s") from None
        return name

    async def _dial(self, address: Address, server: Side) -> None:
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                transport, _ = await self._loop.create_connection(lambda: server, address.host, address.port)
        except TimeoutError:
            raise ConnectionError(f"{address} did not answer in {_DIAL_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise ConnectionError(f"cannot reach {address}: {why(error)}") from None
        own_host = transport.get_extra_info("sockname")[0]
        if transport.get_extra_info("peername")[:2] == (own_host, self.address.port):
            server.reset()
            raise Refused(f"{address} leads back to this relay")

    def _drop(self, client: Side, reason: str, *, kind: str, level: int = logging.WARNING) -> None:
        self.num_dropped += 1
        host, port = client.peer
        text = f"dropped a connection from {Address(host=host, port=port)}: {reason}"
        self._complaints.tell(text, about=host, kind=kind, level=level)
        client.reset_both()

    def _reset_all(self) -> None:
        for client in self._waiting:
            self._drop(client, _CUT, kind="cut", level=logging.INFO)
        for client in self._open:
            client.reset_both()
