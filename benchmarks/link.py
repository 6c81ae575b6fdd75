"""Measures the link, mutual TLS on: share of the line rate, gain of stripes, loopback beside others.

python benchmarks/link.py [--quick]

Every figure is payload that reached the receiver in a steady state, between two processes on this machine.
"""

import asyncio
import contextlib
import multiprocessing
import os
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import grpc.aio
from bench import finish, options, show

from isthmus.job import Address
from isthmus.job.load import parse_job
from isthmus.wan.certificates import Identity, throwaway
from isthmus.wan.endpoint import Endpoint, Site
from isthmus.wan.handshake import server_name
from isthmus.wan.local import LocalWan
from isthmus.wan.packet import Packet

MB = 1_000_000
MESSAGE_BYTES = 1024 * 1024
PACKET_BYTES = 8 * MESSAGE_BYTES
QUEUE_BYTES = 4 * PACKET_BYTES
JOB = """
name = "benchmark"
[[cloud]]
name = "east"
listen = "127.0.0.1:7600"
[[cloud]]
name = "west"
[[link]]
between = ["east", "west"]
"""

Side = Callable[[Connection], None]


class Meter:
    """Counts what arrives and gives the rate between the warm-up and the end."""

    def __init__(self, warm_up_s: float, duration_s: float) -> None:
        self._warm_up_s = warm_up_s
        self._end_s = warm_up_s + duration_s
        self._started_s: float | None = None
        self._marks: list[tuple[float, int]] = []
        self._num_bytes = 0

    def count(self, num_bytes: int) -> bool:
        """Take bytes in; True when enough was seen."""
        now_s = time.monotonic()
        if self._started_s is None:
            self._started_s = now_s
        self._num_bytes += num_bytes
        elapsed_s = now_s - self._started_s
        if elapsed_s >= self._warm_up_s:
            self._marks.append((now_s, self._num_bytes))
        return elapsed_s >= self._end_s and len(self._marks) > 1

    @property
    def bytes_per_s(self) -> float:
        """The rate."""
        (first_s, first_bytes), (last_s, last_bytes) = self._marks[0], self._marks[-1]
        return (last_bytes - first_bytes) / (last_s - first_s)


