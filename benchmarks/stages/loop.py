"""The measured stage: Isthmus' worker at a first stage, before a far end that takes no time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isthmus.events import Span
from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.boundary import Batch
from isthmus.model.heads import HEADS
from isthmus.plan.ladder import Pair
from isthmus.plan.types import Started
from isthmus.train.course import Course, Post
from isthmus.train.crossing.bench import Measured
from isthmus.train.crossing.cut import Cut
from isthmus.train.crossing.words import Evaluated
from isthmus.train.device import Device
from isthmus.train.observer import StepEnded
from isthmus.train.optimize.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import pipeline_worker
from isthmus.train.ranks.sharding import ShardedReduction, shard
from isthmus.train.ranks.world import Alone
from stages.far_end import FarEnd, coded_gradient
from stages.watched import WatchedDevice

WINDOW = 2
SEED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The stage, and what passes through it in a step."""

    width: int
    num_layers: int
    vocabulary_size: int
    num_sequences: int
    length: int
    num_microbatches: int

    def config(self, num_layers: int) -> dict[str, Any]:
        """As transformers takes it."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocabulary_size,
            "hidden_size": self.width,
            "intermediate_size": self.width * 11 // 4,
            "num_hidden_layers": num_layers,
            "num_attention_heads": max(1, self.width // 128),
            "num_key_value_heads": max(1, self.width // 128),
            "max_position_embeddings": self.length,
        }

    @property
    def num_tokens(self) -> int:
        """Of a step."""
        return self.num_microbatches * self.num_sequences * self.length

    @property
    def flops_per_token(self) -> float:
        """Forward and backward of the products alone; attention looks back only, so half the pairs count."""
        per_layer = 4 * self.width**2 + 3 * self.width * (self.width * 11 // 4)
        return self.num_layers * (6 * per_layer + 6 * self.width * self.length)


@dataclass(slots=True)
class Watcher:
    """An observer of the worker that keeps the spans."""

    spans: list[Span] = field(default_factory=list)

    def span(self, span: Span) -> None:
        """Keep it."""
        self.spans.append(span)

    def measured(self, found: Measured) -> None:
        """Nothing to do."""

    def step_ended(self, ended: StepEnded) -> None:
        """Nothing to do."""

    def evaluated(self, found: Evaluated) -> None:
        """Nothing to do."""


class Given:
    """The same micro-batches in each step."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def training(self, step: int) -> Sequence[Batch]:  # noqa: ARG002
        """Of any step."""
        return self._batches

    def validation(self) -> Sequence[Batch]:
        """None."""
        return ()


class StageLoop:
    """Isthmus' worker at a first stage, before a far end that takes no time."""

    def __init__(
        self, scale: Scale, device: Device, pair: Pair, ids: Sequence[Tensor], *, is_sharded: bool
    ) -> None:
        blueprint = fresh_blueprint(scale.config(scale.num_layers + 1), head=HEADS["causal-lm"])
        self.stage = build_stage(blueprint, range(scale.num_layers), seed=SEED).to(device.torch_device)
        if is_sharded:
            shard(self.stage, device=device.torch_device, num_ranks=1, compute_dtype=torch.bfloat16)
        self.watcher = Watcher()
        self.device = WatchedDevice(device)
        num_rows = scale.num_sequences * scale.length
        dtype = torch.bfloat16 if is_sharded else torch.float32
        gradient = coded_gradient(
            pair, num_rows=num_rows, width=scale.width, dtype=dtype, device=device.torch_device
        )
        far_end = FarEnd(gradient, num_microbatches=scale.num_microbatches, on_span=self.watcher.span)
        post: Any = Post(cloud="here", index=0, up=None, down=far_end)  # type: ignore[arg-type]
        self._worker, self._traffic = pipeline_worker(
            course=Course(
                num_stages=2,
                num_steps=10**6,
                num_microbatches=scale.num_microbatches,
                seed=SEED,
                max_in_flight=WINDOW,
                cuts=(Cut(codecs=pair),),
            ),
            post=post,
            stage=self.stage,
            optimizer=Optimizer(
                self.stage.parameters_by_name(), schedule=Schedule(peak=1e-5, num_steps=10**6), max_norm=1.0
            ),
            device=self.device,  # type: ignore[arg-type]
            source=Given([Batch(ids=one, num_targets=one.numel()) for one in ids]),
            observer=self.watcher,
            autocast=None if is_sharded else torch.bfloat16,
            reduction=ShardedReduction(Alone(), self.stage) if is_sharded else None,
        )
        self._numbers = tuple(range(scale.num_microbatches))
        self._next_step = 0

    def run(self, num_steps: int) -> None:
        """Take some steps."""
        steps = range(self._next_step, self._next_step + num_steps)
        self._next_step = steps.stop
        self._worker.run(Started(step=step, microbatches=self._numbers) for step in steps)

    def close(self) -> None:
        """End the threads."""
        self._traffic.__exit__(None, None, None)
