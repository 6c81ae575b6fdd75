"""Rows of data: where they come from (files, Hugging Face datasets, built-in corpora), and their columns."""

import hashlib
import itertools
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from isthmus.errors import UserError, import_extra
from isthmus.job import DataSpec
from isthmus.units import suggest

Row = Mapping[str, object]
"""One example: its columns by name."""

_BUILTIN: Final = "builtin:"
_CORPORA: Final = Path(__file__).parent
"""The folder of the built-in corpora."""
_HUB: Final = "hf:"
NOT_HERE: Final = ""
"""Stands for the column that another cloud reads, of texts or of translations."""

T = TypeVar("T")
_TEXT: Final = TypeAdapter(str)
_WORDS: Final = TypeAdapter(list[str])
_LABEL: Final = TypeAdapter[int | str](int | str)
_TAGS: Final = TypeAdapter(list[int | str])
_ANSWERS: Final = TypeAdapter(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that can be iterated any number of times, and a trace: JSON values that change when they do."""

    read: Callable[[], Iterable[Row]]
    trace: Callable[[], object]
    """Files with sizes and times, or a name; None where nothing is known."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.read())


def open_rows(source: str) -> Rows:
    """The rows that a job's `source` names."""
    if source.startswith(_BUILTIN):
        name, known = source.removeprefix(_BUILTIN), sorted(_CORPORA.glob("*.jsonl.xz"))
        path = _CORPORA / f"{name}.jsonl.xz"
        if path not in known:
            names = [one.name.removesuffix(".jsonl.xz") for one in known]
            raise UserError(f"there is no built-in corpus {name!r}", hint=suggest(name, names))
        return Rows(lambda: _read_json_lines(path), lambda: name)
    if source.startswith(_HUB):
        return _hub_dataset(source.removeprefix(_HUB))
    return _files(source)


def split_rows(rows: Rows, *, every: int, id_column: str | None = None) -> tuple[Rows, Rows]:
    """The rows to train on, and one in `every` that is held out, the same in every run.

    By ids they are the same for texts and their translations, in any order.
    """

    def is_out(number: int, row: Row) -> bool:
        return is_held_out(number, every) if id_column is None else key_of(row, id_column) % every == 0

    def read(is_wanted: bool) -> Iterator[Row]:
        return (row for number, row in enumerate(rows) if is_out(number, row) == is_wanted)

    return Rows(lambda: read(False), rows.trace), Rows(lambda: read(True), rows.trace)


def key_of(row: Row, column: str) -> int:
    """A number of 63 bits that stands for the id of a row; the same id gives the same one in every cloud."""
    own = str(_read(row, column, _LABEL, "a whole number or a name"))
    return int.from_bytes(hashlib.blake2b(own.encode(), digest_size=8).digest()) >> 1


def is_held_out(number: int, every: int) -> bool:
    """Whether a row is held out: one of each block of rows, at no regular distance."""
    block, offset = divmod(number, every)
    drawn = hashlib.blake2b(f"held out of block {block}".encode(), digest_size=8)
    return offset == int.from_bytes(drawn.digest()) % every


def _files(pattern: str) -> Rows:
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
    return Rows(
        lambda: itertools.chain.from_iterable(_READERS[path.suffix](path) for path in paths),
        lambda: _stats(paths),
    )


def _stats(paths: Iterable[Path]) -> object:
    stats = [(str(path), path.stat()) for path in paths]
    return [(name, one.st_size, one.st_mtime_ns) for name, one in stats] or None


def _hub_dataset(name: str) -> Rows:
    """The rows of NAME, NAME:CONFIG or NAME:CONFIG#SPLIT; the split is "train" unless given."""
    path, _, split = name.partition("#")
    path, _, config = path.partition(":")
    datasets = import_extra("datasets", extra="datasets", what="this source")
    try:
        loaded = datasets.load_dataset(path, config or None, split=split or "train")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"the Hugging Face dataset {name!r} cannot be loaded: {reason}",
            hint='write "hf:NAME", "hf:NAME:CONFIG" or "hf:NAME:CONFIG#SPLIT" of one that can be reached',
        ) from None
    # A dataset has files in its cache, unless it is in memory.
    files = [Path(one["filename"]) for one in getattr(loaded, "cache_files", ())]
    return Rows(lambda: loaded, lambda: _stats(files))


def _read_text(path: Path) -> Iterator[Row]:
    """The paragraphs of a text file, which empty lines separate."""
    for has_text, lines in itertools.groupby(_lines(path), key=lambda line: bool(line.strip())):
        if has_text:
            yield {"text": "".join(lines).rstrip("\n")}


def _read_json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            hint = 'write one object a line, such as {"text": "..."}'
            raise UserError(f"line {number} of {path} is no JSON object", hint=hint)
        yield row


def _lines(path: Path) -> Iterator[str]:
    try:
        with (
            lzma.open(path, "rt", encoding="utf-8")
            if path.suffix == ".xz"
            else path.open(encoding="utf-8") as file
        ):
            yield from file
    except UnicodeDecodeError:
        raise UserError(f"{path} is not in UTF-8", hint="convert it, with iconv say") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    arrow, parquet = (
        import_extra(name, extra="datasets", what="this source") for name in ("pyarrow", "pyarrow.parquet")
    )
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is no parquet file that can be read: {error}") from None


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
        case "translation":
            return tuple(read_text(row, column) for column in translation_columns(spec) if column != NOT_HERE)
    columns = (text_column(spec), *([spec.pair_column] if spec.pair_column else []))
    return tuple(read_text(row, column) for column in columns)


def translation_columns(spec: DataSpec) -> tuple[str, str]:
    """The columns of the texts and of their translations; of one of them, where another cloud reads it."""
    source, target = spec.text_column, spec.pair_column
    return "text" if source is None else source, "translation" if target is None else target


def read_text(row: Row, column: str) -> str:
    return _read(row, column, _TEXT, "text")


def read_words(row: Row, column: str) -> list[str]:
    return _read(row, column, _WORDS, "a list of words")


def read_labels(row: Row, spec: DataSpec) -> list[int | str]:
    """The label of a row, or the tags of its words; none for a task without classes."""
    column = label_column(spec)
    match spec.task:
        case "sequence-classification":
            return [_read(row, column, _LABEL, "a whole number or a name")]
        case "token-classification":
            count = len(read_words(row, text_column(spec)))
            wanted = f"a list of {count} tags, one for each word"
            tags = _read(row, column, _TAGS, wanted)
            if len(tags) != count:
                raise _misfit(row, column, wanted)
            return tags
    return []


def read_answer(row: Row) -> Answer:
    """The question, its context, and the first of the answers."""
    question, context = read_text(row, "question"), read_text(row, "context")
    wanted = 'as {"text": ["..."], "answer_start": [0]}, where the context has that text'
    match _read(row, "answers", _ANSWERS, wanted):
        case {"text": [], "answer_start": []}:
            return Answer(question=question, context=context, start=0, end=0)
        case {"text": [str(text), *_], "answer_start": [int(start), *_]} if context.startswith(text, start):
            return Answer(question=question, context=context, start=start, end=start + len(text))
    raise _misfit(row, "answers", wanted)


def _read(row: Row, column: str, kind: TypeAdapter[T], wanted: str) -> T:
    if column not in row:
        raise UserError(
            f"a row of the data has no {column!r}",
            hint=f"its columns are {', '.join(map(repr, row)) or 'none'}: name the right one in [data]",
        )
    try:
        return kind.validate_python(row[column], strict=True)
    except ValidationError:
        raise _misfit(row, column, wanted) from None


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
