"""Connections of a link over gRPC with mutual TLS: one call, one HTTP/2 connection each."""

import asyncio
import functools
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import unquote

import grpc
import grpc.aio

from isthmus.errors import FrameError, NotReady, Refused
from isthmus.wan.certificates import Identity
from isthmus.wan.handshake import VERSION_KEY, Hello, mismatch, read_hello
from isthmus.wan.link import Connection, Link
from isthmus.wan.packet import MAX_FRAME_BYTES
from isthmus.wan.sockets import Complaints, LoopThread, num_files_left, plain_host

log = logging.getLogger(__name__)

_SERVICE = "isthmus.Link"
_METHOD = "Connect"
_DIAL_TIMEOUT_S = 10.0
_GRACE_S = 0.5
_NUM_FILES_RESERVED = 256
_MAX_NUM_STRANGERS = 256
_REFUSALS = {grpc.StatusCode.FAILED_PRECONDITION: Refused, grpc.StatusCode.ABORTED: NotReady}

# gRPC's own window would stall a long fat pipe at 64 KiB; the link bounds what is under way by itself.
_OPTIONS = [
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.http2.lookahead_bytes", 64 * 1024 * 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_retries", 0),
    # Two runs must not share a port unnoticed.
    ("grpc.so_reuseport", 0),
]
# A connection carries one call. One that shows no certificate, or makes no call, is ended in the time that a
# dialler has.
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_concurrent_streams", 1),
    ("grpc.server_handshake_timeout_ms", int(1000 * _DIAL_TIMEOUT_S)),
    ("grpc.max_connection_idle_ms", int(1000 * _DIAL_TIMEOUT_S)),
]


@functools.cache
def process_loop() -> LoopThread:
    """The one event loop on which this process uses gRPC, for as long as it lives.

    grpc.aio has one completion queue per process; a loop that used it and was closed makes it drop the events
    of the others, so there is only one and nobody closes it.
    """
    return LoopThread(name="isthmus-wan")


def _client_options(server_name: str, proxy: str | None) -> list[tuple[str, object]]:
    own = [
        # Every lane is a connection of its own, never shared with another channel of this process.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.ssl_target_name_override", server_name),
        ("grpc.enable_http_proxy", 0 if proxy is None else 1),
    ]
    return [*_OPTIONS, *own, *([] if proxy is None else [("grpc.http_proxy", proxy)])]


