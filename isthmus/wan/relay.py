"""Forwards TCP connections by TLS server name without ending TLS; shaped, it is a WAN in a box.

client ── Carrier ──▶ ShapedLine up ──────▶ server    all connections share the two lines;
client ◀────── ShapedLine down ◀── Carrier ── server    a Carrier is one direction of one connection
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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


class Carrier:
    """One direction of one connection: what comes from the source goes on the line, and then to the sink."""

    back: "Carrier"
    """The other direction."""

    def __init__(self, driven: DrivenLine, source: socket.socket, sink: socket.socket) -> None:
        self._driven = driven
        self._source = source
        self._sink = sink
        self._flow = ShapedFlow(sink=self._arrive)
        self._arrived: asyncio.Queue[Piece] = asyncio.Queue()
        self._arrived_bytes = 0
        line = driven.line
        has_bandwidth = line.shape.bandwidth_bps is not None
        # A receiver that is late now and then must not cost the line its rate.
        self._max_arrived_bytes = max(_WRITE_BUFFER_BYTES, line.buffer_bytes if has_bandwidth else 0)
        is_small = has_bandwidth and line.buffer_bytes <= _MAX_RECEIVE_BYTES
        tune(source, receive_bytes=line.buffer_bytes if is_small else None)

    async def carry(self, first: bytes = b"") -> None:
        """Pass bytes on to the end, those first that were read before; ConnectionError after a reset."""
        reading = asyncio.create_task(self._read(first))
        try:
            await self._write()
        finally:
            reading.cancel()
            self._driven.part(self._flow)

    def break_off(self) -> None:
        """Let a reset follow what is under way."""
        self._driven.break_off(self._flow)

    async def _read(self, first: bytes) -> None:
        loop, line = asyncio.get_running_loop(), self._driven.line
        data = first
        try:
            while True:
                if data:
                    self._driven.offer(self._flow, memoryview(data))
                room_bytes = await self._driven.room_bytes(self._flow)
                data = await loop.sock_recv(self._source, min(room_bytes, line.max_read_bytes))
                if not data:
                    break
        except OSError:
            self.break_off()
        else:
            self._driven.offer(self._flow, End.EOF)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while (piece := await self._arrived.get()) is not End.EOF:
            if isinstance(piece, End):
                raise ConnectionResetError
            try:
                await loop.sock_sendall(self._sink, piece)
            except OSError:
                self.back.break_off()
                return
            self._arrived_bytes -= len(piece)
            if self._flow.held and self._arrived_bytes <= self._max_arrived_bytes // 4:
                self._driven.release(self._flow)
        # A peer that has reset meanwhile cannot be shut down; its reset is on its way.
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)

    def _arrive(self, piece: Piece) -> None:
        """Take what comes out of the line; hold the flow while its receiver is not reading."""
        self._arrived.put_nowait(piece)
        if not isinstance(piece, End):
            self._arrived_bytes += len(piece)
            if self._arrived_bytes > self._max_arrived_bytes:
                self._flow.held = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """What a relay allows before it drops a connection.

    A connection counts as waiting until `unproven_s` after its target has answered: in that time the target
    disconnects a peer without a valid certificate.
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
        self._complaints = Complaints(_log)
        self.num_open = 0
        """The number of connections that are relayed now."""
        self.num_relayed = 0
        self.num_dropped = 0
        self._listener = listen(host, port)
        self.address = Address(host=self._listener.getsockname()[0], port=self._listener.getsockname()[1])
        thread = LoopThread(name="isthmus-relay", loop=asyncio.SelectorEventLoop(PreciseSelector()))
        lines = (ShapedLine(up or Shape(), seed=2 * seed), ShapedLine(down or Shape(), seed=2 * seed + 1))
        super().__init__(thread, *(DrivenLine(line, thread.loop) for line in lines))
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
            task.add_done_callback(partial(self._end, client))
            # In a flood of connections, others must have their turn.
            await asyncio.sleep(0)

    def _end(self, client: socket.socket, task: _Task) -> None:
        """Forget a connection; one that is cancelled before its turn has come has closed nothing itself."""
        self._tasks.discard(task)
        client.close()

    async def _serve(self, client: socket.socket, address: tuple[Any, ...]) -> None:
        """See one connection through, from its hello to its end."""
        host = plain_host(address[0])
        sockets, is_over = [client], False
        try:
            self._count(host)
            hello = await self._admit(sockets)
            is_over = await self._relay(hello, *sockets)
        except (FrameError, Refused) as error:
            self._complain(host, error.message, kind=type(error).__name__)
        except OSError as error:
            # A cut, a rank that has not started yet, a client that has left: nobody's misdeed.
            self._complain(host, str(error), kind="network", level=logging.INFO)
        finally:
            self._waiting.pop(_this_task(), None)
            for sock in sockets:
                if not is_over:
                    reset_on_close(sock)
                sock.close()

    async def _admit(self, sockets: list[socket.socket]) -> bytes:
        """Read the hello, and add the socket to the target that it names; an error has the reason if none."""
        if self._loop.time() < self._cut_until_s:
            raise ConnectionError("the link is cut")
        if self.num_open >= self._limits.max_num_open:
            raise Refused(f"{self.num_open} connections are open already")
        hello, name = await self._read_hello(sockets[0]) if self._reads_hello else (b"", "")
        address = self._route(name)
        if address is None:
            raise Refused(f"no route to {name!r}")
        await self._travel()
        await self._dial(address, sockets)
        return hello

    async def _relay(self, hello: bytes, client: socket.socket, server: socket.socket) -> bool:
        """Pass bytes both ways; gives whether both ways have come to their end."""
        up, down = Carrier(self._lines[0], client, server), Carrier(self._lines[1], server, client)
        up.back, down.back = down, up
        self.num_open += 1
        self.num_relayed += 1
        ways = [asyncio.create_task(up.carry(hello)), asyncio.create_task(down.carry())]
        self._loop.call_later(self._limits.unproven_s, self._waiting.pop, _this_task(), None)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.num_open -= 1
            for way in ways:
                way.cancel()
            ends = await asyncio.gather(*ways, return_exceptions=True)
        return not any(ends)

    def _count(self, host: str) -> None:
        """Count this connection as waiting, and drop those beyond the limits."""
        self._waiting[_this_task()] = source_of(host)
        limits = self._limits
        for late in evict(
            self._waiting,
            max_num=limits.max_num_waiting,
            max_num_per_source=limits.max_num_waiting_per_source,
        ):
            self._complain(host, f"{len(self._waiting)} connections are waiting already", kind="waiting")
            late.cancel()

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

    async def _dial(self, address: Address, sockets: list[socket.socket]) -> None:
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                server = await self._connect(address, sockets)
        except TimeoutError:
            raise ConnectionError(f"{address} did not answer in {_DIAL_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise ConnectionError(f"cannot reach {address}: {why(error)}") from None
        if server.getpeername()[:2] == (server.getsockname()[0], self.address.port):
            raise Refused(f"{address} leads back to this relay")

    async def _connect(self, address: Address, sockets: list[socket.socket]) -> socket.socket:
        """Connect to the first place of a name that answers: it may have one of each IP version."""
        failure = OSError(f"{address.host} has no address")
        places = await self._loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        for family, _, _, _, place in places:
            server = socket.socket(family)
            sockets.append(server)
            server.setblocking(False)
            try:
                await self._loop.sock_connect(server, place)
            except OSError as error:
                failure = error
                server.close()
                sockets.remove(server)
            else:
                return server
        raise failure

    def _complain(self, host: str, reason: str, *, kind: str, level: int = logging.WARNING) -> None:
        self.num_dropped += 1
        self._complaints.tell(
            f"dropped a connection from {host}: {reason}", about=host, kind=kind, level=level
        )

    def _reset_all(self) -> None:
        for task in self._tasks:
            task.cancel()


def _this_task() -> _Task:
    return cast("_Task", asyncio.current_task())
