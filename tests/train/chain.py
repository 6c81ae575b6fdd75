"""A pipeline of stages in one process: a thread for each, joined by links in memory."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from isthmus.events import Span
from isthmus.job.boundary import HiddenSpec
from isthmus.job.lora import LoraSpec
from isthmus.model.anatomy import split_layers
from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import Blueprint
from isthmus.model.boundary import Batch, StageOutput
from isthmus.model.stage import Stage
from isthmus.plan.ladder import Pair
from isthmus.train.checkpoint import State
from isthmus.train.course import Course, Post
from isthmus.train.crossing.bench import Measured
from isthmus.train.crossing.traffic import Traffic
from isthmus.train.crossing.words import Evaluated, Tally
from isthmus.train.device import Device
from isthmus.train.observer import StepEnded
from isthmus.train.optimize.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import pipeline_worker
from isthmus.wan.memory import MemoryLink
from isthmus.wan.relays.shaping import Shape
from tests.model.cases import SEED

CLOUDS = ("north", "east", "south", "west")
SCHEDULE = Schedule(peak=3e-3, num_steps=5, num_warmup_steps=2)
WEIGHT_DECAY = 0.1


@dataclass
class Record:
    """An observer that remembers."""

    spans: list[Span] = field(default_factory=list)
    steps: list[StepEnded] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    measurements: list[Measured] = field(default_factory=list)
    on_step: Callable[[StepEnded], None] = lambda _: None

    def span(self, span: Span) -> None:
        self.spans.append(span)

    def measured(self, found: Measured) -> None:
        self.measurements.append(found)

    def step_ended(self, ended: StepEnded) -> None:
        self.steps.append(ended)
        self.on_step(ended)

    def evaluated(self, found: Evaluated) -> None:
        self.evaluations.append(found)


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
        self.loss = output.loss
        self.num_correct = output.num_correct

    def backward(self, *, grad: Tensor | None = None, loss_weight: float = 1.0) -> None:
        with self.lock:
            self.output.backward(grad=grad, loss_weight=loss_weight)


@dataclass
class Chain:
    """Stages with their optimizers, ready to run."""

    course: Course
    stages: list[Stage]
    optimizers: list[Optimizer]
    links: list[MemoryLink]
    records: list[Record]
    traffics: dict[int, Traffic] = field(default_factory=dict)
    courses: Mapping[int, Course] = field(default_factory=dict)
    device: str = "cpu"

    def run(
        self,
        source: Given,
        *,
        first_step: int = 0,
        autocast: torch.dtype | None = None,
        states: Sequence[State] = (),
        steer: Callable[[Tally], tuple[Pair, ...]] = lambda _: (),
        courses: Mapping[int, Course] | None = None,
    ) -> None:
        self.courses = courses or {}
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
        states: Sequence[State],
        steer: Callable[[Tally], tuple[Pair, ...]],
    ) -> None:
        stage: Any = TakingTurns(self.stages[index], lock)
        worker, traffic = pipeline_worker(
            course=self.courses.get(index, self.course),
            post=Post(
                cloud=CLOUDS[index],
                index=index,
                up=self._link(index - 1, index),
                down=self._link(index, index),
            ),
            stage=stage,
            optimizer=self.optimizers[index],
            device=Device(self.device),
            source=source if index == 0 else None,
            observer=self.records[index],
            autocast=autocast,
            should_save=lambda _: True,
            steer=steer,
        )
        self.traffics[index] = traffic
        if states:
            traffic.restore(states[index].cuts, step=first_step)
        try:
            with traffic:
                worker.run(self.course.turns(first_step))
        except BaseException as error:
            for number, link in enumerate(self.links):
                for name in link_ends(number):
                    link.end(name).abort(repr(error))
            raise

    def _link(self, number: int, index: int) -> Any:
        return self.links[number].end(CLOUDS[index]) if 0 <= number < len(self.links) else None


def link_ends(number: int) -> tuple[str, str]:
    return CLOUDS[number], CLOUDS[number + 1]


def course(num_stages: int, num_microbatches: int, **changes: Any) -> Course:
    values: dict[str, Any] = {"num_steps": 5, "seed": 11, "max_in_flight": 64, **changes}
    return Course(num_stages=num_stages, num_microbatches=num_microbatches, **values)


@contextmanager
def chain(
    plan: Blueprint,
    agreed: Course,
    *,
    shape: Shape | None = None,
    recompute: bool = False,
    max_norm: float | None = 0.5,
    num_frozen_layers: int = 0,
    device: str = "cpu",
) -> Iterator[Chain]:
    num_stages = agreed.num_stages
    stages = make_stages(plan, agreed, recompute=recompute, num_frozen_layers=num_frozen_layers)
    for stage in stages:
        stage.to(Device(device).torch_device)
    with ExitStack() as stack:
        links = [
            stack.enter_context(MemoryLink(CLOUDS[index], CLOUDS[index + 1], shape=shape))
            for index in range(num_stages - 1)
        ]
        yield Chain(
            course=agreed,
            stages=stages,
            optimizers=[make_optimizer(stage, max_norm) for stage in stages],
            links=links,
            records=[Record() for _ in stages],
            device=device,
        )


def make_stages(
    plan: Blueprint,
    agreed: Course,
    *,
    recompute: bool = False,
    num_frozen_layers: int = 0,
    lora: LoraSpec | None = None,
) -> list[Stage]:
    boundaries = [agreed.cut(number).boundary for number in range(agreed.num_stages - 1)]
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
        for index, layers in enumerate(split_layers(plan.num_layers, agreed.num_stages))
    ]


def make_optimizer(stage: Stage, max_norm: float | None, **options: Any) -> Optimizer:
    return Optimizer(
        stage.parameters_by_name(),
        schedule=SCHEDULE,
        weight_decay=WEIGHT_DECAY,
        max_norm=max_norm,
        **options,
    )
