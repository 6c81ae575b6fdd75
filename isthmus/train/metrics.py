"""What a task is judged by beside its loss: BLEU, or accuracy, F1 and Matthews.

    EVALUATE   keep      what a micro-batch gives; nothing is read from the device
    SCORE      counts    of all that was kept; here texts are translated
               metrics   from the counts of all ranks together

The last stage judges in each evaluation, and the first cloud judges the exported model in the same way.
"""

import importlib.util
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.hub import GENERATION_FILE, find_file
from isthmus.model.encoder_decoder import generate_from
from isthmus.model.heads import HEADS, IGNORED
from isthmus.model.modeling_bottleneck import BottleneckModel
from isthmus.model.stage import Batch, Stage
from isthmus.train.data.tokenizer import load_tokenizer, trains_tokenizer

_OF_TASKS: Final = {
    "translation": ("loss", "accuracy", "bleu"),
    "sequence-classification": ("loss", "accuracy", "f1", "matthews"),
}
_NO_SACREBLEU: Final = "BLEU is not known without sacrebleu"
_INSTALL: Final = "pip install '.[metrics]' in the clone of isthmus"
_MAX_TOKENIZER_CHARACTERS: Final = 4 * 2**20


class Judge(Protocol):
    """Judges an evaluation by more than its loss."""

    def keep(self, scores: Tensor, memory: Tensor | None, batch: Batch, *, number: int) -> Any:
        """What is kept of the so many-th micro-batch, on the device; None for nothing."""

    def counts(self, kept: Sequence[Any]) -> tuple[int, ...]:
        """The counts that metrics follow from."""

    def metrics(self, counts: Sequence[int]) -> dict[str, float]:
        """The metrics by name."""


