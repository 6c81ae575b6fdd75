"""The link's contract inside one process: the same streams, windows and recovery, but no sockets.

with MemoryLink("east", "west", shape=Shape(bandwidth_bps=100e6, delay_s=0.03)) as wan:
    wan.end("east").send("hello", Packet({"text": "hi"}))
    wan.cut(2.0)
    wan.end("west").receive("hello")
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from isthmus.errors import Refused
from isthmus.wan.exchange import LinkSettings
from isthmus.wan.handshake import Hello, mismatch
from isthmus.wan.link import Connection, Link
from isthmus.wan.packet import MAX_FRAME_BYTES
from isthmus.wan.shaping import Direction, Disturbed, DrivenLine, End, Piece, Shape, ShapedFlow, ShapedLine
from isthmus.wan.sockets import LoopThread


class MemoryLink(Disturbed):
    """Two ends, a line each way, and the faults of the emulator."""

    def __init__(
        self,
        first: str | Hello,
        second: str | Hello,
        *,
        shape: Shape | tuple[Shape, Shape] | None = None,
        settings: LinkSettings | None = None,
        loop: LoopThread | None = None,
        seed: int = 0,
    ) -> None:
        self._owns_thread = loop is None
        thread = loop or LoopThread(name="isthmus-memory")
        shapes = shape if isinstance(shape, tuple) else (shape or Shape(), shape or Shape())
        lines = [
            ShapedLine(one, seed=2 * seed + number, quantum_bytes=MAX_FRAME_BYTES)
            for number, one in enumerate(shapes)
        ]
        super().__init__(thread, *(DrivenLine(line, thread.loop) for line in lines))
        self._spoiled: set[DrivenLine] = set()
        self._serving: dict[asyncio.Task[None], _End] = {}
        one, other = (Hello(cloud=end) if isinstance(end, str) else end for end in (first, second))
        settings = settings or LinkSettings(num_stripes=2)
        self._listener = Link(hello=other.to(one.sender), settings=settings, loop=thread)
        self._dialer = Link(hello=one.to(other.sender), settings=settings, loop=thread, dial=self._dial)

    def end(self, cloud: str) -> Link:
        """The end that stands at this cloud."""
        ends = {link.hello.cloud: link for link in (self._dialer, self._listener)}
        return ends[cloud]

    def corrupt(self, direction: Direction, num_bytes: int = 1) -> None:  # noqa: ARG002 (one is as bad as many)
        """Spoil the next bulk frame that goes this way, which breaks its connection as it would under TLS."""
        self._spoiled.add(self._line(direction))

    def close(self) -> None:
        """Close both ends, what is under way first."""
        self._dialer.close()
        self._thread.call(self._listener.give_up)
        self._listener.join()
        if self._owns_thread:
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._dialer.abort(f"{type(error).__name__}: {error}")
        self.close()

    @asynccontextmanager
    async def _dial(self, hello: Hello) -> AsyncIterator[tuple[Connection, Hello]]:
        if self._loop.time() < self._cut_until_s:
            raise ConnectionError("the link is cut")
        await self._travel()
        if reason := mismatch(self._listener.hello, hello):
            raise Refused(reason)
        self._listener.admit(hello)
        near = self._connect(hello.lane)
        try:
            yield near, self._listener.greeting(hello.lane)
        finally:
            near.break_off()

    def _connect(self, lane: int) -> "_End":
        near, far = (_End(outward, self._spoiled) for outward in self._lines)
        near.join(far)
        far.join(near)
        serving = asyncio.ensure_future(self._listener.serve(lane, far))
        self._serving[serving] = far
        serving.add_done_callback(lambda done: self._serving.pop(done).break_off())
        return near

    def _reset_all(self) -> None:
        for end in self._serving.values():
            end.break_off()


class _End:
    """One end of a connection in memory."""

    def __init__(self, outward: DrivenLine, spoiled: set[DrivenLine]) -> None:
        self._outward = outward
        self._spoiled = spoiled
        self._flow = ShapedFlow()
        self._inbound: asyncio.Queue[bytes] = asyncio.Queue()
        self._peer: _End | None = None
        self._is_broken = False

    def join(self, peer: "_End") -> None:
        """Let what is written here be read there."""
        self._peer = peer
        self._flow.sink = peer.deliver

    async def read(self) -> bytes:
        return await self._inbound.get()

    async def write(self, frame: bytes) -> None:
        await self._outward.room_bytes(self._flow)
        if self._is_broken:
            raise ConnectionError("the connection is broken")
        if self._outward in self._spoiled and len(frame) > 1024:
            self._spoiled.discard(self._outward)
            self.break_off()
        else:
            self._outward.offer(self._flow, memoryview(frame))

    def deliver(self, frame: Piece) -> None:
        """Take in a frame that has come down the line."""
        if not isinstance(frame, End):
            self._inbound.put_nowait(bytes(frame))

    def break_off(self) -> None:
        """Lose what is under way, both ways."""
        for end in (self, self._peer):
            if end is not None and not end._is_broken:
                end._is_broken = True
                end._outward.part(end._flow)
                end._inbound.put_nowait(b"")
