"""Event loops on threads, sockets, and limits for connections whose peers have not shown who they are.

An unauthenticated connection costs a descriptor, so their number is limited in all and per source address.
Torch's store and Gloo accept connections by themselves and have no call that stops that without ending the
rest. So this module finds their listening sockets among the descriptors of the process and makes them accept
no more.
"""

import asyncio
import ctypes
import ipaddress
import logging
import math
import os
import resource
import select
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self, TypeVar

from isthmus.errors import UserError

log = logging.getLogger(__name__)

T = TypeVar("T")
_Pending = TypeVar("_Pending", bound=Hashable)


class Closing:
    """A thing that is closed at the end of its `with` block."""

    def close(self) -> None:
        """Release what it has."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LoopThread(Closing):
    """Runs coroutines for threads that have no event loop."""

    def __init__(self, *, name: str = "isthmus-wan", loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine; the future holds its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have a function called on the loop, soon; nothing happens once the loop has ended."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run a coroutine to its end."""
        return self.submit(coroutine).result(timeout_s)

    def close(self) -> None:
        """End the loop and its thread; whatever still runs is cancelled."""
        if self.loop.is_closed():
            return
        self.run(_cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


# The kernel may stretch a wait by a thousandth; a wait that ends early is only begun again.
_SHORTENED = 0.999


class PreciseSelector(selectors.EpollSelector):
    """Epoll that waits by `select`: epoll alone rounds each time-out up to a whole millisecond."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, at the latest after `timeout` seconds."""
        if timeout is not None and timeout > 0:
            ready, _, _ = select.select([self.fileno()], [], [], timeout * _SHORTENED)
            if not ready:
                return []
            timeout = 0
        return super().select(timeout)


def why(error: OSError) -> str:
    """Return the reason in an error, in plain words where TLS or the system has them."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error) or type(error).__name__


LISTEN_BACKLOG = 256
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, for all interfaces and both IP versions if `host` is empty."""
    is_dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise UserError(
            f"cannot listen at {host or '*'}:{port}: {why(error)}",
            hint="choose a free port of this machine, or end the program that has it",
        ) from None
    listener.setblocking(False)
    return listener


def try_to_bind(host: str, port: int) -> None:
    """Have the system say what is wrong with an address to listen at, by an OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def own_address(host: str) -> str | None:
    """The one address of this machine that a host names, to listen there and nowhere else.

    None if there is no such address: the host is that of a router or balancer that forwards to this machine,
    or a name of several addresses. Nor does a name count that leads to the loopback device (Debian gives one
    to every machine, for itself alone), unless it is `localhost`.
    """
    host = "127.0.0.1" if host == "localhost" else host
    try:
        places = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        (address,) = {str(place[0]) for *_, place in places}
        try_to_bind(address, 0)
    except (OSError, ValueError):
        return None
    is_unseen = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return None if is_unseen and host != address else address


def reset_on_close(sock: socket.socket) -> None:
    """Make closing the socket send a reset and forget what was not sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def tune(sock: socket.socket, *, receive_bytes: int | None = None) -> None:
    """Send at once, notice a dead peer, and let the kernel hold no more than `receive_bytes` unread."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)


_MINUTE_S = 60.0
_SILENT_S = 600.0
_MAX_NUM_TOLD = 30
_MAX_LENGTH = 300


class Complaints:
    """Limits log lines about refused peers.

    Complaints of one kind about one peer are told once in ten minutes, with how often they came since. The
    peer may have chosen words of a complaint, so new words are no news. At most 30 are told in a minute.
    """

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._told: dict[tuple[str, str], tuple[float, int]] = {}

    def tell(self, what: str, *, about: str, kind: str, level: int = logging.WARNING) -> None:
        """Log a complaint about a peer, unless one of its kind was told lately."""
        key, now_s = (about, kind), self._clock()
        told_s, num_untold = self._told.get(key, (-math.inf, 0))
        if now_s - told_s < _SILENT_S:
            self._told[key] = (told_s, num_untold + 1)
            return
        # What was not told lately is forgotten, since peers may come from any number of addresses.
        self._told = {one: told for one, told in self._told.items() if now_s - told[0] < _SILENT_S}
        if sum(now_s - told[0] < _MINUTE_S for told in self._told.values()) < _MAX_NUM_TOLD:
            self._told[key] = (now_s, 0)
            often = f" ({num_untold} times more before)" if num_untold else ""
            self._log.log(level, "%s", what[:_MAX_LENGTH] + often)


def evict(pending: dict[_Pending, str], *, max_num: int, max_num_per_source: int) -> list[_Pending]:
    """Remove connections by source until both limits hold, and return them to be closed.

    The oldest of the source with most goes first. So a source that floods a port evicts its own connections,
    and a connection from elsewhere is accepted.
    """
    gone: list[_Pending] = []
    counts = Counter(pending.values())
    while len(pending) > max_num or max(counts.values(), default=0) > max_num_per_source:
        busiest = max(counts, key=counts.__getitem__)
        gone.append(next(one for one, source in pending.items() if source == busiest))
        counts[busiest] -= 1
        del pending[gone[-1]]
    return gone


_IPV6_SOURCE_BITS = 64


def source_of(host: str) -> str:
    """The source of an address: an IPv4 address itself, of an IPv6 address its /64, which one user owns."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, _IPV6_SOURCE_BITS), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


def plain_host(host: str) -> str:
    """An address without the prefix by which a listener for both IP versions shows one of the older."""
    return host.removeprefix("::ffff:")


def num_files_left(*, num_reserved: int) -> int:
    """The number of descriptors that this process may open, less those that are reserved."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2**20 if soft == resource.RLIM_INFINITY else soft
    return max(limit - num_reserved, 1)


_SO_ATTACH_FILTER = 26  # of Linux; the socket module does not name it
_BPF_RETURN = 0x06


def listening_sockets() -> Iterator[socket.socket]:
    """Each listening TCP socket here, as a second descriptor that is closed when the next is asked for."""
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names alone)
        # A file that was closed meanwhile is none of them.
        with suppress(OSError):
            # Never a second descriptor of a file, since closing it would release the locks of the first.
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):  # noqa: PTH115
                continue
            with socket.socket(fileno=os.dup(int(number))) as twin:
                is_tcp = twin.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield twin


def listening_ports() -> set[int]:
    """The ports at which this process listens."""
    return {sock.getsockname()[1] for sock in listening_sockets()}


def stop_accepting(ports: set[int]) -> None:
    """Make the sockets that listen at these ports drop new connections; open connections are not affected.

    The sockets stay open: if its listening socket is closed, torch's store ends the process or spins.
    """
    for sock in listening_sockets():
        port = sock.getsockname()[1]
        if port in ports:
            try:
                _drop_all_packets(sock)
            except OSError as error:
                # Some sandboxes have no packet filters; the run can continue, but anybody can connect.
                log.warning("port %d stays open for new connections: %s", port, why(error))


def _drop_all_packets(sock: socket.socket) -> None:
    instructions = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
