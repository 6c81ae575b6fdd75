"""Measures how long it takes to plan, from two small clouds to eight large ones, and to simulate the largest.

python benchmarks/plan_speed.py [--repeat 3]
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

from bench import finish, options, show

from isthmus.job import Job, PipelineStrategy
from isthmus.job.load import parse_job
from isthmus.plan.planner import plan
from isthmus.plan.scenario import Scenario
from isthmus.plan.simulated import simulate_scenario

SIZES = {
    32: "hidden_size = 4096\nintermediate_size = 11008\nnum_attention_heads = 32\n",
    80: "hidden_size = 8192\nintermediate_size = 28672\nnum_attention_heads = 64\nnum_key_value_heads = 8\n",
}
KINDS = ("h100", "a100-80gb", "mi300x", "h200")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was timed."""

    what: str
    seconds: float
    goal_s: float
    found: str


def make_job(*, num_clouds: int, num_ranks: int, num_layers: int, batch_tokens: int) -> Job:
    """Clouds of up to four kinds, every two of them joined by a link of its own bandwidth and round trip."""
    names = [f"cloud-{number}" for number in range(num_clouds)]
    clouds = "".join(
        f'[[cloud]]\nname = "{name}"\naccelerator = "{KINDS[number % len(KINDS)]}"\nranks = {num_ranks}\n'
        f'listen = "{name}.example.com:7600"\n'
        for number, name in enumerate(names)
    )
    links = "".join(
        f'[[link]]\nbetween = ["{first}", "{second}"]\nbandwidth = "{2 + (3 * number) % 17} Gbps"\n'
        f'rtt = "{20 + (37 * number) % 150} ms"\ncodec = "auto"\n'
        for number, (first, second) in enumerate(combinations(names, 2))
    )
    head = (
        f'name = "speed"\n[model.config]\nmodel_type = "llama"\nvocab_size = 32000\n'
        f"num_hidden_layers = {num_layers}\nmax_position_embeddings = 4096\n{SIZES[num_layers]}"
        '[data]\nsource = "corpus/*.jsonl"\nsequence_length = 4096\n'
        f'[train]\nbatch_tokens = {batch_tokens}\nprecision = "bfloat16"\n'
    )
    return parse_job(head + clouds + links, file=Path("speed.toml"))


def plan_it(job: Job) -> str:
    """The plan in a few words."""
    chosen = plan(job)
    return f"{len(chosen.stages)} of {len(job.cloud)} clouds, {chosen.num_tried} plans weighed"


def simulate_it(scenario: Scenario) -> str:
    """One step in a few words."""
    timeline = simulate_scenario(scenario)
    num_ranks = sum(stage.num_ranks for stage in scenario.stages)
    return f"{len(timeline.spans)} spans of {num_ranks} ranks, {scenario.num_microbatches} micro-batches"


def through_all_clouds(job: Job) -> Scenario:
    """A pipeline that uses every cloud, whether or not that is the best."""
    row = PipelineStrategy(kind="pipeline", clouds=tuple(cloud.name for cloud in job.cloud))
    scenario = plan(job.model_copy(update={"strategy": row}), is_quick=True).scenario
    if scenario is None:
        raise SystemExit("a pipeline without a scenario")
    return scenario


def timed(what: str, goal_s: float, work: Callable[[], str], *, repeat: int) -> Row:
    """The median of several runs."""
    seconds, found = [], ""
    for _ in range(repeat):
        start_s = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - start_s)
    return Row(what=what, seconds=statistics.median(seconds), goal_s=goal_s, found=found)


def measure(repeat: int) -> list[Row]:
    """All rows."""
    small = make_job(num_clouds=2, num_ranks=8, num_layers=32, batch_tokens=2**20)
    large = make_job(num_clouds=8, num_ranks=128, num_layers=80, batch_tokens=2**22)
    scenario = through_all_clouds(large)
    return [
        timed("plan 2 clouds x 8 GPUs, 32 layers", 1.0, lambda: plan_it(small), repeat=repeat),
        timed("plan 8 clouds x 128 GPUs, 80 layers", 10.0, lambda: plan_it(large), repeat=repeat),
        timed("simulate a step of 8 x 128", 10.0, lambda: simulate_it(scenario), repeat=repeat),
    ]


def main() -> None:
    """Print the table and the JSON line."""
    rows = measure(options(__doc__, repeat=3).repeat)
    show(
        [
            {
                "what": row.what,
                "seconds": f"{row.seconds:.2f}",
                "goal": f"< {row.goal_s:g}",
                "found": row.found,
            }
            for row in rows
        ]
    )
    finish("plan_speed", "numpy", rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
