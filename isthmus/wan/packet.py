"""A packet, the unit that users of a link send: a JSON header and raw buffers, laid out as bytes once."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    payload_bytes: int

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
    return Body(tuple(segments), num_bytes, sum(view.nbytes for view in views))


def unpack(body: memoryview) -> Packet:
    """The packet in a body, its buffers being views into it."""
    header_bytes, num_buffers = _prefix(body)
    offset = PREFIX.size
    lengths = [length for (length,) in LENGTH.iter_unpack(body[offset : offset + 8 * num_buffers])]
    offset += 8 * num_buffers
    header = _header(body[offset : offset + header_bytes])
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
    return Packet(header, tuple(buffers), Body((body,), body.nbytes, sum(lengths)))


def _prefix(body: memoryview) -> tuple[int, int]:
    if body.nbytes < PREFIX.size:
        raise FrameError("a packet shorter than its own prefix")
    header_bytes, num_buffers = PREFIX.unpack_from(body)
    if header_bytes > MAX_HEADER_BYTES or num_buffers > MAX_NUM_BUFFERS:
        raise FrameError("a packet whose header or number of buffers is over the limit")
    if PREFIX.size + LENGTH.size * num_buffers + header_bytes > body.nbytes:
        raise FrameError("a packet whose header is longer than its body")
    return header_bytes, num_buffers


def _header(encoded: memoryview) -> dict[str, object]:
    try:
        header = json.loads(bytes(encoded))
    except (ValueError, RecursionError) as error:
        raise FrameError("a packet header that is no JSON") from error
    if not isinstance(header, dict):
        raise FrameError("a packet header that is no JSON object")
    return header
