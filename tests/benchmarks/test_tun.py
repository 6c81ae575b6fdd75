import os
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

import pytest
from tun import TunWan

from isthmus.errors import UserError
from isthmus.wan.shaping import Shape

PATIENCE_S = 60
NUM_ECHOES = 10
NUM_BULK_BYTES = 3_000_000

SERVER = f"""
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as listener:
    print("listening", flush=True)
    with listener.accept()[0] as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range({NUM_ECHOES}):
            connection.sendall(connection.recv(64))
        first_s = num_bytes = 0
        while data := connection.recv(65536):
            last_s = time.monotonic()
            first_s = first_s or last_s
            num_bytes += len(data)
print(num_bytes, last_s - first_s)
"""
CLIENT = f"""
import socket, statistics, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times_s = []
    for _ in range({NUM_ECHOES}):
        start_s = time.monotonic()
        connection.sendall(b"ping")
        connection.recv(64)
        times_s.append(time.monotonic() - start_s)
    connection.sendall(bytes({NUM_BULK_BYTES}))
print(min(times_s), statistics.median(times_s))
"""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or which("ip") is None or not Path("/dev/net/tun").exists(),
    reason="needs root, `ip` and /dev/net/tun",
)


def network_names() -> str:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    return listed + links


@needs_root
def test_foreign_programs_see_the_round_trip_and_the_bandwidth() -> None:
    there, back = Shape(bandwidth_bps=20e6, delay_s=0.015), Shape(bandwidth_bps=20e6, delay_s=0.01)
    with TunWan(there, back) as wan:
        command = [sys.executable, "-c", SERVER, wan.address("b")]
        with subprocess.Popen(wan.command("b", command), stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            command = [sys.executable, "-c", CLIENT, wan.address("b")]
            client = subprocess.run(
                wan.command("a", command), capture_output=True, text=True, check=True, timeout=PATIENCE_S
            )
            num_bytes, elapsed_s = map(float, server.stdout.read().split())
    least_s, median_s = map(float, client.stdout.split())
    assert least_s > 0.024
    # A busy machine may be slower than the line, but not faster.
    assert median_s < 1.0
    assert num_bytes == NUM_BULK_BYTES
    assert 0.2e6 < num_bytes * 8 / elapsed_s < 21e6


@needs_root
def test_nothing_is_left_after_an_error() -> None:
    wan = TunWan(Shape(), Shape())
    names = [wan.namespace("a"), wan.namespace("b")]

    def fail_inside() -> None:
        with wan:
            assert all(name in network_names() for name in names)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail_inside()
    assert not any(name in network_names() for name in names)


@needs_root
def test_what_cannot_be_made_is_one_sentence_and_leaves_nothing() -> None:
    before = network_names()
    with pytest.raises(UserError, match="mtu 1` failed") as raised, TunWan(Shape(), Shape(), mtu_bytes=1):
        pass
    assert raised.value.hint
    assert network_names() == before


@needs_root
def test_a_full_queue_drops() -> None:
    narrow = Shape(bandwidth_bps=1e6)
    with TunWan(narrow, narrow, queue_bytes=20_000) as wan:
        flood = (
            "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM)\n"
            "for _ in range(100): s.sendto(bytes(1000), (sys.argv[1], 5001))"
        )
        command = wan.command("a", [sys.executable, "-c", flood, wan.address("b")])
        subprocess.run(command, check=True, timeout=PATIENCE_S)
        # Packets may still be in the device when the sender has ended.
        deadline_s = time.monotonic() + PATIENCE_S
        while wan.num_dropped < 60 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert 60 <= wan.num_dropped <= 95
