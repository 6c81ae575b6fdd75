"""Read and check a job file; every mistake comes with its cure."""

from pathlib import Path

from isthmus import load_job
from isthmus.errors import JobError

EXAMPLES = Path(__file__).parents[1]

job = load_job(EXAMPLES / "demo.toml", overrides=["train.steps=100"])
print(job.name, [cloud.name for cloud in job.cloud], job.train.steps)

try:
    load_job(EXAMPLES / "demo.toml", overrides=["link.0.bandwith=50 Mbps"])
except JobError as error:
    for problem in error.problems:
        print(f"{problem.key}: {problem.what} ({problem.cure})")
