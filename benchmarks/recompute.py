"""Recomputing as a memory budget asks for, beside keeping everything and recomputing everything.

python benchmarks/recompute.py --prepare SHARED --data DIR     # once, where the corpus is
python benchmarks/recompute.py --data DIR [--budget 0.6] [--window 2] [--steps 40] [--tiny]

Micro-batches are padded to the longest of their sequences, whose lengths are those of the paragraphs of a
real corpus, in tokens, in a random order that is the same for all three ways. The budget is a share of the
peak of keeping everything; peaks are the allocator's, step by step, above weights, gradients and moments.
Memory counts in every step, time from the third on: in the first two the last way measures its layers.
With `--tiny` on a CPU the peaks come from torch's memory events, and times mean little.
"""

import argparse
import gc
import json
import lzma
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from memory_prediction import cpu_peak_bytes
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.boundary import Batch
from isthmus.model.budget import Budgeted
from isthmus.model.heads import HEADS, IGNORED
from isthmus.model.recompute import Fixed, InputSize, Recompute, Stay
from isthmus.model.stage import Stage
from isthmus.plan.types import Pass, Run
from isthmus.train.crossing.messages import Microbatch
from isthmus.train.device import Device
from isthmus.train.optimize.optimizer import Optimizer, Schedule
from isthmus.train.passes import Passes

CORPUS = "enwik8-first10M/enwik8.first10M.xz"
LENGTHS_FILE = "paragraph-lengths.json"
TOKENIZER_FILE = "language-tokenizer.json"
MIN_TOKENS = 8
NUM_WARM_UP_STEPS = 2
SEED = 3
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A Llama-like model, all of it one stage, and what it is trained on in a step."""

    width: int
    num_layers: int
    num_sequences: int
    num_microbatches: int
    max_length: int
    vocabulary_size: int

    @property
    def config(self) -> dict[str, Any]:
        """As transformers takes it."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocabulary_size,
            "hidden_size": self.width,
            "intermediate_size": self.width * 11 // 4,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": max(1, self.width // 128),
            "num_key_value_heads": max(1, self.width // 128),
            "max_position_embeddings": self.max_length,
        }


