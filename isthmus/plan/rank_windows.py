"""Windows of ranks: before anything is measured, and at the end of a step from what was measured in it.

The one place that says so: workers, simulator and planner ask here. With several ranks, a rank of stage i
gets every R_i-th micro-batch, so its own interval is `u_i = R_i·τ`. What it hands on comes back after the
round trip, on which it shares the line with its siblings, and after as many intervals of a rank behind it as
that has in flight:

    w_i = 1 + ceil(2·tt_i / u_i) + ceil(w_{i+1}·u_{i+1} / u_i),   1 at the last stage
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from isthmus.plan.pipeline import Policy
from isthmus.plan.scenario import Caps, HopLoad, Line, Scenario, StageLoad
from isthmus.plan.window import EPSILON, Hop, in_proportion, window, windows

_MIN_INTERVAL_S: Final = 1e-6
# Round trips are the shortest that were measured: half an interval more makes up for jitter.
_SPARE_SHARE: Final = 0.5
# As if a message took as long as a pass.
_UNMEASURED: Final = Hop(forward_s=0.25, backward_s=0.25, latency_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step: the time a rank of each stage took per micro-batch, and the shortest way over each hop."""

    pass_s: tuple[float, ...]
    hops: tuple[Hop, ...]


def bare_scenario(num_ranks: Sequence[int], *, num_microbatches: int, policy: Policy) -> Scenario:
    """A pipeline of which nothing is known but its ranks, for workers, who measure."""
    line = Line(down_bps=math.inf, up_bps=math.inf, latency_s=0.0)
    hop = HopLoad(line=line, forward_bytes=0, backward_bytes=0)
    return Scenario(
        stages=tuple(StageLoad(cloud="", forward_s=0.0, backward_s=0.0, num_ranks=one) for one in num_ranks),
        hops=(hop,) * (len(num_ranks) - 1),
        num_microbatches=num_microbatches,
        policy=policy,
    )


def expected(scenario: Scenario) -> Measured:
    """What workers will measure: the shortest way is alone on its line, coding before and behind it.

    But of ranks that keep one order, all send at the same time. Handling is a part of it: all but the latency
    counts as time on the line.
    """
    numbers = _num_sharing(scenario) if scenario.policy.keeps_order else [1] * len(scenario.hops)
    return Measured(
        pass_s=tuple(stage.forward_s + stage.backward_s for stage in scenario.stages),
        hops=tuple(
            Hop(
                forward_s=number * 8 * hop.forward_bytes / hop.line.down_bps + hop.line.handling_s,
                backward_s=number * 8 * hop.backward_bytes / hop.line.up_bps + hop.line.handling_s,
                latency_s=hop.line.latency_s,
                coding_s=hop.forward_coding_s + hop.backward_coding_s,
            )
            for hop, number in zip(scenario.hops, numbers, strict=True)
        ),
    )


def at_worst(scenario: Scenario) -> Measured:
    """What workers measure where even the shortest way shares its line with all that may be on it."""
    found = expected(scenario)
    slowest_s = max(stage.interval_s for stage in scenario.stages)
    hops = tuple(
        replace(hop, forward_s=max(slowest_s, hop.forward_s), backward_s=max(slowest_s, hop.backward_s))
        for hop in found.hops
    )
    return replace(found, hops=hops)


def first_windows(scenario: Scenario, *, max_in_flight: Caps | None = None) -> tuple[int, ...]:
    """Windows of each stage's ranks before anything is measured; `max_in_flight` bounds each rank."""
    ranks = [stage.num_ranks for stage in scenario.stages]
    measured = Measured(
        pass_s=tuple(float(one) for one in ranks), hops=(_UNMEASURED,) * (scenario.num_stages - 1)
    )
    return _windows(scenario, measured, interval_s=1.0, max_in_flight=max_in_flight)


def next_windows(
    scenario: Scenario, measured: Measured, *, max_in_flight: Caps | None = None
) -> tuple[int, ...]:
    """Windows of each stage's ranks for the next step."""
    interval_s = max(_MIN_INTERVAL_S, *_stage_intervals_s(scenario, measured), *_line_s(scenario, measured))
    spare_s = _SPARE_SHARE * interval_s
    hops = tuple(replace(hop, latency_s=hop.latency_s + spare_s / 2) for hop in measured.hops)
    if not scenario.policy.keeps_order:
        numbers = _num_sharing(scenario)
        hops = tuple(_shared(hop, number, interval_s) for hop, number in zip(hops, numbers, strict=True))
    return _windows(
        scenario, replace(measured, hops=hops), interval_s=interval_s, max_in_flight=max_in_flight
    )


