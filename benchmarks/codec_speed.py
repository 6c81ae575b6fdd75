"""Measures what codecs cost in time: beside plain copies and other quantisers, in a stage, and in a run.

python benchmarks/codec_speed.py [--tiny] [--no-cpu] [--no-tensors] [--no-stage] [--no-demo] [--deadline-s S]

    tensors   encode and decode of one activation, as a share of the speed at which it can be copied: on one
              core of the CPU, and on the accelerator if there is one
    stage     a stage that computes while both its cuts code: its step with codecs beside its step with raw,
              in turns; each round is a JSON line, and a deadline ends them early
    demo      `isthmus run` of the demo with codecs: how long codecs worked while their cloud was idle

hivemind's quantisers are measured in the same run where hivemind is installed (1.1.12 needs numpy below 2.4).
"""

import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bench import Deadline, finish, options, show
from quality.intervals import Difference
from speed.demo import measure_demo
from speed.stage import ALONE, FULL, PAIRS, RAW, TINY, StageTiming, time_stage
from speed.tensors import Timing, activations, time_all

from isthmus.train.device import Device

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.toml"
CODECS = ("rotate | int4", "rotate | int4(stochastic)")


def show_tensors(place: str, timings: list[Timing]) -> None:
    """The first table: 100 % is as fast as a copy."""
    copy_us = 1e6 * statistics.median(one.copy_s for one in timings)
    rows = [
        {
            "codec": one.name,
            "bits": f"{one.bits_per_element:.2f}",
            "encode": f"{1e6 * one.encode_s:.0f} µs",
            "of a copy": f"{one.copy_s / one.encode_s:.1%}",
            "decode": f"{1e6 * one.decode_s:.0f} µs",
            "decode of a copy": f"{one.copy_s / one.decode_s:.1%}",
        }
        for one in timings
    ]
    show(rows, title=f"{place}: a plain copy takes {copy_us:.0f} µs")


def show_stage(timing: StageTiming) -> None:
    """The second table."""
    num_rounds, num_wanted = len(timing.rounds), timing.num_rounds_wanted
    cut_off = "" if num_rounds == num_wanted else f", cut off: {num_wanted} were wanted"
    rows = []
    for name in (ALONE, *PAIRS):
        step_s, passes_s = timing.step_s(name), timing.passes_s(name)
        row = {"what crosses": name, "step": f"{1e3 * step_s:.2f} ms"}
        row["more than raw"] = "" if name in (ALONE, RAW) else _interval(timing.added_share(name, to=RAW))
        row["more than alone"] = "" if name == ALONE else _interval(timing.added_share(name, to=ALONE))
        row["its passes"] = f"{1e3 * passes_s:.2f} ms"
        row["between them"] = f"{1e3 * (step_s - passes_s):.2f} ms"
        rows.append(row)
    title = f"a stage of {timing.num_parameters / 1e6:.0f} M parameters between two cuts; medians and 95 % "
    show(rows, title=f"{title}intervals of {num_rounds} rounds{cut_off}")


def _interval(found: Difference) -> str:
    return f"{found.mean:+.2%} ({found.low:+.2%} to {found.high:+.2%})"


def measure_tensors(*, with_cpu: bool, is_tiny: bool) -> dict[str, Any]:
    """Encode and decode on every device that is here."""
    budget_s = 0.02 if is_tiny else 0.5
    found: dict[str, Any] = {}
    places = [("one core", torch.device("cpu"), (256, 768))] if with_cpu else []
    if with_cpu and not is_tiny:
        places.append(("one core", torch.device("cpu"), (4096, 1024)))
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator() or torch.device("cuda")
        places += [(accelerator.type, accelerator, shape) for shape in ((4096, 1024), (16384, 4096))]
    for place, device, shape in places:
        name = f"{place}, {shape[0]} × {shape[1]} float32"
        timings = time_all(activations(*shape, device), budget_s=budget_s)
        show_tensors(name, timings)
        found[name] = [asdict(one) for one in timings]
    return found


def main() -> None:
    """Measure, print the tables and a JSON line."""
    given = options(
        __doc__, tiny=False, no_cpu=False, no_tensors=False, no_stage=False, no_demo=False, deadline_s=float
    )
    deadline = Deadline.after(given.deadline_s)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if not given.no_tensors:
        results["tensors"] = measure_tensors(with_cpu=not given.no_cpu, is_tiny=given.tiny)
    if not given.no_stage:
        size = FULL if torch.accelerator.is_available() and not given.tiny else TINY
        timing = time_stage(size, deadline)
        show_stage(timing)
        results["stage"] = asdict(timing)
    if not given.no_demo:
        with tempfile.TemporaryDirectory() as folder:
            shares = measure_demo(DEMO, Path(folder), num_steps=4 if given.tiny else 20, codecs=CODECS)
        rows = [
            {"cloud": one.cloud, "coding": f"{one.coding:.2%}", "coding while idle": f"{one.delaying:.2%}"}
            for one in shares
        ]
        show(rows, title=f"demo with {' + '.join(CODECS)}")
        results["demo"] = [asdict(one) for one in shares]
    finish("codec_speed", "torch", "hivemind", device=Device("auto").name, **results)


if __name__ == "__main__":
    main()
