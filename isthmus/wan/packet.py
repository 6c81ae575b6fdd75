"""What lies on the wire: packets, the units that users of a link send, and the frames that carry them.

A packet is a JSON header and raw buffers, laid out as bytes once. Of a link, bulk connections carry `Chunk`s
of packets and the control connection carries `Ping`, `Pong`, `Ack`, `Abort` and `Close`. Gateways and the
ranks of a cloud use all of these but `Chunk` and `Ack`, and `Notice`. A chunk is a fixed head and raw bytes;
the others are JSON. Every field is checked against its bounds before it is used, and nothing is unpickled.
"""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, TypeAdapter

from isthmus.errors import FrameError, UserError
from isthmus.units import format_bytes

MAX_HEADER_BYTES = 64 * 1024
MAX_NUM_BUFFERS = 1024
# More than any accelerator computes in one piece; packets are cut into chunks, so size itself is no limit.
MAX_PACKET_BYTES = 64 * 1024**3
ALIGNMENT_BYTES = 16

PREFIX = struct.Struct("<II")
LENGTH = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Body:
    """A packet laid out for the wire: segments that follow each other, not yet joined."""

    segments: tuple[memoryview, ...]
    num_bytes: int

    def slice(self, start: int, end: int) -> list[memoryview]:
        """Pieces that together are the bytes from start to end."""
        pieces = []
        offset = 0
        for segment in self.segments:
            low, high = max(start - offset, 0), min(end - offset, segment.nbytes)
            if low < high:
                pieces.append(segment[low:high])
            offset += segment.nbytes
        return pieces


@dataclass(frozen=True, slots=True)
class Packet:
    """A header of plain JSON values and the raw buffers that belong to it.

    `body` is its layout, made when it is first sent; sent again or to others, it is not laid out again.
    """

    header: Mapping[str, object]
    buffers: Sequence[Buffer] = ()
    body: Body | None = field(default=None, repr=False, compare=False)

    @property
    def payload_bytes(self) -> int:
        """What the user wanted to move: the buffers alone."""
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)


def pack(packet: Packet) -> Body:
    """The layout of a packet, made at the first call; neither header nor buffers may change afterwards."""
    body = packet.body or _lay_out(packet)
    object.__setattr__(packet, "body", body)
    return body


def _lay_out(packet: Packet) -> Body:
    header = json.dumps(packet.header, separators=(",", ":"), allow_nan=False).encode()
    views = [memoryview(buffer).cast("B") for buffer in packet.buffers]
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a packet header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    if len(views) > MAX_NUM_BUFFERS:
        raise ValueError(f"{len(views)} buffers in one packet are over the limit of {MAX_NUM_BUFFERS}")
    lengths = b"".join(LENGTH.pack(view.nbytes) for view in views)
    segments = [memoryview(PREFIX.pack(len(header), len(views)) + lengths + header)]
    num_bytes = segments[0].nbytes
    for view in views:
        padding = -num_bytes % ALIGNMENT_BYTES
        segments += [memoryview(bytes(padding)), view]
        num_bytes += padding + view.nbytes
    if num_bytes > MAX_PACKET_BYTES:
        raise UserError(
            f"a message of {format_bytes(num_bytes)} is over the limit of {format_bytes(MAX_PACKET_BYTES)}",
            hint="make it smaller, such as by more micro-batches",
        )
    return Body(tuple(segments), num_bytes)


def unpack(body: memoryview) -> Packet:
    """The packet in a body, its buffers being views into it."""
    header_bytes, num_buffers = _prefix(body)
    offset = PREFIX.size
    lengths = [length for (length,) in LENGTH.iter_unpack(body[offset : offset + 8 * num_buffers])]
    offset += 8 * num_buffers
    header = _read_header(body[offset : offset + header_bytes])
    offset += header_bytes
    buffers = []
    for length in lengths:
        offset += -offset % ALIGNMENT_BYTES
        if length > body.nbytes - offset:
            raise FrameError("a packet whose buffers are longer than its body")
        buffers.append(body[offset : offset + length])
        offset += length
    if offset != body.nbytes:
        raise FrameError("a packet with bytes behind its last buffer")
    return Packet(header, tuple(buffers), Body((body,), body.nbytes))


def _prefix(body: memoryview) -> tuple[int, int]:
    if body.nbytes < PREFIX.size:
        raise FrameError("a packet shorter than its own prefix")
    header_bytes, num_buffers = PREFIX.unpack_from(body)
    if header_bytes > MAX_HEADER_BYTES or num_buffers > MAX_NUM_BUFFERS:
        raise FrameError("a packet whose header or number of buffers is over the limit")
    if PREFIX.size + LENGTH.size * num_buffers + header_bytes > body.nbytes:
        raise FrameError("a packet whose header is longer than its body")
    return header_bytes, num_buffers


def _read_header(encoded: memoryview) -> dict[str, object]:
    try:
        header = json.loads(bytes(encoded))
    except (ValueError, RecursionError) as error:
        raise FrameError("a packet header that is no JSON") from error
    if not isinstance(header, dict):
        raise FrameError("a packet header that is no JSON object")
    return header


