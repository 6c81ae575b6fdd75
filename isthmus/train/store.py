"""Stores keep files by name: in a folder of a local or network disk, or at any address that fsspec knows.

Names have slashes. A file replaces one of that name only when it is whole and lasts. What a store cannot do
raises an OSError.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.job.load import sync
from isthmus.wan.packet import Buffer

CHECKPOINTS_FOLDER: Final = "checkpoints"


class DiskStore:
    """A folder, local or on a network disk."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder = folder

    def list(self) -> set[str]:
        """The names of all files; those that were cut short are among them."""
        found = os.walk(self._folder, onerror=_unless_gone)
        paths = (Path(folder, name) for folder, _, names in found for name in names)
        return {path.relative_to(self._folder).as_posix() for path in paths}

    def put(self, name: str, data: Iterable[Buffer]) -> None:
        """Write a file."""
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
    """An address of fsspec, such as a prefix of a bucket."""

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
