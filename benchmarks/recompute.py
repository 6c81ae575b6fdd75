"""Recomputing as a memory budget asks for, beside keeping everything and recomputing everything.

python benchmarks/recompute.py --prepare SHARED --data DIR     # once, where the corpus is
python benchmarks/recompute.py --data DIR [--budget 0.6] [--window 2] [--steps 20] [--deadline-s S] [--tiny]

Micro-batches are padded to the longest of their sequences, whose lengths are those of the paragraphs of a
real corpus, in tokens, in a random order. All steps are taken once with everything kept: the budget is a
share of the peak of that. Then one model takes each step in all three ways, in turns. Peaks are the
allocator's, step by step, above weights, gradients and moments. Memory counts in every step, time from the
third on: in the first two the last way measures its layers. A step that is done is a JSON line; steps for
which no time is left are named as missing. With `--tiny` on a CPU the peaks come from torch's memory events,
and times mean little.
"""

import argparse
import json
import lzma
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench import Deadline, finish, options, show, tell
from memory.measuring import cpu_peak_bytes
from tokenizers import Tokenizer

from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.heads import HEADS, IGNORED
from isthmus.model.load import build_stage
from isthmus.model.recompute import ActivationSlot, Budgeted, Fixed, InputSize, Recompute
from isthmus.model.stage import Batch, Stage
from isthmus.train.device import Device
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.train.pipeline import Passes

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


