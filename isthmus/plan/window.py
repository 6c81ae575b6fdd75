"""How many micro-batches each stage keeps in flight, so that the round trips of its links are hidden.

A stage that never idles repeats one forward and one backward in every interval, and so does its neighbour,
each in its own phase. What arrives in between waits for its slot, so the round trip of each hop is rounded up
to whole intervals by itself. To round their sum instead would leave the first of p stages up to p - 2
micro-batches short.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.pipeline import Policy

# Quotients that are whole but for their last bits are not rounded up.
EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One message between neighbouring stages: its time on the line, each way, and the one-way latency.

    `coding_s` is what is done to it at both ends, there and back.
    """

    forward_s: float
    backward_s: float
    latency_s: float
    coding_s: float = 0.0

    @property
    def round_trip_s(self) -> float:
        """An activation there and its gradient back, without compute."""
        return self.forward_s + self.backward_s + 2 * self.latency_s + self.coding_s


def window(*, stage: int, hops: Sequence[Hop], interval_s: float, max_in_flight: int | None = None) -> int:
    """Micro-batches in flight that keep stage i of p busy: `w_i = (p - i) + Σ_{j≥i} ceil(2·tt_j / τ)`.

    `2·tt_j` is the round trip of the hop behind stage j; the interval `τ = max(t, s_forward, s_backward)` is
    the time per micro-batch of the slowest stage or line. `max_in_flight`, from memory, has the last word.
    """
    if not 0 <= stage <= len(hops) or interval_s <= 0:
        raise ValueError(f"stage {stage} of {len(hops) + 1} at {interval_s} s per micro-batch")
    num_behind = len(hops) - stage
    wanted = 1 + num_behind + sum(_num_intervals(hop.round_trip_s, interval_s) for hop in hops[stage:])
    return wanted if max_in_flight is None else min(wanted, max_in_flight)


def windows(
    *,
    policy: Policy,
    num_microbatches: int,
    hops: Sequence[Hop],
    interval_s: float,
    max_in_flight: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The windows of all stages under a policy: m for GPipe, p - i for 1F1B, `window` where they hide trips.

    A stage never has more in flight than the one before it, so a smaller window there binds it too; and those
    that keep an order would otherwise wait for a forward that cannot come.
    """
    num_stages = len(hops) + 1
    caps = [num_microbatches] * num_stages if max_in_flight is None else max_in_flight
    wanted = [_wanted(policy, stage, num_microbatches, hops, interval_s) for stage in range(num_stages)]
    sizes: list[int] = []
    for before, one, cap in zip([None, *wanted], wanted, caps, strict=False):
        size = min(one, num_microbatches, cap, *sizes[-1:])
        if policy is Policy.LOCK_STEP and before is not None:
            size = min(size, in_proportion(one, of=before, to=sizes[-1]))
        sizes.append(size)
    return tuple(sizes)


def in_proportion(size: int, *, of: int, to: int) -> int:
    """The window behind one that memory has made smaller: what is on its way between them shrinks as well.

    Who keeps an order fills its window before its first backward. With as much as the stage before, nothing
    would be on the way, and both would wait.
    """
    return size if to >= of else 1 + math.ceil((size - 1) * (to - 1) / (of - 1))


def _wanted(policy: Policy, stage: int, num_microbatches: int, hops: Sequence[Hop], interval_s: float) -> int:
    match policy:
        case Policy.GPIPE:
            return num_microbatches
        case Policy.ONE_F_ONE_B:
            return len(hops) + 1 - stage
        case Policy.LOCK_STEP | Policy.WAN_ONE_F_ONE_B:
            return window(stage=stage, hops=hops, interval_s=interval_s)


def _num_intervals(duration_s: float, interval_s: float) -> int:
    return max(0, math.ceil(duration_s / interval_s - EPSILON))
