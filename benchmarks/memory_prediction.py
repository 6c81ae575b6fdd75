"""Memory that the planner predicts for a stage, beside what the allocator reports for the real one.

python benchmarks/memory_prediction.py [--device auto|cpu|cuda] [--quick] [--models llama gpt2 ...]
                                       [--learns all adapters frozen] [--deadline-s S]

Each case is one stage of a real model in training: passes, optimizer, several micro-batches in flight. The
prediction is made from the configuration alone, before the stage is built. Some stages train adapters alone,
or have frozen layers. The allocator's word is torch's: its memory events on a CPU, the peak of what is
allocated on an accelerator. A case runs two steps, and the second, when the optimizer's state is there, is
measured. A case that is done is a JSON line; what there is no time for is named.
"""

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from typing import Any

import torch
from deadline import Deadline, tell
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from isthmus.job.lora import LoraSpec
from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.heads import HEADS
from isthmus.plan.costs.activations import Arithmetic, Precision
from isthmus.plan.costs.learning import Learning, read_adapters
from isthmus.plan.costs.memory import Memory, stage_memory
from isthmus.plan.costs.parts import Workload, model_costs
from isthmus.plan.costs.shapes import Task, read_shape
from isthmus.train.device import Device
from isthmus.train.profiling import Rig, Size

