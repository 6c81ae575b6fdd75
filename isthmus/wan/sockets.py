"""Event loops on threads, sockets, and limits for connections whose peers have not shown who they are.

An unauthenticated connection costs a descriptor, so their number is limited in all and per source address.
gRPC's listener, torch's store and Gloo accept connections by themselves: they have no limit per source
address, and no call that stops accepting without ending the rest. So this module finds their sockets among
the descriptors of the process: it disconnects unauthenticated connections beyond the limits, and makes
listening sockets accept no more.
"""

import asyncio
import ctypes
import ipaddress
import logging
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
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import unquote

from isthmus.errors import UserError

log = logging.getLogger(__name__)

T = TypeVar("T")
_Pending = TypeVar("_Pending", bound=Hashable)
HostPort = tuple[str, int]


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
    or a name of several of its addresses. Nor does a name count that leads to the loopback device (Debian
    gives one to every machine, for itself alone), unless it is `localhost`.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    own = {str(place[0]) for family, *_, place in found if _is_own(family, place)}
    if len(own) > 1 and host == "localhost":
        return "127.0.0.1"
    if len(own) != 1:
        return None
    (address,) = own
    is_unseen = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return None if is_unseen and host not in (address, "localhost") else address


def _is_own(family: int, place: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((place[0], 0, *place[2:]))
    except OSError:
        return False
    return True


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


_FIRST_WAIT_S = 60.0
_MAX_WAIT_S = 3600.0
# Who tries again does so within seconds; what has rested for longer is news.
_REST_S = 30.0
_MAX_NUM_KEPT = 1024
_SPELL_S = 60.0
_MAX_NUM_TOLD = 30
_MAX_LENGTH = 300


@dataclass(slots=True)
class _Told:
    """A complaint that was told, and what has come since."""

    told_s: float
    heard_s: float = 0.0
    wait_s: float = 0.0
    num_untold: int = 0


class Complaints:
    """Limits log lines about refused peers.

    Complaints of one kind about one peer are told once, and then ever more rarely, with how often they came.
    The peer may have chosen words of a complaint, so new words are no news. At most 30 complaints are told in
    a minute.
    """

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._told: dict[tuple[str, str], _Told] = {}
        self._spell_s = clock()
        self._num_told = 0
        self._num_hidden = 0

    def tell(self, what: str, *, about: str, kind: str, level: int = logging.WARNING) -> None:
        """Log a complaint about a peer, unless one of its kind was told lately."""
        words = self.words(what, about=about, kind=kind)
        if words is not None:
            self._log.log(level, "%s", words)

    def words(self, what: str, *, about: str, kind: str) -> str | None:
        """The complaint as it should be told now, or None."""
        now_s = self._clock()
        if now_s - self._spell_s >= _SPELL_S:
            self._spell_s, self._num_told = now_s, 0
        known = self._known((about, kind), now_s)
        if now_s - known.told_s < known.wait_s:
            return None
        often = f" ({known.num_untold} times in {now_s - known.told_s:.0f} s)" if known.wait_s else ""
        known.told_s, known.num_untold = now_s, 0
        known.wait_s = min(2 * known.wait_s, _MAX_WAIT_S) or _FIRST_WAIT_S
        if self._num_told >= _MAX_NUM_TOLD:
            self._num_hidden += 1
            return None
        self._num_told += 1
        hidden = f" (and {self._num_hidden} complaints about others)" if self._num_hidden else ""
        self._num_hidden = 0
        return what[:_MAX_LENGTH] + often + hidden

    def _known(self, key: tuple[str, str], now_s: float) -> _Told:
        known = self._told.pop(key, None)
        if known is None or now_s - known.heard_s > _REST_S:
            known = _Told(told_s=now_s)
        self._told[key] = known
        # Peers may come from any number of addresses, so the one that rests longest is forgotten.
        if len(self._told) > _MAX_NUM_KEPT:
            del self._told[next(iter(self._told))]
        known.heard_s = now_s
        known.num_untold += 1
        return known


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


def own_sockets() -> Iterator[socket.socket]:
    """Each TCP socket of this process, as a second descriptor that is closed when the next is asked for."""
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 (it runs twice a second)
        twin = _twin(int(number))
        if twin is not None:
            with twin:
                if twin.family in (socket.AF_INET, socket.AF_INET6) and twin.type == socket.SOCK_STREAM:
                    yield twin


def _twin(number: int) -> socket.socket | None:
    """A second descriptor of a socket; None for other files, and for what was closed meanwhile."""
    try:
        # Never a second descriptor of a file, since closing it would release the locks of the first.
        if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):  # noqa: PTH115
            return None
        twin = os.dup(number)
    except OSError:
        return None
    try:
        return socket.socket(fileno=twin)
    except OSError:
        os.close(twin)
        return None


