"""Stores: where records of named tensors and plain facts are kept, each whole or not at all.

A record is a folder of safetensors files and a manifest, which is written last:

    step-00000120/east/weights.safetensors      names without a slash, such as model.norm.weight
                       optimizer.safetensors    optimizer/exp_avg/model.norm.weight
                       wire.safetensors         wire/0/west/…
                       manifest.json            file, shape and type of each tensor; size and SHA-256 of each
                                                file; facts

Tensors are found by their names, and are written and read one at a time, so that a record need not fit into
memory. Nothing is pickled, and no byte is used whose digest is not the manifest's.
"""

import functools
import hashlib
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.codec.base import flat_bytes
from isthmus.errors import UserError
from isthmus.job.load import sync

MANIFEST_FILE: Final = "manifest.json"
Facts = Mapping[str, Any]
"""Plain JSON values by name."""

_FORMAT: Final = 1
_WEIGHTS: Final = "weights"
_SUFFIX: Final = ".safetensors"
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.safetensors")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_HEADER_MULTIPLE: Final = 8
_SAFETENSORS_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTensor:
    """A tensor that is gathered or read when it is needed; ranks that hold shards of it load it together."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def in_file_order(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """The names as one file holds them: wide types first, since each tensor must be aligned to its type."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def write_tensors(path: Path, tensors: Mapping[str, LazyTensor]) -> "SavedFile":
    """Write a safetensors file; one tensor at a time is in memory."""
    names = in_file_order(tensors)
    about, end = {}, 0
    for name in names:
        start, end = end, end + tensors[name].num_bytes
        about[name] = {
            "dtype": _SAFETENSORS_NAMES[tensors[name].dtype],
            "shape": tensors[name].shape,
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
        for name in names:
            write(flat_bytes(tensors[name].load().detach().cpu().contiguous()).numpy().data)
        num_bytes = file.tell()
    sync(path)
    return SavedFile(num_bytes=num_bytes, sha256=digest.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Where a tensor of a record is, and what it looks like."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """What a file of a record must be."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a record holds."""

    facts: Facts
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, SavedFile]

    def to_json(self) -> str:
        """The text of manifest.json."""
        values = {
            "format": _FORMAT,
            "facts": self.facts,
            "files": {name: asdict(one) for name, one in self.files.items()},
            "tensors": {name: asdict(one) for name, one in self.tensors.items()},
        }
        return json.dumps(values, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """What `to_json` wrote; ValueError with the reason where it is something else."""
        try:
            values = json.loads(text)
            if values["format"] != _FORMAT:
                raise ValueError(f"its format is {values['format']}, and this version reads {_FORMAT}")
            files = {_checked_name(name): _read_file(one) for name, one in values["files"].items()}
            tensors = {name: _read_tensor(one, files) for name, one in values["tensors"].items()}
            return cls(facts=dict(values["facts"]), tensors=tensors, files=files)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its {MANIFEST_FILE} makes no sense ({error!r})") from error


class Store(Protocol):
    """Keeps records by name: a disk here; later a remote file system, a peer over its link, host memory."""

    def names(self) -> tuple[str, ...]:
        """The names of all records that were written to their end, in order."""

    def unfinished(self) -> tuple[str, ...]:
        """The names of records whose writing or removal was cut short."""

    def put(self, name: str, tensors: Mapping[str, LazyTensor], facts: Facts) -> None:
        """Keep a record in the place of the one of that name, if any; OSError leaves nothing behind."""

    def manifest(self, name: str) -> Manifest:
        """What a record holds."""

    def get(self, name: str, tensors: Sequence[str]) -> dict[str, LazyTensor]:
        """Some tensors of a record, for the host; refused where a file is not as it was written."""

    def check(self, name: str) -> str | None:
        """Why a record cannot be used, None where every byte of it is as it was written."""

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
        """The names of all records that were written to their end, in order."""
        found = (path.parent for path in self._folder.glob(f"*/[!.]*/{MANIFEST_FILE}"))
        return tuple(sorted(self._name(path) for path in found))

    def unfinished(self) -> tuple[str, ...]:
        """The names of records whose writing or removal was cut short."""
        written = set(self.names())
        found = [path for path in self._folder.glob("*/*/") if self._name(path) not in written]
        return tuple(sorted({self._name(_target(path)) for path in found}))

    def put(self, name: str, tensors: Mapping[str, LazyTensor], facts: Facts) -> None:
        """Keep a record in the place of the one of that name, if any; OSError leaves nothing behind."""
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
        """What a record holds."""
        try:
            return self._read_manifest(name)
        except (OSError, ValueError) as error:
            raise self._unusable(name, str(error)) from error

    def get(self, name: str, tensors: Sequence[str]) -> dict[str, LazyTensor]:
        """Some tensors of a record, for the host; refused where a file is not as it was written."""
        manifest = self.manifest(name)
        for file in {manifest.tensors[tensor].file for tensor in tensors}:
            reason = self._why_not(name, file, manifest.files[file])
            if reason is not None:
                raise self._unusable(name, reason)

        def load(tensor: str) -> Tensor:
            file = manifest.tensors[tensor].file
            try:
                with safe_open(self._folder / name / file, framework="pt") as opened:
                    found: Tensor = opened.get_tensor(tensor)
                    return found
            except (OSError, SafetensorError) as error:
                raise self._unusable(name, f"{file}: {error}") from error

        return {
            tensor: LazyTensor(
                shape=manifest.tensors[tensor].shape,
                dtype=getattr(torch, manifest.tensors[tensor].dtype),
                load=functools.partial(load, tensor),
            )
            for tensor in tensors
        }

    def check(self, name: str) -> str | None:
        """Why a record cannot be used, None where every byte of it is as it was written."""
        try:
            manifest = self._read_manifest(name)
        except (OSError, ValueError) as error:
            return str(error)
        reasons = (self._why_not(name, file, about) for file, about in manifest.files.items())
        return next((reason for reason in reasons if reason is not None), None)

    def rename(self, name: str, to: str) -> None:
        """Give a record another name."""
        self.remove(to)
        (self._folder / to).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / name).rename(self._folder / to)
        sync((self._folder / to).parent)

    def remove(self, name: str) -> None:
        """Delete a record, or what is left of it."""
        folder = self._folder / name
        shutil.rmtree(_beside(folder), ignore_errors=True)
        self._delete(folder)
        _drop_if_empty(folder.parent)

    def _read_manifest(self, name: str) -> Manifest:
        return Manifest.from_json((self._folder / name / MANIFEST_FILE).read_bytes())

    def _delete(self, folder: Path) -> None:
        """Where this is cut short, what is left does not pass for a whole record."""
        if folder.exists():
            (folder / MANIFEST_FILE).unlink(missing_ok=True)
            shutil.rmtree(folder)

    def _why_not(self, name: str, file: str, about: SavedFile) -> str | None:
        path = self._folder / name / file
        try:
            stat = path.stat()
            if stat.st_size != about.num_bytes:
                return f"{file} has {stat.st_size} bytes instead of {about.num_bytes}"
            seen = (path, stat.st_size, stat.st_mtime_ns)
            if seen not in self._verified and _digest(path) != about.sha256:
                return f"{file} is not as it was written (its SHA-256 differs)"
        except OSError as error:
            return f"{file}: {error.strerror or error}"
        # What was read at the start of a run need not be read again to be loaded.
        self._verified.add(seen)
        return None

    def _name(self, folder: Path) -> str:
        return folder.relative_to(self._folder).as_posix()

    def _unusable(self, name: str, reason: str) -> UserError:
        return UserError(
            f"the checkpoint {self._folder / name} cannot be used: {reason}",
            hint="put a whole copy in its place, or start again with --resume never",
        )


def _write(folder: Path, tensors: Mapping[str, LazyTensor], facts: Facts) -> None:
    groups: dict[str, dict[str, LazyTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        group, slash, _ = name.partition("/")
        groups[f"{group if slash else _WEIGHTS}{_SUFFIX}"][name] = tensor
    manifest = Manifest(
        facts=facts,
        files={file: write_tensors(folder / file, own) for file, own in groups.items()},
        tensors={
            name: SavedTensor(file=file, shape=one.shape, dtype=str(one.dtype).partition(".")[2])
            for file, own in groups.items()
            for name, one in own.items()
        },
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    sync(folder / MANIFEST_FILE)
    sync(folder)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beside(folder: Path) -> Path:
    """Where a record is written before it takes its place."""
    return folder.with_name(f".{folder.name}.new")


def _target(folder: Path) -> Path:
    """The place of the record that an unfinished folder was to be."""
    return folder.with_name(folder.name.removeprefix(".").removesuffix(".new"))


def _drop_if_empty(folder: Path) -> None:
    # The last cloud to delete its record of a step takes the folder of the step along.
    with suppress(OSError):
        folder.rmdir()


def _checked_name(file: str) -> str:
    if not _FILE_NAME.fullmatch(file):
        raise ValueError(f"its {MANIFEST_FILE} names a file {file[:100]!r}")
    return file


def _read_file(values: Mapping[str, Any]) -> SavedFile:
    about = SavedFile(num_bytes=int(values["num_bytes"]), sha256=str(values["sha256"]))
    if about.num_bytes < 0 or not _SHA256.fullmatch(about.sha256):
        raise ValueError(f"its {MANIFEST_FILE} has a size or digest that is none")
    return about


def _read_tensor(values: Mapping[str, Any], files: Collection[str]) -> SavedTensor:
    about = SavedTensor(
        file=values["file"], shape=tuple(int(one) for one in values["shape"]), dtype=str(values["dtype"])
    )
    if about.file not in files:
        raise ValueError(f"its {MANIFEST_FILE} has a tensor in a file that it does not list")
    if getattr(torch, about.dtype, None) not in _SAFETENSORS_NAMES:
        raise ValueError(f"its {MANIFEST_FILE} has a tensor of type {about.dtype[:50]!r}")
    return about
