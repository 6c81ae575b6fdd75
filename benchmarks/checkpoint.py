"""What a save costs the training beside it: nothing, torch.save, DCP's async_save as it comes, and ours.

python benchmarks/checkpoint.py [--device cuda --parameters 1e9] [--folder DIR] [--saves 2]
python benchmarks/checkpoint.py --device cpu [--parameters 25e6] [--sleep-s 0.5]

One model is trained by each way in turn: a few steps alone, then a save of weights and moments, and steps
until it is written. The stall is what the two steps around the save took beyond two median steps without one;
the extra time is that of all steps until it is written, and the overhead is its share of `--every-s`. The
first save of each way is shown but does not count: memory is taken for it. torch.save and DCP write without
fsync and digests, ours with both. On a CPU a step sleeps, on an accelerator it is a Llama's in bfloat16.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from bench import finish, options, show, tell
from torch.distributed.checkpoint.state_dict_saver import async_save

from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.random import RngKey
from isthmus.model.stage import Batch, Stage, StageInput
from isthmus.plan.types import Event, Saved, Stored
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.device import Device
from isthmus.train.in_cloud import World
from isthmus.train.keeper import Keeper, State
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.train.records import DiskStore
from isthmus.train.wire import Failure

WIDTH, VOCABULARY = {"cpu": 512, "": 2048}, 32_000
MOST_STEPS = 2000


@dataclass
class Trainee:
    """A stage that takes steps; `settle` is called before each update."""

    stage: Stage
    optimizer: Optimizer
    device: Device
    sleep_s: float
    num_sequences: int = 4
    length: int = 1024
    step: int = 0
    settle: Callable[[], None] = lambda: None
    durations_s: list[float] = field(default_factory=list)

    def take_step(self, save: Callable[[], None] | None = None) -> float:
        """One step, with a save behind its update; gives how long it took on the device."""
        begun_s = time.perf_counter()
        if self.device.is_accelerator or not self.step:
            self._passes()
        else:
            time.sleep(self.sleep_s)
        self.settle()
        if self.device.is_accelerator or not self.step:
            self.optimizer.update(self.step, norm=1.0)
        self.step += 1
        if save is not None:
            save()
        self.device.mark().wait()
        return time.perf_counter() - begun_s

    def _passes(self) -> None:
        where = self.device.torch_device
        shape = (self.num_sequences, self.length) if self.device.is_accelerator else (1, 8)
        ids = torch.randint(VOCABULARY, shape, device=where)
        batch = Batch(ids=ids, labels=ids, num_targets=ids.numel())
        key = RngKey(seed=0, step=self.step, microbatch=0)
        with torch.autocast(where.type, dtype=torch.bfloat16, cache_enabled=False):
            output = self.stage(StageInput(batch=batch, rng_key=key))
        output.backward(loss_weight=1 / ids.numel())

    @property
    def tensors(self) -> dict[str, Any]:
        return {"model": self.stage.tensors_by_name(), "optimizer": self.optimizer.tensors()}

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for part in self.tensors.values() for one in part.values())


def trainee(device: Device, num_parameters: float, sleep_s: float) -> Trainee:
    """A Llama of about so many parameters, as one stage."""
    width = WIDTH.get(device.torch_device.type, WIDTH[""])
    inner = 2.75 * width
    num_layers = max(1, round((num_parameters - 2 * VOCABULARY * width) / (4 * width**2 + 3 * width * inner)))
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": int(inner),
        "vocab_size": VOCABULARY, "num_hidden_layers": num_layers, "num_attention_heads": width // 128,
        "tie_word_embeddings": False,
    }  # fmt: skip
    blueprint = fresh_blueprint(config, head=HEADS["causal-lm"])
    stage = build_stage(blueprint, range(num_layers), seed=0).to(device.torch_device)
    optimizer = Optimizer(stage.parameters_by_name(), schedule=Schedule(peak=1e-4, num_steps=10**6))
    return Trainee(stage.train(), optimizer, device, sleep_s)


Way = Callable[[Trainee, Path], Callable[[], bool]]
"""Begins a save; what it gives says whether the save is written."""


def by_torch(found: Trainee, folder: Path) -> Callable[[], bool]:
    folder.mkdir()
    torch.save(found.tensors, folder / "state.pt")
    return lambda: True


def by_dcp(found: Trainee, folder: Path) -> Callable[[], bool]:
    future: Any = async_save(found.tensors, checkpoint_id=folder)
    return lambda: bool(future.done())


class Ours:
    """A keeper as a run has it, whose records go to a folder."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Event | Failure] = SimpleQueue()
        self.keeper: Keeper | None = None
        self.saved: list[Stored] = []

    def __call__(self, found: Trainee, folder: Path) -> Callable[[], bool]:
        if self.keeper is None:
            checkpoints = Checkpoints(DiskStore(folder.parent / "ours"), cloud="here")
            self.keeper = Keeper(
                checkpoints, World(), stage=found.stage, optimizer=found.optimizer, device=found.device
            )
        found.settle = self.keeper.save(State(step=found.step), self.events.put)
        return self._is_written

    def _is_written(self) -> bool:
        if self.events.empty():
            return False
        match self.events.get():
            case Saved(facts=Stored() as stored):
                self.saved.append(stored)
            case other:
                raise RuntimeError(f"not saved: {other}")
        return True