# Micro-batches of some 9,000 tokens, so that the device is what a step waits for.
FULL = Scale(
    width=2048, num_layers=12, num_sequences=32, num_microbatches=6, max_length=1024, vocabulary_size=8192
)
TINY = Scale(width=64, num_layers=6, num_sequences=4, num_microbatches=4, max_length=128, vocabulary_size=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One step: how long it took, and the most it held above what stands there anyway."""

    duration_s: float
    peak_bytes: int


@dataclass(slots=True, kw_only=True)
class Way:
    """One way to train, and the steps that were taken so."""

    counted: "Counted"
    steps: list[Taken] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        """Of all steps, those of the warm-up too."""
        return max(one.peak_bytes for one in self.steps)

    @property
    def total_s(self) -> float:
        """Of the steps behind the warm-up."""
        return sum(one.duration_s for one in self.steps[NUM_WARM_UP_STEPS:])

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "steps": [asdict(one) for one in self.steps],
            "recomputed_share": self.counted.share,
            "num_measured": self.counted.num_measured,
        }


class Counted:
    """Counts what another chooses."""

    def __init__(self, inner: Recompute, num_layers: int) -> None:
        self._inner = inner
        self._num_layers = num_layers
        self._shares: list[float] = []
        self.num_measured = 0

    @property
    def share(self) -> float:
        """Of all layers, those that were recomputed."""
        return statistics.fmean(self._shares) if self._shares else 0.0

    def begin(self, size: InputSize, *, window: int) -> ActivationSlot:
        """Pass the question on."""
        slot = self._inner.begin(size, window=window)
        self.num_measured += slot.meter is not None
        self._shares.append(1.0 if slot.meter is not None else len(slot.recomputed) / self._num_layers)
        return slot


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
        self._passes.train(True)

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
            self._passes.forward(batch, {}, step=number, item=index, num_step_targets=num_targets)
        for index in range(max(0, len(batches) - self._window), len(batches)):
            self._backward(number, index)
        self._optimizer.squared_norms()
        self._optimizer.update(number, norm=1.0)
        self._passes.train(True)

    def take(self, number: int, batches: Sequence[Batch], way: Way) -> None:
        """Take a step in one way, and watch time and memory."""
        self.stage.recompute = way.counted
        started_s = time.perf_counter()
        peak_bytes = self._peak_bytes(partial(self.step, number, batches))
        way.steps.append(Taken(duration_s=time.perf_counter() - started_s, peak_bytes=peak_bytes))

    def _backward(self, step: int, index: int) -> None:
        self._passes.backward(step=step, item=index, gradients={})

    def _peak_bytes(self, work: Callable[[], None]) -> int:
        """The most that a step holds above weights, gradients and moments."""
        if not self._device.is_accelerator:
            return cpu_peak_bytes(work) - self.standing_bytes // 4
        module = torch.get_device_module(self._device.torch_device)
        module.reset_peak_memory_stats()
        work()
        module.synchronize()
        return int(module.max_memory_allocated()) - self.standing_bytes


def find_peak(training: Training, steps: Sequence[Sequence[Batch]]) -> int:
    """The most that any step holds when everything is kept, in bytes."""
    way = Way(counted=Counted(Fixed(), len(training.stage.layers)))
    for number, batches in enumerate(steps):
        training.take(number, batches, way)
    return way.peak_bytes


def make_ways(training: Training, scale: Scale, *, budget_bytes: int) -> dict[str, Way]:
    """All three."""
    layers = frozenset(training.stage.layers)
    ways: dict[str, Recompute] = {
        "keep everything": Fixed(),
        "recompute everything": Fixed(layers),
        "as the budget asks": Budgeted(
            budget_bytes=training.standing_bytes + budget_bytes,
            standing_bytes=lambda: training.standing_bytes,
            max_length=scale.max_length,
        ),
    }
    return {name: Way(counted=Counted(one, len(layers))) for name, one in ways.items()}


def compare(
    training: Training, steps: Sequence[Sequence[Batch]], ways: Mapping[str, Way], deadline: Deadline
) -> int:
    """Take each step in all ways, in turns, as far as there is time; gives how many were taken."""
    took_s = 0.0
    for number, batches in enumerate(steps):
        if not deadline.leaves(took_s):
            return number
        started_s = time.monotonic()
        for way in ways.values():
            training.take(number, batches, way)
        took_s = max(took_s, time.monotonic() - started_s)
        tell({"step": number, "ways": {name: asdict(way.steps[-1]) for name, way in ways.items()}})
    return len(steps)


def show_ways(ways: Mapping[str, Way], budget_bytes: int) -> dict[str, Any]:
    """The table, and what is claimed of it."""
    kept, everything, budgeted = ways.values()
    rows = [
        {
            "way": name,
            "time": f"{one.total_s:.2f} s",
            "slower by": f"{one.total_s / kept.total_s - 1:+.1%}",
            "highest peak": f"{one.peak_bytes / GIB:.3f} GiB",
            "of the budget": f"{one.peak_bytes / budget_bytes:.1%}",
            "steps over it": str(sum(step.peak_bytes > budget_bytes for step in one.steps)),
            "recomputed": f"{one.counted.share:.1%}",
        }
        for name, one in ways.items()
    ]
    show(rows)
    slow_down = budgeted.total_s / kept.total_s - 1
    full_slow_down = everything.total_s / kept.total_s - 1
    print(
        f"budget {budget_bytes / GIB:.3f} GiB above weights, gradients and moments; "
        f"{budgeted.counted.num_measured} micro-batches were measured; slower by {slow_down:.1%}, where "
        f"recomputing everything is by {full_slow_down:.1%}"
    )
    return {
        "budget_bytes": budget_bytes,
        "no_step_over_budget": budgeted.peak_bytes <= budget_bytes,
        "slow_down": slow_down,
        "slow_down_of_everything": full_slow_down,
        "at_most_half": slow_down <= full_slow_down / 2,
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Find the budget, compare the ways; gives all that was found."""
    deadline, device = Deadline.after(given.deadline_s), Device("auto")
    scale = TINY if given.tiny else FULL
    steps = make_steps(read_lengths(given.data), scale, given.steps)
    started_s = time.monotonic()
    training = Training(scale, device, window=given.window)
    training.warm_up(steps[0][:1])
    built_s = time.monotonic()
    budget_bytes = int(given.budget * find_peak(training, steps))
    found_s = time.monotonic()
    print(f"built in {built_s - started_s:.1f} s, peak found in {found_s - built_s:.1f} s")
    ways = make_ways(training, scale, budget_bytes=budget_bytes)
    num_taken = compare(training, steps, ways, deadline)
    if num_taken < len(steps):
        print(f"cut off by the deadline: {num_taken} of {len(steps)} steps were compared")
    claims = show_ways(ways, budget_bytes) if num_taken > NUM_WARM_UP_STEPS else {}
    return {
        "device": device.name,
        "scale": asdict(scale),
        "standing_bytes": training.standing_bytes,
        "num_steps": {"wanted": len(steps), "compared": num_taken},
        **claims,
        "ways": {name: way.record() for name, way in ways.items()},
    }


def main() -> None:
    """Prepare, or run."""
    given = options(
        __doc__, data=Path, prepare=Path, budget=0.6, window=2, steps=20, deadline_s=float, tiny=False
    )
    if given.prepare is not None:
        prepare(given.prepare, given.data)
        return
    finish("recompute", "torch", "transformers", seed=SEED, window=given.window, **measure(given))


if __name__ == "__main__":
    main()
