"""Rows of data: where they come from (files, Hugging Face datasets, built-in corpora), and their columns."""

import hashlib
import importlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.job import DataSpec
from isthmus.train.data.corpora import CORPORA
from isthmus.units import suggest

Row = Mapping[str, object]
"""One example: its columns by name."""

_BUILTIN: Final = "builtin:"
_HUB: Final = "hf:"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A corpus that ships with the package."""

    name: str

    def __iter__(self) -> Iterator[Row]:
        return CORPORA[self.name]()


@dataclass(frozen=True, slots=True)
class Files:
    """Files of rows, read in the order of their names."""

    paths: tuple[Path, ...]

    def __iter__(self) -> Iterator[Row]:
        for path in self.paths:
            yield from _READERS[path.suffix](path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The rows that are held out for validation, or all others: one in `every`, the same in every run."""

    rows: Iterable[Row]
    every: int
    is_held_out: bool

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(self.rows):
            if is_held_out(number, self.every) == self.is_held_out:
                yield row


def open_rows(source: str) -> Iterable[Row]:
    """The rows that a job's `source` names; they can be iterated any number of times."""
    if source.startswith(_BUILTIN):
        return _built_in(source.removeprefix(_BUILTIN))
    if source.startswith(_HUB):
        return _hub_dataset(source.removeprefix(_HUB))
    return _files(source)


def trace_of(rows: Iterable[Row]) -> object:
    """JSON values that change when the rows do: files with sizes and times; None where that is not known."""
    match rows:
        case BuiltIn(name):
            return name
        case Split():
            return trace_of(rows.rows)
        case Files(paths):
            files = paths
        case _:
            # A Hugging Face dataset has files in its cache, unless it is in memory.
            files = tuple(Path(one["filename"]) for one in getattr(rows, "cache_files", ()))
    stats = [(str(path), path.stat()) for path in files]
    return [(name, one.st_size, one.st_mtime_ns) for name, one in stats] or None


def is_held_out(number: int, every: int) -> bool:
    """Whether a row is held out: one of each block of rows, at no regular distance."""
    block, offset = divmod(number, every)
    drawn = hashlib.blake2b(f"held out of block {block}".encode(), digest_size=8)
    return offset == int.from_bytes(drawn.digest()) % every


def _built_in(name: str) -> BuiltIn:
    if name not in CORPORA:
        raise UserError(f"there is no built-in corpus {name!r}", hint=suggest(name, CORPORA))
    return BuiltIn(name)


def _files(pattern: str) -> Files:
    paths = tuple(sorted(path for path in map(Path, glob(pattern, recursive=True)) if path.is_file()))  # noqa: PTH207 absolute patterns too
    if not paths:
        raise UserError(
            f"no file is found at {pattern!r}",
            hint=f'give files as seen from here, or "{_HUB}{pattern}" for a Hugging Face dataset',
        )
    for path in paths:
        if path.suffix not in _READERS:
            raise UserError(
                f"{path} is of no known kind", hint=f"name files that end in {', '.join(_READERS)}"
            )
    return Files(paths)


def _hub_dataset(name: str) -> Iterable[Row]:
    """The rows of NAME, NAME:CONFIG or NAME:CONFIG#SPLIT; the split is "train" unless given."""
    path, _, split = name.partition("#")
    path, _, config = path.partition(":")
    datasets = _extra("datasets")
    try:
        loaded: Iterable[Row] = datasets.load_dataset(path, config or None, split=split or "train")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"the Hugging Face dataset {name!r} cannot be loaded: {reason}",
            hint='write "hf:NAME", "hf:NAME:CONFIG" or "hf:NAME:CONFIG#SPLIT" of one that can be reached',
        ) from None
    return loaded


def _read_text(path: Path) -> Iterator[Row]:
    """The paragraphs of a text file, which empty lines separate."""
    for has_text, lines in itertools.groupby(_lines(path), key=lambda line: bool(line.strip())):
        if has_text:
            yield {"text": "".join(lines).rstrip("\n")}


def _read_json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield _json_row(line, f"line {number} of {path}")


