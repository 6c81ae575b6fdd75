"""The link between real processes over real TLS and an emulated WAN that is cut, silenced and saturated."""

import functools
import hashlib
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from isthmus.errors import Aborted, PeerLost
from isthmus.plan.types import Priority
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.local import LocalWan
from isthmus.wan.packet import Packet
from isthmus.wan.shaping import Direction
from tests.wan.clouds import CloudProcess, two_clouds

MB = 1_000_000
STREAMS = ("a", "b", "c")


def send_streams(endpoint: Endpoint, pipe: Connection, *, num_bytes: int, seed: int) -> dict[str, str]:
    """Random packets of random sizes on three streams; gives each stream's digest."""
    link, rng = endpoint.link("east"), random.Random(seed)
    digests = {stream: hashlib.sha256() for stream in STREAMS}
    left_bytes, half_bytes = num_bytes, num_bytes // 2
    while left_bytes:
        stream = rng.choice(STREAMS)
        data = rng.randbytes(min(left_bytes, rng.randint(1, 4 * MB)))
        digests[stream].update(len(data).to_bytes(8, "little") + data)
        link.send(stream, Packet({"bytes": len(data)}, (data,)))
        if left_bytes > half_bytes >= left_bytes - len(data):
            pipe.send("half")
        left_bytes -= len(data)
    for stream in STREAMS:
        link.send(stream, Packet({"end": True}))
    link.receive("bye")
    return {stream: digest.hexdigest() for stream, digest in digests.items()}


def receive_streams(endpoint: Endpoint, _: Connection) -> tuple[dict[str, str], int]:
    """Each stream's digest, and by how many bytes this process has grown meanwhile."""
    link = endpoint.link("west")
    digests = {stream: hashlib.sha256() for stream in STREAMS}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    open_streams = list(STREAMS)
    while open_streams:
        stream, packet = link.receive_any(open_streams)
        if packet.header.get("end"):
            open_streams.remove(stream)
        else:
            data = bytes(packet.buffers[0])
            digests[stream].update(len(data).to_bytes(8, "little") + data)
    link.send("bye", Packet({}))
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {stream: digest.hexdigest() for stream, digest in digests.items()}, grown_bytes


@contextmanager
def transfer(num_mb: int, seed: int, *keys: str) -> Iterator[tuple[LocalWan, CloudProcess]]:
    """Two clouds and what is sent between them, which arrives to the bit whatever the test does."""
    job, send = two_clouds(*keys), functools.partial(send_streams, num_bytes=num_mb * MB, seed=seed)
    with (
        LocalWan(job) as wan,
        CloudProcess(job, wan, "east", receive_streams) as east,
        CloudProcess(job, wan, "west", send) as west,
    ):
        yield wan, west
        sent, (received, grown_bytes) = west.result(), east.result()
    assert received == sent
    assert grown_bytes < 400 * MB


@pytest.mark.slow
def test_a_cut_of_ten_seconds_in_mid_transfer_loses_nothing() -> None:
    with transfer(200, 1, "bandwidth='400 Mbps'", "rtt='20 ms'") as (wan, west):
        assert west.hear() == "half"
        wan.relay("east", "west").cut(10.0)


@pytest.mark.slow
def test_twenty_random_cuts_lose_nothing() -> None:
    rng = random.Random(3)
    with transfer(100, 2, "bandwidth='200 Mbps'", "rtt='10 ms'") as (wan, _):
        for _ in range(20):
            time.sleep(rng.uniform(0.1, 0.5))
            wan.relay("east", "west").cut(rng.uniform(0.0, 0.2))


@pytest.mark.slow
def test_corrupted_bytes_never_reach_the_user() -> None:
    with transfer(60, 4, "bandwidth='400 Mbps'", "rtt='4 ms'") as (wan, _):
        relay = wan.relay("east", "west")
        wait_for_traffic(wan)
        for direction in Direction:
            relay.corrupt(direction, 3)
    assert relay.num_relayed > 4, "the spoilt connection was opened again"


def wait_for_traffic(wan: LocalWan) -> None:
    end_s = time.monotonic() + 30
    while wan.relay("east", "west").num_bytes(Direction.UP) < MB:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def die_when_told(endpoint: Endpoint, _: Connection) -> None:
    link = endpoint.link("east")
    link.send("hello", Packet({}))
    link.receive("die")
    os.kill(os.getpid(), signal.SIGKILL)


def outlive(endpoint: Endpoint, _: Connection) -> tuple[str, float]:
    link = endpoint.link("west")
    link.receive("hello")
    link.send("die", Packet({}))
    started_s = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        link.receive("never")
    return lost.value.cloud, time.monotonic() - started_s


def test_a_killed_peer_is_lost_after_the_time_out() -> None:
    job = two_clouds("heartbeat_timeout='3 s'", "rtt='20 ms'")
    with (
        LocalWan(job) as wan,
        CloudProcess(job, wan, "east", outlive) as east,
        CloudProcess(job, wan, "west", die_when_told),
    ):
        cloud, waited_s = east.result()
    assert cloud == "west"
    # The rest is for machines that are slow at times.
    assert 2.0 < waited_s < 15.0


