"""Runs a grid of jobs × seeds side by side, and writes a table and a plot with intervals.

    python benchmarks/sweep.py benchmarks/sweeps/table2.toml --out OUT --given data=FOLDER [--stop-after 540]

A grid (TOML) has a `job`, the `metric` that it is judged by, `seeds`, and `axes`: names of values, each with
its overrides (`--set`). Every cell of the axes is run with every seed, by the command that a user types. What
is done stays in OUT/results.jsonl; a run that was stopped continues at the next call, so a sweep can take
several leases of a machine. Differences are those to the `baseline`, a value of the last axis, over paired
seeds.
"""

import argparse
import itertools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quality.intervals import Difference, paired_difference

from isthmus.observe.draw import label, line, to_svg
from isthmus.observe.report import find_run, read_run, summarize

_RESULTS: Final = "results.jsonl"
_POLL_S: Final = 0.5
_STOP_S: Final = 60.0
_MAX_TOLD: Final = 300
_ROW_HEIGHT, _PLOT_LEFT, _PLOT_WIDTH = 18, 250, 330

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What a file of a sweep says."""

    job: Path
    metric: str
    seeds: tuple[int, ...]
    baseline: str
    axes: Mapping[str, Mapping[str, Sequence[str]]]
    common: tuple[str, ...] = ()
    """The overrides of all runs."""
    is_without_codecs: bool = False
    """Whether the round of an evaluation counts in which everything crosses raw."""

    def runs(self) -> Iterator["Cell"]:
        """Every cell of the axes with every seed; all cells of a seed before the next seed."""
        for seed in self.seeds:
            for names in itertools.product(*self.axes.values()):
                own = [
                    one for axis, name in zip(self.axes.values(), names, strict=True) for one in axis[name]
                ]
                yield Cell(names=names, seed=seed, overrides=(*self.common, *own, f"seed={seed}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of a grid."""

    names: tuple[str, ...]
    seed: int
    overrides: tuple[str, ...]

    @property
    def id(self) -> str:
        """A name for its folder."""
        text = "_".join((*self.names, f"seed{self.seed}"))
        return "".join(one if one.isalnum() or one in "._-" else "-" for one in text)


def read_grid(path: Path, given: Mapping[str, str], *, is_tiny: bool) -> Grid:
    """The grid of a file; what was given stands for `{name}` in its overrides, `tiny` has a smaller grid."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    tiny = values.pop("tiny", {})
    if is_tiny:
        values |= {key: one for key, one in tiny.items() if key != "set"}

    def filled(texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(text.format_map(given) for text in texts)

    return Grid(
        job=path.parent / values["job"],
        metric=values["metric"],
        seeds=tuple(values["seeds"]),
        baseline=values["baseline"],
        axes={axis: {name: filled(one) for name, one in own.items()} for axis, own in values["axes"].items()},
        common=filled((*values.get("set", ()), *(tiny.get("set", ()) if is_tiny else ()))),
        is_without_codecs=values.get("without_codecs", False),
    )


# The runs.


@dataclass(slots=True, eq=False)
class Sweep:
    """Runs what is not done yet, so many at once, until the time is over."""

    grid: Grid
    out: Path
    at_once: int
    until_s: float
    _running: dict[str, tuple[Cell, "subprocess.Popen[bytes]"]] = field(default_factory=dict)

    def run(self) -> None:
        """Run all cells that have no record, and stop in an orderly way where the time does not suffice."""
        done = {one["id"] for one in read_records(self.out)}
        left = [cell for cell in self.grid.runs() if cell.id not in done]
        try:
            while (left or self._running) and time.monotonic() < self.until_s:
                while left and len(self._running) < self.at_once:
                    self._start(left.pop(0))
                time.sleep(_POLL_S)
                self._reap()
        finally:
            self._stop()
            self._reap()

    def _start(self, cell: Cell) -> None:
        folder = self.out / cell.id
        folder.mkdir(parents=True, exist_ok=True)
        sets = [part for one in cell.overrides for part in ("--set", one)]
        command = [sys.executable, "-m", "isthmus", "run", str(self.grid.job), "--runs", str(folder / "runs")]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen([*command, *sets], stdout=log, stderr=log)
        self._running[cell.id] = cell, process

    def _reap(self) -> None:
        for cell, process in list(self._running.values()):
            if process.poll() is None:
                continue
            del self._running[cell.id]
            record = self._record(cell, process.returncode)
            if record is not None:
                with (self.out / _RESULTS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(f"{cell.id}: {record.get('value', record.get('failed'))}", flush=True)

    def _record(self, cell: Cell, code: int) -> Record | None:
        """What a run came to; None for one that was stopped and goes on later."""
        record = {"id": cell.id, "names": cell.names, "seed": cell.seed}
        models = list((self.out / cell.id / "runs").glob("*/*/model"))
        if models:
            run = models[0].parent
            found = measured(run, self.grid)
            for name in ("model", "checkpoints"):
                shutil.rmtree(run / name, ignore_errors=True)
            return record | found
        if code in (0, -signal.SIGTERM, 128 + signal.SIGTERM) or time.monotonic() >= self.until_s:
            return None
        text = (self.out / cell.id / "log").read_text(encoding="utf-8", errors="replace")
        return record | {"failed": text.strip()[-_MAX_TOLD:]}

    def _stop(self) -> None:
        for _, process in self._running.values():
            process.terminate()
        until_s = time.monotonic() + _STOP_S
        for _, process in self._running.values():
            try:
                process.wait(timeout=max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measured(run: Path, grid: Grid) -> dict[str, Any]:
    """The metric of the best evaluation, and what crossed and how long a step took."""
    recorded = read_run(find_run(run))
    summary = summarize(recorded)
    rounds = [
        one for one in recorded.values("evaluation") if bool(one.get("is_plain")) is grid.is_without_codecs
    ]
    values = [float(one[grid.metric]) for one in rounds if grid.metric in one]
    return {
        "value": (min if grid.metric == "loss" else max)(values),
        "last_value": values[-1],
        "num_bytes_per_step": summary.num_bytes / max(summary.num_steps, 1),
        "ratio_to_float32": summary.ratio_to_float32,
        "step_s": summary.step_s,
    }


def read_records(out: Path) -> list[Record]:
    """The records of a sweep, in the order in which runs have ended."""
    path = out / _RESULTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(one) for one in lines]


# The table and the plot.


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One cell over all seeds, and its difference to the baseline of the same other axes."""

    names: tuple[str, ...]
    mean: float
    num_seeds: int
    lost: Difference | None
    ratio: float | None
    step_s: float | None
    num_bytes: float


