"""Holds the present tree against an older revision: the weights of small jobs to the bit, and what users see.

python benchmarks/freeze.py [--old REV] [--only NAME…] [--list] [--keep DIR]

Both trees run the same jobs in turns, each as `isthmus run` in processes of their own, over an emulated WAN.
Compared are the SHA-256 of all exported tensors (name, type, shape, bytes), and an inventory: keys of a job,
verbs and flags, kinds of events, files of a run directory, keys of what `--json` prints. What the inventory
lacks must be named, in backticks, by a line of CHANGELOG.md that the older revision has not. Checkpoints need
not be readable by each other. Exits with 1 if anything differs or fails.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench import NOTES, Choice, finish, options, show
from frozen.inventory import Change, Inventory, compare, new_lines, take_inventory
from frozen.jobs import JOBS, SOURCE, TEXT
from frozen.runs import Outcome, run_job
from frozen.weights import describe_difference
from revisions import FIRST_EDITION, PRESENT, Tree, checked_out, commit_of

INVENTORY: Final = "inventory"
SEEN_JOBS: Final = ("raw", "int4")
"""Jobs whose run directories the inventory reads."""
_NUM_LINES: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job at both trees."""

    name: str
    old: Outcome
    new: Outcome

    @property
    def is_equal(self) -> bool:
        """Whether both have run, to the same weights."""
        return self.old.sha256 is not None and self.old.sha256 == self.new.sha256

    def record(self) -> dict[str, Any]:
        """For the JSON line."""
        sides = {"old": self.old, "new": self.new}
        return {
            "job": self.name,
            "equal": self.is_equal,
            **{f"{side}_sha256": one.sha256 for side, one in sides.items()},
            **{f"{side}_error": one.error for side, one in sides.items() if one.error},
            **{f"{side}_s": round(one.took_s, 1) for side, one in sides.items()},
        }


class Comparison:
    """Runs jobs with both trees in one folder, each job once."""

    def __init__(self, old: Tree, folder: Path) -> None:
        self._trees = {"old": old, "new": PRESENT}
        self._folder = folder
        self._text = folder / "short.txt"
        self._text.write_text(short_text())
        self._found: dict[tuple[str, str, bool], Outcome] = {}
        for tree in self._trees.values():
            tree.check(folder)

    def rows(self, name: str) -> Iterator[Row]:
        """A job at both trees; where it is also killed, each must end like the old one undisturbed."""
        whole = {side: self.outcome(side, name) for side in self._trees}
        yield Row(name=name, **whole)
        if JOBS[name].is_killed:
            for side in self._trees:
                killed = self.outcome(side, name, is_killed=True)
                yield Row(name=f"{name}: {side} killed", old=whole["old"], new=killed)

    def outcome(self, side: str, name: str, *, is_killed: bool = False) -> Outcome:
        """What became of a job at one tree."""
        key = (side, name, is_killed)
        if key not in self._found:
            self._found[key] = self._run(*key)
        return self._found[key]

    def inventories(self) -> tuple[dict[str, Change], list[str]]:
        """How what users see has changed, and what could not be found out."""
        found: dict[str, Inventory] = {}
        for side, tree in self._trees.items():
            seen = [self.outcome(side, name) for name in SEEN_JOBS]
            job = self._job_file(side, SEEN_JOBS[0], is_killed=False)
            runs = [one.folder for one in seen if one.folder is not None]
            found[side] = take_inventory(tree, job, runs, printed=seen[0].printed)
        logs = [(tree.path / "CHANGELOG.md").read_text() for tree in self._trees.values()]
        changes = compare(found["old"], found["new"], told=new_lines(*logs))
        return changes, [error for one in found.values() for error in one.errors]

    def _run(self, side: str, name: str, is_killed: bool) -> Outcome:
        if JOBS[name].needs_source and self.outcome("old", "raw").error:
            return Outcome(error="it needs the model of the job raw, which has failed")
        file = self._job_file(side, name, is_killed=is_killed)
        return run_job(self._trees[side], file, self._folder / side / "runs", is_killed=is_killed)

    def _job_file(self, side: str, name: str, *, is_killed: bool) -> Path:
        places = {TEXT: str(self._text)}
        if JOBS[name].needs_source:
            places[SOURCE] = f"{self.outcome('old', 'raw').folder}/model"
        job_name = name.replace(" ", "-").replace("+", "-") + ("-killed" if is_killed else "")
        file = self._folder / side / f"{job_name}.toml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(JOBS[name].text(job_name, is_new=side == "new", places=places))
        return file


