"""Stores keep records of named tensors and JSON facts; a record is complete or not there.

A record is a folder of safetensors files and a manifest, which is written last:

    step-00000120/east/weights.safetensors      names without a slash, such as model.norm.weight
                       optimizer.safetensors    optimizer/exp_avg/model.norm.weight
                       wire.safetensors         wire/0/west/…
                       manifest.json            file, shape and type of each tensor; size and SHA-256 of each
                                                file; facts

Tensors are found by their names, and are written and read one at a time, so that a record need not fit into
memory. Nothing is pickled, and no file is used whose digest differs from the manifest's.
"""

import functools
import hashlib
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    StringConstraints,
    ValidationError,
    model_validator,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.codec.base import flat_bytes
from isthmus.errors import UserError
from isthmus.job.load import sync

MANIFEST_FILE: Final = "manifest.json"
Facts = Mapping[str, Any]
"""JSON values by name."""

_WEIGHTS: Final = "weights"
_SUFFIX: Final = ".safetensors"
_FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.safetensors$")]
_HEADER_MULTIPLE: Final = 8
_SAFETENSORS_NAMES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTensor:
    """A tensor that is gathered or read when it is needed; ranks that hold shards of it load it together."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def files_of(tensors: Mapping[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """The tensors of each file of a record, in the order in which they are written.

    Wide types come first, since each tensor must be aligned to its type.
    """
    files: dict[str, dict[str, LazyTensor]] = defaultdict(dict)
    for name in sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize):
        group, slash, _ = name.partition("/")
        files[f"{group if slash else _WEIGHTS}{_SUFFIX}"][name] = tensors[name]
    return files


def load_in_turn(tensors: Mapping[str, LazyTensor]) -> None:
    """Load and drop all tensors in the order in which a leader writes them, to take part in gathering."""
    for own in files_of(tensors).values():
        for tensor in own.values():
            tensor.load()


def write_tensors(path: Path, tensors: Mapping[str, LazyTensor]) -> "SavedFile":
    """Write a safetensors file, wide types first; one tensor at a time is in memory."""
    about, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.num_bytes
        about[name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    header = json.dumps(about).encode()
    header += b" " * (-len(header) % _HEADER_MULTIPLE)
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def write(data: Any) -> None:
            file.write(data)
            digest.update(data)

        write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            write(flat_bytes(tensor.load().detach().cpu().contiguous()).numpy().data)
        num_bytes = file.tell()
    sync(path)
    return SavedFile(num_bytes=num_bytes, sha256=digest.hexdigest())


class SavedTensor(BaseModel):
    """The file of a tensor of a record, its shape and its type."""

    file: str
    shape: tuple[NonNegativeInt, ...]
    dtype: str


class SavedFile(BaseModel):
    """The size and digest of a file of a record."""

    num_bytes: NonNegativeInt
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """The contents of a record, as `manifest.json` has them."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1]
    facts: dict[str, Any]
    files: dict[_FileName, SavedFile]
    tensors: dict[str, SavedTensor]

    @model_validator(mode="after")
    def _check_tensors(self) -> Self:
        for one in self.tensors.values():
            if one.file not in self.files:
                raise ValueError("a tensor is in a file that is not listed")
            if getattr(torch, one.dtype, None) not in _SAFETENSORS_NAMES:
                raise ValueError(f"there is a tensor of type {one.dtype[:50]!r}")
        return self


class Store(Protocol):
    """Keeps records by name."""

    def names(self) -> tuple[str, ...]:
        """The names of all complete records, in order."""

    def unfinished(self) -> tuple[str, ...]:
        """The names of records whose writing or removal was interrupted."""

    def put(self, name: str, tensors: Mapping[str, LazyTensor], facts: Facts) -> None:
        """Write a record, which replaces one of that name; after an OSError nothing of it is left."""

    def manifest(self, name: str) -> Manifest:
        """The contents of a record."""

    def get(self, name: str, tensors: Sequence[str]) -> dict[str, LazyTensor]:
        """Some tensors of a record, on the host; refused where a file is not as it was written."""

    def check(self, name: str) -> str | None:
        """The reason why a record cannot be used; None where every byte is as it was written."""

    def rename(self, name: str, to: str) -> None:
        """Give a record another name."""

    def remove(self, name: str) -> None:
        """Delete a record, or what is left of it."""