def listening_ports() -> set[int]:
    """The ports at which this process listens."""
    return {sock.getsockname()[1] for sock in own_sockets() if _listens(sock)}


def stop_accepting(ports: set[int]) -> None:
    """Make the sockets that listen at these ports drop new connections; open connections are not affected.

    The sockets stay open: if its listening socket is closed, torch's store ends the process or spins.
    """
    for sock in own_sockets():
        port = sock.getsockname()[1]
        if port in ports and _listens(sock):
            try:
                _drop_all_packets(sock)
            except OSError as error:
                # Some sandboxes have no packet filters; the run can continue, but anybody can connect.
                log.warning("port %d stays open for new connections: %s", port, why(error))


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _drop_all_packets(sock: socket.socket) -> None:
    instructions = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def place_of(peer: str) -> HostPort:
    """Host and port of what gRPC calls a peer, such as `ipv4:10.0.0.7:4000` or `ipv6:%5B::1%5D:4000`."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return plain_host(host.strip("[]")), int(port)


_NUM_FILES_RESERVED = 256
_MIN_NUM_PENDING = 16
_MAX_NUM_PENDING = 256
_CALM_S = 0.5
_BUSY_S = 0.1


class ConnectionLimiter:
    """Limits the unauthenticated connections at a port of gRPC, in all and per source.

    gRPC itself enforces `max_num_connections` and the time for a handshake. Behind a gateway all connections
    have one source, and the gateway limits them per source.
    """

    def __init__(self, *, num_expected: int, is_behind_gateway: bool = False) -> None:
        num_files = num_files_left(num_reserved=_NUM_FILES_RESERVED)
        self._num_expected = num_expected
        self._num_pending = min(max(num_files // 4, _MIN_NUM_PENDING), _MAX_NUM_PENDING)
        self._is_behind_gateway = is_behind_gateway
        self._authenticated: set[HostPort] = set()
        self._pending: dict[HostPort, str] = {}
        self._disconnected: set[HostPort] = set()
        self._complaints = Complaints(log)

    @property
    def max_num_connections(self) -> int:
        """The number of connections for gRPC to accept: each expected one may have a dead predecessor."""
        return 2 * self._num_expected + self._num_pending

    def authenticated(self, place: HostPort) -> None:
        """Note that a connection has shown a valid certificate and hello."""
        self._authenticated.add(place)

    def closed(self, place: HostPort) -> None:
        """Forget an authenticated connection that has ended."""
        self._authenticated.discard(place)

    async def watch(self, port: int) -> None:
        """Enforce the limits at a port until cancelled."""
        while True:
            try:
                self._look(port)
            except OSError as error:
                # No descriptor is free, say; the next try may find one.
                text = f"cannot list the connections of port {port}: {why(error)}"
                self._complaints.tell(text, about=str(port), kind="look")
            await asyncio.sleep(_BUSY_S if self._pending else _CALM_S)

    def _look(self, port: int) -> None:
        connected = {place for place, _ in _connected(port)}
        # gRPC closes a disconnected socket a moment later.
        self._disconnected &= connected
        unknown = connected - self._authenticated - self._disconnected
        still = {place: source for place, source in self._pending.items() if place in unknown}
        self._pending = still | {place: source_of(place[0]) for place in unknown - still.keys()}
        if surplus := set(self._evict()):
            self._disconnected |= surplus
            for place, sock in _connected(port):
                # Unless the peer has disconnected first.
                with suppress(OSError):
                    if place in surplus:
                        sock.shutdown(socket.SHUT_RDWR)

    def _evict(self) -> list[HostPort]:
        # Expected connections that are still missing will be unauthenticated at first.
        num_missing = max(self._num_expected - len(self._authenticated), 0)
        max_num = self._num_pending // 2 + num_missing
        share = max_num if self._is_behind_gateway else self._num_pending // 4 + num_missing
        return evict(self._pending, max_num=max_num, max_num_per_source=share)


def _connected(port: int) -> Iterator[tuple[HostPort, socket.socket]]:
    """The connections of a port of this process, with the peers' addresses."""
    for sock in own_sockets():
        if sock.getsockname()[1] == port:
            try:
                host, there = sock.getpeername()[:2]
            except OSError:
                # It listens, or the peer has left.
                continue
            yield (plain_host(host), there), sock
