"""The link's contract inside one process: the same streams, windows and recovery, but no sockets.

with MemoryLink("east", "west", shape=Shape(bandwidth_bps=100e6, delay_s=0.03)) as wan:
    wan.end("east").send("hello", Packet({"text": "hi"}))
    wan.cut(2.0)
    wan.end("west").receive("hello")
"""

import asyncio
import functools
from types import TracebackType
from typing import Self

from isthmus.errors import Refused
from isthmus.wan.frames import MAX_FRAME_BYTES
from isthmus.wan.handshake import Hello, mismatch
from isthmus.wan.link import Connection, Link, LinkSettings
from isthmus.wan.loop import LoopThread
from isthmus.wan.shaping import End, Shape, ShapedFlow, ShapedLine


class MemoryLink:
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
        there, back = shape if isinstance(shape, tuple) else (shape or Shape(), shape or Shape())
        self._owns_loop = loop is None
        self._loop = loop or LoopThread(name="isthmus-memory")
        self._there = _Direction(there, self._loop, seed=2 * seed)
        self._back = _Direction(back, self._loop, seed=2 * seed + 1)
        self._open: set[_End] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._cut_until_s = 0.0
        self._silent_until_s = 0.0
        one, other = (Hello(cloud=end) if isinstance(end, str) else end for end in (first, second))
        settings = settings or LinkSettings(num_stripes=2)
        self._listener = Link(hello=other.to(one.sender), settings=settings, loop=self._loop)
        self._dialer = Link(hello=one.to(other.sender), settings=settings, loop=self._loop, dial=self._dial)

    def end(self, cloud: str) -> Link:
        """The end that stands at this cloud."""
        ends = {link.hello.cloud: link for link in (self._dialer, self._listener)}
        return ends[cloud]

    def cut(self, duration_s: float) -> None:
        """Break every connection now, and every new one until the time is over."""
        self._loop.call(lambda: self._cut(duration_s))

    def blackhole(self, duration_s: float) -> None:
        """Let nothing pass: connections stay, new ones hang, and all goes on when the time is over."""
        self._loop.call(lambda: self._blackhole(duration_s))

    def slow_down(self, factor: float, duration_s: float) -> None:
        """Divide the bandwidth of both directions by `factor` for this long."""
        until_s = self._loop.loop.time() + duration_s
        for way in (self._there, self._back):
            self._loop.call(functools.partial(way.line.slow_down, factor, until_s))

    def corrupt(self) -> None:
        """Spoil the next bulk frame each way, which breaks its connection as it would under TLS."""
        self._there.spoils_next = self._back.spoils_next = True

    def close(self) -> None:
        """Close both ends, what is under way first."""
        self._dialer.close()
        self._loop.call(self._listener.give_up)
        self._listener.join()
        if self._owns_loop:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._dialer.abort(f"{type(error).__name__}: {error}")
        self.close()

    async def _dial(self, hello: Hello) -> tuple[Connection, Hello]:
        now_s = self._loop.loop.time()
        if now_s < self._cut_until_s:
            raise ConnectionError("the link is cut")
        delay_s = self._there.line.shape.delay_s + self._back.line.shape.delay_s
        await asyncio.sleep(delay_s + max(0.0, self._silent_until_s - now_s))
        answer = self._listener.hello.on_lane(hello.lane)
        reason = mismatch(answer, hello) or self._listener.admit(hello)
        if reason is not None:
            raise Refused(reason)
        return self._connect(hello.lane), answer

    def _connect(self, lane: int) -> "_End":
        near, far = _End(self._there), _End(self._back)
        near.join(far)
        far.join(near)
        self._open |= {near, far}
        serving = asyncio.ensure_future(self._listener.serve(lane, far))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        serving.add_done_callback(lambda _: self._open.difference_update({near, far}))
        return near

    def _cut(self, duration_s: float) -> None:
        self._cut_until_s = max(self._cut_until_s, self._loop.loop.time() + duration_s)
        for end in list(self._open):
            end.break_off()

    def _blackhole(self, duration_s: float) -> None:
        self._silent_until_s = max(self._silent_until_s, self._loop.loop.time() + duration_s)
        for way in (self._there, self._back):
            way.line.silence(self._silent_until_s)
            way.run()


class _Direction:
    """A line that carries whole frames, driven by the loop's clock."""

    def __init__(self, shape: Shape, loop: LoopThread, *, seed: int) -> None:
        self.line = ShapedLine(shape, seed=seed, quantum_bytes=MAX_FRAME_BYTES)
        self.spoils_next = False
        self.sinks: dict[ShapedFlow, _End] = {}
        self._loop = loop.loop
        self._timer: asyncio.TimerHandle | None = None

    def offer(self, flow: ShapedFlow, frame: bytes) -> None:
        self.line.offer(flow, memoryview(frame), self._loop.time())
        self.run()

    def run(self) -> None:
        """Deliver what is due and come back when the next is."""
        for flow, piece in self.line.advance(self._loop.time()):
            sink = self.sinks.get(flow)
            if sink is not None and not isinstance(piece, End):
                sink.deliver(piece)
        if self._timer is not None:
            self._timer.cancel()
        wake_s = self.line.wake_s()
        self._timer = None if wake_s is None else self._loop.call_at(wake_s, self.run)


class _End:
    """One end of a connection in memory."""

    def __init__(self, outward: _Direction) -> None:
        self._outward = outward
        self._flow = ShapedFlow()
        self._inbound: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._peer: _End | None = None
        self._is_broken = False

    def join(self, peer: "_End") -> None:
        """Let what is written here be read there."""
        self._peer = peer
        self._outward.sinks[self._flow] = peer

    async def read(self) -> bytes | None:
        return await self._inbound.get()

    async def write(self, frame: bytes) -> None:
        while self._outward.line.room_bytes(self._flow) < 0 and not self._is_broken:
            self._room.clear()
            await self._room.wait()
        if self._is_broken:
            raise ConnectionError("the connection is broken")
        if self._outward.spoils_next and len(frame) > 1024:
            self._outward.spoils_next = False
            self.break_off()
        else:
            self._outward.offer(self._flow, frame)

    async def close(self) -> None:
        self.break_off()

    def deliver(self, frame: memoryview) -> None:
        """Take in a frame that has come down the line."""
        self._inbound.put_nowait(bytes(frame))
        if self._peer is not None:
            self._peer._room.set()

    def break_off(self) -> None:
        """Lose whatever is under way, both ways."""
        for end in (self, self._peer):
            if end is not None and not end._is_broken:
                end._is_broken = True
                end._outward.sinks.pop(end._flow, None)
                end._outward.line.drop(end._flow)
                end._inbound.put_nowait(None)
                end._room.set()