NUM_LAYERS = 6
NUM_EXTRA_MICROBATCHES = 2
MIB = 2**20
GATED = {"llama", "qwen3", "gemma", "phi3", "mistral", "mixtral"}
ENCODERS = {"bert", "roberta", "electra"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma", "head_dim": 64},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "mistral, window": {"model_type": "mistral", "sliding_window": 64},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "gpt_neox": {"model_type": "gpt_neox"},
    "gpt2": {"model_type": "gpt2", "n_positions": 1024},
    "bert": {"model_type": "bert", "max_position_embeddings": 1024},
    "roberta, no dropout": {"model_type": "roberta", "max_position_embeddings": 1026, **NO_DROPOUT},
    "electra": {"model_type": "electra", "max_position_embeddings": 1024, "embedding_size": 128},
}
LEARNS = ("all", "adapters", "frozen")
PLACES = {"first": (0, 2), "middle": (2, 4), "last": (4, 6), "whole": (0, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One stage and how it is trained."""

    model: str
    place: str
    precision: Precision
    recompute: bool
    window: int
    num_sequences: int
    sequence_length: int = 128
    width: int = 256
    vocabulary_size: int = 4096
    num_frozen: int = 0
    lora: LoraSpec | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration, all that a prediction is made from."""
        sizes = {
            "vocab_size": self.vocabulary_size,
            "hidden_size": self.width,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": self.width // 64,
        }
        model_type = MODELS[self.model]["model_type"]
        if model_type in GATED:
            sizes |= {"intermediate_size": self.width * 11 // 4, "num_key_value_heads": self.width // 128}
        elif model_type != "gpt2":
            sizes |= {"intermediate_size": 4 * self.width}
        return {**MODELS[self.model], **sizes}

    @property
    def task(self) -> Task:
        """What the model learns."""
        return Task.MASKED_LM if MODELS[self.model]["model_type"] in ENCODERS else Task.CAUSAL_LM

    @property
    def layers(self) -> range:
        """Those of the stage."""
        return range(*PLACES[self.place])

    @property
    def learns(self) -> str:
        """One of `LEARNS`: all, adapters alone, or the layers behind frozen ones."""
        return "adapters" if self.lora else "frozen" if self.num_frozen else "all"


def predict(case: Case, *, on_accelerator: bool) -> Memory:
    """What the planner says."""
    workload = Workload(
        num_sequences=case.num_sequences,
        sequence_length=case.sequence_length,
        arithmetic=Arithmetic(precision=case.precision, on_accelerator=on_accelerator),
        recompute=case.recompute,
    )
    shape = read_shape(case.config, task=case.task)
    adapters = None if case.lora is None else read_adapters(case.lora, shape)
    learning = Learning(num_frozen_layers=case.num_frozen, adapters=adapters)
    costs = model_costs(shape, workload, learning)
    return stage_memory(costs, case.layers, window=case.window, num_buffered=0)


def measure(case: Case, device: Device) -> int:
    """What the allocator says of the second step, in bytes."""
    blueprint = fresh_blueprint(case.config, head=HEADS[case.task.value])
    stage = build_stage(
        blueprint,
        case.layers,
        seed=0,
        recompute=case.recompute,
        num_frozen_layers=case.num_frozen,
        lora=case.lora,
    )
    size = Size(
        num_sequences=case.num_sequences, sequence_length=case.sequence_length, precision=case.precision
    )
    rig = Rig(stage, device=device, size=size)
    take_step(rig, case, step=0)
    gc.collect()
    if device.is_accelerator:
        return accelerator_peak_bytes(device, lambda: take_step(rig, case, step=1))
    return rig.held_bytes() + cpu_peak_bytes(lambda: take_step(rig, case, step=1))


def take_step(rig: Rig, case: Case, *, step: int) -> None:
    """Fill the window, then one back and one forward, then drain; the update ends it."""
    num_microbatches = case.window + NUM_EXTRA_MICROBATCHES
    for microbatch in range(num_microbatches):
        if microbatch >= case.window:
            rig.backward(microbatch - case.window, step=step)
        rig.forward(microbatch, step=step)
    for microbatch in range(num_microbatches - case.window, num_microbatches):
        rig.backward(microbatch, step=step)
    rig.update()


def cpu_peak_bytes(work: Callable[[], None]) -> int:
    """The most that was allocated on top of what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    inner: Any = profiler.profiler
    events = [one for one in inner.kineto_results.events() if one.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def accelerator_peak_bytes(device: Device, work: Callable[[], None]) -> int:
    """The most that was allocated in all."""
    module = torch.get_device_module(device.torch_device)
    module.reset_peak_memory_stats(device.torch_device)
    work()
    device.mark().wait()
    return int(module.max_memory_allocated(device.torch_device))


def cases(models: list[str], *, is_quick: bool, on_accelerator: bool) -> list[Case]:
    """Every model and place in both precisions, recomputed or not, with one or several in flight."""
    places = ["first", "last"] if is_quick else list(PLACES)
    found = [
        Case(
            model=model,
            place=place,
            precision=precision,
            recompute=recompute,
            window=1 if place in ("last", "whole") else 4,
            num_sequences=4,
        )
        for model, place, precision, recompute in product(models, places, Precision, (False, True))
    ]
    some = [case for case in found if case.place == ("last" if is_quick else "middle")]
    found += [replace(case, lora=LoraSpec(r=8)) for case in some]
    found += [replace(case, num_frozen=3 if case.place == "middle" else 5) for case in some]
    if not on_accelerator:
        return found
    # Sizes that a GPU is bought for: workspaces and rounding matter less, as they do in use.
    return [
        replace(case, width=2048, sequence_length=1024, num_sequences=4, vocabulary_size=32768)
        for case in found
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A case, what was predicted, and what the allocator says."""

    case: Case
    predicted: Memory
    num_bytes: int

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted.total_bytes / self.num_bytes - 1

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **asdict(self.case),
            "precision": self.case.precision.value,
            "lora": self.case.lora and self.case.lora.model_dump(),
            "predicted": asdict(self.predicted),
            "bytes": self.num_bytes,
            "error": self.error,
        }


def measure_all(chosen: Sequence[Case], device: Device, deadline: Deadline) -> list[Found]:
    """Predict and measure the cases that there is time for."""
    found: list[Found] = []
    longest_s = 0.0
    for case in chosen:
        if not deadline.leaves(longest_s):
            break
        started_s = time.monotonic()
        predicted = predict(case, on_accelerator=device.is_accelerator)
        found.append(Found(case=case, predicted=predicted, num_bytes=measure(case, device)))
        longest_s = max(longest_s, time.monotonic() - started_s)
        tell(found[-1].record())
    return found


def show(console: Console, rows: Sequence[Found], num_wanted: int) -> None:
    """The table, and the errors in a line."""
    header = ("model", "stage", "learns", "precision", "recompute", "in flight")
    table = Table(*header, "predicted", "allocator", "error")
    for one in rows:
        case = one.case
        table.add_row(
            case.model,
            case.place,
            case.learns,
            case.precision.value,
            "yes" if case.recompute else "no",
            str(case.window),
            f"{one.predicted.total_bytes / MIB:.1f} MiB",
            f"{one.num_bytes / MIB:.1f} MiB",
            f"{one.error:+.1%}",
        )
    console.print(table)
    errors = [abs(one.error) for one in rows]
    console.print(f"{len(rows)} cases: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}")
    if len(rows) < num_wanted:
        console.print(f"cut off by the deadline: {num_wanted} cases were wanted")


def main() -> None:
    """Predict, measure, print the table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL")
    parser.add_argument("--learns", nargs="+", choices=LEARNS, default=LEARNS, help="what is trained")
    parser.add_argument("--deadline-s", type=float, help="begin no case that would end later than that")
    options = parser.parse_args()
    deadline = Deadline.after(options.deadline_s)
    models = options.models or (["llama", "gpt2", "bert"] if options.quick else list(MODELS))
    device = Device(options.device)
    chosen = [
        case
        for case in cases(models, is_quick=options.quick, on_accelerator=device.is_accelerator)
        if case.learns in options.learns
    ]
    found = measure_all(chosen, device, deadline)
    if found:
        show(Console(width=120), found, len(chosen))
    machine = {
        "machine": platform.machine(),
        "device": str(device.torch_device),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "num_cases_wanted": len(chosen),
    }
    tell({"benchmark": "memory_prediction", **machine, "cases": [one.record() for one in found]})


if __name__ == "__main__":
    main()