def lines_of(grid: Grid, records: Sequence[Record]) -> list[Line]:
    """A line for each cell that has a run."""
    found: dict[tuple[str, ...], dict[int, Record]] = {}
    for one in records:
        if "value" in one:
            found.setdefault(tuple(one["names"]), {})[one["seed"]] = one
    lines = []
    for names in itertools.product(*grid.axes.values()):
        own = found.get(names)
        if own is None:
            continue
        raw = found.get((*names[:-1], grid.baseline), {})
        values, others = ({seed: one["value"] for seed, one in each.items()} for each in (own, raw))
        lines.append(
            Line(
                names=names,
                mean=statistics.fmean(values.values()),
                num_seeds=len(values),
                lost=None if names[-1] == grid.baseline else paired_difference(values, others),
                ratio=_mean(one["ratio_to_float32"] for one in own.values()),
                step_s=_mean(one["step_s"] for one in own.values()),
                num_bytes=statistics.fmean(one["num_bytes_per_step"] for one in own.values()),
            )
        )
    return lines


def _mean(values: Iterator[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return statistics.fmean(known) if known else None


def table(grid: Grid, lines: Sequence[Line]) -> str:
    """The lines as Markdown."""
    heads = [
        *grid.axes,
        grid.metric,
        f"to {grid.baseline} (95 %)",
        "seeds",
        "× float32",
        "kB a step",
        "s a step",
    ]
    rows = [heads, ["---"] * len(heads)]
    for one in lines:
        lost = "" if one.lost is None else f"{one.lost.mean:+.4g} [{one.lost.low:+.4g}, {one.lost.high:+.4g}]"
        ratio = "" if one.ratio is None else f"{one.ratio:.1f}"
        step = "" if one.step_s is None else f"{one.step_s:.3g}"
        figures = [f"{one.mean:.4g}", lost, str(one.num_seeds), ratio, f"{one.num_bytes / 1000:.4g}", step]
        rows.append([*one.names, *figures])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def plot(grid: Grid, lines: Sequence[Line]) -> str:
    """The differences to the baseline with their intervals, as SVG."""
    ends = [end for one in lines if one.lost for end in (one.lost.low, one.lost.high)]
    low, high = min([*ends, 0.0]), max([*ends, 0.0])
    scale = _PLOT_WIDTH / ((high - low) or 1.0)

    def place(value: float) -> float:
        return _PLOT_LEFT + (value - low) * scale

    drawn = [one for one in lines if one.lost is not None]
    height, width = _ROW_HEIGHT * (len(drawn) + 3), _PLOT_LEFT + _PLOT_WIDTH + 20
    bottom = _ROW_HEIGHT * (len(drawn) + 1)
    parts = [
        label(width / 2, 12, f"{grid.metric} beside {grid.baseline}", anchor="middle"),
        line((place(0), _ROW_HEIGHT), (place(0), bottom)),
        label(place(low), bottom + 14, f"{low:.3g}", anchor="middle"),
        label(place(high), bottom + 14, f"{high:.3g}", anchor="middle"),
    ]
    for number, one in enumerate(drawn, start=1):
        y = _ROW_HEIGHT * (number + 0.5)
        parts.append(label(8, y, " · ".join(one.names)))
        if one.lost is not None:
            parts.append(line((place(one.lost.low), y), (place(one.lost.high), y)))
            parts.append(f'<circle cx="{place(one.lost.mean):.1f}" cy="{y:.1f}" r="3" fill="#1f6f8b"/>')
    return to_svg(width, height, parts)


def main() -> None:
    """Run a sweep as far as the time goes, and write what is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--given", action="append", default=[], metavar="NAME=TEXT")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--device", default=None, help="of all clouds, such as cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps, to try the sweep")
    arguments = parser.parse_args()
    given = dict(one.split("=", 1) for one in arguments.given)
    grid = read_grid(arguments.grid, given, is_tiny=arguments.tiny)
    if arguments.device is not None:
        clouds = tomllib.loads(grid.job.read_text(encoding="utf-8"))["cloud"]
        own = tuple(f"cloud.{one['name']}.device={arguments.device}" for one in clouds)
        grid = Grid(**{name: getattr(grid, name) for name in grid.__slots__} | {"common": grid.common + own})
    arguments.out.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + arguments.stop_after
    Sweep(grid=grid, out=arguments.out, at_once=arguments.at_once, until_s=until_s).run()
    records = read_records(arguments.out)
    lines = lines_of(grid, records)
    (arguments.out / "table.md").write_text(table(grid, lines), encoding="utf-8")
    (arguments.out / "plot.svg").write_text(plot(grid, lines), encoding="utf-8")
    print(table(grid, lines))
    print(f"{len(records)} of {sum(1 for _ in grid.runs())} runs have ended")


if __name__ == "__main__":
    main()
