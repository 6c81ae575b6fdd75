"""TCP sockets as a relay needs them: prompt, watched, and ended by a reset where that is meant."""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable

from isthmus.errors import UserError
from isthmus.job import Address

_LISTEN_BACKLOG = 256
_KEEPALIVE_IDLE_S = 30
_KEEPALIVE_INTERVAL_S = 10
_KEEPALIVE_NUM_PROBES = 3
_ACCEPT_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, for all interfaces and both IP versions if `host` is empty."""
    try:
        if host or not socket.has_dualstack_ipv6():
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=_LISTEN_BACKLOG)
        else:
            listener = socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_LISTEN_BACKLOG, dualstack_ipv6=True
            )
    except OSError as error:
        raise UserError(
            f"cannot listen at {host or '*'}:{port}: {why(error)}",
            hint="choose a free port of this machine, or end the program that has it",
        ) from None
    listener.setblocking(False)
    return listener


async def accept_all(listener: socket.socket, receive: Callable[[socket.socket], None]) -> None:
    """Hand every connection that comes to `receive`, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock, _ = await loop.sock_accept(listener)
        except OSError as error:
            # A client that gave up, or no file descriptor left: neither may end the listener.
            _log.warning("cannot accept a connection: %s", error)
            await asyncio.sleep(_ACCEPT_PAUSE_S)
        else:
            receive(sock)


async def connect(address: Address) -> socket.socket:
    """Return a socket connected to the first of the host's addresses that answers."""
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, place in found:
        server = socket.socket(family, kind, protocol)
        server.setblocking(False)
        try:
            await loop.sock_connect(server, place)
        except OSError as error:
            server.close()
            failure = error
        except asyncio.CancelledError:
            server.close()
            raise
        else:
            return server
    raise failure or OSError(f"{address.host} has no address")


def is_dialled_by_itself(sock: socket.socket, listener: socket.socket) -> bool:
    """Return whether a connection ends at this machine's own listener."""
    there, here = sock.getpeername(), sock.getsockname()
    return bool(there[0] == here[0] and there[1] == listener.getsockname()[1])


def why(error: OSError) -> str:
    """Return the reason in an error, in the system's plain words where it has them."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error) or type(error).__name__


def peer_name(sock: socket.socket) -> str:
    """Return where the other end is, for the log."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that has left"
    return str(Address(host=host, port=port))


def reset_on_close(sock: socket.socket) -> None:
    """Make closing the socket send a reset and forget what was not sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def tune(sock: socket.socket, *, receive_bytes: int | None = None) -> None:
    """Send at once, notice a dead peer, and let the kernel hold no more than `receive_bytes` unread."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_NUM_PROBES)
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