def run_pair(receiver: Side, sender: Side) -> float:
    """Run both sides in processes of their own; the receiver reports the rate in bytes per second."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    near, far = context.Pipe()
    processes = [
        context.Process(target=receiver, args=(theirs,)),
        context.Process(target=sender, args=(far,)),
    ]
    processes[0].start()
    near.send(ours.recv())  # what the sender must know of the receiver
    processes[1].start()
    if not ours.poll(300):
        raise TimeoutError("a side of the benchmark hangs")
    rate = float(ours.recv())
    for process in processes:
        process.join(20)
        process.kill()
    return rate


# Isthmus.


def link_receiver(
    pipe: Connection,
    *,
    overrides: list[str],
    identity: Identity,
    site: Site,
    warm_up_s: float,
    duration_s: float,
) -> None:
    """Be east and measure what comes."""
    with _endpoint("east", overrides, identity, site) as endpoint:
        pipe.send(endpoint.port)
        link = endpoint.link("west")
        meter = Meter(warm_up_s, duration_s)
        while not meter.count(link.receive("bulk").payload_bytes):
            continue
        link.send("stop", Packet({}))
        with contextlib.suppress(Exception):
            while True:
                link.receive("bulk", timeout_s=20)
        pipe.send(meter.bytes_per_s)


def link_sender(
    pipe: Connection, *, overrides: list[str], identity: Identity, site: Site | None, packet_bytes: int
) -> None:
    """Be west and send until told to stop."""
    port = pipe.recv()
    site = site or Site(reach={"east": Address(host="127.0.0.1", port=port)})
    data = os.urandom(packet_bytes)
    with _endpoint("west", overrides, identity, site) as endpoint:
        link = endpoint.link("east")
        while True:
            is_full = link.counters().queued_bytes > max(QUEUE_BYTES, 2 * packet_bytes)
            try:
                link.receive("stop", timeout_s=0.001 if is_full else 0)
            except TimeoutError:
                if not is_full:
                    link.send("bulk", Packet({}, (data,)))
            else:
                return


def _endpoint(cloud: str, overrides: list[str], identity: Identity, site: Site) -> Endpoint:
    job = parse_job(JOB, file=Path("benchmark"), overrides=overrides)
    return Endpoint(job, cloud=cloud, identity=identity, site=site)


def link_over_wan(overrides: list[str], *, warm_up_s: float, duration_s: float, packet_bytes: int) -> float:
    """The rate through the emulated WAN that the overrides describe."""
    job = parse_job(JOB, file=Path("benchmark"), overrides=overrides)
    with LocalWan(job) as wan:
        return run_pair(
            partial(
                link_receiver,
                overrides=overrides,
                identity=wan.identity("east"),
                site=wan.site("east"),
                warm_up_s=warm_up_s,
                duration_s=duration_s,
            ),
            partial(
                link_sender,
                overrides=overrides,
                identity=wan.identity("west"),
                site=wan.site("west"),
                packet_bytes=packet_bytes,
            ),
        )


def link_on_loopback(num_stripes: int, duration_s: float) -> float:
    """The rate without emulator, straight through the loopback device."""
    identities = throwaway(["east", "west"])
    overrides = [f"link.0.stripes={num_stripes}"]
    bind = Site(bind=Address(host="127.0.0.1", port=0))
    return run_pair(
        partial(
            link_receiver,
            overrides=overrides,
            identity=identities["east"],
            site=bind,
            warm_up_s=0.5,
            duration_s=duration_s,
        ),
        partial(
            link_sender,
            overrides=overrides,
            identity=identities["west"],
            site=None,
            packet_bytes=PACKET_BYTES,
        ),
    )


# The others, each in its plainest fast form.


def grpc_receiver(pipe: Connection, *, identity: Identity, duration_s: float) -> None:
    """One stream of one-mebibyte messages over gRPC with mutual TLS."""

    async def serve() -> None:
        done = asyncio.Event()
        meter = Meter(0.5, duration_s)

        async def handle(_: object, context: grpc.aio.ServicerContext) -> None:
            while not meter.count(len(await context.read())):
                continue
            done.set()

        server = grpc.aio.server(options=_grpc_options())
        methods = {"Go": grpc.stream_stream_rpc_method_handler(handle)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Plain", methods),))
        credentials = grpc.ssl_server_credentials(
            [(identity.key_pem, identity.certificate_pem)], identity.authority_pem, require_client_auth=True
        )
        pipe.send(server.add_secure_port("127.0.0.1:0", credentials))
        await server.start()
        await done.wait()
        pipe.send(meter.bytes_per_s)
        await server.stop(None)

    asyncio.run(serve())


def grpc_sender(pipe: Connection, *, identity: Identity) -> None:
    """The other end."""

    async def send(port: int) -> None:
        credentials = grpc.ssl_channel_credentials(
            identity.authority_pem, identity.key_pem, identity.certificate_pem
        )
        options = [*_grpc_options(), ("grpc.ssl_target_name_override", server_name("east", 0))]
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
            call = channel.stream_stream("/Plain/Go")()
            data = os.urandom(MESSAGE_BYTES)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    await call.write(data)

    asyncio.run(send(pipe.recv()))


def _grpc_options() -> list[tuple[str, int]]:
    return [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _tls_context(identity: Identity, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.authority_pem.decode())
    with tempfile.TemporaryDirectory() as folder:
        chain = Path(folder, "chain.pem")
        chain.write_bytes(identity.key_pem + identity.certificate_pem)
        context.load_cert_chain(chain)
    return context


def tls_receiver(pipe: Connection, *, identity: Identity, duration_s: float) -> None:
    """A plain TLS socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        plain, _ = listener.accept()
        meter = Meter(0.5, duration_s)
        buffer = bytearray(MESSAGE_BYTES)
        with _tls_context(identity, ssl.PROTOCOL_TLS_SERVER).wrap_socket(plain, server_side=True) as secure:
            while not meter.count(secure.recv_into(buffer)):
                continue
    pipe.send(meter.bytes_per_s)


def tls_sender(pipe: Connection, *, identity: Identity) -> None:
    """The other end."""
    plain = socket.create_connection(("127.0.0.1", pipe.recv()))
    data = os.urandom(MESSAGE_BYTES)
    context = _tls_context(identity, ssl.PROTOCOL_TLS_CLIENT)
    with (
        contextlib.suppress(OSError, ssl.SSLError),
        context.wrap_socket(plain, server_hostname=server_name("east", 0)) as secure,
    ):
        while True:
            secure.sendall(data)


