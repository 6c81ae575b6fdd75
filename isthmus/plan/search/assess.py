"""From a pipeline that was found to a plan: what it takes by formula, then as the simulator has it."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from isthmus.plan.ladder import Loss, Pair
from isthmus.plan.scenario import Scenario
from isthmus.plan.search.choice import (
    BubbleSplit,
    Form,
    PipelineSettings,
    Plan,
    PlannedLink,
    PlannedStage,
    Warmup,
)
from isthmus.plan.search.estimates import estimated, estimated_warmup, memory_parts, split_bubble
from isthmus.plan.search.limiting import by_formula, limiting, reliefs, without_bytes, without_latency
from isthmus.plan.search.loads import Loads, Terms, line_times, load_up
from isthmus.plan.search.settings import Found
from isthmus.plan.search.supply import ModelSupply
from isthmus.plan.simulated_pipeline import simulate_scenario
from isthmus.plan.simulation.alike import one_for_all

_NUM_SIMULATED_STEPS: Final = 2
_THRIFTY: Final = "fewer bytes to pay for than time alone asks for"
_HURRIED: Final = "the fastest allowed, since too few micro-batches are in flight to hide the line"


def assess(found: Found, supply: ModelSupply, terms: Terms) -> Plan:
    """The plan of what was found, by closed forms."""
    return _plan(load_up(found, supply, terms), supply, terms)


def assess_all(found: Found, supply: ModelSupply, terms: Terms) -> Iterator[Plan]:
    """The same, and what else its links may have for codecs, where that makes it faster or cheaper."""
    loads = load_up(found, supply, terms)
    yield (plan := _plan(loads, supply, terms))
    if not loads.hides_all:
        hurried = load_up(found, supply, terms, hides=False)
        if _pairs(hurried) != _pairs(loads):
            yield _plan(hurried, supply, terms, why=_HURRIED)
    for thrift in range(1, 1 + _most_thrift(loads, terms)):
        if (plan.estimate.total_usd or 0.0) <= (terms.enough_usd or 0.0):
            return
        thrifty = load_up(found, supply, terms, thrift=thrift)
        if _pairs(thrifty) != _pairs(loads):
            loads, plan = thrifty, _plan(thrifty, supply, terms, why=_THRIFTY)
            yield plan


def _pairs(loads: Loads) -> tuple[Pair, ...]:
    return tuple(one.pair for one in loads.choices)


def _most_thrift(loads: Loads, terms: Terms) -> int:
    if terms.enough_usd is None:
        return 0
    names = pairwise(cloud.name for cloud in loads.clouds)
    return max((terms.links[frozenset(pair)].num_thrifty for pair in names), default=0)


def _plan(loads: Loads, supply: ModelSupply, terms: Terms, *, why: str | None = None) -> Plan:
    stages = tuple(_stage(loads, supply, index) for index in range(len(loads.clouds)))
    links = tuple(_link(loads, terms, index, why=why) for index in range(len(loads.choices)))
    bubble = split_bubble(
        loads.step_s,
        [stage.busy_s for stage in stages],
        latency_s=sum(hop.delays_s for hop in loads.scenario.hops),
        bandwidth_s=_on_lines_s(loads.scenario),
    )
    relieved = reliefs(loads.scenario, by_formula)
    number, step, level = loads.setting.num_microbatches, supply.step, supply.levels[loads.setting.level]
    return Plan(
        form=Form.PIPELINE if len(stages) > 1 else Form.ALONE,
        stages=stages,
        links=links,
        savers=level.words(loads.clouds),
        sparing=level.sparing,
        estimate=estimated(
            stages,
            links,
            step_s=loads.step_s,
            num_tokens=step.num_tokens,
            num_steps=step.num_steps,
            bubble=bubble,
            reliefs=relieved,
            limiting=limiting(relieved),
            warmup=_warmup(loads, stages, links),
        ),
        reason="",
        settings=PipelineSettings(
            num_microbatches=number,
            microbatch_sequences=step.num_sequences // number,
            policy=terms.policy,
            max_in_flight=loads.scenario.max_in_flight,
        ),
        scenario=loads.scenario,
        warmup_scenario=loads.warmup,
        loss=max((choice.loss for choice in loads.choices), default=Loss.NONE),
        strength=max((_strength(loads, terms, index) for index in range(len(links))), default=0),
    )


def assess_simulated(plan: Plan) -> Plan:
    """The same plan with the simulator's times, and the bubble from what goes away without each cause."""
    if plan.scenario is None:
        return plan
    timed = functools.cache(_simulated_s)
    step_s = timed(plan.scenario)
    no_bytes = without_bytes(plan.scenario)
    no_bytes_s, no_wan_s = timed(no_bytes), timed(without_latency(no_bytes))
    bubble = split_bubble(
        step_s,
        [stage.busy_s for stage in plan.stages],
        latency_s=max(0.0, no_bytes_s - no_wan_s),
        bandwidth_s=max(0.0, step_s - no_bytes_s),
    )
    return _retimed(plan, step_s=step_s, bubble=bubble, relieved=reliefs(plan.scenario, timed))


