"""A rank's entry at its cloud's gateway: what is said on the connection, and the rank's end of it.

The rank sends one line of JSON, `{"rank": 3, "address": "10.0.0.5:43211"}`. The gateway answers
`{"ok": true}` or `{"error": "one sentence"}`, the latter also later on, when it ends the registration. From
then on the rank sends empty lines now and then, and the gateway sends them back; the entry lasts as long as
the connection.
"""

import asyncio
import json
import logging
import random
import ssl
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from isthmus.errors import FrameError, Refused
from isthmus.job import Address, parse_address
from isthmus.wan.relays.sockets import why
from isthmus.wan.relays.strangers import Complaints
from isthmus.wan.trust.certificates import Identity, gateway_name

MAX_LINE_BYTES = 1024
LIFE_SIGN = b"\n"

_DIAL_TIMEOUT_S = 10.0
_MIN_RETRY_S = 0.2
_MAX_RETRY_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """How often a rank shows that it is alive, and after how long a silent end is given up."""

    interval_s: float = 5.0
    timeout_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a rank listens."""

    rank: int
    address: Address

    def to_line(self) -> bytes:
        """Return the line that a rank sends."""
        return _line({"rank": self.rank, "address": str(self.address)})

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Return the entry in a line, or raise FrameError with the reason that the rank is told."""
        match _parse(line):
            case {"rank": int(rank), "address": str(address)} if not isinstance(rank, bool):
                try:
                    return cls(rank=rank, address=parse_address(address))
                except ValueError as error:
                    raise FrameError(str(error)) from None
        raise FrameError("a registration is a rank and an address")


def answer_line(error: str | None) -> bytes:
    """Return the line by which a gateway accepts a registration, or ends it with a reason."""
    return _line({"ok": True} if error is None else {"error": error})


class Registration:
    """Keeps a rank registered: again and again if need be, until closed or turned down."""

    def __init__(
        self, gateway: Address, *, identity: Identity, entry: Entry, keep_alive: KeepAlive | None = None
    ) -> None:
        self._gateway = gateway
        self._identity = identity
        self._entry = entry
        self._keep_alive = keep_alive or KeepAlive()
        self._complaints = Complaints()
        self._registered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register; waits for a gateway that is not there yet, and raises Refused if it turns us down."""
        self._task = asyncio.create_task(self._keep())
        registered = asyncio.create_task(self._registered.wait())
        await asyncio.wait([self._task, registered], return_when=asyncio.FIRST_COMPLETED)
        registered.cancel()
        if self._task.done():
            self._task.result()

    async def wait_refused(self) -> None:
        """Wait until the gateway ends the registration for good, and raise its reason as Refused."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """Leave the gateway."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _keep(self) -> None:
        context = self._identity.ssl_client_context()
        retry_s = _MIN_RETRY_S
        while True:
            self._registered.clear()
            try:
                await self._register(context)
            except OSError as error:
                self._complain(why(error), kind="network")
            except FrameError as error:
                self._complain(error.message, kind="frame")
            except Refused as error:
                _log.error(
                    "gateway %s turned rank %d down: %s", self._gateway, self._entry.rank, error.message
                )
                raise
            # Ranks that lost the same gateway must not come back all at once.
            retry_s = _MIN_RETRY_S if self._registered.is_set() else min(2 * retry_s, _MAX_RETRY_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret

    def _complain(self, reason: str, *, kind: str) -> None:
        words = self._complaints.tell(str(self._gateway), reason, kind=kind)
        if words is not None:
            _log.warning("gateway %s: %s; trying again", self._gateway, words)

    async def _register(self, context: ssl.SSLContext) -> None:
        reader, writer = await self._dial(context)
        try:
            writer.write(self._entry.to_line())
            async with asyncio.timeout(self._keep_alive.timeout_s):
                _check_answer(await read_line(reader))
            self._registered.set()
            await self._stay(reader, writer)
        except ssl.SSLError as error:
            raise _failure(error, self._gateway) from None
        finally:
            writer.close()

    async def _dial(self, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                return await asyncio.open_connection(
                    self._gateway.host,
                    self._gateway.port,
                    ssl=context,
                    server_hostname=gateway_name(self._identity.cloud),
                    limit=MAX_LINE_BYTES,
                )
        except ssl.SSLError as error:
            raise _failure(error, self._gateway) from None

    async def _stay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_unanswered = 0
        while num_unanswered * self._keep_alive.interval_s < self._keep_alive.timeout_s:
            try:
                async with asyncio.timeout(self._keep_alive.interval_s):
                    line = await read_line(reader)
            except TimeoutError:
                writer.write(LIFE_SIGN)
                num_unanswered += 1
            else:
                num_unanswered = 0
                if line != LIFE_SIGN:
                    _check_answer(line)
        raise ConnectionError(f"it has been silent for {self._keep_alive.timeout_s:g} s")


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, of at most MAX_LINE_BYTES."""
    try:
        line = await reader.readline()
    except ValueError:
        raise FrameError(f"a line is longer than {MAX_LINE_BYTES} bytes") from None
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection has ended")
    return line


def _check_answer(line: bytes) -> None:
    match _parse(line):
        case {"ok": True}:
            return
        case {"error": str(reason)}:
            raise Refused(reason)
    raise FrameError(f"an answer that makes no sense: {line!r}")


def _failure(error: ssl.SSLError, gateway: Address) -> ConnectionError | Refused:
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ConnectionError("it ended the connection")
    return Refused(
        f"the certificate shown by or to the gateway at {gateway} was turned down: {why(error)}",
        hint="look at both folders with: isthmus certs show",
    )


def _line(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise FrameError("a line that is not JSON") from None
