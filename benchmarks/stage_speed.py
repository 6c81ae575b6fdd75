"""A stage at work beside the same layers in plain PyTorch: tokens per second, and what overlaps.

python benchmarks/stage_speed.py [--tiny] [--codec "rotate | int4"] [--rounds 5] [--deadline-s S] [--out DIR]

The stage is the first of two of a Llama-like model, about a billion parameters in bfloat16 with float32
masters. Isthmus' own worker drives it: scheduler, passes, codec, copies, couriers, settlement, optimizer;
behind its link stands an end that takes no time. Beside it, in turns, plain transformers: the same layers,
ids and gradients. Both sharded by FSDP2 on one rank, and both with autocast instead; eager first, and then
the same two compiled. A setting that is done is a JSON line; what there is no time for is named.

Two pictures of a step of the sharded stage: `stage-spans.svg` by events of the device and spans of the run,
and last of all, since it slows down what comes behind it, `stage-trace.svg` by a profiler.
"""

import argparse
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from deadline import Deadline, tell
from one_rank import one_rank
from rich.console import Console
from rich.table import Table
from stages.loop import SEED, Scale, StageLoop
from stages.plain import PlainLoop
from stages.trace import Step, draw_step, read_step, step_of
from torch.profiler import ProfilerActivity, profile

from isthmus.job.codec import parse_codec
from isthmus.plan.ladder import Pair
from isthmus.train.device import Device
from isthmus.train.session import SWITCH_INTERVAL_S

NUM_WARM_UP_STEPS = 2
# Dense bfloat16 of an H200, by its maker's data sheet.
PEAK_FLOPS = 989e12
# Seconds that compiling may take, and that the profiled step at the end takes; so much must be left for each.
COMPILE_S = 45.0
TRACE_S = 20.0


