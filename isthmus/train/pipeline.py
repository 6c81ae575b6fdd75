"""The pipeline strategy: who does what at one stage of one cloud, put together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from isthmus.model.stage import Stage
from isthmus.plan.pipeline import PipelineScheduler, Policy
from isthmus.plan.types import Event, Started
from isthmus.plan.window import Hop, windows
from isthmus.train.courier import Mailbox
from isthmus.train.device import Device
from isthmus.train.optimizer import Optimizer
from isthmus.train.passes import Passes
from isthmus.train.settlement import Settlement, Terms
from isthmus.train.traffic import Delivery, Traffic
from isthmus.train.worker import Observer, Source, Worker
from isthmus.wan.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What all stages of a run must agree on."""

    num_stages: int
    num_steps: int
    num_microbatches: int
    seed: int
    max_in_flight: int
    policy: Policy = Policy.WAN_ONE_F_ONE_B
    evaluate_every: int | None = None
    num_validation_microbatches: int = 0
    keeps_padding: bool = False
    """Whether padding crosses too: experts sort tokens by kind, and padding that is zero changes the rows."""

    def turns(self, first_step: int = 0) -> Iterator[Started]:
        """Every step, an evaluation after each so many, and one at the end."""
        for step in range(first_step, self.num_steps):
            if self._evaluates_before(step) and step > first_step:
                yield self._evaluation(step)
            yield Started(step=step, microbatches=tuple(range(self.num_microbatches)))
        if self.evaluate_every and self.num_validation_microbatches:
            yield self._evaluation(self.num_steps)

    def _evaluates_before(self, step: int) -> bool:
        if not self.evaluate_every or not self.num_validation_microbatches:
            return False
        return step % self.evaluate_every == 0

    def _evaluation(self, step: int) -> Started:
        numbers = tuple(range(self.num_validation_microbatches))
        return Started(step=step, microbatches=numbers, evaluation=True)

    def first_windows(self) -> tuple[int, ...]:
        """Windows before anything is measured: as if a message took as long as a pass."""
        hop = Hop(forward_s=0.25, backward_s=0.25, latency_s=0.0)
        return windows(
            policy=self.policy,
            num_microbatches=self.num_microbatches,
            hops=[hop] * (self.num_stages - 1),
            interval_s=1.0,
            max_in_flight=[self.max_in_flight] * self.num_stages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Where a stage stands: its cloud, its number, and the links to the stages before and behind it."""

    cloud: str
    index: int
    up: Link | None
    down: Link | None


def pipeline_worker(
    *,
    course: Course,
    post: Post,
    stage: Stage,
    optimizer: Optimizer,
    device: Device,
    source: Source | None,
    observer: Observer,
    autocast: torch.dtype | None = None,
    should_save: Callable[[int], bool] = lambda _: False,
) -> tuple[Worker, Traffic]:
    """The worker of one stage, and its traffic, within which it runs."""
    window = course.first_windows()[post.index]
    events: Mailbox[Event | Delivery] = Mailbox()
    terms = Terms(
        num_microbatches=course.num_microbatches,
        max_in_flight=course.max_in_flight,
        policy=course.policy,
        should_save=should_save,
    )
    settlement = Settlement(terms=terms)
    traffic = Traffic(
        cloud=post.cloud,
        up=post.up,
        down=post.down,
        events=events,
        settlement=settlement,
        device=device,
        width=stage.model.config.hidden_size,
        keeps_padding=course.keeps_padding,
        on_span=observer.span,
        on_evaluated=observer.evaluated,
    )
    worker = Worker(
        cloud=post.cloud,
        index=post.index,
        passes=Passes(stage, device=device.torch_device, seed=course.seed, autocast=autocast),
        optimizer=optimizer,
        scheduler=PipelineScheduler(
            stage=post.index, num_stages=course.num_stages, policy=course.policy, window=window
        ),
        window=window,
        settlement=settlement,
        traffic=traffic,
        events=events,
        device=device,
        source=source,
        observer=observer,
    )
    return worker, traffic
