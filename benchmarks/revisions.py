"""Trees of this repository to run side by side: the present one, and older ones that git checks out."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FIRST_EDITION: Final = "first-edition"
# What that tag names, for a clone without tags.
_FIRST_EDITION_COMMIT: Final = "b215460196db1225ad77f581b1a24110c57e1559"

_TERMINATED: Final = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A folder with the package, the benchmarks and the examples of one revision."""

    name: str
    path: Path

    def environment(self, *first: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables with which a process imports this tree's package."""
        path = os.pathsep.join(str(one) for one in (*first, self.path))
        return {**os.environ, "PYTHONPATH": path, **(more or {})}

    def isthmus(self, *arguments: str) -> list[str]:
        """The command line of a verb; run it in a folder that has no `isthmus` in it."""
        return [sys.executable, "-m", "isthmus", *arguments]

    def check(self, folder: Path) -> None:
        """Raise unless processes that run in a folder import this tree's package."""
        command = [sys.executable, "-c", "import isthmus; print(isthmus.__file__)"]
        found = subprocess.run(
            command, cwd=folder, env=self.environment(), check=True, capture_output=True, text=True
        )
        if not Path(found.stdout.strip()).is_relative_to(self.path):
            raise RuntimeError(f"{self.name} imports {found.stdout.strip()} instead of {self.path}")


PRESENT: Final = Tree(name="new", path=ROOT)


@contextmanager
def checked_out(revision: str) -> Iterator[Tree]:
    """Check a revision out into a temporary folder, removed at the end; a folder is taken as it is."""
    if _is_tree(revision):
        yield Tree(name="old", path=Path(revision).resolve())
        return
    commit = commit_of(revision)
    # Whoever ends this early must not leave a worktree behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    with tempfile.TemporaryDirectory(prefix="isthmus-old-") as folder:
        path = Path(folder).resolve() / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(path), commit)
        try:
            yield Tree(name="old", path=path)
        finally:
            _git("worktree", "remove", "--force", str(path))


def commit_of(revision: str) -> str:
    """The full hash of a revision; a clone without tags knows the first edition by its hash.

    A folder with a tree is its own name, so that two trees can be compared where there is no git.
    """
    if _is_tree(revision):
        return str(Path(revision).resolve())
    names = [revision, _FIRST_EDITION_COMMIT] if revision == FIRST_EDITION else [revision]
    for name in names:
        found = _ask_git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if found.returncode == 0:
            return found.stdout.strip()
    raise SystemExit(f"git knows no revision {revision!r} here; fetch it, or name another with --old")


def last_lines(text: str, count: int = 12) -> str:
    """The end of what a process printed."""
    return "\n".join(text.rstrip().splitlines()[-count:])


def _is_tree(name: str) -> bool:
    return (Path(name) / "isthmus" / "__init__.py").is_file()


def _git(*arguments: str) -> None:
    found = _ask_git(*arguments)
    if found.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {last_lines(found.stderr)}")


def _ask_git(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command: Sequence[str] = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)
