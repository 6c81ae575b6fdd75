"""The last word of a link: an abort at any moment of its life reaches the peer, and nobody waits for ever."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from isthmus.errors import Aborted, LinkClosed, LinkError, PeerLost, Terminated
from isthmus.job import Address, Job
from isthmus.job.load import parse_job
from isthmus.wan.certificates import Identity, throwaway
from isthmus.wan.endpoint import Endpoint, Site
from isthmus.wan.exchange import FIRST_STRIPE, LinkSettings
from isthmus.wan.handshake import Hello, server_name
from isthmus.wan.link import Connection, Link
from isthmus.wan.local import LocalWan
from isthmus.wan.memory import MemoryLink
from isthmus.wan.packet import Packet
from isthmus.wan.shaping import Shape
from isthmus.wan.sockets import LoopThread, listen
from isthmus.wan.transport import Dialer, process_loop
from tests.wan.clouds import TWO_CLOUDS, dialled, two_clouds

QUICK = LinkSettings(num_stripes=2, heartbeat_timeout_s=1.0)
SLOW_LINE = Shape(delay_s=0.03)
OTHER = {"east": "west", "west": "east"}


def hears_abort(link: Link) -> bool:
    try:
        link.receive("never", timeout_s=20)
    except Aborted as error:
        return error.message == f"cloud {link.peer.cloud!r} aborted the run: out of memory"
    except (LinkError, TimeoutError):
        return False
    return False


def start(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# In memory.


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread(name="busy") as loop:
        yield loop


@pytest.mark.parametrize("cloud", ["east", "west"])
def test_an_abort_before_the_loop_has_done_anything_is_heard(loop: LoopThread, cloud: str) -> None:
    loop.call(lambda: time.sleep(0.1))
    wan = MemoryLink("east", "west", loop=loop)
    wan.end(cloud).abort("out of memory")
    assert hears_abort(wan.end(OTHER[cloud]))
    wan.close()


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["east", "west"])
def test_an_abort_is_heard_whenever_it_comes_in_the_first_moments(loop: LoopThread, cloud: str) -> None:
    def abort_after(delay_s: float) -> bool:
        wan = MemoryLink("east", "west", loop=loop, shape=SLOW_LINE)
        time.sleep(delay_s)
        start(lambda: wan.end(cloud).abort("out of memory"))
        is_heard = hears_abort(wan.end(OTHER[cloud]))
        wan.close()
        return is_heard

    assert [delay_ms for delay_ms in range(0, 160, 8) if not abort_after(delay_ms / 1000)] == []


@pytest.mark.parametrize("cloud", ["east", "west"])
def test_an_abort_as_soon_as_the_peer_is_there_is_heard(cloud: str) -> None:
    with MemoryLink("east", "west", shape=SLOW_LINE) as wan:
        wan.end(cloud).wait_ready(timeout_s=20)
        wan.end(cloud).abort("out of memory")
        assert hears_abort(wan.end(OTHER[cloud]))


@pytest.mark.parametrize("cloud", ["east", "west"])
@pytest.mark.parametrize("is_ready", [False, True])
def test_an_abort_while_the_link_is_cut_is_heard_after_it(cloud: str, is_ready: bool) -> None:
    with MemoryLink("east", "west") as wan:
        if is_ready:
            wan.end(cloud).wait_ready(timeout_s=20)
        wan.cut(0.5)
        wan.end(cloud).abort("out of memory")
        assert hears_abort(wan.end(OTHER[cloud]))


def test_both_ends_may_abort_at_once() -> None:
    with MemoryLink("east", "west", shape=SLOW_LINE) as wan:
        for cloud in OTHER:
            wan.end(cloud).start_abort(Aborted(cloud, "enough"))
        for cloud in OTHER:
            wan.end(cloud).join()
            with pytest.raises(Aborted, match=f"{cloud!r} aborted the run: enough"):
                wan.end(cloud).receive("never", timeout_s=20)


@pytest.mark.parametrize("cloud", ["east", "west"])
def test_a_close_before_the_peer_is_there_is_heard(loop: LoopThread, cloud: str) -> None:
    loop.call(lambda: time.sleep(0.1))
    wan = MemoryLink("east", "west", loop=loop)
    wan.end(cloud).close(timeout_s=20)
    with pytest.raises(LinkClosed, match="has closed the link"):
        wan.end(OTHER[cloud]).receive("never", timeout_s=20)
    wan.close()


def test_what_the_listening_end_still_holds_does_not_keep_a_link_open_whose_dialler_has_gone() -> None:
    wan = MemoryLink(Hello(cloud="east", rank=0), "west")
    wan.end("west").send("never", Packet({}))
    closing = start(wan.close)
    closing.join(20)
    assert not closing.is_alive()


# One end alone.


def test_an_abort_that_nobody_can_hear_ends_with_the_time_out(loop: LoopThread) -> None:
    link = Link(hello=Hello(cloud="east", peer_cloud="west"), settings=QUICK, loop=loop)
    aborting = start(lambda: link.abort("out of memory"))
    aborting.join(20)
    assert not aborting.is_alive()


def test_an_abort_in_haste_does_not_wait_for_a_peer_that_never_came(loop: LoopThread) -> None:
    patient = LinkSettings(num_stripes=2, heartbeat_timeout_s=3600.0)
    link = Link(hello=Hello(cloud="east", peer_cloud="west"), settings=patient, loop=loop)
    link.hasten()
    aborting = start(lambda: link.abort("its launcher has ended its ranks"))
    aborting.join(20)
    assert not aborting.is_alive()


def test_a_peer_that_vanishes_within_the_handshake_is_lost(loop: LoopThread) -> None:
    link = Link(hello=Hello(cloud="east", peer_cloud="west"), settings=QUICK, loop=loop)
    loop.call(lambda: link.admit(Hello(cloud="west", peer_cloud="east", session="short")))
    with pytest.raises(PeerLost, match="'west'"):
        link.receive("never", timeout_s=20)
    link.join()


def test_a_dialler_that_breaks_down_ends_its_link(loop: LoopThread) -> None:
    @asynccontextmanager
    async def dial(_: Hello) -> AsyncIterator[tuple[Connection, Hello]]:
        raise OSError("no more files")
        yield

    link = Link(hello=Hello(cloud="east", peer_cloud="west"), settings=QUICK, loop=loop, dial=dial)
    with pytest.raises(LinkError, match="no more files"):
        link.receive("never", timeout_s=20)
    link.join()


class Held:
    """A connection that takes one frame at a time, when told."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.room = asyncio.Event()

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def write(self, frame: bytes) -> None:
        self.frames.append(frame)
        await self.room.wait()


