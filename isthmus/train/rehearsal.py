"""Measures all clouds of a job together, where they share one machine as in `isthmus run JOB`.

Ranks are started as in the run: a process each, with the run's threads, joined by the run's links. First all
of them measure their parts of the model at the same time, since they share cores, caches and memory. Then
they rehearse: a few steps of a real pipeline over links without limits. What such a step takes beyond what
the simulator makes of the parts is what the run adds to them here: the scheduler, wires, TLS and the emulated
WAN, which compute on the same cores and take turns with the passes at Python's lock. All times of a size are
stretched by that factor.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch

from isthmus.events import Span
from isthmus.job import Job, LinkSpec, stage_order
from isthmus.model.blueprint import Blueprint, split_layers
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch
from isthmus.plan.codecs import RAW_PAIR, Crossing, Cut, Pair
from isthmus.plan.end_of_step import StepEnded
from isthmus.plan.job_facts import links_along
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.scenario import HopLoad, Line, Scenario, StageLoad
from isthmus.plan.simulated import simulate_scenario
from isthmus.plan.times import Profile, Sample
from isthmus.plan.types import Facts, Member, Message
from isthmus.train.build import AUTOCAST, BuiltStage
from isthmus.train.device import Device
from isthmus.train.in_cloud import World
from isthmus.train.members import Neighbours
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import PipelineConfig
from isthmus.train.pipeline_role import PipelineRole, of_pipeline
from isthmus.train.profiling import (
    Effort,
    given_pair,
    made_up_batch,
    made_up_blueprint,
    made_up_size,
    measure,
    open_pairs,
    threads_here,
)
from isthmus.train.role import open_loop
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.handshake import RankSpec
from isthmus.wan.local import LocalWan, run_ranks

# The name of the run config behind the last rehearsal.
_OVER: Final = "over"
_MAX_LAYERS: Final = 4
# The more there are, the less the end of a step counts.
_MOST_MICROBATCHES: Final = 24
_LEAST_MICROBATCHES: Final = 4
_NUM_WARM_UP_STEPS: Final = 1
_NUM_STEPS: Final = 2
_NUM_ROUNDS: Final = 3
# A line without limits, for the simulator.
_ANY_BPS: Final = 1e12
# Links are served by Python threads beside the one that computes, as in a session.
_SWITCH_INTERVAL_S: Final = 0.0005
_MAX_FACTOR: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Steps of a small pipeline that really ran: its micro-batches, and what the step in the middle took."""

    num_sequences: int
    num_microbatches: int
    step_s: float
    update_s: float = 0.0
    """What of it the optimizer takes at one stage."""


def measure_together(
    job: Job, *, effort: Effort, report: Callable[[str], None] = lambda _: None
) -> dict[str, Profile]:
    """Measure all clouds of a job at the same time on this machine; gives a profile for each."""
    work = partial(_measure_rank, effort=effort, num_threads=threads_here(job))
    free = job.model_copy(update={"link": tuple(map(_without_limits, job.link))})

    def hear(cloud: str, text: str) -> None:
        report(f"{cloud}: {text}")

    with LocalWan(free) as wan:
        found: dict[Member, tuple[Profile, Sequence[Rehearsal]]] = run_ranks(free, work, wan, on_report=hear)
    first, rehearsals = found[Member(stage_order(job)[0])]
    # On one machine only noise tells clouds on the same device apart.
    each = {name: found[Member(name)][0] for name in stage_order(job)}
    profiles = {name: first if one.device == first.device else one for name, one in each.items()}
    return stretch_all(profiles, rehearsals)


def _without_limits(link: LinkSpec) -> LinkSpec:
    return link.model_copy(update={"bandwidth_bps": None, "rtt_s": None, "jitter_s": 0.0})


# In the process of a rank.


def _measure_rank(
    job: Job,
    endpoint: Endpoint,
    *,
    cloud: str,
    report: Callable[[str], None],
    spec: RankSpec,
    effort: Effort,
    num_threads: int,
) -> tuple[Profile, Sequence[Rehearsal]]:
    del spec
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    torch.set_num_threads(num_threads)
    clouds = stage_order(job)
    is_chain = all(one.ranks == 1 for one in job.cloud) and len(clouds) > 1
    # All are to measure at the same time.
    neighbours = Neighbours(endpoint.link, World(), clouds=clouds if is_chain else [cloud], cloud=cloud)
    neighbours.meet(job, note=report)
    profile = measure(
        job,
        job.cloud_named(cloud),
        effort=effort,
        num_sharing=sum(one.ranks for one in job.cloud),
        report=report,
    )
    blueprint = made_up_blueprint(job)
    if not is_chain or blueprint.num_layers < len(clouds) or blueprint.num_encoder_layers:
        return profile, ()
    report("a rehearsal of the pipeline")
    stage = _Rehearsing(job, cloud, neighbours, blueprint)
    rehearsals = stage.lead(profile, effort) if neighbours.up is None else stage.follow()
    neighbours.agree_on_end()
    return profile, rehearsals


