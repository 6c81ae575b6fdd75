"""The one lower bound on the time of a step: no simulated step is shorter.

A step starts with the first forward pass of the first stage and ends with its update. In between, one
micro-batch goes through all stages and hops and back, which takes `once`. For every further one

    a line       carries its messages one after the other
    a stage      runs its forwards one after the other, and its backwards
    a stage      runs both; it idles until its first gradient is back, but for the forwards that its window
                 lets it run meanwhile, and behind its last forward, but for the backwards that it still owes
    a window w   lets forward k + w start only when k backwards have ended: each w take a whole round trip

The bound is `once` and the most that any of these adds. With windows that overlap all round trips it is
`Σ(tf + tb) + Σ(there + back) + (m - 1)·τ`. All figures are arrays, so that many cuts are bounded at once.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from isthmus.plan.scenario import HopLoad, Policy, Scenario
from isthmus.plan.search.walks import Mask, Table

# A window may be so much larger than expected, in intervals of each hop, where messages wait for each other.
_SPARE_INTERVALS: Final = 1.5
_NO_CAP: Final = 2.0**40
_SHORTEST_S: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTimes:
    """A hop as far as the bound goes: a message's time on the line and from end to end, there and back."""

    down_s: Table
    up_s: Table
    there_s: Table
    back_s: Table
    latency_s: float

    @classmethod
    def of(cls, hop: HopLoad) -> "HopTimes":
        """The times of one hop."""
        down_s, up_s = 8 * hop.forward_bytes / hop.line.down_bps, 8 * hop.backward_bytes / hop.line.up_bps
        there_s = down_s + hop.line.delay_s + hop.forward_coding_s
        back_s = up_s + hop.line.delay_s + hop.backward_coding_s if hop.backward_bytes else 0.0
        times = (np.asarray(one) for one in (down_s, up_s, there_s, back_s))
        return cls(**dict(zip(_HOP_FIELDS, times, strict=True)), latency_s=hop.line.latency_s)

    @classmethod
    def least(cls, hops: Sequence["HopTimes"]) -> "HopTimes":
        """The least of each time: a hop with any of several codecs takes no less."""
        times = {name: np.minimum.reduce([getattr(one, name) for one in hops]) for name in _HOP_FIELDS}
        return cls(**times, latency_s=min(one.latency_s for one in hops))

    def where(self, is_open: Mask, other: "HopTimes") -> "HopTimes":
        """These times where it is so, and elsewhere those of another."""
        times = {name: np.where(is_open, getattr(self, name), getattr(other, name)) for name in _HOP_FIELDS}
        return HopTimes(**times, latency_s=self.latency_s)


