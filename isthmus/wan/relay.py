"""Forwards TCP connections by TLS server name without ending TLS; shaped, it is a WAN in a box.

client ──▶ Side ──▶ Pipe up ───▶ Side ──▶ server          a Pipe is one direction, shared by all connections;
client ◀── Side ◀── Pipe down ◀── Side ◀── server          a Side is one socket, `other` its counterpart
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from isthmus.errors import FrameError, Refused
from isthmus.job import Address
from isthmus.job.faults import Fault, FaultKind
from isthmus.wan.handshake import parse_client_hello
from isthmus.wan.shaping import Direction, Disturbed, DrivenLine, End, Piece, Shape, ShapedFlow, ShapedLine
from isthmus.wan.sockets import (
    Closing,
    Complaints,
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

_WRITE_BUFFER_BYTES = 262_144
# The kernel's own buffer counts as bottleneck too; above this, what it adds to a fast line does not matter.
_MAX_RECEIVE_BYTES = 1 << 20

_HELLO_READ_BYTES = 4096
_DIAL_TIMEOUT_S = 10.0
_RETRY_S = 0.5

_log = logging.getLogger(__name__)

Route = Callable[[str], Address | None]
_Task = asyncio.Task[None]


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
        self._starved: deque[Side] = deque()

    def take(self, source: "Side", piece: Piece) -> None:
        """Take what a side has read, and let it read on when there is room."""
        self.offer(source.flow, piece)
        if self.line.room_bytes(source.flow) < self.line.quantum_bytes:
            source.pause_reading()
            self._starved.append(source)

    def run(self) -> None:
        """Deliver what has arrived, let sides read on, and come back when there is more."""
        super().run()
        for _ in range(len(self._starved)):
            side = self._starved.popleft()
            if self.line.room_bytes(side.flow) >= self.line.quantum_bytes:
                side.resume_reading()
            else:
                self._starved.append(side)


class Side(asyncio.BufferedProtocol):
    """One socket of a relayed connection: its reads go into `inward`, `outward` comes out at it.

    Nothing is read before both sides are there.
    """

    other: "Side"
    _transport: asyncio.Transport

    def __init__(self, *, inward: Pipe, outward: Pipe) -> None:
        self.flow = ShapedFlow()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inward = inward
        self._outward = outward
        self._buffer = bytearray(inward.line.max_read_bytes)
        self._is_open = False
        self._has_read_all = False
        self._has_written_all = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stay quiet until both sides are there."""
        self._transport = cast("asyncio.Transport", transport)
        self._is_open = True
        self._transport.pause_reading()
        self._transport.set_write_buffer_limits(high=self._outward.write_buffer_bytes)
        tune(transport.get_extra_info("socket"), receive_bytes=self._inward.receive_bytes)

    def join(self, other: "Side", first: bytes = b"") -> None:
        """Read from now on into the line, behind what was read first."""
        self.other = other
        self.flow.sink = other.deliver
        self._transport.resume_reading()
        if first:
            self._inward.take(self, memoryview(first))

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
        self._inward.take(self, piece)

    def eof_received(self) -> bool:
        """Pass on the half-close; the other direction lives on."""
        self._has_read_all = True
        self._inward.take(self, End.EOF)
        self._close_if_done()
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

    def pause_reading(self) -> None:
        """Leave further bytes with the sender."""
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
        """End the socket at once, so that its peer sees a reset."""
        if self._is_open and not self.lost.done():
            reset_on_close(self._transport.get_extra_info("socket"))
            self._transport.abort()

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
        self._tasks: set[_Task] = set()
        self._waiting: dict[_Task, str] = {}
        self._unproven: dict[_Task, str] = {}
        self._complaints = Complaints(_log)
        self.num_open = 0
        """The number of connections that are relayed now."""
        self.num_relayed = 0
        self.num_dropped = 0
        self._listener = listen(host, port)
        self.address = Address(host=self._listener.getsockname()[0], port=self._listener.getsockname()[1])
        thread = LoopThread(name="isthmus-relay", loop=asyncio.SelectorEventLoop(PreciseSelector()))
        self._up = Pipe(up or Shape(), thread.loop, seed=2 * seed)
        self._down = Pipe(down or Shape(), thread.loop, seed=2 * seed + 1)
        super().__init__(thread, self._up, self._down)
        self._accepting = thread.submit(self._accept())

    def num_bytes(self, direction: Direction) -> int:
        """The payload bytes that have come out of one direction."""
        return self._line(direction).line.num_bytes

    def close(self) -> None:
        """Stop listening, reset every connection and end the thread; closing twice is fine."""
        self._accepting.cancel()
        self._thread.close()
        self._listener.close()

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

    async def _accept(self) -> None:
        while True:
            try:
                client, address = await self._loop.sock_accept(self._listener)
            except OSError as error:
                # No descriptor is free, say.
                self._complaints.tell(f"cannot accept a connection: {why(error)}", about="", kind="accept")
                await asyncio.sleep(_RETRY_S)
                continue
            task = self._loop.create_task(self._serve(client, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # In a flood of connections, others must have their turn.
            await asyncio.sleep(0)

    async def _serve(self, client: socket.socket, address: tuple[Any, ...]) -> None:
        """See one connection through, from its hello to its end."""
        host = plain_host(address[0])
        try:
            hello, server = await self._admit(client, host)
        except (FrameError, Refused) as error:
            self._complain(host, error.message, kind=type(error).__name__)
        except OSError as error:
            # A cut, a rank that has not started yet, a client that has left: nobody's misdeed.
            self._complain(host, str(error), kind="network", level=logging.INFO)
        else:
            await self._relay(client, hello, server, host)
        finally:
            if client.fileno() >= 0:
                reset_on_close(client)
                client.close()

    async def _admit(self, client: socket.socket, host: str) -> tuple[bytes, Side]:
        """Read the hello and dial the target that it names; an error has the reason if there is none."""
        if self._loop.time() < self._cut_until_s:
            raise ConnectionError("the link is cut")
        if self.num_open >= self._limits.max_num_open:
            raise Refused(f"{self.num_open} connections are open already")
        with self._counted(host, among=self._waiting):
            hello, name = await self._read_hello(client) if self._reads_hello else (b"", "")
            address = self._route(name)
            if address is None:
                raise Refused(f"no route to {name!r}")
            await self._travel()
            return hello, await self._dial(address)

    async def _relay(self, client: socket.socket, hello: bytes, server: Side, host: str) -> None:
        near = Side(inward=self._up, outward=self._down)
        self.num_open += 1
        try:
            await self._loop.connect_accepted_socket(lambda: near, client)
            self.num_relayed += 1
            near.join(server, hello)
            server.join(near)
            both = (near.lost, server.lost)
            with self._counted(host, among=self._unproven):
                await asyncio.wait(both, timeout=self._limits.unproven_s)
            await asyncio.wait(both)
        finally:
            self.num_open -= 1
            for side in (near, server):
                side.reset()

    @contextlib.contextmanager
    def _counted(self, host: str, *, among: dict[_Task, str]) -> Iterator[None]:
        """Count an unauthenticated connection, and drop those beyond the limits."""
        task = cast("_Task", asyncio.current_task())
        among[task] = source_of(host)
        limits = self._limits
        for late in evict(
            among, max_num=limits.max_num_waiting, max_num_per_source=limits.max_num_waiting_per_source
        ):
            self._complain(host, f"{len(among)} connections are waiting already", kind="waiting")
            late.cancel()
        try:
            yield
        finally:
            among.pop(task, None)

    async def _read_hello(self, client: socket.socket) -> tuple[bytes, str]:
        hello = bytearray()
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                while (name := parse_client_hello(hello)) is None:
                    data = await self._loop.sock_recv(client, _HELLO_READ_BYTES)
                    if not data:
                        raise FrameError(f"closed after {len(hello)} bytes, before the TLS hello was whole")
                    hello += data
        except TimeoutError:
            raise FrameError(f"no whole TLS hello within {self._limits.hello_timeout_s:g} s") from None
        return bytes(hello), name

    async def _dial(self, address: Address) -> Side:
        def make() -> Side:
            return Side(inward=self._down, outward=self._up)

        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                transport, side = await self._loop.create_connection(make, address.host, address.port)
        except TimeoutError:
            raise ConnectionError(f"{address} did not answer in {_DIAL_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise ConnectionError(f"cannot reach {address}: {why(error)}") from None
        own_host = transport.get_extra_info("sockname")[0]
        if transport.get_extra_info("peername")[:2] == (own_host, self.address.port):
            transport.abort()
            raise Refused(f"{address} leads back to this relay")
        return side

    def _complain(self, host: str, reason: str, *, kind: str, level: int = logging.WARNING) -> None:
        self.num_dropped += 1
        self._complaints.tell(
            f"dropped a connection from {host}: {reason}", about=host, kind=kind, level=level
        )

    def _reset_all(self) -> None:
        for task in self._tasks:
            task.cancel()
