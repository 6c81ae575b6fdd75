import asyncio
import contextlib
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from isthmus import __version__
from isthmus.cli.site import gateway as gateway_verb
from isthmus.errors import Aborted, Refused, UserError
from isthmus.job import Address
from isthmus.plan.types import Member
from isthmus.wan.certificates import Identity, make_authority, make_request, sign_request, throwaway
from isthmus.wan.exchange import LinkSettings
from isthmus.wan.gateway import REGISTRATION, Gateway, RankChange, Registration
from isthmus.wan.gateway import relay_limits as gateway_limits
from isthmus.wan.handshake import GATEWAY_RANK, Hello, mismatch, server_name
from isthmus.wan.link import Connection
from isthmus.wan.packet import encode_chunk
from isthmus.wan.transport import Dialer, process_loop
from tests.wan.clouds import dialled
from tests.wan.tls import client_context, server_context

PATIENCE_S = 60.0
HASTY = replace(REGISTRATION, heartbeat_timeout_s=1.5)
IDENTITIES = throwaway(["east", "west"])
EAST, WEST = IDENTITIES["east"], IDENTITIES["west"]
STRANGER = throwaway(["east"])["east"]
ANYWHERE = Address(host="10.0.0.5", port=4000)


class Running:
    """A gateway of east with four ranks, and what it has told."""

    def __init__(self, gateway: Gateway, changes: list[RankChange], settings: LinkSettings) -> None:
        self.gateway = gateway
        self.address = gateway.address
        self.changes = changes
        self.settings = settings

    @asynccontextmanager
    async def registered(self, rank: int, address: Address) -> AsyncIterator[Registration]:
        registration = self.registration(rank, address)
        await asyncio.to_thread(registration.wait)
        try:
            yield registration
        finally:
            await asyncio.to_thread(registration.close)

    def registration(self, rank: int, address: Address, identity: Identity = EAST) -> Registration:
        return Registration(
            self.address, identity=identity, rank=rank, address=address, settings=self.settings
        )

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():  # noqa: ASYNC110 - a test may look
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(*, port: int = 0, settings: LinkSettings = REGISTRATION) -> AsyncIterator[Running]:
    changes: list[RankChange] = []
    make = partial(Gateway, "127.0.0.1", port, identity=EAST, num_ranks=4, on_change=changes.append)
    gateway = await asyncio.to_thread(make, settings=settings)
    try:
        yield Running(gateway, changes, settings)
    finally:
        await asyncio.to_thread(gateway.close)


@asynccontextmanager
async def rank_server(identity: Identity = EAST) -> AsyncIterator[Address]:
    """A rank that sends back, over its own TLS, one line with the caller's cloud in front."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        names = [name for _, name in writer.get_extra_info("peercert")["subjectAltName"]]
        writer.write(names[0].encode() + b" said " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server_context(identity))
    async with server:
        yield Address(host="127.0.0.1", port=server.sockets[0].getsockname()[1])


async def say(gateway: Address, name: str, line: bytes, identity: Identity = WEST) -> bytes:
    """Dial a name through a gateway, say one line, and return the answer."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(
            gateway.host, gateway.port, ssl=client_context(identity), server_hostname=name
        )
        try:
            writer.write(line)
            return await reader.readline()
        finally:
            writer.close()


def dial(gateway: Address, hello: Hello, identity: Identity = EAST) -> tuple[Connection, AsyncExitStack]:
    """Connect to a gateway itself, as a rank does."""
    name = server_name("east", GATEWAY_RANK)
    dialer = Dialer(address=str(gateway), server_name=name, identity=identity)
    return process_loop().run(dialled(dialer, hello))


def hello_of(
    cloud: str = "east",
    *,
    rank: int = 1,
    address: str = str(ANYWHERE),
    release: str = __version__,
    peer_cloud: str = "east",
) -> Hello:
    hello = Hello(cloud=cloud, rank=rank, session="by hand", address=address, release=release)
    return hello.to(Member(peer_cloud, GATEWAY_RANK))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await scenario()

    asyncio.run(bounded())


