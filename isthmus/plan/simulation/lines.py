"""The lines and clouds of a scenario as a script of faults leaves them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from isthmus.plan.faults import CloudFault, CloudFaultKind, Fault, FaultKind
from isthmus.plan.scenario import Scenario
from isthmus.plan.simulation.clockwork import Clock, Pace, Slowdown
from isthmus.plan.simulation.flows import Flow, Outage

Disturbance = Fault | CloudFault

# A connection that was cut is opened again: TCP, TLS, then the link's own handshake.
_RECONNECT_ROUND_TRIPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way over a hop: what carries it, the track of its spans, and what a message weighs."""

    flow: Flow
    track: str
    num_bytes: int
    coding_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Both ways over a hop: activations go down, gradients up."""

    between: tuple[str, str]
    down: Way
    up: Way


def open_ways(
    clock: Clock, scenario: Scenario, *, seed: int, faults: Sequence[Disturbance] = (), share: float = 0.0
) -> list[Ways]:
    """The ways over all hops; a background gets `share` of each line at least."""
    return [_open(clock, scenario, index, seed, faults, share) for index in range(len(scenario.hops))]


def _open(
    clock: Clock, scenario: Scenario, index: int, seed: int, faults: Sequence[Disturbance], share: float
) -> Ways:
    load, line = scenario.hops[index], scenario.hops[index].line
    first, second = (stage.cloud for stage in scenario.stages[index : index + 2])
    on_line = [one for one in faults if isinstance(one, Fault) and set(one.between) == {first, second}]

    def flow(bandwidth_bps: float, name: str) -> Flow:
        return Flow(
            clock,
            bandwidth_bps=bandwidth_bps,
            latency_s=line.delay_s,
            jitter_s=line.jitter_s,
            seed=f"{seed}/{index}/{name}",
            slowdowns=_slowdowns(one for one in on_line if one.kind is FaultKind.SLOW_DOWN),
            outages=_outages(on_line, latency_s=line.latency_s),
            share=share,
        )

    return Ways(
        between=(first, second),
        down=Way(
            flow=flow(line.down_bps, "down"),
            track=f"{first}→{second}",
            num_bytes=load.forward_bytes,
            coding_s=load.forward_coding_s,
        ),
        up=Way(
            flow=flow(line.up_bps, "up"),
            track=f"{second}→{first}",
            num_bytes=load.backward_bytes,
            coding_s=load.backward_coding_s,
        ),
    )


def pace_of(faults: Iterable[Disturbance], cloud: str) -> Pace:
    """How fast a cloud computes at each time."""
    on_cloud = (one for one in faults if isinstance(one, CloudFault) and one.cloud == cloud)
    return Pace(_slowdowns(one for one in on_cloud if one.kind is CloudFaultKind.SLOW))


def _slowdowns(faults: Iterable[Disturbance]) -> list[Slowdown]:
    return [
        Slowdown(start_s=fault.at_s, end_s=fault.at_s + fault.duration_s, factor=fault.factor)
        for fault in faults
    ]


def _outages(faults: Iterable[Fault], *, latency_s: float) -> list[Outage]:
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
