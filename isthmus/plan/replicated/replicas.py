"""What it takes to hold the whole model on every cloud and make the copies one, rarely or in every step.

Each cloud owns a share of the parameters: the others send it their changes of that share, it sums them and
sends the sum back to all. That is a ring's traffic, `2(R-1)/R·N·bits` per cloud, and it goes along the fewest
links. It is sustainable up to 0.6 of a link: the one controlled measurement in the field found reality up to
1.92 times worse than the formula.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Final

from isthmus.plan.codecs import Loss

SUSTAINABLE_SHARE: Final = 0.6
"""Of a link's bandwidth."""

INNER_STEPS: Final = (30, 40, 50, 75, 100)
"""Streaming DiLoCo's range of inner steps; between 24 and 100 the loss hardly moves."""

_LAYERS_PER_FRAGMENT: Final = 3
# A fragment that comes later than this is stale.
_MAX_DELAY_STEPS: Final = 4

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One cloud with the whole model: what a micro-batch takes a rank, and what ends a step."""

    num_ranks: int
    microbatch_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A link between two clouds by number: bandwidth there and back, and round trip."""

    between: Pair
    down_bps: float
    up_bps: float
    rtt_s: float

    def bps(self, direction: Pair) -> float:
        """Bandwidth in one of its directions."""
        return self.down_bps if direction == self.between else self.up_bps


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """How often, in how many parts and how exactly the copies are made one."""

    inner_steps: int
    num_fragments: int
    bits: int

    @property
    def is_exact(self) -> bool:
        """Whether every step averages gradients, as one cloud would."""
        return self.inner_steps == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCosts:
    """What a step takes and sends; bytes by direction of a link, in a step on average."""

    step_s: float
    compute_s: float
    latency_s: float
    bandwidth_s: float
    step_bytes: Mapping[Pair, float]
    busiest: Pair | None
    delay_steps: int
    loss: Loss
    note: str


def sync_choices(
    *, num_layers: int, inner_steps: int | None, num_fragments: int | None, bits: int | None
) -> Iterator[Sync]:
    """What may be tried, the most exact first, within what the job says."""
    fragments = num_fragments or math.ceil(num_layers / _LAYERS_PER_FRAGMENT) + 2
    if inner_steps in (None, 1):
        yield from (Sync(inner_steps=1, num_fragments=1, bits=one) for one in _given(bits, (32, 16)))
    steps = INNER_STEPS if inner_steps is None else () if inner_steps == 1 else (inner_steps,)
    for number in steps:
        yield from (
            Sync(inner_steps=number, num_fragments=min(fragments, number), bits=one)
            for one in _given(bits, (8, 4))
        )


def share_out(replicas: Sequence[Replica], num_microbatches: int) -> float:
    """The least time in which the ranks of all clouds together get through a step's micro-batches."""
    ends_s = {
        number * one.microbatch_s + one.update_s
        for one in replicas
        for number in range(1, math.ceil(num_microbatches / one.num_ranks) + 1)
    }
    ordered = sorted(ends_s)
    low, high = 0, len(ordered) - 1
    while low < high:
        middle = (low + high) // 2
        if _num_done(replicas, ordered[middle]) >= num_microbatches:
            high = middle
        else:
            low = middle + 1
    return ordered[low]


def sync_costs(
    replicas: Sequence[Replica],
    wires: Sequence[Wire],
    sync: Sync,
    *,
    num_parameters: int,
    num_microbatches: int,
) -> SyncCosts:
    """What a step comes to; every cloud must reach every other over the wires."""
    compute_s = share_out(replicas, num_microbatches)
    sync_bytes = sync_traffic(len(replicas), wires, num_bytes=num_parameters * sync.bits / 8)
    by_direction = {direction: wire for wire in wires for direction in (wire.between, wire.between[::-1])}
    on_line_s = {one: 8 * sync_bytes[one] / by_direction[one].bps(one) for one in sync_bytes}
    busiest = max(on_line_s, key=lambda one: on_line_s[one], default=None)
    line_s = on_line_s[busiest] if busiest is not None else 0.0
    rtt_s = max((wire.rtt_s for wire in wires), default=0.0)
    if sync.is_exact:
        latency_s, bandwidth_s, delay_steps = 2 * rtt_s, line_s, 0
    else:
        sustained_s = line_s / (sync.inner_steps * SUSTAINABLE_SHARE)
        latency_s, bandwidth_s = 0.0, max(0.0, sustained_s - compute_s)
        fragment_s = line_s / sync.num_fragments + rtt_s
        delay_steps = math.ceil(fragment_s / (compute_s + bandwidth_s))
    return SyncCosts(
        step_s=compute_s + latency_s + bandwidth_s,
        compute_s=compute_s,
        latency_s=latency_s,
        bandwidth_s=bandwidth_s,
        step_bytes={one: value / sync.inner_steps for one, value in sync_bytes.items()},
        busiest=busiest,
        delay_steps=delay_steps,
        loss=_loss(len(replicas), sync),
        note=_note(len(replicas), sync, delay_steps),
    )


def sync_traffic(num_clouds: int, wires: Sequence[Wire], *, num_bytes: float) -> dict[Pair, float]:
    """Bytes in each direction of each wire for one synchronisation of so many bytes of parameters."""
    traffic = dict.fromkeys((one for wire in wires for one in (wire.between, wire.between[::-1])), 0.0)
    for first, second in permutations(range(num_clouds), 2):
        for direction in pairwise(path(first, second, wires)):
            traffic[direction] += 2 * num_bytes / num_clouds
    return traffic


def path(first: int, second: int, wires: Sequence[Wire]) -> tuple[int, ...]:
    """The clouds on the way over the fewest links; empty where there is no way."""
    ways: deque[tuple[int, ...]] = deque([(first,)])
    seen = {first}
    while ways:
        way = ways.popleft()
        if way[-1] == second:
            return way
        for wire in sorted(wires, key=lambda one: -min(one.down_bps, one.up_bps)):
            for here, there in (wire.between, wire.between[::-1]):
                if here == way[-1] and there not in seen:
                    seen.add(there)
                    ways.append((*way, there))
    return ()


def _given(bits: int | None, otherwise: tuple[int, ...]) -> tuple[int, ...]:
    return otherwise if bits is None else (bits,)


def _num_done(replicas: Sequence[Replica], by_s: float) -> int:
    rounds = (max(0.0, by_s - one.update_s) / one.microbatch_s for one in replicas)
    # A quotient that is whole but for its last bits is whole.
    return sum(
        one.num_ranks * math.floor(number + 1e-9) for one, number in zip(replicas, rounds, strict=True)
    )


def _loss(num_clouds: int, sync: Sync) -> Loss:
    if sync.is_exact:
        return Loss.NONE if sync.bits > 16 else Loss.SLIGHT
    return Loss.SLIGHT if num_clouds <= 2 and sync.bits >= 4 else Loss.SOME


def _note(num_clouds: int, sync: Sync, delay_steps: int) -> str:
    if sync.is_exact:
        return "every step averages the gradients of all clouds, as one cloud would"
    # Streaming DiLoCo at 35-300 M parameters.
    expected = "0.3–0.6 %" if num_clouds <= 2 else "1.4–2.6 %"
    note = f"expect a loss {expected} higher than with synchronous steps, at published settings"
    if delay_steps > _MAX_DELAY_STEPS:
        note += f"; fragments arrive {delay_steps} steps late, and only {_MAX_DELAY_STEPS} are published"
    return note
