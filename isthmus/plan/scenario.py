"""A pipeline as far as its time goes: what a rank keeps in flight, and the least that a step takes.

A stage that never idles repeats one forward and one backward in every interval, and so does its neighbour,
each in its own phase. What arrives in between waits for its slot, so the round trip of each hop is rounded up
to whole intervals by itself. To round their sum instead would leave the first of p stages up to p - 2
micro-batches short.

With several ranks, a rank of stage i gets every R_i-th micro-batch, so its own interval is `u_i = R_i·τ`.
What it hands on comes back after the round trip, on which it shares the line with its siblings, and after as
many intervals of a rank behind it as that has in flight:

    w_i = 1 + ceil(2·tt_i / u_i) + ceil(w_{i+1}·u_{i+1} / u_i),   1 at the last stage

Workers, simulator and planner all compute windows here: for the first step before anything is measured, and
at the end of each step for the next one, from what was measured.
"""

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from isthmus.plan.types import Seconds

Caps = int | tuple[int, ...]
"""The most micro-batches that a rank keeps in flight: one number for all stages, or one for each."""


class Policy(enum.Enum):
    """Which pass goes first where there is a choice."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    LOCK_STEP = "lock-step"
    WAN_ONE_F_ONE_B = "wan-1f1b"

    @property
    def keeps_order(self) -> bool:
        """Whether passes have one order, whatever arrives when."""
        return self is not Policy.WAN_ONE_F_ONE_B


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """One stage at one cloud: times of one micro-batch on one rank, and of what ends a step.

    The ranks of a cloud share its micro-batches; `update_s` holds the collectives inside the cloud and the
    optimizer.
    """

    cloud: str
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    num_ranks: int = 1

    @property
    def interval_s(self) -> float:
        """Time per micro-batch of the whole stage, `t`, when its ranks are all at work."""
        return (self.forward_s + self.backward_s) / self.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The WAN between neighbouring stages, seen along the pipeline: one bandwidth down, another up.

    `handling_s` is what the two ends take to hand a message over, beside its time on the line and under way.
    """

    down_bps: float
    up_bps: float
    latency_s: float
    jitter_s: float = 0.0
    handling_s: float = 0.0

    @property
    def delay_s(self) -> float:
        """What every message takes beside its time on the line."""
        return self.latency_s + self.handling_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HopLoad:
    """What one micro-batch sends over the line behind a stage, on the wire, and what coding it takes.

    Coding happens beside the computation: it delays a message and does not occupy the stage.
    """

    line: Line
    forward_bytes: int
    backward_bytes: int
    forward_coding_s: float = 0.0
    backward_coding_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A pipeline as far as its time goes; one hop between each two neighbouring stages.

    `windows` are per rank of each stage; None lets each be found from the times, as the workers do, up to
    `max_in_flight`.
    """

    stages: tuple[StageLoad, ...]
    hops: tuple[HopLoad, ...]
    num_microbatches: int
    policy: Policy = Policy.WAN_ONE_F_ONE_B
    windows: tuple[int, ...] | None = None
    first_trained: int = 0
    max_in_flight: Caps | None = None

    def __post_init__(self) -> None:
        if len(self.hops) != len(self.stages) - 1:
            raise ValueError(f"{len(self.stages)} stages with {len(self.hops)} hops")

    @property
    def num_stages(self) -> int:
        """How many stages the pipeline has, `p`."""
        return len(self.stages)

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """The number of ranks of each stage."""
        return tuple(stage.num_ranks for stage in self.stages)


_SCENARIO: Final = TypeAdapter(Scenario)


def scenario_to_dict(scenario: Scenario) -> dict[str, Any]:
    """A scenario as plan.json holds it."""
    return dict(_SCENARIO.dump_python(scenario, mode="json"))


# Quotients that are whole but for their last bits are not rounded up.
_EPSILON: Final = 1e-9
_MIN_INTERVAL_S: Final = 1e-6
# Round trips are the shortest that were measured: half an interval more makes up for jitter.
_SPARE_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One message between neighbouring stages: its time on the line, each way, and the one-way latency.

    `coding_s` is what is done to it at both ends, there and back.
    """

    forward_s: Seconds
    backward_s: Seconds
    latency_s: Seconds
    coding_s: Seconds = 0.0

    @property
    def round_trip_s(self) -> float:
        """An activation there and its gradient back, without compute."""
        return self.forward_s + self.backward_s + 2 * self.latency_s + self.coding_s