class DiskStore:
    """Records as folders below one folder; a name has two parts, such as `step-00000120/east`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._verified: set[tuple[Path, int, int]] = set()

    def names(self) -> tuple[str, ...]:
        found = (path.parent for path in self._folder.glob(f"*/[!.]*/{MANIFEST_FILE}"))
        return tuple(sorted(self._name(path) for path in found))

    def unfinished(self) -> tuple[str, ...]:
        written = set(self.names())
        found = [path for path in self._folder.glob("*/*/") if self._name(path) not in written]
        return tuple(sorted({self._name(_target(path)) for path in found}))

    def put(self, name: str, tensors: Mapping[str, LazyTensor], facts: Facts) -> None:
        folder = self._folder / name
        new = _beside(folder)
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir(parents=True)
            _write(new, tensors, facts)
            self._delete(folder)
            new.rename(folder)
            sync(folder.parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            _drop_if_empty(folder.parent)

    def manifest(self, name: str) -> Manifest:
        with self._reading(name):
            return self._read_manifest(name)

    def get(self, name: str, tensors: Sequence[str]) -> dict[str, LazyTensor]:
        manifest = self.manifest(name)
        with self._reading(name):
            for file in {manifest.tensors[tensor].file for tensor in tensors}:
                self._verify(self._folder / name / file, manifest.files[file])

        def load(tensor: str) -> Tensor:
            path = self._folder / name / manifest.tensors[tensor].file
            with self._reading(name), safe_open(path, framework="pt") as opened:
                found: Tensor = opened.get_tensor(tensor)
                return found

        return {
            tensor: LazyTensor(
                shape=manifest.tensors[tensor].shape,
                dtype=getattr(torch, manifest.tensors[tensor].dtype),
                load=functools.partial(load, tensor),
            )
            for tensor in tensors
        }

    def check(self, name: str) -> str | None:
        try:
            for file, about in self._read_manifest(name).files.items():
                self._verify(self._folder / name / file, about)
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def rename(self, name: str, to: str) -> None:
        self.remove(to)
        (self._folder / to).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / name).rename(self._folder / to)
        sync((self._folder / to).parent)

    def remove(self, name: str) -> None:
        folder = self._folder / name
        shutil.rmtree(_beside(folder), ignore_errors=True)
        self._delete(folder)
        _drop_if_empty(folder.parent)

    def _read_manifest(self, name: str) -> Manifest:
        try:
            return Manifest.model_validate_json((self._folder / name / MANIFEST_FILE).read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))[:100]
            raise ValueError(f"its {MANIFEST_FILE} makes no sense ({place}: {first['msg']})") from error

    def _delete(self, folder: Path) -> None:
        """Delete the manifest first, so that a partly deleted record does not count as complete."""
        if folder.exists():
            (folder / MANIFEST_FILE).unlink(missing_ok=True)
            shutil.rmtree(folder)

    def _verify(self, path: Path, about: SavedFile) -> None:
        """Raise ValueError with the reason if a file is not as it was written."""
        try:
            stat = path.stat()
            if stat.st_size != about.num_bytes:
                raise ValueError(f"{path.name} has {stat.st_size} bytes instead of {about.num_bytes}")
            seen = (path, stat.st_size, stat.st_mtime_ns)
            if seen not in self._verified and _digest(path) != about.sha256:
                raise ValueError(f"{path.name} is not as it was written (its SHA-256 differs)")
        except OSError as error:
            raise ValueError(f"{path.name}: {error.strerror or error}") from error
        # What was verified at the start of a run is not verified again when it is loaded.
        self._verified.add(seen)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(
                f"the checkpoint {self._folder / name} cannot be used: {error}",
                hint="put a whole copy in its place, or start again with --resume never",
            ) from error

    def _name(self, folder: Path) -> str:
        return folder.relative_to(self._folder).as_posix()


def _write(folder: Path, tensors: Mapping[str, LazyTensor], facts: Facts) -> None:
    files = files_of(tensors)
    manifest = Manifest(
        format=1,
        facts=dict(facts),
        files={file: write_tensors(folder / file, own) for file, own in files.items()},
        tensors={
            name: SavedTensor(file=file, shape=one.shape, dtype=str(one.dtype).partition(".")[2])
            for file, own in files.items()
            for name, one in own.items()
        },
    )
    text = json.dumps(manifest.model_dump(), allow_nan=False) + "\n"
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
    sync(folder / MANIFEST_FILE)
    sync(folder)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beside(folder: Path) -> Path:
    """The folder in which a record is written before it is renamed."""
    return folder.with_name(f".{folder.name}.new")


def _target(folder: Path) -> Path:
    """The folder of the record that an unfinished folder would have become."""
    return folder.with_name(folder.name.removeprefix(".").removesuffix(".new"))


def _drop_if_empty(folder: Path) -> None:
    # The last cloud that deletes its record of a step deletes the folder of the step.
    with suppress(OSError):
        folder.rmdir()
