"""The server name in a TLS ClientHello, read from the first bytes of a connection without ending TLS."""

import re
from typing import Final

from isthmus.errors import FrameError

MAX_HELLO_BYTES: Final = 16_384

_RECORD_HEADER_BYTES = 5
_RECORD_START = b"\x16\x03"  # a handshake, of any TLS version
_MAX_RECORD_BYTES = 16_384
_MAX_NUM_RECORDS = 16
_HANDSHAKE_HEADER_BYTES = 4
_HANDSHAKE_CLIENT_HELLO = 1
_VERSION_AND_RANDOM_BYTES = 34
_EXTENSION_SERVER_NAME = 0
_NAME_TYPE_HOST = 0
_HOST_NAME = re.compile(rb"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*")


def parse_client_hello(data: bytes | bytearray) -> str | None:
    """Return the server name in lower case, None if more bytes are needed, or raise FrameError.

    `data` is everything received so far; what follows the hello is not looked at.
    """
    message = _handshake_message(data)
    if message is None:
        if len(data) >= MAX_HELLO_BYTES:
            raise FrameError(f"the TLS hello is longer than {MAX_HELLO_BYTES} bytes")
        return None
    name = _server_name(_extensions(message))
    if name is None:
        raise FrameError("the TLS hello carries no server name")
    return name


class _Reader:
    """Takes fields off the front of some bytes; every length is checked against what is there."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def __bool__(self) -> bool:
        return self._place < len(self._data)

    def take(self, num_bytes: int) -> bytes:
        end = self._place + num_bytes
        if end > len(self._data):
            raise FrameError("the TLS hello ends in the middle of a field")
        taken = self._data[self._place : end]
        self._place = end
        return taken

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes))

    def vector(self, num_length_bytes: int) -> bytes:
        return self.take(self.number(num_length_bytes))


def _handshake_message(data: bytes | bytearray) -> bytes | None:
    """Return the body of the ClientHello, gathered from as many records as it spans."""
    message = bytearray()
    place = 0
    for _ in range(_MAX_NUM_RECORDS):
        num_bytes = _record_bytes(data[place : place + _RECORD_HEADER_BYTES])
        if num_bytes is None:
            return None
        place += _RECORD_HEADER_BYTES
        message += data[place : place + num_bytes]
        place += num_bytes
        whole_bytes = _hello_bytes(message)
        if whole_bytes is not None and len(message) >= whole_bytes:
            return bytes(message[_HANDSHAKE_HEADER_BYTES:whole_bytes])
    # Without this bound, a hello that trickles in byte by byte would cost quadratic time.
    raise FrameError(f"the TLS hello is cut into more than {_MAX_NUM_RECORDS} records")


def _record_bytes(header: bytes | bytearray) -> int | None:
    if not _RECORD_START.startswith(header[:2]):
        raise FrameError("the first bytes are not TLS")
    if len(header) < _RECORD_HEADER_BYTES:
        return None
    num_bytes = int.from_bytes(header[3:])
    if not 0 < num_bytes <= _MAX_RECORD_BYTES:
        raise FrameError(f"a TLS record of {num_bytes} bytes is not allowed")
    return num_bytes


def _hello_bytes(message: bytearray) -> int | None:
    if message and message[0] != _HANDSHAKE_CLIENT_HELLO:
        raise FrameError("the first TLS message is not a hello")
    if len(message) < _HANDSHAKE_HEADER_BYTES:
        return None
    num_bytes = _HANDSHAKE_HEADER_BYTES + int.from_bytes(message[1:_HANDSHAKE_HEADER_BYTES])
    if num_bytes > MAX_HELLO_BYTES:
        raise FrameError(f"the TLS hello is longer than {MAX_HELLO_BYTES} bytes")
    return num_bytes


def _extensions(message: bytes) -> _Reader:
    hello = _Reader(message)
    hello.take(_VERSION_AND_RANDOM_BYTES)
    for num_length_bytes in (1, 2, 1):  # session, cipher suites, compression
        hello.vector(num_length_bytes)
    return _Reader(hello.vector(2) if hello else b"")


def _server_name(extensions: _Reader) -> str | None:
    name = None
    while extensions:
        kind, body = extensions.number(2), extensions.vector(2)
        if kind != _EXTENSION_SERVER_NAME:
            continue
        if name is not None:
            raise FrameError("the TLS hello carries two server names")
        name = _host_name(_Reader(_Reader(body).vector(2)))
    return name


def _host_name(names: _Reader) -> str:
    kind, name = names.number(1), names.vector(2)
    if kind != _NAME_TYPE_HOST or names or not _HOST_NAME.fullmatch(name):
        raise FrameError("the server name in the TLS hello is not one host name")
    return name.decode("ascii").lower()
