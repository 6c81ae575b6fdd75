"""Counts how much a newcomer must read, and how far it is from a command to the loss and from actor to link.

python benchmarks/size.py [--no-run] [--list] [--check] [--record] [--json]

`--check` exits with 1 where a figure is above its ceiling in `size_ceilings.json`; `make check` runs it with
`--no-run`. `--record` lowers ceilings to what was counted, at most to the goal, and never raises one.

Lines of code are those with a token on them that is no comment and no docstring.

The reading path is the files by which a newcomer learns the design, in their order.

Modules from run to loss: `isthmus run` runs a raw job on two clouds. Counted are the modules of which a
function is called in the process of the last stage, on its computing thread, from the first call of a
function of `isthmus.train.session` until the first call of `torch.autograd.backward`, when the loss exists.
Functions that run while a module is imported, and those that dataclasses make, do not count; nor do `job`,
`errors`, `units` and `events`, the words that all others speak.

Classes from actor to link: in the same run, at the first stage, the classes of which a method runs on the
way of the first activation: on the computing thread within the call that hands it over (`Traffic.send` or
`Wire.send`), and on the thread that calls `Link.send` from then until it does. The same rooms do not count.
"""

import argparse
import ast
import io
import json
import platform
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from calls import FOLDER_VARIABLE
from frozen.jobs import JOBS
from revisions import PRESENT, ROOT, last_lines
from rich.console import Console
from rich.table import Table

PACKAGE: Final = ROOT / "isthmus"
READING_PATH: Final = (
    "plan/types",
    "plan/pipeline",
    "plan/simulate",
    "train/loop",
    "train/pipeline",
    "train/wire",
    "model/cut",
    "wan/link",
    "codec/base",
)
VOCABULARY: Final = ("isthmus.job", "isthmus.errors", "isthmus.units", "isthmus.events")
"""Rooms whose modules and classes do not count on a way, since every module speaks of them."""
MAX_LINES, MAX_FILES, MAX_READING_LINES, MAX_MODULES, MAX_CLASSES = 16_000, 110, 2500, 35, 4
CEILINGS: Final = Path(__file__).resolve().with_name("size_ceilings.json")

_NO_CODE: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    name: str
    value: int | None
    """None where it could not be found out."""
    goal: int
    """The most that the design allows."""
    note: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the goal is reached."""
        return self.value is not None and self.value <= self.goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What lies on the way to the loss and on the way to the link, in the order in which it is met."""

    modules: tuple[str, ...]
    classes: tuple[str, ...]


def count_lines(text: str) -> int:
    """Lines of code of a module, without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(ast.parse(text)))


def _docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of texts that stand as statements."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            is_constant = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            if is_constant and isinstance(one.value.value, str):
                lines.update(range(one.lineno, one.end_lineno + 1))
    return lines


def names_defined_twice(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Public names of classes that several modules define, each with these modules."""
    places: dict[str, set[str]] = defaultdict(set)
    for place, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(place)
    return {name: sorted(found) for name, found in sorted(places.items()) if len(found) > 1}


def without_vocabulary(names: Iterable[str]) -> tuple[str, ...]:
    """Dotted names without those of the rooms whose words all others speak."""
    return tuple(
        name for name in names if not any(name == room or name.startswith(f"{room}.") for room in VOCABULARY)
    )


