"""The data of a run, made ready from its job: what is read, by which tokenizer, in which order.

The way through: `corpus` (rows) → `tokens` (tokenizer) → `recipe` and `tasks` (samples) → `token_files` →
`order` and `batches` (steps) → `prefetch`. Only the cloud of the first stage opens the data; `facts` go to
the others.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from isthmus.errors import UserError
from isthmus.job import DataSpec, Job, ModelSpec
from isthmus.job.hub import GENERATION_FILE, find_file
from isthmus.job.load import replace_file
from isthmus.model.heads import HEADS, Head
from isthmus.model.stage import Batch
from isthmus.plan.costs import check_length
from isthmus.train.data.batches import (
    Layout,
    Prefetch,
    StepBatches,
    check_enough,
    read_once,
    read_steps,
    without_targets,
)
from isthmus.train.data.rows import Labels, Row, Split, open_rows, read_texts
from isthmus.train.data.samples import Arrays, Cursor, MaskedSamples, Order, Samples
from isthmus.train.data.token_files import Recipe, TokenFiles, content_digest, join
from isthmus.train.data.tokenizer import (
    choose_tokenizer,
    padding_id,
    read_limits,
    token_values,
    vocabulary_size,
)

_STEPS_AHEAD: Final = 2
_MOST_STEPS_AHEAD: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What every cloud must know of the data to build its stage; plain JSON values."""

    config: Mapping[str, object]
    """Values for a fresh model's configuration, beside those that the job gives."""
    label_names: tuple[str, ...] = ()
    """The classes in the order of their numbers, where the task has any."""

    @property
    def num_labels(self) -> int | None:
        """How many classes there are; None where the task has none."""
        return len(self.label_names) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """What a run reads."""

    samples: Samples
    validation: Samples | None
    tokenizer: Any
    facts: ModelFacts
    head: Head
    pad_id: int
    seed: int
    sha256: str
    """Of all tokens and labels, training and held out."""

    def steps(
        self,
        layout: Layout,
        *,
        cursor: Cursor | None = None,
        share: Callable[[int], Container[int]] | None = None,
        first_step: int = 0,
    ) -> Prefetch[StepBatches]:
        """Steps without end from the cursor on, made ahead on a thread that ends when this is closed.

        Of each step only the micro-batches in this rank's share, if it is given, are read.
        """
        check_enough(self.samples, layout)
        steps = read_steps(
            self.samples,
            order=Order(num_samples=len(self.samples), seed=self.seed),
            layout=layout,
            head=self.head,
            pad_id=self.pad_id,
            cursor=cursor or Cursor(),
            share=share,
            first_step=first_step,
        )
        return Prefetch(steps, depth=_STEPS_AHEAD, max_depth=_MOST_STEPS_AHEAD)

    def validation_batches(self, *, num_sequences: int, multiple_of: int = 1) -> Iterator[Batch]:
        """The micro-batches of the validation split, the same each time; none where there is no split.

        For ranks that evaluate in step there are a few more, in which nothing counts.
        """
        if self.validation is None:
            return
        number = 0
        for batch in read_once(
            self.validation, num_sequences=num_sequences, head=self.head, pad_id=self.pad_id
        ):
            number += 1
            yield batch
        for _ in range(-number % multiple_of):
            yield without_targets(batch)


def open_data(job: Job, *, tokenizer_folder: Path, tokens: TokenFiles | None = None) -> TrainingData:
    """Read and tokenize all that the job trains on, or map the tokens where they are kept.

    The folder keeps what is exported with the weights.
    """
    if job.data is None or job.model is None:
        missing = "[data]" if job.data is None else "[model]"
        raise UserError(f"the job has no {missing} section", hint="docs/job.md shows what it holds")
    spec, model = job.data, job.model
    limits = read_limits(model)
    rows, held_out = _split(spec)
    texts = (text for row in rows for text in read_texts(row, spec))
    tokenizer = choose_tokenizer(spec, model, texts=texts, limits=limits, folder=tokenizer_folder)
    _keep_generation(model, tokenizer_folder)
    pad_id = padding_id(tokenizer, limits)
    check_length(spec.sequence_length, limits.max_length(pad_id))
    recipe = Recipe(spec=spec, tokenizer=tokenizer, rows=rows, held_out=held_out)
    arrays, sha256 = _arrays(recipe, tokens, tokenizer_folder)
    samples = _finished(recipe.samples(arrays, is_validation=False), recipe, seed=job.seed)
    validation = None
    if held_out is not None:
        # Runs of different seeds are evaluated on the same gaps.
        validation = _finished(recipe.samples(arrays, is_validation=True), recipe, seed=0)
    return TrainingData(
        samples=_filled(samples, spec.source),
        validation=None if validation is None else _held_out(validation, spec),
        tokenizer=tokenizer,
        facts=_facts(model, tokenizer, recipe.labels(arrays)),
        head=HEADS[spec.task],
        pad_id=pad_id,
        seed=job.seed,
        sha256=sha256,
    )


