"""Choose how to train a model of 70 billion parameters on three clouds, and predict what it takes."""

from pathlib import Path

from isthmus import load_job, plan

chosen = plan(load_job(Path(__file__).parents[1] / "plan-70b.toml"))
print(chosen.reason)
for stage in chosen.stages:
    print(f"{stage.cloud} holds {stage.holds} on {stage.num_ranks} ranks")
estimate = chosen.estimate
print(f"{estimate.tokens_per_s:,.0f} tokens/s, {estimate.wan_bytes / 2**30:.2f} GiB per step over the WAN")
