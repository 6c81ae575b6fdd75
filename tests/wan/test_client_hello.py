import random
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import FrameError
from isthmus.wan.handshake import MAX_HELLO_BYTES, parse_client_hello

NUM_FUZZ_SEEDS = 1000
NUM_MUTATIONS_PER_SEED = 100
NAME = "rank-3.east.isthmus"


def real_hello(name: str | None = NAME) -> bytes:
    """What OpenSSL sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


HELLO = real_hello()


def hello_with(extensions: bytes, *, version: bytes = b"\x03\x01") -> bytes:
    body = b"\x03\x03" + bytes(32) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00" + _vector(extensions)
    return records(b"\x01" + len(body).to_bytes(3) + body, version=version)


def records(message: bytes, *, size: int = 16_384, version: bytes = b"\x03\x01") -> bytes:
    parts = [message[start : start + size] for start in range(0, len(message), size)]
    return b"".join(b"\x16" + version + _vector(part) for part in parts)


def name_extension(name: bytes, *, kind: int = 0) -> bytes:
    return b"\x00\x00" + _vector(_vector(bytes([kind]) + _vector(name)))


def _vector(data: bytes) -> bytes:
    return len(data).to_bytes(2) + data


def test_the_name_is_read_from_a_real_hello_with_or_without_what_follows() -> None:
    assert parse_client_hello(HELLO) == NAME
    assert parse_client_hello(bytearray(HELLO) + b"more") == NAME


def test_names_are_compared_in_lower_case() -> None:
    assert parse_client_hello(hello_with(name_extension(b"Rank-3.EAST.isthmus"))) == NAME


def test_any_start_of_a_hello_only_asks_for_more() -> None:
    assert all(parse_client_hello(HELLO[:length]) is None for length in range(len(HELLO)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "the first bytes are not TLS"),
        (b"\x16\x02\x00", "the first bytes are not TLS"),
        (b"\x16\x03\x01\x00\x00", "a TLS record of 0 bytes is not allowed"),
        (b"\x16\x03\x01\xff\xff", "a TLS record of 65535 bytes is not allowed"),
        (b"\x16\x03\x01\x00\x04\x02\x00\x00\x00", "the first TLS message is not a hello"),
        (b"\x16\x03\x01\x00\x04\x01\x00\x00\x00", "the TLS hello ends in the middle of a field"),
        (records(HELLO[5:], size=200), "the TLS hello ends in the middle of a field"),
        (real_hello(None), "the TLS hello ends in the middle of a field"),
        (hello_with(b""), "the TLS hello ends in the middle of a field"),
        (hello_with(name_extension(b"a") * 2), "the TLS hello does not carry one host name"),
        (hello_with(b"\x00\x00\x00\x00"), "the TLS hello ends in the middle of a field"),
        (hello_with(name_extension(b"")), "the TLS hello does not carry one host name"),
        (hello_with(name_extension(b"a", kind=1)), "the TLS hello does not carry one host name"),
        (hello_with(name_extension(b"a\nb")), "the TLS hello does not carry one host name"),
        (hello_with(name_extension(b"a" * 64)), "the TLS hello does not carry one host name"),
        (hello_with(name_extension(b"a.\xff")), "the TLS hello does not carry one host name"),
    ],
)
def test_anything_else_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(FrameError) as raised:
        parse_client_hello(data)
    assert raised.value.message == reason


def test_no_more_than_one_record_is_waited_for() -> None:
    record = records(b"\x01\x00\x3f\xfc" + bytes(MAX_HELLO_BYTES - 4))
    assert len(record) == 5 + MAX_HELLO_BYTES
    assert parse_client_hello(record[:-1]) is None
    with pytest.raises(FrameError):
        parse_client_hello(record)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_give_a_name_or_one_error(data: bytes) -> None:
    _parse_any(data)


@settings(max_examples=NUM_FUZZ_SEEDS, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_mutated_hellos_give_a_name_or_one_error(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(NUM_MUTATIONS_PER_SEED):
        _parse_any(_mutated(HELLO, chance))


def _parse_any(data: bytes) -> None:
    try:
        name = parse_client_hello(data)
    except FrameError:
        return
    assert name is None or 0 < len(name) <= 253


def _mutated(hello: bytes, chance: random.Random) -> bytes:
    changed = bytearray(hello)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[place] = chance.randrange(256)
            case 1:
                changed[place] ^= 1 << chance.randrange(8)
            case 2:
                del changed[place : place + chance.randint(1, 40)]
            case 3:
                changed[place:place] = chance.randbytes(chance.randint(1, 40))
        if not changed:
            break
    return bytes(changed)
