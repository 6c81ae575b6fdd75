"""Records of named tensors and JSON facts in a store; a record is complete when its manifest is there.

A store keeps files by name: in a folder of a local or network disk, or at any address that fsspec knows.

    step-00000120/east/weights.0.3f2a91bc.safetensors    names without a slash, such as model.norm.weight
                       optimizer.0.3f2a91bc.safetensors  optimizer/exp_avg/model.norm.weight
                       wire.1.3f2a91bc.safetensors       wire/1/west.0/…
                       part.1.3f2a91bc.json              rank 1 has written all of its files
                       manifest.json                     where the rows of each tensor are, with shapes and
                                                         types; size and SHA-256 of each file; facts

Each rank of a cloud writes files of its own, with rank and session in their names, so that no file of a
complete record is ever written again. The manifest is written last. Tensors are found by their names and read
by rows, whatever ranks have written them. Nothing is pickled, and no file is used whose digest differs.
"""

import functools
import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    StringConstraints,
    ValidationError,
    model_validator,
)
from torch import Tensor

from isthmus.codec.base import flat_bytes
from isthmus.errors import UserError
from isthmus.job.load import sync
from isthmus.wan.packet import Buffer

CHECKPOINTS_FOLDER: Final = "checkpoints"
MANIFEST_FILE: Final = "manifest.json"
Facts = Mapping[str, Any]
"""JSON values by name."""

_WEIGHTS: Final = "weights"
_FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.safetensors$")]
_HEADER_MULTIPLE: Final = 8
_MAX_MANIFEST_BYTES: Final = 2**28
_READ_BYTES: Final = 2**25
_SAFETENSORS_NAMES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


class DiskStore:
    """Files by name, with slashes, in a folder; what it cannot do raises an OSError."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder = folder

    def list(self) -> set[str]:
        """The names of all files; those that were cut short are among them."""
        found = os.walk(self._folder, onerror=_unless_gone)
        paths = (Path(folder, name) for folder, _, names in found for name in names)
        return {path.relative_to(self._folder).as_posix() for path in paths}

    def put(self, name: str, data: Iterable[Buffer]) -> None:
        """Write a file, which replaces one of that name only when it is whole and lasts."""
        path = self._folder / name
        new = path.with_name(f".{path.name}.new")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with new.open("wb") as file:
                file.writelines(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        for folder in Path(name).parents:
            sync(self._folder / folder)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some bytes of a file, or all; fewer where it ends before."""
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there, and the folders that are empty then."""
        (self._folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            for folder in Path(name).parents[:-1]:
                (self._folder / folder).rmdir()


def _unless_gone(error: OSError) -> None:
    # Another cloud may delete its own files meanwhile.
    if not isinstance(error, FileNotFoundError):
        raise error


class RemoteStore:
    """Files by name at an address of fsspec, such as a prefix of a bucket."""

    def __init__(self, address: str) -> None:
        try:
            import fsspec

            files, root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"checkpoint.store = {address!r} cannot be used: {error}",
                hint="install what it names, such as s3fs for s3://, or give the address of a folder",
            ) from error
        self.place = address
        self._files: Any = files
        self._root = str(root)

    def list(self) -> set[str]:
        """The names of all files."""
        with _reached():
            self._files.invalidate_cache()
            return {path.removeprefix(f"{self._root}/") for path in self._files.find(self._root)}

    def put(self, name: str, data: Iterable[Buffer]) -> None:
        """Write a file."""
        with _reached(), self._files.open(f"{self._root}/{name}", "wb") as file:
            file.writelines(data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some bytes of a file, or all; fewer where it ends before."""
        with _reached():
            return bytes(self._files.cat_file(f"{self._root}/{name}", start=start, end=stop))

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with _reached(), suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")


Store = DiskStore | RemoteStore


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # Each file system of fsspec has errors of its own.
        raise OSError(f"{type(error).__name__}: {error}") from error


