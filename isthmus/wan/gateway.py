"""A cloud's one port: its ranks register here, and other clouds reach them by TLS server name.

    rank 3 ── TLS to gateway.east.isthmus: Notice(rank=3, address="10.0.0.5:43211") ──▶ gateway
    west   ── TLS to rank-3.east.isthmus ──▶ gateway ── the same bytes ──▶ 10.0.0.5:43211

The gateway answers a registration with an empty notice, or ends it, at once or later, by an abort with the
reason. The entry lasts as long as the connection, and the connection as long as both ends send heartbeats.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from isthmus.errors import FrameError, Refused
from isthmus.job import Address, parse_address
from isthmus.wan.certificates import Identity, gateway_name, parse_server_name
from isthmus.wan.heartbeat import MAX_LINE_BYTES, Channel, Heartbeat
from isthmus.wan.packet import Abort, Frame, Notice
from isthmus.wan.relay import Relay, RelayLimits
from isthmus.wan.sockets import Complaints, evict, listen, num_files_left, why

_HEARTBEAT = partial(Heartbeat, interval_s=5.0, timeout_s=15.0)

_DIAL_TIMEOUT_S = 10.0
_MIN_RETRY_S = 0.2
_MAX_RETRY_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a rank listens."""

    rank: int
    address: Address

    def to_notice(self) -> Notice:
        """The frame that a rank sends."""
        return Notice({"rank": self.rank, "address": str(self.address)})


def _read_entry(frame: Frame) -> Entry:
    """The entry in a frame; FrameError with the reason that the rank is told."""
    match frame:
        case Notice({"rank": int(rank), "address": str(address)}) if not isinstance(rank, bool):
            try:
                return Entry(rank=rank, address=parse_address(address))
            except ValueError as error:
                raise FrameError(str(error)) from None
    raise FrameError("a registration is a rank and an address")