FULL = Scale(
    width=2048, num_layers=16, num_sequences=16, num_microbatches=8, max_length=1024, vocabulary_size=8192
)
TINY = Scale(
    width=128, num_layers=10, num_sequences=4, num_microbatches=4, max_length=256, vocabulary_size=256
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One way to train: how long each step took, and the most it held above what stands there anyway."""

    steps_s: tuple[float, ...]
    peaks_bytes: tuple[int, ...]
    standing_bytes: int
    recomputed_share: float
    num_measured: int

    @property
    def peak_bytes(self) -> int:
        """Of all steps, those of the warm-up too."""
        return max(self.peaks_bytes)

    @property
    def total_s(self) -> float:
        """Of the steps behind the warm-up."""
        return sum(self.steps_s[NUM_WARM_UP_STEPS:])


class Counted:
    """Counts what another chooses."""

    def __init__(self, inner: Recompute, num_layers: int) -> None:
        self._inner = inner
        self._num_layers = num_layers
        self.shares: list[float] = []
        self.num_measured = 0

    def begin(self, size: InputSize, *, window: int) -> Stay:
        """Pass the question on."""
        stay = self._inner.begin(size, window=window)
        self.num_measured += stay.meter is not None
        self.shares.append(1.0 if stay.meter is not None else len(stay.recomputed) / self._num_layers)
        return stay


def prepare(shared: Path, data: Path) -> None:
    """Count the tokens of every paragraph of the corpus."""
    tokenizer = Tokenizer.from_file(str(data / TOKENIZER_FILE))
    with lzma.open(shared / CORPUS, "rt", encoding="utf-8", errors="replace") as file:
        paragraphs = [line for line in file if line.strip()]
    lengths = [len(one.ids) for one in tokenizer.encode_batch(paragraphs)]
    kept = [length for length in lengths if length >= MIN_TOKENS]
    (data / LENGTHS_FILE).write_text(json.dumps({"source": CORPUS, "lengths": kept}))
    print(f"{len(kept)} paragraphs, median {statistics.median(kept)}, most {max(kept)} tokens")


def read_lengths(data: Path | None) -> list[int]:
    """The lengths that were prepared; for a try without data, some that look like them."""
    if data is not None:
        return [int(one) for one in json.loads((data / LENGTHS_FILE).read_text())["lengths"]]
    generator = random.Random(SEED)
    return [int(generator.lognormvariate(4.0, 0.9)) + MIN_TOKENS for _ in range(2000)]


def make_steps(lengths: Sequence[int], scale: Scale, num_steps: int) -> list[list[Batch]]:
    """The micro-batches of all steps, on the host."""
    generator = random.Random(SEED)
    torch_generator = torch.Generator().manual_seed(SEED)

    def microbatch() -> Batch:
        chosen = [min(one, scale.max_length) for one in generator.choices(lengths, k=scale.num_sequences)]
        shape = len(chosen), max(chosen)
        mask = (torch.arange(max(chosen)) < torch.tensor(chosen)[:, None]).long()
        ids = torch.randint(0, scale.vocabulary_size, shape, generator=torch_generator)
        labels = ids.masked_fill(mask == 0, IGNORED)
        return Batch(ids=ids, mask=mask, labels=labels, num_targets=sum(chosen))

    return [[microbatch() for _ in range(scale.num_microbatches)] for _ in range(num_steps)]


class Training:
    """A stage with its optimizer that takes steps with several micro-batches in flight."""

    def __init__(self, scale: Scale, device: Device, *, window: int) -> None:
        blueprint = fresh_blueprint(scale.config, head=HEADS["causal-lm"])
        self.stage: Stage = build_stage(blueprint, range(scale.num_layers), seed=SEED).to(device.torch_device)
        self.standing_bytes = 0
        """Weights, gradients and moments, and whatever else is there between two steps."""
        self._device = device
        self._window = window
        self._optimizer = Optimizer(
            self.stage.parameters_by_name(), schedule=Schedule(peak=1e-5, num_steps=1000), max_norm=1.0
        )
        self._passes = Passes(self.stage, device=device.torch_device, seed=SEED, autocast=torch.bfloat16)
        self._passes.window = window
        self._passes.set_training(True)

    def warm_up(self, batches: Sequence[Batch]) -> None:
        """Take a step that makes the moments, and see what then stands there."""
        self.stage.recompute = Fixed(frozenset(self.stage.layers))
        self.step(0, batches)
        gradients = sum(one.nbytes for one in self.stage.parameters())
        self.standing_bytes = 4 * gradients
        if self._device.is_accelerator:
            module = torch.get_device_module(self._device.torch_device)
            module.synchronize()
            self.standing_bytes = int(module.memory_allocated()) + gradients

    def step(self, number: int, batches: Sequence[Batch]) -> None:
        """Fill the window, then one back and one forward; the update ends it."""
        num_targets = sum(batch.num_targets for batch in batches)
        for index, batch in enumerate(batches):
            if index >= self._window:
                self._backward(number, index - self._window)
            content = Microbatch(batch=batch, num_step_targets=num_targets)
            self._passes.forward(Run(kind=Pass.FORWARD, step=number, microbatch=index), content)
        for index in range(max(0, len(batches) - self._window), len(batches)):
            self._backward(number, index)
        self._optimizer.squared_norms()
        self._optimizer.update(number, norm=1.0)
        self._passes.set_training(True)

    def run(self, steps: Sequence[Sequence[Batch]], recompute: Recompute) -> Outcome:
        """Take all steps, and watch time and memory."""
        counted = Counted(recompute, len(self.stage.layers))
        self.stage.recompute = counted
        durations_s, peaks = [], []
        for number, batches in enumerate(steps):
            started_s = time.perf_counter()
            peaks.append(self._peak_bytes(partial(self.step, number, batches)))
            durations_s.append(time.perf_counter() - started_s)
        return Outcome(
            steps_s=tuple(durations_s),
            peaks_bytes=tuple(peaks),
            standing_bytes=self.standing_bytes,
            recomputed_share=statistics.fmean(counted.shares),
            num_measured=counted.num_measured,
        )

    def _backward(self, step: int, index: int) -> None:
        self._passes.backward(Run(kind=Pass.BACKWARD, step=step, microbatch=index), None)

    def _peak_bytes(self, work: Callable[[], None]) -> int:
        """The most that a step holds above weights, gradients and moments."""
        if not self._device.is_accelerator:
            return cpu_peak_bytes(work) - self.standing_bytes // 4
        module = torch.get_device_module(self._device.torch_device)
        module.reset_peak_memory_stats()
        work()
        module.synchronize()
        return int(module.max_memory_allocated()) - self.standing_bytes


def compare(
    steps: Sequence[Sequence[Batch]], scale: Scale, device: Device, *, window: int, share: float
) -> tuple[dict[str, Outcome], int]:
    """All three ways on the same micro-batches; gives the budget above what stands there too, in bytes."""
    found: dict[str, Outcome] = {}

    def run(name: str, make: Callable[[Training], Recompute]) -> Outcome:
        training = Training(scale, device, window=window)
        training.warm_up(steps[0][:1])
        found[name] = training.run(steps, make(training))
        peak_gib = found[name].peak_bytes / GIB
        print(f"{name}: {found[name].total_s:.2f} s, at most {peak_gib:.3f} GiB", flush=True)
        del training
        gc.collect()
        return found[name]

    kept = run("keep everything", lambda _: Fixed())
    run("recompute everything", lambda training: Fixed(frozenset(training.stage.layers)))
    budget_bytes = int(share * kept.peak_bytes)
    run(
        "as the budget asks",
        lambda training: Budgeted(
            budget_bytes=training.standing_bytes + budget_bytes,
            standing_bytes=lambda: training.standing_bytes,
            device=device.torch_device,
            max_length=scale.max_length,
        ),
    )
    return found, budget_bytes


def show(found: dict[str, Outcome], budget_bytes: int, console: Console) -> dict[str, Any]:
    """The table, and what is claimed of it."""
    kept, everything, budgeted = found.values()
    table = Table("", "time", "slower by", "highest peak", "of the budget", "steps over it", "recomputed")
    for name, one in found.items():
        table.add_row(
            name,
            f"{one.total_s:.2f} s",
            f"{one.total_s / kept.total_s - 1:+.1%}",
            f"{one.peak_bytes / GIB:.3f} GiB",
            f"{one.peak_bytes / budget_bytes:.1%}",
            str(sum(peak > budget_bytes for peak in one.peaks_bytes)),
            f"{one.recomputed_share:.1%}",
        )
    console.print(table)
    slow_down = budgeted.total_s / kept.total_s - 1
    full_slow_down = everything.total_s / kept.total_s - 1
    claims = {
        "budget_bytes": budget_bytes,
        "no_step_over_budget": budgeted.peak_bytes <= budget_bytes,
        "slow_down": slow_down,
        "slow_down_of_everything": full_slow_down,
        "at_most_half": slow_down <= full_slow_down / 2,
        "num_measured": budgeted.num_measured,
    }
    console.print(
        f"budget {budget_bytes / GIB:.3f} GiB above weights, gradients and moments; {budgeted.num_measured} "
        f"micro-batches were measured; slower by {slow_down:.1%}, {slow_down / full_slow_down:.0%} of what "
        "recomputing everything costs"
    )
    return claims


def main() -> None:
    """Prepare, or run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--prepare", type=Path)
    parser.add_argument("--budget", type=float, default=0.6)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.prepare is not None:
        prepare(options.prepare, options.data)
        return
    device = Device("auto")
    scale = TINY if options.tiny else FULL
    steps = make_steps(read_lengths(options.data), scale, options.steps)
    found, budget_bytes = compare(steps, scale, device, window=options.window, share=options.budget)
    claims = show(found, budget_bytes, Console(width=120))
    about = {
        "machine": platform.processor() or platform.machine(),
        "device": device.name,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "seed": SEED,
        "window": options.window,
        "scale": asdict(scale),
    }
    print(json.dumps({**about, **claims, "ways": {name: asdict(one) for name, one in found.items()}}))


if __name__ == "__main__":
    main()
