"""The tasks a model can be trained for: transformers' class, its scores, and the target of each score."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

IGNORED: Final = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A task: transformers' class for it, the scores in its output, and the target that belongs to each."""

    name: str
    auto_class: Any
    scores: Callable[[Any], Tensor] = lambda output: output.logits
    """Of the model's output: one row of class scores per target, the classes last."""
    targets: Callable[[Tensor], Tensor] = lambda labels: labels
    """Of the labels: one class per row of scores, or IGNORED."""

    def prepare(self, model: PreTrainedModel) -> None:
        """Change what transformers' class has behind the layers, while nothing is in memory yet."""

    def num_targets(self, labels: Tensor) -> int:
        """How many targets count in the loss; losses of micro-batches are averaged by it."""
        return int((self.targets(labels) != IGNORED).sum())

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy in float32, summed over the targets that count."""
        targets = self.targets(labels)
        return F.cross_entropy(
            scores.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def num_correct(self, scores: Tensor, labels: Tensor) -> Tensor:
        """How many targets have the highest score."""
        return (scores.argmax(-1) == self.targets(labels)).sum()


def _span_logits(output: Any) -> Tensor:
    return torch.stack((output.start_logits, output.end_logits), dim=1)


def _next_tokens(labels: Tensor) -> Tensor:
    """Each position is scored against the label that follows it; the last has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


_HEADS: Final = (
    Head(name="causal-lm", auto_class=AutoModelForCausalLM, targets=_next_tokens),
    Head(name="masked-lm", auto_class=AutoModelForMaskedLM),
    Head(name="sequence-classification", auto_class=AutoModelForSequenceClassification),
    Head(name="token-classification", auto_class=AutoModelForTokenClassification),
    Head(name="question-answering", auto_class=AutoModelForQuestionAnswering, scores=_span_logits),
    Head(name="translation", auto_class=AutoModelForSeq2SeqLM),
)
HEADS: Final[Mapping[str, Head]] = MappingProxyType({head.name: head for head in _HEADS})


class _Detector(nn.Linear):
    """The logit, behind a dense layer; the names of its own weights are those of transformers' classifier."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        self.dense = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(F.gelu(self.dense(hidden)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionHead(Head):
    """Tells whether a token was replaced (1) or is the original (0): dense, activation, one logit."""

    def prepare(self, model: PreTrainedModel) -> None:
        for name, module in model.named_children():
            if isinstance(module, nn.Linear) and module.out_features == 1:
                setattr(model, name, _Detector(module.in_features))

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropy in float32, summed over all tokens but padding."""
        counts = labels != IGNORED
        logits, targets = scores.squeeze(-1)[counts].float(), labels[counts].float()
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")

    def num_correct(self, scores: Tensor, labels: Tensor) -> Tensor:
        return ((scores.squeeze(-1) > 0) == labels.bool())[labels != IGNORED].sum()


DETECTION: Final = DetectionHead(name="replaced-token-detection", auto_class=AutoModelForTokenClassification)
"""What a discriminator learns; no data set has its labels, so no job names it as its task."""
