"""What a task is judged by, of an exported model on held-out data: BLEU, or accuracy, F1 and Matthews."""

import importlib
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from isthmus.model.heads import HEADS, IGNORED, Head
from isthmus.model.stage import Batch

_MAX_SENTENCES: Final = 500


def describe_metrics(model: PreTrainedModel, batches: Sequence[Batch], *, head: Head, tokenizer: Any) -> str:
    """Name the metrics of a task with their values; empty for a task that is judged by its loss."""
    if head is HEADS["translation"]:
        return _bleu(model, batches, tokenizer)
    if head is HEADS["sequence-classification"]:
        return _classified(_confusion(model, batches))
    return ""


@torch.no_grad()
def _bleu(model: PreTrainedModel, batches: Sequence[Batch], tokenizer: Any) -> str:
    """BLEU of what the model says greedily, by sacrebleu."""
    try:
        sacrebleu = importlib.import_module("sacrebleu")
    except ModuleNotFoundError:
        return "BLEU is not known without sacrebleu: pip install '.[metrics]' in the clone of isthmus"
    said: list[str] = []
    meant: list[str] = []
    generating: Any = model
    for batch in batches:
        if batch.labels is None or len(said) >= _MAX_SENTENCES:
            break
        length = 2 * batch.labels.shape[1] + 8
        ids = generating.generate(
            input_ids=batch.ids,
            attention_mask=torch.ones_like(batch.ids) if batch.mask is None else batch.mask,
            max_new_tokens=length,
            num_beams=1,
            do_sample=False,
        )
        labels = batch.labels.masked_fill(batch.labels == IGNORED, tokenizer.pad_token_id)
        said += tokenizer.batch_decode(ids, skip_special_tokens=True)
        meant += tokenizer.batch_decode(labels, skip_special_tokens=True)
    metric = sacrebleu.metrics.BLEU()
    score = metric.corpus_score(said, [meant]).score
    return f"BLEU {score:.2f} on {len(said)} texts ({metric.get_signature()})"


@torch.no_grad()
def _confusion(model: PreTrainedModel, batches: Sequence[Batch]) -> Tensor:
    """How many texts of each class (rows) were taken for each class (columns)."""
    found = torch.zeros(0, 0, dtype=torch.int64)
    for batch in batches:
        if batch.labels is not None:
            logits, counts = model(**batch.arguments()).logits, batch.labels != IGNORED
            found = found if len(found) else found.new_zeros(2 * logits.shape[-1:])
            places = batch.labels[counts].cpu(), logits.argmax(-1)[counts].cpu()
            found.index_put_(places, torch.ones_like(places[0]), accumulate=True)
    return found


def _classified(found: Tensor) -> str:
    accuracy = float(found.trace() / found.sum().clamp(min=1))
    return f"accuracy {accuracy:.4f}, F1 {f1(found):.4f}, Matthews {matthews(found):.4f}"


def f1(confused: Tensor) -> float:
    """Of class 1 where there are two classes, else the mean of all classes."""
    both = confused.sum(0) + confused.sum(1)
    scores = 2 * confused.diagonal() / both.clamp(min=1)
    return float(scores[1] if len(scores) == 2 else scores.mean())


def matthews(confused: Tensor) -> float:
    """The correlation of classes and guesses; 0 where either is always the same."""
    total, meant, guessed = int(confused.sum()), confused.sum(1).double(), confused.sum(0).double()
    covariance = total * float(confused.trace()) - float(meant @ guessed)
    spread = (total**2 - float(meant @ meant)) * (total**2 - float(guessed @ guessed))
    return covariance / math.sqrt(spread) if spread > 0 else 0.0
