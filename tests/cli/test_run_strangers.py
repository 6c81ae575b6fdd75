"""`isthmus run` of several ranks while strangers connect to all its ports: it listens inside, and goes on."""

import os
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.test_run_ends import PATIENCE_S, TWO_RANKS, WEST, command, descendants, wait_until
from tests.train.test_setup import TINY
from tests.wan.test_ports import few_files

# Trees of processes.
pytestmark = pytest.mark.slow

NUM_IDLE = 1400
JUNK = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"rank": 1, "token": "x"}\n{"lost": "I say so"}\n',
    os.urandom(5000),
]


def listening(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    return {
        (found.laddr.ip.removeprefix("::ffff:"), found.laddr.port)
        for process in processes
        for found in process.net_connections(kind="tcp")
        if found.status == psutil.CONN_LISTEN
    }


def accepts(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=1.0).close()
    except TimeoutError:
        return False
    return True


def join(place: tuple[str, int]) -> socket.socket:
    """Connect, if the port accepts, and stay."""
    stranger = socket.socket()
    stranger.setblocking(False)
    stranger.connect_ex(place)
    return stranger


def bother(place: tuple[str, int], data: bytes) -> socket.socket:
    """Connect, say something and stay."""
    stranger = join(place)
    with suppress(OSError):
        stranger.settimeout(0.1)
        stranger.sendall(data)
    return stranger


def test_strangers_at_every_port_of_a_run_do_not_end_it(tmp_path: Path) -> None:
    job, log, runs = tmp_path / "job.toml", tmp_path / "log", tmp_path / "runs"
    job.write_text(TINY + TWO_RANKS + WEST.format(port=7600))

    def saved() -> set[Path]:
        return set(runs.glob("tiny/*/checkpoints/*/*/manifest.json"))

    with ExitStack() as stack:
        with few_files():
            process = stack.enter_context(command(job, "--runs", str(runs), log=log))
        wait_until(saved, process, log)
        places = listening([psutil.Process(process.pid), *descendants(process)])
        # Gloo listens at the address of the machine's name, but its ports accept no more by now.
        assert {host for host, port in places if accepts((host, port))} == {"127.0.0.1"}
        loud = [bother(place, data) for place in sorted(places) for data in JUNK]
        idle = [join(place) for place in sorted(places) for _ in range(NUM_IDLE // len(places))]
        before = saved()
        wait_until(lambda: saved() - before, process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143
        for one in [*loud, *idle]:
            one.close()
    assert "Traceback" not in log.read_text()
    assert "which every cloud has saved; the same command continues from there" in log.read_text()
