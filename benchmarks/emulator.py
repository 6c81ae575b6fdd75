"""Measures the WAN emulator: bandwidth and round trip beside what was set, over plain sockets.

python benchmarks/emulator.py
"""

import multiprocessing
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection

from bench import finish, show

from isthmus.job import Address
from isthmus.wan.relay import Relay
from isthmus.wan.shaping import Shape

BANDWIDTHS_MBPS = (10, 100, 1000)
RTTS_MS = (0, 20, 60, 200)
NUM_CONNECTIONS = 4
NUM_ECHOES = 30
NUM_ROUNDS = 3
SEND_S = 1.5
MAX_BANDWIDTH_ERROR = 0.03
MAX_RTT_ERROR_MS = 2.0

Task = Callable[[Sequence[socket.socket]], float | None]

_CHUNK_BYTES = 262_144
_ECHO = b"ping" * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: what was set, and what plain sockets saw."""

    set_mbps: float
    set_rtt_ms: float
    up_mbps: tuple[float, ...]
    down_mbps: tuple[float, ...]
    rtt_ms: float
    cpu_s_per_gb: float

    @property
    def bandwidth_error(self) -> float:
        """The larger of both directions' median errors, as a share of what was set, with its sign."""
        medians = [statistics.median(rounds) for rounds in (self.up_mbps, self.down_mbps)]
        return max((median / self.set_mbps - 1 for median in medians), key=abs)

    @property
    def worst_round_error(self) -> float:
        """The largest error of any single round, good or bad machine alike."""
        return max((mbps / self.set_mbps - 1 for mbps in (*self.up_mbps, *self.down_mbps)), key=abs)

    @property
    def rtt_error_ms(self) -> float:
        """How much longer a round trip took than what was set."""
        return self.rtt_ms - self.set_rtt_ms

    @property
    def is_within(self) -> bool:
        """Whether the row keeps to both bounds."""
        return abs(self.bandwidth_error) <= MAX_BANDWIDTH_ERROR and abs(self.rtt_error_ms) <= MAX_RTT_ERROR_MS


