"""Samples: makes sequences with labels from rows, for each task, and computes the order of reading.

The order is a permutation for each epoch, a function of the seed, and is never stored.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import tokenizers
import transformers
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.events import __version__
from isthmus.job import DataSpec
from isthmus.model.heads import IGNORED
from isthmus.train.data.rows import (
    NOT_HERE,
    Answer,
    Labels,
    Row,
    Rows,
    collect_labels,
    key_of,
    read_answer,
    read_labels,
    read_text,
    read_texts,
    read_words,
    text_column,
    translation_columns,
)
from isthmus.train.data.tokenizer import end_id, vocabulary_size

_NUM_ROUNDS: Final = 6
_HALF: Final = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """The number of a sample, and the epoch in which it is read."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A permutation of all samples for each epoch."""

    num_samples: int
    seed: int

    def take(self, start: int, count: int) -> list[Pick]:
        """So many samples of the endless row of epochs, from a place in it on."""
        picks: list[Pick] = []
        for epoch in range(start // self.num_samples, -(-(start + count) // self.num_samples)):
            first = epoch * self.num_samples
            positions = np.arange(max(start - first, 0), min(start + count - first, self.num_samples))
            picks += [Pick(epoch=epoch, index=int(index)) for index in self.permute(positions, epoch=epoch)]
        return picks

    def permute(self, positions: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """The samples at some positions of an epoch: a Feistel network over a square that holds them all.

        A value that is no sample's number goes through the network again.
        """
        half_bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        keys = draw_keys(_NUM_ROUNDS, "order", self.seed, epoch)
        values = positions.astype(np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            values[outside] = _feistel(values[outside], keys, half_bits)
            outside = values >= self.num_samples
        return values.astype(np.int64)


def draw_keys(count: int, *parts: object) -> NDArray[np.uint64]:
    """Numbers of 64 bits that depend on every part."""
    drawn = (hashlib.blake2b(repr((*parts, number)).encode(), digest_size=8) for number in range(count))
    return np.array([int.from_bytes(one.digest()) for one in drawn], dtype=np.uint64)


def mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Numbers of 64 bits that look random, each from its value and the key: the finish of SplitMix64."""
    with np.errstate(over="ignore"):
        mixed = values * np.uint64(0x9E3779B97F4A7C15) + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    shift, low = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> shift, values & low
    for key in keys:
        left, right = right, left ^ (mix(right, key) >> _HALF & low)
    return left << shift | right


T = TypeVar("T")

Integers = NDArray[np.integer[Any]]
Arrays = Mapping[str, Integers]
"""The integers of many samples by name, in memory or mapped from files."""

_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSequence:
    """One sequence without padding, and its labels: one a token, or those of the whole sequence."""

    ids: Integers
    labels: Integers
    token_types: Integers | None = None
    key: int | None = None
    """What stands for its id, where texts and translations are read in different clouds."""


class Samples(Protocol):
    """Samples that can be read in any order."""

    def __len__(self) -> int: ...

    def read(self, pick: Pick) -> LabelledSequence: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedSamples:
    """Samples of different lengths, concatenated; the same in every epoch."""

    arrays: Arrays
    """`ids` and their `ends`, one for each sample; `labels`, one a token, or one or a row for each sample.

    There may be `token_types`, `label_ends` for labels that are tokens of their own, and `keys`, which stand
    for the ids of samples.
    """
    has_tags: bool
    """Whether labels are one a token."""
    ranks: Integers | None = None
    """The places of the samples in the order of their keys, in which they are then numbered."""

    def __len__(self) -> int:
        return len(self.arrays["ends"])

    def read(self, pick: Pick) -> LabelledSequence:
        index = pick.index if self.ranks is None else int(self.ranks[pick.index])
        arrays, own = self.arrays, _slice(self.arrays["ends"], index)
        if "label_ends" in arrays:
            labels = arrays["labels"][_slice(arrays["label_ends"], index)]
        else:
            labels = arrays["labels"][own] if self.has_tags else np.asarray(arrays["labels"][index])
        return LabelledSequence(
            ids=arrays["ids"][own],
            labels=labels,
            token_types=arrays["token_types"][own] if "token_types" in arrays else None,
            key=int(arrays["keys"][index]) if "keys" in arrays else None,
        )


def _slice(ends: Integers, index: int) -> slice:
    return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


def in_chunks(items: Iterable[T]) -> Iterator[list[T]]:
    """All items in order, in lists of many."""
    left = iter(items)
    while chunk := list(itertools.islice(left, _AT_ONCE)):
        yield chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSamples:
    """All documents as one array of tokens, cut into sequences; the tokens are the labels, too."""

    tokens: Integers
    sequence_length: int
    keeps_rest: bool
    """Whether the tokens after the last full sequence are one more, shorter, sequence."""

    def __len__(self) -> int:
        whole, rest = divmod(len(self.tokens), self.sequence_length)
        # A single token predicts nothing.
        return whole + (self.keeps_rest and rest > 1)

    def read(self, pick: Pick) -> LabelledSequence:
        start = pick.index * self.sequence_length
        ids = self.tokens[start : start + self.sequence_length]
        return LabelledSequence(ids=ids, labels=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSamples:
    """Samples for a masked language model; the masked tokens are a function of seed, epoch and number.

    Unless other shares are given, 15 % of the tokens are to be predicted: 80 % of these become the mask, 10 %
    another token, 10 % stay.
    """

    samples: Samples
    seed: int
    mask_id: int
    special_ids: tuple[int, ...]
    num_tokens: int
    masked_share: float = 0.15
    to_mask_share: float = 0.8
    to_random_share: float = 0.1

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, pick: Pick) -> LabelledSequence:
        sample = self.samples.read(pick)
        ids = sample.ids.astype(np.int64)
        choice, change, other = self._draws(pick, len(ids))
        choice[np.isin(ids, self.special_ids)] = np.inf
        # The smallest is always chosen, so that every sample has a label.
        is_masked = (choice < max(self.masked_share, np.nextafter(choice.min(), 2))) & np.isfinite(choice)
        labels = np.where(is_masked, ids, IGNORED)
        becomes_mask = is_masked & (change < self.to_mask_share)
        becomes_other = is_masked & ~becomes_mask & (change < self.to_mask_share + self.to_random_share)
        ids[becomes_mask] = self.mask_id
        ids[becomes_other] = (other * self.num_tokens).astype(np.int64)[becomes_other]
        return LabelledSequence(ids=ids, labels=labels, token_types=sample.token_types)

    def _draws(self, pick: Pick, count: int) -> list[NDArray[np.float64]]:
        """Three rows of numbers in [0, 1)."""
        positions = np.arange(count, dtype=np.uint64)
        keys = draw_keys(3, "masking", self.seed, pick.epoch, pick.index)
        return [(mix(positions, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53 for key in keys]


_LEAST_ANSWER_LENGTH: Final = 16


def packed_tokens(rows: Iterable[Row], tokenizer: Any, spec: DataSpec) -> Iterator[Integers]:
    """Documents joined by the end token, in pieces to be concatenated; 2 or 4 bytes a token."""
    end = end_id(tokenizer)
    narrow = np.min_scalar_type(vocabulary_size(tokenizer))
    yield np.empty(0, narrow)
    for chunk in in_chunks(rows):
        texts = [read_text(row, text_column(spec)) for row in chunk]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        yield np.concatenate([np.array([*ids, end], narrow) for ids in encoded["input_ids"]])


def padded_arrays(rows: Iterable[Row], tokenizer: Any, spec: DataSpec, labels: Labels) -> Iterator[Arrays]:
    """The arrays of `RaggedSamples`, in pieces to be concatenated: of every task but causal-lm."""
    if spec.task == "question-answering" and spec.sequence_length < _LEAST_ANSWER_LENGTH:
        raise UserError(
            f"sequences of {spec.sequence_length} tokens are too short for questions with their contexts",
            hint=f"set data.sequence_length to {_LEAST_ANSWER_LENGTH} or more",
        )
    yield {"ids": np.empty(0, np.int32), "ends": np.empty(0, np.int64)}
    end, label_end = 0, 0
    has_targets = spec.task == "translation"
    are_flat = has_targets or has_tags(spec)
    for chunk in in_chunks(rows):
        encoded, own = _ENCODERS[spec.task](chunk, tokenizer, spec, labels)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        if 0 in lengths:
            raise UserError("a text of the data has no tokens", hint="leave out rows with empty texts")
        ends = end + np.cumsum(lengths, dtype=np.int64)
        end = int(ends[-1])
        found = list(own)
        piece: dict[str, Integers] = {
            "ids": np.concatenate(encoded["input_ids"]).astype(np.int32),
            "ends": ends,
            "labels": np.array([*itertools.chain(*found)] if are_flat else found, np.int32),
        }
        if "token_type_ids" in encoded:
            piece["token_types"] = np.concatenate(encoded["token_type_ids"]).astype(np.uint8)
        if spec.id_column is not None:
            piece["keys"] = np.array([key_of(row, spec.id_column) for row in chunk], np.int64)
        if has_targets:
            piece["label_ends"] = label_end + np.cumsum([*map(len, found)], dtype=np.int64)
            label_end = int(piece["label_ends"][-1])
        yield piece


def has_tags(spec: DataSpec) -> bool:
    """Whether labels are one a token."""
    return spec.task == "token-classification"


_Encoded = tuple[Any, Iterable[Any]]
"""What a tokenizer made of a chunk of rows, and the labels of each sequence."""


def _encode_windows(chunk: list[Row], tokenizer: Any, spec: DataSpec, _: Labels) -> _Encoded:
    """Texts for a masked language model, long ones cut into several, or pairs; masking adds the labels."""
    texts = map(list, zip(*(read_texts(row, spec) for row in chunk), strict=True))
    cut = {} if spec.pair_column else {"return_overflowing_tokens": True}
    encoded = _encode(tokenizer, spec, *texts, **cut)
    return encoded, [[]] * len(encoded["input_ids"])


def _encode_classified(chunk: list[Row], tokenizer: Any, spec: DataSpec, labels: Labels) -> _Encoded:
    """Texts, or pairs of texts, each with its label."""
    texts = zip(*(read_texts(row, spec) for row in chunk), strict=True)
    encoded = _encode(tokenizer, spec, *map(list, texts))
    return encoded, (labels.number(read_labels(row, spec)[0]) for row in chunk)


def _encode_tagged(chunk: list[Row], tokenizer: Any, spec: DataSpec, labels: Labels) -> _Encoded:
    """Words with their tags; the first token of a word has its tag, the others none."""
    words = [read_words(row, text_column(spec)) for row in chunk]
    encoded = _encode(tokenizer, spec, [" ".join(one) for one in words], return_offsets_mapping=True)
    numbers = ([labels.number(tag) for tag in read_labels(row, spec)] for row in chunk)
    return encoded, map(_token_tags, encoded["offset_mapping"], words, numbers)


def _encode_answered(chunk: list[Row], tokenizer: Any, spec: DataSpec, _: Labels) -> _Encoded:
    """Questions with windows of their context; labels are the answer's first and last token.

    Where a window has no answer, both are 0, the token that begins the sequence.
    """
    answers = [read_answer(row) for row in chunk]
    encoded = _encode(
        tokenizer,
        spec,
        [_shortened(answer.question, tokenizer, spec.sequence_length // 4) for answer in answers],
        [answer.context for answer in answers],
        truncation="only_second",
        stride=spec.sequence_length // 8,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    return encoded, (
        _answer_tokens(encoded["offset_mapping"][index], encoded.sequence_ids(index), answers[row_index])
        for index, row_index in enumerate(encoded["overflow_to_sample_mapping"])
    )


def _encode_translated(chunk: list[Row], tokenizer: Any, spec: DataSpec, _: Labels) -> _Encoded:
    """Texts, each with the tokens of its translation as labels; or texts alone, or translations alone."""
    texts = [*zip(*(read_texts(row, spec) for row in chunk), strict=True)]
    source, target = translation_columns(spec)
    if target == NOT_HERE:
        return _encode(tokenizer, spec, [*texts[0]]), [[]] * len(chunk)
    cut = {"truncation": True, "max_length": spec.sequence_length, "verbose": False}
    said = tokenizer(text_target=[*texts[-1]], **cut)
    if not all(said["input_ids"]):
        raise UserError("a translation of the data has no tokens", hint="leave out rows with empty texts")
    return said if source == NOT_HERE else _encode(tokenizer, spec, [*texts[0]]), said["input_ids"]


_ENCODERS: Final[Mapping[str, Callable[[list[Row], Any, DataSpec, Labels], _Encoded]]] = {
    "masked-lm": _encode_windows,
    "sequence-classification": _encode_classified,
    "token-classification": _encode_tagged,
    "question-answering": _encode_answered,
    "translation": _encode_translated,
}


def _encode(tokenizer: Any, spec: DataSpec, *texts: list[str], **options: Any) -> Any:
    if not tokenizer.is_fast and len(options) > 0:
        raise UserError(
            f"{spec.task} needs a tokenizer that says where its tokens lie, which {type(tokenizer).__name__} "
            "does not",
            hint="name a model with a tokenizer.json in data.tokenizer",
        )
    chosen = {"truncation": True, "max_length": spec.sequence_length, "verbose": False, **options}
    return tokenizer(*texts, **chosen)


def _token_tags(offsets: list[tuple[int, int]], words: list[str], numbers: list[int]) -> list[int]:
    """The tags of tokens, given where each lies in the words joined by spaces."""
    word_of = [number for number, word in enumerate(words) for _ in range(len(word) + 1)]
    tags, seen = [], -1
    for start, end in offsets:
        # A token may begin with the space before its word, so its end says which word it belongs to.
        number = word_of[end - 1] if end > start else seen
        tags.append(numbers[number] if number > seen else IGNORED)
        seen = max(seen, number)
    return tags


def _answer_tokens(offsets: list[tuple[int, int]], parts: list[int | None], answer: Answer) -> list[int]:
    inside = [
        index
        for index, ((start, end), part) in enumerate(zip(offsets, parts, strict=True))
        if part == 1 and start < answer.end and end > answer.start
    ]
    is_whole = inside and offsets[inside[0]][0] <= answer.start and offsets[inside[-1]][1] >= answer.end
    return [inside[0], inside[-1]] if is_whole else [0, 0]


def _shortened(text: str, tokenizer: Any, num_tokens: int) -> str:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    return text if len(offsets) <= num_tokens else text[: offsets[num_tokens - 1][1]]


# To be raised whenever the same rows make other arrays.
_VERSION: Final = 2
_LABELS: Final = "label-names"
_TRAINING: Final = "training"
_VALIDATION: Final = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Rows, and everything that decides which tokens they become."""

    spec: DataSpec
    tokenizer: Any
    rows: Rows
    held_out: Rows | None

    def digest(self, tokenizer_folder: Path) -> str | None:
        """A digest that changes whenever the tokens may; None where the rows have no trace."""
        traces = [rows.trace() for rows in (self.rows, self.held_out) if rows is not None]
        if None in traces:
            return None
        cut_later = {"sequence_length"} if self._is_packed else set()
        parts = {
            "versions": [_VERSION, __version__, tokenizers.__version__, transformers.__version__],
            "data": self.spec.model_dump(mode="json", exclude={"tokenizer"} | cut_later),
            "traces": traces,
            "tokenizer": _file_digests(tokenizer_folder),
        }
        return _digest(json.dumps(parts, sort_keys=True).encode())

    def make(self) -> Iterator[Arrays]:
        """All arrays, in pieces to be concatenated."""
        labels = self._collect_labels()
        yield {_LABELS: np.frombuffer(json.dumps(labels.names).encode(), np.uint8)}
        for part, rows in ((_TRAINING, self.rows), (_VALIDATION, self.held_out)):
            if rows is not None:
                for piece in self._pieces(rows, labels):
                    yield {f"{part}-{name}": array for name, array in piece.items()}

    def labels(self, arrays: Arrays) -> Labels:
        """The classes of the training data."""
        return Labels(tuple(json.loads(arrays[_LABELS].tobytes())))

    def samples(self, arrays: Arrays, *, is_validation: bool) -> PackedSamples | RaggedSamples:
        """The samples whose arrays were made."""
        prefix = f"{_VALIDATION if is_validation else _TRAINING}-"
        own = {name.removeprefix(prefix): one for name, one in arrays.items() if name.startswith(prefix)}
        if self._is_packed:
            length = self.spec.sequence_length
            return PackedSamples(tokens=own["tokens"], sequence_length=length, keeps_rest=is_validation)
        ranks = np.argsort(own["keys"]) if "keys" in own else None
        return RaggedSamples(arrays=own, has_tags=has_tags(self.spec), ranks=ranks)

    @property
    def _is_packed(self) -> bool:
        return self.spec.task == "causal-lm"

    def _pieces(self, rows: Iterable[Row], labels: Labels) -> Iterator[Arrays]:
        if self._is_packed:
            return ({"tokens": tokens} for tokens in packed_tokens(rows, self.tokenizer, self.spec))
        return padded_arrays(rows, self.tokenizer, self.spec, labels)

    def _collect_labels(self) -> Labels:
        if not self.spec.task.endswith("-classification"):
            return Labels(())
        return collect_labels(label for row in self.rows for label in read_labels(row, self.spec))


def _file_digests(folder: Path) -> dict[str, str]:
    return {path.name: _digest(path.read_bytes()) for path in sorted(folder.iterdir()) if path.is_file()}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
