"""What a plan comes to: speed, price, the bubble by cause, and memory part by part."""

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from isthmus.plan.costs.memory import Memory
from isthmus.plan.search.choice import BubbleSplit, Estimate, PlannedLink, PlannedStage

_GIB: Final = 2**30


def estimated(
    stages: Sequence[PlannedStage],
    links: Sequence[PlannedLink],
    *,
    step_s: float,
    num_tokens: float,
    num_steps: int,
    bubble: BubbleSplit,
    limiting: str,
    reliefs: Mapping[str, float] = MappingProxyType({}),
) -> Estimate:
    """Speed and price of a step; the price is unknown if that of any cloud is."""
    prices = [stage.usd_per_hour for stage in stages]
    hours_usd = None if None in prices else sum(one or 0.0 for one in prices) * step_s / 3600
    traffic_usd = sum((one.down_bytes + one.up_bytes) / _GIB * (one.usd_per_gib or 0.0) for one in links)
    usd = None if hours_usd is None else hours_usd + traffic_usd
    return Estimate(
        step_s=step_s,
        tokens_per_s=num_tokens / step_s,
        bubble=bubble,
        wan_bytes=sum(one.down_bytes + one.up_bytes for one in links),
        usd_per_step=usd,
        usd_per_million_tokens=None if usd is None else usd / num_tokens * 1e6,
        num_steps=num_steps,
        limiting=limiting,
        reliefs=dict(reliefs),
    )


def split_bubble(
    step_s: float, busy_s: Sequence[float], *, latency_s: float, bandwidth_s: float
) -> BubbleSplit:
    """What is not busy: unequal stages first, then bandwidth and latency as given; filling is the rest."""
    idle_s = max(0.0, step_s - statistics.fmean(busy_s))
    imbalance_s = min(idle_s, max(busy_s) - statistics.fmean(busy_s))
    bandwidth_s = min(idle_s - imbalance_s, bandwidth_s)
    latency_s = min(idle_s - imbalance_s - bandwidth_s, latency_s)
    fill_s = idle_s - imbalance_s - bandwidth_s - latency_s
    return BubbleSplit(
        fill=fill_s / step_s,
        latency=latency_s / step_s,
        bandwidth=bandwidth_s / step_s,
        imbalance=imbalance_s / step_s,
    )


def memory_parts(memory: Memory) -> dict[str, int]:
    """The memory of a rank at its fullest moment, without the parts that it does not have."""
    is_update = memory.update > memory.activations + memory.working
    names = ["weights", "gradients", "optimizer", "master", "gathered", "codec", "buffers", "workspace"]
    names += ["update"] if is_update else ["activations", "working"]
    return {name: number for name in names if (number := getattr(memory, name)) > 0}
