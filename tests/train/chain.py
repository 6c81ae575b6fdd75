"""A pipeline of stages in one process: a thread for each, joined by links in memory."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from isthmus.events import Span
from isthmus.job.codec import BottleneckSpec, BoundarySpec, HiddenSpec
from isthmus.job.sections import LoraSpec
from isthmus.model.blueprint import Blueprint, split_layers
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch, Stage, StageOutput
from isthmus.plan.codecs import RAW_PAIR, Crossing, Cut, Pair
from isthmus.plan.end_of_step import Evaluated, StepEnded, Tally
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.types import Action, Event, Facts, Member, Message, Save, Scheduler, Stop
from isthmus.train.build import BuiltStage
from isthmus.train.coding import CodecState
from isthmus.train.device import Device
from isthmus.train.loop import Loop, OnEvent, save_nothing
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import PipelineConfig
from isthmus.train.pipeline_config import warmup_of
from isthmus.train.pipeline_role import PipelineRole
from isthmus.train.role import open_loop
from isthmus.train.wire import Wire
from isthmus.wan.memory import MemoryLink
from isthmus.wan.shaping import Shape
from tests.model.cases import SEED

CLOUDS = ("north", "east", "south", "west")
SCHEDULE = Schedule(peak=3e-3, num_steps=5, num_warmup_steps=2)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Measured:
    """What a sender measured of one message."""

    track: str
    step: int
    microbatch: int
    relative_error: float
    cosine: float


@dataclass(frozen=True)
class Saved:
    """What one member saved beside weights and moments: scheduler facts, and wires by their peers."""

    step: int
    facts: Facts | None
    wires: dict[Member, CodecState]


@dataclass
class Record:
    """An observer that remembers."""

    spans: list[Span] = field(default_factory=list)
    steps: list[StepEnded] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    measurements: list[Measured] = field(default_factory=list)
    saves: list[Saved] = field(default_factory=list)
    log: list[tuple[Event, float, tuple[Action, ...]]] = field(default_factory=list)
    """What its scheduler was told, when, and what it answered."""
    told: list[Facts] = field(default_factory=list)
    on_step: Callable[[StepEnded], None] = lambda _: None
    on_save: Callable[[Saved], None] = lambda _: None

    def span(self, span: Span) -> None:
        self.spans.append(span)

    def measured(self, *, track: str, message: Message, relative_error: float, cosine: float) -> None:
        self.measurements.append(Measured(track, message.step, message.item, relative_error, cosine))

    def tell(self, fact: Facts) -> None:
        self.told.append(fact)
        if isinstance(fact, StepEnded):
            self.steps.append(fact)
            self.on_step(fact)
        elif isinstance(fact, Evaluated):
            self.evaluations.append(fact)

    def save(self, saved: Saved) -> None:
        self.saves.append(saved)
        self.on_save(saved)


@dataclass(frozen=True)
class Logged:
    """A scheduler that keeps a log."""

    scheduler: Scheduler
    record: Record

    def on(self, event: Event, now_s: float) -> Sequence[Action]:
        actions = tuple(self.scheduler.on(event, now_s))
        self.record.log.append((event, now_s, actions))
        return actions


def assert_pure(pipeline: Pipeline, member: Member, record: Record) -> None:
    """Tell a fresh scheduler all that a member was told, and compare what it answers."""
    fresh = PipelineScheduler(pipeline, member)
    assert record.log
    for event, now_s, actions in record.log:
        # What is not a number equals nothing, so that texts are compared.
        assert repr(fresh.on(event, now_s)) == repr(actions)


@dataclass(frozen=True)
class Given:
    """Micro-batches made beforehand."""

    steps: Sequence[Sequence[Batch]]
    held_out: Sequence[Batch] = ()

    def training(self, step: int) -> Sequence[Batch]:
        return self.steps[step]

    def validation(self) -> Sequence[Batch]:
        return self.held_out


class TakingTurns(torch.nn.Module):
    """A stage that shares the generators of the process with others, and so computes alone."""

    def __init__(self, stage: Stage, lock: threading.Lock) -> None:
        super().__init__()
        self.stage = stage
        self.model = stage.model
        self.up = stage.up
        self.down = stage.down
        self.lock = lock

    def train(self, mode: bool = True) -> Self:
        self.stage.train(mode)
        return self

    def forward(self, inputs: Any) -> "LockedOutput":
        with self.lock:
            output = self.stage(inputs)
        return LockedOutput(output, self.lock)


class LockedOutput:
    def __init__(self, output: StageOutput, lock: threading.Lock) -> None:
        self.output = output
        self.lock = lock
        self.crossing = output.crossing
        self.memory = output.memory
        self.loss = output.loss
        self.num_correct = output.num_correct

    def backward(self, **options: Any) -> None:
        with self.lock:
            self.output.backward(**options)


@dataclass(frozen=True)
class CutCase:
    """One cut of a chain."""

    codecs: Pair = RAW_PAIR
    boundary: BoundarySpec = field(default_factory=HiddenSpec)
    guard_every: int = 0
    guard_cosine: float = 0.98
    is_free: bool = False
    """Whether `auto` chooses its codecs."""
    num_rows: int = 8192
    """The most tokens of a micro-batch."""

    @property
    def num_warmup_steps(self) -> int:
        return warmup_of((self.boundary,))


@dataclass
class Steer:
    """Stands for the steering of a scheduler: changes codecs when the test says so."""

    choose: Callable[[Tally], tuple[Pair, ...]]
    notes: list[str] = field(default_factory=list)
    states: tuple[Any, ...] = ()

    def __call__(self, tally: Tally) -> tuple[Pair, ...]:
        return self.choose(tally)

    def restore(self, saved: Sequence[Any], *, is_same: Sequence[bool], step: int) -> None:
        """Nothing was saved."""


@dataclass
class Chain:
    """Stages with their optimizers, ready to run."""

    config: PipelineConfig
    stages: list[Stage]
    optimizers: list[Optimizer]
    links: list[MemoryLink]
    records: list[Record]
    configs: Mapping[int, PipelineConfig] = field(default_factory=dict)
    device: str = "cpu"
    targets: Given | None = None
    wires: dict[int, dict[Member, Wire]] = field(default_factory=dict)
    loops: dict[int, Loop] = field(default_factory=dict)
    stops: dict[int, Stop] = field(default_factory=dict)

    def run(
        self,
        source: Given,
        *,
        first_step: int = 0,
        autocast: torch.dtype | None = None,
        states: Sequence[Saved] = (),
        steer: Callable[[Tally], tuple[Pair, ...]] | None = None,
        configs: Mapping[int, PipelineConfig] | None = None,
        targets: Given | None = None,
    ) -> None:
        """Run all stages; `targets` are read where the config says that translations are."""
        self.configs, self.targets = configs or {}, targets
        with ThreadPoolExecutor(len(self.stages)) as pool:
            lock = threading.Lock()
            futures = [
                pool.submit(self._be, index, source, first_step, autocast, lock, states, steer)
                for index in range(len(self.stages))
            ]
            for future in futures:
                future.result(timeout=120)

    def _be(
        self,
        index: int,
        source: Given,
        first_step: int,
        autocast: torch.dtype | None,
        lock: threading.Lock,
        states: Sequence[Saved],
        steer: Callable[[Tally], tuple[Pair, ...]] | None,
    ) -> None:
        config, record = self.configs.get(index, self.config), self.records[index]
        stage: Any = TakingTurns(self.stages[index], lock)
        scheduler = PipelineScheduler(config.pipeline, Member(CLOUDS[index]))
        if steer is not None and index == 0:
            scheduler._end.steering = Steer(steer)  # type: ignore[assignment]
        loop, wires = make_loop(
            config,
            Member(CLOUDS[index]),
            scheduler=scheduler,
            stage=stage,
            links=self._links(index),
            record=record,
            device=Device(self.device),
            optimizer=self.optimizers[index],
            source=source if index == 0 else self.targets if index == config.target_stage else None,
            autocast=autocast,
        )
        self.wires[index], self.loops[index] = wires, loop
        facts = None
        if states:
            facts = states[index].facts
            for peer, state in states[index].wires.items():
                wires[peer].load(state)
        try:
            with loop:
                self.stops[index] = loop.run(first_step, facts)
        except BaseException as error:
            for number, link in enumerate(self.links):
                for name in link_ends(number):
                    link.end(name).abort(repr(error))
            raise

    def _links(self, index: int) -> dict[Member, Any]:
        near = {index - 1: index - 1, index + 1: index}
        return {
            Member(CLOUDS[stage]): self.links[number].end(CLOUDS[index])
            for stage, number in near.items()
            if 0 <= number < len(self.links)
        }


def make_loop(
    config: PipelineConfig,
    member: Member,
    *,
    scheduler: PipelineScheduler,
    stage: Stage,
    links: Mapping[Member, Any],
    record: Record,
    device: Device,
    **options: Any,
) -> tuple[Loop, dict[Member, Wire]]:
    """A member ready to run, and its wires."""

    def save(action: Save, done: OnEvent) -> Callable[[], None]:
        states = {peer: wire.state(action.step) for peer, wire in loop.wires.items()}
        found = {peer: state for peer, state in states.items() if state is not None}
        record.save(Saved(action.step, action.facts, found))
        return save_nothing(action, done)

    source = options.pop("source", None)
    built = BuiltStage(stage=stage, device=device, **options)
    logged = Logged(scheduler, record)
    role = PipelineRole(config, member, built)
    loop = open_loop(role, member, links, observer=record, source=source, save=save, scheduler=logged)
    return loop, {peer: one for peer, one in loop.wires.items() if isinstance(one, Wire)}


def link_ends(number: int) -> tuple[str, str]:
    return CLOUDS[number], CLOUDS[number + 1]


def config(num_stages: int, num_microbatches: int, **changes: Any) -> PipelineConfig:
    """The config of a chain of clouds; cuts are `CutCase`s."""
    values: dict[str, Any] = {"num_steps": 5, "max_in_flight": 64, "save_every_s": 0.0, **changes}
    cuts: Sequence[CutCase] = values.pop("cuts", ()) or (CutCase(),) * (num_stages - 1)
    num_ranks = values.pop("num_ranks", ()) or (1,) * num_stages
    boundaries = tuple(cut.boundary for cut in cuts)
    bottlenecks = [number for number, one in enumerate(boundaries) if isinstance(one, BottleneckSpec)]
    seed, keeps_padding = values.pop("seed", 11), values.pop("keeps_padding", False)
    cache_bytes = values.pop("cache_bytes", 0)
    pipeline = Pipeline(
        stages=tuple(
            tuple(Member(cloud, rank) for rank in range(number))
            for cloud, number in zip(CLOUDS, num_ranks, strict=False)
        ),
        num_microbatches=num_microbatches,
        fit_step=warmup_of(boundaries) or None,
        bottlenecks=frozenset(bottlenecks),
        cuts=tuple(
            Cut(
                crossing=Crossing(num_rows=cut.num_rows, width=16),
                codecs=cut.codecs,
                is_free=cut.is_free,
                num_warmup_steps=cut.num_warmup_steps,
                guard_every=cut.guard_every,
                guard_cosine=cut.guard_cosine,
            )
            for cut in cuts
        ),
        **values,
    )
    return PipelineConfig(
        pipeline=pipeline,
        seed=seed,
        boundaries=boundaries,
        keeps_padding=keeps_padding,
        cache_bytes=cache_bytes,
    )


@contextmanager
def chain(
    plan: Blueprint,
    agreed: PipelineConfig,
    *,
    shape: Shape | None = None,
    recompute: bool = False,
    max_norm: float | None = 0.5,
    num_frozen_layers: int = 0,
    device: str = "cpu",
) -> Iterator[Chain]:
    num_stages = len(agreed.pipeline.stages)
    stages = make_stages(plan, agreed, recompute=recompute, num_frozen_layers=num_frozen_layers)
    for stage in stages:
        stage.to(Device(device).torch_device)
    with ExitStack() as stack:
        links = [
            stack.enter_context(MemoryLink(CLOUDS[index], CLOUDS[index + 1], shape=shape))
            for index in range(num_stages - 1)
        ]
        yield Chain(
            config=agreed,
            stages=stages,
            optimizers=[make_optimizer(stage, max_norm) for stage in stages],
            links=links,
            records=[Record() for _ in stages],
            device=device,
        )


def make_stages(
    plan: Blueprint,
    agreed: PipelineConfig,
    *,
    recompute: bool = False,
    num_frozen_layers: int = 0,
    lora: LoraSpec | None = None,
) -> list[Stage]:
    num_stages = len(agreed.pipeline.stages)
    boundaries = [agreed.boundary(number) for number in range(num_stages - 1)]
    ends = [HiddenSpec(), *boundaries, HiddenSpec()]
    return [
        build_stage(
            plan,
            layers,
            seed=SEED,
            recompute=recompute,
            untie=True,
            inbound=ends[index],
            outbound=ends[index + 1],
            num_frozen_layers=num_frozen_layers,
            lora=lora,
        )
        for index, layers in enumerate(
            agreed.stage_layers if agreed.layers else split_layers(plan.num_layers, num_stages)
        )
    ]


def make_optimizer(stage: Stage, max_norm: float | None, **options: Any) -> Optimizer:
    return Optimizer(
        stage.parameters_by_name(),
        schedule=SCHEDULE,
        weight_decay=WEIGHT_DECAY,
        max_norm=max_norm,
        **options,
    )
