"""Limits for connections that are not authenticated yet, and for what the log says about them.

Such a connection costs a descriptor, so their number is limited in all and per source address. gRPC's
listener, torch's store and Gloo accept connections by themselves: they have no limit per source address, and
no call that stops accepting without ending the rest. So this module finds their sockets among the descriptors
of the process: it disconnects unauthenticated connections beyond the limits, and makes listening sockets
accept no more.
"""

import asyncio
import ctypes
import ipaddress
import logging
import os
import resource
import socket
import ssl
import struct
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import unquote

_FIRST_WAIT_S = 60.0
_MAX_WAIT_S = 3600.0
# Who tries again does so within seconds; what has rested for longer is news.
_REST_S = 30.0
_MAX_NUM_KEPT = 1024
_SPELL_S = 60.0
_MAX_NUM_TOLD = 30
_MAX_LENGTH = 300
_IPV6_SOURCE_BITS = 64

_Kept = TypeVar("_Kept", bound=Hashable)


@dataclass(slots=True)
class _Told:
    told_s: float
    heard_s: float
    wait_s: float = _FIRST_WAIT_S
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
        words = self._next((about, kind), what[:_MAX_LENGTH])
        if self._clock() - self._spell_s >= _SPELL_S:
            self._spell_s, self._num_told = self._clock(), 0
        if words is None or self._num_told >= _MAX_NUM_TOLD:
            self._num_hidden += words is not None
            return None
        self._num_told += 1
        if self._num_hidden:
            words += f" (and {self._num_hidden} complaints about others)"
            self._num_hidden = 0
        return words

    def _next(self, key: tuple[str, str], what: str) -> str | None:
        now_s, known = self._clock(), self._told.get(key)
        if known is None or now_s - known.heard_s > _REST_S:
            self._remember(key, _Told(told_s=now_s, heard_s=now_s))
            return what
        known.heard_s = now_s
        known.num_untold += 1
        if now_s - known.told_s < known.wait_s:
            return None
        words = f"{what} ({known.num_untold} times in {now_s - known.told_s:.0f} s)"
        known.told_s, known.num_untold = now_s, 0
        known.wait_s = min(2 * known.wait_s, _MAX_WAIT_S)
        return words

    def _remember(self, key: tuple[str, str], told: _Told) -> None:
        # Peers may come from any number of addresses, so the oldest is forgotten.
        self._told.pop(key, None)
        if len(self._told) >= _MAX_NUM_KEPT:
            del self._told[next(iter(self._told))]
        self._told[key] = told


class Pending(Generic[_Kept]):
    """Unauthenticated connections by source; beyond a limit, the oldest of the source with most is evicted.

    So a source that floods a port evicts its own connections, and a connection from elsewhere is accepted.
    """

    def __init__(self) -> None:
        self._source: dict[_Kept, str] = {}
        self._by_source: dict[str, dict[_Kept, None]] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[_Kept]:
        return iter([*self._source])

    def __contains__(self, one: _Kept) -> bool:
        return one in self._source

    def add(self, one: _Kept, *, source: str) -> None:
        self._source[one] = source
        self._by_source.setdefault(source, {})[one] = None

    def discard(self, one: _Kept) -> None:
        """Remove a connection that has ended or is authenticated."""
        source = self._source.pop(one, None)
        if source is not None:
            del self._by_source[source][one]
            if not self._by_source[source]:
                del self._by_source[source]

    def evict(self, *, max_num: int, max_num_per_source: int) -> list[_Kept]:
        """Remove connections until both limits hold, and return them to be closed."""
        gone: list[_Kept] = []
        while self._by_source:
            busiest = max(self._by_source.values(), key=len)
            if len(self) <= max_num and len(busiest) <= max_num_per_source:
                break
            gone.append(next(iter(busiest)))
            self.discard(gone[-1])
        return gone


def source_of(host: str) -> str:
    """The source of an address: an IPv4 address itself, of an IPv6 address its /64, which one user owns."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, _IPV6_SOURCE_BITS), strict=False))
        address = address.ipv4_mapped
    return str(address)


def num_files_left(*, num_reserved: int) -> int:
    """The number of descriptors that this process may open, less those that are reserved."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2**20 if soft == resource.RLIM_INFINITY else soft
    return max(limit - num_reserved, 1)


log = logging.getLogger(__name__)

_NUM_FILES_RESERVED = 256
_MIN_NUM_PENDING = 16
_MAX_NUM_PENDING = 256
_CALM_S = 0.5
_BUSY_S = 0.1

_SO_ATTACH_FILTER = 26  # of Linux; the socket module does not name it
_BPF_RETURN = 0x06

HostPort = tuple[str, int]


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


def place_of(peer: str) -> HostPort:
    """Host and port of what gRPC calls a peer, such as `ipv4:10.0.0.7:4000` or `ipv6:%5B::1%5D:4000`."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port)


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
        self._pending: Pending[HostPort] = Pending()
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
        for place in self._pending:
            if place not in unknown:
                self._pending.discard(place)
        for place in unknown:
            if place not in self._pending:
                self._pending.add(place, source=source_of(place[0]))
        if surplus := set(self._evict()):
            self._disconnected |= surplus
            for place, sock in _connected(port):
                if place in surplus:
                    _disconnect(sock)

    def _evict(self) -> list[HostPort]:
        # Expected connections that are still missing will be unauthenticated at first.
        num_missing = max(self._num_expected - len(self._authenticated), 0)
        max_num = self._num_pending // 2 + num_missing
        share = max_num if self._is_behind_gateway else self._num_pending // 4 + num_missing
        return self._pending.evict(max_num=max_num, max_num_per_source=share)


def _connected(port: int) -> Iterator[tuple[HostPort, socket.socket]]:
    """The connections of a port of this process, with the peers' addresses."""
    for sock in own_sockets():
        if sock.getsockname()[1] == port:
            try:
                host, there = sock.getpeername()[:2]
            except OSError:
                # It listens, or the peer has left.
                continue
            yield (_plain(host), there), sock


def _disconnect(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        # The peer has disconnected first.
        return


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _drop_all_packets(sock: socket.socket) -> None:
    instructions = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:")


def why(error: OSError) -> str:
    """Return the reason in an error, in plain words where TLS or the system has them."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error) or type(error).__name__
