"""The heartbeats that links, gateways and the ranks of a cloud share."""

import asyncio
import socket

import pytest

from isthmus.errors import FrameError
from isthmus.wan.heartbeat import MAX_LINE_BYTES, Channel, Heartbeat
from isthmus.wan.packet import Close, Notice, Ping, Pong


async def channels(*, timeout_s: float = 20.0) -> tuple[Channel, Channel]:
    near, far = [
        Channel(
            *await asyncio.open_connection(sock=sock, limit=MAX_LINE_BYTES),
            Heartbeat(interval_s=0.05, timeout_s=timeout_s),
        )
        for sock in socket.socketpair()
    ]
    return near, far


def test_two_ends_that_read_keep_each_other_alive_and_tell_their_clocks() -> None:
    async def talk() -> None:
        near, far = await channels(timeout_s=0.5)
        reading = [asyncio.create_task(end.read()) for end in (near, far)]
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in reading)
        assert near.heartbeat.rtt_s is not None
        assert abs(near.heartbeat.offset_s or 1.0) < 0.5
        near.write(Notice({"rank": 1}))
        far.write(Close())
        assert await asyncio.gather(*reading) == [Close(), Notice({"rank": 1})]
        near.close()
        with pytest.raises(ConnectionError, match="has ended"):
            await far.read()
        far.close()

    asyncio.run(talk())


def test_a_peer_that_says_nothing_is_lost_after_the_time_out() -> None:
    async def wait() -> None:
        near, far = await channels(timeout_s=0.2)
        with pytest.raises(TimeoutError, match=r"silent for 0\.2 s"):
            await near.read()
        near.close()
        far.close()

    asyncio.run(wait())


@pytest.mark.parametrize("line", [b"?\n", b"\n", b"x" * 3 * MAX_LINE_BYTES + b"\n"])
def test_a_line_that_is_no_frame_is_refused(line: bytes) -> None:
    async def read() -> None:
        near, far = await channels()
        near._writer.write(line)
        with pytest.raises(FrameError):
            await far.read()
        near.close()
        far.close()

    asyncio.run(read())


def test_pings_are_answered_once_and_an_answer_that_contradicts_itself_is_not_believed() -> None:
    heartbeat = Heartbeat(interval_s=60.0, timeout_s=60.0)
    assert isinstance(heartbeat.due()[-1], Ping)
    heartbeat.take(Ping(5), received_ns=9)
    (pong,) = (frame for frame in heartbeat.due() if isinstance(frame, Pong))
    assert (pong.sent_ns, pong.received_ns) == (5, 9)
    assert not any(isinstance(frame, Pong) for frame in heartbeat.due())
    assert heartbeat.take(Pong(10, 110, 120), received_ns=30) == pytest.approx(10e-9)
    assert heartbeat.take(Pong(10, 110, 190), received_ns=30) is None
    assert heartbeat.take(Pong(40, 110, 120), received_ns=30) is None
