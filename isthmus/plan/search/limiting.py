"""What limits a pipeline: the bottleneck resource, whose unlimited supply would shorten a step the most.

Each is made unlimited by itself, everywhere at once, and the step simulated again:

    bandwidth      messages and their coding take no time on any line
    round trip     nothing is under way, nor handled
    compute        passes and updates take no time at any cloud
    room           every stage may keep as many micro-batches in flight as it likes

The place that is named with it is the one that has least of it.
"""

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from isthmus.plan.scenario import Scenario, expected, next_windows
from isthmus.plan.search.choice import Plan
from isthmus.plan.search.estimates import split_bubble
from isthmus.plan.steady import simulate_step

_NO_LINE_BPS: Final = 1e15
# Times that are nothing would make windows that are anything.
_NEXT_TO_NOTHING: Final = 1e-6
# One that would bring nearly as much is named too.
_NEARLY: Final = 0.7

Timed = Callable[[Scenario], float]


class Resource(enum.Enum):
    """What a step may be short of."""

    COMPUTE = "compute of"
    BANDWIDTH = "bandwidth of"
    ROUND_TRIP = "round trip of"
    ROOM = "room in flight at"


def reliefs(scenario: Scenario, timed: Timed) -> dict[str, float]:
    """By what share a step would be shorter with an unlimited supply of each resource, the most first."""
    relieved = {Resource.COMPUTE: without_compute(scenario)}
    if scenario.hops:
        relieved[Resource.BANDWIDTH] = without_bytes(scenario)
        relieved[Resource.ROUND_TRIP] = without_latency(scenario)
    if scenario.max_in_flight is not None or scenario.windows is not None:
        relieved[Resource.ROOM] = replace(scenario, windows=None, max_in_flight=None)
    step_s = timed(scenario)
    found = {
        f"{one.value} {_place(scenario, one)}": max(0.0, 1 - timed(other) / step_s)
        for one, other in relieved.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def limiting(found: Mapping[str, float]) -> str:
    """What would bring most, and what would bring nearly as much."""
    (first, most), *others = found.items()
    near = [what for what, share in others[:1] if share >= _NEARLY * most]
    return " and the ".join([first, *near])


def explained(plan: Plan) -> Plan:
    """The same plan with what limits it, and its bubble by cause, each simulated without that cause."""
    if plan.scenario is None:
        return plan
    timed = functools.cache(_simulated_s)
    step_s = plan.estimate.step_s
    no_bytes = without_bytes(plan.scenario)
    no_bytes_s = timed(no_bytes) if plan.links else step_s
    no_wan_s = timed(without_latency(no_bytes)) if plan.links else step_s
    bubble = split_bubble(
        step_s,
        [stage.busy_s for stage in plan.stages],
        latency_s=max(0.0, no_bytes_s - no_wan_s),
        bandwidth_s=max(0.0, step_s - no_bytes_s),
    )
    found = reliefs(plan.scenario, timed)
    estimate = replace(plan.estimate, bubble=bubble, reliefs=found, limiting=limiting(found))
    return replace(plan, estimate=estimate)


def _simulated_s(scenario: Scenario) -> float:
    return simulate_step(scenario).step_s


def without_bytes(scenario: Scenario) -> Scenario:
    """The same over lines that carry anything at once."""
    hops = tuple(
        replace(
            hop,
            line=replace(hop.line, down_bps=_NO_LINE_BPS, up_bps=_NO_LINE_BPS),
            forward_coding_s=0.0,
            backward_coding_s=0.0,
        )
        for hop in scenario.hops
    )
    return replace(scenario, hops=hops)


def without_latency(scenario: Scenario) -> Scenario:
    """The same over lines on which nothing is under way."""
    hops = tuple(
        replace(hop, line=replace(hop.line, latency_s=0.0, jitter_s=0.0, handling_s=0.0))
        for hop in scenario.hops
    )
    return replace(scenario, hops=hops)


def without_compute(scenario: Scenario) -> Scenario:
    """The same at clouds that compute anything at once."""
    stages = tuple(
        replace(
            stage,
            forward_s=_NEXT_TO_NOTHING * stage.forward_s,
            backward_s=_NEXT_TO_NOTHING * stage.backward_s,
            update_s=0.0,
        )
        for stage in scenario.stages
    )
    return replace(scenario, stages=stages)


def _place(scenario: Scenario, resource: Resource) -> str:
    match resource:
        case Resource.COMPUTE:
            return max(scenario.stages, key=lambda stage: stage.interval_s).cloud
        case Resource.BANDWIDTH:
            on_lines_s = [
                max(8 * hop.forward_bytes / hop.line.down_bps, 8 * hop.backward_bytes / hop.line.up_bps)
                for hop in scenario.hops
            ]
            return _link(scenario, on_lines_s.index(max(on_lines_s)))
        case Resource.ROUND_TRIP:
            delays_s = [hop.line.delay_s for hop in scenario.hops]
            return _link(scenario, delays_s.index(max(delays_s)))
        case Resource.ROOM:
            return _tightest(scenario)


def _link(scenario: Scenario, index: int) -> str:
    return "-".join(stage.cloud for stage in scenario.stages[index : index + 2])


def _tightest(scenario: Scenario) -> str:
    """The cloud that lacks the greatest share of what it would keep in flight."""
    measured = expected(scenario)
    wanted = next_windows(scenario, measured)
    held = scenario.windows or next_windows(scenario, measured, max_in_flight=scenario.max_in_flight)
    shares = [size / most for size, most in zip(held, wanted, strict=True)]
    return scenario.stages[shares.index(min(shares))].cloud