class Registration:
    """Keeps a rank registered: again and again if need be, until closed or turned down."""

    def __init__(
        self,
        gateway: Address,
        *,
        identity: Identity,
        entry: Entry,
        heartbeat: Callable[[], Heartbeat] = _HEARTBEAT,
    ) -> None:
        self._gateway = gateway
        self._identity = identity
        self._entry = entry
        self._heartbeat = heartbeat
        self._complaints = Complaints(_log)
        self._registered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register; waits for a gateway that is not there yet, and raises Refused if it turns us down."""
        self._task = asyncio.create_task(self._keep())
        # However the task ends, nobody waits any longer.
        self._task.add_done_callback(lambda _: self._registered.set())
        await self._registered.wait()
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Leave the gateway."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        context = self._identity.ssl_client_context()
        retry_s = _MIN_RETRY_S
        while True:
            self._registered.clear()
            try:
                await self._register(context)
            except (OSError, FrameError) as error:
                reason = why(error) if isinstance(error, OSError) else error.message
                text = f"gateway {self._gateway}: {reason}; trying again"
                self._complaints.tell(text, about="gateway", kind=type(error).__name__)
            except Refused as error:
                _log.error("gateway %s refuses rank %d: %s", self._gateway, self._entry.rank, error.message)
                raise
            # Ranks that lost the same gateway must not come back all at once.
            retry_s = _MIN_RETRY_S if self._registered.is_set() else min(2 * retry_s, _MAX_RETRY_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret

    async def _register(self, context: ssl.SSLContext) -> None:
        """Register and stay until the connection ends."""
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                streams = await asyncio.open_connection(
                    *(self._gateway.host, self._gateway.port),
                    ssl=context,
                    server_hostname=gateway_name(self._identity.cloud),
                    limit=MAX_LINE_BYTES,
                )
            channel = Channel(*streams, self._heartbeat())
            try:
                channel.write(self._entry.to_notice())
                while True:
                    self._take(await channel.read())
            finally:
                channel.close()
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise ConnectionError("it ended the connection") from None
        except ssl.SSLError as error:
            raise Refused(
                f"the certificate shown by or to the gateway at {self._gateway} was refused: {why(error)}",
                hint="look at both folders with: isthmus certs show",
            ) from None

    def _take(self, answer: Frame) -> None:
        match answer:
            case Notice():
                self._registered.set()
            case Abort(reason=reason):
                raise Refused(reason)
            case _:
                raise FrameError("an answer that makes no sense")


_GREETING_TIMEOUT_S = 5.0
# By then a rank, or the registration, has disconnected a peer without a valid certificate.
_UNPROVEN_S = 15.0
_NUM_WAITING = 256
_NUM_UNREGISTERED = 64
_NUM_OPEN = 2048
_NUM_FILES_RESERVED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChange:
    """A rank has registered at an address, or has left if there is none; `num_registered` are there now."""

    rank: int
    address: Address | None
    num_registered: int


class Gateway:
    """Relays connections to the registered ranks of one cloud; other clouds are to open `num_expected`.

    Of two registrations of a rank the newer one holds: both come from this cloud, by its certificate, and the
    usual reason is a rank that was restarted before its old connection was known to be dead. The older one
    is told, so that two living ranks of the same number end in an error and not in a tug of war.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        num_ranks: int,
        num_expected: int = 0,
        on_change: Callable[[RankChange], None] | None = None,
        heartbeat: Callable[[], Heartbeat] = _HEARTBEAT,
    ) -> None:
        self._identity = identity
        self._context = identity.ssl_server_context()
        self._num_ranks = num_ranks
        self._on_change = on_change
        self._heartbeat = heartbeat
        self._holders: dict[int, tuple[Address, Channel]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # They all come through the relay, which tells their sources apart.
        self._unregistered: dict[asyncio.Task[None], str] = {}
        self._complaints = Complaints(_log)
        self._listener = listen("127.0.0.1", 0)
        self._server: asyncio.Server | None = None
        self._limits = _limits(num_ranks=num_ranks, num_expected=num_expected)
        self._relay: Relay | None = None

    async def start(self, host: str, port: int) -> Address:
        """Listen, on all interfaces if `host` is empty, and return the address that was bound."""
        self._server = await asyncio.start_server(self._receive, sock=self._listener, limit=MAX_LINE_BYTES)
        self._relay = Relay(self.route, limits=self._limits, host=host, port=port)
        return self._relay.address

    async def close(self) -> None:
        """Reset what is relayed and let go of all registrations."""
        if self._relay is not None:
            self._relay.close()
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def route(self, name: str) -> Address:
        """Return where a server name leads, or raise Refused with the reason."""
        found = parse_server_name(name)
        if found is None:
            raise Refused(f"{name!r} is not the name of a rank")
        cloud, part = found
        if cloud != self._identity.cloud:
            raise Refused(f"this is the gateway of {self._identity.cloud}, not of {cloud}")
        if name == gateway_name(cloud):
            return Address(host="127.0.0.1", port=self._listener.getsockname()[1])
        rank = int(part.removeprefix("rank-"))
        if rank not in self._holders:
            raise Refused(f"rank {rank} of {cloud} has not registered")
        return self._holders[rank][0]

    def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: the task that asyncio makes of one logs a traceback when it is cancelled.
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        self._unregistered[task] = ""
        task.add_done_callback(partial(self._settle, writer))
        max_num = _NUM_UNREGISTERED + self._num_ranks
        for late in evict(self._unregistered, max_num=max_num, max_num_per_source=max_num):
            late.cancel()

    def _settle(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        # Not in the task itself, which may have been cancelled before its first step.
        self._tasks.discard(task)
        self._unregistered.pop(task, None)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await writer.start_tls(self._context, ssl_handshake_timeout=_GREETING_TIMEOUT_S)
        except OSError as error:
            self._complain(why(error), kind="network")
            return
        channel = Channel(reader, writer, self._heartbeat())
        try:
            self._check_cloud(writer)
            await self._register(channel)
        except (FrameError, Refused) as error:
            self._complain(error.message, kind=type(error).__name__)
            channel.write(Abort(self._identity.cloud, error.message))
        except OSError as error:
            _log.info("a registration ended: %s", why(error))

    def _complain(self, reason: str, *, kind: str) -> None:
        self._complaints.tell(f"refused a registration: {reason}", about="a rank", kind=kind)

    def _check_cloud(self, writer: asyncio.StreamWriter) -> None:
        names = [name for _, name in writer.get_extra_info("peercert").get("subjectAltName", ())]
        if f"{self._identity.cloud}.isthmus" not in names:
            raise Refused(f"only ranks of {self._identity.cloud} register here, not {', '.join(names)}")

    async def _register(self, channel: Channel) -> None:
        async with asyncio.timeout(_GREETING_TIMEOUT_S):
            entry = _read_entry(await channel.read())
        if not 0 <= entry.rank < self._num_ranks:
            raise Refused(f"{self._identity.cloud} has no rank {entry.rank}, only 0 to {self._num_ranks - 1}")
        self._admit(entry, channel)
        try:
            await channel.read()
            raise FrameError("a registered rank only sends heartbeats")
        finally:
            if self._holders[entry.rank][1] is channel:
                del self._holders[entry.rank]
                self._tell(entry.rank, None)

    def _admit(self, entry: Entry, channel: Channel) -> None:
        if entry.rank in self._holders:
            _, older = self._holders[entry.rank]
            reason = f"rank {entry.rank} has been registered again, at {entry.address}"
            older.write(Abort(self._identity.cloud, reason))
            older.close()
        self._holders[entry.rank] = (entry.address, channel)
        if (task := asyncio.current_task()) is not None:
            self._unregistered.pop(task, None)
        channel.write(Notice({}))
        self._tell(entry.rank, entry.address)

    def _tell(self, rank: int, address: Address | None) -> None:
        if self._on_change is not None:
            self._on_change(RankChange(rank=rank, address=address, num_registered=len(self._holders)))


def _limits(*, num_ranks: int, num_expected: int) -> RelayLimits:
    """Limits for the descriptors of this process: two per open connection, three per registered rank."""
    num_files = num_files_left(num_reserved=_NUM_FILES_RESERVED + _NUM_UNREGISTERED + 3 * num_ranks)
    num_waiting = max(min(_NUM_WAITING + num_expected, num_files // 4), 4)
    return RelayLimits(
        unproven_s=_UNPROVEN_S,
        max_num_waiting=num_waiting,
        max_num_waiting_per_source=num_waiting // 4 + min(num_expected, num_waiting // 2),
        max_num_open=max(min(max(_NUM_OPEN, 2 * num_expected), (num_files - num_waiting) // 2), 4),
    )