def test_a_registered_rank_is_reached_by_name_with_tls_from_end_to_end() -> None:
    async def scenario() -> None:
        async with running() as here, rank_server() as rank, here.registered(3, rank):
            answer = await say(here.address, server_name("east", 3), b"hello\n")
            assert answer == b"west.isthmus said hello\n"
            assert here.changes == [RankChange(rank=3, address=rank, num_registered=1)]

    run(scenario)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rank-2.east.isthmus", "rank 2 of east has not registered"),
        ("rank-3.west.isthmus", "this is the gateway of east, not of west"),
        ("example.com", "'example.com' is not the name of a rank"),
    ],
)
def test_a_name_without_a_rank_behind_it_is_dropped_with_the_reason(
    name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running() as here:
            with pytest.raises(OSError, match=r"reset|SSL"):
                await say(here.address, name, b"hello\n")

    run(scenario)
    assert reason in caplog.text


def test_a_cloud_that_tries_again_and_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running() as here:
            for _ in range(5):
                with pytest.raises(OSError, match=r"reset|SSL"):
                    await say(here.address, "rank-2.east.isthmus", b"hello\n")

    run(scenario)
    assert caplog.text.count("rank 2 of east has not registered") == 1


def test_names_that_a_stranger_chooses_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running() as here:
            for number in range(40):
                with pytest.raises(OSError, match=r"reset|SSL"):
                    await say(here.address, f"host-{number}.example.com", b"hello\n")

    run(scenario)
    assert caplog.text.count("is not the name of a rank") == 1


def test_idle_strangers_do_not_close_the_gateway_to_its_own_ranks_or_to_other_clouds() -> None:
    async def scenario() -> None:
        async with running() as here, rank_server() as rank:
            place = (here.address.host, here.address.port)
            idle = [await asyncio.open_connection(*place) for _ in range(600)]
            async with here.registered(3, rank):
                idle += [await asyncio.open_connection(*place) for _ in range(600)]
                assert await say(here.address, server_name("east", 3), b"hello\n") == (
                    b"west.isthmus said hello\n"
                )
                assert len(here.changes) == 1
            for _, writer in idle:
                writer.close()

    run(scenario)


def test_a_gateway_keeps_descriptors_for_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    for num_ranks, num_expected in ((4, 0), (64, 0), (4, 40), (64, 10_000)):
        limits = gateway_limits(num_ranks=num_ranks, num_expected=num_expected)
        strangers = limits.max_num_waiting
        assert strangers + 2 * limits.max_num_open + 3 * num_ranks + 64 <= 1024 - 64
        assert limits.max_num_waiting_per_source < strangers < limits.max_num_open


def test_a_rank_that_leaves_is_forgotten() -> None:
    async def scenario() -> None:
        async with running() as here, rank_server() as rank:
            async with here.registered(0, rank):
                pass
            await here.until(lambda: len(here.changes) == 2)
            assert here.changes[1] == RankChange(rank=0, address=None, num_registered=0)
            with pytest.raises(Refused, match="rank 0 of east has not registered"):
                here.gateway.route("rank-0.east.isthmus")

    run(scenario)


def test_a_rank_that_falls_silent_is_forgotten() -> None:
    async def scenario() -> None:
        async with running(settings=HASTY) as here:
            _, stack = await asyncio.to_thread(dial, here.address, hello_of())
            await here.until(lambda: len(here.changes) == 2)
            assert [change.address is None for change in here.changes] == [False, True]
            process_loop().run(stack.aclose())

    run(scenario)


def test_a_rank_stays_registered_while_it_shows_life() -> None:
    async def scenario() -> None:
        async with running(settings=HASTY) as here, rank_server() as rank, here.registered(1, rank):
            await asyncio.sleep(2 * HASTY.heartbeat_timeout_s)
            assert here.gateway.route("rank-1.east.isthmus") == rank
            assert len(here.changes) == 1

    run(scenario)


def test_of_two_registrations_the_newer_holds_and_the_older_is_told() -> None:
    async def scenario() -> None:
        old, new = Address(host="10.0.0.5", port=4000), Address(host="10.0.0.6", port=4000)
        async with running() as here, here.registered(1, old) as older, here.registered(1, new):
            reason = r"rank 1 has been registered again, at 10\.0\.0\.6:4000"
            with pytest.raises(Aborted, match=reason):
                await asyncio.to_thread(older.link.receive, "never", timeout_s=PATIENCE_S)
            assert here.gateway.route("rank-1.east.isthmus") == new
            assert [change.address for change in here.changes] == [old, new]

    run(scenario)


def test_a_registration_outlives_its_gateway(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with rank_server() as rank:
            async with running() as first:
                port = first.address.port
                registration = first.registration(2, rank)
                await asyncio.to_thread(registration.wait)
            async with running(port=port) as second:
                await second.until(lambda: len(second.changes) == 1)
                assert await say(second.address, server_name("east", 2), b"again\n") == (
                    b"west.isthmus said again\n"
                )
                await asyncio.to_thread(registration.close)

    run(scenario)
    assert "trying again" in caplog.text


def test_a_registration_waits_for_a_gateway_that_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running() as early:
            address = early.address
        registration = early.registration(0, ANYWHERE)
        waiting = asyncio.create_task(asyncio.to_thread(registration.wait))
        await early.until(lambda: "Connection refused; trying again" in caplog.text)
        assert not waiting.done()
        async with running(port=address.port) as late:
            await waiting
            assert late.gateway.route("rank-0.east.isthmus") == ANYWHERE
            await asyncio.to_thread(registration.close)

    run(scenario)


def test_a_certificate_of_another_authority_is_refused_on_both_sides() -> None:
    async def scenario() -> None:
        async with running() as here:
            registration = here.registration(1, here.address, STRANGER)
            with pytest.raises(Refused, match="certificate shown by or to"):
                await asyncio.to_thread(registration.wait)
            await asyncio.to_thread(registration.close)
            assert here.changes == []

    run(scenario)


def test_a_caller_without_certificate_is_refused() -> None:
    async def scenario() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=EAST.authority_pem.decode())
        async with running() as here:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    here.address.host, here.address.port, ssl=context, server_hostname="gateway.east.isthmus"
                )
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                assert await reader.read() == b""
                writer.close()
            assert here.changes == []

    run(scenario)


