"""Kills clouds at random moments, and compares all weights with those of an undisturbed run.

    python benchmarks/kill_clouds.py [--kills 20] [--steps 300] [--seed 1]
    python benchmarks/kill_clouds.py --strategy pipeline [--clouds 3] [--ranks 1]

The clouds are those of examples/generator-discriminator.toml, or the stages of a small Llama with dropout,
processes joined over 20 Mbit/s and 100 ms, killed by a file of faults. A kill that finds a cloud that is
being started again counts for nothing, so runs follow each other until there were enough. Each must end with
the same bits in all models.
"""

import argparse
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench import Choice, finish, options

import isthmus
from isthmus.job import Job, load_job
from isthmus.job.load import parse_job

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "generator-discriminator.toml"
PIPELINE: Final = """
name = "kill-clouds"
[model.config]
model_type = "llama"
vocab_size = 300
hidden_size = 64
intermediate_size = 96
num_hidden_layers = {num_clouds}
num_attention_heads = 4
num_key_value_heads = 4
attention_dropout = 0.1
[data]
source = "builtin:tales"
sequence_length = 64
[strategy]
kind = "pipeline"
microbatches = 4
[train]
batch_tokens = 512
evaluate_every = 0
[checkpoint]
overhead = 1
"""
CLOUD: Final = """
[[cloud]]
name = "{name}"
listen = "{name}.example.com:7600"
device = "cpu"
ranks = {num_ranks}
"""
LINK: Final = """
[[link]]
between = ["{one}", "{other}"]
bandwidth = "20 Mbps"
rtt = "100 ms"
codec = "rotate | int8(stochastic)"
"""
# A cloud is back and trains again in about this time.
SPACING_S: Final = 6.0


def job_of(args: argparse.Namespace) -> Job:
    """The job whose clouds are killed; it saves every second."""
    overrides = [f"train.steps={args.steps}", "checkpoint.every=1 s"]
    if args.strategy == "feed":
        return load_job(EXAMPLE, overrides=overrides)
    names = [f"cloud{number}" for number in range(args.clouds)]
    tables = [PIPELINE.format(num_clouds=args.clouds)]
    tables += [CLOUD.format(name=name, num_ranks=args.ranks) for name in names]
    tables += [LINK.format(one=one, other=other) for one, other in pairwise(names)]
    return parse_job("".join(tables), file=Path("kill-clouds.toml"), overrides=overrides)


def faults(clouds: Sequence[str], num_kills: int, chance: random.Random) -> str:
    """A file of so many kills, of any cloud, on average `SPACING_S` apart."""
    found = []
    for _ in range(num_kills):
        at_s = chance.uniform(1.0, 1.0 + SPACING_S * num_kills)
        found.append(f'[[fault]]\nkind = "kill"\ncloud = "{chance.choice(clouds)}"\nat = "{at_s:.2f} s"\n')
    return "\n".join(found)


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of each file of weights that a run has exported."""
    models = sorted({one.parent for one in run.glob("*/config.json")})
    found = {
        f"{model.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for model in models
        for file in sorted(model.glob("*.safetensors"))
    }
    if not found:
        raise FileNotFoundError(f"no weights in {run}")
    return found


def main() -> None:
    """Run undisturbed, then disturbed until there were enough kills."""
    args = options(
        __doc__,
        kills=20,
        steps=300,
        seed=1,
        strategy=Choice("feed", ("feed", "pipeline")),
        clouds=3,
        ranks=1,
    )
    job = job_of(args)
    clouds = [one.name for one in job.cloud]
    chance = random.Random(args.seed)
    killed: dict[str, int] = dict.fromkeys(clouds, 0)
    num_runs, is_same, begun_s = 0, True, time.monotonic()

    def hear(cloud: str, about: Mapping[str, Any]) -> None:
        if about["kind"] == "note" and "starting again" in about["text"]:
            killed[cloud] += 1
            print(f"kill {sum(killed.values())}: {about['text']}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        expected = digests(isthmus.run(job, runs=folder / "whole").run)
        while sum(killed.values()) < args.kills:
            script = folder / f"faults-{num_runs}.toml"
            script.write_text(faults(clouds, args.kills - sum(killed.values()), chance))
            run = isthmus.run(
                job,
                runs=folder / f"killed-{num_runs}",
                faults=script,
                restarts=args.kills,
                on_report=hear,
            ).run
            is_same &= digests(run) == expected
            num_runs += 1
    print(json.dumps(expected, indent=1))
    same = "yes" if is_same else "NO"
    print(f"{sum(killed.values())} kills in {num_runs} runs; weights as undisturbed: {same}")
    finish(
        "kill_clouds",
        "torch",
        killed=killed,
        num_runs=num_runs,
        same_weights=is_same,
        wall_s=round(time.monotonic() - begun_s),
        settings=vars(args),
    )
    if not is_same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
