"""A stage at work beside the same layers in plain PyTorch: tokens per second, and what overlaps.

python benchmarks/stage_speed.py [--tiny] [--codec "rotate | int4"] [--steps 6] [--rounds 3] [--out DIR]

The stage is the first of two of a Llama-like model, about a billion parameters in bfloat16 with float32
masters. Isthmus' own worker drives it: scheduler, passes, codec, copies, couriers, settlement, optimizer;
behind its link stands an end that takes no time. Beside it, in turns, plain transformers: the same layers,
ids and gradients. Both sharded by FSDP2 on one rank, and both with autocast instead; compiled and not. One
step of the sharded stage is traced, and drawn as `stage-trace.svg`.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from stages.far_end import FarEnd, coded_gradient
from stages.plain import PlainLoop
from stages.trace import draw_step, read_step
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from isthmus.events import Span
from isthmus.job.codec import parse_codec
from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.boundary import Batch
from isthmus.model.heads import HEADS
from isthmus.plan.ladder import Pair
from isthmus.plan.types import Started
from isthmus.train.course import Course, Post
from isthmus.train.crossing.cut import Cut
from isthmus.train.crossing.messages import Evaluated
from isthmus.train.device import Device
from isthmus.train.optimize.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import pipeline_worker
from isthmus.train.ranks.sharding import ShardedReduction, shard
from isthmus.train.ranks.world import Alone
from isthmus.train.session import SWITCH_INTERVAL_S
from isthmus.train.worker import StepEnded

NUM_WARM_UP_STEPS = 2
WINDOW = 2
SEED = 5
# Dense bfloat16 of an H200, by its maker's data sheet.
PEAK_FLOPS = 989e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The stage, and what passes through it in a step."""

    width: int
    num_layers: int
    vocabulary_size: int
    num_sequences: int
    length: int
    num_microbatches: int

    def config(self, num_layers: int) -> dict[str, Any]:
        """As transformers takes it."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocabulary_size,
            "hidden_size": self.width,
            "intermediate_size": self.width * 11 // 4,
            "num_hidden_layers": num_layers,
            "num_attention_heads": max(1, self.width // 128),
            "num_key_value_heads": max(1, self.width // 128),
            "max_position_embeddings": self.length,
        }

    @property
    def num_tokens(self) -> int:
        """Of a step."""
        return self.num_microbatches * self.num_sequences * self.length

    @property
    def flops_per_token(self) -> float:
        """Forward and backward of the products alone; attention looks back only, so half the pairs count."""
        per_layer = 4 * self.width**2 + 3 * self.width * (self.width * 11 // 4)
        return self.num_layers * (6 * per_layer + 6 * self.width * self.length)


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


@dataclass(slots=True)
class Watcher:
    """An observer of the worker that keeps the spans."""

    spans: list[Span] = field(default_factory=list)

    def span(self, span: Span) -> None:
        """Keep it."""
        self.spans.append(span)

    def step_ended(self, ended: StepEnded) -> None:
        """Nothing to do."""

    def evaluated(self, found: Evaluated) -> None:
        """Nothing to do."""


class Given:
    """The same micro-batches in each step."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def training(self, step: int) -> Sequence[Batch]:  # noqa: ARG002
        """Of any step."""
        return self._batches

    def validation(self) -> Sequence[Batch]:
        """None."""
        return ()


class StageLoop:
    """Isthmus' worker at a first stage, before a far end that takes no time."""

    def __init__(
        self, scale: Scale, device: Device, setting: Setting, pair: Pair, ids: Sequence[Tensor]
    ) -> None:
        blueprint = fresh_blueprint(scale.config(scale.num_layers + 1), head=HEADS["causal-lm"])
        self.stage = build_stage(blueprint, range(scale.num_layers), seed=SEED).to(device.torch_device)
        if setting.is_compiled:
            self.stage.compile_layers()
        if setting.is_sharded:
            shard(self.stage, device=device.torch_device, num_ranks=1, compute_dtype=torch.bfloat16)
        self.watcher = Watcher()
        num_rows = scale.num_sequences * scale.length
        dtype = torch.bfloat16 if setting.is_sharded else torch.float32
        gradient = coded_gradient(
            pair, num_rows=num_rows, width=scale.width, dtype=dtype, device=device.torch_device
        )
        far_end = FarEnd(gradient, num_microbatches=scale.num_microbatches, on_span=self.watcher.span)
        post: Any = Post(cloud="here", index=0, up=None, down=far_end)  # type: ignore[arg-type]
        self._worker, self._traffic = pipeline_worker(
            course=Course(
                num_stages=2,
                num_steps=10**6,
                num_microbatches=scale.num_microbatches,
                seed=SEED,
                max_in_flight=WINDOW,
                cuts=(Cut(codecs=pair),),
            ),
            post=post,
            stage=self.stage,
            optimizer=Optimizer(
                self.stage.parameters_by_name(), schedule=Schedule(peak=1e-5, num_steps=10**6), max_norm=1.0
            ),
            device=device,
            source=Given([Batch(ids=one, num_targets=one.numel()) for one in ids]),
            observer=self.watcher,
            autocast=None if setting.is_sharded else torch.bfloat16,
            reduction=ShardedReduction(Alone(), self.stage) if setting.is_sharded else None,
        )
        self._numbers = tuple(range(scale.num_microbatches))
        self._next_step = 0

    def run(self, num_steps: int) -> None:
        """Take some steps."""
        steps = range(self._next_step, self._next_step + num_steps)
        self._next_step = steps.stop
        self._worker.run(Started(step=step, microbatches=self._numbers) for step in steps)

    def close(self) -> None:
        """End the threads."""
        self._traffic.__exit__(None, None, None)


