"""Event loops on threads of their own, and TCP sockets as a relay needs them."""

import asyncio
import ipaddress
import logging
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from isthmus.errors import UserError
from isthmus.job import Address
from isthmus.wan.limits import Complaints, why

_LISTEN_BACKLOG = 256
_KEEPALIVE_IDLE_S = 30
_KEEPALIVE_INTERVAL_S = 10
_KEEPALIVE_NUM_PROBES = 3
_ACCEPT_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


T = TypeVar("T")


class Closing:
    """A thing that is closed at the end of its `with` block."""

    def close(self) -> None:
        """Release what it has."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called on the loop, soon; nothing happens once the loop has ended."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function)

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


def precise_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop whose timers are late by microseconds, not by up to a millisecond."""
    return asyncio.SelectorEventLoop(PreciseSelector())


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
    own = {str(place[0]): family for family, *_, place in found if _is_own(family, place)}
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


class Acceptor:
    """Hands every connection that comes to a listener to `receive`, with where it comes from, until closed.

    It does so in a callback: a task that awaits the next connection would lose the one that comes while the
    task is cancelled.
    """

    def __init__(
        self, listener: socket.socket, receive: Callable[[socket.socket, tuple[str, int]], None]
    ) -> None:
        self._listener = listener
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._complaints = Complaints(_log)
        self._resume()

    def close(self) -> None:
        """Stop listening."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, place = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # No file descriptor is left, say: that must not end the listener, nor keep it spinning.
            text = f"cannot accept a connection: {why(error)}"
            self._complaints.tell(text, about="accept", kind="network")
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume)
        else:
            sock.setblocking(False)
            self._receive(sock, place[:2])


async def connect(address: Address) -> socket.socket:
    """Return a socket connected to the first of the host's addresses that answers; cancelled, it is reset."""
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
            reset_on_close(server)
            server.close()
            raise
        else:
            return server
    raise failure or OSError(f"{address.host} has no address")


def ends_at(sock: socket.socket, listener: socket.socket) -> bool:
    """Return whether a connection that was dialled here ends at a listener of this machine."""
    there, here = sock.getpeername(), sock.getsockname()
    return bool(there[0] == here[0] and there[1] == listener.getsockname()[1])


def peer_name(sock: socket.socket) -> str:
    """Return where the other end is, for the log."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that has left"
    # As a listener for both IP versions shows one of the older.
    return str(Address(host=str(host).removeprefix("::ffff:"), port=port))


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
