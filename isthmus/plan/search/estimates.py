"""What a plan comes to: speed, price, the bubble by cause, and memory part by part."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from isthmus.plan.costs.memory import Memory
from isthmus.plan.scenario import Scenario
from isthmus.plan.search.choice import BubbleSplit, Estimate, PlannedLink, PlannedStage, Warmup

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
    warmup: Warmup | None = None,
    is_simulated: bool = False,
) -> Estimate:
    """Speed and price of a step; the price is unknown if that of any cloud is."""
    usd = _usd(stages, links, step_s)
    return Estimate(
        step_s=step_s,
        tokens_per_s=num_tokens / step_s,
        bubble=bubble,
        wan_bytes=_wan_bytes(links),
        usd_per_step=usd,
        usd_per_million_tokens=None if usd is None else usd / num_tokens * 1e6,
        num_steps=num_steps,
        limiting=limiting,
        reliefs=dict(reliefs),
        is_simulated=is_simulated,
        warmup=warmup,
    )


def estimated_warmup(
    scenario: Scenario,
    stages: Sequence[PlannedStage],
    links: Sequence[PlannedLink],
    *,
    step_s: float,
    num_steps: int,
) -> Warmup:
    """What a step takes before bottlenecks begin, when more crosses the same links."""
    number = scenario.num_microbatches
    raw = [
        replace(link, down_bytes=number * hop.forward_bytes, up_bytes=number * hop.backward_bytes)
        for link, hop in zip(links, scenario.hops, strict=True)
    ]
    return Warmup(
        num_steps=num_steps, step_s=step_s, wan_bytes=_wan_bytes(raw), usd_per_step=_usd(stages, raw, step_s)
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


def idle_only(step_s: float, busy_s: Sequence[float]) -> BubbleSplit:
    """The bubble of a step whose causes nobody asked for."""
    return split_bubble(step_s, busy_s, latency_s=0.0, bandwidth_s=0.0)


def memory_parts(memory: Memory) -> dict[str, int]:
    """The memory of a rank at its fullest moment, without the parts that it does not have."""
    is_update = memory.update > memory.activations + memory.working
    names = ["weights", "gradients", "optimizer", "gathered", "codec", "buffers", "workspace"]
    names += ["update"] if is_update else ["activations", "working"]
    return {name: number for name in names if (number := getattr(memory, name)) > 0}


def _wan_bytes(links: Sequence[PlannedLink]) -> float:
    return sum(one.down_bytes + one.up_bytes for one in links)


def _usd(stages: Sequence[PlannedStage], links: Sequence[PlannedLink], step_s: float) -> float | None:
    """The price of a step."""
    prices = [stage.usd_per_hour for stage in stages]
    if None in prices:
        return None
    traffic_usd = sum((one.down_bytes + one.up_bytes) / _GIB * (one.usd_per_gib or 0.0) for one in links)
    return sum(one or 0.0 for one in prices) * step_s / 3600 + traffic_usd