def send(sockets: Sequence[socket.socket], num_bytes: int) -> None:
    """Saturate all sockets with `num_bytes` in all, then finish."""
    chunk = memoryview(bytes(_CHUNK_BYTES))
    left = {sock: num_bytes // len(sockets) for sock in sockets}
    with _watching(sockets, selectors.EVENT_WRITE) as selector:
        while selector.get_map():
            for key, _ in selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                left[sock] -= sock.send(chunk[: left[sock]])
                if not left[sock]:
                    selector.unregister(sock)
                    sock.shutdown(socket.SHUT_WR)


def receive_mbps(sockets: Sequence[socket.socket]) -> float:
    """Return the rate from the first byte that came to the last."""
    buffer = bytearray(_CHUNK_BYTES)
    num_bytes, first_s, last_s = 0, 0.0, 0.0
    with _watching(sockets, selectors.EVENT_READ) as selector:
        while selector.get_map():
            for key, _ in selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                received = sock.recv_into(buffer)
                if not received:
                    selector.unregister(sock)
                elif first_s:
                    num_bytes, last_s = num_bytes + received, time.monotonic()
                else:
                    first_s = time.monotonic()
    return round(num_bytes * 8 / (last_s - first_s) / 1e6, 3)


def ping_ms(sockets: Sequence[socket.socket]) -> float:
    """Return the median round trip of small messages on the first socket."""
    sock = sockets[0]
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times_ms = []
    for _ in range(NUM_ECHOES):
        start_s = time.monotonic()
        sock.sendall(_ECHO)
        sock.recv(len(_ECHO), socket.MSG_WAITALL)
        times_ms.append((time.monotonic() - start_s) * 1e3)
    return round(statistics.median(times_ms[1:]), 3)


def echo(sockets: Sequence[socket.socket]) -> None:
    """Send back what comes until every socket has ended."""
    with _watching(sockets, selectors.EVENT_READ) as selector:
        while selector.get_map():
            for key, _ in selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if data := sock.recv(len(_ECHO)):
                    sock.send(data)
                else:
                    selector.unregister(sock)


def work(orders: Connection, open_sockets: Callable[[], list[socket.socket]]) -> None:
    """Run each task that is ordered on fresh connections, in a process of its own, until ordered to end."""
    while (task := orders.recv()) is not None:
        with ExitStack() as stack:
            orders.send(task([stack.enter_context(sock) for sock in open_sockets()]))


def accept(listener: socket.socket) -> list[socket.socket]:
    """Take the benchmark's connections."""
    return [listener.accept()[0] for _ in range(NUM_CONNECTIONS)]


def dial(place: tuple[str, int]) -> list[socket.socket]:
    """Open the benchmark's connections."""
    return [socket.create_connection(place) for _ in range(NUM_CONNECTIONS)]


@contextmanager
def worker(open_sockets: Callable[[], list[socket.socket]]) -> Iterator[Connection]:
    """Start a process that works, and end it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, open_sockets), daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join()


def measure(mbps: float, rtt_ms: float) -> Row:
    """Measure one link, both ways one after the other, in several rounds."""
    shape = Shape(bandwidth_bps=mbps * 1e6, delay_s=rtt_ms / 2e3)
    num_bytes = int(mbps * 1e6 / 8 * SEND_S)
    sending = partial(send, num_bytes=num_bytes)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        target = Address(host="127.0.0.1", port=listener.getsockname()[1])
        relay = stack.enter_context(Relay(lambda _: target, up=shape, down=shape, reads_hello=False))
        server = stack.enter_context(worker(partial(accept, listener)))
        client = stack.enter_context(worker(partial(dial, (relay.address.host, relay.address.port))))
        measured_rtt_ms = _ask(ping_ms, of=client, while_other=server, does=echo)
        start_cpu_s = time.process_time()
        rounds = [
            (
                _ask(receive_mbps, of=server, while_other=client, does=sending),
                _ask(receive_mbps, of=client, while_other=server, does=sending),
            )
            for _ in range(NUM_ROUNDS)
        ]
        cpu_s = time.process_time() - start_cpu_s
    up_mbps, down_mbps = zip(*rounds, strict=True)
    return Row(
        set_mbps=mbps,
        set_rtt_ms=rtt_ms,
        up_mbps=up_mbps,
        down_mbps=down_mbps,
        rtt_ms=measured_rtt_ms,
        cpu_s_per_gb=round(cpu_s / (2 * NUM_ROUNDS * num_bytes / 1e9), 2),
    )


def main() -> None:
    """Measure every combination, print the table and the line of JSON; exit with 1 if any row is outside."""
    rows = [measure(mbps, rtt_ms) for mbps in BANDWIDTHS_MBPS for rtt_ms in RTTS_MS]
    show([_table_row(row) for row in rows])
    bandwidth_error = max((row.bandwidth_error for row in rows), key=abs)
    rtt_error_ms = max((row.rtt_error_ms for row in rows), key=abs)
    within = all(row.is_within for row in rows)
    bounds = f"bounds {MAX_BANDWIDTH_ERROR:.0%} and {MAX_RTT_ERROR_MS:g} ms"
    round_error = max((row.worst_round_error for row in rows), key=abs)
    print(f"worst row: bandwidth {bandwidth_error:+.2%}, round trip {rtt_error_ms:+.2f} ms; {bounds}")
    print(f"worst single round of {2 * NUM_ROUNDS * len(rows)}: bandwidth {round_error:+.2%}")
    finish(
        "emulator",
        "isthmus",
        within=within,
        worst_bandwidth_error=round(bandwidth_error, 4),
        worst_rtt_error_ms=round(rtt_error_ms, 3),
        worst_round_error=round(round_error, 4),
        rows=[asdict(row) for row in rows],
        num_rounds=NUM_ROUNDS,
        num_connections=NUM_CONNECTIONS,
        seed=0,
    )
    sys.exit(0 if within else 1)


def _table_row(row: Row) -> dict[str, str]:
    return {
        "Mbit/s": f"{row.set_mbps:g}",
        "up": f"{statistics.median(row.up_mbps):.2f}",
        "down": f"{statistics.median(row.down_mbps):.2f}",
        "error": f"{row.bandwidth_error:+.2%}",
        "worst round": f"{row.worst_round_error:+.2%}",
        "RTT ms": f"{row.set_rtt_ms:g}",
        "seen": f"{row.rtt_ms:.2f}",
        "error ms": f"{row.rtt_error_ms:+.2f}",
        "CPU s/GB": f"{row.cpu_s_per_gb:.1f}",
        "within": "yes" if row.is_within else "no",
    }


def _ask(question: Task, *, of: Connection, while_other: Connection, does: Task) -> float:
    of.send(question)
    while_other.send(does)
    answer: float = of.recv()
    while_other.recv()
    return answer


@contextmanager
def _watching(sockets: Sequence[socket.socket], events: int) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            sock.setblocking(False)
            selector.register(sock, events)
        yield selector


if __name__ == "__main__":
    main()
