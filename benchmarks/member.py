"""One member of a pipeline, put together as a session does it, and a record of what it tells."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from isthmus.events import Span
from isthmus.job.codec import BottleneckSpec, BoundarySpec, HiddenSpec
from isthmus.plan.codecs import Crossing, Cut, Pair
from isthmus.plan.end_of_step import StepEnded
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.types import Event, Facts, Member
from isthmus.train.build import BuiltStage
from isthmus.train.device import Device
from isthmus.train.loop import Loop
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import PipelineConfig
from isthmus.train.pipeline_config import warmup_of
from isthmus.train.pipeline_role import PipelineRole
from isthmus.train.role import open_loop
from isthmus.train.session import SWITCH_INTERVAL_S
from isthmus.wan.link import Link


@dataclass(slots=True)
class Record:
    """Keeps the spans and the facts of a member."""

    spans: list[Span] = field(default_factory=list)
    told: list[Facts] = field(default_factory=list)
    on_step: Callable[[StepEnded], None] = lambda _: None

    def span(self, span: Span) -> None:
        """Keep a span."""
        self.spans.append(span)

    def measured(self, **about: Any) -> None:
        """Ignore what coding changed."""

    def tell(self, fact: Facts) -> None:
        """Keep a fact of the scheduler."""
        self.told.append(fact)
        if isinstance(fact, StepEnded):
            self.on_step(fact)

    @property
    def steps(self) -> list[StepEnded]:
        """The ends of all steps."""
        return [fact for fact in self.told if isinstance(fact, StepEnded)]


def prepare_process() -> None:
    """Let this process compute on one thread and let its threads take turns as in a run."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def pipeline_config(
    clouds: Sequence[str],
    *,
    pair: Pair,
    crossing: Crossing,
    boundary: BoundarySpec | None = None,
    seed: int = 0,
    **values: Any,
) -> PipelineConfig:
    """The run config of a pipeline of clouds of one rank, with the same codecs and boundary at every cut.

    `values` are those of `Pipeline`.
    """
    boundaries = (boundary or HiddenSpec(),) * (len(clouds) - 1)
    num_warmup_steps = warmup_of(boundaries)
    cut = Cut(crossing=crossing, codecs=pair, num_warmup_steps=num_warmup_steps)
    bottlenecks = [number for number, one in enumerate(boundaries) if isinstance(one, BottleneckSpec)]
    pipeline = Pipeline(
        stages=tuple((Member(cloud),) for cloud in clouds),
        cuts=(cut,) * len(boundaries),
        fit_step=num_warmup_steps or None,
        bottlenecks=frozenset(bottlenecks),
        **values,
    )
    return PipelineConfig(pipeline=pipeline, seed=seed, boundaries=boundaries)


def pipeline_loop(
    config: PipelineConfig,
    cloud: str,
    links: Mapping[str, Link],
    *,
    stage: Any,
    device: Device,
    record: Record,
    on_event: Callable[[Event, float], None] = lambda _event, _now_s: None,
    **options: Any,
) -> Loop:
    """A member that is ready to run; `options` are a `source`, and those of `Built`."""
    member, source = Member(cloud), options.pop("source", None)
    options.setdefault("optimizer", plain_optimizer(stage))
    loop = open_loop(
        PipelineRole(config, member, BuiltStage(stage=stage, device=device, **options)),
        member,
        {Member(peer): link for peer, link in links.items()},
        observer=record,
        source=source,
    )
    loop.on_event = on_event
    return loop


def run_member(config: PipelineConfig, cloud: str, links: Mapping[str, Link], **options: Any) -> Record:
    """Run a member from its first step to its last; gives what it told."""
    record: Record = options.setdefault("record", Record())
    with pipeline_loop(config, cloud, links, **options) as loop:
        loop.run()
    return record


def plain_optimizer(stage: Any) -> Optimizer:
    """An optimizer that hardly changes the weights."""
    return Optimizer(stage.parameters_by_name(), schedule=Schedule(peak=1e-6, num_steps=1), max_norm=1.0)
