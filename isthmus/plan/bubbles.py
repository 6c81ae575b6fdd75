"""Bubbles of a pipeline in closed form: the share of a step in which a stage does not compute.

p stages, m micro-batches; a stage computes `t = tf + tb` per micro-batch; a message takes `s` on the line and
`λ` to arrive, `tt = s + λ` in all.
"""

import math
from collections.abc import Sequence

from isthmus.plan.scenario import Hop


def fill_bubble(*, num_stages: int, num_microbatches: int) -> float:
    """Without communication: `(p-1) / (m+p-1)`, eq. (1) of Pan et al. 2023."""
    _check(num_stages, num_microbatches)
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def blocking_bubble(
    *, num_stages: int, num_microbatches: int, forward_s: float, backward_s: float, travel_s: float
) -> float:
    """With nothing overlapped: `(p-1)(t+2·m·tt) / (m·t + (p-1)(t+2·m·tt))`, eq. (2) of Pan et al. 2023.

    Exact for two stages with sends that block, pessimistic for more.
    """
    _check(num_stages, num_microbatches)
    compute_s = forward_s + backward_s
    idle_s = (num_stages - 1) * (compute_s + 2 * num_microbatches * travel_s)
    return idle_s / (num_microbatches * compute_s + idle_s)


def interval_s(*, compute_s: float, hops: Sequence[Hop]) -> float:
    """The time per micro-batch that nothing hides: `τ = max(t, s_forward, s_backward)`."""
    return max(compute_s, *(max(hop.forward_s, hop.backward_s) for hop in hops), 0.0)


def overlapped_step_s(*, num_microbatches: int, compute_s: float, hops: Sequence[Hop]) -> float:
    """A step of WAN-1F1B over equal stages: `m·τ + (p-1)·t + 2·Σ tt`, with one hop between each two."""
    _check(len(hops) + 1, num_microbatches)
    rate_s = num_microbatches * interval_s(compute_s=compute_s, hops=hops)
    return rate_s + len(hops) * compute_s + sum(hop.round_trip_s for hop in hops)


def overlapped_bubble(*, num_microbatches: int, compute_s: float, hops: Sequence[Hop]) -> float:
    """The bubble of that step: `1 - m·t / T_step`."""
    step_s = overlapped_step_s(num_microbatches=num_microbatches, compute_s=compute_s, hops=hops)
    return 1 - num_microbatches * compute_s / step_s


def best_blocking_microbatches(*, batch_compute_s: float, latency_s: float) -> float:
    """Where eq. (2) is least for a fixed batch (`t = T/m`, `tt = λ + S/m`): `m* = sqrt(T / 2λ)`.

    `batch_compute_s` is `T`, what one stage computes in a step; without latency, more is always better.
    """
    return math.sqrt(batch_compute_s / (2 * latency_s)) if latency_s else math.inf


def best_overlapped_microbatches(
    *, num_stages: int, batch_compute_s: float, batch_on_line_s: float, overhead_s: float
) -> float:
    """Where the overlapped step is least for a fixed batch: `m* = sqrt((p-1)(T+2S) / o)`.

    `T` is what one stage computes in a step, `S` the time of all its messages one way on a line, and `o` the
    overhead that each micro-batch adds to every stage; without overhead, more is always better.
    """
    _check(num_stages, 1)
    if not overhead_s:
        return math.inf
    return math.sqrt((num_stages - 1) * (batch_compute_s + 2 * batch_on_line_s) / overhead_s)


def _check(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(f"{num_stages} stages and {num_microbatches} micro-batches")
