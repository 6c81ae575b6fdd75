"""Keeps tokens in files: made once on a machine, mapped by all its ranks, kept between starts.

The arrays of one corpus are files of one folder, whose name is a digest of everything they depend on. The
folder is written under another name and renamed when it is complete.
"""

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import numpy as np

from isthmus.job import Job
from isthmus.job.load import sync
from isthmus.job.rundir import lock_or_wait
from isthmus.train.data.samples import Arrays, Integers

TOKENS_FOLDER: Final = "tokens"
_FACTS_FILE: Final = "arrays.json"
_LOCK_FILE: Final = "lock"

Make = Callable[[], Iterable[Arrays]]
"""Makes arrays, in pieces to be concatenated."""
_ArrayFacts = Mapping[str, tuple[str, list[int], str]]
"""Type, shape, and SHA-256 of the content of each array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Arrays in memory or mapped from files, and a digest of their content."""

    arrays: Arrays
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFiles:
    """The folder in which all runs of a job keep their tokens."""

    folder: Path
    note: Callable[[str], None]

    def get(self, digest: str, make: Make) -> Tokens:
        """The tokens of a digest, mapped; if there are none, one process makes them while others wait.

        Where they cannot be written they are made in memory, with a note.
        """
        found = _read(self.folder / digest)
        if found is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / _LOCK_FILE).open("w") as file:
                waiting = "waiting for the tokens, which another process makes"
                # Without locks the same tokens may be made twice, which does no harm.
                has_locks = lock_or_wait(file.fileno(), note=self.note, waiting=waiting)
                found = _read(self.folder / digest) or self._make(digest, make)
                if has_locks:
                    self._clear(digest)
                return found
        except OSError as error:
            reason = error.strerror or error
            self.note(
                f"every rank makes its own tokens, in memory, as none are kept in {self.folder}: {reason}"
            )
            return in_memory(make())

    def _make(self, digest: str, make: Make) -> Tokens:
        self.note(f"making the tokens, which are kept in {self.folder}")
        target = self.folder / digest
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            new = Path(temporary) / digest
            new.mkdir()
            _write(new, make())
            if _read(target) is None:
                shutil.rmtree(target, ignore_errors=True)
                new.rename(target)
        sync(self.folder)
        found = _read(target)
        if found is None:
            raise OSError(errno.EIO, "what was written there cannot be mapped")
        return found

    def _clear(self, digest: str) -> None:
        """Remove the tokens of other digests that no process has mapped, and what killed processes left."""
        for other in self.folder.iterdir():
            if other.is_dir() and other.name != digest and _is_unused(other):
                shutil.rmtree(other, ignore_errors=True)


def tokens_of(job: Job, *, root: Path, note: Callable[[str], None]) -> TokenFiles:
    """The folder in which runs of a job keep their tokens."""
    return TokenFiles(folder=root / job.name / TOKENS_FOLDER, note=note)


def in_memory(pieces: Iterable[Arrays]) -> Tokens:
    buffers: dict[str, io.BytesIO] = defaultdict(io.BytesIO)
    facts = _concatenate(pieces, buffers.__getitem__)
    arrays = {
        name: np.frombuffer(buffers[name].getvalue(), kind).reshape(shape)
        for name, (kind, shape, _) in facts.items()
    }
    return Tokens(arrays=arrays, sha256=_digest_of(facts))


def _digest_of(facts: _ArrayFacts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _concatenate(pieces: Iterable[Arrays], open_file: Callable[[str], IO[bytes]]) -> _ArrayFacts:
    """Write each array to a file, piece by piece, so that they need not fit into memory."""
    facts: dict[str, tuple[str, list[int], str]] = {}
    files: dict[str, IO[bytes]] = {}
    contents: dict[str, hashlib._Hash] = defaultdict(hashlib.sha256)
    counts: Counter[str] = Counter()
    for piece in pieces:
        for name, array in piece.items():
            data = array.tobytes()
            if name not in files:
                files[name] = open_file(name)
            files[name].write(data)
            contents[name].update(data)
            counts[name] += len(array)
            shape = [counts[name], *array.shape[1:]]
            facts[name] = (array.dtype.str, shape, contents[name].hexdigest())
    return facts


def _write(folder: Path, pieces: Iterable[Arrays]) -> None:
    with ExitStack() as stack:
        facts = _concatenate(pieces, lambda name: stack.enter_context((folder / name).open("wb")))
    (folder / _FACTS_FILE).write_text(json.dumps(facts))
    for path in (*folder.iterdir(), folder):
        sync(path)


def _read(folder: Path) -> Tokens | None:
    """The tokens in a folder, mapped; None where they are missing or not as they were written."""
    try:
        facts = json.loads((folder / _FACTS_FILE).read_text())
        arrays = {name: _map(folder / name, kind, shape) for name, (kind, shape, _) in facts.items()}
        return Tokens(arrays=arrays, sha256=_digest_of(facts))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _map(path: Path, type_name: str, shape: Sequence[int]) -> Integers:
    kind = np.dtype(type_name)
    with path.open("rb") as file:
        if kind.kind not in "iu" or os.fstat(file.fileno()).st_size != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{path} is not as it was written")
        if 0 in shape:
            return np.empty(shape, kind)
        with suppress(OSError):
            # The map holds a copy of the descriptor, and with it the lock, as long as it exists.
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
