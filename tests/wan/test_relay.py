import hashlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from isthmus.errors import Refused, UserError
from isthmus.job import Address
from isthmus.job.faults import Fault, FaultKind
from isthmus.wan.relay import Relay, RelayLimits
from isthmus.wan.shaping import Direction, Shape
from tests.wan.test_client_hello import HELLO, NAME

PATIENCE_S = 60.0
SHORT = RelayLimits(hello_timeout_s=0.3)


class Target:
    """A server behind the relay whose connections a test holds in its hands."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE_S)
        self.address = Address(host="127.0.0.1", port=self.listener.getsockname()[1])

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(PATIENCE_S)
        return connection

    def route(self, name: str) -> Address | None:
        return self.address if name in ("", NAME) else None


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.listener.close()


def dial(relay: Relay) -> socket.socket:
    return socket.create_connection((relay.address.host, relay.address.port), timeout=PATIENCE_S)


@contextmanager
def joined(
    target: Target, *, up: Shape | None = None, down: Shape | None = None
) -> Iterator[tuple[Relay, socket.socket, socket.socket]]:
    """A relay without names, and one connection through it: the end that dialled, and the other."""
    with (
        Relay(target.route, up=up, down=down, reads_hello=False) as relay,
        dial(relay) as client,
        target.accept() as server,
    ):
        yield relay, client, server


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(65_536):
        parts.append(part)
    return b"".join(parts)


def read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        assert part, "the connection ended"
        data += part
    return data


def send_until_stopped(sock: socket.socket, *, max_bytes: int) -> int:
    num_taken = 0
    while num_taken < max_bytes:
        try:
            num_taken += sock.send(bytes(1 << 20))
        except TimeoutError:
            return num_taken
    raise AssertionError("nothing stops the sender")


def is_turned_away(relay: Relay, sent: bytes = b"") -> bool:
    """Whether a new connection is reset, be it so soon that dialling fails already."""
    try:
        with dial(relay) as client:
            client.sendall(sent)
            return is_reset(client)
    except (ConnectionResetError, BrokenPipeError):
        return True


def is_reset(sock: socket.socket) -> bool:
    try:
        while sock.recv(65_536):
            pass
    except (ConnectionResetError, BrokenPipeError):
        return True
    return False


def wait_for_open(relay: Relay, num_open: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while relay.num_open != num_open:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_tls_connection_is_routed_by_name_and_its_bytes_arrive_unchanged(target: Target) -> None:
    with Relay(target.route) as relay, dial(relay) as client:
        client.sendall(HELLO[:50])
        client.sendall(HELLO[50:] + b"and more")
        with target.accept() as server:
            assert read_exactly(server, len(HELLO) + 8) == HELLO + b"and more"
            server.sendall(b"answer")
            assert read_exactly(client, 6) == b"answer"
        assert [relay.num_bytes(direction) for direction in Direction] == [len(HELLO) + 8, 6]
        assert (relay.num_relayed, relay.num_dropped) == (1, 0)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "the first bytes are not TLS"),
        (HELLO.replace(b"rank-3.east", b"rank-4.east"), "no route to 'rank-4.east.isthmus'"),
        (HELLO[:40], "no whole TLS hello within 0.3 s"),
        (b"", "no whole TLS hello within 0.3 s"),
    ],
    ids=["not TLS", "unknown name", "half a hello", "silence"],
)
def test_what_cannot_be_routed_is_dropped_with_a_reason(
    target: Target, caplog: pytest.LogCaptureFixture, sent: bytes, reason: str
) -> None:
    with Relay(target.route, limits=SHORT) as relay:
        assert is_turned_away(relay, sent)
        assert relay.num_dropped == 1
    assert [record.message.partition(": ")[2] for record in caplog.records] == [reason]


def test_the_routers_own_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def route(name: str) -> Address:
        raise Refused(f"{name} has not registered")

    with Relay(route) as relay:
        assert is_turned_away(relay, HELLO)
    assert caplog.records[0].message.endswith(f": {NAME} has not registered")


def test_a_client_that_leaves_in_its_hello_is_dropped(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    with Relay(target.route) as relay, dial(relay) as client:
        client.sendall(HELLO[:40])
        client.shutdown(socket.SHUT_WR)
        assert is_reset(client)
    assert "closed after 40 bytes" in caplog.text


def test_a_target_that_does_not_answer_resets_the_client(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    target.listener.close()
    with Relay(target.route, reads_hello=False) as relay:
        assert is_turned_away(relay)
    assert f"cannot reach {target.address}: Connection refused" in caplog.text


def test_a_route_that_leads_back_is_no_loop(caplog: pytest.LogCaptureFixture) -> None:
    addresses: list[Address] = []
    with Relay(lambda _: addresses[0]) as relay:
        addresses.append(relay.address)
        assert is_turned_away(relay, HELLO)
        assert relay.num_relayed == 0
    assert "leads back to this relay" in caplog.text


def test_connections_beyond_the_limits_are_dropped_and_the_others_live(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    with Relay(target.route, limits=RelayLimits(max_num_waiting=2, max_num_open=1)) as relay:
        silent = [dial(relay) for _ in range(3)]
        assert is_reset(silent[0])
        silent[1].sendall(HELLO)
        with target.accept() as server:
            wait_for_open(relay, 1)
            assert is_turned_away(relay)
            server.sendall(b"alive")
            assert read_exactly(silent[1], 5) == b"alive"
        for sock in silent:
            sock.close()
    assert "2 connections are waiting already" in caplog.text
    assert "1 connections are open already" in caplog.text


def dial_from(relay: Relay, source: str) -> socket.socket:
    place = (relay.address.host, relay.address.port)
    return socket.create_connection(place, timeout=PATIENCE_S, source_address=(source, 0))


def test_a_source_that_floods_a_relay_evicts_its_own_connections(target: Target) -> None:
    with Relay(target.route, limits=RelayLimits(max_num_waiting=8)) as relay:
        with dial_from(relay, "127.0.0.3") as other:
            flood = [dial_from(relay, "127.0.0.2") for _ in range(300)]
            assert all(is_reset(one) for one in flood[:290])
            other.sendall(HELLO)
            with target.accept() as server:
                assert read_exactly(server, len(HELLO)) == HELLO
        for one in flood:
            one.close()


def test_no_source_has_more_than_its_share_of_those_that_wait(target: Target) -> None:
    limits = RelayLimits(max_num_waiting=100, max_num_waiting_per_source=3)
    with Relay(target.route, limits=limits) as relay:
        many = [dial_from(relay, f"127.0.0.{2 + number % 2}") for number in range(10)]
        assert all(is_reset(one) for one in many[:4])
        assert relay.num_dropped == 4
        for one in many:
            one.close()


def test_whoever_says_hello_and_then_nothing_is_unproven_and_evicted(target: Target) -> None:
    limits = RelayLimits(max_num_waiting=100, max_num_waiting_per_source=2, unproven_s=PATIENCE_S)
    with Relay(target.route, limits=limits) as relay, dial_from(relay, "127.0.0.3") as other:
        other.sendall(HELLO)
        ends = [target.accept()]
        many = []
        for _ in range(5):
            many.append(dial_from(relay, "127.0.0.2"))
            many[-1].sendall(HELLO)
            ends.append(target.accept())
        assert all(is_reset(one) for one in many[:3])
        wait_for_open(relay, 3)
        for one in [*many, *ends]:
            one.close()


def test_whoever_outlives_its_unproven_stays(target: Target) -> None:
    limits = RelayLimits(max_num_waiting_per_source=1, unproven_s=0.05)
    with Relay(target.route, limits=limits) as relay:
        ends = []
        for number in range(3):
            ends.append(dial(relay))
            ends[-1].sendall(HELLO)
            ends.append(target.accept())
            wait_for_open(relay, number + 1)
            time.sleep(0.2)
        wait_for_open(relay, 3)
        for one in ends:
            one.close()


def test_a_half_close_is_passed_on_and_the_other_way_lives_on(target: Target) -> None:
    with joined(target) as (relay, client, server):
        client.sendall(b"question")
        client.shutdown(socket.SHUT_WR)
        assert read_all(server) == b"question"
        server.sendall(b"late answer")
        server.close()
        assert read_all(client) == b"late answer"
        wait_for_open(relay, 0)


@pytest.mark.parametrize("by_client", [True, False])
def test_a_reset_is_passed_on_as_a_reset(target: Target, by_client: bool) -> None:
    with joined(target, up=Shape(delay_s=0.01), down=Shape(delay_s=0.01)) as (relay, client, server):
        breaks, sees = (client, server) if by_client else (server, client)
        breaks.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        breaks.close()
        assert is_reset(sees)
        wait_for_open(relay, 0)


def test_bulk_goes_both_ways_at_once_and_arrives_whole(target: Target) -> None:
    data = [bytes(range(256)) * 16_384, bytes(range(255)) * 16_384]
    shape = Shape(bandwidth_bps=400e6, delay_s=0.005, jitter_s=0.005)
    with joined(target, up=shape, down=shape) as (relay, *sockets):

        def send(sock: socket.socket, what: bytes) -> None:
            sock.sendall(what)
            sock.shutdown(socket.SHUT_WR)

        threads = [threading.Thread(target=send, args=pair) for pair in zip(sockets, data, strict=True)]
        received: dict[int, bytes] = {}
        threads += [
            threading.Thread(target=lambda n=number: received.update({n: read_all(sockets[1 - n])}))
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        num_bytes = [relay.num_bytes(direction) for direction in Direction]
    digests = [hashlib.sha256(received[number]).hexdigest() for number in range(2)]
    assert digests == [hashlib.sha256(what).hexdigest() for what in data]
    assert num_bytes == [len(data[0]), len(data[1])]


def test_a_receiver_that_does_not_read_stops_the_sender(target: Target) -> None:
    with joined(target, up=Shape(bandwidth_bps=1e9)) as (relay, client, server):
        client.settimeout(1.0)
        num_taken = send_until_stopped(client, max_bytes=1 << 30)
        assert num_taken - relay.num_bytes(Direction.UP) < 64 << 20
        client.settimeout(PATIENCE_S)
        client.shutdown(socket.SHUT_WR)
        assert len(read_all(server)) == num_taken


def test_no_byte_is_faster_than_the_delay_or_the_bandwidth(target: Target) -> None:
    with joined(target, up=Shape(delay_s=0.05), down=Shape(bandwidth_bps=20e6, delay_s=0.03)) as wan:
        _, client, server = wan
        start_s = time.monotonic()
        client.sendall(b"ping")
        server.sendall(read_exactly(server, 4))
        read_exactly(client, 4)
        assert time.monotonic() - start_s > 0.079
        start_s = time.monotonic()
        server.sendall(bytes(500_000))
        read_exactly(client, 500_000)
        assert time.monotonic() - start_s > 0.03 + 0.2 - 0.002


def test_a_small_message_overtakes_bulk_of_another_connection(target: Target) -> None:
    slow = Shape(bandwidth_bps=8e6)
    with joined(target, up=slow) as (relay, bulk, server), dial(relay) as control, target.accept() as other:
        bulk.setblocking(False)
        num_taken = bulk.send(bytes(4_000_000))
        read_exactly(server, 20_000)
        control.sendall(b"urgent")
        assert read_exactly(other, 6) == b"urgent"
        assert relay.num_bytes(Direction.UP) < num_taken / 2


def test_a_cut_resets_all_and_refuses_new_ones_until_it_is_over(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with joined(target) as (relay, client, server):
        relay.cut(0.5)
        assert is_reset(client)
        assert is_reset(server)
        assert is_turned_away(relay)
        time.sleep(0.6)
        with dial(relay) as again, target.accept() as other:
            again.sendall(b"back")
            assert read_exactly(other, 4) == b"back"
    assert "the link is cut" in caplog.text


def test_a_blackhole_keeps_connections_and_what_was_sent(target: Target) -> None:
    with joined(target) as (relay, client, server):
        relay.blackhole(0.6)
        start_s = time.monotonic()
        client.sendall(b"into the dark")
        with dial(relay) as newcomer:
            newcomer.sendall(b"me too")
            assert read_exactly(server, 13) == b"into the dark"
            assert time.monotonic() - start_s > 0.5
            with target.accept() as other:
                assert read_exactly(other, 6) == b"me too"


def test_a_slow_down_takes_its_factor_of_time(target: Target) -> None:
    with joined(target, up=Shape(bandwidth_bps=80e6)) as (relay, client, server):
        relay.slow_down(10, 60)
        start_s = time.monotonic()
        client.sendall(bytes(400_000))
        read_exactly(server, 400_000)
        assert time.monotonic() - start_s > 0.38


def test_a_link_without_bandwidth_cannot_slow_down(target: Target) -> None:
    slow = Fault(at_s=1, kind=FaultKind.SLOW_DOWN, between=("east", "west"), duration_s=1, factor=2)
    with Relay(target.route, up=Shape(delay_s=0.01)) as relay:
        with pytest.raises(UserError, match="without bandwidth"):
            relay.slow_down(2, 1)
        with pytest.raises(UserError, match="without bandwidth"):
            relay.play([slow], dialer="west")


@pytest.mark.parametrize("direction", list(Direction))
def test_corruption_flips_bytes_of_one_direction(target: Target, direction: Direction) -> None:
    with joined(target) as (relay, client, server):
        relay.corrupt(direction, 2)
        client.sendall(bytes(5_000))
        server.sendall(bytes(5_000))
        up, down = read_exactly(server, 5_000), read_exactly(client, 5_000)
    flipped = [5_000 - data.count(0) for data in (up, down)]
    assert flipped == ([2, 0] if direction is Direction.UP else [0, 2])


def test_a_script_of_faults_is_played_by_time(target: Target) -> None:
    faults = [
        Fault(at_s=0.3, kind=FaultKind.CUT, between=("east", "west"), duration_s=0.1),
        Fault(at_s=0.0, kind=FaultKind.CORRUPT, between=("east", "west"), sender="east"),
    ]
    with joined(target) as (relay, client, server):
        relay.play(faults, dialer="west")
        time.sleep(0.05)
        server.sendall(bytes(2_000))
        assert 2_000 - read_exactly(client, 2_000).count(0) == 1
        assert is_reset(client)


def test_a_port_that_is_taken_is_one_sentence(target: Target) -> None:
    with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{target.address.port}") as raised:
        Relay(target.route, port=target.address.port)
    assert raised.value.hint


def test_closing_resets_what_is_open_and_may_be_done_twice(target: Target) -> None:
    with joined(target) as (relay, client, _):
        relay.close()
        assert is_reset(client)
        relay.close()
