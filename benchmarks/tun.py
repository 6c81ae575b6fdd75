"""The emulated WAN for foreign programs: two network namespaces, joined by a shaped relay of IP packets.

    with TunWan(Shape(bandwidth_bps=1e9, delay_s=0.01), Shape(bandwidth_bps=1e9, delay_s=0.01)) as wan:
        subprocess.run(wan.command("a", ["ping", "-c", "3", wan.address("b")]))

It needs root, `ip` and /dev/net/tun. Isthmus needs none of them: this is for benchmarks beside others.
"""

import asyncio
import fcntl
import os
import secrets
import struct
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from shutil import which
from types import TracebackType
from typing import Literal, Self

from isthmus.errors import UserError
from isthmus.wan.shaping import DrivenLine, End, Piece, Shape, ShapedFlow, ShapedLine
from isthmus.wan.sockets import LoopThread, PreciseSelector

DEFAULT_MTU_BYTES = 9000

_TUN_DEVICE = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_MAX_PACKET_BYTES = 65_536
_NUM_PACKETS_AT_ONCE = 32
# The only queue that may fill is ours; a full one before it would slow a sender down on its own account.
_TX_QUEUE_PACKETS = "10000"
_MIN_QUEUE_S = 0.05
_MIN_QUEUE_BYTES = 65_536
_UNBOUND_QUEUE_BYTES = 4 * 2**20

Place = Literal["a", "b"]


class TunWan:
    """Two namespaces, "a" and "b", each with one address, and the WAN between them; gone at the end."""

    def __init__(
        self,
        shape_ab: Shape,
        shape_ba: Shape,
        *,
        queue_bytes: int | None = None,
        mtu_bytes: int = DEFAULT_MTU_BYTES,
        seed: int = 0,
    ) -> None:
        self._shapes = (shape_ab, shape_ba)
        self._queue_bytes = queue_bytes
        self._mtu_bytes = mtu_bytes
        self._seed = seed
        self._token = secrets.token_hex(3)
        self._wires: tuple[_Wire, _Wire] | None = None
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            near = self._make_end("a", stack)
            far = self._make_end("b", stack)
            thread = stack.enter_context(
                LoopThread(name="isthmus-tun", loop=asyncio.SelectorEventLoop(PreciseSelector()))
            )
            self._wires = thread.run(self._join(near, far))
            stack.callback(lambda: thread.run(self._stop()))
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def address(self, place: Place) -> str:
        """Return the address at which programs of this namespace listen."""
        return {"a": "10.231.0.1", "b": "10.231.0.2"}[place]

    def namespace(self, place: Place) -> str:
        """Return the name that `ip netns` knows."""
        return f"isthmus-{self._token}-{place}"

    def command(self, place: Place, command: Sequence[str]) -> list[str]:
        """Return the command that runs a program inside a namespace."""
        return ["ip", "netns", "exec", self.namespace(place), *command]

    @property
    def num_dropped(self) -> int:
        """How many packets found the queue full, both ways together."""
        return sum(wire.num_dropped for wire in self._wires or ())

    def _make_end(self, place: Place, stack: ExitStack) -> int:
        device, namespace = f"isth{self._token}{place}", self.namespace(place)
        tun = _open_tun(device)
        stack.callback(os.close, tun)
        _ip("netns", "add", namespace)
        stack.callback(_ip, "netns", "delete", namespace)
        _ip("link", "set", device, "netns", namespace)
        _ip("-n", namespace, "link", "set", device, "mtu", str(self._mtu_bytes))
        _ip("-n", namespace, "link", "set", device, "txqueuelen", _TX_QUEUE_PACKETS, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "address", "add", f"{self.address(place)}/30", "dev", device)
        return tun

    async def _join(self, near: int, far: int) -> tuple["_Wire", "_Wire"]:
        there, back = self._shapes
        ab = _Wire(near, far, there, queue_bytes=self._queue_bytes, seed=2 * self._seed)
        ba = _Wire(far, near, back, queue_bytes=self._queue_bytes, seed=2 * self._seed + 1)
        return ab, ba

    async def _stop(self) -> None:
        for wire in self._wires or ():
            wire.stop()


class _Wire:
    """One direction: packets from one TUN device to the other, by way of a line with a drop-tail queue."""

    def __init__(self, source: int, sink: int, shape: Shape, *, queue_bytes: int | None, seed: int) -> None:
        self.num_dropped = 0
        self._source = source
        self._sink = sink
        self._queue_bytes = queue_bytes or _default_queue_bytes(shape)
        self._flow = ShapedFlow()
        self._loop = asyncio.get_running_loop()
        line = ShapedLine(shape, seed=seed, quantum_bytes=_MAX_PACKET_BYTES)
        self._driven = DrivenLine(line, self._loop)
        self._flow.sink = self._write
        self._loop.add_reader(source, self._read)

    def stop(self) -> None:
        self._loop.remove_reader(self._source)

    def _read(self) -> None:
        for _ in range(_NUM_PACKETS_AT_ONCE):
            try:
                packet = os.read(self._source, _MAX_PACKET_BYTES)
            except BlockingIOError:
                break
            self._queue(packet)
        self._driven.run()

    def _queue(self, packet: bytes) -> None:
        if self._driven.line.backlog_bytes + len(packet) > self._queue_bytes:
            self.num_dropped += 1
        else:
            self._driven.line.offer(self._flow, memoryview(packet), self._loop.time())

    def _write(self, packet: Piece) -> None:
        if isinstance(packet, End):
            return
        try:
            os.write(self._sink, packet)
        except OSError:
            # The device is down or has no memory left: to IP, that is a lost packet like any other.
            self.num_dropped += 1


def _default_queue_bytes(shape: Shape) -> int:
    """Return the bandwidth-delay product, which lets one ordinary TCP flow fill the line."""
    if shape.bandwidth_bps is None:
        return _UNBOUND_QUEUE_BYTES
    return max(_MIN_QUEUE_BYTES, int(shape.bandwidth_bps / 8 * max(_MIN_QUEUE_S, 2 * shape.delay_s)))


def _open_tun(device: str) -> int:
    try:
        tun = os.open(_TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(
            f"{_TUN_DEVICE} cannot be opened: {error.strerror}",
            hint="run this as root, with the kernel's tun module",
        ) from None
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN_WITHOUT_HEADER))
    except OSError as error:
        os.close(tun)
        raise UserError(f"no TUN device can be made: {error.strerror}", hint="run this as root") from None
    return tun


def _ip(*arguments: str) -> None:
    program = which("ip")
    if program is None:
        raise UserError("the program `ip` is missing", hint="install iproute2")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}", hint="run this as root")