def open_store(run: Path, address: str | None) -> Store:
    """The store of a run's checkpoints: at the address that the job names, or in the run directory."""
    if address is None:
        return DiskStore(run / CHECKPOINTS_FOLDER)
    if "://" not in (folder := address.removeprefix("file://")):
        return DiskStore(Path(folder) / run.parent.name / run.name)
    return RemoteStore(f"{address.rstrip('/')}/{run.parent.name}/{run.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRows:
    """The rows of a tensor that one rank holds, from `start` on; `shape` is that of the whole tensor."""

    own: Tensor
    shape: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a record, of which a rank reads the rows that it needs."""

    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]

    def load(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Some rows on the host, or all; a scalar is one row."""
        num_rows = _num_rows(self.shape)
        rows = self.read(start, num_rows if stop is None else min(stop, num_rows))
        return rows if self.shape else rows.view(())


class _Piece(BaseModel):
    file: str
    offset: NonNegativeInt
    start: NonNegativeInt
    num_rows: NonNegativeInt


class SavedTensor(BaseModel):
    """The shape and type of a tensor of a record, and the files that hold its rows."""

    shape: tuple[NonNegativeInt, ...]
    dtype: str
    pieces: tuple[_Piece, ...]

    @property
    def row_bytes(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return math.prod(self.shape[1:]) * itemsize

    @property
    def is_whole(self) -> bool:
        """Whether each row is in one piece."""
        end = 0
        for piece in sorted(self.pieces, key=lambda one: (one.start, one.num_rows)):
            if piece.start != end:
                return False
            end += piece.num_rows
        return end == _num_rows(self.shape)


class SavedFile(BaseModel):
    """The size and digest of a file of a record."""

    num_bytes: NonNegativeInt
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """The contents of a record, or of the part of one rank."""

    model_config = ConfigDict(strict=False)

    format: Literal[2]
    facts: dict[str, Any]
    files: dict[_FileName, SavedFile]
    tensors: dict[str, SavedTensor]

    @model_validator(mode="after")
    def _check_tensors(self) -> Self:
        for one in self.tensors.values():
            if getattr(torch, one.dtype, None) not in _SAFETENSORS_NAMES:
                raise ValueError(f"there is a tensor of type {one.dtype[:50]!r}")
            for piece in one.pieces:
                file = self.files.get(piece.file)
                if file is None:
                    raise ValueError("a tensor is in a file that is not listed")
                if piece.offset + piece.num_rows * one.row_bytes > file.num_bytes:
                    raise ValueError("a tensor is longer than its file")
        return self

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    @property
    def missing(self) -> str | None:
        """The first tensor of which rows are missing, or come twice."""
        return next((name for name, one in self.tensors.items() if not one.is_whole), None)


def merged(parts: Sequence[Manifest], facts: Facts) -> Manifest:
    """The manifest of a record from those of all its parts."""
    tensors: dict[str, SavedTensor] = {}
    for part in parts:
        for name, one in part.tensors.items():
            before = tensors.setdefault(name, one.model_copy(update={"pieces": ()}))
            if (before.shape, before.dtype) != (one.shape, one.dtype):
                raise ValueError(f"ranks have saved {name} with different shapes")
            tensors[name] = before.model_copy(update={"pieces": before.pieces + one.pieces})
    files = {name: file for part in parts for name, file in part.files.items()}
    whole = Manifest(format=2, facts=dict(facts), files=files, tensors=tensors)
    if whole.missing is not None:
        raise ValueError(f"no rank has saved all of {whole.missing}")
    return whole


class Records:
    """The records of a store, by names such as `step-00000120/east`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._verified: set[tuple[str, str]] = set()

    def list(self) -> dict[str, set[str]]:
        """The files of each record, also of those that were cut short."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for path in sorted(self.store.list()):
            name, _, file = path.rpartition("/")
            found[name].add(file)
        return dict(found)

    def put(
        self,
        name: str,
        suffix: str,
        tensors: Mapping[str, ShardRows],
        facts: Facts,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Write the files of one part, which count once a manifest lists them.

        Before each tensor `check` may end it with an OSError.
        """
        files: dict[str, SavedFile] = {}
        saved: dict[str, SavedTensor] = {}
        for group, own in _grouped(tensors).items():
            file = f"{group}.{suffix}.safetensors"
            files[file] = self._write(f"{name}/{file}", own, check)
            offset = files[file].num_bytes - sum(rows.own.nbytes for rows in own.values())
            for key, rows in own.items():
                num_rows = _num_rows(rows.own.shape)
                piece = _Piece(file=file, offset=offset, start=rows.start, num_rows=num_rows)
                dtype = str(rows.own.dtype).partition(".")[2]
                saved[key] = SavedTensor(shape=rows.shape, dtype=dtype, pieces=(piece,))
                offset += rows.own.nbytes
        return Manifest(format=2, facts=dict(facts), files=files, tensors=saved)

    def commit(self, name: str, manifest: Manifest, file: str = MANIFEST_FILE) -> None:
        """Write a manifest, with which a record, or a part of it, is complete."""
        text = json.dumps(manifest.model_dump(), allow_nan=False) + "\n"
        self.store.put(f"{name}/{file}", [text.encode()])

    def manifest(self, name: str) -> Manifest:
        """The contents of a record; refused where they make no sense."""
        with self._reading(name):
            return self.read_manifest(name)

    def get(self, name: str, manifest: Manifest, tensors: Iterable[str]) -> dict[str, StoredTensor]:
        """Some tensors of a record; refused where a file is not as it was written."""
        with self._reading(name):
            wanted = {tensor: manifest.tensors[tensor] for tensor in tensors}
            for file in {piece.file for one in wanted.values() for piece in one.pieces}:
                self._verify(name, file, manifest.files[file])
        return {
            tensor: StoredTensor(shape=one.shape, read=functools.partial(self._read_rows, name, one))
            for tensor, one in wanted.items()
        }

    def check(self, name: str) -> str | None:
        """The reason why a record cannot be used; None where every byte is as it was written."""
        try:
            manifest = self.read_manifest(name)
            if manifest.missing is not None:
                return f"its {MANIFEST_FILE} does not say where all of {manifest.missing[:100]} is"
            for file, about in manifest.files.items():
                self._verify(name, file, about)
        except (OSError, ValueError) as error:
            return _told(error)
        return None

    def remove(self, name: str, files: Iterable[str]) -> None:
        """Delete files of a record; without its manifest it no longer counts, so that goes first."""
        for file in sorted(files, key=lambda one: (one != MANIFEST_FILE, one)):
            self.store.remove(f"{name}/{file}")

    def _write(self, path: str, tensors: Mapping[str, ShardRows], check: Callable[[], None]) -> SavedFile:
        digest, num_bytes = hashlib.sha256(), 0

        def data() -> Iterator[Buffer]:
            nonlocal num_bytes
            about = {name: (tuple(rows.own.shape), rows.own.dtype) for name, rows in tensors.items()}
            for one in safetensors_data(about, (rows.own for rows in tensors.values())):
                check()
                digest.update(one)
                num_bytes += memoryview(one).nbytes
                yield one

        self.store.put(path, data())
        return SavedFile(num_bytes=num_bytes, sha256=digest.hexdigest())

    def read_manifest(self, name: str, file: str = MANIFEST_FILE) -> Manifest:
        """The contents of a record or a part; an OSError or ValueError where there are none."""
        data = self.store.get(f"{name}/{file}", 0, _MAX_MANIFEST_BYTES)
        try:
            return Manifest.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))[:100]
            raise ValueError(f"its {file} makes no sense ({place}: {first['msg']})") from error

    def _verify(self, name: str, file: str, about: SavedFile) -> None:
        """Raise ValueError with the reason if a file is not as it was written."""
        seen = (f"{name}/{file}", about.sha256)
        if seen in self._verified:
            return
        digest, end = hashlib.sha256(), 0
        try:
            # One byte more than there should be shows a file that is too long.
            while data := self.store.get(seen[0], end, min(end + _READ_BYTES, about.num_bytes + 1)):
                digest.update(data)
                end += len(data)
                if end >= about.num_bytes:
                    break
        except OSError as error:
            raise ValueError(f"{file}: {_told(error)}") from error
        if end != about.num_bytes:
            raise ValueError(
                f"{file} has {'more' if end > about.num_bytes else end} bytes instead of {about.num_bytes}"
            )
        if digest.hexdigest() != about.sha256:
            raise ValueError(f"{file} is not as it was written (its SHA-256 differs)")
        # What was verified at the start of a run is not verified again when it is loaded.
        self._verified.add(seen)

    def _read_rows(self, name: str, saved: SavedTensor, start: int, stop: int) -> Tensor:
        rows = torch.empty((stop - start, *saved.shape[1:]), dtype=getattr(torch, saved.dtype))
        into, row_bytes = flat_bytes(rows).numpy(), saved.row_bytes
        for piece in saved.pieces:
            first, last = max(start, piece.start), min(stop, piece.start + piece.num_rows)
            if first < last and row_bytes:
                at, size = piece.offset + (first - piece.start) * row_bytes, (last - first) * row_bytes
                with self._reading(name):
                    data = np.frombuffer(self.store.get(f"{name}/{piece.file}", at, at + size), np.uint8)
                    into[(first - start) * row_bytes :][:size] = data
        return rows

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise UserError(
                f"the checkpoint {name} in {self.store.place} cannot be used: {_told(error)}",
                hint="put a whole copy in its place, or start again with --resume never",
            ) from error


def safetensors_data(
    about: Mapping[str, tuple[tuple[int, ...], torch.dtype]], tensors: Iterable[Tensor]
) -> Iterator[Buffer]:
    """The bytes of a safetensors file; the tensors come in the same order, one at a time."""
    entries, end = {}, 0
    for name, (shape, dtype) in about.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _HEADER_MULTIPLE)
    yield len(header).to_bytes(8, "little") + header
    # No name here holds on to a tensor while the next one is gathered.
    yield from map(_data_of, tensors)


def _data_of(tensor: Tensor) -> Buffer:
    data: memoryview = flat_bytes(tensor.detach().cpu()).numpy().data
    return data


def widest_first(names: Iterable[str], dtype: Callable[[str], torch.dtype]) -> list[str]:
    """Names in the order of a file: wide types come first, since each tensor must be aligned to its type."""
    return sorted(names, key=lambda name: -dtype(name).itemsize)


def _grouped(tensors: Mapping[str, ShardRows]) -> dict[str, dict[str, ShardRows]]:
    """The tensors of each file; those of which this rank has no rows are in none."""
    groups: defaultdict[str, dict[str, ShardRows]] = defaultdict(dict)
    for name in widest_first(tensors, lambda name: tensors[name].own.dtype):
        group, slash, _ = name.partition("/")
        if tensors[name].own.numel() or not math.prod(tensors[name].shape):
            groups[group if slash else _WEIGHTS][name] = tensors[name]
    return dict(groups)


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _told(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