def short_text() -> str:
    """A text of which a few steps read every sequence."""
    lines = [
        f"Line {number} counts {number % 7} ships, {number % 5} boats and {number * number % 11} rafts."
        for number in range(_NUM_LINES)
    ]
    return "\n\n".join(lines) + "\n"


def table_row(row: Row) -> dict[str, str]:
    return {
        "job": row.name,
        "old sha256": (row.old.sha256 or "failed")[:16],
        "new sha256": (row.new.sha256 or "failed")[:16],
        "equal": "yes" if row.is_equal else "[bold red]no[/]",
        "old": f"{row.old.took_s:.0f} s",
        "new": f"{row.new.took_s:.0f} s",
    }


def explain(row: Row) -> None:
    """Say what differs, or why a side failed."""
    for side, one in (("old", row.old), ("new", row.new)):
        if one.error:
            print(f"{row.name}, {side}: {one.error}")
    if not row.is_equal and not row.old.error and not row.new.error:
        difference = describe_difference(row.old.digests, row.new.digests)
        print(f"{row.name}: {difference}")


def show_changes(changes: Mapping[str, Change], errors: Sequence[str]) -> None:
    """Say what of the inventory is missing, and what is new."""
    for error in errors:
        print(f"inventory: {error}")
    for kind, change in sorted(changes.items()):
        for what, names in asdict(change).items():
            if names:
                print(f"{kind}, {what}: {', '.join(names)}")
    if not changes and not errors:
        print("inventory: the same")


def main() -> None:
    """Run both, print the table and a JSON line."""
    given = options(__doc__, old=FIRST_EDITION, only=Choice([], [*JOBS, INVENTORY]), list=False, keep=Path)
    if given.list:
        print("\n".join([*(f"{name:13} {job.about}" for name, job in JOBS.items()), INVENTORY]))
        return
    names = given.only or [*JOBS, INVENTORY]
    started_s = time.monotonic()
    with checked_out(given.old) as old, _folder(given.keep) as folder, NOTES.status("") as status:
        comparison = Comparison(old, folder)
        rows: list[Row] = []
        for name in (one for one in names if one != INVENTORY):
            status.update(name)
            rows += comparison.rows(name)
        hashed_s = time.monotonic() - started_s
        status.update(INVENTORY)
        changes, errors = comparison.inventories() if INVENTORY in names else ({}, [])
    show([table_row(row) for row in rows])
    for row in rows:
        explain(row)
    if INVENTORY in names:
        show_changes(changes, errors)
    is_missing = bool(errors) or any(one.missing for one in changes.values())
    is_same = all(row.is_equal for row in rows) and not is_missing
    finish(
        "freeze",
        "torch",
        "transformers",
        old=commit_of(given.old),
        is_same=is_same,
        hashed_s=round(hashed_s, 1),
        took_s=round(time.monotonic() - started_s, 1),
        jobs=[row.record() for row in rows],
        inventory={kind: asdict(one) for kind, one in changes.items()},
        inventory_errors=errors,
    )
    sys.exit(0 if is_same else 1)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="isthmus-freeze-") as folder:
            yield Path(folder).resolve()
    else:
        keep.mkdir(parents=True, exist_ok=False)
        yield keep.resolve()


if __name__ == "__main__":
    main()