class _Rehearsing:
    """One stage of the pipelines that are rehearsed; the first cloud sends the run config of each."""

    def __init__(self, job: Job, cloud: str, neighbours: Neighbours, blueprint: Blueprint) -> None:
        self._job = job
        self._clouds = stage_order(job)
        self._member = Member(cloud)
        self._neighbours = neighbours
        self._blueprint = blueprint
        device = Device(job.cloud_named(cloud).device)
        layers = rehearsed_layers(blueprint.num_layers, len(self._clouds))
        stage = build_stage(blueprint, layers[neighbours.index], seed=0).to(device.torch_device)
        if job.train.compile:
            stage.compile_layers(dynamic=False)
        self._built = BuiltStage(
            stage=stage,
            optimizer=Optimizer(
                stage.parameters_by_name(), schedule=Schedule(peak=1e-6, num_steps=1), max_norm=1.0
            ),
            device=device,
            autocast=AUTOCAST[job.train.precision],
        )

    def lead(self, profile: Profile, effort: Effort) -> tuple[Rehearsal, ...]:
        """Rehearse every size that was measured and that there is time for, at least one.

        Sizes take turns, so that what disturbs the machine for a while does not fall on one of them alone.
        """
        stage = self._built.stage
        chosen = rehearsed_sizes(profile.samples, stage.layers, effort)
        configs = {size: self._config(size, number) for size, number in chosen.items()}
        taken: dict[int, list[float]] = {size: [] for size in chosen}
        for _ in range(_NUM_ROUNDS):
            for size, config in configs.items():
                taken[size] += self._run(of_pipeline(self._neighbours.agree_on_config(config)), size)
        self._neighbours.agree_on_config(replace(config, run_id=_OVER))
        num_parameters = sum(one.numel() for one in stage.parameters())
        return tuple(
            Rehearsal(
                num_sequences=size,
                num_microbatches=number,
                step_s=statistics.median(taken[size]),
                update_s=num_parameters * profile.update_s_per_parameter,
            )
            for size, number in chosen.items()
        )

    def follow(self) -> tuple[Rehearsal, ...]:
        """Rehearse what the first cloud sends."""
        while (config := self._neighbours.agree_on_config(None)).run_id != _OVER:
            self._run(of_pipeline(config))
        return ()

    def _run(self, config: PipelineConfig, num_sequences: int | None = None) -> list[float]:
        """Some steps of a pipeline; gives what all but the first took, at the first cloud."""
        record, source = StepRecord(), None
        if num_sequences is not None:
            batch = made_up_batch(
                self._blueprint.head,
                self._blueprint.config.vocab_size,
                made_up_size(self._job, num_sequences),
                generator=torch.Generator().manual_seed(0),
            )
            source = SameBatches((batch,) * config.pipeline.num_microbatches)
        role = PipelineRole(config, self._member, self._built)
        loop = open_loop(
            role,
            self._member,
            self._neighbours.links(role.peers),
            observer=record,
            source=source,
        )
        with loop:
            loop.run()
        # The wires of this pipeline must be closed everywhere, or they would take what the next one sends.
        self._neighbours.agree_on_end()
        return [step.duration_s for step in record.steps[_NUM_WARM_UP_STEPS:]]

    def _config(self, num_sequences: int, num_microbatches: int) -> PipelineConfig:
        width = self._blueprint.config.hidden_size
        crossing = Crossing(num_rows=made_up_size(self._job, num_sequences).num_tokens, width=width)
        links = links_along(self._job, self._clouds)
        pipeline = Pipeline(
            stages=tuple((Member(cloud),) for cloud in self._clouds),
            num_steps=_NUM_WARM_UP_STEPS + _NUM_STEPS,
            num_microbatches=num_microbatches,
            max_in_flight=num_microbatches,
            cuts=tuple(Cut(crossing=crossing, codecs=self._pair(link, width)) for link in links),
        )
        return PipelineConfig(pipeline=pipeline, seed=0)

    def _pair(self, link: LinkSpec, width: int) -> Pair:
        """The link's codecs; where they are open, what the link carries in less time than passes take.

        On a CPU that is raw, and coding would take the cores from the passes. An accelerator computes faster
        than a link inside one machine carries raw messages, so the rehearsal would time the link.
        """
        given = given_pair(link)
        if given is not None or not self._built.device.is_accelerator:
            return given or RAW_PAIR
        return open_pairs(self._job, width)[-1]


def rehearsed_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The layers that each stage rehearses with: a few of an even share, at the ends the model's own."""
    found = []
    for index, layers in enumerate(split_layers(num_layers, num_stages)):
        number = min(len(layers), _MAX_LAYERS)
        is_last = index == num_stages - 1
        start = layers.stop - number if is_last else layers.start
        found.append(range(start, start + number))
    return tuple(found)


