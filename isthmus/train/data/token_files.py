"""Tokens in files: made once on a machine, mapped by all its ranks, and kept between starts.

The arrays of one corpus are files of one folder, whose name is a digest of all that they come from. It is
written under another name and renamed when it is whole, so what is found is whole.
"""

import enum
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import tokenizers
import transformers

from isthmus.events import __version__
from isthmus.job import DataSpec, Job
from isthmus.job.load import sync
from isthmus.train.data.rows import (
    Labels,
    Row,
    collect_labels,
    label_column,
    read_label,
    read_tags,
    read_words,
    text_column,
    trace_of,
)
from isthmus.train.data.samples import (
    Arrays,
    Integers,
    PackedSamples,
    RaggedSamples,
    Sample,
    answered_samples,
    classified_samples,
    flatten,
    packed_tokens,
    tagged_samples,
    window_samples,
)

TOKENS_FOLDER: Final = "tokens"
_FACTS_FILE: Final = "arrays.json"
_LOCK_FILE: Final = "lock"
_FAILED: Final = ".failed"

Make = Callable[[], Iterable[Arrays]]
"""Makes arrays, in pieces to be put behind each other."""
_ArrayFacts = tuple[str, list[int], str]
"""Type, shape, and SHA-256 of the content."""


class _Turn(enum.Enum):
    """When a process makes tokens: before others, behind them, or on a disk that has no locks."""

    FIRST = enum.auto()
    AFTER_OTHERS = enum.auto()
    UNKNOWN = enum.auto()


