"""Runs benchmarks of an older revision and of the present tree in turns, and compares figure by figure.

python benchmarks/turns.py [--old REV] [--rounds N] [--json] ['SCRIPT.py OPTIONS']…

In each round every script runs at both trees, each its own, one directly after the other, and the tree that
begins changes from round to round. A figure is the median over rounds, its spread how far the rounds of one
tree lie apart, as a share of their median. A figure more than 3 % worse is marked: `worse` if it is worse by
more than the spread too, and then this exits with 1; else `unclear`, which asks for more rounds. Differences
from 100 % (errors, excesses) are compared as factors: 2 % of error is 1.02.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench import NOTES, finish, show
from revisions import FIRST_EDITION, PRESENT, Tree, checked_out, commit_of, last_lines

MOST_WORSE: Final = 0.03
SCRIPTS: Final = (
    "schedule.py --no-torch",
    "link.py",
    "codec_auto.py --quick",
    "kill_ranks.py",
    "prediction.py --quick",
)
AS_BEFORE: Final[Mapping[str, Sequence[str]]] = {"stage_speed.py": ("--far-end", "memory")}
"""Options with which the present tree measures what the older one does."""
_ROUNDS: Final = 3
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number that a benchmark gives."""

    name: str
    value: float
    is_higher_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A figure at both trees, a value for each round."""

    name: str
    old: tuple[float, ...]
    new: tuple[float, ...]
    is_higher_better: bool

    @property
    def ratio(self) -> float | None:
        """New over old, medians; None where a tree has no value."""
        if not self.old or not self.new:
            return None
        before, after = statistics.median(self.old), statistics.median(self.new)
        return after / before if before else (1.0 if after == before else float("inf"))

    @property
    def verdict(self) -> str:
        """`worse` where it is more than 3 % worse, or missing; `unclear` where rounds differ as much."""
        if self.ratio is None:
            return "worse" if self.old else ""
        worse_by = 1 - self.ratio if self.is_higher_better else self.ratio - 1
        if worse_by <= MOST_WORSE:
            return ""
        return "worse" if worse_by > self.spread else "unclear"

    @property
    def spread(self) -> float:
        """The larger of both trees' spreads."""
        spans = [
            (max(values) - min(values)) / abs(middle)
            for values in (self.old, self.new)
            if values and (middle := statistics.median(values))
        ]
        return max(spans, default=0.0)


def _schedule(line: Line) -> Iterator[Figure]:
    yield Figure(
        name="step, 40 ms, 500 Mbit/s, 32 micro-batches", value=line["steps"]["isthmus"]["duration_s"]
    )
    for one in line["sweep"]:
        case = f"{1e3 * one['rtt_s']:g} ms, {one['bandwidth_bps'] / 1e6:g} Mbit/s"
        yield Figure(name=f"step, {case}, {one['num_microbatches']} in sweep", value=one["duration_s"])


def _link(line: Line) -> Iterator[Figure]:
    for one in line["rows"]:
        if not one["what"].startswith("loopback") or "isthmus" in one["what"]:
            yield Figure(name=one["what"], value=one["ratio"], is_higher_better=True)


def _codec_auto(line: Line) -> Iterator[Figure]:
    yield Figure(name="worst step over best fixed", value=1 + line["worst_excess"])
    yield Figure(name="is monotone", value=float(line["is_monotone"]), is_higher_better=True)
    yield Figure(name="is wide milder", value=float(line["is_wide_milder"]), is_higher_better=True)
    for one in line["auto"]:
        name = f"{one['down_mbps']:g}/{one['up_mbps']:g} Mbit/s, {one['trial']}"
        yield Figure(name=f"auto step, {name}", value=one["steady_s"])
    for one in line["fixed"]:
        name = f"{one['down_mbps']:g}/{one['up_mbps']:g} Mbit/s, {'; '.join(one['codecs'])}"
        yield Figure(name=f"fixed step, {name}", value=one["steady_s"])


def _kill_ranks(line: Line) -> Iterator[Figure]:
    yield Figure(name="longest time to the end of the others", value=max(line["others_s"]))
    yield Figure(name="weights as undisturbed", value=float(line["same_weights"]), is_higher_better=True)


def _prediction(line: Line) -> Iterator[Figure]:
    score = line["score"]
    yield Figure(name="1 + mean error", value=1 + score["mean_error"])
    yield Figure(name="1 + worst error", value=1 + score["worst_error"])
    if score["kendall_tau"] is not None:
        yield Figure(name="Kendall τ", value=score["kendall_tau"], is_higher_better=True)
    for one in line["cases"]:
        yield Figure(name=f"step of case {one['number']}", value=one["measured_s"])


