"""From rows to samples, for each task."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from isthmus.errors import UserError
from isthmus.job import DataSpec
from isthmus.model.families import IGNORED
from isthmus.train.data.columns import (
    Answer,
    Labels,
    label_column,
    read_answer,
    read_label,
    read_tags,
    read_text,
    read_texts,
    read_words,
    text_column,
)
from isthmus.train.data.corpus import Row
from isthmus.train.data.samples import Integers, Sample, in_chunks
from isthmus.train.data.tokens import end_id, vocabulary_size

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