def _json_row(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise UserError(f"{place} is no JSON object", hint='write one object a line, such as {"text": "..."}')
    return row


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except UnicodeDecodeError:
        raise UserError(f"{path} is not in UTF-8", hint="convert it, with iconv say") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    arrow, parquet = _extra("pyarrow"), _extra("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is no parquet file that can be read: {error}") from None


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = module.partition(".")[0]
        raise UserError(
            f"this source needs the package {package!r}, which is not installed",
            hint="in the clone of isthmus: pip install '.[datasets]'",
        ) from None


_READERS: Final[Mapping[str, Callable[[Path], Iterator[Row]]]] = MappingProxyType(
    {".txt": _read_text, ".jsonl": _read_json_lines, ".parquet": _read_parquet}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Where a context answers its question, in characters; an empty span where it does not."""

    question: str
    context: str
    start: int
    end: int


def text_column(spec: DataSpec) -> str:
    """The column of the text, or of the words."""
    return spec.text_column or ("tokens" if spec.task == "token-classification" else "text")


def label_column(spec: DataSpec) -> str:
    """The column of the label, or of the words' tags."""
    return spec.label_column or ("tags" if spec.task == "token-classification" else "label")


def read_texts(row: Row, spec: DataSpec) -> tuple[str, ...]:
    """All text of a row, for the training of a tokenizer."""
    match spec.task:
        case "question-answering":
            return read_text(row, "question"), read_text(row, "context")
        case "token-classification":
            return (" ".join(read_words(row, text_column(spec))),)
    columns = (text_column(spec), *([spec.pair_column] if spec.pair_column else []))
    return tuple(read_text(row, column) for column in columns)


def read_text(row: Row, column: str) -> str:
    text: str = _read(row, column, "text", lambda value: isinstance(value, str))
    return text


def read_words(row: Row, column: str) -> list[str]:
    words: list[str] = _read(row, column, "a list of words", _are_words)
    return words


def read_labels(row: Row, spec: DataSpec) -> list[int | str]:
    """The label of a row, or the tags of its words; none for a task without classes."""
    column = label_column(spec)
    match spec.task:
        case "sequence-classification":
            return [_read(row, column, "a whole number or a name", _is_label)]
        case "token-classification":
            count = len(read_words(row, text_column(spec)))
            tags: list[int | str] = _read(row, column, "a list of tags", _are_labels)
            if len(tags) != count:
                raise _misfit(row, column, f"a list of {count} tags, one for each word")
            return tags
    return []


def read_answer(row: Row) -> Answer:
    """The question, its context, and the first of the answers."""
    question, context = read_text(row, "question"), read_text(row, "context")
    wanted = 'as {"text": ["..."], "answer_start": [0]}, where the context has that text'
    match _read(row, "answers", wanted, lambda value: isinstance(value, Mapping)):
        case {"text": [], "answer_start": []}:
            return Answer(question=question, context=context, start=0, end=0)
        case {"text": [str(text), *_], "answer_start": [int(start), *_]} if context.startswith(text, start):
            return Answer(question=question, context=context, start=start, end=start + len(text))
    raise _misfit(row, "answers", wanted)


def _read(row: Row, column: str, wanted: str, is_fine: Callable[[object], bool]) -> Any:
    if column not in row:
        raise UserError(
            f"a row of the data has no {column!r}",
            hint=f"its columns are {', '.join(map(repr, row)) or 'none'}: name the right one in [data]",
        )
    if not is_fine(row[column]):
        raise _misfit(row, column, wanted)
    return row[column]


def _are_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_label(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _are_labels(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_label, value))


def _misfit(row: Row, column: str, wanted: str) -> UserError:
    shown = repr(row[column])
    short = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return UserError(
        f"{column!r} of a row is {short}",
        hint=f"it must be {wanted}: correct the data, or name another column in [data]",
    )


@dataclass(frozen=True, slots=True)
class Labels:
    """The names of the classes, in the order of their numbers."""

    names: tuple[str, ...]

    def number(self, label: int | str) -> int:
        if isinstance(label, int) and 0 <= label < len(self.names):
            return label
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        raise UserError(
            f"the label {label!r} is not among those of the training data",
            hint=f"they are {', '.join(self.names)}",
        )


def collect_labels(labels: Iterable[int | str]) -> Labels:
    """The classes of the labels that occur: names in the order of the alphabet, numbers up to the highest."""
    found = set(labels)
    numbers = {label for label in found if isinstance(label, int)}
    if numbers and (numbers != found or min(numbers) < 0):
        raise UserError(
            "the labels are neither all names nor all numbers from 0 on",
            hint="use names, or numbers that count the classes from 0",
        )
    if numbers:
        return Labels(tuple(map(str, range(max(numbers) + 1))))
    return Labels(tuple(sorted(map(str, found))))
