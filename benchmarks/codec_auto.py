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

import functools
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
from bench import NOTES, finish, new_folder, options, show
from predicted.cases import Case
from predicted.journey import Plans, travel
from predicted.measuring import Folder, measure
from predicted.stages import WIDTH
from sleeping import let_sleeps_end_in_time

PLANS = "plans.json"


def measure_and_run(cases: Sequence[Case], trials: TrialsByCase, out: Path) -> list[Ran]:
    """Probe and profile, plan, run; gives every run."""
    folder, path = Folder(path=out), out / PLANS
    plans = Plans(
        measure=functools.partial(measure, folder=folder),
        run=functools.partial(run, trials=trials, plans=path),
        predictions=path,
    )

    def write_down() -> None:
        write_plans(cases, trials, folder, path)

    with NOTES.status("starting") as status:
        brought = travel(cases, plans, on_measured=write_down, say=status.update)
    return [one for found in brought for one in found]


def table_row(row: Row) -> dict[str, str]:
    auto = row.auto
    return {
        "line": row.line.rates,
        "trial": auto.trial.name,
        "planned": _short(auto.first),
        "settled": _short(auto.last) + (f", step {auto.since_step}" if auto.since_step else ""),
        "loss": loss_of(auto.last).name.lower(),
        "step": f"{1e3 * auto.steady_s:.0f} ms",
        "best fixed": _short(row.best.last),
        "its step": f"{1e3 * row.best.steady_s:.0f} ms",
        "longer by": f"{row.excess:+.1%}" if row.is_right else f"[bold]{row.excess:+.1%}[/]",
    }


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
    given = options(__doc__, quick=False, out=Path("runs/codec-auto"), json=False)
    let_sleeps_end_in_time()
    grid = QUICK_GRID if given.quick else GRID
    cases = cases_of(grid)
    trials = {case.number: trials_of(case, autos) for case, autos in zip(cases, grid.values(), strict=True)}
    started_s = time.monotonic()
    runs = measure_and_run(cases, trials, new_folder(given.out))
    rows = rows_of(cases, runs)
    monotone = is_monotone(rows)
    if not given.json:
        print(how())
        show([table_row(row) for row in rows])
        worst = max(row.excess for row in rows)
        print(f"never milder on a narrower line: {_word(monotone)}")
        print(f"the wide direction milder: {_word(all(row.is_wide_milder for row in rows))}")
        for row in rows:
            if (way := row.following) is not None:
                print(
                    f"a slow-down followed after {way.there_steps} steps, left after {way.back_steps}, in "
                    f"{way.num_changes} changes; goal ≤ {MOST_STEPS} steps each, 2 changes"
                )
        print(f"at most {worst:+.1%} longer than the best fixed choice; goal ≤ {GOAL:.0%}")
    finish(
        "codec_auto",
        "torch",
        "grpcio",
        took_s=time.monotonic() - started_s,
        is_monotone=monotone,
        is_wide_milder=all(row.is_wide_milder for row in rows),
        worst_excess=max(row.excess for row in rows),
        auto=[row.record() for row in rows],
        fixed=[fixed_record(cases[one.number], one) for one in runs if one.trial.rung is not None],
    )


if __name__ == "__main__":
    main()