_HOP_FIELDS: Final = ("down_s", "up_s", "there_s", "back_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """A stage as far as the bound goes: times of one rank, and the most that it may keep in flight."""

    forward_s: Table
    backward_s: Table
    update_s: Table
    cap: Table
    num_ranks: int
    is_trained: Mask
    """Whether anything goes back through it; a frozen stage keeps nothing in flight."""

    @property
    def pass_s(self) -> Table:
        """A forward and a backward."""
        return self.forward_s + self.backward_s


def scenario_bound_s(scenario: Scenario) -> float:
    """The least that a step of one scenario takes."""
    stages = [
        StageTimes(
            forward_s=np.asarray(stage.forward_s),
            backward_s=np.asarray(stage.backward_s if index >= scenario.first_trained else 0.0),
            update_s=np.asarray(stage.update_s),
            cap=np.asarray(_cap(scenario, index)),
            num_ranks=stage.num_ranks,
            is_trained=np.asarray(index >= scenario.first_trained),
        )
        for index, stage in enumerate(scenario.stages)
    ]
    hops = [
        HopTimes.of(hop if index >= scenario.first_trained else replace(hop, backward_bytes=0))
        for index, hop in enumerate(scenario.hops)
    ]
    return float(
        step_bound_s(stages, hops, num_microbatches=scenario.num_microbatches, policy=scenario.policy)
    )


def step_bound_s(
    stages: Sequence[StageTimes], hops: Sequence[HopTimes], *, num_microbatches: int, policy: Policy
) -> Table:
    """The least that a step takes, for every entry of the arrays."""
    behind_s = _behind(stages, hops)
    once_s = behind_s[0] + stages[0].pass_s
    added_s: list[Table] = [np.zeros_like(once_s)]
    added_s += [(num_microbatches - 1) * np.maximum(hop.down_s, hop.up_s) for hop in hops]
    late_s = _late_starts(stages, hops)
    windows = _most_windows(stages, hops, num_microbatches=num_microbatches, policy=policy)
    for stage, tail_s, start_s, window in zip(stages, behind_s, late_s, windows, strict=True):
        rounds = -(-num_microbatches // stage.num_ranks)
        added_s.append(start_s + _stage_adds_s(stage, tail_s, rounds, window))
    return np.asarray(once_s + functools.reduce(np.maximum, added_s) + stages[0].update_s)


def _behind(stages: Sequence[StageTimes], hops: Sequence[HopTimes]) -> list[Table]:
    """What a micro-batch takes behind each stage until it is back."""
    found = [np.zeros_like(stages[-1].pass_s)]
    for stage, hop in zip(reversed(stages[1:]), reversed(hops), strict=True):
        found.append(found[-1] + stage.pass_s + hop.there_s + hop.back_s)
    return found[::-1]


def _stage_adds_s(stage: StageTimes, behind_s: Table, rounds: int, window: Table) -> Table:
    """What the micro-batches of a rank but the first add to the time of one."""
    forward_s, backward_s, pass_s = stage.forward_s, stage.backward_s, stage.pass_s
    before_s = np.maximum(0.0, behind_s - (window - 1) * forward_s)
    after_s = np.maximum(0.0, behind_s - (window - 1) * backward_s)
    idle_s = np.where(window < rounds, before_s + after_s, np.maximum(before_s, after_s))
    busy_s = (rounds - 1) * pass_s - behind_s + idle_s
    num_trips, rest = np.divmod(rounds - 1, window)
    trips_s = num_trips * (pass_s + behind_s) + rest * np.maximum(forward_s, backward_s)
    return np.where(stage.is_trained, np.maximum(busy_s, trips_s), (rounds - 1) * forward_s)


def _late_starts(stages: Sequence[StageTimes], hops: Sequence[HopTimes]) -> list[Table]:
    """How much later than its first activation a stage starts, since its own update comes first.

    The verdict that lets it update leaves the first stage before that one's own update.
    """
    zero = np.zeros_like(stages[0].update_s + stages[0].forward_s)
    found, arrival_s, verdict_s = [zero], zero, 0.0
    for (before, stage), hop in zip(pairwise(stages), hops, strict=True):
        arrival_s = arrival_s + before.forward_s + hop.there_s
        verdict_s += hop.latency_s
        own_s = verdict_s + stage.update_s - stages[0].update_s - arrival_s
        found.append(np.maximum(found[-1], own_s))
    return found


def _most_windows(
    stages: Sequence[StageTimes], hops: Sequence[HopTimes], *, num_microbatches: int, policy: Policy
) -> list[Table]:
    """The most that a rank of each stage keeps in flight, as `scenario.next_windows` may find it."""
    interval_s = np.maximum.reduce([one.pass_s / one.num_ranks for one in stages])
    shortest_s = np.maximum(interval_s, _SHORTEST_S)
    found = [np.ones_like(interval_s)]
    for number, (stage, hop) in enumerate(zip(reversed(stages[:-1]), reversed(hops), strict=True)):
        behind = stages[len(stages) - 1 - number]
        shared = min(num_microbatches, max(stage.num_ranks, behind.num_ranks))
        # A line that is slower than all stages sets the interval, so its messages never take more of them.
        trip = shared * 2 + (hop.there_s + hop.back_s) / shortest_s + _SPARE_INTERVALS
        own = found[0] * behind.num_ranks / stage.num_ranks + trip / stage.num_ranks + 2
        found.insert(0, np.ceil(own))
    most = [float(-(-num_microbatches // one.num_ranks)) for one in stages]
    if policy is Policy.GPIPE:
        found = [np.full_like(interval_s, one) for one in most]
    if policy is Policy.ONE_F_ONE_B:
        found = [np.full_like(interval_s, len(stages) - index) for index in range(len(stages))]
    pairs = zip(found, stages, most, strict=True)
    return [np.maximum(1.0, np.minimum(np.minimum(one, stage.cap), number)) for one, stage, number in pairs]


def _cap(scenario: Scenario, index: int) -> float:
    caps = scenario.windows or scenario.max_in_flight
    cap = caps[index] if isinstance(caps, tuple) else caps
    return _NO_CAP if cap is None else float(cap)