def rehearsed_sizes(samples: Sequence[Sample], layers: range, effort: Effort) -> dict[int, int]:
    """The micro-batches that are rehearsed of each size, for as many sizes as there is time for."""
    found: dict[int, int] = {}
    num_steps = _NUM_ROUNDS * (_NUM_WARM_UP_STEPS + _NUM_STEPS)
    for sample in samples:
        times = sample.stage(layers)
        pass_s = max(times.whole_forward_s + times.whole_backward_s, 1e-6)
        # Passes take longer than alone.
        number = math.floor(effort.rehearsal_s / (2 * num_steps * pass_s))
        if number < _LEAST_MICROBATCHES and found:
            break
        found[sample.num_sequences] = min(max(number, _LEAST_MICROBATCHES), _MOST_MICROBATCHES)
    return found


@dataclass(frozen=True, slots=True)
class SameBatches:
    """The same micro-batches in every step."""

    batches: Sequence[Batch]

    def training(self, step: int) -> Sequence[Batch]:
        """The micro-batches of a step."""
        del step
        return self.batches

    def validation(self) -> Sequence[Batch]:
        """Nothing is evaluated."""
        return ()


@dataclass(slots=True)
class StepRecord:
    """Keeps the ends of steps and forgets the rest."""

    steps: list[StepEnded] = field(default_factory=list)

    def span(self, span: Span) -> None:
        """Forget a span."""

    def measured(self, *, track: str, message: Message, relative_error: float, cosine: float) -> None:
        """Forget what coding changed."""

    def tell(self, fact: Facts) -> None:
        """Keep the end of a step."""
        if isinstance(fact, StepEnded):
            self.steps.append(fact)


# What follows from it.


def stretch_all(profiles: Mapping[str, Profile], rehearsals: Sequence[Rehearsal]) -> dict[str, Profile]:
    """Stretch all times by what rehearsals took beyond the simulation of the parts alone.

    `profiles` are those of the clouds in the order of their stages.
    """
    factors = {one.num_sequences: _factor(one, profiles) for one in rehearsals}
    return {cloud: _stretched(profile, factors) for cloud, profile in profiles.items()}


def _factor(rehearsal: Rehearsal, profiles: Mapping[str, Profile]) -> float:
    expected_s = simulate_scenario(
        rehearsed_scenario(rehearsal, profiles), num_steps=_NUM_WARM_UP_STEPS + _NUM_STEPS
    )
    factor = rehearsal.step_s / expected_s.steps[-1].duration_s
    return min(max(factor, 1 / _MAX_FACTOR), _MAX_FACTOR)


def rehearsed_scenario(rehearsal: Rehearsal, profiles: Mapping[str, Profile]) -> Scenario:
    """The scenario of a rehearsal with the measured times of parts."""
    stages = []
    all_layers = rehearsed_layers(len(next(iter(profiles.values())).samples[0].layers), len(profiles))
    for (cloud, profile), layers in zip(profiles.items(), all_layers, strict=True):
        first = profile.samples[0]
        times = profile.sample(
            num_sequences=rehearsal.num_sequences,
            sequence_length=first.sequence_length,
            precision=first.precision,
        ).stage(layers)
        stages.append(
            StageLoad(
                cloud=cloud,
                forward_s=times.whole_forward_s,
                backward_s=times.whole_backward_s,
                update_s=rehearsal.update_s,
            )
        )
    hop = HopLoad(
        line=Line(down_bps=_ANY_BPS, up_bps=_ANY_BPS, latency_s=0.0), forward_bytes=1, backward_bytes=1
    )
    return Scenario(
        stages=tuple(stages),
        hops=(hop,) * (len(stages) - 1),
        num_microbatches=rehearsal.num_microbatches,
        max_in_flight=rehearsal.num_microbatches,
    )


def _stretched(profile: Profile, factors: Mapping[int, float]) -> Profile:
    if not factors:
        return profile
    whole_s = {one.num_sequences: _whole_s(one) for one in profile.samples}
    samples = []
    for sample in profile.samples:
        # The nearest size, by ratio.
        nearest = min(factors, key=lambda size: abs(math.log(size / sample.num_sequences)))
        factor = factors[nearest]
        if factor > 1:
            # What a run adds to a pass is there for each message: larger passes are stretched by less.
            factor = 1 + (factor - 1) * min(1.0, whole_s.get(nearest, 0.0) / _whole_s(sample))
        samples.append(sample.stretched(factor))
    return replace(profile, samples=tuple(samples))


def _whole_s(sample: Sample) -> float:
    """A forward and a backward pass of the whole model."""
    times = sample.stage(range(len(sample.layers)))
    return times.whole_forward_s + times.whole_backward_s