class _NotMade(Exception):
    """Tokens could not be made: no fault of the disk that they are kept on."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFiles:
    """The folder in which all runs of a job keep their tokens."""

    folder: Path
    note: Callable[[str], None]

    def get(self, digest: str, make: Make) -> Arrays:
        """The arrays of a digest, mapped; one process makes them if need be, while others wait for it.

        Where they cannot be written they are held in memory, with a note.
        """
        found = _read(self.folder / digest)
        if found is not None:
            return found
        try:
            return self._get_in_turn(digest, make)
        except _NotMade as failed:
            raise failed.cause from None
        except OSError as error:
            reason = error.strerror or error
            self.note(
                f"every rank makes its own tokens, in memory, as none are kept in {self.folder}: {reason}"
            )
            return join(make())

    def content_digest(self, digest: str) -> str | None:
        """What `content_digest` gives for kept arrays, without reading them; None where none are kept."""
        facts = _read_facts(self.folder / digest)
        return None if facts is None else _digest_of(facts)

    def _get_in_turn(self, digest: str, make: Make) -> Arrays:
        with self._turn() as turn:
            found = _read(self.folder / digest)
            if found is not None:
                return found
            failed = self.folder / f"{digest}{_FAILED}"
            if turn is _Turn.AFTER_OTHERS and failed.exists():
                raise OSError(errno.ENOSPC, "another process could not write them")
            try:
                found = self._make(digest, make)
            except OSError:
                # Or all who wait would try in turn, and each make tokens for nothing.
                with suppress(OSError):
                    failed.touch()
                raise
            failed.unlink(missing_ok=True)
            if turn is not _Turn.UNKNOWN:
                self._clear(digest)
            return found

    @contextmanager
    def _turn(self) -> Iterator["_Turn"]:
        """Wait until no other process makes tokens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _LOCK_FILE).open("w") as file:
            yield self._lock(file)

    def _lock(self, file: IO[Any]) -> "_Turn":
        """Hold the lock until the file is closed, or the process is gone."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.note("waiting for the tokens, which another process makes")
            fcntl.flock(file, fcntl.LOCK_EX)
            return _Turn.AFTER_OTHERS
        except OSError:
            # A disk without locks: the same tokens made twice do no harm.
            return _Turn.UNKNOWN
        return _Turn.FIRST

    def _make(self, digest: str, make: Make) -> Arrays:
        self.note(f"making the tokens, which are kept in {self.folder}")
        target = self.folder / digest
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            new = Path(temporary) / digest
            new.mkdir()
            _write(new, _made(make))
            if _read(target) is None:
                shutil.rmtree(target, ignore_errors=True)
                new.rename(target)
        sync(self.folder)
        found = _read(target)
        if found is None:
            raise OSError(errno.EIO, "what was written there cannot be mapped")
        return found

    def _clear(self, digest: str) -> None:
        """Remove what nobody uses: tokens of other digests, and what killed makers have left."""
        for mark in self.folder.glob(f"*{_FAILED}"):
            mark.unlink(missing_ok=True)
        for other in self.folder.iterdir():
            if other.is_dir() and other.name != digest and _is_unused(other):
                shutil.rmtree(other, ignore_errors=True)


def tokens_of(job: Job, *, root: Path, note: Callable[[str], None]) -> TokenFiles:
    """Where runs of a job keep their tokens."""
    return TokenFiles(folder=root / job.name / TOKENS_FOLDER, note=note)


def join(pieces: Iterable[Arrays]) -> Arrays:
    """Arrays in memory, from their pieces."""
    found: dict[str, list[Integers]] = defaultdict(list)
    for piece in pieces:
        for name, array in piece.items():
            found[name].append(array)
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


def content_digest(arrays: Arrays) -> str:
    """SHA-256 in hex of what arrays hold."""
    return _digest_of(
        {name: _describe(array, hashlib.sha256(array.tobytes())) for name, array in arrays.items()}
    )


def _describe(array: Integers, content: "hashlib._Hash", *, num_rows: int | None = None) -> _ArrayFacts:
    rows = len(array) if num_rows is None else num_rows
    return array.dtype.str, [rows, *array.shape[1:]], content.hexdigest()


def _digest_of(facts: Mapping[str, _ArrayFacts]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _made(make: Make) -> Iterator[Arrays]:
    try:
        yield from make()
    except OSError as error:
        raise _NotMade(error) from error


def _write(folder: Path, pieces: Iterable[Arrays]) -> None:
    """One file for each array, piece by piece, so that they need not fit into memory."""
    facts: dict[str, _ArrayFacts] = {}
    contents: dict[str, hashlib._Hash] = defaultdict(hashlib.sha256)
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for piece in pieces:
            for name, array in piece.items():
                if name not in files:
                    files[name] = stack.enter_context((folder / name).open("wb"))
                data = array.tobytes()
                files[name].write(data)
                contents[name].update(data)
                counts[name] += len(array)
                facts[name] = _describe(array, contents[name], num_rows=counts[name])
    (folder / _FACTS_FILE).write_text(json.dumps(facts))
    for path in (*folder.iterdir(), folder):
        sync(path)


def _read(folder: Path) -> Arrays | None:
    """The arrays in a folder, mapped; None where they are not, or not as they were written."""
    facts = _read_facts(folder)
    if facts is None:
        return None
    try:
        return {name: _map(folder / name, np.dtype(kind), shape) for name, (kind, shape, _) in facts.items()}
    except (OSError, ValueError, TypeError):
        return None


def _read_facts(folder: Path) -> dict[str, _ArrayFacts] | None:
    try:
        facts = json.loads((folder / _FACTS_FILE).read_text())
        return {name: (str(kind), list(shape), str(sha256)) for name, (kind, shape, sha256) in facts.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _map(path: Path, kind: np.dtype[Any], shape: Sequence[int]) -> Integers:
    with path.open("rb") as file:
        if kind.kind not in "iu" or os.fstat(file.fileno()).st_size != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{path} is not as it was written")
        if 0 in shape:
            return np.empty(shape, kind)
        with suppress(OSError):
            # A map holds a copy of the descriptor, and with it the lock, for as long as it lives.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return np.asarray(np.memmap(file, kind, "r", shape=tuple(shape)))


def _is_unused(folder: Path) -> bool:
    """Whether no process has mapped a file of the folder."""
    with suppress(OSError), ExitStack() as stack:
        for path in folder.rglob("*"):
            if path.is_file():
                file = stack.enter_context(path.open("r+b"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


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
