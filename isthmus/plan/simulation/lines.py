"""The lines and clouds of a simulation as a script of faults leaves them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from isthmus.job.faults import CloudFault, CloudFaultKind, Fault, FaultKind
from isthmus.plan.scenario import Line
from isthmus.plan.simulation.clockwork import Clock, Pace, Slowdown
from isthmus.plan.simulation.flows import Flow, Outage

Disturbance = Fault | CloudFault

# A connection that was cut is opened again: TCP, TLS, then the link's own handshake.
_RECONNECT_ROUND_TRIPS: Final = 3


def open_flows(
    clock: Clock,
    lines: Mapping[tuple[str, str], Line],
    *,
    seed: int,
    faults: Sequence[Disturbance] = (),
    share: float = 0.0,
) -> dict[tuple[str, str], Flow]:
    """Both directions of all lines, by sender and receiver; a background gets `share` of each at least."""
    flows = {}
    for index, ((first, second), line) in enumerate(lines.items()):
        on_line = faults_between(faults, first, second)
        ways = ((first, second, line.down_bps, "down"), (second, first, line.up_bps, "up"))
        for sender, receiver, bandwidth_bps, name in ways:
            flows[sender, receiver] = Flow(
                clock,
                bandwidth_bps=bandwidth_bps,
                delay_s=line.delay_s,
                latency_s=line.latency_s,
                jitter_s=line.jitter_s,
                seed=f"{seed}/{index}/{name}",
                slowdowns=_slowdowns(one for one in on_line if one.kind is FaultKind.SLOW_DOWN),
                outages=outages_of(on_line, latency_s=line.latency_s),
                share=share,
            )
    return flows


def faults_between(faults: Iterable[Disturbance], first: str, second: str) -> list[Fault]:
    """The faults of one line."""
    return [one for one in faults if isinstance(one, Fault) and set(one.between) == {first, second}]


def pace_of(faults: Iterable[Disturbance], cloud: str) -> Pace:
    """How fast a cloud computes at each time."""
    on_cloud = (one for one in faults if isinstance(one, CloudFault) and one.cloud == cloud)
    return Pace(_slowdowns(one for one in on_cloud if one.kind is CloudFaultKind.SLOW))


def _slowdowns(faults: Iterable[Disturbance]) -> list[Slowdown]:
    return [
        Slowdown(start_s=fault.at_s, end_s=fault.at_s + fault.duration_s, factor=fault.factor)
        for fault in faults
    ]


def outages_of(faults: Iterable[Fault], *, latency_s: float) -> list[Outage]:
    """When a line carries nothing; corruption costs one connection of several, which is not counted."""
    reconnect_s = _RECONNECT_ROUND_TRIPS * 2 * latency_s
    outages = []
    for fault in faults:
        end_s = fault.at_s + fault.duration_s
        if fault.kind is FaultKind.CUT:
            outages.append(Outage(start_s=fault.at_s, end_s=end_s + reconnect_s, loses=True))
        elif fault.kind is FaultKind.BLACKHOLE:
            outages.append(Outage(start_s=fault.at_s, end_s=end_s, loses=False))
    return outages