@dataclass(frozen=True)
class Cost:
    """What one save cost."""

    stall_s: float
    extra_s: float
    written_s: float
    num_steps: int


def measure(found: Trainee, way: Way, folder: Path, *, num_saves: int, plain_s: float) -> Iterator[Cost]:
    there: list[Callable[[], bool]] = []
    for number in range(num_saves):
        target = folder / f"save{number}"
        begun_s = time.perf_counter()
        durations_s = [
            found.take_step(lambda target=target: there.append(way(found, target))),  # type: ignore[misc]
            found.take_step(),
        ]
        while not there[-1]() and len(durations_s) < MOST_STEPS:
            durations_s.append(found.take_step())
        extra_s = [one - plain_s for one in durations_s]
        yield Cost(sum(extra_s[:2]), sum(extra_s), time.perf_counter() - begun_s, len(durations_s))
        shutil.rmtree(target, ignore_errors=True)


def plain_steps(found: Trainee, number: int) -> float:
    found.take_step()
    return statistics.median(found.take_step() for _ in range(number))


def row(name: str, costs: list[Cost], every_s: float, reference: Cost) -> Mapping[str, str]:
    first, *rest = costs
    stall_s, extra_s = (
        statistics.median(getattr(one, key) for one in rest) for key in ("stall_s", "extra_s")
    )
    return {
        "way": name,
        "stall of a save": f"{stall_s * 1e3:.1f} ms",
        "of torch.save": f"{stall_s / reference.stall_s:.2%}",
        "extra until written": f"{extra_s * 1e3:.1f} ms",
        "overhead": f"{max(extra_s, 0.0) / every_s:.3%}",
        "written in": f"{statistics.median(one.written_s for one in rest):.2f} s",
        "steps meanwhile": str(rest[-1].num_steps),
        "first stall": f"{first.stall_s * 1e3:.1f} ms",
    }


def main() -> None:
    given = options(
        __doc__, device="cpu", parameters=0.0, sleep_s=0.5, saves=2, steps=8, every_s=300.0, folder=Path
    )
    device = Device(given.device)
    found = trainee(device, given.parameters or (1e9 if device.is_accelerator else 25e6), given.sleep_s)
    # DCP wants a process group even of one process.
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    ways: dict[str, Way] = {"torch.save": by_torch, "DCP async_save": by_dcp, "Isthmus": Ours()}
    costs: dict[str, list[Cost]] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        plain_s = [plain_steps(found, given.steps)]
        for name, way in ways.items():
            costs[name] = list(measure(found, way, Path(scratch), num_saves=given.saves, plain_s=plain_s[-1]))
            found.settle = lambda: None
            plain_s.append(plain_steps(found, given.steps))
    dist.destroy_process_group()
    num_parameters = sum(one.numel() for one in found.stage.parameters())
    reference = costs["torch.save"][-1]
    rows = [row(name, every, given.every_s, reference) for name, every in costs.items()]
    title = (
        f"{num_parameters / 1e6:.0f} M parameters, {found.num_bytes / 2**30:.2f} GiB of state; a step "
        f"without a save: {statistics.median(plain_s) * 1e3:.1f} ms; overhead: a save in {given.every_s:g} s"
    )
    show([{**dict.fromkeys(rows[0], ""), "way": "none", "overhead": "0"}, *rows], title=title)
    for name, every in costs.items():
        tell({"way": name, "plain_s": plain_s, "saves": [vars(one) for one in every]})
    finish("checkpoint", "torch", device=device.name, parameters=num_parameters, bytes=found.num_bytes)


if __name__ == "__main__":
    main()
