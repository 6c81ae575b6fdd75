"""Simulate ten steps of a plan, and again with a link that is down for five seconds."""

from pathlib import Path

from isthmus import load_job, plan, simulate
from isthmus.job.faults import Fault, FaultKind

job = load_job(Path(__file__).parents[1] / "plan-two-clouds.toml", overrides=["strategy.kind=pipeline"])
chosen = plan(job)
calm = simulate(chosen, steps=10)
cut = Fault(at_s=calm.steps[2].start_s, kind=FaultKind.CUT, between=chosen.clouds[:2], duration_s=5.0)
disturbed = simulate(chosen, steps=10, faults=[cut])
print(f"a step takes {calm.step_s:.2f} s")
print(f"the cut costs {disturbed.steps[-1].end_s - calm.steps[-1].end_s:.2f} s")
