"""Where rows come from: text, JSON lines and parquet files, Hugging Face datasets, and built-in corpora."""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from isthmus.corpora import CORPORA
from isthmus.errors import UserError
from isthmus.job.findings import suggest

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
    """Files of rows, read in the order of their names, each time anew."""

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
    """The rows that a job's `source` names; they can be gone through any number of times."""
    if source.startswith(_BUILTIN):
        return _built_in(source.removeprefix(_BUILTIN))
    if source.startswith(_HUB):
        return _hub_dataset(source.removeprefix(_HUB))
    return _files(source)


def trace_of(rows: Iterable[Row]) -> object:
    """Plain values that change when the rows do: files with sizes and times; None where nothing tells."""
    match rows:
        case BuiltIn(name):
            return name
        case Split():
            return trace_of(rows.rows)
        case Files(paths):
            files = paths
        case _:
            # A Hugging Face dataset lies in files of its own, unless it is held in memory.
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
    """The paragraphs of a text file: what stands between empty lines."""
    lines: list[str] = []
    for line in _lines(path):
        if line.strip():
            lines.append(line)
        elif lines:
            yield {"text": "".join(lines).rstrip("\n")}
            lines = []
    if lines:
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
            hint="pip install 'isthmus[datasets]'",
        ) from None


_READERS: Final[Mapping[str, Callable[[Path], Iterator[Row]]]] = MappingProxyType(
    {".txt": _read_text, ".jsonl": _read_json_lines, ".parquet": _read_parquet}
)
