import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import FrameError
from isthmus.wan.packet import (
    MAX_CHUNK_BYTES,
    MAX_NUM_RANGES,
    MAX_PACKET_BYTES,
    MAX_REASON_BYTES,
    Abort,
    Ack,
    Chunk,
    Close,
    ControlFrame,
    Notice,
    Ping,
    Pong,
    decode,
    encode,
    encode_chunk,
    wire_bytes,
)

u64 = st.integers(0, 2**64 - 1)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
ranges = st.tuples(u64, u64).map(lambda pair: (min(pair), max(pair)))
control_frames = st.one_of(
    st.builds(Ping, u64),
    st.builds(Pong, u64, u64, u64),
    st.builds(
        Ack,
        u64,
        st.lists(ranges, max_size=5).map(tuple),
        st.lists(st.tuples(names, u64), max_size=5).map(tuple),
    ),
    st.builds(Abort, names, st.text(max_size=100)),
    st.just(Close()),
    st.builds(Notice, st.dictionaries(names, st.integers() | st.text(max_size=20), max_size=5)),
)


def chunk_frame(
    *, payload: bytes = b"payload", packet_bytes: int = 100, offset: int = 3, stream: str = "s"
) -> bytes:
    return encode_chunk(
        sequence=7,
        stream=stream,
        packet=2,
        packet_bytes=packet_bytes,
        offset=offset,
        pieces=[memoryview(payload)],
    )


@given(control_frames)
def test_control_frames_come_back_as_they_were(frame: ControlFrame) -> None:
    assert decode(encode(frame)) == frame


@given(u64, names, u64, st.integers(1, MAX_PACKET_BYTES), st.binary(min_size=1, max_size=100), st.data())
def test_chunks_come_back_as_they_were(
    sequence: int, stream: str, packet: int, packet_bytes: int, payload: bytes, data: st.DataObject
) -> None:
    packet_bytes = max(packet_bytes, len(payload))
    offset = data.draw(st.integers(0, packet_bytes - len(payload)))
    frame = encode_chunk(
        sequence=sequence,
        stream=stream,
        packet=packet,
        packet_bytes=packet_bytes,
        offset=offset,
        pieces=[memoryview(payload[:1]), memoryview(payload[1:])],
    )
    assert decode(frame) == Chunk(sequence, stream, packet, packet_bytes, offset, memoryview(payload))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        b"\x07",
        b"\xff" * 100,
        encode(Close()) + b"x",
        encode(Ping(1)) + b"x",
        encode(Ping(1))[:-1],
        encode(Ack(1, ((2, 3),)))[:-1],
        encode(Ack(1, ((3, 2),))),
        encode(Ack(1, tuple((number, number) for number in range(MAX_NUM_RANGES + 1)))),
        encode(Ack(1, (), (("new\nline", 1),))),
        encode(Ping(2**64)),
        encode(Ping(-1)),
        b'{"kind":"ping","sent_ns":1e400}',
        b'{"kind":"notice","values":' + b"[" * 100_000,
        encode(Abort("east", "why"))[:-1],
        chunk_frame(payload=b""),
        chunk_frame(packet_bytes=0),
        chunk_frame(packet_bytes=MAX_PACKET_BYTES + 1),
        chunk_frame(offset=99),
        chunk_frame(offset=2**64 - 1),
        chunk_frame(stream="new\nline"),
        chunk_frame(stream=""),
        chunk_frame(payload=bytes(MAX_CHUNK_BYTES + 1), packet_bytes=MAX_PACKET_BYTES),
    ],
)
def test_what_does_not_fit_exactly_is_no_frame(frame: bytes) -> None:
    with pytest.raises(FrameError):
        decode(frame)


def test_a_hundred_thousand_mutated_frames_are_frames_or_errors() -> None:
    rng = random.Random(5)
    seeds = [
        encode(Ping(123456789)),
        encode(Pong(1, 2, 3)),
        encode(Ack(10, ((12, 15), (20, 20)), (("activations", 12345), ("gradients", 9)))),
        encode(Abort("east", "out of memory")),
        encode(Close()),
        chunk_frame(payload=bytes(range(64))),
    ]
    num_refused = 0
    for _ in range(100_000):
        try:
            frame = decode(mutated(rng.choice(seeds), rng))
        except FrameError:
            num_refused += 1
        else:
            assert isinstance(frame, Chunk | Ping | Pong | Ack | Abort | Close | Notice)
    assert 10_000 < num_refused < 100_000


def mutated(frame: bytes, rng: random.Random) -> bytes:
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(4)
        if kind == 0 and changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        elif kind == 1:
            changed = changed[: rng.randint(0, len(changed))]
        elif kind == 2:
            changed += rng.randbytes(rng.randint(1, 20))
        elif changed:
            place = rng.randrange(len(changed))
            changed[place : place + 8] = b"\xff" * 8
    return bytes(changed)


def test_a_long_reason_is_cut_and_still_a_frame() -> None:
    frame = decode(encode(Abort("east", "ü" * MAX_REASON_BYTES)))
    assert isinstance(frame, Abort)
    assert frame.cloud == "east"
    assert frame.reason.startswith("üü")


def test_framing_and_encryption_cost_about_a_fifth_of_a_percent_of_bulk() -> None:
    assert 0 < wire_bytes(MAX_CHUNK_BYTES) / MAX_CHUNK_BYTES - 1 < 0.003
