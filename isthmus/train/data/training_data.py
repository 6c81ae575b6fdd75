"""Opens the data of a run: rows → tokenizer → samples → token files → micro-batches of each step.

Only the cloud of the first stage opens the data; the others get `ModelFacts`.
"""

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from isthmus.errors import UserError
from isthmus.job import DataSpec, Job, ModelSpec
from isthmus.job.hub import GENERATION_FILE, find_file
from isthmus.job.load import replace_file
from isthmus.model.heads import HEADS, IGNORED, Head
from isthmus.model.stage import Batch
from isthmus.plan.costs import check_length
from isthmus.train.data.rows import Rows, key_of, open_rows, read_texts, split_rows
from isthmus.train.data.samples import (
    Arrays,
    Integers,
    LabelledSequence,
    MaskedSamples,
    Order,
    Pick,
    Recipe,
    Samples,
)
from isthmus.train.data.token_files import TokenFiles, in_memory
from isthmus.train.data.tokenizer import (
    check_decoder,
    choose_tokenizer,
    ids_of_encoder,
    padding_id,
    read_limits,
    token_values,
    vocabulary_size,
)

_STEPS_AHEAD: Final = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The number of micro-batches of a step, and of sequences in each."""

    num_microbatches: int
    num_sequences: int

    @property
    def step_sequences(self) -> int:
        return self.num_microbatches * self.num_sequences


def divide_batch(*, batch_tokens: int, sequence_length: int, num_microbatches: int) -> Layout:
    """Divide the tokens of a step into micro-batches of whole sequences, or refuse."""
    unit = sequence_length * num_microbatches
    if batch_tokens % unit:
        parts = [f"{num_microbatches} micro-batches", f"sequences of {sequence_length} tokens"]
        near = max(unit, round(batch_tokens / unit) * unit)
        raise UserError(
            f"a batch of {batch_tokens} tokens cannot be divided into {' × '.join(parts)}",
            hint=f"set train.batch_tokens to a multiple of {unit}, such as {near}",
        )
    return Layout(num_microbatches=num_microbatches, num_sequences=batch_tokens // unit)


def check_enough(samples: Samples, layout: Layout) -> None:
    """Refuse data that cannot fill one step."""
    if len(samples) < layout.step_sequences:
        raise UserError(
            f"the data has {len(samples)} sequences to train on, but one step reads {layout.step_sequences}",
            hint="give more data, or lower train.batch_tokens or data.sequence_length",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What every cloud needs to know about the data to build its stage; JSON values."""

    config: Mapping[str, object]
    """Values for a fresh model's configuration that the job does not give."""
    label_names: tuple[str, ...] = ()
    """The classes in the order of their numbers; empty for tasks without classes."""

    @property
    def num_labels(self) -> int | None:
        return len(self.label_names) or None


class Prefetch(Iterator[T], Generic[T]):
    """Iterates ahead on a thread by a number of items; errors are raised where they are reached."""

    def __init__(self, items: Iterator[T], *, depth: int) -> None:
        self._items = items
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._ahead = deque(self._thread.submit(next, items) for _ in range(depth))

    def __next__(self) -> T:
        if not self._ahead:
            raise ValueError("a prefetch was read after its end")
        # The end of the items stays in front and is raised again at every later call.
        item = self._ahead[0].result()
        self._ahead.popleft()
        self._ahead.append(self._thread.submit(next, self._items))
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread after the item that it makes now."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)


