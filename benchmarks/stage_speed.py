"""A stage at work beside the same layers in plain PyTorch: tokens per second, and what overlaps.

python benchmarks/stage_speed.py [--tiny] [--far-end link|memory] [--bandwidth "15 Gbps"] [--rtt "20 ms"]
    [--codec raw --codec "rotate | int4"] [--rounds 5] [--deadline-s S] [--out DIR]

The stage is the first of two of a Llama-like model, about a billion parameters in bfloat16 with float32
masters. The product drives it: scheduler, actor, wire, codec, copies, end of step, optimizer. The stage
behind it answers each activation at once with a gradient coded beforehand. With `--far-end link` it is a
process of its own, joined by the product's link: TLS, gRPC and the WAN emulator, which is a third process.
With `--far-end memory` it is a thread, and its link copies and nothing more.

Beside it, in turns, plain transformers: the same layers, ids and gradients. Both sharded by FSDP2 on one
rank, and both with autocast instead; eager first, and then the same two compiled; each with every codec. A
setting that is done is a JSON line; what there is no time for is named.

Raw hidden states of 90,000 tokens per second are 5.9 Gbit/s each way in bfloat16 (FSDP2) and 11.8 Gbit/s in
float32 (autocast), so the emulated line carries 15 Gbit/s unless told otherwise. The figures show whether the
processes around it can.

Two pictures of a step of the sharded stage: `stage-spans.svg` by events of the device and spans of the run,
and last of all, since it slows down what comes behind it, `stage-trace.svg` by a profiler.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from bench import Choice, Deadline, finish, options, show, tell
from emulated import MBPS, MS, wan_of
from one_rank import one_rank
from stages.far_end import FarThread
from stages.far_process import Served, measure_over
from stages.loop import SEED, Scale, StageLoop
from stages.plain import PlainLoop
from stages.trace import Step, draw_step, read_step, step_of
from stages.watched import WatchedDevice
from torch.profiler import ProfilerActivity, profile

from isthmus.job.codec import parse_codec
from isthmus.plan.codecs import Pair
from isthmus.train.device import Device
from isthmus.train.pipeline import PipelineConfig
from isthmus.train.session import SWITCH_INTERVAL_S
from isthmus.units import BANDWIDTH, DURATION

NUM_WARM_UP_STEPS = 2
# Dense bfloat16 of an H200, by its maker's data sheet.
PEAK_FLOPS = 989e12
# Seconds that compiling may take, and that the profiled step at the end takes; so much must be left for each.
COMPILE_S = 45.0
TRACE_S = 20.0
CODECS = ("raw", "rotate | int4")
# Behind a line a stage keeps more in flight, as far as the memory of one device holds both sides.
MAX_IN_FLIGHT = {"memory": 2, "link": 5}


FULL = Scale(
    width=4096, num_layers=5, vocabulary_size=32000, num_sequences=4, length=2048, num_microbatches=16
)
TINY = Scale(width=64, num_layers=2, vocabulary_size=128, num_sequences=2, length=32, num_microbatches=3)


class FarEnd(Protocol):
    """The stage behind the measured one."""

    def begin(self, config: PipelineConfig) -> AbstractContextManager[Any]:
        """Have it answer one run of the measured stage; gives the link to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How both sides compute, and what crosses."""

    is_sharded: bool
    is_compiled: bool
    codec: str

    @property
    def words(self) -> str:
        """The setting in a few words."""
        how = "compiled" if self.is_compiled else "eager"
        return f"{'FSDP2' if self.is_sharded else 'autocast'}, {how}, {self.codec}"

    @property
    def dtype(self) -> torch.dtype:
        """The type of the hidden states that cross."""
        return dtype_of(is_sharded=self.is_sharded)

    @property
    def pair(self) -> Pair:
        """The codecs of the cut."""
        return Pair(forward=parse_codec(self.codec), backward=parse_codec(self.codec))


def dtype_of(*, is_sharded: bool) -> torch.dtype:
    """The type of hidden states: autocast leaves them as the embedding made them."""
    return torch.bfloat16 if is_sharded else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Both sides in one setting: their steps, round by round, and what its first steps took."""

    setting: Setting
    warm_up_s: float
    """With all that is done once: memory, kernels, compiling."""
    plain_s: tuple[float, ...]
    isthmus_s: tuple[float, ...]
    windows: tuple[int, ...]

    def tokens_per_s(self, scale: Scale) -> dict[str, float]:
        """By the round in the middle of each side."""
        sides = {"plain": self.plain_s, "isthmus": self.isthmus_s}
        return {name: scale.num_tokens / statistics.median(some) for name, some in sides.items()}

    def needed_bps(self, scale: Scale) -> float:
        """What the line must carry each way for the stage to be as fast as plain."""
        num_bytes = self.setting.pair.forward_bytes(scale.crossing(self.setting.dtype))
        return 8 * num_bytes * scale.num_microbatches / statistics.median(self.plain_s)

    @property
    def ratio(self) -> float:
        """How fast Isthmus is, as a share of plain: each round by itself, then the middle."""
        pairs = zip(self.plain_s, self.isthmus_s, strict=True)
        return statistics.median(plain_s / isthmus_s for plain_s, isthmus_s in pairs)

    def record(self, scale: Scale) -> dict[str, Any]:
        """All that is known of it."""
        return {
            **asdict(self),
            "tokens_per_s": self.tokens_per_s(scale),
            "ratio": self.ratio,
            "needed_bps": self.needed_bps(scale),
        }


