"""Measures the pipeline's schedule over a WAN, with stages that sleep, beside torch's own over Gloo.

python benchmarks/schedule.py [--quick] [--no-torch]

Both sides pass the same micro-batches between two processes through the same emulated WAN; torch's side needs
root, since a foreign program is put behind it by network namespaces.
"""

import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from bench import finish, options, show
from emulated import CLOUDS, MBPS, run_on, wan_of
from member import pipeline_config, prepare_process, run_member
from sleeping import Nap, SleepingStage, let_sleeps_end_in_time, same_tokens
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from tun import TunWan

from isthmus.model.stage import StageInput
from isthmus.plan.codecs import RAW_PAIR, Crossing
from isthmus.train.device import Device
from isthmus.wan.link import Link
from isthmus.wan.shaping import Shape

NUM_TOKENS, WIDTH = 64, 1024  # 256 KiB of float32
MESSAGE_BITS = 8 * 4 * NUM_TOKENS * WIDTH
FORWARD_S, BACKWARD_S = 0.010, 0.020
NUM_WARM_UP_STEPS = 2
TORCH_SCHEDULES = {"Schedule1F1B": Schedule1F1B, "ScheduleGPipe": ScheduleGPipe}
PORT = 29_511


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One WAN and one step."""

    rtt_s: float
    bandwidth_bps: float
    num_microbatches: int
    num_steps: int

    @property
    def compute_s(self) -> float:
        """What one stage computes in a step."""
        return self.num_microbatches * (FORWARD_S + BACKWARD_S)

    @property
    def closed_form_s(self) -> float:
        """`m·τ + (p-1)·t + 2·Σ tt` for two stages."""
        on_line_s = MESSAGE_BITS / self.bandwidth_bps
        interval_s = max(FORWARD_S + BACKWARD_S, on_line_s)
        travel_s = on_line_s + self.rtt_s / 2
        return self.num_microbatches * interval_s + FORWARD_S + BACKWARD_S + 2 * travel_s


@dataclass(frozen=True, slots=True)
class Step:
    """How long a step took, and how much of it the first stage computed."""

    duration_s: float
    busy_s: float


def be_cloud(cloud: str, links: Mapping[str, Link], *, case: Case) -> list[Step]:
    """One stage of ours; gives its steps."""
    prepare_process()
    is_first = cloud == CLOUDS[0]
    config = pipeline_config(
        CLOUDS[:2],
        pair=RAW_PAIR,
        crossing=Crossing(num_rows=NUM_TOKENS, width=WIDTH),
        num_steps=case.num_steps + NUM_WARM_UP_STEPS,
        num_microbatches=case.num_microbatches,
        max_in_flight=case.num_microbatches,
    )
    record = run_member(
        config,
        cloud,
        links,
        stage=sleeping_stage(is_first=is_first),
        device=Device("cpu"),
        source=same_tokens(NUM_TOKENS, case.num_microbatches) if is_first else None,
    )
    return [Step(one.duration_s, one.busy_s[0]) for one in record.steps[NUM_WARM_UP_STEPS:]]


def sleeping_stage(*, is_first: bool) -> SleepingStage:
    """One of the two."""
    return SleepingStage(
        Nap(forward_s=FORWARD_S, backward_s=BACKWARD_S),
        num_tokens=NUM_TOKENS,
        width=WIDTH,
        is_first=is_first,
        is_last=not is_first,
    )


def measure_alone(case: Case) -> float:
    """What the passes of one stage take, in seconds, with nothing between them."""
    stage = sleeping_stage(is_first=True)
    started_s = time.monotonic()
    for batch in same_tokens(NUM_TOKENS, case.num_microbatches).training(0):
        stage(StageInput(batch=batch)).backward()
    return time.monotonic() - started_s


def measure_ours(case: Case) -> Step:
    """The median step of ours at the first stage."""
    wan = wan_of((1e3 * case.rtt_s, case.bandwidth_bps / MBPS))
    return _median(run_on(wan, functools.partial(be_cloud, case=case)))


class Slow(torch.autograd.Function):
    """Sleeps forward and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG004
        """Sleep as long as a forward pass takes."""
        time.sleep(FORWARD_S)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        """Sleep as long as a backward pass takes."""
        time.sleep(BACKWARD_S)
        return grads[0], grads[0].sum().reshape(1)


class SlowModule(nn.Module):
    """A stage for torch's own schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Pass on, in its time."""
        slow: Tensor = Slow.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return slow


