"""What the stages of a case are: ones that sleep, or those of a real model on the device at hand."""

from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from sleeping import Nap, Same, SleepingStage, same_tokens

from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch
from isthmus.plan.costs import Precision
from isthmus.train.profiling import Size

WIDTH: Final = 1024


class Stages(Protocol):
    """The stages of a pipeline; small and picklable, for each process builds its own."""

    @property
    def num_stages(self) -> int:
        """How many there are."""

    @property
    def is_equal(self) -> bool:
        """Whether all take the same time."""

    @property
    def device(self) -> str:
        """What they run on, as a job names it."""

    @property
    def size(self) -> Size:
        """One micro-batch."""

    def build(self, index: int) -> Any:
        """The stage of that number."""

    def source(self, num_microbatches: int) -> Same:
        """Where the first stage gets its micro-batches from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepingStages:
    """Stages that sleep; what crosses has the size that it would have."""

    naps: tuple[Nap, ...]
    num_tokens: int
    width: int = WIDTH

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return len(self.naps)

    @property
    def is_equal(self) -> bool:
        """Whether all sleep as long."""
        return len(set(self.naps)) == 1

    @property
    def device(self) -> str:
        """None is used."""
        return "cpu"

    @property
    def size(self) -> Size:
        """One sequence."""
        return Size(num_sequences=1, sequence_length=self.num_tokens, precision=Precision.FLOAT32)

    def build(self, index: int) -> SleepingStage:
        """The stage of that number."""
        return SleepingStage(
            self.naps[index],
            num_tokens=self.num_tokens,
            width=self.width,
            is_first=index == 0,
            is_last=index == self.num_stages - 1,
        )

    def source(self, num_microbatches: int) -> Same:
        """The same token over and over."""
        return same_tokens(self.num_tokens, num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStages:
    """Stages of a Llama-like model in bfloat16, large enough to keep a GPU busy while the host waits."""

    num_layers: tuple[int, ...]
    num_tokens: int = 2048
    width: int = 2048
    vocabulary_size: int = 8192
    device: str = "auto"

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return len(self.num_layers)

    @property
    def is_equal(self) -> bool:
        """Whether all have as many layers."""
        return len(set(self.num_layers)) == 1

    @property
    def size(self) -> Size:
        """One sequence."""
        return Size(num_sequences=1, sequence_length=self.num_tokens, precision=Precision.BFLOAT16)

    def build(self, index: int) -> Any:
        """The stage of that number."""
        start = sum(self.num_layers[:index])
        layers = range(start, start + self.num_layers[index])
        config = {
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": 11 * self.width // 4,
            "num_hidden_layers": sum(self.num_layers),
            "num_attention_heads": max(1, self.width // 64),
            "num_key_value_heads": max(1, self.width // 128),
            "vocab_size": self.vocabulary_size,
        }
        return build_stage(fresh_blueprint(config, head=HEADS["causal-lm"]), layers, seed=0)

    def source(self, num_microbatches: int) -> Same:
        """One sequence of tokens drawn at random."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary_size, (1, self.num_tokens), generator=generator)
        num_targets = HEADS["causal-lm"].num_targets(ids)
        return Same(Batch(ids=ids, labels=ids, num_targets=num_targets), num_microbatches)