def _arrays(recipe: Recipe, tokens: TokenFiles | None, tokenizer_folder: Path) -> tuple[Arrays, str]:
    """The arrays and the digest of their content."""
    digest = recipe.digest(tokenizer_folder)
    if tokens is None or digest is None:
        arrays = join(recipe.make())
        return arrays, content_digest(arrays)
    arrays = tokens.get(digest, recipe.make)
    return arrays, tokens.content_digest(digest) or content_digest(arrays)


def _keep_generation(model: ModelSpec, folder: Path) -> None:
    """How a pretrained model generates; fetched at the start, since a hub may be out of reach at the end."""
    kept = folder / GENERATION_FILE
    path = None if model.source is None or kept.exists() else find_file(model.source, GENERATION_FILE)
    if path is not None:
        replace_file(kept, path.read_text())


def _finished(samples: Samples, recipe: Recipe, *, seed: int) -> Samples:
    """Samples with what is drawn anew in every epoch."""
    tokenizer = recipe.tokenizer
    if recipe.spec.task != "masked-lm":
        return samples
    if tokenizer.mask_token_id is None:
        raise UserError(
            "the tokenizer has no mask token, which masked-lm needs",
            hint="name one that has in data.tokenizer, or set task to causal-lm",
        )
    return MaskedSamples(
        samples=samples,
        seed=seed,
        mask_id=tokenizer.mask_token_id,
        special_ids=tuple(tokenizer.all_special_ids),
        num_tokens=vocabulary_size(tokenizer),
    )


def _split(spec: DataSpec) -> tuple[Iterable[Row], Iterable[Row] | None]:
    rows = open_rows(spec.source)
    if spec.validation_source is not None:
        return rows, open_rows(spec.validation_source)
    if spec.validation_share == 0:
        return rows, None
    every = round(1 / spec.validation_share)
    return (
        Split(rows=rows, every=every, is_held_out=False),
        Split(rows=rows, every=every, is_held_out=True),
    )


def _facts(model: ModelSpec, tokenizer: Any, labels: Labels) -> ModelFacts:
    config: dict[str, object] = {}
    if model.config is not None:
        config = token_values(tokenizer, model.config)
    return ModelFacts(config=config, label_names=labels.names)


def _filled(samples: Samples, source: str) -> Samples:
    if len(samples) == 0:
        raise UserError(
            f"{source!r} holds too little to train on: not one sequence",
            hint="give more data, or lower data.sequence_length",
        )
    return samples


def _held_out(samples: Samples, spec: DataSpec) -> Samples:
    if len(samples) > 0:
        return samples
    if spec.validation_source is not None:
        raise UserError(f"{spec.validation_source!r} holds nothing to evaluate on", hint="give more data")
    raise UserError(
        f"a validation share of {spec.validation_share} leaves nothing to evaluate on",
        hint="raise data.validation_share, name data.validation_source, or set the share to 0 for none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What of the data one rank of the first stage reads."""

    training: Callable[[int], Container[int]]
    """Its micro-batches of a step."""
    validation: Container[int]


class Feed:
    """The steps of a run from a cursor on, read ahead on a thread until it is closed."""

    def __init__(
        self,
        data: TrainingData,
        layout: Layout,
        *,
        cursor: Cursor | None = None,
        share: Share | None = None,
        first_step: int = 0,
        num_in_step: int = 1,
    ) -> None:
        training = None if share is None else share.training
        self._steps = data.steps(layout, cursor=cursor, share=training, first_step=first_step)
        held_out = enumerate(
            data.validation_batches(num_sequences=layout.num_sequences, multiple_of=num_in_step)
        )
        self._validation = tuple(
            batch for number, batch in held_out if share is None or number in share.validation
        )
        self._cursor = cursor or Cursor()
        self._step: int | None = None

    @property
    def cursor(self) -> Cursor:
        """Where a run goes on that has taken all steps read so far."""
        return self._cursor

    def training(self, step: int) -> Sequence[Batch]:
        """The micro-batches of a step; steps are read one after the other, the first may have any number."""
        if self._step is not None and step != self._step + 1:
            raise ValueError(f"step {step} is read after step {self._step}")
        batches = next(self._steps)
        self._step, self._cursor = step, batches.cursor
        return batches.microbatches

    def validation(self) -> Sequence[Batch]:
        """The micro-batches of every evaluation; none where nothing is held out."""
        return self._validation

    def close(self) -> None:
        """End the thread."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
