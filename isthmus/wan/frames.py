"""The frames that travel between two ends, as bytes and as small frozen types.

Of a link, bulk connections carry `Chunk`s and the control connection carries `Ping`, `Pong`, `Ack`, `Abort`
and `Close`. Gateways and the ranks of a cloud use all of these but `Chunk` and `Ack`, and `Notice`. Every
field is checked against its bounds before it is used, and nothing is ever unpickled.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from isthmus.errors import FrameError
from isthmus.wan.packet import MAX_PACKET_BYTES

# Raised with every change of a frame, or of what any packet holds: ends of two protocols never talk.
PROTOCOL_VERSION = 6
MAX_CHUNK_BYTES = 1024 * 1024
MAX_NAME_BYTES = 120
MAX_REASON_BYTES = 4096
MAX_NUM_RANGES = 1024
MAX_NUM_STREAMS = 1024

# Nothing longer is taken from a connection.
MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 1024

_CHUNK = struct.Struct("<BBQQQQ")
_PING = struct.Struct("<BQ")
_PONG = struct.Struct("<BQQQ")
_ACK = struct.Struct("<BQHH")
_RANGE = struct.Struct("<QQ")
_CONSUMED = struct.Struct("<BQ")
_TEXT = struct.Struct("<BH")

# What gRPC, HTTP/2 and TLS add to a message: a prefix for the message, and for each 16 KiB
# an HTTP/2 frame header and a TLS record's header and tag.
_MESSAGE_BYTES = 5
_RECORD_BYTES = 16 * 1024
_PER_RECORD_BYTES = 9 + 22


class Kind(IntEnum):
    """The first byte of a frame."""

    CHUNK = 1
    PING = 2
    PONG = 3
    ACK = 4
    ABORT = 5
    CLOSE = 6
    NOTICE = 7


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a packet of a stream; `sequence` numbers the chunks of one direction of the link."""

    sequence: int
    stream: str
    packet: int
    packet_bytes: int
    offset: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Ping:
    """A question for a sign of life, with the sender's clock."""

    sent_ns: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer, with both clocks, so that round trip and clock offset follow."""

    sent_ns: int
    received_ns: int
    answered_ns: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Which chunks have come (all below `cumulative`, and the ranges), and what was consumed."""

    cumulative: int
    ranges: tuple[tuple[int, int], ...] = ()
    consumed_bytes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """The run is over for every cloud: who said so, and why."""

    cloud: str
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """The peer is done with this link."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A few plain values, by which a rank registers at its gateway or meets the other ranks."""

    values: Mapping[str, object]


ControlFrame = Ping | Pong | Ack | Abort | Close | Notice
Frame = Chunk | ControlFrame