# Before anything is measured: as if a message took as long as a pass.
_UNMEASURED: Final = Hop(forward_s=0.25, backward_s=0.25, latency_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step: the time a rank of each stage took per micro-batch, and the shortest way over each hop."""

    pass_s: tuple[float, ...]
    hops: tuple[Hop, ...]


class Staged(Protocol):
    """A pipeline as far as windows go: a scenario, or what workers agree on."""

    @property
    def policy(self) -> Policy:
        """Which pass goes first."""

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """The number of ranks of each stage."""

    @property
    def num_microbatches(self) -> int:
        """The micro-batches of a step."""


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


def first_windows(pipeline: Staged, *, max_in_flight: Caps | None = None) -> tuple[int, ...]:
    """Windows of each stage's ranks before anything is measured; `max_in_flight` bounds each rank."""
    hops = (_UNMEASURED,) * (len(pipeline.num_ranks) - 1)
    return windows(pipeline, hops, interval_s=1.0, max_in_flight=max_in_flight)


def next_windows(
    pipeline: Staged, measured: Measured, *, max_in_flight: Caps | None = None
) -> tuple[int, ...]:
    """Windows of each stage's ranks for the next step."""
    stages_s = [pass_s / number for pass_s, number in zip(measured.pass_s, pipeline.num_ranks, strict=True)]
    # As if as many pairs of ranks as there may be had shared each line.
    sharing = zip(measured.hops, _num_sharing(pipeline), strict=True)
    lines_s = [max(hop.forward_s, hop.backward_s) / number for hop, number in sharing]
    interval_s = max(_MIN_INTERVAL_S, *stages_s, *lines_s)
    spare_s = _SPARE_SHARE * interval_s
    hops = tuple(replace(hop, latency_s=hop.latency_s + spare_s / 2) for hop in measured.hops)
    if not pipeline.policy.keeps_order:
        numbers = _num_sharing(pipeline)
        hops = tuple(_shared(hop, number, interval_s) for hop, number in zip(hops, numbers, strict=True))
    return windows(pipeline, hops, interval_s=interval_s, max_in_flight=max_in_flight)


def _shared(hop: Hop, number: int, interval_s: float) -> Hop:
    """A message that so many ranks send at the same time, where the shortest way was measured alone.

    Where even that one shared its line too much is counted, but never more than an interval of the ranks.
    """
    if number == 1:
        return hop
    forward_s, backward_s = (number * min(one, interval_s) for one in (hop.forward_s, hop.backward_s))
    return replace(hop, forward_s=max(hop.forward_s, forward_s), backward_s=max(hop.backward_s, backward_s))


def _num_sharing(pipeline: Staged) -> list[int]:
    """The most ranks that may send over each line at the same time."""
    most = pipeline.num_microbatches
    return [min(most, max(pair)) for pair in pairwise(pipeline.num_ranks)]


def windows(
    pipeline: Staged, hops: Sequence[Hop], *, interval_s: float, max_in_flight: Caps | None = None
) -> tuple[int, ...]:
    """The windows of each stage's ranks under a policy; m for GPipe, p - i for 1F1B.

    `max_in_flight`, from memory, has the last word. A stage never has more in flight than the one before it.
    """
    caps = max_in_flight
    if not isinstance(caps, tuple):
        caps = (caps or pipeline.num_microbatches,) * len(pipeline.num_ranks)
    wanted = _wanted(pipeline, hops, interval_s)
    sizes: list[int] = []
    for index, cap in enumerate(caps):
        bounds = window_bounds(pipeline, sizes)
        if pipeline.policy is Policy.LOCK_STEP and sizes:
            bounds.append(_in_proportion(wanted[index], of=wanted[index - 1], to=sizes[-1]))
        sizes.append(max(1, min(wanted[index], cap, *bounds)))
    return tuple(sizes)


def _wanted(pipeline: Staged, hops: Sequence[Hop], interval_s: float) -> list[int]:
    match pipeline.policy:
        case Policy.GPIPE:
            return [pipeline.num_microbatches] * len(pipeline.num_ranks)
        case Policy.ONE_F_ONE_B:
            return list(range(len(pipeline.num_ranks), 0, -1))
    sizes = [1]
    own_s = [number * interval_s for number in pipeline.num_ranks]
    for stage in reversed(range(len(hops))):
        behind = _num_intervals(sizes[0] * own_s[stage + 1], own_s[stage])
        sizes.insert(0, 1 + behind + _num_intervals(hops[stage].round_trip_s, own_s[stage]))
    return sizes


def window_bounds(pipeline: Staged, before: Sequence[int]) -> list[int]:
    """What a rank of the next stage can have: its own micro-batches, and what the stages before pass on."""
    num_ranks = pipeline.num_ranks[len(before)]
    bounds = [math.ceil(pipeline.num_microbatches / num_ranks)]
    # Ranks have one each at least, so a stage may seem to pass on more than ever comes to it.
    kept = [size * number for size, number in zip(before, pipeline.num_ranks, strict=False)]
    num_before = min(kept, default=pipeline.num_microbatches)
    if before and (pipeline.policy is not Policy.GPIPE or num_before < pipeline.num_microbatches):
        # Who waits for the forward that it has chosen may not choose one that cannot come.
        keeps_order = pipeline.policy.keeps_order
        bounds.append(num_before // num_ranks if keeps_order else math.ceil(num_before / num_ranks))
    return bounds


def _in_proportion(size: int, *, of: int, to: int) -> int:
    """The window behind one that memory has made smaller: what is on its way between them shrinks as well.

    Who keeps an order fills its window before its first backward. With as much as the stage before, nothing
    would be on the way, and both would wait.
    """
    return size if to >= of else 1 + math.ceil((size - 1) * (to - 1) / (of - 1))


def _num_intervals(duration_s: float, interval_s: float) -> int:
    return max(0, math.ceil(duration_s / interval_s - _EPSILON))


def one_for_all(scenario: Scenario) -> Scenario:
    """A scenario that takes as long, with one rank a stage where all would do the same; else the same one.

    What all ranks send at once shares the line, and takes as long as one message of all their bytes.
    """
    number = scenario.stages[0].num_ranks
    if not _are_alike(scenario, number):
        return scenario
    return replace(
        scenario,
        stages=tuple(replace(stage, num_ranks=1) for stage in scenario.stages),
        hops=tuple(_together(hop, number) for hop in scenario.hops),
        num_microbatches=scenario.num_microbatches // number,
        windows=scenario.windows or _windows(scenario),
        max_in_flight=None,
    )


def _are_alike(scenario: Scenario, number: int) -> bool:
    return (
        scenario.policy.keeps_order
        and number > 1
        and all(stage.num_ranks == number for stage in scenario.stages)
        and scenario.num_microbatches % number == 0
        and not any(hop.line.jitter_s for hop in scenario.hops)
    )


def _together(hop: HopLoad, number: int) -> HopLoad:
    return replace(hop, forward_bytes=number * hop.forward_bytes, backward_bytes=number * hop.backward_bytes)


def _windows(scenario: Scenario) -> tuple[int, ...]:
    """The windows that the ranks end up with, whose shortest way is never alone on its line."""
    measured = expected(scenario)
    hops = tuple(_both_ways(hop, load) for hop, load in zip(measured.hops, scenario.hops, strict=True))
    return next_windows(scenario, replace(measured, hops=hops), max_in_flight=scenario.max_in_flight)


def _both_ways(hop: Hop, load: HopLoad) -> Hop:
    """What is measured is the mean of both directions; to frozen stages nothing comes back."""
    mean_s = (hop.forward_s + hop.backward_s) / 2 if load.backward_bytes else hop.forward_s
    return replace(hop, forward_s=mean_s, backward_s=mean_s)


# The lower bound on the time of a step.

Table = NDArray[np.float64]
Mask = NDArray[np.bool_]

# A window may be so much larger than expected, in intervals of each hop, where messages wait for each other.
_SPARE_INTERVALS: Final = 1.5
_NO_CAP: Final = 2.0**40


class HopTimes(NamedTuple):
    """A hop as far as the bound goes: a message's time on the line and from end to end, there and back."""

    down_s: Table
    up_s: Table
    there_s: Table
    back_s: Table
    num_bytes: Table
    """Those of a micro-batch, both ways."""
    latency_s: Table

    @classmethod
    def of(cls, hop: HopLoad, *, goes_back: bool = True) -> "HopTimes":
        """Time one hop."""
        up_bytes = hop.backward_bytes if goes_back else 0
        down_s, up_s = 8 * hop.forward_bytes / hop.line.down_bps, 8 * up_bytes / hop.line.up_bps
        there_s = down_s + hop.line.delay_s + hop.forward_coding_s
        back_s = up_s + hop.line.delay_s + hop.backward_coding_s if up_bytes else 0.0
        figures = (down_s, up_s, there_s, back_s, hop.forward_bytes + up_bytes, hop.line.latency_s)
        return cls(*map(np.asarray, figures))

    @classmethod
    def least(cls, hops: Sequence["HopTimes"]) -> "HopTimes":
        """The least of each figure: a hop with any of several codecs takes no less."""
        return cls(*(np.minimum.reduce(figures) for figures in zip(*hops, strict=True)))

    def where(self, is_own: Mask, other: "HopTimes") -> "HopTimes":
        """These figures where the mask holds, and elsewhere those of the other hop."""
        return HopTimes(*(np.where(is_own, *pair) for pair in zip(self, other, strict=True)))


class StageTimes(NamedTuple):
    """A stage as far as the bound goes: times of one rank, and the most that it may keep in flight."""

    num_ranks: int
    forward_s: Table
    backward_s: Table
    update_s: Table
    cap: Table
    is_trained: Mask
    """Whether anything goes back through it; a frozen stage keeps nothing in flight."""

    @property
    def pass_s(self) -> Table:
        """A forward and a backward."""
        return self.forward_s + self.backward_s


def scenario_bound_s(scenario: Scenario) -> float:
    """The least that a step of one scenario takes."""
    caps = scenario.windows or scenario.max_in_flight
    stages = []
    for index, stage in enumerate(scenario.stages):
        is_trained = index >= scenario.first_trained
        cap = (caps[index] if isinstance(caps, tuple) else caps) or _NO_CAP
        backward_s = stage.backward_s if is_trained else 0.0
        figures = map(np.asarray, (stage.forward_s, backward_s, stage.update_s, float(cap), is_trained))
        stages.append(StageTimes(stage.num_ranks, *figures))
    hops = [
        HopTimes.of(hop, goes_back=cut >= scenario.first_trained) for cut, hop in enumerate(scenario.hops)
    ]
    number, policy = scenario.num_microbatches, scenario.policy
    return float(step_bound_s(stages, hops, num_microbatches=number, policy=policy))


def step_bound_s(
    stages: Sequence[StageTimes], hops: Sequence[HopTimes], *, num_microbatches: int, policy: Policy
) -> Table:
    """The least that a step takes, for every entry of the arrays: no simulated step is shorter.

    A step starts with the first forward pass of the first stage and ends with its update. In between, one
    micro-batch goes through all stages and hops and back, which takes `once`. For every further one

        a line       carries its messages one after the other
        a stage      runs its forwards one after the other, and its backwards
        a stage      runs both; it idles until its first gradient is back, but for the forwards that its
                     window lets it run meanwhile, and behind its last forward, but for the backwards that it
                     still owes
        a window w   lets forward k + w start only when k backwards have ended: each w take a whole round trip

    The bound is `once` and the most that any of these adds. With windows that overlap all round trips it is
    `Σ(tf + tb) + Σ(there + back) + (m - 1)·τ`.
    """
    behind_s = [np.zeros_like(stages[-1].pass_s)]
    for stage, hop in zip(reversed(stages[1:]), reversed(hops), strict=True):
        behind_s.insert(0, behind_s[0] + stage.pass_s + hop.there_s + hop.back_s)
    once_s = behind_s[0] + stages[0].pass_s
    added_s: list[Table] = [np.zeros_like(once_s)]
    added_s += [(num_microbatches - 1) * np.maximum(hop.down_s, hop.up_s) for hop in hops]
    late_s = _late_starts(stages, hops)
    most = _most_windows(stages, hops, num_microbatches=num_microbatches, policy=policy)
    for stage, tail_s, start_s, window in zip(stages, behind_s, late_s, most, strict=True):
        rounds = -(-num_microbatches // stage.num_ranks)
        added_s.append(start_s + _stage_adds_s(stage, tail_s, rounds, window))
    return np.asarray(once_s + functools.reduce(np.maximum, added_s) + stages[0].update_s)


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
    found, arrival_s, verdict_s = [zero], zero, zero
    for (before, stage), hop in zip(pairwise(stages), hops, strict=True):
        arrival_s = arrival_s + before.forward_s + hop.there_s
        verdict_s = verdict_s + hop.latency_s
        own_s = verdict_s + stage.update_s - stages[0].update_s - arrival_s
        found.append(np.maximum(found[-1], own_s))
    return found


def _most_windows(
    stages: Sequence[StageTimes], hops: Sequence[HopTimes], *, num_microbatches: int, policy: Policy
) -> list[Table]:
    """The most that a rank of each stage keeps in flight, as `next_windows` may find it."""
    interval_s = np.maximum.reduce([one.pass_s / one.num_ranks for one in stages])
    shortest_s, found = np.maximum(interval_s, _MIN_INTERVAL_S), [np.ones_like(interval_s)]
    for stage, behind, hop in zip(stages[-2::-1], stages[:0:-1], reversed(hops), strict=True):
        shared = min(num_microbatches, max(stage.num_ranks, behind.num_ranks))
        # A line that is slower than all stages sets the interval, so its messages never take more of them.
        trip = shared * 2 + (hop.there_s + hop.back_s) / shortest_s + _SPARE_INTERVALS
        found.insert(0, np.ceil((found[0] * behind.num_ranks + trip) / stage.num_ranks + 2))
    most = [float(-(-num_microbatches // one.num_ranks)) for one in stages]
    if policy is Policy.GPIPE:
        found = [np.full_like(interval_s, one) for one in most]
    if policy is Policy.ONE_F_ONE_B:
        found = [np.full_like(interval_s, len(stages) - index) for index in range(len(stages))]
    pairs = zip(found, stages, most, strict=True)
    return [np.clip(np.minimum(one, stage.cap), 1.0, number) for one, stage, number in pairs]
