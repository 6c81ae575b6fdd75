"""What a receiver buffers is bounded; its sender waits in time, and one large packet crosses nevertheless."""

import mmap
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import Aborted, FrameError, LinkError, UserError
from isthmus.plan.types import Priority
from isthmus.wan.inbox import OVERHEAD_BYTES, SMALL_BYTES, LinkInbox, Room, cost_bytes
from isthmus.wan.link import Link
from isthmus.wan.memory import MemoryLink
from isthmus.wan.outbox import Flight, Outbox
from isthmus.wan.packet import MAX_PACKET_BYTES, Ack, Chunk, Packet, decode, encode_chunk, pack
from isthmus.wan.shaping import Shape

KIB, MIB, GIB = 1024, 1024**2, 1024**3
STRIPE = 2
PATIENCE_S = 60.0
TINY = partial(Room, budget_bytes=400 * KIB, large_bytes=200 * KIB)


def make_outbox(window_bytes: int = GIB) -> Outbox:
    outbox = Outbox(Flight(bandwidth_bps=1e9), stream_window_bytes=window_bytes, room=TINY())
    outbox.open_lane(STRIPE, now_s=0.0)
    return outbox


def put(outbox: Outbox, stream: str, num_bytes: int) -> None:
    outbox.put(stream, pack(Packet({}, (bytes(num_bytes),))), Priority.NORMAL)


def opening(stream: str, packet_bytes: int, *, sequence: int, packet: int = 0) -> Chunk:
    return Chunk(sequence, stream, packet, packet_bytes, 0, memoryview(b"x"))


def test_a_sender_waits_once_the_budget_of_the_link_is_used_up_and_short_words_pass() -> None:
    outbox = make_outbox()
    for stream in "abcd":
        put(outbox, stream, 90 * KIB)
    assert not outbox.has_room("e", 90 * KIB)
    assert outbox.has_room("e", 10 * KIB)
    assert outbox.has_room("word", SMALL_BYTES - OVERHEAD_BYTES)
    assert not outbox.has_room("a", 60 * KIB)
    consumed_bytes = cost_bytes(pack(Packet({}, (bytes(90 * KIB),))).num_bytes)
    outbox.acknowledge(Ack(0, (), (("c", consumed_bytes),)), now_s=0.0)
    assert outbox.has_room("e", 90 * KIB)


def test_one_packet_larger_than_the_budget_fits_beside_it_and_a_second_waits() -> None:
    outbox = make_outbox()
    for stream in "abcd":
        put(outbox, stream, 90 * KIB)
    assert outbox.has_room("large", 5 * MIB)
    put(outbox, "large", 5 * MIB)
    assert not outbox.has_room("other", 5 * MIB)


def test_packets_without_bytes_count_too() -> None:
    outbox = make_outbox()
    num_packets = 0
    while outbox.has_room("s", 20):
        put(outbox, "s", 0)
        num_packets += 1
    assert num_packets < 1000


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, MIB)), max_size=400))
def test_a_receiver_never_buffers_more_whatever_a_valid_peer_sends(wants: list[tuple[int, int]]) -> None:
    inbox = LinkInbox(room=TINY())
    taken: list[int] = []
    numbers = [count() for _ in range(10)]
    for number, packet_bytes in wants:
        chunk = opening(str(number), packet_bytes + 1, sequence=len(taken), packet=numbers[number].__next__())
        try:
            inbox.put(chunk, 50)
            taken.append(packet_bytes)
        except FrameError:
            continue
    beside_bytes = sum(taken) - max(taken, default=0)
    # Each stream may have short words besides.
    assert beside_bytes <= 400 * KIB + 10 * SMALL_BYTES
    assert sum(size > 200 * KIB for size in taken) <= 1


def test_a_peer_that_does_not_wait_is_dropped() -> None:
    inbox = LinkInbox(room=Room(budget_bytes=100 * MIB, large_bytes=100 * MIB))
    inbox.put(opening("a", 60 * MIB, sequence=0), 50)
    with pytest.raises(FrameError, match="packet 0 of 'b' is beyond what this link may buffer"):
        inbox.put(opening("b", 60 * MIB, sequence=1), 50)
    inbox.put(opening("large", GIB, sequence=1), 50)
    with pytest.raises(FrameError, match="beyond what this link may buffer"):
        inbox.put(opening("b", GIB, sequence=2), 50)


