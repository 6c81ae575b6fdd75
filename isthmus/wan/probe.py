"""Measures links over the real link layer: round trip and jitter when idle, then bandwidth each way."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from isthmus.job import Job, LinkSpec
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.link import Link
from isthmus.wan.packet import Packet

_BULK = "probe/bulk"
_ANSWER = "probe/answer"
_ECHO = "probe/echo"
_PACKET_BYTES = 256 * 1024
_NUM_ROUND_TRIPS = 32
_NUM_SETTLING = 8
_NUM_ECHOES = 8
_POLL_S = 0.02
_QUEUE_BYTES = 1024 * 1024
_FULL_S = 0.002
_WARM_UP_ROUND_TRIPS = 10

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a link can do: bandwidth from the first cloud to the second and back, and the second's clock.

    `handling_s` is what both ends together take to hand over a packet, beside its way.
    """

    between: tuple[str, str]
    bandwidth_bps: tuple[float, float]
    rtt_s: float
    jitter_s: float
    clock_offset_s: float
    handling_s: float


def probe_cloud(
    job: Job, endpoint: Endpoint, *, cloud: str, report: Report, duration_s: float, **_: object
) -> list[Measurement]:
    """Measure all links of one cloud, in the job's order, while the other clouds do the same."""
    return [
        _probe_link(endpoint.link(spec.peer_of(cloud)), spec, cloud, duration_s, report)
        for spec in job.links_of(cloud)
    ]


def _probe_link(link: Link, spec: LinkSpec, cloud: str, duration_s: float, report: Report) -> Measurement:
    peer, is_first = spec.peer_of(cloud), cloud == spec.between[0]
    report(f"waiting for {peer}")
    link.wait_ready()
    report(f"round trip to {peer}")
    # The 10th to the 90th percentile: a busy computer makes single round trips long, none makes one short.
    rtt_s, *_, long_rtt_s = statistics.quantiles(_round_trips(link), n=10)
    handling_s = _call(link, rtt_s) if is_first else _echo(link)

    def measure(sender: str) -> float:
        report(f"bandwidth {'to' if sender == cloud else 'from'} {peer}")
        return _send_bulk(link) if sender == cloud else _receive_bulk(link, duration_s)

    first, second = spec.between
    bandwidth_bps = (measure(first), measure(second))
    offset_s = link.counters().clock_offset_s or 0.0
    return Measurement(
        between=spec.between,
        bandwidth_bps=bandwidth_bps,
        rtt_s=rtt_s,
        jitter_s=long_rtt_s - rtt_s,
        clock_offset_s=offset_s if is_first else -offset_s,
        handling_s=handling_s,
    )


def _round_trips(link: Link) -> list[float]:
    """Round trips of an idle link; both ends wait for enough of them before either sends bulk."""
    while len(link.heartbeat.rtts_s) < _NUM_ROUND_TRIPS:
        time.sleep(_POLL_S)
        link.raise_if_failed()
    rtts_s = link.heartbeat.rtts_s[_NUM_SETTLING:]
    link.send(_ANSWER, Packet({"ready": True}))
    link.receive(_ANSWER)
    return rtts_s


def _call(link: Link, rtt_s: float) -> float:
    """Half of what a packet and its echo take beyond the round trip; the other end is told."""
    taken_s = []
    for _ in range(_NUM_ECHOES):
        started_s = time.monotonic()
        link.send(_ECHO, Packet({}))
        link.receive(_ECHO)
        taken_s.append(time.monotonic() - started_s)
    handling_s = max(0.0, statistics.median(taken_s) - rtt_s) / 2
    link.send(_ANSWER, Packet({"handling_s": handling_s}))
    return handling_s


def _echo(link: Link) -> float:
    for _ in range(_NUM_ECHOES):
        link.send(_ECHO, link.receive(_ECHO))
    return float(str(link.receive(_ANSWER).header["handling_s"]))


def _send_bulk(link: Link) -> float:
    """Keep the line full until the receiver has seen enough; it answers with the rate."""
    noise = Random(0).randbytes(_PACKET_BYTES)  # noqa: S311 (incompressible, not secret)
    while (rate_bps := _answered_rate(link)) is None:
        link.send(_BULK, Packet({"last": False}, (noise,)))
    link.send(_BULK, Packet({"last": True}))
    return rate_bps


def _answered_rate(link: Link) -> float | None:
    """The receiver's answer if it has come; waits for it while enough is queued."""
    while True:
        is_full = link.counters().queued_bytes >= _QUEUE_BYTES
        try:
            answer = link.receive(_ANSWER, timeout_s=_FULL_S if is_full else 0)
        except TimeoutError:
            if not is_full:
                return None
        else:
            return float(str(answer.header["rate_bps"]))


def _receive_bulk(link: Link, duration_s: float) -> float:
    """The rate of bytes on the wire over the given time, once the sender is up to speed."""
    link.receive(_BULK)
    started_s = time.monotonic()
    warm_up_s = max(duration_s / 4, _WARM_UP_ROUND_TRIPS * min(link.heartbeat.rtts_s))
    first: tuple[float, int] | None = None
    rate_bps = 0.0
    while not link.receive(_BULK).header["last"]:
        elapsed_s = time.monotonic() - started_s
        if rate_bps or elapsed_s <= warm_up_s:
            continue
        num_bytes = link.counters().received[_BULK]
        first = first or (elapsed_s, num_bytes)
        if elapsed_s > warm_up_s + duration_s:
            rate_bps = 8 * (num_bytes - first[1]) / (elapsed_s - first[0])
            link.send(_ANSWER, Packet({"rate_bps": rate_bps}))
    return rate_bps
