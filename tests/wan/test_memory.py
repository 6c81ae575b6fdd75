"""The link's contract on MemoryLink: order, faults, back-pressure, abort, close, silence."""

import hashlib
import queue
import threading
import time

import pytest

from isthmus.errors import Aborted, LinkClosed, LinkError, PeerLost, Refused
from isthmus.plan.types import Member, Priority
from isthmus.wan.exchange import LinkSettings
from isthmus.wan.handshake import Hello
from isthmus.wan.link import Link, LinkState
from isthmus.wan.memory import MemoryLink
from isthmus.wan.packet import Packet
from isthmus.wan.shaping import Direction, Shape

QUICK = LinkSettings(num_stripes=2, heartbeat_timeout_s=1.0)


def numbered(number: int, num_bytes: int = 50_000) -> Packet:
    return Packet({"number": number}, (bytes([number % 256]) * num_bytes,))


def test_packets_come_in_order_in_both_directions() -> None:
    with MemoryLink("east", "west") as wan:
        east, west = wan.end("east"), wan.end("west")
        for number in range(50):
            east.send("there", numbered(number))
            west.send("back", numbered(number))
        there = [west.receive("there", timeout_s=20).header["number"] for _ in range(50)]
        back = [east.receive("back", timeout_s=20).header["number"] for _ in range(50)]
    assert there == back == list(range(50))


def test_any_of_several_streams_is_received_the_first_named_first() -> None:
    with MemoryLink("east", "west") as wan:
        east, west = wan.end("east"), wan.end("west")
        east.send("activations", Packet({}))
        east.send("gradients", Packet({}))
        wait_until(lambda: west.counters().received.keys() >= {"activations", "gradients"})
        names = [west.receive_any(["gradients", "activations"], timeout_s=20)[0] for _ in range(2)]
    assert names == ["gradients", "activations"]


def test_a_slow_receiver_holds_the_sender_back() -> None:
    settings = LinkSettings(num_stripes=1, stream_window_bytes=300_000)
    with MemoryLink("east", "west", settings=settings) as wan:
        east, west = wan.end("east"), wan.end("west")
        for number in range(2):
            east.send("bulk", numbered(number, 100_000), timeout_s=20)
        with pytest.raises(TimeoutError):
            east.send("bulk", numbered(2, 200_000), timeout_s=0.3)
        east.send("other", numbered(2, 200_000), timeout_s=20)
        assert west.receive("bulk", timeout_s=20).header["number"] == 0
        assert west.receive("bulk", timeout_s=20).header["number"] == 1
        east.send("bulk", numbered(2, 200_000), timeout_s=20)
        assert west.receive("bulk", timeout_s=20).header["number"] == 2
        west.receive("other", timeout_s=20)


@pytest.mark.parametrize("fault", ["cut", "blackhole", "corrupt", "slow_down"])
def test_a_fault_in_mid_transfer_loses_nothing(fault: str) -> None:
    shape = Shape(bandwidth_bps=400e6, delay_s=0.005)
    with MemoryLink("east", "west", shape=shape) as wan:
        east, west = wan.end("east"), wan.end("west")
        data = [bytes([number]) * 1_000_000 for number in range(12)]
        sending = threading.Thread(target=send_all, args=(east, data))
        sending.start()
        got = [west.receive("bulk", timeout_s=30)]
        disturb(wan, fault)
        got += [west.receive("bulk", timeout_s=30) for _ in data[1:]]
        sending.join()
        reconnects = east.counters().reconnects
    assert digest(b"".join(bytes(packet.buffers[0]) for packet in got)) == digest(b"".join(data))
    assert (reconnects > 0) == (fault in ("cut", "corrupt"))


def send_all(link: Link, data: list[bytes]) -> None:
    for one in data:
        link.send("bulk", Packet({}, (one,)))


def disturb(wan: MemoryLink, fault: str) -> None:
    match fault:
        case "cut":
            wan.cut(0.3)
        case "blackhole":
            wan.blackhole(0.3)
        case "corrupt":
            for direction in Direction:
                wan.corrupt(direction)
        case "slow_down":
            wan.slow_down(4.0, 0.3)


def test_many_cuts_lose_nothing() -> None:
    shape = Shape(bandwidth_bps=200e6, delay_s=0.002)
    with MemoryLink("east", "west", shape=shape) as wan:
        east, west = wan.end("east"), wan.end("west")
        for number in range(100):
            east.send(f"stream-{number % 3}", numbered(number))
            if number % 5 == 0:
                wan.cut(0.01)
        got = [west.receive(f"stream-{number % 3}", timeout_s=30).header["number"] for number in range(100)]
    assert got == list(range(100))


def test_a_silent_peer_is_lost_by_name_and_not_before_the_time_out() -> None:
    with MemoryLink("east", "west", settings=QUICK) as wan:
        east = wan.end("east")
        east.wait_ready(timeout_s=20)
        started_s = time.monotonic()
        wan.blackhole(3.0)
        with pytest.raises(PeerLost, match="'west'") as lost:
            east.receive("never", timeout_s=20)
        assert time.monotonic() - started_s >= 1.0
        assert lost.value.cloud == "west"