def be_torch_rank(rank: int, name: str, case: Case) -> None:
    """One rank of torch's schedule; the first prints the durations of its steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    stage = PipelineStage(SlowModule(), rank, 2, torch.device("cpu"))
    schedule = TORCH_SCHEDULES[name](
        stage,
        n_microbatches=case.num_microbatches,
        loss_fn=lambda output, target: (output - target).square().sum(),
    )
    whole = torch.zeros(case.num_microbatches, NUM_TOKENS, WIDTH)
    durations_s = []
    for _ in range(case.num_steps + 1):
        dist.barrier()
        started_s = time.monotonic()
        _ = schedule.step(whole) if rank == 0 else schedule.step(target=whole, losses=[])
        dist.barrier()
        durations_s.append(time.monotonic() - started_s - case.rtt_s)
    if rank == 0:
        print(json.dumps(durations_s[1:]), flush=True)
    dist.destroy_process_group()


def measure_torch(name: str, case: Case) -> float:
    """The median step of torch's schedule behind the TUN form of the same WAN, in seconds."""
    shape = Shape(bandwidth_bps=case.bandwidth_bps, delay_s=case.rtt_s / 2)
    with TunWan(shape, shape) as wan:
        ranks = []
        for rank, place in enumerate(("a", "b")):
            script = [sys.executable, __file__, "--rank", str(rank), "--schedule", name]
            script += ["--case", json.dumps(asdict(case))]
            command = wan.command("a" if place == "a" else "b", script)
            environment = {"MASTER_ADDR": wan.address("a"), "MASTER_PORT": str(PORT)}
            ranks.append(
                subprocess.Popen(
                    command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
                )
            )
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    durations_s: list[float] = json.loads(outputs[0].splitlines()[-1])
    return statistics.median(durations_s)


def use_the_wan() -> None:
    """Tell Gloo which interface leads out of this namespace."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def compare(case: Case, *, with_torch: bool, num_rounds: int) -> dict[str, Step]:
    """Compute alone, ours and torch's: medians over rounds in which each has its turn."""
    rounds = [_one_round(case, with_torch=with_torch) for _ in range(num_rounds)]
    return {name: _median([found[name] for found in rounds]) for name in rounds[0]}


def _one_round(case: Case, *, with_torch: bool) -> dict[str, Step]:
    alone_s = measure_alone(case)
    found = {"compute alone": Step(alone_s, alone_s), "isthmus": measure_ours(case)}
    if with_torch:
        found |= {name: Step(measure_torch(name, case), alone_s) for name in TORCH_SCHEDULES}
    return found


def _median(steps: list[Step]) -> Step:
    return sorted(steps, key=lambda step: step.duration_s)[len(steps) // 2]


def comparison_rows(case: Case, found: dict[str, Step]) -> list[dict[str, str]]:
    """The first table; a stage's bubble is the share of the step in which it does not compute."""
    reference = found.get("Schedule1F1B")
    return [
        {
            "schedule": name,
            "step": f"{step.duration_s:.3f} s",
            "of compute alone": f"{found['compute alone'].duration_s / step.duration_s:.1%}",
            "bubble": f"{1 - step.busy_s / step.duration_s:.1%}",
            "closed form": f"{1 - case.compute_s / case.closed_form_s:.1%}" if name == "isthmus" else "",
            "Schedule1F1B takes": f"{reference.duration_s / step.duration_s:.2f}×" if reference else "",
        }
        for name, step in found.items()
    ]


def sweep_row(case: Case, step: Step) -> dict[str, str]:
    return {
        "round trip": f"{1000 * case.rtt_s:g} ms",
        "bandwidth": f"{case.bandwidth_bps / 1e6:g} Mbit/s",
        "micro-batches": str(case.num_microbatches),
        "step": f"{step.duration_s:.3f} s",
        "its closed form": f"{case.closed_form_s:.3f} s",
        "bubble": f"{1 - step.busy_s / step.duration_s:.1%}",
        "closed form": f"{1 - case.compute_s / case.closed_form_s:.1%}",
    }


def sweep(*, is_quick: bool) -> list[tuple[Case, Step]]:
    """Ours over many WANs."""
    rtts_s = (0.0, 0.1) if is_quick else (0.0, 0.04, 0.1, 0.2)
    bandwidths_bps = (100e6,) if is_quick else (20e6, 100e6, 500e6, 1000e6)
    counts = (8,) if is_quick else (8, 32, 64)
    cases = [
        Case(rtt_s=rtt_s, bandwidth_bps=bandwidth_bps, num_microbatches=count, num_steps=3)
        for rtt_s, bandwidth_bps, count in product(rtts_s, bandwidths_bps, counts)
    ]
    return [(case, measure_ours(case)) for case in cases]


def main() -> None:
    """Measure, print the tables and a JSON line."""
    given = options(__doc__, quick=False, no_torch=False, rank=int, schedule=str, case=str)
    if given.rank is not None:
        use_the_wan()
        be_torch_rank(given.rank, given.schedule, Case(**json.loads(given.case)))
        return
    let_sleeps_end_in_time()
    num_steps, num_rounds = (3, 1) if given.quick else (5, 3)
    case = Case(rtt_s=0.040, bandwidth_bps=500e6, num_microbatches=32, num_steps=num_steps)
    found = compare(case, with_torch=not given.no_torch, num_rounds=num_rounds)
    show(comparison_rows(case, found))
    rows = sweep(is_quick=given.quick)
    show([sweep_row(*row) for row in rows])
    finish(
        "schedule",
        "torch",
        "grpcio",
        case=asdict(case),
        steps={name: asdict(step) for name, step in found.items()},
        sweep=[{**asdict(one), **asdict(step), "closed_form_s": one.closed_form_s} for one, step in rows],
    )


if __name__ == "__main__":
    main()
