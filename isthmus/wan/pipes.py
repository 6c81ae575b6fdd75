"""Sockets at both ends of a line: what one side reads comes out at the other, shaped, in order, bounded."""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

from isthmus.wan.loop import Alarm
from isthmus.wan.shaping import End, Piece, Shape, ShapedFlow, ShapedLine
from isthmus.wan.sockets import reset_on_close

_LATE_S = 0.001
_MAX_LATE_S = 0.5
_CATCH_UP_S = 0.05
_MAX_PAUSE_S = 0.005
_WRITE_BUFFER_BYTES = 262_144


class Pipe:
    """One direction of a relay: a line, driven by the running loop's clock, and the sides it ends at."""

    def __init__(self, shape: Shape, *, seed: int) -> None:
        self.line = ShapedLine(shape, seed=seed)
        self.num_bytes = 0
        # A receiver that is late now and then must not cost the line its rate.
        self.write_buffer_bytes = _WRITE_BUFFER_BYTES
        if shape.bandwidth_bps is not None:
            self.write_buffer_bytes = max(_WRITE_BUFFER_BYTES, self.line.buffer_bytes)
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self.run)
        self._lateness = _Lateness()
        self._sinks: dict[ShapedFlow, Side] = {}
        self._starved: deque[Side] = deque()

    def join(self, source: "Side", sink: "Side") -> None:
        """Let what `source` reads come out at `sink`."""
        self._sinks[source.flow] = sink

    def start(self, source: "Side", first: bytes) -> None:
        """Begin to read from a side, of which `first` has been read already."""
        if first:
            self.line.offer(source.flow, memoryview(first), self._loop.time())
        self._starved.append(source)
        self.run()

    def part(self, flow: ShapedFlow) -> None:
        """Forget a flow whose sink is gone."""
        self._sinks.pop(flow, None)
        self.line.drop(flow)
        self.run()

    def offer(self, source: "Side", piece: Piece) -> None:
        """Take what a side has read, and let it read on when there is room."""
        now_s = self._look()
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

    def break_off(self, flow: ShapedFlow) -> None:
        """Pass on that a side was reset."""
        self.line.break_off(flow, self._loop.time())
        self.run()

    def release(self, flow: ShapedFlow) -> None:
        """Serve a flow whose receiver reads again."""
        self.line.release(flow, self._loop.time())
        self.run()

    def run(self) -> None:
        """Deliver what has arrived, let sides read on, and wake when there is more."""
        for flow, piece in self.line.advance(self._look()):
            sink = self._sinks.get(flow)
            if sink is not None:
                self.num_bytes += 0 if isinstance(piece, End) else len(piece)
                sink.deliver(piece)
        self._feed()
        self._alarm.set(self.line.wake_s())

    def close(self) -> None:
        """Stop the clock."""
        self._alarm.set(None)

    def _look(self) -> float:
        now_s = self._loop.time()
        self._lateness.note(now_s, due_s=self._alarm.due_s, has_caught_up=self.line.is_busy(now_s))
        return now_s

    def _feed(self) -> None:
        for _ in range(len(self._starved)):
            side = self._starved.popleft()
            if self.line.room_bytes(side.flow) >= self.line.quantum_bytes:
                side.ready_s = self._loop.time()
                side.resume_reading()
            else:
                self._starved.append(side)


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
    """One socket of a relayed connection: its reads go into `inward`, `outward` comes out at it."""

    def __init__(self, *, inward: Pipe, outward: Pipe, on_lost: Callable[[], None]) -> None:
        self.flow = ShapedFlow()
        self.ready_s = 0.0
        self._inward = inward
        self._outward = outward
        self._on_lost = on_lost
        self._outward_flow: ShapedFlow | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(inward.line.max_read_bytes)
        self._presses = False
        self._has_read_all = False
        self._has_written_all = False

    def receive_from(self, other: "Side") -> None:
        """Let what `other` reads come out here."""
        self._outward_flow = other.flow
        self._outward.join(other, self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stay quiet until both sides are there."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._outward.write_buffer_bytes)
        self._transport.pause_reading()

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
        self._inward.offer(self, piece)

    def eof_received(self) -> bool:
        """Pass on the half-close; the other direction lives on."""
        self._has_read_all = True
        self._inward.offer(self, End.EOF)
        self._close_if_done()
        return True

    def pause_writing(self) -> None:
        """Hold the line for this connection: its receiver is not reading."""
        if self._outward_flow is not None:
            self._outward.line.hold(self._outward_flow)

    def resume_writing(self) -> None:
        """Let the line serve this connection again."""
        if self._outward_flow is not None:
            self._outward.release(self._outward_flow)

    def connection_lost(self, error: Exception | None) -> None:
        """Pass a reset on as a reset."""
        if error is not None:
            self._inward.break_off(self.flow)
        if self._outward_flow is not None:
            self._outward.part(self._outward_flow)
        self._on_lost()

    def was_pressing(self, at_s: float) -> bool:
        """Return whether the sender had more than the line takes, up to that time and without a pause."""
        self._presses = self._presses and at_s - self.ready_s < _MAX_PAUSE_S
        return self._presses

    def pause_reading(self) -> None:
        """Leave further bytes with the sender."""
        self._presses = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless the sender has finished."""
        if self._transport is not None and not self._has_read_all:
            self._transport.resume_reading()

    def deliver(self, piece: Piece) -> None:
        """Write what came out of the line."""
        if self._transport is None or self._transport.is_closing():
            return
        if piece is End.RESET:
            self.reset()
        elif piece is End.EOF:
            self._finish_writing(self._transport)
        else:
            self._transport.write(piece)

    def reset(self) -> None:
        """End the socket at once, so that its peer sees a reset."""
        if self._transport is not None and not self._transport.is_closing():
            reset_on_close(self._transport.get_extra_info("socket"))
            self._transport.abort()

    def _finish_writing(self, transport: asyncio.Transport) -> None:
        self._has_written_all = True
        # A peer that has reset meanwhile cannot be shut down; its reset is on its way to us.
        with contextlib.suppress(OSError):
            transport.write_eof()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._has_read_all and self._has_written_all and self._transport is not None:
            self._transport.close()


class Relayed:
    """A connection: two sockets and the flows between them; `closed` is done when both are gone."""

    def __init__(self, *, up: Pipe, down: Pipe) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._up = up
        self._down = down
        self._num_lost = 0
        self._is_reset = False
        self._client = Side(inward=up, outward=down, on_lost=self._lose)
        self._server = Side(inward=down, outward=up, on_lost=self._lose)

    async def start(self, client: socket.socket, server: socket.socket, hello: bytes) -> None:
        """Pass bytes both ways, the hello first."""
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: self._client, client)
        await loop.connect_accepted_socket(lambda: self._server, server)
        self._server.receive_from(self._client)
        self._client.receive_from(self._server)
        self._up.start(self._client, hello)
        self._down.start(self._server, b"")
        if self._is_reset:
            self.reset()

    def reset(self) -> None:
        """End both sockets at once."""
        self._is_reset = True
        self._client.reset()
        self._server.reset()

    def _lose(self) -> None:
        self._num_lost += 1
        if self._num_lost == 2 and not self.closed.done():
            self.closed.set_result(None)