def _stage_speed(line: Line) -> Iterator[Figure]:
    for one in line["settings"]:
        pairs, setting = zip(one["plain_s"], one["isthmus_s"], strict=True), one["setting"]
        flags = [key for key in ("is_sharded", "is_compiled") if setting[key]]
        yield Figure(
            name=f"of plain PyTorch, {', '.join(flags)}, {setting.get('codec', line.get('codec'))}",
            value=statistics.median(plain_s / isthmus_s for plain_s, isthmus_s in pairs),
            is_higher_better=True,
        )


FIGURES: Final[Mapping[str, Callable[[Line], Iterator[Figure]]]] = {
    "schedule.py": _schedule,
    "link.py": _link,
    "codec_auto.py": _codec_auto,
    "kill_ranks.py": _kill_ranks,
    "prediction.py": _prediction,
    "stage_speed.py": _stage_speed,
}
"""What each benchmark's JSON line tells, by script."""


def read_line(output: str) -> Line | None:
    """The last JSON object that stands on a line of its own."""
    for text in reversed(output.splitlines()):
        if text.startswith("{"):
            found: Line = json.loads(text)
            return found
    return None


def measure(tree: Tree, script: str, folder: Path) -> tuple[list[Figure], str]:
    """Run a tree's own script; gives its figures, or the end of what it said where it gives none."""
    name, *options = shlex.split(script)
    options += AS_BEFORE.get(name, ()) if tree == PRESENT else ()
    command = [sys.executable, str(tree.path / "benchmarks" / name), *options]
    done = subprocess.run(
        command, cwd=folder, env=tree.environment(), capture_output=True, text=True, check=False
    )
    line = read_line(done.stdout)
    if line is None:
        return [], f"{script}, {tree.name}: exit code {done.returncode}\n{last_lines(done.stderr)}"
    return list(FIGURES[name](line)), ""


def compare(old: Sequence[Sequence[Figure]], new: Sequence[Sequence[Figure]]) -> list[Compared]:
    """Every figure of either tree, from the figures of each round, in the order of their first mention."""
    every = {one.name: one for found in (*old, *new) for one in found}
    return [
        Compared(
            name=name,
            old=tuple(one.value for found in old for one in found if one.name == name),
            new=tuple(one.value for found in new for one in found if one.name == name),
            is_higher_better=about.is_higher_better,
        )
        for name, about in every.items()
    ]


def run_in_turns(script: str, old: Tree, *, num_rounds: int) -> tuple[list[Compared], list[str]]:
    """One script at both trees, round by round; gives its figures and what has failed."""
    found: dict[str, list[list[Figure]]] = {old.name: [], PRESENT.name: []}
    errors = []
    for number in range(num_rounds):
        for tree in (old, PRESENT) if number % 2 == 0 else (PRESENT, old):
            with tempfile.TemporaryDirectory(prefix="isthmus-turns-") as folder:
                figures, error = measure(tree, script, Path(folder))
            found[tree.name].append(figures)
            errors += [error] if error else []
    return compare(found[old.name], found[PRESENT.name]), errors


def table_row(row: Compared) -> dict[str, str]:
    old, new = (f"{statistics.median(one):.4g}" if one else "none" for one in (row.old, row.new))
    return {
        "figure": row.name,
        "better": "higher" if row.is_higher_better else "lower",
        "old": old,
        "new": new,
        "ratio": "" if row.ratio is None else f"{row.ratio:.3f}",
        "spread": f"{row.spread:.1%}",
        "": f"[bold red]{row.verdict}[/]",
    }


def main() -> None:
    """Run both, print the tables and a JSON line."""
    options = _options()
    results: dict[str, list[Compared]] = {}
    errors: list[str] = []
    with checked_out(options.old) as old, NOTES.status("") as status:
        for script in options.scripts:
            status.update(script)
            results[script], failed = run_in_turns(script, old, num_rounds=options.rounds)
            errors += failed
            if not options.json:
                show([table_row(row) for row in results[script]], title=script)
    for error in errors:
        NOTES.print(error, markup=False)
    marked: dict[str, list[str]] = {"worse": [], "unclear": []}
    for script, row in ((script, row) for script, rows in results.items() for row in rows if row.verdict):
        marked[row.verdict].append(f"{script}: {row.name}")
    finish(
        "turns",
        "torch",
        "grpcio",
        old=commit_of(options.old),
        num_rounds=options.rounds,
        **marked,
        errors=errors,
        scripts={script: [asdict(row) for row in rows] for script, rows in results.items()},
    )
    sys.exit(1 if marked["worse"] or errors else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--old", default=FIRST_EDITION, metavar="REV", help="a revision, or a folder with one"
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N", help="times that each tree runs")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    parser.add_argument("scripts", nargs="*", default=list(SCRIPTS), metavar="SCRIPT")
    options = parser.parse_args()
    for script in options.scripts:
        if shlex.split(script)[0] not in FIGURES:
            parser.error(f"{script}: only {', '.join(FIGURES)} can be compared")
    return options


if __name__ == "__main__":
    main()
