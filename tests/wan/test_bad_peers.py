"""Strangers, liars and vandals at a port: refused with a reason, while a good peer notices nothing."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from isthmus import __version__
from isthmus.errors import Aborted, PeerLost, Refused
from isthmus.job import Address, Job
from isthmus.job.load import parse_job
from isthmus.wan import certificates
from isthmus.wan.certificates import Authority, Identity, new_key, throwaway
from isthmus.wan.endpoint import Endpoint, Site
from isthmus.wan.exchange import LinkSettings
from isthmus.wan.handshake import Hello, server_name
from isthmus.wan.link import Connection, Link
from isthmus.wan.packet import PROTOCOL_VERSION, Ack, Packet, Ping, Pong, encode, encode_chunk
from isthmus.wan.sockets import LoopThread
from isthmus.wan.transport import Dialer, process_loop
from tests.wan.clouds import TWO_CLOUDS, dialled, two_clouds
from tests.wan.test_frames import mutated

MB = 1_000_000
RELEASE = f"{__version__} (link protocol {PROTOCOL_VERSION})"


class Port:
    """A cloud `east` that listens, and a good peer `west` that sends to it all the while."""

    def __init__(self) -> None:
        self.job = two_clouds_of_two_ranks()
        self.identities = throwaway(["east", "west", "north"])
        self.loop = process_loop()
        self.east = Endpoint(
            self.job,
            cloud="east",
            identity=self.identities["east"],
            site=Site(bind=Address(host="127.0.0.1", port=0)),
        )
        assert self.east.port is not None
        self.address = Address(host="127.0.0.1", port=self.east.port)
        self.west = self.dial(self.job, self.identities["west"])
        self.good = self.west.link("east")
        self.echo()

    def dial(self, job: Job, identity: Identity) -> Endpoint:
        return Endpoint(job, cloud="west", identity=identity, site=Site(reach={"east": self.address}))

    def echo(self) -> None:
        """The good peer's traffic still flows."""
        data = os.urandom(100_000)
        self.good.send("echo", Packet({}, (data,)), timeout_s=20)
        assert bytes(self.east.link("west").receive("echo", timeout_s=20).buffers[0]) == data

    def attack(self, hello: Hello, identity: Identity) -> tuple[Connection, AsyncExitStack]:
        dialer = Dialer(address=str(self.address), server_name=server_name("east", 0), identity=identity)
        return self.loop.run(dialled(dialer, hello))

    def hello(self, **changes: object) -> Hello:
        hello = Hello(cloud="west", peer_cloud="east", job_digest=self.job.digest, session="attacker")
        return dataclasses.replace(hello, **changes)  # type: ignore[arg-type]

    def close(self) -> None:
        assert self.good.counters().reconnects == 0, "the good peer was disturbed"
        self.east.abort("the test is over")
        self.west.close()
        self.east.close()


def two_clouds_of_two_ranks(*overrides: str) -> Job:
    return parse_job(TWO_CLOUDS, file=Path("two.toml"), overrides=["cloud.west.ranks=2", *overrides])


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.echo()
    port.close()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def refused(link: Link) -> str:
    with pytest.raises(Refused) as error:
        link.receive("never", timeout_s=20)
    return error.value.message


def wait_for_log(capfd: pytest.CaptureFixture[str], text: str) -> None:
    """What TLS itself turns down is told by gRPC on standard error."""
    seen, end_s = "", time.monotonic() + 20
    while text not in seen:
        assert time.monotonic() < end_s, seen
        time.sleep(0.02)
        seen += capfd.readouterr().err