def trace_ways() -> Ways:
    """Run a small job with both of its ranks traced."""
    with tempfile.TemporaryDirectory(prefix="isthmus-size-") as name:
        folder = Path(name).resolve()
        (folder / "found").mkdir()
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text("import calls\n\ncalls.install()\n")
        job = folder / "raw.toml"
        job.write_text(JOBS["raw"].text("raw", is_new=True, places={}))
        hooks = (folder / "hook", Path(__file__).resolve().parent)
        done = subprocess.run(
            PRESENT.isthmus("run", str(job), "--runs", str(folder / "runs")),
            cwd=folder,
            env=PRESENT.environment(*hooks, more={FOLDER_VARIABLE: str(folder / "found")}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the traced run has failed:\n{last_lines(done.stderr)}")
        return read_ways([json.loads(path.read_text()) for path in (folder / "found").iterdir()])


def read_ways(ranks: Sequence[Mapping[str, Any]]) -> Ways:
    """What the ranks noted; the one that has sent an activation before its first backward is not the last."""
    last = [rank for rank in ranks if rank["classes"] is None]
    first = [rank for rank in ranks if rank["classes"] is not None]
    if len(last) != 1 or len(first) != 1:
        raise SystemExit(
            f"of {len(ranks)} traced ranks {len(first)} have handed an activation over: "
            "do HAND_OVERS and the other names in calls.py still exist?"
        )
    return Ways(
        modules=without_vocabulary(last[0]["modules"]), classes=without_vocabulary(first[0]["classes"])
    )


def above_ceiling(figures: Iterable[Figure], ceilings: Mapping[str, int]) -> list[str]:
    """A sentence for every counted figure that is above its ceiling."""
    return [
        f"{one.name}: {one.value:,}, and the ceiling is {ceilings.get(one.name, one.goal):,}"
        for one in figures
        if one.value is not None and one.value > ceilings.get(one.name, one.goal)
    ]


def lowered(ceilings: Mapping[str, int], figures: Iterable[Figure]) -> dict[str, int]:
    """The ceilings lowered to what was counted, but not below the goal; a new figure gets its own value."""
    found = dict(ceilings)
    for one in figures:
        if one.value is not None:
            counted = max(one.value, one.goal)
            found[one.name] = min(found.get(one.name, counted), counted)
    return found


def static_figures(package: Path) -> list[Figure]:
    """What can be counted without running anything."""
    texts = {str(path.relative_to(package)): path.read_text() for path in sorted(package.rglob("*.py"))}
    lines = {place: count_lines(text) for place, text in texts.items()}
    twice = names_defined_twice(texts)
    there = [path for path in READING_PATH if f"{path}.py" in texts]
    absent = [path for path in READING_PATH if path not in there]
    reading = sum(lines[f"{path}.py"] for path in there)
    return [
        Figure(name="lines of code", value=sum(lines.values()), goal=MAX_LINES),
        Figure(name="files", value=len(texts), goal=MAX_FILES),
        Figure(name="class names defined twice", value=len(twice), goal=0, note=", ".join(twice)),
        Figure(
            name="reading path, lines of code",
            value=reading,
            goal=MAX_READING_LINES,
            note=", ".join(f"{path} {lines[f'{path}.py']}" for path in there),
        ),
        Figure(
            name="reading path, files that do not exist", value=len(absent), goal=0, note=", ".join(absent)
        ),
    ]


def traced_figures(ways: Ways | None) -> list[Figure]:
    """What a run shows; without a value where none was traced."""
    num_modules, num_classes = (None, None) if ways is None else (len(ways.modules), len(ways.classes))
    note = "not traced" if ways is None else ""
    return [
        Figure(name="modules from run to loss", value=num_modules, goal=MAX_MODULES, note=note),
        Figure(name="classes from actor to link", value=num_classes, goal=MAX_CLASSES, note=note),
    ]


def table_of(figures: Sequence[Figure], ceilings: Mapping[str, int]) -> Table:
    """The table."""
    table = Table("what", "count", "ceiling", "goal", "", "which")
    for one in figures:
        value = "" if one.value is None else f"{one.value:,}"
        ceiling = f"≤ {ceilings[one.name]:,}" if one.name in ceilings else ""
        table.add_row(one.name, value, ceiling, f"≤ {one.goal:,}", "✓" if one.is_met else "✗", one.note)
    return table


def main() -> None:
    """Count, print the table and a JSON line."""
    options = _parser().parse_args()
    ways = None if options.no_run else trace_ways()
    figures = [*static_figures(PACKAGE), *traced_figures(ways)]
    ceilings: dict[str, int] = json.loads(CEILINGS.read_text())
    if options.record:
        ceilings = lowered(ceilings, figures)
        CEILINGS.write_text(json.dumps(ceilings, indent=2) + "\n")
    above = above_ceiling(figures, ceilings)
    if not options.json:
        console = Console(width=150, highlight=False)
        console.print(table_of(figures, ceilings))
        if options.list and ways is not None:
            console.print("modules from run to loss:", *ways.modules, sep="\n  ")
            console.print("classes from actor to link:", *ways.classes, sep="\n  ")
    line = {
        "benchmark": "size",
        "python": platform.python_version(),
        "figures": {one.name: one.value for one in figures},
        "goals": {one.name: one.goal for one in figures},
        "ceilings": ceilings,
        "above_ceiling": above,
        "missed": [one.name for one in figures if not one.is_met],
        "modules": [] if ways is None else ways.modules,
        "classes": [] if ways is None else ways.classes,
    }
    print(json.dumps(line))
    if options.check and above:
        sys.exit("\n".join([*above, "delete or merge until it fits; ceilings are only ever lowered"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--no-run", action="store_true", help="count only what needs no run")
    parser.add_argument("--list", action="store_true", help="name the modules and the classes on the way")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a ceiling is passed")
    parser.add_argument("--record", action="store_true", help="lower the ceilings to what was counted")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    return parser


if __name__ == "__main__":
    main()
