"""The measured stage: the product's scheduler, actor and wire at the first of two stages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from crossing import BEYOND, HERE
from member import Record, pipeline_config, pipeline_loop
from torch import Tensor

from isthmus.events import Span, steady_s
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch
from isthmus.plan.codecs import Crossing, Pair
from isthmus.train.in_cloud import Reduction, World, shard
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import PipelineConfig
from isthmus.wan.packet import Packet
from stages.watched import WatchedDevice

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

    @property
    def shape(self) -> tuple[int, int, int]:
        """The hidden states of a micro-batch."""
        return self.num_sequences, self.length, self.width

    def crossing(self, dtype: torch.dtype) -> Crossing:
        """What a micro-batch puts across."""
        num_rows = self.num_sequences * self.length
        return Crossing(num_rows=num_rows, width=self.width, element_bytes=dtype.itemsize)

    def run_config(self, pair: Pair, *, max_in_flight: int) -> PipelineConfig:
        """What both stages agree on; steps have no end but the one that is asked for."""
        return pipeline_config(
            (HERE.cloud, BEYOND.cloud),
            pair=pair,
            crossing=self.crossing(torch.float32),
            seed=SEED,
            num_steps=10**6,
            num_microbatches=self.num_microbatches,
            max_in_flight=max_in_flight,
        )


class TimedLink:
    """Tells how long each activation takes to be handed to a link."""

    def __init__(self, link: Any, record: Record) -> None:
        self._link = link
        self._record = record
        self.on_state: Any = None
        self.peer = BEYOND
        self.receive_any = link.receive_any
        self.counters = link.counters

    def send(self, stream: str, packet: Packet, **options: Any) -> int:
        """Hand a packet to the link."""
        started_s = steady_s()
        num_bytes: int = self._link.send(stream, packet, **options)
        if stream == "forward":
            name = f"send {packet.header['step']}.{packet.header['item']}"
            span = Span(track="send", name=name, kind="transfer", start_s=started_s, end_s=steady_s())
            self._record.span(span)
        return num_bytes


@dataclass(slots=True)
class Scripted:
    """A source of the same micro-batches in every step, each of which waits for the next turn of a script."""

    batches: Sequence[Batch]
    script: Iterator[object]
    loop: Any = field(default=None)

    def training(self, step: int) -> Sequence[Batch]:  # noqa: ARG002
        """Let the script run to its next yield; a step behind its end is the last."""
        if next(self.script, self) is self:
            self.loop.interrupt("the script has ended")
        return self.batches

    def validation(self) -> Sequence[Batch]:
        """None."""
        return ()


class StageLoop:
    """A stage with its optimizer, which takes steps when a script says so."""

    def __init__(
        self, scale: Scale, device: WatchedDevice, ids: Sequence[Tensor], *, is_sharded: bool
    ) -> None:
        blueprint = fresh_blueprint(scale.config(scale.num_layers + 1), head=HEADS["causal-lm"])
        self.stage = build_stage(blueprint, range(scale.num_layers), seed=SEED).to(device.torch_device)
        if is_sharded:
            shard(self.stage, device=device.torch_device, num_ranks=1, compute_dtype=torch.bfloat16)
        self.record = Record()
        self.device = device
        self._batches = [Batch(ids=one, num_targets=one.numel()) for one in ids]
        self._options: dict[str, Any] = {
            "optimizer": Optimizer(
                self.stage.parameters_by_name(), schedule=Schedule(peak=1e-5, num_steps=10**6), max_norm=1.0
            ),
            "autocast": None if is_sharded else torch.bfloat16,
            "reduction": Reduction(World(), self.stage, sharding="optimizer") if is_sharded else None,
        }

    def run(self, config: PipelineConfig, link: Any, script: Iterator[object]) -> None:
        """Take a step at each yield of a script, and one more when it has ended."""
        source = Scripted(self._batches, script)
        links: dict[str, Any] = {BEYOND.cloud: TimedLink(link, self.record)}
        with pipeline_loop(
            config,
            HERE.cloud,
            links,
            stage=self.stage,
            device=self.device,
            record=self.record,
            source=source,
            **self._options,
        ) as loop:
            source.loop = loop
            loop.run()
