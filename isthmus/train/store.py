"""Stores keep files by name: in a folder of a local or network disk, or at any address that fsspec knows."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from isthmus.errors import UserError
from isthmus.job.load import sync
from isthmus.wan.packet import Buffer

CHECKPOINTS_FOLDER: Final = "checkpoints"


class Store(Protocol):
    """Files by name; names have slashes. What a store cannot do raises an OSError."""

    @property
    def place(self) -> str:
        """Where the files are, for people."""

    def list(self) -> dict[str, int]:
        """All names, and the bytes of each file; those that were cut short are among them."""

    def put(self, name: str, data: Iterable[Buffer]) -> None:
        """Write a file, which replaces one of that name only when it is whole and lasts."""

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some bytes of a file, or all; fewer where it ends before."""

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""


class DiskStore:
    """A folder, local or on a network disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def place(self) -> str:
        return str(self._folder)

    def list(self) -> dict[str, int]:
        found = {}
        for folder, _, names in os.walk(self._folder, onerror=_unless_gone):
            for path in (Path(folder, name) for name in names):
                with suppress(FileNotFoundError):
                    found[path.relative_to(self._folder).as_posix()] = path.stat().st_size
        return found

    def put(self, name: str, data: Iterable[Buffer]) -> None:
        path = self._folder / name
        new = path.with_name(f".{path.name}.new")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with new.open("wb") as file:
                for one in data:
                    file.write(one)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        for folder in (path.parent, *path.parent.parents[: len(Path(name).parts) - 1]):
            sync(folder)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def remove(self, name: str) -> None:
        path = self._folder / name
        path.unlink(missing_ok=True)
        # The last file of a folder takes the folder with it.
        with suppress(OSError):
            for folder in path.parents[: len(Path(name).parts) - 1]:
                folder.rmdir()


def _unless_gone(error: OSError) -> None:
    # Another cloud may delete its own files meanwhile.
    if not isinstance(error, FileNotFoundError):
        raise error


class RemoteStore:
    """An address of fsspec, such as a prefix of a bucket; a file appears there when it is whole."""

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

    def list(self) -> dict[str, int]:
        with _reached():
            self._files.invalidate_cache()
            found = self._files.find(self._root, detail=True)
        return {path.removeprefix(f"{self._root}/"): int(one["size"]) for path, one in found.items()}

    def put(self, name: str, data: Iterable[Buffer]) -> None:
        with _reached(), self._files.open(self._path(name), "wb") as file:
            for one in data:
                file.write(one)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with _reached():
            return bytes(self._files.cat_file(self._path(name), start=start, end=stop))

    def remove(self, name: str) -> None:
        with _reached(), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


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
