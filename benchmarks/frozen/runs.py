"""Runs one frozen job with one tree, to its end or killed half-way and started again."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from revisions import Tree, last_lines

from frozen.weights import read_digests, whole_digest

TIME_LIMIT_S: Final = 600.0
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_POLL_S: Final = 0.05
_NUM_CHECKPOINTS: Final = 2
"""When the second has begun, the first is there at all clouds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run: the digests of its weights, or why there are none."""

    digests: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    error: str = ""
    printed: str = ""
    """What `isthmus run --json` printed."""
    took_s: float = 0.0

    @property
    def sha256(self) -> str | None:
        """Of all weights."""
        return None if self.error else whole_digest(self.digests)


def run_job(tree: Tree, job: Path, root: Path, *, is_killed: bool = False) -> Outcome:
    """Run a job file, whose name is that of the job; its runs are below the root."""
    started_s = time.monotonic()
    error, printed = _run_and_kill(tree, job, root) if is_killed else "", ""
    if not error:
        error, printed = _run(tree, job, root)
    folder = _run_folder(root / job.stem)
    if not error and is_killed and not _has_resumed(folder):
        error = "the second start has not resumed the first"
    digests = read_digests(folder / "model") if folder is not None and not error else {}
    if not error and not digests:
        error = f"no weights in {folder}"
    took_s = time.monotonic() - started_s
    return Outcome(digests=digests, folder=folder, error=error, printed=printed, took_s=took_s)


def _run(tree: Tree, job: Path, root: Path) -> tuple[str, str]:
    """Run to the end; gives why it failed, if it did, and what it printed."""
    with _started(tree, job, root) as process:
        try:
            printed, errors = process.communicate(timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            printed, errors = process.communicate()
            return f"not over after {TIME_LIMIT_S:g} s\n{last_lines(errors)}", printed
    error = f"exit code {process.returncode}\n{last_lines(errors)}" if process.returncode else ""
    return error, printed


def _run_and_kill(tree: Tree, job: Path, root: Path) -> str:
    """Kill all processes of a run behind a checkpoint; gives why it could not be done, if so."""
    end_s = time.monotonic() + TIME_LIMIT_S
    with _started(tree, job, root) as process:
        while process.poll() is None and time.monotonic() < end_s and not _is_saved(root / job.stem):
            time.sleep(_POLL_S)
        is_over = process.poll() is not None
        _kill(process)
        _, errors = process.communicate()
    if is_over:
        return f"over, with exit code {process.returncode}, before it could be killed\n{last_lines(errors)}"
    return "" if time.monotonic() < end_s else f"no checkpoints after {TIME_LIMIT_S:g} s"


@contextmanager
def _started(tree: Tree, job: Path, root: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run in a process group of its own, none of which is left behind."""
    process = subprocess.Popen(
        tree.isthmus("run", str(job), "--runs", str(root), "--json"),
        cwd=job.parent,
        env=tree.environment(more=_ONE_THREAD),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _kill(process)


def _kill(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _run_folder(folder: Path) -> Path | None:
    found = sorted(path.parent for path in folder.glob("*/job.toml"))
    return found[-1] if found else None


def _is_saved(folder: Path) -> bool:
    run = _run_folder(folder)
    saved = [] if run is None else [path for path in run.glob("checkpoints/*") if path.name[0] != "."]
    return len(saved) >= _NUM_CHECKPOINTS


def _has_resumed(run: Path | None) -> bool:
    """Whether some cloud says that it has started behind the first step."""
    if run is None:
        return False
    lines = [line for path in run.glob("events/*.jsonl") for line in path.read_text().splitlines()]
    started = [json.loads(line) for line in lines if '"started"' in line]
    return any(one.get("values", {}).get("step", 0) > 0 for one in started)