# Raised with every change of a frame, or of what any packet holds: ends of two protocols never talk.
PROTOCOL_VERSION = 7
MAX_CHUNK_BYTES = 1024 * 1024
MAX_NAME_BYTES = 120
MAX_REASON_BYTES = 4096
MAX_NUM_RANGES = 1024
MAX_NUM_STREAMS = 1024

# Nothing longer is taken from a connection.
MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 1024

_CHUNK = struct.Struct("<BBQQQQ")
# JSON never begins with this byte.
_CHUNK_MARK = 1
_STREAM_NAME = re.compile(rf"[ -~]{{1,{MAX_NAME_BYTES}}}")

# What gRPC, HTTP/2 and TLS add to a message: a prefix for the message, and for each 16 KiB
# an HTTP/2 frame header and a TLS record's header and tag.
_MESSAGE_BYTES = 5
_RECORD_BYTES = 16 * 1024
_PER_RECORD_BYTES = 9 + 22


def check_stream_name(name: str) -> str:
    """Give a stream's name back; it must be short and printable, since logs and reports show it."""
    if not _STREAM_NAME.fullmatch(name):
        raise ValueError(f"a stream name is 1 to {MAX_NAME_BYTES} printable ASCII characters, not {name!r}")
    return name


def _check_range(ends: tuple[int, int]) -> tuple[int, int]:
    if ends[0] > ends[1]:
        raise ValueError("a range that ends before it begins")
    return ends


_Number = Annotated[int, Field(ge=0, lt=2**64)]
_StreamName = Annotated[str, AfterValidator(check_stream_name)]
_Range = Annotated[tuple[_Number, _Number], AfterValidator(_check_range)]


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

    sent_ns: _Number
    kind: Literal["ping"] = "ping"


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer, with both clocks, so that round trip and clock offset follow."""

    sent_ns: _Number
    received_ns: _Number
    answered_ns: _Number
    kind: Literal["pong"] = "pong"


@dataclass(frozen=True, slots=True)
class Ack:
    """Which chunks have come (all below `cumulative`, and the ranges), and what was consumed."""

    cumulative: _Number
    ranges: Annotated[tuple[_Range, ...], Field(max_length=MAX_NUM_RANGES)] = ()
    consumed_bytes: Annotated[tuple[tuple[_StreamName, _Number], ...], Field(max_length=MAX_NUM_STREAMS)] = ()
    kind: Literal["ack"] = "ack"


@dataclass(frozen=True, slots=True)
class Abort:
    """The run is over for every cloud: who said so, and why."""

    cloud: Annotated[str, Field(max_length=MAX_NAME_BYTES)]
    reason: Annotated[str, Field(max_length=MAX_REASON_BYTES)]
    kind: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True)
class Close:
    """The peer is done with this link."""

    kind: Literal["close"] = "close"


@dataclass(frozen=True, slots=True)
class Notice:
    """A few plain values, by which a rank registers at its gateway or meets the other ranks."""

    values: Mapping[str, JsonValue]
    kind: Literal["notice"] = "notice"


ControlFrame = Ping | Pong | Ack | Abort | Close | Notice
Frame = Chunk | ControlFrame
_CONTROL: TypeAdapter[ControlFrame] = TypeAdapter(Annotated[ControlFrame, Field(discriminator="kind")])


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
        (_CHUNK.pack(_CHUNK_MARK, len(name), sequence, packet, packet_bytes, offset), name, *pieces)
    )


def encode(frame: ControlFrame) -> bytes:
    """A control frame as JSON in one line; a long reason is cut."""
    if isinstance(frame, Abort):
        reason = frame.reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")
        frame = replace(frame, reason=reason)
    return _CONTROL.dump_json(frame)


def decode(data: bytes) -> Frame:
    """The frame in these bytes; anything that does not fit exactly is a FrameError."""
    try:
        if data[:1] == bytes([_CHUNK_MARK]):
            return _decode_chunk(memoryview(data))
        return _CONTROL.validate_json(data)
    except (ValueError, struct.error) as error:
        raise FrameError("bytes that are no frame") from error


def _decode_chunk(data: memoryview) -> Chunk:
    _, name_bytes, sequence, packet, packet_bytes, offset = _CHUNK.unpack_from(data)
    payload = data[_CHUNK.size + name_bytes :]
    if not 0 < packet_bytes <= MAX_PACKET_BYTES:
        raise FrameError(f"a packet of {packet_bytes} bytes")
    if not 0 < payload.nbytes <= MAX_CHUNK_BYTES or offset + payload.nbytes > packet_bytes:
        raise FrameError("a chunk that does not lie inside its packet")
    stream = check_stream_name(bytes(data[_CHUNK.size : _CHUNK.size + name_bytes]).decode())
    return Chunk(sequence, stream, packet, packet_bytes, offset, payload)