class Race:
    """Both sides, ready to take steps in turns."""

    def __init__(self, scale: Scale, device: WatchedDevice, *, is_sharded: bool) -> None:
        generator = torch.Generator().manual_seed(SEED)
        shape = scale.num_sequences, scale.length
        self._ids = [
            torch.randint(0, scale.vocabulary_size, shape, generator=generator)
            for _ in range(scale.num_microbatches)
        ]
        gradient = 1e-4 * torch.randn(*scale.shape, generator=generator)
        self._gradient = gradient.to(device.torch_device, torch.bfloat16)
        self._device = device
        self.plain = PlainLoop(scale.config(scale.num_layers), device.torch_device, is_sharded=is_sharded)
        self.isthmus = StageLoop(scale, device, self._ids, is_sharded=is_sharded)

    def compile(self) -> None:
        """Compile the layers of both sides; it happens in their next step."""
        self.plain.compile()
        self.isthmus.stage.compile_layers()

    def run(self, setting: Setting, num_rounds: int, deadline: Deadline) -> Generator[None, None, Timing]:
        """Steps in turns, after some that do not count; at least one. Isthmus takes a step at each yield."""
        started_s = time.monotonic()
        for _ in range(NUM_WARM_UP_STEPS):
            warm_s = self._plain_s()
            warm_s += yield from self._isthmus_s()
        warm_up_s = time.monotonic() - started_s
        plain_s: list[float] = []
        isthmus_s: list[float] = []
        for number in range(num_rounds):
            if number > 0 and not deadline.leaves(TRACE_S + warm_s):
                break
            if number % 2 == 0:
                plain_s.append(self._plain_s())
            isthmus_s.append((yield from self._isthmus_s()))
            if number % 2 == 1:
                plain_s.append(self._plain_s())
        return Timing(
            setting=setting,
            warm_up_s=warm_up_s,
            plain_s=tuple(plain_s),
            isthmus_s=tuple(isthmus_s),
            windows=self.isthmus.record.steps[-1].windows,
        )

    def _plain_s(self) -> float:
        started_s = self._now_s()
        self.plain.step(self._ids, self._gradient)
        return self._now_s() - started_s

    def _isthmus_s(self) -> Generator[None, None, float]:
        started_s = self._now_s()
        yield
        return self._now_s() - started_s

    def _now_s(self) -> float:
        """The time once the device has done all that it was told."""
        self._device.mark().wait()
        return time.perf_counter()


def measure(
    far_end: FarEnd, *, scale: Scale, options: argparse.Namespace, deadline: Deadline, is_sharded: bool
) -> list[Timing]:
    """Eager, then compiled, with every codec; draws the sharded stage."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device, found = WatchedDevice("auto"), list[Timing]()
    with one_rank(device.torch_device):
        started_s = time.monotonic()
        race = Race(scale, device, is_sharded=is_sharded)
        print(f"both sides built in {time.monotonic() - started_s:.1f} s", flush=True)
        for setting in settings(options, is_sharded=is_sharded):
            is_first_compiled = setting.is_compiled and not any(one.setting.is_compiled for one in found)
            if not deadline.leaves(TRACE_S + (COMPILE_S if is_first_compiled else 0.0)):
                break
            if is_first_compiled:
                race.compile()
            config = scale.run_config(setting.pair, max_in_flight=options.max_in_flight)
            script = measured(race, setting, found, scale=scale, options=options, deadline=deadline)
            with far_end.begin(config) as link:
                race.isthmus.run(config, link, script)
    return found


def settings(options: argparse.Namespace, *, is_sharded: bool) -> list[Setting]:
    """All settings of one kind of stage, in order."""
    return [
        Setting(is_sharded=is_sharded, is_compiled=is_compiled, codec=codec)
        for is_compiled in ([False] if options.no_compile else [False, True])
        for codec in options.codec or CODECS
    ]


def measured(
    race: Race,
    setting: Setting,
    found: list[Timing],
    *,
    scale: Scale,
    options: argparse.Namespace,
    deadline: Deadline,
) -> Iterator[None]:
    """What happens in one setting, with a yield for each step of Isthmus; the timing is told at once."""
    timing = yield from race.run(setting, options.rounds, deadline)
    found.append(timing)
    tell(timing.record(scale))
    own = settings(options, is_sharded=True)
    if setting.codec != own[-1].codec or not setting.is_sharded:
        return
    if not setting.is_compiled:
        yield from draw_spans(race.isthmus, setting, options)
    if setting == own[-1] and deadline.leaves(TRACE_S / 2):
        yield from draw_trace(race.isthmus, setting, options)


def draw_spans(stage: StageLoop, setting: Setting, options: argparse.Namespace) -> Iterator[None]:
    """Draw one step by the device's own events and the spans of the run."""
    stage.record.spans.clear()
    stage.device.begin()
    yield
    stage.device.mark().wait()
    step = step_of(stage.record.spans, stage.device.pieces())
    _draw(step, setting, "passes take", _picture(options, "spans"))