def test_a_peer_without_a_certificate_is_refused(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    context = ssl.create_default_context(cadata=port.identities["east"].authority_pem.decode())
    with (
        socket.create_connection((port.address.host, port.address.port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=server_name("east", 0)) as stranger,
    ):
        assert hung_up(stranger)
    wait_for_log(capfd, "PEER_DID_NOT_RETURN_A_CERTIFICATE")


def hung_up(stranger: socket.socket) -> bool:
    try:
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        return stranger.recv(100) == b""
    except OSError:
        return True


def shown(port: Port, other: Identity) -> Identity:
    """West's trust in the authority with somebody else's key and certificate."""
    return dataclasses.replace(
        port.identities["west"], key_pem=other.key_pem, certificate_pem=other.certificate_pem
    )


def test_a_certificate_of_another_authority_is_refused(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    stranger = shown(port, throwaway(["west"])["west"])
    with pytest.raises(ConnectionError):
        port.attack(port.hello(), stranger)
    wait_for_log(capfd, "CERTIFICATE_VERIFY_FAILED")


def test_a_peer_that_trusts_another_authority_refuses_us_with_a_sentence(port: Port) -> None:
    stranger = port.dial(port.job, throwaway(["west"])["west"])
    reason = f"the certificate shown by or to {port.address} was turned down: another authority has signed it"
    assert refused(stranger.link("east")) == reason
    stranger.close()


def test_a_refusal_keeps_nothing_of_the_connection_alive(port: Port) -> None:
    """Else gRPC dials on until the process ends, and may not let it end."""
    stranger = port.dial(port.job, throwaway(["west"])["west"])
    with pytest.raises(Refused) as error:
        stranger.link("east").receive("never", timeout_s=20)
    files = {Path(entry.path).name for entry in error.traceback}
    assert "exchange.py" in files
    assert "transport.py" not in files
    assert error.value.__context__ is None
    stranger.close()


def test_an_expired_certificate_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.create(days=30)
    east = issue(authority, "east")
    before = datetime.now(UTC) - timedelta(days=20)
    monkeypatch.setattr(certificates, "utc_now", lambda: before)
    west = issue(authority, "west")
    with Endpoint(
        two_clouds(), cloud="east", identity=east, site=Site(bind=Address(host="127.0.0.1", port=0))
    ) as endpoint:
        dialer = Dialer(
            address=f"127.0.0.1:{endpoint.port}", server_name=server_name("east", 0), identity=west
        )
        hello = Hello(cloud="west", peer_cloud="east", job_digest=two_clouds().digest, session="late")
        with pytest.raises(ConnectionError):
            process_loop().run(dialled(dialer, hello))
        wait_for_log(capfd, "certificate has expired")


def issue(authority: Authority, cloud: str) -> Identity:
    key = new_key()
    certificate = authority.issue(cloud, key.public_key(), days=10)
    return Identity(
        cloud=cloud,
        key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        certificate_pem=certificate.public_bytes(Encoding.PEM),
        authority_pem=authority.certificate.public_bytes(Encoding.PEM),
    )


def test_another_clouds_certificate_is_refused(port: Port, logged: pytest.LogCaptureFixture) -> None:
    reason = "west rank 0 shows a certificate for north.isthmus, *.north.isthmus, not for cloud 'west'"
    liar = port.dial(port.job, shown(port, port.identities["north"]))
    assert refused(liar.link("east")) == reason
    assert reason in logged.text
    liar.close()


def test_a_server_with_another_clouds_certificate_is_refused(port: Port) -> None:
    dialer = Dialer(
        address=str(port.address), server_name=server_name("north", 0), identity=port.identities["west"]
    )
    with pytest.raises(Refused, match="it names another cloud"):
        port.loop.run(dialled(dialer, port.hello()))


def test_another_job_is_refused_on_both_sides_with_one_sentence(
    port: Port, logged: pytest.LogCaptureFixture
) -> None:
    other = two_clouds_of_two_ranks("link.0.usd_per_gib=0.5")
    reason = (
        "west rank 0 and east rank 0 have different job files: "
        "link.east-west.usd_per_gib is 0.5 at west and unset at east: give both the same file"
    )
    stranger = port.dial(other, port.identities["west"])
    assert refused(stranger.link("east")) == reason
    assert "refused 127.0.0.1: " in logged.text
    assert reason in logged.text
    stranger.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"version": 99, "release": "9.9.0"},
            f"west rank 0 runs Isthmus 9.9.0 (link protocol 99), east rank 0 runs {RELEASE}",
        ),
        (
            {"release": "0.0.9"},
            f"west rank 0 runs Isthmus 0.0.9 (link protocol {PROTOCOL_VERSION}), east rank 0 runs {RELEASE}",
        ),
        ({"release": "x" * 500}, "a handshake with a broken release"),
        ({"met": "5f"}, "east rank 0 has begun a new epoch"),
        ({"rank": 5}, "cloud 'west' has no rank 5 in this job"),
        ({"peer_rank": 1}, "west rank 0 has dialled east rank 1 and reached east rank 0"),
        ({"peer_cloud": "north"}, "west rank 0 has dialled north rank 0 and reached east rank 0"),
        ({"lane": 1000}, "west rank 0 asks for connection number 1000"),
        ({"session": "x" * 500}, "a handshake with a broken session"),
        ({"rank": -1}, "a handshake with a broken rank"),
    ],
)
def test_a_handshake_that_does_not_fit_is_refused_with_one_sentence(
    port: Port, logged: pytest.LogCaptureFixture, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(Refused, match=re.escape(reason)):
        port.attack(port.hello(**changes), port.identities["west"])
    assert reason in logged.text


@pytest.mark.slow
def test_a_second_process_of_a_cloud_is_refused_while_the_first_one_lives(
    port: Port, logged: pytest.LogCaptureFixture
) -> None:
    reason = "west rank 0 is already connected to east rank 0: end one of its two processes"
    second = port.dial(port.job, port.identities["west"])
    assert refused(second.link("east")) == reason
    assert reason in logged.text
    # Nor does its end reach anybody.
    second.abort("the second one was refused")
    second.close()


def test_a_process_that_takes_the_place_of_a_dead_one_ends_the_link_at_once(port: Port) -> None:
    """What was under way to the dead one is gone, so both ends start anew."""
    _, stack = port.attack(port.hello(rank=1, session="first"), port.identities["west"])
    east = port.east.link("west", 1)
    east.wait_ready(timeout_s=20)
    with pytest.raises(Refused, match="west rank 1 is already connected"):
        port.attack(port.hello(rank=1, session="second"), port.identities["west"])
    east.raise_if_failed()
    port.loop.run(stack.aclose())
    with pytest.raises(Refused, match="west rank 1 has restarted while east rank 0 has not"):
        until_heard(port, port.hello(rank=1, session="third"))
    with pytest.raises(PeerLost, match="west rank 1 has restarted"):
        east.receive("never", timeout_s=20)


def until_heard(port: Port, hello: Hello) -> None:
    """Dial until the end of the connection before has been noticed."""
    end_s = time.monotonic() + 20
    while True:
        try:
            port.attack(hello, port.identities["west"])
        except Refused as error:
            if "already connected" not in error.message or time.monotonic() > end_s:
                raise
        time.sleep(0.02)


def test_a_cloud_without_a_link_in_the_job_is_refused(port: Port) -> None:
    with pytest.raises(Refused, match="the job has no link between 'east' and 'north'"):
        port.attack(port.hello(cloud="north"), port.identities["north"])


def test_random_bytes_on_the_port_are_dropped(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(1)
    for _ in range(50):
        with socket.create_connection((port.address.host, port.address.port), timeout=20) as vandal:
            vandal.sendall(rng.randbytes(rng.randint(1, 5000)))
            vandal.shutdown(socket.SHUT_WR)
            assert drained(vandal)
    wait_for_log(capfd, "WRONG_VERSION_NUMBER")


def drained(vandal: socket.socket) -> bool:
    try:
        while vandal.recv(4096):
            continue
    except ConnectionResetError:
        return True
    return True


def seeds() -> list[bytes]:
    return [
        encode(Ping(1)),
        encode(Pong(1, 2, 3)),
        encode(Ack(0, ((1, 2),), (("bulk", 10),))),
        *(bulk_chunk(sequence) for sequence in range(8)),
    ]


def bulk_chunk(sequence: int) -> bytes:
    pieces = [memoryview(bytes(5_000))]
    return encode_chunk(
        sequence=sequence, stream="bulk", packet=sequence, packet_bytes=100_000, offset=0, pieces=pieces
    )


def test_mutated_frames_over_the_wire_are_dropped_with_a_reason(
    port: Port, logged: pytest.LogCaptureFixture
) -> None:
    """The vandal has a good certificate: it is another rank of the good peer's cloud."""
    rng = random.Random(2)
    for _ in range(60):
        connection, stack = port.attack(port.hello(rank=1), port.identities["west"])
        port.loop.run(write_until_dropped(connection, [mutated(rng.choice(seeds()), rng) for _ in range(50)]))
        port.loop.run(stack.aclose())
    assert "link to west rank 1, connection 0 dropped: " in logged.text


async def write_until_dropped(connection: Connection, frames: list[bytes]) -> None:
    with contextlib.suppress(ConnectionError):
        for frame in frames:
            await connection.write(frame)


class Vandal:
    """A connection that reads as the given frames."""

    def __init__(self, frames: list[bytes]) -> None:
        self._frames = iter(frames)

    async def read(self) -> bytes:
        return next(self._frames, b"")

    async def write(self, _: bytes) -> None:
        await asyncio.sleep(0)


@pytest.mark.slow
def test_a_hundred_thousand_mutated_frames_neither_crash_a_link_nor_fill_the_memory() -> None:
    rng = random.Random(3)
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    num_frames = 0
    links: list[Link] = []
    with LoopThread(name="vandal") as loop:
        while num_frames < 100_000:
            link = Link(hello=Hello(cloud="east", peer_cloud="west"), settings=LinkSettings(), loop=loop)
            for _ in range(400):
                frames = [mutated(rng.choice(seeds()), rng) for _ in range(10)]
                loop.run(link.serve(rng.randrange(4), Vandal(frames)))
                num_frames += len(frames)
            link.start_abort(Aborted("east", "enough"))
            links.append(link)
        for link in links:
            link.join()
    assert process.memory_info().rss - before_bytes < 300 * MB