def test_a_connection_that_was_replaced_is_given_no_more_chunks(loop: LoopThread) -> None:
    """What it took would be lost, and counted as carried by the new one."""
    link = Link(hello=Hello(cloud="east", peer_cloud="west"), settings=QUICK, loop=loop)
    for number in range(3):
        link.send("bulk", Packet({"number": number}))

    async def replace() -> list[bytes]:
        old, new = Held(), Held()
        serving = [asyncio.ensure_future(link.serve(FIRST_STRIPE, old))]
        await asyncio.sleep(0.05)
        num_taken = len(old.frames)
        serving.append(asyncio.ensure_future(link.serve(FIRST_STRIPE, new)))
        await asyncio.sleep(0)
        old.room.set()
        await asyncio.sleep(0.2)
        for one in serving:
            one.cancel()
        return old.frames[num_taken:]

    assert loop.run(replace()) == []


# Over gRPC.


@pytest.fixture(scope="module")
def identities() -> dict[str, Identity]:
    return throwaway(["east", "west", "north"])


@pytest.fixture
def address() -> Address:
    with listen("127.0.0.1", 0) as probe:
        return Address(host="127.0.0.1", port=probe.getsockname()[1])


def endpoint(
    cloud: str, identities: dict[str, Identity], address: Address, job: Job | None = None
) -> Endpoint:
    site = Site(bind=address) if cloud == "east" else Site(reach={"east": address})
    return Endpoint(job or two_clouds(), cloud=cloud, identity=identities[cloud], site=site)