def test_a_cut_shorter_than_the_time_out_loses_nobody() -> None:
    with MemoryLink("east", "west", settings=QUICK) as wan:
        wan.end("east").wait_ready(timeout_s=20)
        wan.cut(0.4)
        wan.end("east").send("after", Packet({"number": 1}))
        assert wan.end("west").receive("after", timeout_s=20).header == {"number": 1}


def test_abort_ends_both_ends_with_its_reason() -> None:
    with MemoryLink("east", "west") as wan:
        east, west = wan.end("east"), wan.end("west")
        east.wait_ready(timeout_s=20)
        east.abort("out of memory")
        for end in (east, west):
            with pytest.raises(Aborted, match="'east' aborted the run: out of memory"):
                end.receive("never", timeout_s=20)


def test_changes_of_state_are_reported_and_a_close_is_none() -> None:
    settings = LinkSettings(num_stripes=1, heartbeat_timeout_s=4.0)
    with MemoryLink("east", "west", settings=settings) as wan:
        east = wan.end("east")
        told: queue.SimpleQueue[tuple[Member, LinkState, str]] = queue.SimpleQueue()
        east.on_state = lambda *change: told.put(change)
        east.wait_ready(timeout_s=20)
        wan.blackhole(1.8)
        wan.end("west").wait_ready(timeout_s=20)
        assert told.get(timeout=20) == (Member("west"), LinkState.SILENT, "")
        assert told.get(timeout=20) == (Member("west"), LinkState.UP, "")
        wan.cut(0.5)
        assert told.get(timeout=20)[1] is LinkState.RECONNECTING
        wait_until(lambda: east.problem == "the link is cut")
        assert told.get(timeout=20) == (Member("west"), LinkState.UP, "")
        assert east.problem == ""
    assert told.empty()
    assert str(east.state) == "closed"


def test_a_peer_that_aborts_or_is_lost_leaves_the_link_down_with_the_reason() -> None:
    with MemoryLink("east", "west") as wan:
        told: queue.SimpleQueue[tuple[Member, LinkState, str]] = queue.SimpleQueue()
        wan.end("west").on_state = lambda *change: told.put(change)
        wan.end("west").wait_ready(timeout_s=20)
        wan.end("east").abort("out of memory")
        assert told.get(timeout=20) == (
            Member("east"),
            LinkState.DOWN,
            "cloud 'east' aborted the run: out of memory",
        )


def test_close_delivers_what_was_sent_and_then_ends_the_other_end() -> None:
    wan = MemoryLink("east", "west")
    for number in range(5):
        wan.end("east").send("bulk", numbered(number))
    wan.end("east").close(timeout_s=20)
    west = wan.end("west")
    assert [west.receive("bulk", timeout_s=20).header["number"] for _ in range(5)] == list(range(5))
    with pytest.raises(LinkClosed, match="has closed the link"):
        west.receive("bulk", timeout_s=20)
    wan.close()


def test_a_packet_may_be_sent_before_the_peer_is_there_and_after_the_end_it_may_not() -> None:
    wan = MemoryLink("east", "west")
    wan.end("east").send("early", Packet({"number": 1}))
    assert wan.end("west").receive("early", timeout_s=20).header == {"number": 1}
    wan.close()
    with pytest.raises(LinkError):
        wan.end("east").send("late", Packet({}))


def test_an_urgent_packet_arrives_while_bulk_is_still_under_way() -> None:
    shape = Shape(bandwidth_bps=40e6, delay_s=0.01)
    with MemoryLink("east", "west", shape=shape) as wan:
        east, west = wan.end("east"), wan.end("west")
        east.send("bulk", Packet({}, (bytes(10_000_000),)))
        wait_until(lambda: "bulk" in west.counters().received)
        east.send("now", Packet({}), priority=Priority.URGENT)
        assert west.receive_any(["bulk", "now"], timeout_s=30)[0] == "now"
        assert west.receive_any(["bulk", "now"], timeout_s=30)[0] == "bulk"


def test_another_job_is_refused_with_a_sentence_that_names_both() -> None:
    east, west = Hello(cloud="east", job_digest="1" * 64), Hello(cloud="west", job_digest="2" * 64)
    with (
        MemoryLink(east, west) as wan,
        pytest.raises(
            Refused, match="east rank 0 and west rank 0 have different job files: their SHA-256 differs"
        ),
    ):
        wan.end("east").receive("never", timeout_s=20)


def test_counters_tell_what_a_stream_cost_on_the_line() -> None:
    with MemoryLink("east", "west", shape=Shape(delay_s=0.01)) as wan:
        east, west = wan.end("east"), wan.end("west")
        for number in range(3):
            east.send("bulk", numbered(number, 100_000))
            west.receive("bulk", timeout_s=20)
        wait_until(
            lambda: east.counters().rtt_s is not None and east.counters().sent == west.counters().received
        )
        sent, received = east.counters().sent["bulk"], west.counters().received["bulk"]
        assert 300_000 < received == sent < 303_000
        rtt_s = east.counters().rtt_s
        assert rtt_s is not None
        assert rtt_s >= 0.02
        assert abs(east.counters().clock_offset_s or 0.0) < 0.5


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wait_until(condition: object, timeout_s: float = 20.0) -> None:
    assert callable(condition)
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)
