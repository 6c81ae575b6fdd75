"""How clouds reach each other: through a gateway, through an HTTP CONNECT proxy, and which end dials."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.errors import Aborted, Refused, UserError
from isthmus.job import Address, Job
from isthmus.job.load import parse_job
from isthmus.wan.certificates import throwaway
from isthmus.wan.endpoint import Endpoint, Site, link_settings, num_connections, num_stripes
from isthmus.wan.gateway import Gateway
from isthmus.wan.packet import Packet
from isthmus.wan.sockets import LoopThread, listening_sockets, own_address
from tests.wan.clouds import TWO_CLOUDS, two_clouds

MIB = 1024**2
LOOPBACK = Site(bind=Address(host="127.0.0.1", port=0))


def job_with(*overrides: str) -> Job:
    return parse_job(TWO_CLOUDS, file=Path("two.toml"), overrides=overrides)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread(name="between") as loop:
        yield loop


def exchange(near: Endpoint, far: Endpoint, near_rank: int = 0, far_rank: int = 0) -> None:
    there, back = near.link(far.here.cloud, far_rank), far.link(near.here.cloud, near_rank)
    there.send("question", Packet({"from": str(near.here)}))
    assert back.receive("question", timeout_s=20).header == {"from": str(near.here)}
    back.send("answer", Packet({}))
    there.receive("answer", timeout_s=20)


def test_each_rank_is_reached_through_the_gateways_one_port() -> None:
    identities = throwaway(["east", "west"])
    with Gateway("127.0.0.1", 0, identity=identities["east"], num_ranks=2) as gateway:
        job = job_with("cloud.east.ranks=2", f"cloud.east.listen='{gateway.address}'")
        with (
            Endpoint(job, cloud="east", rank=0, identity=identities["east"]) as first,
            Endpoint(job, cloud="east", rank=1, identity=identities["east"]) as second,
            Endpoint(job, cloud="west", identity=identities["west"]) as west,
        ):
            assert {first.port, second.port}.isdisjoint({gateway.address.port})
            for rank, east in enumerate((first, second)):
                exchange(west, east, far_rank=rank)


class Proxy:
    """An HTTP proxy that knows CONNECT and nothing else."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(request.splitlines()[0])
        host, _, port = request.split()[1].rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.ensure_future(pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.close()


def test_a_cloud_dials_out_through_an_http_connect_proxy(loop: LoopThread) -> None:
    identities = throwaway(["east", "west"])
    proxy = Proxy()
    port = loop.run(proxy.start())
    job = job_with(f"cloud.west.proxy='http://127.0.0.1:{port}'", "link.0.stripes=2")
    with Endpoint(job, cloud="east", identity=identities["east"], site=LOOPBACK) as east:
        site = Site(reach={"east": Address(host="127.0.0.1", port=east.port or 0)})
        with Endpoint(job, cloud="west", identity=identities["west"], site=site) as west:
            exchange(west, east)
    assert f"CONNECT 127.0.0.1:{east.port} HTTP/1.1" in proxy.requests
    loop.run(proxy.close())


def test_a_dial_that_ends_at_another_rank_is_refused_and_does_not_disturb_that_rank() -> None:
    identities = throwaway(["east", "west"])
    job = job_with("cloud.east.ranks=2")
    with Endpoint(job, cloud="east", rank=0, identity=identities["east"], site=LOOPBACK) as first:
        site = Site(reach={"east": Address(host="127.0.0.1", port=first.port or 0)})
        with Endpoint(job, cloud="west", identity=identities["west"], site=site) as west:
            exchange(west, first)
            with pytest.raises(Refused, match="west rank 0 has dialled east rank 1 and reached east rank 0"):
                west.link("east", 1).receive("never", timeout_s=20)
            exchange(west, first)


def test_an_answer_of_another_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a listener that takes whatever comes."""
    identities = throwaway(["east", "west"])
    job = job_with("cloud.east.ranks=2", "link.0.heartbeat_timeout='3 s'")
    with Endpoint(job, cloud="east", rank=0, identity=identities["east"], site=LOOPBACK) as first:
        monkeypatch.setattr("isthmus.wan.endpoint.mismatch", lambda *_: None)
        site = Site(reach={"east": Address(host="127.0.0.1", port=first.port or 0)})
        with Endpoint(job, cloud="west", identity=identities["west"], site=site) as west:
            reason = "west rank 0 has dialled east rank 1, and east rank 0 has answered"
            with pytest.raises(Refused, match=reason):
                west.link("east", 1).receive("never", timeout_s=20)


def test_the_cloud_without_listen_dials_whichever_is_named_first() -> None:
    identities = throwaway(["east", "west"])
    job = job_with('link.0.between=["west","east"]')
    with Endpoint(job, cloud="east", identity=identities["east"], site=LOOPBACK) as east:
        site = Site(reach={"east": Address(host="127.0.0.1", port=east.port or 0)})
        with Endpoint(job, cloud="west", identity=identities["west"], site=site) as west:
            assert west.port is None
            exchange(west, east)


def test_an_abort_is_passed_on_to_clouds_that_do_not_see_each_other() -> None:
    text = TWO_CLOUDS + '[[cloud]]\nname = "north"\n[[link]]\nbetween = ["east", "north"]\n'
    job = parse_job(text, file=Path("three.toml"))
    identities = throwaway(["east", "west", "north"])
    with Endpoint(job, cloud="east", identity=identities["east"], site=LOOPBACK) as east:
        site = Site(reach={"east": Address(host="127.0.0.1", port=east.port or 0)})
        west, north = (
            Endpoint(job, cloud=name, identity=identities[name], site=site) for name in ("west", "north")
        )
        exchange(west, east)
        exchange(north, east)
        west.abort("out of memory")
        with pytest.raises(Aborted, match="'west' aborted the run: out of memory"):
            north.link("east").receive("never", timeout_s=20)
        west.close()
        north.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("the data is too short", hint="give more"), "the data is too short"),
        (KeyboardInterrupt(), "it was stopped by its user"),
        (ValueError("no such thing"), "ValueError: no such thing"),
    ],
)
def test_what_ends_a_cloud_is_told_to_the_others_in_plain_words(error: BaseException, reason: str) -> None:
    identities = throwaway(["east", "west"])
    east = Endpoint(two_clouds(), cloud="east", identity=identities["east"], site=LOOPBACK)
    site = Site(reach={"east": Address(host="127.0.0.1", port=east.port or 0)})
    west = Endpoint(two_clouds(), cloud="west", identity=identities["west"], site=site)
    exchange(west, east)
    with pytest.raises(type(error)), east:
        raise error
    with pytest.raises(Aborted, match=f"cloud 'east' aborted the run: {reason}"):
        west.link("east").receive("never", timeout_s=20)
    west.close()


def listening_places() -> set[tuple[str, int]]:
    return {sock.getsockname()[:2] for sock in listening_sockets()}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")])
def test_a_rank_listens_where_the_job_says_and_nowhere_else(host: str, bound: str) -> None:
    port = free_port()
    job = job_with(f"cloud.east.listen='{host}:{port}'")
    with Endpoint(job, cloud="east", identity=throwaway(["east"])["east"]):
        (place,) = (place for place in listening_places() if place[1] == port)
        assert place[0].removeprefix("::ffff:") == bound


def test_a_rank_behind_a_gateway_listens_on_the_gateways_side() -> None:
    identity = throwaway(["east"])["east"]
    with Gateway("127.0.0.1", 0, identity=identity, num_ranks=2) as gateway:
        job = job_with("cloud.east.ranks=2", f"cloud.east.listen='{gateway.address}'")
        with Endpoint(job, cloud="east", rank=1, identity=identity) as east:
            (place,) = (place for place in listening_places() if place[1] == east.port)
            assert place[0].removeprefix("::ffff:") == "127.0.0.1"


def test_an_address_of_a_router_is_listened_for_everywhere_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert own_address("192.0.2.7") is None
    assert own_address("no-such-host.invalid") is None
    job = job_with(f"cloud.east.listen='192.0.2.7:{free_port()}'")
    with Endpoint(job, cloud="east", identity=throwaway(["east"])["east"]) as east:
        (place,) = (place for place in listening_places() if place[1] == east.port)
        assert place[0] in ("::", "0.0.0.0")
    assert "192.0.2.7 is no one address of this machine: listening on all its interfaces" in caplog.text


def test_a_name_that_only_this_machine_takes_for_itself_is_listened_for_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Debian has it: in /etc/hosts a machine's name is 127.0.1.1."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    assert own_address("east.example.com") is None
    assert own_address("127.0.1.1") == "127.0.1.1"


def test_a_port_that_is_taken_is_the_users_to_mend() -> None:
    identities = throwaway(["east"])
    with Endpoint(two_clouds(), cloud="east", identity=identities["east"], site=LOOPBACK) as east:
        taken = Site(bind=Address(host="127.0.0.1", port=east.port or 0))
        reason = f"cloud 'east' cannot listen at {taken.bind}: Address already in use"
        with pytest.raises(UserError, match=reason) as error:
            Endpoint(two_clouds(), cloud="east", identity=identities["east"], site=taken)
    assert error.value.hint is not None


def test_only_links_of_the_job_can_be_opened() -> None:
    with (
        Endpoint(two_clouds(), cloud="east", identity=throwaway(["east"])["east"], site=LOOPBACK) as east,
        pytest.raises(Refused, match="no link between 'east' and 'mars'"),
    ):
        east.link("mars")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 4),
        (("stripes=7",), 7),
        (("bandwidth='10 Mbps'", "rtt='10 ms'"), 2),
        (("bandwidth='1 Gbps'", "rtt='200 ms'"), 12),
        (("bandwidth='10 Gbps'", "rtt='200 ms'"), 16),
        (("bandwidth='1 Gbps'", "rtt='20 ms'", "connection_bandwidth='150 Mbps'"), 7),
    ],
)
def test_stripes_follow_from_the_bandwidth_delay_product(overrides: tuple[str, ...], expected: int) -> None:
    assert num_stripes(two_clouds(*overrides).link[0]) == expected


def test_each_end_expects_the_bandwidth_of_its_own_direction() -> None:
    link = two_clouds("bandwidth=['10 Gbps', '100 Mbps']", "rtt='200 ms'").link[0]
    assert link_settings(link, sender="east").bandwidth_bps == 10e9
    assert link_settings(link, sender="west").bandwidth_bps == 100e6
    assert link_settings(link, sender="west").stream_window_bytes == 64 * MIB
    assert link_settings(link, sender="east").stream_window_bytes == 256 * MIB
    slower = two_clouds("bandwidth='1 Gbps'", "rtt='200 ms'").link[0]
    assert link_settings(slower, sender="east").stream_window_bytes == int(3 * 1e9 / 8 * 0.2)


def test_the_connections_that_others_open_to_a_rank_are_counted() -> None:
    job = job_with("cloud.west.ranks=3", "link.0.stripes=6")
    assert num_connections(job, "east") == 3 * (2 + 2)
    assert num_connections(job, "west") == 0
    assert num_connections(two_clouds("stripes=7"), "east") == 2 + 7
