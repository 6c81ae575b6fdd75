"""Ports at which a library accepts: connections of strangers are limited, and ports can be closed."""

import errno
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from isthmus.wan.endpoint import Endpoint
from isthmus.wan.local import LocalWan
from isthmus.wan.packet import Packet
from isthmus.wan.sockets import listening_sockets, stop_accepting
from tests.wan.clouds import CloudProcess, two_clouds

PATIENCE_S = 60.0
NUM_FILES = 512
NUM_IDLE = 700


def connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S, source_address=(source, 0))


def test_a_port_that_accepts_no_more_keeps_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with connect(port) as one, listener.accept()[0] as served:
            stop_accepting({port})
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.5)
            served.sendall(b"stays")
            assert one.recv(5) == b"stays"
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_a_port_that_cannot_be_closed_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: socket.socket) -> None:
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    monkeypatch.setattr("isthmus.wan.sockets._drop_all_packets", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        stop_accepting({port})
    assert f"port {port} stays open for new connections: Protocol not available" in caplog.text


def test_looking_at_listening_sockets_leaves_no_descriptor_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = num_files()
        assert listener.getsockname() in {sock.getsockname() for sock in listening_sockets()}
        assert num_files() == before


def num_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def serve(endpoint: Endpoint, pipe: Connection) -> int:
    """Be a listening rank with few descriptors; answer the peer, and use files meanwhile."""
    link = endpoint.link("west")
    pipe.send(endpoint.port)
    most = 0
    while True:
        packet = link.receive("question", timeout_s=PATIENCE_S)
        most = max(most, num_files())
        files = [Path(os.devnull).open() for _ in range(100)]  # noqa: SIM115 (as a checkpoint does)
        for file in files:
            file.close()
        link.send("answer", packet)
        if packet.header.get("last"):
            return most


@contextmanager
def few_files() -> Iterator[None]:
    """Processes that are started meanwhile have few descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_idle_strangers_neither_use_up_the_descriptors_of_a_rank_nor_keep_its_peer_out() -> None:
    job = two_clouds("stripes=2")
    with LocalWan(job) as wan:
        with few_files():
            east = CloudProcess(job, wan, "east", serve)
        with east:
            port = east.hear()
            idle = [connect(port, "127.0.0.2") for _ in range(NUM_IDLE)]
            # The peer comes while they are there.
            with Endpoint(job, cloud="west", identity=wan.identity("west"), site=wan.site("west")) as west:
                for number in range(5):
                    idle += [connect(port, "127.0.0.2") for _ in range(20)]
                    question = Packet({"last": number == 4}, (bytes(100_000),))
                    west.link("east").send("question", question, timeout_s=PATIENCE_S)
                    answer = west.link("east").receive("answer", timeout_s=PATIENCE_S)
                    assert answer.header == question.header
                    time.sleep(0.2)
                # What it has of its own, and at most the limit of strangers.
                assert east.result() < 200
            for one in idle:
                one.close()
