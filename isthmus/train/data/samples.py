"""Samples: what rows become for each task, and the order in which they are read.

The order is a permutation for each epoch, computed and never stored.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.job import DataSpec
from isthmus.model.heads import IGNORED
from isthmus.train.data.rows import (
    Answer,
    Labels,
    Row,
    label_column,
    read_answer,
    read_label,
    read_tags,
    read_text,
    read_texts,
    read_words,
    text_column,
)
from isthmus.train.data.tokenizer import end_id, vocabulary_size

_NUM_ROUNDS: Final = 6
_HALF: Final = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a run has read: all earlier epochs, and so many samples of this one."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A sample to be read, and the epoch it is read in."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Every sample once an epoch, each epoch in an order of its own."""

    num_samples: int
    seed: int

    def take(self, cursor: Cursor, count: int) -> tuple[list[Pick], Cursor]:
        """The next samples, over the end of epochs if need be, and the cursor behind them."""
        picks: list[Pick] = []
        while len(picks) < count:
            stop = min(cursor.position + count - len(picks), self.num_samples)
            indices = self.permute(np.arange(cursor.position, stop), epoch=cursor.epoch)
            picks += [Pick(epoch=cursor.epoch, index=int(index)) for index in indices]
            cursor = self._normal(Cursor(epoch=cursor.epoch, position=stop))
        return picks, cursor

    def permute(self, positions: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """The samples at some positions of an epoch: a Feistel network over a square that holds them all.

        What falls outside of the samples goes through the network again until it falls inside.
        """
        half_bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        keys = draw_keys(_NUM_ROUNDS, "order", self.seed, epoch)
        values = positions.astype(np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            values[outside] = _feistel(values[outside], keys, half_bits)
            outside = values >= self.num_samples
        return values.astype(np.int64)

    def _normal(self, cursor: Cursor) -> Cursor:
        return cursor if cursor.position < self.num_samples else Cursor(epoch=cursor.epoch + 1)


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
"""Numbers of many samples by name, in memory or mapped from files."""

_AT_ONCE: Final = 1000
_MASKED_SHARE: Final = 0.15
_TO_MASK_SHARE: Final = 0.8
_TO_RANDOM_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence without padding, and its labels: one a token, or those of the whole sequence."""

    ids: Integers
    labels: Integers
    token_types: Integers | None = None


class Samples(Protocol):
    """Any number of samples that can be read in any order."""

    def __len__(self) -> int: ...

    def read(self, pick: Pick) -> Sample:
        """The sample of that number, as it is in that epoch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedSamples:
    """Samples of different lengths behind each other, the same in every epoch."""

    ids: Integers
    ends: Integers
    """Where each sample ends in `ids`."""
    labels: Integers
    """One a token, or one or a row of them for each sample."""
    token_types: Integers | None
    has_tags: bool
    """Whether labels are one a token."""

    def __len__(self) -> int:
        return len(self.ends)

    def read(self, pick: Pick) -> Sample:
        """The sample of that number."""
        start = int(self.ends[pick.index - 1]) if pick.index else 0
        own = slice(start, int(self.ends[pick.index]))
        return Sample(
            ids=self.ids[own],
            labels=self.labels[own] if self.has_tags else np.asarray(self.labels[pick.index]),
            token_types=None if self.token_types is None else self.token_types[own],
        )


def flatten(samples: Iterable[Sample], *, has_tags: bool) -> Iterator[Arrays]:
    """The arrays of `RaggedSamples`, in pieces to be put behind each other."""
    put_together = np.concatenate if has_tags else np.stack
    end = 0
    yield {"ids": np.empty(0, np.int32), "ends": np.empty(0, np.int64)}
    for own in in_chunks(samples):
        ends = end + np.cumsum([len(one.ids) for one in own], dtype=np.int64)
        end = int(ends[-1])
        types = [one.token_types for one in own if one.token_types is not None]
        yield {
            "ids": np.concatenate([one.ids for one in own]),
            "ends": ends,
            "labels": put_together([one.labels for one in own]),
            **({"token_types": np.concatenate(types)} if types else {}),
        }


def in_chunks(items: Iterable[T]) -> Iterator[list[T]]:
    """All items in their order, many at once."""
    left = iter(items)
    while chunk := list(islice(left, _AT_ONCE)):
        yield chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSamples:
    """All documents as one row of tokens, cut into sequences; every token is a label too."""

    tokens: Integers
    sequence_length: int
    keeps_rest: bool
    """Whether the tokens behind the last whole sequence are one more, shorter, sequence."""

    def __len__(self) -> int:
        whole, rest = divmod(len(self.tokens), self.sequence_length)
        # A single token predicts nothing.
        return whole + (self.keeps_rest and rest > 1)

    def read(self, pick: Pick) -> Sample:
        """The sequence of that number."""
        start = pick.index * self.sequence_length
        ids = self.tokens[start : start + self.sequence_length]
        return Sample(ids=ids, labels=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSamples:
    """Samples for a masked language model: which tokens are hidden depends on seed, epoch and number.

    Of the tokens that are to be found, 15 %, most become the mask, a tenth another token, the rest stay.
    """

    samples: Samples
    seed: int
    mask_id: int
    special_ids: tuple[int, ...]
    num_tokens: int

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, pick: Pick) -> Sample:
        """The sample of that number, masked as in that epoch."""
        sample = self.samples.read(pick)
        ids = sample.ids.astype(np.int64)
        choice, change, other = self._draws(pick, len(ids))
        choice[np.isin(ids, self.special_ids)] = np.inf
        # The least is always chosen, so that no sample is without a label.
        is_hidden = (choice < max(_MASKED_SHARE, np.nextafter(choice.min(), 2))) & np.isfinite(choice)
        labels = np.where(is_hidden, ids, IGNORED)
        becomes_mask = is_hidden & (change < _TO_MASK_SHARE)
        becomes_other = is_hidden & ~becomes_mask & (change < _TO_MASK_SHARE + _TO_RANDOM_SHARE)
        ids[becomes_mask] = self.mask_id
        ids[becomes_other] = (other * self.num_tokens).astype(np.int64)[becomes_other]
        return Sample(ids=ids, labels=labels, token_types=sample.token_types)

    def _draws(self, pick: Pick, count: int) -> list[NDArray[np.float64]]:
        """Three rows of numbers from 0 to below 1."""
        positions = np.arange(count, dtype=np.uint64)
        keys = draw_keys(3, "masking", self.seed, pick.epoch, pick.index)
        return [(mix(positions, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53 for key in keys]


_LEAST_ANSWER_LENGTH: Final = 16


def packed_tokens(rows: Iterable[Row], tokenizer: Any, spec: DataSpec) -> Iterator[Integers]:
    """Documents joined by the end token, in pieces to be put behind each other; 2 or 4 bytes a token."""
    end = end_id(tokenizer)
    narrow = np.min_scalar_type(vocabulary_size(tokenizer))
    yield np.empty(0, narrow)
    for chunk in in_chunks(rows):
        texts = [read_text(row, text_column(spec)) for row in chunk]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        yield np.concatenate([np.array([*ids, end], narrow) for ids in encoded["input_ids"]])


def window_samples(rows: Iterable[Row], tokenizer: Any, spec: DataSpec) -> Iterator[Sample]:
    """Texts for a masked language model, the long ones cut into several; labels come with the masking."""
    for chunk in in_chunks(rows):
        texts = [read_text(row, text_column(spec)) for row in chunk]
        encoded = _encode(tokenizer, spec, texts, return_overflowing_tokens=True)
        yield from (_sample(encoded, index, []) for index in range(len(encoded["input_ids"])))


def classified_samples(
    rows: Iterable[Row], tokenizer: Any, spec: DataSpec, *, labels: Labels
) -> Iterator[Sample]:
    """Texts, or pairs of texts, each with its label."""
    for chunk in in_chunks(rows):
        texts = zip(*(read_texts(row, spec) for row in chunk), strict=True)
        encoded = _encode(tokenizer, spec, *map(list, texts))
        for index, row in enumerate(chunk):
            number = labels.number(read_label(row, label_column(spec)))
            yield _sample(encoded, index, number)


def tagged_samples(
    rows: Iterable[Row], tokenizer: Any, spec: DataSpec, *, labels: Labels
) -> Iterator[Sample]:
    """Words with their tags; the first token of a word has its tag, the others none."""
    for chunk in in_chunks(rows):
        words = [read_words(row, text_column(spec)) for row in chunk]
        encoded = _encode(tokenizer, spec, [" ".join(one) for one in words], return_offsets_mapping=True)
        for index, (row, one) in enumerate(zip(chunk, words, strict=True)):
            tags = read_tags(row, label_column(spec), count=len(one))
            numbers = [labels.number(tag) for tag in tags]
            yield _sample(encoded, index, _token_tags(encoded["offset_mapping"][index], one, numbers))


def answered_samples(rows: Iterable[Row], tokenizer: Any, spec: DataSpec) -> Iterator[Sample]:
    """Questions with windows of their context; labels are the answer's first and last token.

    Where a window has no answer, both are 0, the token that begins the sequence.
    """
    if spec.sequence_length < _LEAST_ANSWER_LENGTH:
        raise UserError(
            f"sequences of {spec.sequence_length} tokens are too short for questions with their contexts",
            hint=f"set data.sequence_length to {_LEAST_ANSWER_LENGTH} or more",
        )
    for chunk in in_chunks(rows):
        answers = [read_answer(row) for row in chunk]
        encoded = _encode_answers(tokenizer, spec, answers)
        for index, row_index in enumerate(encoded["overflow_to_sample_mapping"]):
            span = _answer_tokens(
                encoded["offset_mapping"][index], encoded.sequence_ids(index), answers[row_index]
            )
            yield _sample(encoded, index, span)


def _encode_answers(tokenizer: Any, spec: DataSpec, answers: list[Answer]) -> Any:
    longest = spec.sequence_length // 4
    return _encode(
        tokenizer,
        spec,
        [_shortened(answer.question, tokenizer, longest) for answer in answers],
        [answer.context for answer in answers],
        truncation="only_second",
        stride=spec.sequence_length // 8,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )


def _encode(tokenizer: Any, spec: DataSpec, *texts: list[str], **options: Any) -> Any:
    if not tokenizer.is_fast and len(options) > 0:
        raise UserError(
            f"{spec.task} needs a tokenizer that says where its tokens lie, which {type(tokenizer).__name__} "
            "does not",
            hint="name a model with a tokenizer.json in data.tokenizer",
        )
    chosen = {"truncation": True, "max_length": spec.sequence_length, "verbose": False, **options}
    return tokenizer(*texts, **chosen)


def _sample(encoded: Any, index: int, labels: int | list[int]) -> Sample:
    ids = encoded["input_ids"][index]
    if not ids:
        raise UserError("a text of the data has no tokens", hint="leave out rows with empty texts")
    types = encoded["token_type_ids"][index] if "token_type_ids" in encoded else None
    return Sample(
        ids=np.array(ids, np.int32),
        labels=np.array(labels, np.int32),
        token_types=None if types is None else np.array(types, np.uint8),
    )


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
