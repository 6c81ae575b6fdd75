"""What all benchmarks share: options, facts about the machine, tables, JSON lines, deadlines."""

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NOTES = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock after which nothing new is begun; None where there is time enough."""

    end_s: float | None = None

    @classmethod
    def after(cls, limit_s: float | None) -> "Deadline":
        return cls(None if limit_s is None else time.monotonic() + limit_s)

    def leaves(self, work_s: float = 0.0) -> bool:
        """Whether work that takes so long, begun now, ends in time."""
        return self.end_s is None or time.monotonic() + work_s < self.end_s


@dataclass(frozen=True, slots=True)
class Choice:
    """An option with a few possible values; a list as default takes several of them."""

    default: Any
    values: Sequence[Any]


def options(doc: str | None, /, **given: Any) -> argparse.Namespace:
    """Parse the command line; each option is given by its default.

    False makes a flag, a type an option without a default, a list an option that takes several values.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in given.items():
        flag = f"--{name.replace('_', '-')}"
        choices = None
        if isinstance(default, Choice):
            default, choices = default.default, default.values
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction if default else "store_true")
            parser.set_defaults(**{name: default})
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        elif isinstance(default, list):
            kind = type([*default, *(choices or ()), Path()][0])
            parser.add_argument(flag, nargs="+", type=kind, default=default, choices=choices)
        else:
            kind = Path if isinstance(default, Path) else type(default)
            parser.add_argument(flag, type=kind, default=default, choices=choices)
    return parser.parse_args()


def show(rows: Sequence[Mapping[str, str]], *, title: str | None = None) -> None:
    """Print a table whose columns are the keys of its rows."""
    if rows:
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*row.values())
        Console(width=170).print(table)


def tell(record: Mapping[str, Any]) -> None:
    """Print a JSON line at once, so that a benchmark that is stopped has told what it found."""
    print(json.dumps(record), flush=True)


def finish(benchmark: str, *packages: str, **facts: Any) -> None:
    """Print the benchmark's JSON line: the machine, the versions of packages, and what was found."""
    tell({"benchmark": benchmark, **machine(*packages), **facts})


def machine(*packages: str) -> dict[str, Any]:
    """The machine, and the versions of Python and of packages; None for one that is not installed."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def new_folder(parent: Path) -> Path:
    """A folder for the files of this run, named by the time."""
    path = (parent / time.strftime("%Y%m%d-%H%M%S")).resolve()
    path.mkdir(parents=True)
    return path


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