FULL = Scale(
    width=4096, num_layers=5, vocabulary_size=32000, num_sequences=4, length=2048, num_microbatches=16
)
TINY = Scale(width=64, num_layers=2, vocabulary_size=128, num_sequences=2, length=32, num_microbatches=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How both sides compute."""

    is_sharded: bool
    is_compiled: bool

    @property
    def words(self) -> str:
        """For the table."""
        return f"{'FSDP2' if self.is_sharded else 'autocast'}, {'compiled' if self.is_compiled else 'eager'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Both sides in one setting: their steps, round by round, and what its first steps took."""

    setting: Setting
    warm_up_s: float
    """With all that is done once: memory, kernels, compiling."""
    plain_s: tuple[float, ...]
    isthmus_s: tuple[float, ...]

    def tokens_per_s(self, scale: Scale) -> dict[str, float]:
        """By the round in the middle of each side."""
        sides = {"plain": self.plain_s, "isthmus": self.isthmus_s}
        return {name: scale.num_tokens / statistics.median(some) for name, some in sides.items()}

    @property
    def ratio(self) -> float:
        """How fast Isthmus is, as a share of plain: each round by itself, then the middle."""
        pairs = zip(self.plain_s, self.isthmus_s, strict=True)
        return statistics.median(plain_s / isthmus_s for plain_s, isthmus_s in pairs)


class Race:
    """Both sides, ready to take steps in turns."""

    def __init__(self, scale: Scale, device: Device, pair: Pair, *, is_sharded: bool) -> None:
        generator = torch.Generator().manual_seed(SEED)
        shape = scale.num_sequences, scale.length
        self._ids = [
            torch.randint(0, scale.vocabulary_size, shape, generator=generator)
            for _ in range(scale.num_microbatches)
        ]
        gradient = 1e-4 * torch.randn(*shape, scale.width, generator=generator)
        self._gradient = gradient.to(device.torch_device, torch.bfloat16)
        self._device = device
        self.plain = PlainLoop(scale.config(scale.num_layers), device.torch_device, is_sharded=is_sharded)
        self.isthmus = StageLoop(scale, device, pair, self._ids, is_sharded=is_sharded)

    def compile(self) -> None:
        """Compile the layers of both sides; it happens in their next step."""
        self.plain.compile()
        self.isthmus.stage.compile_layers()

    def run(self, setting: Setting, num_rounds: int, deadline: Deadline) -> Timing:
        """Steps in turns, after some that do not count; at least one."""
        sides: dict[str, Callable[[], None]] = {"plain": self._step_plain, "isthmus": self._step_isthmus}
        started_s = time.monotonic()
        for step in sides.values():
            for _ in range(NUM_WARM_UP_STEPS):
                warm_s = self._timed_s(step)
        warm_up_s = time.monotonic() - started_s
        taken_s: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(num_rounds):
            if number > 0 and not deadline.leaves(TRACE_S + 2 * warm_s):
                break
            for name in sides if number % 2 == 0 else reversed(sides):
                taken_s[name].append(self._timed_s(sides[name]))
        return Timing(
            setting=setting,
            warm_up_s=warm_up_s,
            plain_s=tuple(taken_s["plain"]),
            isthmus_s=tuple(taken_s["isthmus"]),
        )

    def _step_plain(self) -> None:
        self.plain.step(self._ids, self._gradient)

    def _step_isthmus(self) -> None:
        self.isthmus.run(1)

    def _timed_s(self, step: Callable[[], None]) -> float:
        self._device.mark().wait()
        started_s = time.perf_counter()
        step()
        self._device.mark().wait()
        return time.perf_counter() - started_s


def measure(
    scale: Scale, pair: Pair, options: argparse.Namespace, deadline: Deadline, *, is_sharded: bool
) -> list[Timing]:
    """Eager, then compiled; draws the sharded stage."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device = Device("auto")
    with one_rank(device.torch_device):
        started_s = time.monotonic()
        race = Race(scale, device, pair, is_sharded=is_sharded)
        print(f"both sides built in {time.monotonic() - started_s:.1f} s", flush=True)
        setting = Setting(is_sharded=is_sharded, is_compiled=False)
        found = [noted(scale, race.run(setting, options.rounds, deadline))]
        if is_sharded:
            draw_spans(race.isthmus, setting, options.out)
        if not options.no_compile and deadline.leaves(COMPILE_S + TRACE_S):
            race.compile()
            setting = replace(setting, is_compiled=True)
            found.append(noted(scale, race.run(setting, options.rounds, deadline)))
        if is_sharded and deadline.leaves(TRACE_S / 2):
            draw_trace(race.isthmus, device, setting, options.out)
        race.isthmus.close()
    return found


def noted(scale: Scale, timing: Timing) -> Timing:
    """The same, told of at once."""
    tell({**asdict(timing), "tokens_per_s": timing.tokens_per_s(scale), "ratio": timing.ratio})
    return timing


def draw_spans(stage: StageLoop, setting: Setting, out: Path) -> None:
    """Draw one step by the device's own events and the spans of the run."""
    stage.run(1)
    stage.watcher.spans.clear()
    stage.device.begin()
    stage.run(1)
    stage.device.mark().wait()
    step = step_of(stage.watcher.spans, stage.device.pieces())
    _draw(step, setting, "passes take", out / "stage-spans.svg")


def draw_trace(stage: StageLoop, device: Device, setting: Setting, out: Path) -> None:
    """Profile one step, and draw it."""
    # To follow the host's own calls as well would slow it down; what it does is in the spans.
    activities = [ProfilerActivity.CUDA if device.is_accelerator else ProfilerActivity.CPU]
    stage.watcher.spans.clear()
    with profile(activities=activities) as profiler:
        stage.run(1)
        device.mark().wait()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        step = read_step(file, stage.watcher.spans)
    _draw(step, setting, "under a profiler, the device computes", out / "stage-trace.svg")


def _draw(step: Step, setting: Setting, what: str, path: Path) -> None:
    hidden = step.hidden_share({"codec", "copy", "send"})
    title = (
        f"one step of a stage, {setting.words}: {what} {step.busy_share:.1%} of it, and {hidden:.1%} of "
        "coding, copying and sending goes on meanwhile"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw_step(step, title=title))
    print(f"{path.name}: {title}", flush=True)


def show(scale: Scale, found: Sequence[Timing], console: Console) -> list[dict[str, Any]]:
    """The table, and the same as plain values."""
    table = Table(
        "both sides", "plain", "Isthmus", "of plain", "utilisation, plain", "utilisation, Isthmus", "rounds"
    )
    rows = []
    for timing in found:
        speeds = timing.tokens_per_s(scale)
        shares = {name: speed * scale.flops_per_token / PEAK_FLOPS for name, speed in speeds.items()}
        table.add_row(
            timing.setting.words,
            f"{speeds['plain']:,.0f} tokens/s",
            f"{speeds['isthmus']:,.0f} tokens/s",
            f"{timing.ratio:.1%}",
            f"{shares['plain']:.1%}",
            f"{shares['isthmus']:.1%}",
            str(len(timing.plain_s)),
        )
        rows.append({**asdict(timing), "tokens_per_s": speeds, "model_flop_utilisation": shares})
    console.print(table)
    return rows


def main() -> None:
    """Measure every setting, and print one table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--codec", default="rotate | int4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deadline-s", type=float, help="begin nothing that would end later than that")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--no-autocast", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    deadline = Deadline.after(options.deadline_s)
    scale = TINY if options.tiny else FULL
    pair = Pair(forward=parse_codec(options.codec), backward=parse_codec(options.codec))
    found: list[Timing] = []
    for is_sharded in [True] if options.no_autocast else [True, False]:
        if not deadline.leaves():
            break
        # A process for each, so that no memory is left over from another.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            work = pool.submit(measure, scale, pair, options, deadline, is_sharded=is_sharded)
            found += work.result()
    num_wanted = (1 if options.no_autocast else 2) * (1 if options.no_compile else 2)
    console = Console(width=120)
    rows = show(scale, found, console)
    if len(found) < num_wanted:
        console.print(f"cut off by the deadline: {len(found)} of {num_wanted} settings were measured")
    about = {
        "machine": platform.processor() or platform.machine(),
        "device": Device("auto").name,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "seed": SEED,
        "codec": options.codec,
        "peak_flops": PEAK_FLOPS,
        "scale": asdict(scale),
    }
    tell({"benchmark": "stage_speed", **about, "settings": rows})


if __name__ == "__main__":
    main()
