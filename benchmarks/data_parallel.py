"""Data parallel over the emulated WAN: compute utilisation of exact, streaming and sparse synchronisation.

    python benchmarks/data_parallel.py [--clouds 2] [--mbps 10 50 200 1000] [--steps 150] [--parameters 25e6]

Clouds are threads of this process that sleep in place of passes; deltas of so many parameters are real,
as are codecs, sums and outer steps. What they take is measured once, without limits; the prediction is
the one of the simulator, by the scheduler that the clouds run, from those times alone.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

import torch
from bench import finish, options, show
from torch import nn

from isthmus.events import Span
from isthmus.plan.data import FACTS, data_scheduler
from isthmus.plan.data_times import DataTimes, simulated_data
from isthmus.plan.end_of_step import Read, Reduced, Seen
from isthmus.plan.membership import DataParallel
from isthmus.plan.scenario import Line
from isthmus.plan.simulate import simulate
from isthmus.plan.types import Facts, Member, Message, Ran, Work, WorkKind
from isthmus.train.build import BuiltStage
from isthmus.train.data_parallel import DataParallelActor
from isthmus.train.device import Device
from isthmus.train.loop import Loop, save_nothing
from isthmus.train.optimizer import Schedule
from isthmus.train.outer import Fragment, Outer, OuterRule
from isthmus.train.wire import Inbox, Wire
from isthmus.wan.memory import MemoryLink
from isthmus.wan.shaping import Shape

RULES: Final = {
    "exact": OuterRule(sync="exact", codec="raw"),
    "streaming int4": OuterRule(sync="streaming", codec="int4", learning_rate=0.7, momentum=0.9, mixing=0.5),
    "sparse": OuterRule(sync="sparse", codec="topk(0.015625) | int2", feedback=0.95),
}
BITS: Final = {"exact": 32.0, "streaming int4": 4.25, "sparse": 0.2227}
DELAY_S: Final = 0.05
NUM_FRAGMENTS: Final = 8
GOALS: Final = {"streaming_utilisation": 0.95, "mean_prediction_error": 0.05}


@dataclass
class Quiet:
    """An observer that forgets."""

    def tell(self, fact: Facts) -> None:
        """Forget it."""

    def span(self, span: Span) -> None:
        """Forget it."""

    def measured(self, *, track: str, message: Message, relative_error: float, cosine: float) -> None:
        """Forget it."""


class NappingActor(DataParallelActor):
    """Sleeps in place of passes; rounds are real, and timed."""

    pass_s: float
    durations_s: defaultdict[WorkKind, list[float]]

    def run(self, work: Work) -> Facts | None:
        """Sleep, or carry out a work of a round."""
        match work.kind:
            case WorkKind.READ:
                return Read(num_targets=1000, num_tokens=1000)
            case WorkKind.FORWARD | WorkKind.BACKWARD:
                time.sleep(self.pass_s)
                return Ran(busy_s=self.pass_s)
            case WorkKind.REDUCE:
                return Reduced(seen=Seen(), loss_sum=0.0, squared_norms=())
            case WorkKind.UPDATE:
                return None
        started_s = time.monotonic()
        facts = super().run(work)
        self.durations_s[work.kind].append(time.monotonic() - started_s)
        return facts


@dataclass
class Run:
    """What a run took, and its works."""

    wall_s: float
    works_s: dict[WorkKind, float] = field(default_factory=dict)


def spec_of(rule: OuterRule, args: argparse.Namespace) -> DataParallel:
    """Rounds of 30 steps; exact in every step, and fewer of them."""
    is_exact = rule.sync == "exact"
    return DataParallel(
        clouds=tuple((Member(f"c{number}"),) for number in range(args.clouds)),
        num_steps=max(2, args.steps // 30) if is_exact else args.steps,
        num_microbatches=1,
        sync_every=1 if is_exact else 30,
        num_fragments=1 if is_exact else NUM_FRAGMENTS,
        delay_steps=0 if is_exact else 3,
        quorum=args.clouds,
        gathers=rule.gathers,
        adapts=False,
    )


def fragments_of(num_parameters: int, number: int) -> list[Fragment]:
    """Equal parts of so many parameters."""
    return [Fragment({"weight": nn.Parameter(torch.zeros(num_parameters // number))}) for _ in range(number)]


def measure(rule: OuterRule, args: argparse.Namespace, shape: Shape) -> Run:
    """Run all clouds over links of this shape."""
    spec, names = spec_of(rule, args), [f"c{number}" for number in range(args.clouds)]
    durations_s: defaultdict[WorkKind, list[float]] = defaultdict(list)
    with ExitStack() as stack, ThreadPoolExecutor(args.clouds) as pool:
        links = {pair: stack.enter_context(MemoryLink(*pair, shape=shape)) for pair in combinations(names, 2)}
        loops = [_loop(spec, rule, member, links, args, durations_s) for (member,) in spec.clouds]
        started_s = time.monotonic()
        for future in [pool.submit(_be, loop) for loop in loops]:
            future.result()
        wall_s = time.monotonic() - started_s
    return Run(wall_s, {kind: statistics.median(every) for kind, every in durations_s.items()})


def _be(loop: Loop) -> None:
    with loop:
        loop.run()


def _loop(
    spec: DataParallel,
    rule: OuterRule,
    member: Member,
    links: dict[tuple[str, str], MemoryLink],
    args: argparse.Namespace,
    durations_s: defaultdict[WorkKind, list[float]],
) -> Loop:
    fragments = fragments_of(int(args.parameters), spec.num_fragments)
    outer = Outer(fragments, rule, schedule=Schedule(peak=1e-3, num_steps=spec.num_steps))
    stage: Any = nn.Module()
    built = BuiltStage(stage=stage, optimizer=None, device=Device("cpu"))  # type: ignore[arg-type]
    ignore: Callable[[Span], None] = lambda _: None  # noqa: E731 - one line says it
    source: Any = None
    actor = NappingActor(spec, member, built, outer, seed=0, on_span=ignore, source=source)
    actor.pass_s, actor.durations_s = args.step_s / 2, durations_s
    inbox = Inbox()
    wires = {
        Member(next(one for one in pair if one != member.cloud)): Wire(
            link.end(member.cloud),
            here=member,
            peer=Member(next(one for one in pair if one != member.cloud)),
            inbox=inbox,
            observer=Quiet(),
            facts=FACTS,
        )
        for pair, link in links.items()
        if member.cloud in pair
    }
    return Loop(data_scheduler(spec, member), actor, wires, inbox, tell=lambda _: None, save=save_nothing)


def predict(name: str, args: argparse.Namespace, mbps: float, free: Run) -> float:
    """The time that the simulator gives a run, from what works take without limits."""
    spec = spec_of(RULES[name], args)
    times = DataTimes(
        forward_s=(args.step_s / 2,) * args.clouds,
        backward_s=(args.step_s / 2,) * args.clouds,
        delta_s=free.works_s[WorkKind.DELTA],
        sum_s=free.works_s[WorkKind.SUM],
        outer_s=free.works_s[WorkKind.OUTER],
        mix_s=free.works_s[WorkKind.MIX],
        num_parameters=int(args.parameters),
        delta_bits=BITS[name],
    )
    line = Line(down_bps=mbps * 1e6, up_bps=mbps * 1e6, latency_s=DELAY_S)
    lines = dict.fromkeys(combinations([cloud[0].cloud for cloud in spec.clouds], 2), line)
    return max(one.end_s for one in simulate(simulated_data(spec, times), lines).steps)


def main() -> None:
    """Print one table and a JSON line."""
    args = options(
        __doc__,
        clouds=2,
        mbps=[10.0, 50.0, 200.0, 1000.0],
        steps=150,
        step_s=0.2,
        parameters=25e6,
    )
    torch.set_num_threads(1)
    rows, records = [], []
    for name, rule in RULES.items():
        free = measure(rule, args, Shape())
        computed_s = spec_of(rule, args).num_steps * args.step_s
        for mbps in args.mbps:
            found = measure(rule, args, Shape(bandwidth_bps=mbps * 1e6, delay_s=DELAY_S))
            predicted_s = predict(name, args, mbps, free)
            record = {
                "sync": name,
                "mbps": mbps,
                "utilisation": computed_s / found.wall_s,
                "predicted_utilisation": computed_s / predicted_s,
                "error": predicted_s / found.wall_s - 1,
            }
            records.append(record)
            rows.append(
                {
                    "synchronisation": name,
                    "Mbit/s": f"{mbps:g}",
                    "utilisation": f"{record['utilisation']:.1%}",
                    "predicted": f"{record['predicted_utilisation']:.1%}",
                    "error of time": f"{record['error']:+.1%}",
                }
            )
    show(rows, title=f"{args.clouds} clouds, {args.parameters:g} parameters, 100 ms")
    error = statistics.fmean(abs(one["error"]) for one in records)
    finish("data_parallel", "torch", goals=GOALS, mean_prediction_error=error, runs=records)


if __name__ == "__main__":
    main()
