"""Outbox and inbox against each other over a line that loses, delays, doubles and reorders; no clock."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import FrameError
from isthmus.plan.types import Priority
from isthmus.wan.inbox import MAX_NUM_OUT_OF_ORDER, LinkInbox
from isthmus.wan.outbox import GAIN, MIN_CHUNK_BYTES, MIN_WINDOW_BYTES, SLACK_S, Flight, Outbox
from isthmus.wan.packet import Ack, Chunk, Packet, decode, pack

STRIPE = 2
WINDOW_BYTES = 1 << 20


def make_outbox(window_bytes: int = WINDOW_BYTES) -> Outbox:
    outbox = Outbox(Flight(), stream_window_bytes=window_bytes)
    outbox.open_lane(STRIPE, now_s=0.0)
    return outbox


def put(outbox: Outbox, stream: str, payload: bytes, priority: Priority = Priority.NORMAL) -> None:
    outbox.put(stream, pack(Packet({}, (payload,))), priority)


def next_chunk(outbox: Outbox, lane: int = STRIPE) -> Chunk | None:
    frame = outbox.next_frame(lane, now_s=0.0)
    if frame is None:
        return None
    chunk = decode(frame)
    assert isinstance(chunk, Chunk)
    return chunk


def all_chunks(outbox: Outbox, lane: int = STRIPE) -> list[Chunk]:
    chunks = []
    while (chunk := next_chunk(outbox, lane)) is not None:
        chunks.append(chunk)
    return chunks


def take_all(inbox: LinkInbox, stream: str) -> list[bytes]:
    taken = []
    while inbox.has(stream):
        taken.append(b"".join(bytes(buffer) for buffer in inbox.take(stream).buffers))
    return taken


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 12))
def test_every_packet_comes_once_and_in_order_whatever_the_line_does(
    seed: int, num_lanes: int, num_packets: int
) -> None:
    line = RoughLine(random.Random(seed), num_lanes)
    sent: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
    got: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
    for _ in range(num_packets):
        stream = line.rng.choice("abc")
        sent[stream].append(line.rng.randbytes(line.rng.randrange(5 * MIN_CHUNK_BYTES)))
        put(line.outbox, stream, sent[stream][-1], Priority("abc".index(stream)))
    for turn in range(10_000):
        line.do_anything(now_s=turn * 0.001)
        for stream in "abc":
            got[stream] += take_all(line.inbox, stream)
        if line.outbox.empty:
            break
    assert line.outbox.empty
    assert got == sent


class RoughLine:
    """Lanes that deliver late, twice or never."""

    def __init__(self, rng: random.Random, num_lanes: int) -> None:
        self.rng = rng
        self.outbox, self.inbox = Outbox(Flight(), stream_window_bytes=1 << 30), LinkInbox()
        self.under_way: dict[int, list[bytes]] = {STRIPE + number: [] for number in range(num_lanes)}
        for lane in self.under_way:
            self.outbox.open_lane(lane, now_s=0.0)

    def do_anything(self, *, now_s: float) -> None:
        lane = self.rng.choice(list(self.under_way))
        (kind,) = self.rng.choices(
            [self.send, self.receive, self.acknowledge, self.break_off], weights=[40, 40, 17, 3]
        )
        kind(lane, now_s)

    def send(self, lane: int, now_s: float) -> None:
        frame = self.outbox.next_frame(lane, now_s=now_s)
        if frame is not None:
            self.under_way[lane].append(frame)

    def receive(self, lane: int, _: float) -> None:
        if self.under_way[lane]:
            frame = self.under_way[lane].pop(0)
            for _copy in range(self.rng.choice([1, 1, 1, 2])):
                deliver(self.inbox, frame)

    def acknowledge(self, _: int, now_s: float) -> None:
        self.outbox.acknowledge(self.inbox.ack(), now_s=now_s)

    def break_off(self, lane: int, now_s: float) -> None:
        self.under_way[lane].clear()
        self.outbox.close_lane(lane)
        self.outbox.open_lane(lane, now_s=now_s)
        self.inbox.repeat_consumed()


def deliver(inbox: LinkInbox, frame: bytes) -> None:
    chunk = decode(frame)
    assert isinstance(chunk, Chunk)
    inbox.put(chunk, len(frame))


def test_urgent_goes_before_normal_and_background_goes_last() -> None:
    outbox = make_outbox()
    put(outbox, "copy", bytes(100), Priority.BACKGROUND)
    put(outbox, "activations", bytes(100))
    put(outbox, "stop", bytes(100), Priority.URGENT)
    assert [chunk.stream for chunk in all_chunks(outbox)] == ["stop", "activations", "copy"]


def test_an_urgent_packet_overtakes_a_large_one_between_two_chunks() -> None:
    outbox = make_outbox(1 << 30)
    put(outbox, "bulk", bytes(WINDOW_BYTES))
    first = next_chunk(outbox)
    put(outbox, "stop", b"now", Priority.URGENT)
    second = next_chunk(outbox)
    assert first is not None
    assert first.stream == "bulk"
    assert second is not None
    assert second.stream == "stop"


def test_the_express_lane_takes_nothing_but_what_is_urgent() -> None:
    outbox = make_outbox()
    outbox.open_lane(1, is_express=True, now_s=0.0)
    put(outbox, "bulk", bytes(100))
    assert next_chunk(outbox, 1) is None
    put(outbox, "stop", b"now", Priority.URGENT)
    chunk = next_chunk(outbox, 1)
    assert chunk is not None
    assert chunk.stream == "stop"


def test_what_is_under_way_stays_within_the_window_and_background_within_half_of_it() -> None:
    for priority, share in ((Priority.NORMAL, 1.0), (Priority.BACKGROUND, 0.5)):
        outbox = make_outbox(1 << 30)
        put(outbox, "bulk", bytes(64 * WINDOW_BYTES), priority)
        sent_bytes = sum(chunk.payload.nbytes for chunk in all_chunks(outbox))
        window_bytes = outbox.flight.window_bytes
        assert (
            share * window_bytes <= sent_bytes <= share * window_bytes + outbox.flight.chunk_bytes(1, 1 << 20)
        )


def test_urgent_packets_pass_even_when_the_window_is_full() -> None:
    outbox = make_outbox(1 << 30)
    put(outbox, "bulk", bytes(64 * WINDOW_BYTES))
    all_chunks(outbox)
    put(outbox, "stop", b"now", Priority.URGENT)
    assert [chunk.stream for chunk in all_chunks(outbox)] == ["stop"]


def test_a_full_stream_pushes_back_until_its_packets_are_consumed() -> None:
    outbox, inbox = make_outbox(), LinkInbox()
    put(outbox, "bulk", bytes(WINDOW_BYTES // 2))
    assert not outbox.has_room("bulk", WINDOW_BYTES)
    assert outbox.has_room("other", WINDOW_BYTES)
    while (frame := outbox.next_frame(STRIPE, now_s=1.0)) is not None or not inbox.has("bulk"):
        if frame is not None:
            deliver(inbox, frame)
        outbox.acknowledge(inbox.ack(), now_s=1.0)
    assert not outbox.has_room("bulk", WINDOW_BYTES)
    inbox.take("bulk")
    outbox.acknowledge(inbox.ack(), now_s=1.0)
    assert outbox.has_room("bulk", WINDOW_BYTES)


def test_a_packet_larger_than_the_window_fits_into_an_idle_stream() -> None:
    assert make_outbox().has_room("bulk", 100 * WINDOW_BYTES)


@pytest.mark.parametrize(
    "ack",
    [Ack(5), Ack(0, ((0, 5),)), Ack(0, (), (("bulk", 10**9),)), Ack(0, (), (("never opened", 1),))],
)
def test_an_acknowledgement_of_what_was_never_sent_is_an_error(ack: Ack) -> None:
    outbox = make_outbox()
    put(outbox, "bulk", b"x")
    next_chunk(outbox)
    with pytest.raises(FrameError):
        outbox.acknowledge(ack, now_s=0.0)


def chunk(**changes: int) -> Chunk:
    fields = {"sequence": 0, "packet": 0, "packet_bytes": 20, "offset": 0} | changes
    return Chunk(
        fields["sequence"],
        "s",
        fields["packet"],
        fields["packet_bytes"],
        fields["offset"],
        memoryview(bytes(10)),
    )


@pytest.mark.parametrize(
    "bad",
    [
        chunk(sequence=1, packet_bytes=30),
        chunk(sequence=MAX_NUM_OUT_OF_ORDER + 2),
        chunk(sequence=1, offset=0),
        chunk(sequence=1, offset=5),
        chunk(sequence=1, offset=9),
    ],
)
def test_chunks_that_contradict_the_others_are_errors(bad: Chunk) -> None:
    inbox = LinkInbox()
    inbox.put(chunk(), 50)
    with pytest.raises(FrameError):
        inbox.put(bad, 50)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 12)), min_size=1, max_size=30))
def test_a_packet_is_delivered_when_every_byte_was_written_once_and_never_else(
    ranges: list[tuple[int, int]],
) -> None:
    inbox, written = LinkInbox(), bytearray(40)
    for sequence, (offset, length) in enumerate(ranges):
        end = min(offset + length, 40)
        piece = Chunk(sequence, "s", 0, 40, offset, memoryview(bytes([1] * (end - offset))))
        if any(written[offset:end]):
            with pytest.raises(FrameError, match="contradict each other"):
                inbox.put(piece, 50)
            break
        written[offset:end] = bytes(range(1, 1 + end - offset))
        assert inbox.put(piece, 50) == all(written)


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_chunks_of_any_sizes_in_any_order_give_the_packet_to_the_bit(
    rng: random.Random, num_cuts: int
) -> None:
    data = rng.randbytes(1000)
    body = b"".join(pack(Packet({}, (data,))).segments)
    cuts = sorted({0, len(body), *(rng.randrange(len(body)) for _ in range(num_cuts))})
    pieces = list(itertools.pairwise(cuts))
    rng.shuffle(pieces)
    inbox = LinkInbox()
    for sequence, (start, end) in enumerate(pieces):
        assert not inbox.has("s")
        inbox.put(Chunk(sequence, "s", 0, len(body), start, memoryview(body[start:end])), 50)
    assert take_all(inbox, "s") == [data]


def test_gaps_in_a_packet_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.wan.inbox.MAX_NUM_OUT_OF_ORDER", 8)
    inbox = LinkInbox()
    pieces = [Chunk(number, "s", 0, 100, 2 * number, memoryview(b"x")) for number in range(9)]
    for piece in pieces[:8]:
        inbox.put(piece, 50)
    with pytest.raises(FrameError, match="too many gaps"):
        inbox.put(pieces[8], 50)


def test_a_packet_number_that_was_delivered_cannot_come_again() -> None:
    inbox = LinkInbox()
    assert not inbox.put(chunk(), 50)
    inbox.put(chunk(sequence=1, offset=10), 50)
    with pytest.raises(FrameError, match="second time"):
        inbox.put(chunk(sequence=2), 50)


@pytest.mark.parametrize("rate_bytes_per_s", [1.25e6, 12.5e6, 125e6])
@pytest.mark.parametrize("rtt_s", [0.0, 0.02, 0.2])
def test_the_window_finds_the_line_from_far_below(rate_bytes_per_s: float, rtt_s: float) -> None:
    flight = Flight(bandwidth_bps=1e6, rtt_s=0.001)
    drive(flight, rate_bytes_per_s, rtt_s, duration_s=6.0)
    fitting_bytes = max(GAIN * rate_bytes_per_s * (rtt_s + SLACK_S), MIN_WINDOW_BYTES)
    assert 0.7 * fitting_bytes < flight.window_bytes < 1.6 * fitting_bytes


def drive(flight: Flight, rate_bytes_per_s: float, rtt_s: float, *, duration_s: float) -> None:
    """A saturated line with a virtual clock: serialisation, then the round trip, then the acknowledgement."""
    now_s = free_s = 0.0
    under_way = []
    flight.observe_rtt(rtt_s, now_s=0.0)
    while now_s < duration_s:
        while flight.in_flight_bytes < flight.window_bytes:
            num_bytes = flight.chunk_bytes(1, 1 << 20)
            free_s = max(free_s, now_s) + num_bytes / rate_bytes_per_s
            under_way.append((free_s + rtt_s, flight.departed(num_bytes, now_s=now_s)))
        now_s, departure = under_way.pop(0)
        flight.arrived(departure, now_s=now_s)
