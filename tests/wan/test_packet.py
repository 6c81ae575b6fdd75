from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import FrameError
from isthmus.wan import packet as packet_module
from isthmus.wan.memory import MemoryLink
from isthmus.wan.packet import ALIGNMENT_BYTES, MAX_HEADER_BYTES, MAX_NUM_BUFFERS, Packet, pack, unpack
from isthmus.wan.shaping import Shape

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
packets = st.builds(
    Packet,
    st.dictionaries(st.text(max_size=10), json_values, max_size=5),
    st.lists(st.binary(max_size=200), max_size=6).map(tuple),
)


def body_of(packet: Packet) -> bytes:
    body = pack(packet)
    return b"".join(body.slice(0, body.num_bytes))


@given(packets)
def test_a_packet_comes_back_as_it_was(packet: Packet) -> None:
    body = body_of(packet)
    found = unpack(memoryview(body))
    assert found.header == packet.header
    assert [bytes(buffer) for buffer in found.buffers] == list(packet.buffers)
    assert len(body) == pack(packet).num_bytes


def test_a_packet_is_laid_out_once_however_often_and_to_whom_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lay_out = Mock(wraps=packet_module._lay_out)
    monkeypatch.setattr(packet_module, "_lay_out", lay_out)
    packet = Packet({"number": 1}, (bytes(300_000),))
    slow = Shape(bandwidth_bps=20e6)
    with MemoryLink("east", "west", shape=slow) as west, MemoryLink("east", "north") as north:
        for wan in (west, north):
            wan.end("east").send("bulk", packet)
        west.end("west").wait_ready(timeout_s=20)
        west.cut(0.05)
        received = west.end("west").receive("bulk", timeout_s=20)
        assert received.buffers[0] == packet.buffers[0]
        assert north.end("north").receive("bulk", timeout_s=20).header == packet.header
        west.end("west").send("back", received)
        assert west.end("east").receive("back", timeout_s=20).header == packet.header
    lay_out.assert_called_once_with(packet)


@given(packets, st.integers(0, 2000), st.integers(0, 2000))
def test_slices_are_the_bytes_between(packet: Packet, start: int, end: int) -> None:
    body = body_of(packet)
    assert b"".join(pack(packet).slice(start, end)) == body[start:end]


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5))
def test_buffers_start_on_a_boundary_that_tensors_can_use(buffers: list[bytes]) -> None:
    body = np.frombuffer(body_of(Packet({}, tuple(buffers))), np.uint8)
    for buffer in unpack(body.data).buffers:
        start = np.frombuffer(buffer, np.uint8).ctypes.data - body.ctypes.data
        assert start % ALIGNMENT_BYTES == 0


@given(packets, st.data())
def test_a_damaged_body_is_an_error_or_another_packet_but_nothing_else(
    packet: Packet, data: st.DataObject
) -> None:
    body = bytearray(body_of(packet))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    try:
        found = unpack(memoryview(bytes(body)))
    except FrameError:
        return
    assert found.payload_bytes <= len(body)


def test_what_cannot_be_sent_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="header"):
        pack(Packet({"long": "x" * MAX_HEADER_BYTES}))
    with pytest.raises(ValueError, match="buffers"):
        pack(Packet({}, (b"",) * (MAX_NUM_BUFFERS + 1)))
    with pytest.raises(ValueError, match="JSON"):
        pack(Packet({"nan": float("nan")}))