class Classes:
    """Counts how many texts of each class (rows) were taken for each class (columns)."""

    def keep(self, scores: Tensor, memory: Tensor | None, batch: Batch, *, number: int) -> Tensor:  # noqa: ARG002
        num_classes = scores.shape[-1]
        if batch.labels is None:
            raise ValueError("classes are counted by their labels")
        labels = batch.labels.to(scores.device)
        places = labels.clamp(min=0) * num_classes + scores.argmax(-1)
        return places.new_zeros(num_classes**2).scatter_add(0, places, (labels != IGNORED).long())

    def counts(self, kept: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(torch.stack([*kept]).sum(0).tolist()) if kept else ()

    def metrics(self, counts: Sequence[int]) -> dict[str, float]:
        confused = torch.tensor(counts).view(2 * (math.isqrt(len(counts)),))
        accuracy = int(confused.trace()) / max(int(confused.sum()), 1)
        return {"accuracy": accuracy, "f1": f1(confused), "matthews": matthews(confused)}


class _Memory(NamedTuple):
    """The encoder's output for a micro-batch, with its mask, and the translations that are meant."""

    memory: Tensor
    mask: Tensor | None
    labels: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Translations:
    """Translates from memories that have arrived, and compares by sacrebleu."""

    generate: Callable[..., Tensor]
    tokenizer: Any
    num_beams: int = 1
    max_texts: int = 500

    def keep(self, scores: Tensor, memory: Tensor | None, batch: Batch, *, number: int) -> _Memory | None:  # noqa: ARG002
        if memory is None or batch.labels is None or number * len(batch.ids) >= self.max_texts:
            return None
        mask = None if batch.mask is None else batch.mask.to(memory.device)
        return _Memory(memory, mask, batch.labels)

    def counts(self, kept: Sequence[_Memory]) -> tuple[int, ...]:
        pad_id = self.tokenizer.pad_token_id
        said, meant = list[str](), list[str]()
        for memory, mask, labels in kept:
            most = 2 * labels.shape[1] + 8
            ids = self.generate(memory, mask, max_new_tokens=most, num_beams=self.num_beams)
            said += self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            wanted = labels.masked_fill(labels == IGNORED, pad_id)
            meant += self.tokenizer.batch_decode(wanted, skip_special_tokens=True)
        if not said:
            return ()
        score = _sacrebleu().BLEU().corpus_score(said, [meant])
        return (len(said), score.sys_len, score.ref_len, *score.counts, *score.totals)

    def metrics(self, counts: Sequence[int]) -> dict[str, float]:
        if not counts:
            return {}
        _, said, meant, *ngrams = counts
        correct, total = ngrams[: len(ngrams) // 2], ngrams[len(ngrams) // 2 :]
        score = _sacrebleu().BLEU.compute_bleu(correct, total, said, meant, smooth_method="exp").score
        return {"bleu": float(score)}


def _sacrebleu() -> Any:
    return importlib.import_module("sacrebleu.metrics")


def _has_sacrebleu() -> bool:
    return importlib.util.find_spec("sacrebleu") is not None


def added(counts: Sequence[Sequence[int]]) -> list[int]:
    """The counts of all ranks together; one that has judged nothing has none."""
    return [sum(each) for each in zip(*filter(None, counts), strict=True)]


# The exported model.


@torch.no_grad()
def describe_metrics(model: PreTrainedModel, batches: Sequence[Batch], *, job: Job, tokenizer: Any) -> str:
    """Name the metrics of an exported model; empty for a task that is judged by its loss."""
    match job.given_data.task:
        case "translation" if job.train.evaluate_texts:
            return _bleu(model, batches, job, tokenizer)
        case "sequence-classification":
            classes = Classes()
            kept = [classes.keep(model(**one.arguments()).logits, None, one, number=0) for one in batches]
            found = classes.metrics(classes.counts(kept))
            return "accuracy {accuracy:.4f}, F1 {f1:.4f}, Matthews {matthews:.4f}".format(**found)
    return ""


def _bleu(model: PreTrainedModel, batches: Sequence[Batch], job: Job, tokenizer: Any) -> str:
    if not _has_sacrebleu():
        return f"{_NO_SACREBLEU}: {_INSTALL}"
    judge = Translations(
        generate=lambda memory, mask, **options: generate_from(model, memory, mask, **options),
        tokenizer=tokenizer,
        num_beams=job.train.evaluate_beams,
        max_texts=job.train.evaluate_texts,
    )
    inner = model.inner if isinstance(model, BottleneckModel) else model
    kept = []
    for number, batch in enumerate(batches):
        memory = inner.get_encoder()(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
        if found := judge.keep(memory, memory, batch, number=number):
            kept.append(found)
    counts = judge.counts(kept)
    metric = _sacrebleu().BLEU()
    metric.corpus_score(["text"], [["text"]])  # a signature needs to know how many references there are
    return f"BLEU {judge.metrics(counts)['bleu']:.2f} on {counts[0]} texts ({metric.get_signature()})"


# What a job asks for.


def check_best(job: Job) -> None:
    """Refuse to keep the best weights by what is never known."""
    metric = job.train.keep_best
    if metric is None:
        return
    data = job.given_data
    if job.strategy.kind not in ("auto", "pipeline"):
        raise UserError(
            f"train.keep_best is known to pipelines alone, not to {job.strategy.kind!r}",
            hint="leave train.keep_best out",
        )
    known = _OF_TASKS.get(data.task, ("loss", "accuracy"))
    if metric not in known:
        raise UserError(
            f"{data.task} is not judged by {metric!r}",
            hint=f"set train.keep_best to {' or '.join(map(repr, known))}",
        )
    if metric == "bleu" and not job.train.evaluate_texts:
        raise UserError("no text is translated, so that no BLEU is known", hint="set train.evaluate_texts")
    if data.validation_source is None and data.validation_share == 0:
        raise UserError(
            "nothing is held out, so that no weights are known to be the best",
            hint="set data.validation_share or data.validation_source",
        )


def why_not_translated(layers: range, num_encoder_layers: int, *, is_sharded: bool) -> str | None:
    """Why a last stage of these layers translates nothing in evaluations, if so."""
    if layers.start > num_encoder_layers:
        return "the layers of the decoder lie in several clouds"
    return "its ranks shard every layer of the decoder" if is_sharded else None


def refused(reason: str) -> UserError:
    """The error for weights that are to be kept by their BLEU, where no BLEU is known."""
    return UserError(
        f"the last cloud translates nothing in evaluations: {reason}",
        hint='give all layers of the decoder to the last cloud, or set train.keep_best = "loss"',
    )


def judge_of(job: Job, stage: Stage, *, files: Mapping[str, str], is_sharded: bool) -> Judge | str | None:
    """What judges evaluations at a stage, or why nothing does; None where the loss says all."""
    if not stage.is_last or not job.train.evaluate_every:
        return None
    if stage.head is HEADS["sequence-classification"]:
        return Classes()
    if stage.family.decoder is None or not job.train.evaluate_texts:
        return None
    reason = why_not_translated(stage.layers, stage.family.decoder.start, is_sharded=is_sharded)
    if reason is None and not _has_sacrebleu():
        reason = f"{_NO_SACREBLEU}: {_INSTALL}"
    if reason is None and not files and trains_tokenizer(job.given_data, job.given_model):
        reason = "the tokenizer that was trained is too large to be sent: name one in data.tokenizer"
    if reason is not None:
        if job.train.keep_best == "bleu":
            raise refused(reason)
        return f"evaluations have no BLEU: {reason}"
    _take_generation_config(job, stage.model)
    return Translations(
        generate=stage.generate,
        tokenizer=_open_tokenizer(job, files),
        num_beams=job.train.evaluate_beams,
        max_texts=job.train.evaluate_texts,
    )


def _take_generation_config(job: Job, model: Any) -> None:
    """Generate as the exported model will, which has the file of the model that it began as."""
    source = None if job.given_model.abnet is not None else job.given_model.source
    file = None if source is None else find_file(source, GENERATION_FILE)
    if file is not None:
        model.generation_config = GenerationConfig.from_pretrained(file.parent)


def tokenizer_files(job: Job, tokenizer: Any) -> dict[str, str]:
    """The files of a tokenizer that was trained on the data, for the cloud that translates; else none."""
    if not (job.given_data.task == "translation" and trains_tokenizer(job.given_data, job.given_model)):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {file.name: file.read_text(encoding="utf-8") for file in Path(folder).iterdir()}
    return files if sum(map(len, files.values())) <= _MAX_TOKENIZER_CHARACTERS else {}


def _open_tokenizer(job: Job, files: Mapping[str, str]) -> Any:
    data, model = job.given_data, job.given_model
    if not files:
        name = model.source if data.tokenizer == "auto" else data.tokenizer
        return load_tokenizer(str(name), trust_remote_code=model.trust_remote_code)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / Path(name).name).write_text(text, encoding="utf-8")
        return load_tokenizer(folder)


# The figures themselves.


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
