"""What a WAN does to bytes: a shared bottleneck, then a delay; and how it is disturbed.

flow ─┐                                 ┌─▶ flow
flow ─┼─▶ backlog ─▶ line ─▶ under way ─┼─▶ flow
flow ─┘   (bounded)  (bps)   (delay)    └─▶ flow

`ShapedLine` is told the time; a `DrivenLine` follows the clock of an event loop.
"""

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum

from isthmus.errors import UserError
from isthmus.job.faults import Fault, FaultKind
from isthmus.wan.sockets import LoopThread

_TURN_S = 0.0005
_MIN_QUANTUM_BYTES = 1448
_MAX_QUANTUM_BYTES = 65_536
_BUFFER_S = 0.05
_MIN_BUFFER_BYTES = 65_536
_UNBOUND_BUFFER_BYTES = 4 * 2**20
_BULK_BYTES = 1024
_READ_BYTES = 65_536
# Timers fire about this much late on an ordinary kernel, so they are set early by as much.
_EARLY_S = 0.00025


class Direction(Enum):
    """Which way bytes go: up from the side that dialled, down to it."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One direction of a link: None is no limit, `delay_s` is one way, jitter adds up to `jitter_s` to it."""

    bandwidth_bps: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    connection_bps: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            is_rate = name.endswith("_bps")
            if not (value is None if is_rate else value == 0) and not 0 < value < math.inf:
                hint = (
                    "give bits per second above 0, or None for no limit" if is_rate else "give seconds, or 0"
                )
                raise UserError(f"{name} is {value}", hint=hint)

    @property
    def has_limit(self) -> bool:
        """Whether there is any rate that a slow-down could lower."""
        return self.bandwidth_bps is not None or self.connection_bps is not None


class End(Enum):
    """How a flow ends: the sender has finished, or broke off."""

    EOF = "eof"
    RESET = "reset"


Piece = memoryview | End


@dataclass(slots=True, eq=False)
class ShapedFlow:
    """One connection's place in a line; what arrives goes to `sink`, if it has one.

    `due_s` keeps its pieces in order, `ready_s` keeps to its own cap.
    """

    sink: Callable[[Piece], None] | None = None
    backlog: deque[Piece] = field(default_factory=deque)
    backlog_bytes: int = 0
    held: bool = False
    waits: bool = False
    ready_s: float = 0.0
    due_s: float = 0.0


