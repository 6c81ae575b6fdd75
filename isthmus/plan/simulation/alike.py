"""Ranks in lock-step do the same at the same time, so to time them one may stand for all."""

from dataclasses import replace

from isthmus.plan.scenario import HopLoad, Scenario
from isthmus.plan.windows import Hop, expected, next_windows


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
    """Those that the ranks settle on, whose shortest way is never alone on its line."""
    measured = expected(scenario)
    hops = tuple(_both_ways(hop, load) for hop, load in zip(measured.hops, scenario.hops, strict=True))
    return next_windows(scenario, replace(measured, hops=hops), max_in_flight=scenario.max_in_flight)


def _both_ways(hop: Hop, load: HopLoad) -> Hop:
    """What is measured is the mean of both directions; to frozen stages nothing comes back."""
    mean_s = (hop.forward_s + hop.backward_s) / 2 if load.backward_bytes else hop.forward_s
    return replace(hop, forward_s=mean_s, backward_s=mean_s)