def wire_bytes(frame_bytes: int) -> int:
    """What a frame costs on the line, with framing and encryption but without TCP and IP headers."""
    num_records = -(-frame_bytes // _RECORD_BYTES)
    return _MESSAGE_BYTES + frame_bytes + num_records * _PER_RECORD_BYTES


def encode_chunk(
    *, sequence: int, stream: str, packet: int, packet_bytes: int, offset: int, pieces: Sequence[memoryview]
) -> bytes:
    """A chunk's frame, its payload joined from the pieces in one copy."""
    name = stream.encode()
    return b"".join(
        (_CHUNK.pack(Kind.CHUNK, len(name), sequence, packet, packet_bytes, offset), name, *pieces)
    )


def encode(frame: ControlFrame) -> bytes:
    """A control frame as bytes."""
    match frame:
        case Ping():
            return _PING.pack(Kind.PING, frame.sent_ns)
        case Pong():
            return _PONG.pack(Kind.PONG, frame.sent_ns, frame.received_ns, frame.answered_ns)
        case Ack():
            return _encode_ack(frame)
        case Abort():
            return _encode_text(Kind.ABORT, f"{frame.cloud}\n{frame.reason}")
        case Close():
            return bytes([Kind.CLOSE])
        case Notice():
            return _encode_text(Kind.NOTICE, json.dumps(frame.values))


def decode(data: bytes) -> Frame:
    """The frame in these bytes; anything that does not fit exactly is a FrameError."""
    try:
        return _DECODERS[Kind(data[0])](memoryview(data))
    except (IndexError, ValueError, struct.error) as error:
        raise FrameError("bytes that are no frame") from error


def _encode_ack(ack: Ack) -> bytes:
    parts = [_ACK.pack(Kind.ACK, ack.cumulative, len(ack.ranges), len(ack.consumed_bytes))]
    parts += [_RANGE.pack(low, high) for low, high in ack.ranges]
    for stream, consumed_bytes in ack.consumed_bytes:
        name = stream.encode()
        parts += [_CONSUMED.pack(len(name), consumed_bytes), name]
    return b"".join(parts)


def _encode_text(kind: Kind, text: str) -> bytes:
    encoded = text.encode()[:MAX_REASON_BYTES]
    return _TEXT.pack(kind, len(encoded)) + encoded


def _decode_chunk(data: memoryview) -> Chunk:
    _, name_bytes, sequence, packet, packet_bytes, offset = _CHUNK.unpack_from(data)
    payload = data[_CHUNK.size + name_bytes :]
    if not 0 < packet_bytes <= MAX_PACKET_BYTES:
        raise FrameError(f"a packet of {packet_bytes} bytes")
    if not 0 < payload.nbytes <= MAX_CHUNK_BYTES or offset + payload.nbytes > packet_bytes:
        raise FrameError("a chunk that does not lie inside its packet")
    stream = _name(data[_CHUNK.size : _CHUNK.size + name_bytes])
    return Chunk(sequence, stream, packet, packet_bytes, offset, payload)


def _decode_ack(data: memoryview) -> Ack:
    _, cumulative, num_ranges, num_streams = _ACK.unpack_from(data)
    if num_ranges > MAX_NUM_RANGES or num_streams > MAX_NUM_STREAMS:
        raise FrameError("an acknowledgement with too many parts")
    offset = _ACK.size + num_ranges * _RANGE.size
    ranges = tuple((low, high) for low, high in _RANGE.iter_unpack(data[_ACK.size : offset]))
    if len(ranges) != num_ranges or any(low > high for low, high in ranges):
        raise FrameError("an acknowledgement with broken ranges")
    consumed_bytes = []
    for _ in range(num_streams):
        name_bytes, count = _CONSUMED.unpack_from(data, offset)
        offset += _CONSUMED.size
        consumed_bytes.append((_name(data[offset : offset + name_bytes]), count))
        offset += name_bytes
    if offset != data.nbytes:
        raise FrameError("an acknowledgement with bytes behind its end")
    return Ack(cumulative, ranges, tuple(consumed_bytes))


def _decode_abort(data: memoryview) -> Abort:
    cloud, _, reason = _decode_text(data).partition("\n")
    return Abort(cloud, reason)


def _decode_notice(data: memoryview) -> Notice:
    try:
        values = json.loads(_decode_text(data))
    except RecursionError as error:
        raise FrameError("a notice that is no JSON") from error
    if not isinstance(values, dict):
        raise FrameError("a notice that is no JSON object")
    return Notice(values)


def _decode_text(data: memoryview) -> str:
    _, text_bytes = _TEXT.unpack_from(data)
    if _TEXT.size + text_bytes != data.nbytes or text_bytes > MAX_REASON_BYTES:
        raise FrameError("a text of another length than it says")
    return bytes(data[_TEXT.size :]).decode(errors="replace")


def _decode_close(data: memoryview) -> Close:
    if data.nbytes != 1:
        raise FrameError("a close with bytes behind its end")
    return Close()


def _name(encoded: memoryview) -> str:
    name = bytes(encoded).decode("ascii")
    check_stream_name(name)
    return name


def check_stream_name(name: str) -> None:
    """Stream names are short and printable, since they are shown in logs and reports."""
    if not 0 < len(name) <= MAX_NAME_BYTES or not (name.isascii() and name.isprintable()):
        raise ValueError(f"a stream name is 1 to {MAX_NAME_BYTES} printable ASCII characters, not {name!r}")


_DECODERS: dict[Kind, Callable[[memoryview], Frame]] = {
    Kind.CHUNK: _decode_chunk,
    Kind.PING: lambda data: Ping(*_PING.unpack(data)[1:]),
    Kind.PONG: lambda data: Pong(*_PONG.unpack(data)[1:]),
    Kind.ACK: _decode_ack,
    Kind.ABORT: _decode_abort,
    Kind.CLOSE: _decode_close,
    Kind.NOTICE: _decode_notice,
}
