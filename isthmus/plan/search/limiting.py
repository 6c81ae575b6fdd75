"""What limits a pipeline: the resource of which no end would shorten a step the most.

Each is taken away by itself, everywhere at once, and the step timed again:

    bandwidth      messages and their coding take no time on any line
    round trip     nothing is under way, nor handled
    compute        passes and updates take no time at any cloud
    room           every stage may keep as many micro-batches in flight as it likes

The place that is named with it is the one that has least of it.
"""

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Final

from isthmus.plan.scenario import Policy, Scenario, StageLoad, expected, next_windows
from isthmus.plan.search.settings import passage

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
    """By what share a step would be shorter with no end of each resource, the most first."""
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


def by_formula(scenario: Scenario) -> float:
    """A step as the search has it: all once from end to end, then the slowest of all."""
    behind_s, paces_s = 0.0, [0.0]
    hops = [
        passage(hop, scenario.num_microbatches, (one.num_ranks, other.num_ranks))
        for hop, (one, other) in zip(scenario.hops, pairwise(scenario.stages), strict=True)
    ]
    for index in reversed(range(scenario.num_stages)):
        stage = scenario.stages[index]
        if index < len(hops):
            behind_s += hops[index].once_s
            paces_s.append(hops[index].pace_s)
        behind_s += stage.forward_s + stage.backward_s
        paces_s += [_pace_s(stage, scenario.num_microbatches), _turns(scenario, index) * behind_s]
    return behind_s + max(paces_s)


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


def _pace_s(stage: StageLoad, num_microbatches: int) -> float:
    num_rounds = math.ceil(num_microbatches / stage.num_ranks)
    return (num_rounds - 1) * (stage.forward_s + stage.backward_s) + stage.update_s


def _turns(scenario: Scenario, index: int) -> float:
    """How often a step fills what a stage may keep in flight, less the first time."""
    caps = scenario.windows or scenario.max_in_flight
    cap = caps[index] if isinstance(caps, tuple) else caps
    if scenario.policy is Policy.ONE_F_ONE_B:
        num_left = scenario.num_stages - index
        cap = num_left if cap is None else min(cap, num_left)
    if cap is None or index == scenario.num_stages - 1:
        return 0.0
    return max(0.0, scenario.num_microbatches / (cap * scenario.stages[index].num_ranks) - 1)


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
