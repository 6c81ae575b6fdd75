"""Step times that the simulator predicts, beside those of real runs over an emulated WAN.

python benchmarks/prediction.py [--quick] [--cases N] [--seed N] [--policy NAME] [--gpu] [--deadline-s S]
                                [--out DIR] [--json]

In this order: every link is probed by the product's own probe, and every stage of every case profiled, at all
its clouds at the same time; the predictions of all cases are written to a file, whose time and hash are
printed; only then does any case run. Nothing is fitted: predictions see the files of probe and profile alone.
Stages that several cases have are profiled once. A case that has run is a JSON line; those for which no time
is left are named as missing.

Stages sleep, so that many clouds fit on few cores; packets, codecs, links and schedule are real. With --gpu
the stages are of a real model, all clouds on one device, each with a quarter of its multiprocessors where
NVIDIA's daemon for that is there, and each profiled while the others compute too.
"""

import argparse
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import NOTES, Choice, Deadline, finish, new_folder, options, show, tell
from mps import share_among, shared_gpu
from predicted.cases import (
    NUM_CASES,
    NUM_QUICK_CASES,
    NUM_QUICK_MODEL_CASES,
    QUICK_WANS,
    WANS,
    Case,
    model_cases,
    sleeping_cases,
)
from predicted.journey import Plans, travel
from predicted.measuring import PROBE_S, PROFILE_S, Folder, measure
from predicted.predicting import NUM_STEPS, NUM_WARM_UP_STEPS, Prediction, seal_of, write_predictions
from predicted.running import Measured, run
from predicted.scores import Outcome, Score, by_kind, score
from sleeping import let_sleeps_end_in_time

from isthmus.plan.scenario import Policy
from isthmus.train.device import Device

PREDICTIONS = "predictions.json"
MEAN_GOAL, WORST_GOAL, TAU_GOAL = 0.05, 0.15, 0.9
MAX_CLOUDS = 4


def measure_and_run(cases: Sequence[Case], out: Path, deadline: Deadline) -> list[Outcome]:
    """Predictions and runs, in the honest order; gives the cases that have run."""
    folder, path = Folder(path=out), out / PREDICTIONS
    predictions: dict[int, Prediction] = {}
    by_number = {case.number: case for case in cases}
    outcomes: list[Outcome] = []

    def write_down() -> None:
        predictions.update(write_predictions(cases, folder, path))
        seal = seal_of(path)
        NOTES.print(f"{len(cases)} predictions in {path}, written {seal['written']}, sha256 {seal['sha256']}")

    def note(values: Mapping[str, Any]) -> None:
        measured = Measured.read(values)
        case, prediction = by_number[measured.number], predictions[measured.number]
        outcomes.append(Outcome(case=case, prediction=prediction, measured=measured))
        tell(outcomes[-1].record())

    plans = Plans(
        measure=functools.partial(measure, folder=folder),
        run=functools.partial(run, deadline=deadline),
        predictions=path,
    )
    with NOTES.status("starting") as status:
        travel(cases, plans, on_measured=write_down, say=status.update, on_case=note)
    return outcomes


def case_row(one: Outcome) -> dict[str, str]:
    """The window is that of the first stage, idle a share of the machine's processors."""
    case, idle_share = one.case, one.measured.idle_share
    windows = one.prediction.windows[0], one.measured.median.windows[0]
    return {
        "case": str(case.number),
        "WAN": case.wan.name,
        "m": str(case.num_microbatches),
        "stages": "equal" if case.stages.is_equal else "unequal",
        "what crosses": f"{case.stages.size.sequence_length} tokens, {case.codec[0]}",
        "window": " → ".join(map(str, dict.fromkeys(windows))),
        "idle": "" if idle_share is None else f"{idle_share:.0%}",
        "predicted": f"{one.predicted_s:.3f} s",
        "measured": f"{one.measured_s:.3f} s",
        "error": f"{one.error:+.1%}",
    }


def score_row(kind: str, one: Score) -> dict[str, str]:
    return {
        "kind": kind,
        "cases": str(one.num_cases),
        f"mean error (≤ {MEAN_GOAL:.0%})": f"{one.mean_error:.1%}",
        "bias": f"{one.bias:+.1%}",
        f"worst (≤ {WORST_GOAL:.0%})": f"{one.worst_error:.1%}",
        f"Kendall τ (≥ {TAU_GOAL})": "" if one.kendall_tau is None else f"{one.kendall_tau:.3f}",
    }


def how(options: argparse.Namespace, num_cases: int) -> str:
    """What was profiled, and how."""
    stages = (
        "real stages in bfloat16 on one device, each profiled while the others computed too"
        if options.gpu
        else "stages that sleep, profiled at all clouds of a case at the same time"
    )
    return (
        f"{num_cases} cases; {stages}; links probed for {PROBE_S:g} s each way, stages for {PROFILE_S:g} s; "
        f"packets made and read at both ends; medians of {NUM_STEPS} steps after {NUM_WARM_UP_STEPS}"
    )


def choose_cases(options: argparse.Namespace) -> list[Case]:
    """The cases that were asked for."""
    return [replace(one, policy=options.policy) for one in _drawn_cases(options)]


def _drawn_cases(options: argparse.Namespace) -> list[Case]:
    if options.gpu:
        num_cases = options.cases or (NUM_QUICK_MODEL_CASES if options.quick else None)
        return model_cases(device=options.device, is_quick=options.quick)[:num_cases]
    if options.quick:
        return sleeping_cases(QUICK_WANS, options.cases or NUM_QUICK_CASES, seed=options.seed)
    return sleeping_cases(WANS, options.cases or NUM_CASES, seed=options.seed)


def main() -> None:
    """Measure, predict, run; print the tables and a JSON line."""
    given = options(
        __doc__,
        quick=False,
        cases=int,
        seed=0,
        policy=Choice("wan-1f1b", [one.value for one in Policy]),
        gpu=False,
        device="auto",
        deadline_s=float,
        out=Path("runs/prediction"),
        json=False,
    )
    deadline = Deadline.after(given.deadline_s)
    let_sleeps_end_in_time()
    out = new_folder(given.out)
    cases = choose_cases(given)
    started_s = time.monotonic()
    with shared_gpu(is_wanted=given.gpu) as is_shared:
        if is_shared:
            share_among(MAX_CLOUDS)
        outcomes = measure_and_run(cases, out, deadline)
    missing = sorted({case.number for case in cases} - {one.case.number for one in outcomes})
    if missing:
        NOTES.print(f"cut off by the deadline: no time was left for cases {', '.join(map(str, missing))}")
    if not outcomes:
        return
    total, kinds = score(outcomes), by_kind(outcomes)
    if not given.json:
        print(how(given, len(outcomes)))
        show([case_row(one) for one in outcomes])
        show([score_row(kind, one) for kind, one in {"all": total, **kinds}.items()])
    finish(
        "prediction",
        "torch",
        "grpcio",
        device=Device("auto").name,
        seed=given.seed,
        is_gpu_shared_out=is_shared,
        took_s=time.monotonic() - started_s,
        predictions=seal_of(out / PREDICTIONS),
        score=asdict(total),
        kinds={kind: asdict(one) for kind, one in kinds.items()},
        cases=[one.record() for one in outcomes],
        missing=missing,
    )


if __name__ == "__main__":
    main()