def gloo_side(pipe: Connection, *, rank: int, duration_s: float) -> None:
    """Torch's Gloo, without encryption: a number of tensors that takes about as long."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        pipe.send(port)
    else:
        port = pipe.recv()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensor = torch.zeros(PACKET_BYTES, dtype=torch.uint8)
    flag = torch.zeros(1)
    meter = Meter(0.5, duration_s)
    while not flag.item():
        if rank == 0:
            dist.recv(tensor, src=1)
            flag[0] = float(meter.count(tensor.numel()))
            dist.send(flag, dst=1)
        else:
            dist.send(tensor, dst=0)
            dist.recv(flag, src=0)
    if rank == 0:
        pipe.send(meter.bytes_per_s)
    dist.destroy_process_group()


def loopback_rates(duration_s: float, num_rounds: int) -> dict[str, float]:
    """Medians over rounds in which each has its turn, so that all meet the same noise."""
    identities = throwaway(["east", "west"])
    ways: dict[str, Callable[[], float]] = {
        "plain TLS socket": lambda: run_pair(
            partial(tls_receiver, identity=identities["east"], duration_s=duration_s),
            partial(tls_sender, identity=identities["west"]),
        ),
        "plain gRPC, mutual TLS": lambda: run_pair(
            partial(grpc_receiver, identity=identities["east"], duration_s=duration_s),
            partial(grpc_sender, identity=identities["west"]),
        ),
        "Gloo, no encryption": lambda: run_pair(
            partial(gloo_side, rank=0, duration_s=duration_s),
            partial(gloo_side, rank=1, duration_s=duration_s),
        ),
        "isthmus, 1 stripe": lambda: link_on_loopback(1, duration_s),
        "isthmus, 4 stripes": lambda: link_on_loopback(4, duration_s),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, measure in ways.items():
            rates[name].append(measure())
    return {name: statistics.median(values) for name, values in rates.items()}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    measured: str
    share: float
    goal: float | None


def line_rows(duration_s: float) -> list[Row]:
    """The share of the line rate that the payload reaches."""
    rows = []
    for mbps, rtt_ms, goal in ((100, 20, 0.95), (100, 200, 0.95), (1000, 20, 0.95), (1000, 200, 0.90)):
        overrides = [f"link.0.bandwidth='{mbps} Mbps'", f"link.0.rtt='{rtt_ms} ms'"]
        rate = link_over_wan(
            overrides, warm_up_s=max(1.0, 0.01 * rtt_ms), duration_s=duration_s, packet_bytes=MESSAGE_BYTES
        )
        measured = f"{8 * rate / MB:.1f} Mbit/s"
        rows.append(Row(f"{mbps} Mbit/s line, {rtt_ms} ms round trip", measured, 8 * rate / MB / mbps, goal))
    return rows


def stripe_row(duration_s: float) -> Row:
    """What eight connections gain over one where each is held to 25 Mbit/s, as loss on a long path does."""
    line = ["link.0.bandwidth='1 Gbps'", "link.0.rtt='40 ms'", "link.0.connection_bandwidth='25 Mbps'"]
    one, eight = (
        link_over_wan(
            [*line, f"link.0.stripes={num_stripes}"],
            warm_up_s=2.0,
            duration_s=duration_s,
            packet_bytes=MESSAGE_BYTES // 4,
        )
        for num_stripes in (1, 8)
    )
    measured = f"{8 * one / MB:.1f} → {8 * eight / MB:.1f} Mbit/s"
    return Row("8 stripes over 1, each connection capped at 25 Mbit/s", measured, eight / one, 7.0)


def loopback_rows(duration_s: float, num_rounds: int) -> list[Row]:
    """Throughput without a line, as a share of plain gRPC's."""
    rates = loopback_rates(duration_s, num_rounds)
    reference = rates["plain gRPC, mutual TLS"]
    return [
        Row(
            f"loopback: {name}",
            f"{rate / MB:.0f} MB/s",
            rate / reference,
            0.9 if name == "isthmus, 1 stripe" else None,
        )
        for name, rate in rates.items()
    ]


def main() -> None:
    """Measure, print the table and the JSON line."""
    duration_s, num_rounds = (2.0, 1) if options(__doc__, quick=False).quick else (6.0, 5)
    rows = [*line_rows(duration_s), stripe_row(duration_s), *loopback_rows(duration_s / 2, num_rounds)]
    show(
        [
            {
                "what": row.what,
                "measured": row.measured,
                "ratio": f"{row.share:.3f}",
                "goal": "" if row.goal is None else f"≥ {row.goal:g}",
                "": "" if row.goal is None else "✓" if row.share >= row.goal else "✗",
            }
            for row in rows
        ]
    )
    values = [{"what": row.what, "measured": row.measured, "ratio": row.share} for row in rows]
    finish("link", "grpcio", rows=values)


if __name__ == "__main__":
    main()