def simulated_once(plan: Plan) -> Plan:
    """The same plan with the simulator's time of a step; latency and bandwidth take as long as by formula."""
    if plan.scenario is None:
        return plan
    step_s = _simulated_s(plan.scenario)
    old, old_s = plan.estimate.bubble, plan.estimate.step_s
    bubble = split_bubble(
        step_s,
        [stage.busy_s for stage in plan.stages],
        latency_s=old_s * old.latency,
        bandwidth_s=old_s * old.bandwidth,
    )
    return _retimed(plan, step_s=step_s, bubble=bubble, relieved=plan.estimate.reliefs)


def simulated_work(plan: Plan) -> int:
    """How many passes are simulated to time a plan."""
    if plan.scenario is None:
        return 0
    num_simulated = 1 if plan.warmup_scenario is None else 2
    scenario = one_for_all(plan.scenario)
    passes = 2 * scenario.num_microbatches * scenario.num_stages
    return num_simulated * _NUM_SIMULATED_STEPS * passes


def _stage(loads: Loads, supply: ModelSupply, index: int) -> PlannedStage:
    cloud, layers, load = loads.clouds[index], loads.layers[index], loads.scenario.stages[index]
    num_rounds = -(-loads.setting.num_microbatches // load.num_ranks)
    is_trained = index >= loads.scenario.first_trained
    pass_s = load.forward_s + (load.backward_s if is_trained else 0.0)
    memory = supply.memory(
        cloud, loads.setting, layers, window=loads.most_in_flight[index], halves=loads.halves[index]
    )
    return PlannedStage(
        cloud=cloud.name,
        holds=_named(layers),
        num_ranks=load.num_ranks,
        busy_s=num_rounds * pass_s + load.update_s,
        window=loads.windows[index],
        memory=memory_parts(memory),
        capacity_bytes=cloud.capacity_bytes,
        usd_per_hour=cloud.usd_per_hour,
        layers=(layers.start, layers.stop),
        sharding=supply.levels[loads.setting.level].sharding(cloud),
        is_measured=cloud.profile is not None,
    )


def _named(layers: range) -> str:
    last = layers.stop - 1
    return f"layer {last}" if len(layers) == 1 else f"layers {layers.start}–{last}"


def _link(loads: Loads, terms: Terms, index: int, *, why: str | None) -> PlannedLink:
    hop, choice = loads.scenario.hops[index], loads.choices[index]
    first, second = loads.clouds[index].name, loads.clouds[index + 1].name
    number = loads.setting.num_microbatches
    return PlannedLink(
        between=(first, second),
        down_bytes=hop.forward_bytes * number,
        up_bytes=hop.backward_bytes * number,
        forward_codec=str(choice.pair.forward),
        backward_codec=str(choice.pair.backward),
        usd_per_gib=terms.links[frozenset((first, second))].usd_per_gib,
        reason=choice.reason if why is None else f"{choice.pair.forward} and {choice.pair.backward}: {why}",
    )


def _strength(loads: Loads, terms: Terms, index: int) -> int:
    """How many codecs are milder than those of a link; none where the job has its own."""
    pair = loads.choices[index].pair
    first, second = (cloud.name for cloud in loads.clouds[index : index + 2])
    rungs = terms.links[frozenset((first, second))].rungs
    return max(
        (
            number
            for number, rung in enumerate(rungs)
            if rung.forward == pair.forward or rung.backward == pair.backward
        ),
        default=0,
    )


def _warmup(loads: Loads, stages: Sequence[PlannedStage], links: Sequence[PlannedLink]) -> Warmup | None:
    if loads.warmup is None:
        return None
    step_s, num_steps = by_formula(loads.warmup), loads.num_warmup_steps
    return estimated_warmup(loads.warmup, stages, links, step_s=step_s, num_steps=num_steps)


def _simulated_warmup(plan: Plan) -> Warmup | None:
    before, scenario = plan.estimate.warmup, plan.warmup_scenario
    if before is None or scenario is None or plan.estimate.is_simulated:
        return before
    step_s = _simulated_s(scenario)
    return estimated_warmup(scenario, plan.stages, plan.links, step_s=step_s, num_steps=before.num_steps)


def _on_lines_s(scenario: Scenario) -> float:
    """Time on the lines that nothing hides: once each way, and where a line is slower than compute."""
    once_s = sum(sum(line_times(hop)) for hop in scenario.hops)
    slowest_s = max((max(line_times(hop)) for hop in scenario.hops), default=0.0)
    compute_s = max(stage.interval_s for stage in scenario.stages)
    return once_s + (scenario.num_microbatches - 1) * max(0.0, slowest_s - compute_s)


def _retimed(plan: Plan, *, step_s: float, bubble: BubbleSplit, relieved: Mapping[str, float]) -> Plan:
    estimate = estimated(
        plan.stages,
        plan.links,
        step_s=step_s,
        num_tokens=plan.estimate.tokens_per_s * plan.estimate.step_s,
        num_steps=plan.estimate.num_steps,
        bubble=bubble,
        reliefs=relieved,
        limiting=limiting(relieved),
        warmup=_simulated_warmup(plan),
    )
    return replace(plan, estimate=replace(estimate, is_simulated=True))


def _simulated_s(scenario: Scenario) -> float:
    """A step that follows another, with the windows measured in that one: what `isthmus simulate` says."""
    return simulate_scenario(one_for_all(scenario), num_steps=_NUM_SIMULATED_STEPS).step_s
