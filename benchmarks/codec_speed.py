"""Measures what codecs cost in time: beside plain copies and other quantisers, in a stage, and in a run.

python benchmarks/codec_speed.py [--tiny] [--no-cpu] [--no-tensors] [--no-stage] [--no-demo] [--deadline-s S]

    tensors   encode and decode of one activation, as a share of the speed at which it can be copied: on one
              core of the CPU, and on the accelerator if there is one
    stage     a stage that computes while both its cuts code: its step with codecs beside its step with raw,
              in turns; each round is a JSON line, and a deadline ends them early
    demo      `isthmus run` of the demo with codecs: how long codecs worked while their cloud was idle

hivemind's quantisers are measured in the same run where hivemind is installed (1.1.12 needs numpy below 2.4).
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from deadline import Deadline
from machine import machine
from quality.intervals import Difference
from rich.console import Console
from rich.table import Table
from speed.demo import DemoShare, measure_demo
from speed.stage import ALONE, FULL, PAIRS, RAW, TINY, StageTiming, time_stage
from speed.tensors import Timing, activations, time_all

from isthmus.train.device import Device

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.toml"
CODECS = ("rotate | int4", "rotate | int4(stochastic)")


def show_tensors(console: Console, place: str, timings: list[Timing]) -> None:
    """The first table: 100 % is as fast as a copy."""
    copy_us = 1e6 * statistics.median(one.copy_s for one in timings)
    table = Table(
        "codec", "bits", "encode", "of a copy", "decode", "of a copy",
        title=f"{place}: a plain copy takes {copy_us:.0f} µs",
    )  # fmt: skip
    for one in timings:
        table.add_row(
            one.name,
            f"{one.bits_per_element:.2f}",
            f"{1e6 * one.encode_s:.0f} µs",
            f"{one.copy_s / one.encode_s:.1%}",
            f"{1e6 * one.decode_s:.0f} µs",
            f"{one.copy_s / one.decode_s:.1%}",
        )
    console.print(table)


def show_stage(console: Console, timing: StageTiming) -> None:
    """The second table."""
    num_rounds, num_wanted = len(timing.rounds), timing.num_rounds_wanted
    cut_off = "" if num_rounds == num_wanted else f", cut off: {num_wanted} were wanted"
    table = Table(
        "what crosses", "step", "more than raw", "more than alone", "its passes", "between them",
        title=f"a stage of {timing.num_parameters / 1e6:.0f} M parameters between two cuts; medians and 95 % "
        f"intervals of {num_rounds} rounds{cut_off}",
    )  # fmt: skip
    for name in (ALONE, *PAIRS):
        step_s, passes_s = timing.step_s(name), timing.passes_s(name)
        table.add_row(
            name,
            f"{1e3 * step_s:.2f} ms",
            "" if name in (ALONE, RAW) else _interval(timing.added_share(name, to=RAW)),
            "" if name == ALONE else _interval(timing.added_share(name, to=ALONE)),
            f"{1e3 * passes_s:.2f} ms",
            f"{1e3 * (step_s - passes_s):.2f} ms",
        )
    console.print(table)


def _interval(found: Difference) -> str:
    return f"{found.mean:+.2%} ({found.low:+.2%} to {found.high:+.2%})"


def show_demo(console: Console, shares: list[DemoShare]) -> None:
    """The third table."""
    table = Table("cloud", "coding", "coding while idle", title=f"demo with {' + '.join(CODECS)}")
    for one in shares:
        table.add_row(one.cloud, f"{one.coding:.2%}", f"{one.delaying:.2%}")
    console.print(table)


def measure_tensors(console: Console, *, with_cpu: bool, is_tiny: bool) -> dict[str, Any]:
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
        show_tensors(console, name, timings)
        found[name] = [asdict(one) for one in timings]
    return found


def main() -> None:
    """Measure, print the tables and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the whole flow")
    parser.add_argument("--no-cpu", action="store_true")
    parser.add_argument("--no-tensors", action="store_true")
    parser.add_argument("--no-stage", action="store_true")
    parser.add_argument("--no-demo", action="store_true")
    parser.add_argument("--deadline-s", type=float, help="begin no round of the stage later than that")
    options = parser.parse_args()
    deadline = Deadline.after(options.deadline_s)
    torch.set_num_threads(1)
    console = Console(width=120)
    results: dict[str, Any] = {
        "benchmark": "codec_speed",
        **machine("torch", "hivemind"),
        "device": Device("auto").name,
    }
    if not options.no_tensors:
        results["tensors"] = measure_tensors(console, with_cpu=not options.no_cpu, is_tiny=options.tiny)
    if not options.no_stage:
        size = FULL if torch.accelerator.is_available() and not options.tiny else TINY
        timing = time_stage(size, deadline)
        show_stage(console, timing)
        results["stage"] = asdict(timing)
    if not options.no_demo:
        with tempfile.TemporaryDirectory() as folder:
            shares = measure_demo(DEMO, Path(folder), num_steps=4 if options.tiny else 20, codecs=CODECS)
        show_demo(console, shares)
        results["demo"] = [asdict(one) for one in shares]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
