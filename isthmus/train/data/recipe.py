"""What the tokens of a job are made from, how, and how to tell whether kept ones still are the same."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import transformers

from isthmus import __version__
from isthmus.job import DataSpec
from isthmus.train.data.columns import (
    Labels,
    collect_labels,
    label_column,
    read_label,
    read_tags,
    read_words,
    text_column,
)
from isthmus.train.data.corpus import Row, trace_of
from isthmus.train.data.samples import Arrays, PackedSamples, RaggedSamples, Sample, flatten
from isthmus.train.data.tasks import (
    answered_samples,
    classified_samples,
    packed_tokens,
    tagged_samples,
    window_samples,
)

# To be raised whenever other arrays come of the same rows.
_VERSION: Final = 1
_LABELS: Final = "label-names"
_TRAINING: Final = "training"
_VALIDATION: Final = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Rows, and what makes tokens of them."""

    spec: DataSpec
    tokenizer: Any
    rows: Iterable[Row]
    held_out: Iterable[Row] | None

    def digest(self, tokenizer_folder: Path) -> str | None:
        """Another one whenever other tokens may come of it; None where the rows do not tell."""
        traces = [trace_of(rows) for rows in (self.rows, self.held_out) if rows is not None]
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
        """All arrays, in pieces to be put behind each other."""
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
        return RaggedSamples(
            ids=own["ids"],
            ends=own["ends"],
            # Where there is no sample there are no labels.
            labels=own.get("labels", own["ids"]),
            token_types=own.get("token_types"),
            has_tags=self._has_tags,
        )

    @property
    def _is_packed(self) -> bool:
        return self.spec.task == "causal-lm"

    @property
    def _has_tags(self) -> bool:
        return self.spec.task == "token-classification"

    def _pieces(self, rows: Iterable[Row], labels: Labels) -> Iterator[Arrays]:
        if self._is_packed:
            return ({"tokens": tokens} for tokens in packed_tokens(rows, self.tokenizer, self.spec))
        return flatten(self._list(rows, labels), has_tags=self._has_tags)

    def _list(self, rows: Iterable[Row], labels: Labels) -> Iterator[Sample]:
        spec, tokenizer = self.spec, self.tokenizer
        match spec.task:
            case "sequence-classification":
                return classified_samples(rows, tokenizer, spec, labels=labels)
            case "token-classification":
                return tagged_samples(rows, tokenizer, spec, labels=labels)
            case "question-answering":
                return answered_samples(rows, tokenizer, spec)
        return window_samples(rows, tokenizer, spec)

    def _collect_labels(self) -> Labels:
        spec, column = self.spec, label_column(self.spec)
        match spec.task:
            case "sequence-classification":
                return collect_labels(read_label(row, column) for row in self.rows)
            case "token-classification":
                words = ((row, len(read_words(row, text_column(spec)))) for row in self.rows)
                return collect_labels(tag for row, num in words for tag in read_tags(row, column, count=num))
        return Labels(())


def _file_digests(folder: Path) -> dict[str, str]:
    return {path.name: _digest(path.read_bytes()) for path in sorted(folder.iterdir()) if path.is_file()}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