class ShapedLine:
    """One direction of a link: flows take turns at the bottleneck, then each piece travels on its own.

    The bottleneck keeps a virtual clock: a piece starts when the one before it has left, however late the
    caller looks, so rates do not drift. Times are those of any one clock, in seconds, and never go back.
    """

    def __init__(self, shape: Shape, *, seed: int = 0, quantum_bytes: int | None = None) -> None:
        self.shape = shape
        self.backlog_bytes = 0
        self.num_bytes = 0
        """What has arrived so far."""
        self.quantum_bytes = quantum_bytes or _quantum_bytes(shape)
        self.buffer_bytes = _buffer_bytes(shape.bandwidth_bps)
        self.max_read_bytes = max(_READ_BYTES // self.quantum_bytes, 1) * self.quantum_bytes
        self._flow_buffer_bytes = min(self.buffer_bytes, _buffer_bytes(shape.connection_bps))
        self._random = random.Random(seed)  # noqa: S311 - jitter is no secret
        self._turns: list[tuple[float, int, ShapedFlow]] = []
        self._under_way: list[tuple[float, int, ShapedFlow, Piece]] = []
        self._num_pushed = 0
        self._free_s = 0.0
        self._silent_until_s = 0.0
        self._slow_until_s = 0.0
        self._slow_factor = 1.0
        self._num_to_corrupt = 0

    def room_bytes(self, flow: ShapedFlow) -> int:
        """Return how much of this flow may be read now: a quantum always, more while the buffer has room.

        No flow comes to hold more than is left free, so a newcomer finds a place however many others press.
        """
        free_bytes = min(self.buffer_bytes - self.backlog_bytes, self._flow_buffer_bytes)
        return max((free_bytes - flow.backlog_bytes) // 2, self.quantum_bytes - flow.backlog_bytes)

    def offer(self, flow: ShapedFlow, piece: Piece, now_s: float) -> None:
        """Put a piece at the end of the flow's backlog."""
        self._serve(now_s)
        if not flow.backlog:
            flow.ready_s = max(flow.ready_s, now_s)
        flow.backlog.append(piece)
        self._count(flow, _size_bytes(piece))
        self._queue(flow)

    def advance(self, now_s: float) -> list[tuple[ShapedFlow, Piece]]:
        """Return what has arrived by now, in order."""
        self._serve(now_s)
        arrived: list[tuple[ShapedFlow, Piece]] = []
        if now_s < self._silent_until_s:
            return arrived
        while self._under_way and self._under_way[0][0] <= now_s + _EARLY_S:
            _, _, flow, piece = heapq.heappop(self._under_way)
            self.num_bytes += _size_bytes(piece)
            arrived.append((flow, piece))
        return arrived

    def wake_s(self) -> float | None:
        """Return when `advance` has something to do next, or None if nothing waits."""
        wake_s = math.inf
        if self._under_way:
            wake_s = max(self._under_way[0][0] - _EARLY_S, self._silent_until_s)
        if self._turns:
            wake_s = min(wake_s, max(self._free_s, self._turns[0][0]))
        return None if wake_s == math.inf else wake_s

    def release(self, flow: ShapedFlow, now_s: float) -> None:
        """Serve the flow again, from now on."""
        self._serve(now_s)
        flow.held = False
        flow.ready_s = max(flow.ready_s, now_s)
        self._queue(flow)

    def drop(self, flow: ShapedFlow) -> None:
        """Forget what the flow has not sent yet."""
        flow.backlog.clear()
        self._count(flow, -flow.backlog_bytes)

    def break_off(self, flow: ShapedFlow, now_s: float) -> None:
        """Forget what the flow has not sent yet and let the reset follow what it has."""
        self._serve(now_s)
        self.drop(flow)
        self._depart(flow, End.RESET, now_s)

    def silence(self, until_s: float) -> None:
        """Let nothing pass until then; what waits or is under way comes after."""
        self._silent_until_s = max(self._silent_until_s, until_s)
        self._free_s = max(self._free_s, until_s)

    def slow_down(self, factor: float, until_s: float) -> None:
        """Divide every rate by `factor` until then."""
        self._slow_factor, self._slow_until_s = factor, until_s

    def corrupt(self, num_bytes: int) -> None:
        """Flip this many bytes of the next bulk data."""
        self._num_to_corrupt += num_bytes

    def _count(self, flow: ShapedFlow, num_bytes: int) -> None:
        flow.backlog_bytes += num_bytes
        self.backlog_bytes += num_bytes

    def _queue(self, flow: ShapedFlow) -> None:
        """Let the flow wait for its turn: it goes first whose last piece left, or might have left, first."""
        if flow.backlog and not flow.waits and not flow.held:
            flow.waits = True
            heapq.heappush(self._turns, (flow.ready_s, self._next_number(), flow))

    def _serve(self, now_s: float) -> None:
        while self._turns and max(self._free_s, self._turns[0][0]) <= now_s:
            flow = heapq.heappop(self._turns)[2]
            flow.waits = False
            if flow.backlog and not flow.held:
                self._transmit(flow)
                self._queue(flow)

    def _transmit(self, flow: ShapedFlow) -> None:
        piece = self._take(flow)
        start_s = max(self._free_s, flow.ready_s)
        num_bits = _size_bytes(piece) * 8 * (self._slow_factor if start_s < self._slow_until_s else 1)
        self._free_s = start_s + num_bits / (self.shape.bandwidth_bps or math.inf)
        flow.ready_s = start_s + num_bits / (self.shape.connection_bps or math.inf)
        self._depart(flow, piece, max(self._free_s, flow.ready_s))

    def _take(self, flow: ShapedFlow) -> Piece:
        piece = flow.backlog.popleft()
        if isinstance(piece, End):
            return piece
        if len(piece) > self.quantum_bytes:
            flow.backlog.appendleft(piece[self.quantum_bytes :])
            piece = piece[: self.quantum_bytes]
        self._count(flow, -len(piece))
        if self._num_to_corrupt and len(piece) >= _BULK_BYTES:
            piece = self._corrupted(piece)
        return piece

    def _corrupted(self, piece: memoryview) -> memoryview:
        num_bytes = min(self._num_to_corrupt, len(piece))
        self._num_to_corrupt -= num_bytes
        flipped = bytearray(piece)
        for place in self._random.sample(range(len(flipped)), num_bytes):
            flipped[place] ^= 0xFF
        return memoryview(flipped)

    def _depart(self, flow: ShapedFlow, piece: Piece, left_s: float) -> None:
        jitter_s = self._random.uniform(0, self.shape.jitter_s) if self.shape.jitter_s else 0.0
        flow.due_s = max(flow.due_s, left_s + self.shape.delay_s + jitter_s)
        heapq.heappush(self._under_way, (flow.due_s, self._next_number(), flow, piece))

    def _next_number(self) -> int:
        self._num_pushed += 1
        return self._num_pushed


def _size_bytes(piece: Piece) -> int:
    return 0 if isinstance(piece, End) else len(piece)


def _quantum_bytes(shape: Shape) -> int:
    slowest_bps = min(shape.bandwidth_bps or math.inf, shape.connection_bps or math.inf)
    return int(min(max(slowest_bps * _TURN_S / 8, _MIN_QUANTUM_BYTES), _MAX_QUANTUM_BYTES))


def _buffer_bytes(bps: float | None) -> int:
    return max(int(bps * _BUFFER_S / 8), _MIN_BUFFER_BYTES) if bps else _UNBOUND_BUFFER_BYTES


class DrivenLine:
    """A line that an event loop drives: what arrives on a flow goes to that flow's sink."""

    def __init__(self, line: ShapedLine, loop: asyncio.AbstractEventLoop) -> None:
        self.line = line
        self._loop = loop
        self._starved: list[tuple[ShapedFlow, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due_s: float | None = None

    def offer(self, flow: ShapedFlow, piece: Piece) -> None:
        """Put a piece on the line now."""
        self.line.offer(flow, piece, self._loop.time())
        self.run()

    def part(self, flow: ShapedFlow) -> None:
        """Forget a flow whose sink has ended."""
        flow.sink = None
        self.line.drop(flow)
        self.run()

    def break_off(self, flow: ShapedFlow) -> None:
        """Pass on that a sender was reset."""
        self.line.break_off(flow, self._loop.time())
        self.run()

    def release(self, flow: ShapedFlow) -> None:
        """Serve a flow whose receiver reads again."""
        self.line.release(flow, self._loop.time())
        self.run()

    def run(self) -> None:
        """Deliver what has arrived, and come back when the next is due."""
        for flow, piece in self.line.advance(self._loop.time()):
            if flow.sink is not None:
                flow.sink(piece)
        for one in [one for one in self._starved if self._has_room(one[0])]:
            self._starved.remove(one)
            if not one[1].done():
                one[1].set_result(None)
        self._set_timer(self.line.wake_s())

    async def room_bytes(self, flow: ShapedFlow) -> int:
        """Wait until the line has room for more of this flow, and return how much."""
        while not self._has_room(flow):
            self._starved.append((flow, self._loop.create_future()))
            await self._starved[-1][1]
        return self.line.room_bytes(flow)

    def _has_room(self, flow: ShapedFlow) -> bool:
        return self.line.room_bytes(flow) >= self.line.quantum_bytes

    def _set_timer(self, due_s: float | None) -> None:
        if self._timer is not None:
            if due_s == self._due_s:
                return
            self._timer.cancel()
        self._due_s = due_s
        self._timer = None if due_s is None else self._loop.call_at(due_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.run()


class Disturbed:
    """A link of two lines, up from the cloud that dials and down to it, that can be disturbed at any time."""

    def __init__(self, thread: LoopThread, up: DrivenLine, down: DrivenLine) -> None:
        self._thread = thread
        self._loop = thread.loop
        self._lines = (up, down)
        self._cut_until_s = 0.0
        self._silent_until_s = 0.0

    def disturb(self, fault: Fault, *, dialer: str) -> None:
        """Let a fault happen now, from any thread, on a link that the cloud `dialer` dials."""
        match fault.kind:
            case FaultKind.CUT:
                self.cut(fault.duration_s)
            case FaultKind.BLACKHOLE:
                self.blackhole(fault.duration_s)
            case FaultKind.SLOW_DOWN:
                self.slow_down(fault.factor, fault.duration_s)
            case FaultKind.CORRUPT:
                sender = fault.sender or fault.between[0]
                self.corrupt(Direction.UP if sender == dialer else Direction.DOWN, fault.num_bytes)

    def cut(self, duration_s: float) -> None:
        """Reset every connection now, and every new one until the time is over."""
        self._thread.call(self._cut, duration_s)

    def blackhole(self, duration_s: float) -> None:
        """Let nothing pass: connections stay, new ones hang, and all goes on when the time is over."""
        self._thread.call(self._silence, duration_s)

    def slow_down(self, factor: float, duration_s: float) -> None:
        """Divide the bandwidth of both directions by `factor` for this long."""
        self._check_can_slow_down()
        for one in self._lines:
            self._thread.call(one.line.slow_down, factor, self._loop.time() + duration_s)

    def corrupt(self, direction: Direction, num_bytes: int = 1) -> None:
        """Flip bytes of the next bulk data that goes this way."""
        self._thread.call(self._line(direction).line.corrupt, num_bytes)

    def _line(self, direction: Direction) -> DrivenLine:
        return self._lines[direction is Direction.DOWN]

    def _check_can_slow_down(self) -> None:
        if not any(one.line.shape.has_limit for one in self._lines):
            raise UserError("a link without bandwidth cannot slow down", hint="give the link a bandwidth")

    def _cut(self, duration_s: float) -> None:
        self._cut_until_s = max(self._cut_until_s, self._loop.time() + duration_s)
        self._reset_all()

    def _silence(self, duration_s: float) -> None:
        self._silent_until_s = max(self._silent_until_s, self._loop.time() + duration_s)
        for one in self._lines:
            one.line.silence(self._silent_until_s)
            one.run()

    async def _travel(self) -> None:
        """Wait as TCP's handshake does on a real path: a round trip, and as long as the path is silent."""
        await asyncio.sleep(sum(one.line.shape.delay_s for one in self._lines))
        await asyncio.sleep(max(0.0, self._silent_until_s - self._loop.time()))

    def _reset_all(self) -> None:
        raise NotImplementedError
