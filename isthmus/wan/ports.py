"""Limits for ports at which a library accepts connections by itself: gRPC's listener, torch's store and Gloo.

These libraries have no limit per source address, and no call that stops accepting without ending the rest.
So this module finds their sockets among the descriptors of the process: it disconnects unauthenticated
connections beyond the limits, and makes listening sockets accept no more.
"""

import asyncio
import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterator
from urllib.parse import unquote

from isthmus.wan.relays.sockets import why
from isthmus.wan.relays.strangers import Complaints, Pending, num_files_left, source_of

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
        self._complaints = Complaints()

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
                self._complain(port, error)
            await asyncio.sleep(_BUSY_S if self._pending else _CALM_S)

    def _complain(self, port: int, error: OSError) -> None:
        words = self._complaints.tell(str(port), why(error), kind="look")
        if words is not None:
            log.warning("cannot list the connections of port %d: %s", port, words)

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
