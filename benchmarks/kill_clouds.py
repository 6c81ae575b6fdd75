"""Kills generators and the discriminator at random moments, and compares all weights with an undisturbed run.

    python benchmarks/kill_clouds.py [--kills 20] [--steps 300] [--seed 1]

The clouds are those of examples/generator-discriminator.toml, processes joined over 20 Mbit/s and 100 ms,
killed by a file of faults. A kill that finds a cloud that is being started again counts for nothing, so
runs follow each other until there were enough. Each must end with the same bits in all models.
"""

import hashlib
import json
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench import finish, options

import isthmus
from isthmus.job import load_job

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "generator-discriminator.toml"
CLOUDS: Final = ("judge", "english", "esperanto")
# A cloud is back and trains again in about this time.
SPACING_S: Final = 6.0


def faults(num_kills: int, chance: random.Random) -> str:
    """A file of so many kills, of any cloud, on average `SPACING_S` apart."""
    found = []
    for _ in range(num_kills):
        at_s = chance.uniform(1.0, 1.0 + SPACING_S * num_kills)
        found.append(f'[[fault]]\nkind = "kill"\ncloud = "{chance.choice(CLOUDS)}"\nat = "{at_s:.2f} s"\n')
    return "\n".join(found)


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of the weights of each model of a run."""
    folders = ["model", *(f"generator-{name}" for name in CLOUDS[1:])]
    return {
        one: hashlib.sha256((run / one / "model.safetensors").read_bytes()).hexdigest() for one in folders
    }


def main() -> None:
    """Run undisturbed, then disturbed until there were enough kills."""
    args = options(__doc__, kills=20, steps=300, seed=1)
    chance = random.Random(args.seed)
    killed: dict[str, int] = dict.fromkeys(CLOUDS, 0)
    num_runs, is_same, begun_s = 0, True, time.monotonic()

    def hear(cloud: str, about: Mapping[str, Any]) -> None:
        if about["kind"] == "note" and "starting again" in about["text"]:
            killed[cloud] += 1
            print(f"kill {sum(killed.values())}: {about['text']}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        whole = load_job(EXAMPLE, overrides=[f"train.steps={args.steps}", "checkpoint.every=1 s"])
        expected = digests(isthmus.run(whole, runs=folder / "whole").run)
        while sum(killed.values()) < args.kills:
            script = folder / f"faults-{num_runs}.toml"
            script.write_text(faults(args.kills - sum(killed.values()), chance))
            run = isthmus.run(
                whole,
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