def measure(
    scale: Scale, setting: Setting, pair: Pair, num_steps: int, num_rounds: int, out: Path | None
) -> dict[str, float]:
    """Seconds of a step of both sides, in turns; draws a traced step if asked to."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device = Device("auto")
    with _one_rank(device):
        return _measure(scale, device, setting, pair, num_steps, num_rounds, out)


def _measure(
    scale: Scale,
    device: Device,
    setting: Setting,
    pair: Pair,
    num_steps: int,
    num_rounds: int,
    out: Path | None,
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(SEED)
    shape = scale.num_sequences, scale.length
    ids = [
        torch.randint(0, scale.vocabulary_size, shape, generator=generator)
        for _ in range(scale.num_microbatches)
    ]
    gradient = 1e-4 * torch.randn(*shape, scale.width, generator=generator)
    on_device = gradient.to(device.torch_device, torch.bfloat16)
    plain = PlainLoop(
        scale.config(scale.num_layers),
        device.torch_device,
        is_sharded=setting.is_sharded,
        is_compiled=setting.is_compiled,
    )
    stage = StageLoop(scale, device, setting, pair, ids)

    def run_plain(count: int) -> None:
        for _ in range(count):
            plain.step(ids, on_device)

    sides: dict[str, Callable[[int], None]] = {"plain": run_plain, "isthmus": stage.run}
    taken_s: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(NUM_WARM_UP_STEPS)
    for _ in range(num_rounds):
        for name, run in sides.items():
            taken_s[name].append(_timed_s(device, run, num_steps))
    if out is not None:
        trace_step(stage, device, setting, out)
    stage.close()
    return {name: statistics.median(some) for name, some in taken_s.items()}


def trace_step(stage: StageLoop, device: Device, setting: Setting, out: Path) -> None:
    """Profile one step, and draw it."""
    # To follow the host's own calls as well would slow it down; what it does is in the spans.
    activities = [ProfilerActivity.CUDA if device.is_accelerator else ProfilerActivity.CPU]
    stage.run(1)
    stage.watcher.spans.clear()
    with profile(activities=activities) as profiler:
        stage.run(1)
        device.mark().wait()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        step = read_step(file, stage.watcher.spans)
    hidden = step.hidden_share({"codec", "copy", "send"})
    title = (
        f"one step of a stage, {setting.words}: the device computes {step.busy_share:.1%} of it, and "
        f"{hidden:.1%} of coding, copying and sending goes on meanwhile"
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "stage-trace.svg").write_text(draw_step(step, title=title))
    print(title)


def show(scale: Scale, found: dict[Setting, dict[str, float]], console: Console) -> list[dict[str, Any]]:
    """The table, and the same as plain values."""
    table = Table("both sides", "plain", "Isthmus", "of plain", "utilisation, plain", "utilisation, Isthmus")
    rows = []
    for setting, steps_s in found.items():
        speeds = {name: scale.num_tokens / step_s for name, step_s in steps_s.items()}
        shares = {name: speed * scale.flops_per_token / PEAK_FLOPS for name, speed in speeds.items()}
        ratio = speeds["isthmus"] / speeds["plain"]
        table.add_row(
            setting.words,
            f"{speeds['plain']:,.0f} tokens/s",
            f"{speeds['isthmus']:,.0f} tokens/s",
            f"{ratio:.1%}",
            f"{shares['plain']:.1%}",
            f"{shares['isthmus']:.1%}",
        )
        rows.append(
            {**asdict(setting), "tokens_per_s": speeds, "model_flop_utilisation": shares, "ratio": ratio}
        )
    console.print(table)
    return rows


def main() -> None:
    """Measure every setting, and print one table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--codec", default="rotate | int4")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--no-autocast", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    scale = TINY if options.tiny else FULL
    pair = Pair(forward=parse_codec(options.codec), backward=parse_codec(options.codec))
    settings = [
        Setting(is_sharded=is_sharded, is_compiled=is_compiled)
        for is_sharded in ([True] if options.no_autocast else [True, False])
        for is_compiled in ([False] if options.no_compile else [False, True])
    ]
    found = {}
    for number, setting in enumerate(settings):
        # A process for each, so that no memory is left over from another.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            out = options.out if number == 0 else None
            work = pool.submit(measure, scale, setting, pair, options.steps, options.rounds, out)
            found[setting] = work.result()
            taken = ", ".join(f"{name} {step_s:.3f} s" for name, step_s in found[setting].items())
            print(f"{setting.words}: {taken} a step", flush=True)
    device = Device("auto")
    rows = show(scale, found, Console(width=120))
    about = {
        "machine": platform.processor() or platform.machine(),
        "device": device.name,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "seed": SEED,
        "codec": options.codec,
        "peak_flops": PEAK_FLOPS,
        "scale": asdict(scale),
    }
    print(json.dumps({**about, "settings": rows}))


def _timed_s(device: Device, run: Callable[[int], None], num_steps: int) -> float:
    """Seconds of a step, after one that gets its memory back from what the other side kept of it."""
    if device.is_accelerator:
        torch.get_device_module(device.torch_device).empty_cache()
    run(1)
    device.mark().wait()
    started_s = time.perf_counter()
    run(num_steps)
    device.mark().wait()
    return (time.perf_counter() - started_s) / num_steps


@contextmanager
def _one_rank(device: Device) -> Iterator[None]:
    backend = dist.get_default_backend_for_device(device.torch_device)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