def draw_trace(stage: StageLoop, setting: Setting, options: argparse.Namespace) -> Iterator[None]:
    """Profile one step, and draw it."""
    # To follow the host's own calls as well would slow it down; what it does is in the spans.
    activities = [ProfilerActivity.CUDA if stage.device.is_accelerator else ProfilerActivity.CPU]
    stage.record.spans.clear()
    with profile(activities=activities) as profiler:
        yield
        stage.device.mark().wait()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        step = read_step(file, stage.record.spans)
    _draw(step, setting, "under a profiler, the device computes", _picture(options, "trace"))


def _picture(options: argparse.Namespace, name: str) -> Path:
    folder: Path = options.out
    return folder / (f"stage-{name}.svg" if options.far_end == "memory" else f"stage-link-{name}.svg")


def _draw(step: Step, setting: Setting, what: str, path: Path) -> None:
    overlapped = step.overlapped_share({"codec", "copy", "send"})
    title = (
        f"one step of a stage, {setting.words}: {what} {step.busy_share:.1%} of it, and {overlapped:.1%} of "
        "coding, copying and sending is overlapped"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw_step(step, title=title))
    print(f"{path.name}: {title}", flush=True)


def show_all(scale: Scale, found: Sequence[Timing]) -> list[dict[str, Any]]:
    """Print the table; returns the same as plain values."""
    rows, records = [], []
    for timing in found:
        speeds = timing.tokens_per_s(scale)
        shares = {name: speed * scale.flops_per_token / PEAK_FLOPS for name, speed in speeds.items()}
        rows.append(
            {
                "both sides": timing.setting.words,
                "plain": f"{speeds['plain']:,.0f} tokens/s",
                "Isthmus": f"{speeds['isthmus']:,.0f} tokens/s",
                "of plain": f"{timing.ratio:.1%}",
                "utilisation": f"{shares['plain']:.1%}, {shares['isthmus']:.1%}",
                "line, each way": f"{timing.needed_bps(scale) / 1e9:.2f} Gbit/s",
                "window": str(timing.windows[0]),
                "rounds": str(len(timing.plain_s)),
            }
        )
        records.append({**timing.record(scale), "model_flop_utilisation": shares})
    show(rows)
    return records


def measure_stage(
    scale: Scale, options: argparse.Namespace, deadline: Deadline, *, is_sharded: bool
) -> list[Timing]:
    """One kind of stage, in a process of its own, so that no memory is left over from another."""
    work = partial(measure, scale=scale, options=options, deadline=deadline, is_sharded=is_sharded)
    dtype = dtype_of(is_sharded=is_sharded)
    if options.far_end == "link":
        served = Served(scale=scale, dtype=dtype, max_in_flight=options.max_in_flight)
        wan = wan_of((DURATION.parse(options.rtt) / MS, BANDWIDTH.parse(options.bandwidth) / MBPS))
        over_link: list[Timing] = measure_over(wan, work, served)
        return over_link
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, FarThread(shape=scale.shape, dtype=dtype)).result()


def main() -> None:
    """Measure every setting, and print one table and a JSON line."""
    given = options(
        __doc__,
        far_end=Choice("link", list(MAX_IN_FLIGHT)),
        bandwidth="15 Gbps",
        rtt="20 ms",
        max_in_flight=int,
        codec=list(CODECS),
        rounds=5,
        deadline_s=float,
        out=Path("docs"),
        no_autocast=False,
        no_compile=False,
        tiny=False,
    )
    given.max_in_flight = given.max_in_flight or MAX_IN_FLIGHT[given.far_end]
    deadline = Deadline.after(given.deadline_s)
    scale = TINY if given.tiny else FULL
    kinds = [True] if given.no_autocast else [True, False]
    found: list[Timing] = []
    for is_sharded in kinds:
        if deadline.leaves():
            found += measure_stage(scale, given, deadline, is_sharded=is_sharded)
    num_wanted = len(kinds) * len(settings(given, is_sharded=True))
    rows = show_all(scale, found)
    if len(found) < num_wanted:
        print(f"cut off by the deadline: {len(found)} of {num_wanted} settings were measured")
    about = {key: getattr(given, key) for key in ("far_end", "bandwidth", "rtt", "max_in_flight")}
    finish(
        "stage_speed",
        "torch",
        "transformers",
        "grpcio",
        device=Device("auto").name,
        seed=SEED,
        **about,
        peak_flops=PEAK_FLOPS,
        scale=asdict(scale),
        settings=rows,
    )


if __name__ == "__main__":
    main()