class _ClientConnection:
    """The dialling end of a call."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self._call = call

    async def read(self) -> bytes:
        try:
            return await self._call.read() or b""
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(error.details()) from error
        except asyncio.InvalidStateError as error:
            raise ConnectionError("the call is over") from error

    async def write(self, frame: bytes) -> None:
        try:
            await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise ConnectionError("the call is over") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialer:
    """Opens connections to one rank of another cloud."""

    address: str
    server_name: str
    identity: Identity
    proxy: str | None = None

    @asynccontextmanager
    async def __call__(self, hello: Hello) -> AsyncIterator[tuple[Connection, Hello]]:
        """Dial and shake hands, and give the connection and what the peer said."""
        channel = grpc.aio.secure_channel(
            self.address,
            grpc.ssl_channel_credentials(
                self.identity.authority_pem, self.identity.key_pem, self.identity.certificate_pem
            ),
            options=_client_options(self.server_name, self.proxy),
        )
        call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(metadata=hello.to_metadata())
        try:
            yield _ClientConnection(call), await self._shake_hands(call, hello)
        finally:
            call.cancel()
            await channel.close()

    async def _shake_hands(self, call: grpc.aio.StreamStreamCall, hello: Hello) -> Hello:
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                metadata = await call.initial_metadata()
        except TimeoutError:
            raise ConnectionError(f"{self.address} does not answer") from None
        if not any(key == VERSION_KEY for key, _ in metadata):
            raise _failure(await call.code(), await call.details(), self.address)
        try:
            answer = read_hello(metadata)
        except FrameError as error:
            raise Refused(f"{self.address} answers with {error.message}") from error
        reason = mismatch(hello, answer)
        if reason is not None:
            raise Refused(reason)
        return answer


def _failure(code: grpc.StatusCode, details: str, address: str) -> ConnectionError | Refused:
    """What a call that never came up means: our peer's refusal, a certificate's, or a line that is down."""
    if code in _REFUSALS:
        return _REFUSALS[code](details)
    if "CERTIFICATE" in details or "Hostname Verification" in details:
        return Refused(
            f"the certificate shown by or to {address} was turned down: {_tls_reason(details)}",
            hint="let all clouds have theirs from one authority; look at both ends with: isthmus certs show",
        )
    # The last words of gRPC name the cause, such as `Connection refused (111)`.
    return ConnectionError(f"{address}: {details.rpartition(': ')[2]}")


def _tls_reason(details: str) -> str:
    """The words that matter of what gRPC says of a handshake, such as `certificate has expired`."""
    found = re.search(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)", details)
    if found is not None:
        reason = found[1].strip()
        return "another authority has signed it" if "local issuer" in reason else reason
    return "it names another cloud" if "Hostname Verification" in details else details


class Listener:
    """Accepts connections on one port: twice as many as are expected, since each may have a dead predecessor,
    and some for strangers, who have ten seconds to show a certificate.

    `find` gives the link that a valid hello asks for, or raises Refused with a sentence for both ends.
    """

    def __init__(self, *, identity: Identity, find: Callable[[Hello], Link], num_expected: int) -> None:
        self._identity = identity
        self._find = find
        self._num_expected = num_expected
        self._complaints = Complaints(log)

    async def start(self, address: str) -> int:
        """Listen at host:port, 0 for any free port; gives the port."""
        num_strangers = min(
            max(num_files_left(num_reserved=_NUM_FILES_RESERVED) // 4, 16), _MAX_NUM_STRANGERS
        )
        max_num = 2 * self._num_expected + num_strangers
        options = [*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", max_num)]
        self._server = grpc.aio.server(options=options)
        handlers = {_METHOD: grpc.stream_stream_rpc_method_handler(self._connect)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        pair = (self._identity.key_pem, self._identity.certificate_pem)
        credentials = grpc.ssl_server_credentials(
            [pair], self._identity.authority_pem, require_client_auth=True
        )
        port: int = self._server.add_secure_port(address, credentials)
        await self._server.start()
        return port

    async def close(self) -> None:
        """Stop listening and end all calls."""
        await self._server.stop(_GRACE_S)

    async def _connect(self, _: object, context: grpc.aio.ServicerContext) -> None:
        # Such as ipv4:10.0.0.7:4000 or ipv6:%5B::1%5D:4000.
        host = plain_host(unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]"))
        try:
            hello = read_hello(context.invocation_metadata())
            _check_certificate(hello, context)
            link = self._find(hello)
            link.admit(hello)
        except (FrameError, Refused) as error:
            text = f"refused {host}: {error.message}"
            self._complaints.tell(text, about=host, kind=type(error).__name__)
            is_final = not isinstance(error, NotReady)
            code = grpc.StatusCode.FAILED_PRECONDITION if is_final else grpc.StatusCode.ABORTED
            await context.abort(code, error.message)
        await context.send_initial_metadata(link.greeting(hello.lane).to_metadata())
        # It ends when this handler returns.
        await link.serve(hello.lane, context)


def _check_certificate(hello: Hello, context: grpc.aio.ServicerContext) -> None:
    """The certificate's name must be the name of the cloud that the caller claims to be."""
    names = [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", ())]
    if f"{hello.cloud}.isthmus" not in names:
        shown = ", ".join(names) or "no name"
        raise Refused(f"{hello.who} shows a certificate for {shown}, not for cloud {hello.cloud!r}")
