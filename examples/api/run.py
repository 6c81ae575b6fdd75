"""Train a small model on two clouds of this machine, over an emulated link of 100 Mbit/s and 60 ms."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus import load_job, run


def show(cloud: str, told: Mapping[str, Any]) -> None:
    if told["kind"] == "step" and "loss" in told:
        print(f"step {told['step'] + 1}: loss {told['loss']:.3f} ({cloud})")


# Every rank is a process of its own, which imports this file again.
if __name__ == "__main__":
    job = load_job(Path(__file__).parents[1] / "demo.toml", overrides=["train.steps=3"])
    trained = run(job, resume=False, on_report=show)
    print(f"the model is in {trained.run / 'model'}")