@pytest.mark.parametrize("cloud", ["east", "west"])
@pytest.mark.parametrize("asks", [False, True])
def test_an_abort_is_heard_by_a_peer_that_comes_later(
    identities: dict[str, Identity], address: Address, cloud: str, asks: bool
) -> None:
    with endpoint(cloud, identities, address) as first:
        if asks:
            first.link(OTHER[cloud])
        aborting = start(lambda: first.abort("out of memory"))
        time.sleep(0.3)
        with endpoint(OTHER[cloud], identities, address) as second:
            assert hears_abort(second.link(cloud))
            aborting.join(20)
            assert not aborting.is_alive()


@pytest.mark.parametrize("cloud", ["east", "west"])
def test_an_abort_is_heard_by_a_peer_whose_link_nobody_here_has_asked_for(
    identities: dict[str, Identity], address: Address, cloud: str
) -> None:
    with (
        endpoint(cloud, identities, address) as first,
        endpoint(OTHER[cloud], identities, address) as second,
    ):
        waiting = second.link(cloud)
        first.abort("out of memory")
        assert hears_abort(waiting)


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["east", "west"])
def test_an_abort_over_a_long_line_is_heard_at_any_moment_of_the_handshake(cloud: str) -> None:
    job = two_clouds("rtt='60 ms'")

    def abort_after(wan: LocalWan, delay_s: float) -> bool:
        with ExitStack() as stack:
            ends = {
                name: stack.enter_context(
                    Endpoint(job, cloud=name, identity=wan.identity(name), site=wan.site(name))
                )
                for name in OTHER
            }
            waiting = ends[OTHER[cloud]].link(cloud)
            ends[cloud].link(OTHER[cloud])
            time.sleep(delay_s)
            start(lambda: ends[cloud].abort("out of memory"))
            return hears_abort(waiting)

    missed = []
    for delay_ms in range(0, 480, 40):
        with LocalWan(job) as wan:
            if not abort_after(wan, delay_ms / 1000):
                missed.append(delay_ms)
    assert missed == []


def test_a_link_that_is_asked_for_after_an_abort_raises_it(
    identities: dict[str, Identity], address: Address
) -> None:
    job = two_clouds("heartbeat_timeout='1 s'")
    with endpoint("east", identities, address, job) as east:
        east.abort("out of memory")
        with pytest.raises(Aborted, match="out of memory"):
            east.link("west").receive("never", timeout_s=20)


@pytest.mark.parametrize("error", [Terminated(), KeyboardInterrupt()], ids=["term", "ctrl-c"])
def test_who_is_told_to_end_does_not_wait_for_peers_that_never_came(
    identities: dict[str, Identity], address: Address, error: BaseException
) -> None:
    job = two_clouds("heartbeat_timeout='1 h'")

    def stop() -> None:
        with suppress(Terminated, KeyboardInterrupt), endpoint("east", identities, address, job):
            raise error

    ending = start(stop)
    ending.join(20)
    assert not ending.is_alive()


def test_a_dialler_that_dies_after_the_handshake_is_lost(
    identities: dict[str, Identity], address: Address
) -> None:
    job = two_clouds("heartbeat_timeout='1 s'")
    hello = Hello(cloud="west", peer_cloud="east", job_digest=job.digest, session="short")
    dialer = Dialer(address=str(address), server_name=server_name("east", 0), identity=identities["west"])
    with endpoint("east", identities, address, job) as east:
        link = east.link("west")
        _, stack = process_loop().run(dialled(dialer, hello))
        process_loop().run(stack.aclose())
        with pytest.raises(PeerLost, match="'west'"):
            link.receive("never", timeout_s=20)


def test_a_lost_cloud_is_told_to_the_others(identities: dict[str, Identity], address: Address) -> None:
    text = TWO_CLOUDS + '[[cloud]]\nname = "north"\n[[link]]\nbetween = ["east", "north"]\n'
    timeouts = [f"link.{number}.heartbeat_timeout='1 s'" for number in range(2)]
    job = parse_job(text, file=Path("three.toml"), overrides=timeouts)

    def lose_west() -> None:
        with endpoint("east", identities, address, job) as east:
            east.link("north").wait_ready(timeout_s=20)
            raise PeerLost("west", "it is silent")

    with endpoint("north", identities, address, job) as north:
        north.link("east")
        with pytest.raises(PeerLost):
            lose_west()
        with pytest.raises(Aborted, match="'east' aborted the run: cloud 'west' is lost: it is silent"):
            north.link("east").receive("never", timeout_s=20)