def saturate(endpoint: Endpoint, _: Connection, *, duration_s: float) -> None:
    link = endpoint.link("east")
    end_s = time.monotonic() + duration_s
    number = 0
    while time.monotonic() < end_s:
        if link.counters().queued_bytes < MB:
            link.send("bulk", Packet({"number": number}, (bytes(250_000),)))
            number += 1
        else:
            time.sleep(0.05)
    link.send("bulk", Packet({"number": None}))
    link.receive("bye")


def drain(endpoint: Endpoint, _: Connection) -> tuple[int, int]:
    link = endpoint.link("west")
    numbers = []
    while (number := link.receive("bulk").header["number"]) is not None:
        numbers.append(number)
    link.send("bye", Packet({}))
    assert numbers == list(range(len(numbers)))
    return len(numbers), link.counters().reconnects


@pytest.mark.slow
def test_bulk_that_saturates_a_thin_link_for_a_minute_loses_nobody() -> None:
    job = two_clouds("bandwidth='10 Mbps'", "rtt='100 ms'", "heartbeat_timeout='2 s'")
    with (
        LocalWan(job) as wan,
        CloudProcess(job, wan, "east", drain) as east,
        CloudProcess(job, wan, "west", functools.partial(saturate, duration_s=60.0)) as west,
    ):
        west.result()
        num_packets, reconnects = east.result()
    assert num_packets > 200
    assert reconnects == 0


def saturate_and_be_urgent(endpoint: Endpoint, _: Connection) -> None:
    link = endpoint.link("east")
    link.send("bulk", Packet({}, (bytes(6 * MB),)))
    link.send("copy", Packet({}, (bytes(1 * MB),)), priority=Priority.BACKGROUND)
    time.sleep(1.0)
    link.send("now", Packet({}), priority=Priority.URGENT)
    link.receive("bye")


def order_of_arrival(endpoint: Endpoint, _: Connection) -> list[str]:
    link = endpoint.link("west")
    names = [link.receive_any(("bulk", "copy", "now"))[0] for _ in range(3)]
    link.send("bye", Packet({}))
    return names


@pytest.mark.slow
def test_urgent_overtakes_bulk_and_background_lets_it_pass() -> None:
    job = two_clouds("bandwidth='20 Mbps'", "rtt='40 ms'")
    with (
        LocalWan(job) as wan,
        CloudProcess(job, wan, "east", order_of_arrival) as east,
        CloudProcess(job, wan, "west", saturate_and_be_urgent) as west,
    ):
        assert east.result() == ["now", "bulk", "copy"]
        west.result()


def abort_now(endpoint: Endpoint, _: Connection) -> None:
    endpoint.link("east").wait_ready()
    endpoint.abort("out of memory")


def hear_abort(endpoint: Endpoint, _: Connection) -> str:
    with pytest.raises(Aborted) as aborted:
        endpoint.link("west").receive("never")
    return aborted.value.message


def test_abort_reaches_the_peer_although_the_aborting_process_ends_at_once() -> None:
    job = two_clouds("rtt='100 ms'", "bandwidth='10 Mbps'")
    with (
        LocalWan(job) as wan,
        CloudProcess(job, wan, "east", hear_abort) as east,
        CloudProcess(job, wan, "west", abort_now) as west,
    ):
        assert east.result() == "cloud 'west' aborted the run: out of memory"
        west.result()


def fail_at_once(_: Endpoint, __: Connection) -> None:
    raise SystemExit("no such model")


def test_a_process_that_fails_before_it_has_asked_for_a_link_ends_the_run_for_its_peer() -> None:
    job = two_clouds("rtt='100 ms'")
    with (
        LocalWan(job) as wan,
        CloudProcess(job, wan, "west", fail_at_once) as west,
        CloudProcess(job, wan, "east", hear_abort) as east,
    ):
        assert east.result() == "cloud 'west' aborted the run: SystemExit: no such model"
        west.process.join(30)
        assert west.process.exitcode == 1


def echo(endpoint: Endpoint, _: Connection, *, peer: str) -> tuple[float, float]:
    link = endpoint.link(peer)
    link.wait_ready()
    time.sleep(2.0)
    link.send("done", Packet({}))
    link.receive("done")
    counters = link.counters()
    return counters.rtt_s or 0.0, counters.clock_offset_s or 9.9


@pytest.mark.slow
def test_round_trip_and_clock_offset_are_estimated_by_both_ends() -> None:
    job = two_clouds("rtt='60 ms'", "bandwidth='100 Mbps'")
    with (
        LocalWan(job) as wan,
        CloudProcess(job, wan, "east", functools.partial(echo, peer="west")) as east,
        CloudProcess(job, wan, "west", functools.partial(echo, peer="east")) as west,
    ):
        figures = [east.result(), west.result()]
    for rtt_s, offset_s in figures:
        # A time service may slow the wall clock down meanwhile.
        assert 0.0595 <= rtt_s < 1.0
        assert abs(offset_s) < 0.5