@pytest.mark.parametrize(
    ("hello", "identity", "reason"),
    [
        (hello_of("west"), WEST, "only ranks of east register here, not west"),
        (hello_of("east"), WEST, "shows a certificate for west.isthmus, *.west.isthmus"),
        (hello_of(address=""), EAST, "'' is no address"),
        (hello_of(address="10.0.0.5"), EAST, "'10.0.0.5' is no address"),
        (hello_of(address="10.0.0.5:0"), EAST, "'10.0.0.5:0' is no address"),
        (hello_of(address="x" * 200), EAST, "a handshake with a broken address"),
        (hello_of(rank=4), EAST, "east has no rank 4, only 0 to 3"),
        (hello_of(rank=-1), EAST, "a handshake with a broken rank"),
        (hello_of(release="0.0.9"), EAST, "the gateway of east runs "),
        (
            hello_of(peer_cloud="west"),
            EAST,
            "dialled the gateway of west and reached the gateway of east",
        ),
    ],
)
def test_a_bad_registration_is_refused_with_one_sentence(
    hello: Hello, identity: Identity, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running() as here, rank_server() as rank, here.registered(3, rank):
            with pytest.raises(Refused, match=re.escape(reason)):
                await asyncio.to_thread(dial, here.address, hello, identity)
            assert len(here.changes) == 1
            assert await say(here.address, server_name("east", 3), b"fine\n") == b"west.isthmus said fine\n"

    run(scenario)
    assert reason in caplog.text


def test_a_registered_rank_that_sends_anything_but_heartbeats_is_disconnected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with running(settings=HASTY) as here:
            connection, stack = await asyncio.to_thread(dial, here.address, hello_of())
            pieces = [memoryview(b"data")]
            chunk = encode_chunk(sequence=0, stream="s", packet=0, packet_bytes=4, offset=0, pieces=pieces)
            await asyncio.to_thread(process_loop().run, connection.write(chunk))
            await here.until(lambda: "a chunk, which has no place on this link" in caplog.text)
            await here.until(lambda: len(here.changes) == 2)
            await asyncio.to_thread(process_loop().run, stack.aclose())

    run(scenario)


def test_a_rank_that_dials_a_rank_instead_of_its_gateway_is_told() -> None:
    here = Hello(cloud="east", rank=0).to(Member("east", 1))
    reason = mismatch(here, hello_of())
    assert reason is not None
    assert reason.startswith("east rank 1 has dialled the gateway of east and reached east rank 0")


JOB = """
name = "two"
[[cloud]]
name = "east"
ranks = 4
listen = "127.0.0.1:7600"
certificates = "{folder}"
[[cloud]]
name = "west"
[[link]]
between = ["east", "west"]
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "certs"
    make_authority(folder)
    sign_request(make_request(folder, "east"), cloud="east", folder=folder)
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(folder=folder))
    return path


def test_the_command_says_where_it_listens_and_ends_cleanly_when_told(job: Path) -> None:
    command = "import typer; from isthmus.cli.site import gateway; typer.run(gateway)"
    bind = f"127.0.0.1:{_free_port()}"
    arguments = [str(job), "--cloud", "east", "--bind", bind, "--json"]
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", command, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"event": "listening", "address": bind}
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cloud", "west"], "cloud 'west' has no `listen`: it only dials out and needs no gateway"),
        (["--cloud", "eats"], "the job has no cloud 'eats'"),
        (["--cloud", "east", "--bind", "10.0.0.5:x"], "--bind: '10.0.0.5:x' is no address"),
        (["--cloud", "east", "--bind", "192.0.2.1"], "cannot listen at 192.0.2.1:7600"),
    ],
)
def test_a_gateway_that_cannot_be_is_one_sentence(job: Path, arguments: list[str], message: str) -> None:
    app = typer.Typer()
    app.command()(gateway_verb)
    result = CliRunner().invoke(app, [str(job), *arguments])
    assert isinstance(result.exception, UserError)
    assert message in result.exception.message
    assert result.exception.hint


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