@settings(deadline=None, max_examples=40)
@given(st.randoms(use_true_random=False))
def test_a_fair_sender_is_never_dropped_and_all_it_sends_arrives(rng: random.Random) -> None:
    """Streams of all sizes over lanes of any pace, a receiver that reads when it likes."""
    outbox, inbox = make_outbox(window_bytes=300 * KIB), LinkInbox(room=TINY())
    outbox.open_lane(STRIPE + 1, now_s=0.0)
    lanes: dict[int, list[bytes]] = {STRIPE: [], STRIPE + 1: []}
    sizes = [rng.choice([1, 30, 70, 150, 900]) * KIB for _ in range(12)]
    sent: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    got: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for turn in range(20_000):
        stream = rng.choice("abc")
        if sizes and outbox.has_room(stream, sizes[-1]):
            sent[stream].append(sizes[-1])
            put(outbox, stream, sizes.pop())
        lane = rng.choice(list(lanes))
        if (frame := outbox.next_frame(lane, now_s=turn * 0.001)) is not None:
            lanes[lane].append(frame)
        lane = rng.choice(list(lanes))
        if lanes[lane]:
            arrived = decode(lanes[lane].pop(0))
            assert isinstance(arrived, Chunk)
            inbox.put(arrived, 50)
        if rng.random() < 0.1:
            outbox.acknowledge(inbox.ack(), now_s=turn * 0.001)
        reads = rng.choice("abc")
        if rng.random() < 0.2 and inbox.has(reads):
            got[reads].append(inbox.take(reads).payload_bytes)
        if not sizes and got == sent:
            break
    assert got == sent
    assert not sizes


def test_a_packet_over_a_gibibyte_is_planned_cut_and_read_at_any_offset() -> None:
    """Memory that nobody writes to costs nothing, so the sender's side is tried in full size."""
    with mmap.mmap(-1, 5 * GIB) as memory:
        memory[4 * GIB + 7 : 4 * GIB + 11] = b"here"
        view = memoryview(memory)
        body = pack(Packet({"size": "large"}, (view,)))
        start = body.num_bytes - 5 * GIB + 4 * GIB
        pieces = body.slice(start, start + 20)
        chunk = decode(
            encode_chunk(
                sequence=0, stream="s", packet=0, packet_bytes=body.num_bytes, offset=start, pieces=pieces
            )
        )
        assert isinstance(chunk, Chunk)
        assert (chunk.packet_bytes, chunk.offset) == (body.num_bytes, start)
        assert bytes(chunk.payload) == bytes(7) + b"here" + bytes(9)
        del body, pieces
        view.release()


def test_a_packet_that_no_link_carries_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_PACKET_BYTES >= 64 * GIB
    monkeypatch.setattr("isthmus.wan.packet.MAX_PACKET_BYTES", 1000)
    with pytest.raises(UserError, match="is over the limit of") as error:
        pack(Packet({}, (bytes(1001),)))
    assert error.value.hint


def test_large_packets_cross_in_order_and_to_the_bit_beside_others_while_the_line_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("outbox", "inbox"):
        monkeypatch.setattr(f"isthmus.wan.{module}.Room", TINY)
    rng = random.Random(1)
    large, small = ([rng.randbytes(size) for size in sizes] for sizes in ([3 * MIB] * 3, [5_000] * 50))
    with MemoryLink("east", "west", shape=Shape(bandwidth_bps=400e6, delay_s=0.002)) as wan:
        east, west = wan.end("east"), wan.end("west")
        with_threads(
            lambda: send_all(east, "large", large),
            lambda: send_all(east, "small", small),
            lambda: wan.cut(0.05),
            lambda: check(west, "small", small),
            lambda: check(west, "large", large),
        )


def with_threads(*works: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result(timeout=PATIENCE_S)


def send_all(link: Link, stream: str, data: list[bytes]) -> None:
    for one in data:
        link.send(stream, Packet({}, (one,)), timeout_s=PATIENCE_S)


def check(link: Link, stream: str, expected: list[bytes]) -> None:
    for one in expected:
        assert bytes(link.receive(stream, timeout_s=PATIENCE_S).buffers[0]) == one


def test_a_packet_that_does_not_fit_into_the_memory_ends_the_run_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("isthmus.wan.inbox._half_of_memory_bytes", lambda: MIB)
    reason = "a message of 1.5 MiB does not fit into the memory of this machine"
    with MemoryLink("east", "west") as wan:
        wan.end("east").send("large", Packet({}, (bytes(3 * MIB // 2),)))
        with pytest.raises(LinkError, match=reason):
            wan.end("west").receive("large", timeout_s=PATIENCE_S)
        with pytest.raises(Aborted, match=f"cloud 'west' aborted the run: {reason}"):
            wan.end("east").receive("never", timeout_s=PATIENCE_S)
