"""What `codec = "auto"` comes to on lines from wide to narrow, beside every fixed choice that could be best.

python benchmarks/codec_auto.py [--quick] [--out DIR] [--json]

In this order: every line is probed and both stages are profiled by the product's own probe and rig; the
product plans a job for each trial from those figures, and the plans are written to a file; only then does
anything run. The automatic runs begin with the planned codecs and are steered by what they measure, as in a
session; some are told a wrong bandwidth, as by a probe that has grown old, and in one the line is slow for a
while. Where directions differ, lines are given down / up. Fixed runs have the codecs of one rung of the
ladder. What is compared is the steady step: the best fixed choice is the fastest rung that loses no more than
what the automatic run ended with.

Stages sleep, so that both clouds fit on few cores; packets, codecs, links, schedule and steering are real.
The basis of a subspace, which is sent every 100 steps once it is learned, is not in the steady step; the
choice counts it by the steps of the job.
"""

import argparse
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path

from auto.planning import TrialsByCase, write_plans
from auto.running import NUM_STEADY_STEPS, Ran, run
from auto.scores import GOAL, MOST_STEPS, Row, fixed_record, is_monotone, loss_of, rows_of
from auto.trials import (
    GRID,
    NAP,
    NUM_MICROBATCHES,
    NUM_TOKENS,
    QUICK_GRID,
    RTT_MS,
    cases_of,
    trials_of,
)
from machine import machine
from predicted.cases import Case
from predicted.journey import Plans, travel
from predicted.measuring import Folder, measure
from predicted.stages import WIDTH
from rich.console import Console
from rich.table import Table
from sleeping import let_sleeps_end_in_time

PLANS = "plans.json"


def measure_and_run(cases: Sequence[Case], trials: TrialsByCase, out: Path, notes: Console) -> list[Ran]:
    """Probe and profile, plan, run; gives every run."""
    folder, path = Folder(path=out), out / PLANS
    plans = Plans(
        measure=functools.partial(measure, folder=folder),
        run=functools.partial(run, trials=trials, plans=path),
        predictions=path,
    )

    def write_down() -> None:
        write_plans(cases, trials, folder, path)

    with notes.status("starting") as status:
        brought = travel(cases, plans, on_measured=write_down, say=status.update)
    return [one for found in brought for one in found]


def show(console: Console, rows: Sequence[Row]) -> None:
    """The table."""
    table = Table(
        "line", "trial", "planned", "settled", "loss", "step", "best fixed", "its step", "longer by"
    )
    for row in rows:
        auto = row.auto
        table.add_row(
            row.line.rates,
            auto.trial.name,
            _short(auto.first),
            _short(auto.last) + (f", step {auto.since_step}" if auto.since_step else ""),
            loss_of(auto.last).name.lower(),
            f"{1e3 * auto.steady_s:.0f} ms",
            _short(row.best.last),
            f"{1e3 * row.best.steady_s:.0f} ms",
            f"{row.excess:+.1%}" if row.is_right else f"[bold]{row.excess:+.1%}[/]",
        )
    console.print(table)


def how() -> str:
    """What was run."""
    return (
        f"two clouds, {RTT_MS:g} ms round trip; {NUM_MICROBATCHES} micro-batches of {NUM_TOKENS} × {WIDTH} "
        f"float32, {1e3 * NAP.forward_s:g} + {1e3 * NAP.backward_s:g} ms of compute each; steps are medians "
        f"of the last {NUM_STEADY_STEPS}; best fixed: the fastest rung of equal or milder loss"
    )


def _word(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _short(texts: tuple[str, str]) -> str:
    """The codec of activations, and that of gradients where it stands on another rung."""
    forward, backward = texts
    plain = backward.replace("(stochastic)", "")
    return forward if forward.endswith(plain) else f"{forward}; {backward}"


def main() -> None:
    """Measure, plan, run; print the table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few lines")
    parser.add_argument("--out", type=Path, default=Path("runs/codec-auto"), help="folder of files")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args()
    let_sleeps_end_in_time()
    out = (options.out / time.strftime("%Y%m%d-%H%M%S")).resolve()
    out.mkdir(parents=True)
    grid = QUICK_GRID if options.quick else GRID
    cases = cases_of(grid)
    trials = {case.number: trials_of(case, autos) for case, autos in zip(cases, grid.values(), strict=True)}
    started_s = time.monotonic()
    runs = measure_and_run(cases, trials, out, Console(stderr=True, highlight=False, soft_wrap=True))
    rows = rows_of(cases, runs)
    monotone = is_monotone(rows)
    if not options.json:
        console = Console(width=170)
        console.print(how())
        show(console, rows)
        worst = max(row.excess for row in rows)
        console.print(f"never milder on a narrower line: {_word(monotone)}")
        console.print(f"the wide direction milder: {_word(all(row.is_wide_milder for row in rows))}")
        for row in rows:
            if (way := row.following) is not None:
                console.print(
                    f"a slow-down followed after {way.there_steps} steps, left after {way.back_steps}, in "
                    f"{way.num_changes} changes; goal ≤ {MOST_STEPS} steps each, 2 changes"
                )
        console.print(f"at most {worst:+.1%} longer than the best fixed choice; goal ≤ {GOAL:.0%}")
    line = {
        "benchmark": "codec_auto",
        **machine("torch", "grpcio"),
        "took_s": time.monotonic() - started_s,
        "is_monotone": monotone,
        "is_wide_milder": all(row.is_wide_milder for row in rows),
        "worst_excess": max(row.excess for row in rows),
        "auto": [row.record() for row in rows],
        "fixed": [fixed_record(cases[one.number], one) for one in runs if one.trial.rung is not None],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