class RankShare(Protocol):
    """Names the micro-batches of a step, or of the evaluation, that a rank of the first stage reads."""

    def __call__(self, *, step: int, is_evaluation: bool = False) -> Container[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The data of a run: samples, tokenizer, and what the model needs to know about them."""

    samples: Samples
    validation: Samples | None
    tokenizer: Any
    facts: ModelFacts
    head: Head
    pad_id: int
    seed: int
    sha256: str
    """Of all tokens and labels, training and held out."""
    pairing: str = ""
    """The number of pairs, a digest of their ids, and one of the vocabulary, which the clouds of texts and of
    translations have in common; empty where one cloud reads both."""

    def validation_batches(self, *, num_sequences: int, multiple_of: int = 1) -> Iterator[Batch]:
        """The micro-batches of the validation split, the same each time; none where there is no split.

        For ranks that evaluate on the same schedule a few without targets are added.
        """
        if self.validation is None:
            return
        starts = range(0, len(self.validation), num_sequences)
        for start in starts:
            indices = range(start, min(start + num_sequences, len(self.validation)))
            batch = self.collate(self.validation, [Pick(epoch=0, index=index) for index in indices])
            yield batch
        for _ in range(-len(starts) % multiple_of):
            yield without_targets(batch)

    def collate(self, samples: Samples, picks: Iterable[Pick]) -> Batch:
        """One micro-batch of some samples."""
        return collate([samples.read(pick) for pick in picks], head=self.head, pad_id=self.pad_id)


def open_data(job: Job, *, tokenizer_folder: Path, tokens: TokenFiles | None = None) -> TrainingData:
    """Read and tokenize what the job trains on, or map the cached tokens.

    The tokenizer's folder is exported with the weights.
    """
    spec, model = job.given_data, job.given_model
    limits = read_limits(model)
    rows, held_out = _open_split(spec)
    texts = (text for row in rows for text in read_texts(row, spec))
    tokenizer = choose_tokenizer(spec, model, texts=texts, limits=limits, folder=tokenizer_folder)
    _keep_generation(model, tokenizer_folder)
    check_decoder(tokenizer, model)
    pad_id = padding_id(tokenizer, limits)
    check_length(spec.sequence_length, limits.max_length(pad_id))
    recipe = Recipe(spec=spec, tokenizer=tokenizer, rows=rows, held_out=held_out)
    digest = None if tokens is None else recipe.digest(tokenizer_folder)
    found = tokens.get(digest, recipe.make) if tokens and digest else in_memory(recipe.make())
    samples = _finished(recipe, found.arrays, is_validation=False, seed=job.seed)
    # Runs of different seeds are evaluated on the same masks.
    validation = None if held_out is None else _finished(recipe, found.arrays, is_validation=True, seed=0)
    _check_filled(spec, samples, validation)
    pairing = "" if spec.id_column is None else _pairing(found.arrays, recipe)
    return TrainingData(
        samples=samples,
        validation=validation,
        tokenizer=tokenizer,
        facts=ModelFacts(
            config=_model_values(tokenizer, model),
            label_names=recipe.labels(found.arrays).names,
        ),
        head=HEADS[spec.task],
        pad_id=pad_id,
        seed=job.seed,
        sha256=found.sha256,
        pairing=pairing,
    )


def _model_values(tokenizer: Any, model: ModelSpec) -> dict[str, object]:
    if model.config is not None:
        return token_values(tokenizer, model.config)
    return {} if model.abnet is None else ids_of_encoder(tokenizer)


def _pairing(arrays: Arrays, recipe: Recipe) -> str:
    """See `TrainingData.pairing`; refuses an id that names two rows."""
    keys = [np.sort(one) for name, one in arrays.items() if name.endswith("-keys")]
    every = np.sort(np.concatenate(keys))
    if (every[1:] == every[:-1]).any():
        twice = every[1:][every[1:] == every[:-1]]
        column = recipe.spec.id_column or ""
        rows = itertools.chain(recipe.rows, recipe.held_out or ())
        row = next((one for one in rows if key_of(one, column) in twice), {})
        raise UserError(
            f"the id {row.get(column)!r} is in the data twice", hint="give each row an id of its own"
        )
    vocabulary = json.dumps(sorted(recipe.tokenizer.get_vocab().items())).encode()
    digests = (hashlib.sha256(one).hexdigest()[:16] for one in (b"".join(map(bytes, keys)), vocabulary))
    return " ".join((f"{len(every)}", *digests))


def check_paired(texts: str, translations: str) -> None:
    """Refuse texts and translations that do not belong together, by the `pairing` of both clouds."""
    if texts == translations:
        return
    (number, _, vocabulary), (other_number, _, other_vocabulary) = texts.split(), translations.split()
    if vocabulary != other_vocabulary:
        raise UserError(
            "the clouds of texts and of translations have tokenizers with different vocabularies",
            hint="name the same one in data.tokenizer, or the same model, at both",
        )
    raise UserError(
        f"the {other_number} translations that this cloud reads do not have the ids of the {number} texts "
        "that the first cloud reads",
        hint="give both the same rows by data.id_column; their order may differ",
    )


def _keep_generation(model: ModelSpec, folder: Path) -> None:
    """Keep a pretrained model's generation config; at the end of a run the hub may be unreachable."""
    kept = folder / GENERATION_FILE
    is_new = model.source is None or model.abnet is not None
    path = None if is_new or kept.exists() else find_file(str(model.source), GENERATION_FILE)
    if path is not None:
        replace_file(kept, path.read_text())


def _finished(recipe: Recipe, arrays: Arrays, *, is_validation: bool, seed: int) -> Samples:
    """The samples, with other masks in every epoch for a masked language model."""
    tokenizer, samples = recipe.tokenizer, recipe.samples(arrays, is_validation=is_validation)
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


def _open_split(spec: DataSpec) -> tuple[Rows, Rows | None]:
    rows = open_rows(spec.source)
    if spec.validation_source is not None:
        return rows, open_rows(spec.validation_source)
    if spec.validation_share == 0:
        return rows, None
    return split_rows(rows, every=round(1 / spec.validation_share), id_column=spec.id_column)


def _check_filled(spec: DataSpec, samples: Samples, validation: Samples | None) -> None:
    if len(samples) == 0:
        raise UserError(
            f"{spec.source!r} holds too little to train on: not one sequence",
            hint="give more data, or lower data.sequence_length",
        )
    if validation is not None and len(validation) == 0:
        what = f"a validation share of {spec.validation_share} leaves nothing"
        if spec.validation_source is not None:
            what = f"{spec.validation_source!r} holds nothing"
        raise UserError(
            f"{what} to evaluate on",
            hint="give more data, raise data.validation_share, or set it to 0 for no evaluation",
        )


class Source(Protocol):
    """Gives a member its micro-batches."""

    def training(self, step: int) -> Sequence[Batch]:
        """The micro-batches of a step."""

    def validation(self) -> Sequence[Batch]:
        """The micro-batches of every evaluation."""


class Feed:
    """The micro-batches of steps, prefetched on a thread until this is closed.

    What a step reads follows from its number. Of each step only the micro-batches in this rank's share, if it
    is given, are read.
    """

    def __init__(
        self,
        data: TrainingData,
        layout: Layout,
        *,
        share: RankShare | None = None,
        first_step: int = 0,
        multiple_of: int = 1,
    ) -> None:
        check_enough(data.samples, layout)
        self._data, self._layout, self._share = data, layout, share
        batches = data.validation_batches(num_sequences=layout.num_sequences, multiple_of=multiple_of)
        own = None if share is None else share(step=0, is_evaluation=True)
        self._validation = tuple(
            batch for number, batch in enumerate(batches) if own is None or number in own
        )
        self._next_step = first_step
        self._steps = Prefetch(self._read(first_step), depth=_STEPS_AHEAD)

    def _read(self, first_step: int) -> Iterator[tuple[Batch, ...]]:
        """This rank's micro-batches of each step without end."""
        samples, layout = self._data.samples, self._layout
        order = Order(num_samples=len(samples), seed=self._data.seed)
        for step in itertools.count(first_step):
            wanted = range(layout.num_microbatches) if self._share is None else self._share(step=step)
            start = step * layout.step_sequences
            yield tuple(
                self._data.collate(
                    samples, order.take(start + number * layout.num_sequences, layout.num_sequences)
                )
                for number in range(layout.num_microbatches)
                if number in wanted
            )

    def training(self, step: int) -> Sequence[Batch]:
        """The micro-batches of a step; unless it follows the one before, reading begins anew with it."""
        if step != self._next_step:
            self._steps.close()
            self._steps = Prefetch(self._read(step), depth=_STEPS_AHEAD)
        self._next_step = step + 1
        return next(self._steps)

    def validation(self) -> Sequence[Batch]:
        """The micro-batches of every evaluation; none where nothing is held out."""
        return self._validation

    def close(self) -> None:
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collate(samples: Sequence[LabelledSequence], *, head: Head, pad_id: int) -> Batch:
    """One micro-batch, padded on the right up to its longest sequence."""
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    is_padded = bool(lengths.min() < lengths.max())
    labels = _pad([sample.labels for sample in samples], IGNORED)
    types = [sample.token_types for sample in samples if sample.token_types is not None]
    keys = [sample.key for sample in samples if sample.key is not None]
    return Batch(
        ids=_pad([sample.ids for sample in samples], pad_id),
        num_targets=head.num_targets(labels),
        mask=(torch.arange(int(lengths.max())) < lengths[:, None]).long() if is_padded else None,
        token_type_ids=_pad(types, 0) if types else None,
        labels=labels if labels.numel() else None,
        keys=torch.tensor(keys) if keys else None,
    )


def _pad(rows: Sequence[Integers], fill: int) -> Tensor:
    """Rows padded to the longest one as a matrix, or single numbers as a vector."""
    tensors = [torch.from_numpy(np.atleast_1d(row).astype("int64")) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill) if rows[0].ndim else torch.cat(tensors)


def without_targets(batch: Batch) -> Batch:
    """A copy of a micro-batch whose labels are all ignored."""
    labels = None if batch.labels is None else torch.full_like(batch.labels, IGNORED)
    return replace(batch, labels=labels, num_targets=0)