def _shared(hop: Hop, number: int, interval_s: float) -> Hop:
    """A message that so many ranks send at the same time, where the shortest way was measured alone.

    Where even that one shared its line too much is counted, but never more than an interval of the ranks.
    """
    if number == 1:
        return hop
    forward_s, backward_s = (number * min(one, interval_s) for one in (hop.forward_s, hop.backward_s))
    return replace(hop, forward_s=max(hop.forward_s, forward_s), backward_s=max(hop.backward_s, backward_s))


def _stage_intervals_s(scenario: Scenario, measured: Measured) -> list[float]:
    pairs = zip(scenario.stages, measured.pass_s, strict=True)
    return [pass_s / stage.num_ranks for stage, pass_s in pairs]


def _line_s(scenario: Scenario, measured: Measured) -> list[float]:
    """Time of one message on each line, if as many pairs of ranks as there may be have shared it."""
    return [
        max(hop.forward_s, hop.backward_s) / number
        for hop, number in zip(measured.hops, _num_sharing(scenario), strict=True)
    ]


def _num_sharing(scenario: Scenario) -> list[int]:
    """The most ranks that may send over each line at the same time."""
    most = scenario.num_microbatches
    return [min(most, max(one.num_ranks, other.num_ranks)) for one, other in pairwise(scenario.stages)]


def _windows(
    scenario: Scenario, measured: Measured, *, interval_s: float, max_in_flight: Caps | None
) -> tuple[int, ...]:
    caps = _caps(scenario, max_in_flight)
    if all(stage.num_ranks == 1 for stage in scenario.stages):
        return windows(
            policy=scenario.policy,
            num_microbatches=scenario.num_microbatches,
            hops=measured.hops,
            interval_s=interval_s,
            max_in_flight=caps,
        )
    wanted = _wanted(scenario, measured.hops, interval_s)
    sizes: list[int] = []
    for index, cap in enumerate(caps):
        bounds = window_bounds(scenario, sizes)
        if scenario.policy is Policy.LOCK_STEP and sizes:
            bounds.append(in_proportion(wanted[index], of=wanted[index - 1], to=sizes[-1]))
        sizes.append(max(1, min(wanted[index], cap, *bounds)))
    return tuple(sizes)


def _caps(scenario: Scenario, max_in_flight: Caps | None) -> tuple[int, ...]:
    if isinstance(max_in_flight, tuple):
        return max_in_flight
    return (max_in_flight or scenario.num_microbatches,) * scenario.num_stages


def _wanted(scenario: Scenario, hops: Sequence[Hop], interval_s: float) -> list[int]:
    match scenario.policy:
        case Policy.GPIPE:
            return [scenario.num_microbatches] * scenario.num_stages
        case Policy.ONE_F_ONE_B:
            return list(range(scenario.num_stages, 0, -1))
    sizes = [1]
    own_s = [stage.num_ranks * interval_s for stage in scenario.stages]
    for stage in reversed(range(len(hops))):
        behind = math.ceil(sizes[0] * own_s[stage + 1] / own_s[stage] - EPSILON)
        sizes.insert(0, behind + window(stage=0, hops=hops[stage : stage + 1], interval_s=own_s[stage]) - 1)
    return sizes


def window_bounds(scenario: Scenario, before: Sequence[int]) -> list[int]:
    """What a rank of the next stage can have: its own micro-batches, and what the stages before pass on."""
    num_ranks = scenario.stages[len(before)].num_ranks
    bounds = [math.ceil(scenario.num_microbatches / num_ranks)]
    # Ranks have one each at least, so a stage may seem to pass on more than ever comes to it.
    held = [size * stage.num_ranks for size, stage in zip(before, scenario.stages, strict=False)]
    num_before = min(held, default=scenario.num_microbatches)
    if before and (scenario.policy is not Policy.GPIPE or num_before < scenario.num_microbatches):
        # Who waits for the forward that it has chosen may not choose one that cannot come.
        keeps_order = scenario.policy.keeps_order
        bounds.append(num_before // num_ranks if keeps_order else math.ceil(num_before / num_ranks))
    return bounds
