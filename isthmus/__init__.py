"""Train one language model on several clouds joined by slow links.

job = load_job("job.toml")     reads and checks a job file
plan(job)                      chooses how to run it and predicts time, memory, bytes and dollars
simulate(job)                  runs the plan's scheduler on a virtual clock
run(job)                       trains, on this machine over an emulated WAN or as one cloud of several
report(folder)                 compares a run with what was predicted for it

Only `run` needs torch; `plan` and `simulate` use it, where it is installed, to measure models and devices.
`import isthmus` imports neither torch nor any other part of the package.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.events import __version__

if TYPE_CHECKING:
    from isthmus.events import StopRequest
    from isthmus.job import Job
    from isthmus.observe.report import RunReport
    from isthmus.plan.costs import CostSource
    from isthmus.plan.lines import Disturbance
    from isthmus.plan.plan import Plan
    from isthmus.plan.scenario import Scenario
    from isthmus.plan.simulate import Timeline
    from isthmus.train.session import Trained

__all__ = ["__version__", "cost_source", "load_job", "plan", "report", "run", "simulate"]

# Loaded before the function `plan` is defined, which else the package of this name would replace later.
importlib.import_module("isthmus.plan")


def _ignore(*_: object) -> None:
    pass


def load_job(path: str | Path, *, overrides: Sequence[str] = ()) -> "Job":
    """Read a job file, with `key=value` overrides; a JobError names every mistake with its cure."""
    from isthmus.job.load import load_job as load

    return load(Path(path), overrides=overrides)


def plan(
    job: "Job",
    *,
    measure: bool = True,
    is_quick: bool = False,
    note: Callable[[str], None] = _ignore,
    progress: Callable[[str], None] = _ignore,
) -> "Plan":
    """Choose how to run a job, and predict what it takes.

    With `measure`, clouds on this machine that have no profile are measured for a few seconds. A quick plan
    is the same without runners-up.
    """
    from isthmus.job.hub import check_model
    from isthmus.plan.planner import plan as make_plan

    check_model(job)
    known = _with_profiles(job, note=note, progress=progress) if measure else job
    return make_plan(known, is_quick=is_quick, progress=progress, source=cost_source())


def simulate(
    what: "Job | Plan | Scenario",
    *,
    steps: int = 10,
    seed: int = 0,
    faults: "Sequence[Disturbance]" = (),
    checkpoint_every_s: float | None = None,
) -> "Timeline":
    """Simulate steps of a pipeline, with faults: of a job, which is planned first, or of a plan.

    `isthmus.job.faults.load_faults` reads faults from a file.
    """
    from isthmus.errors import UserError
    from isthmus.job import Job
    from isthmus.plan.scenario import Scenario
    from isthmus.plan.simulated import Checkpointing, simulate_scenario

    if isinstance(what, Job):
        checkpoint_every_s = what.checkpoint.every_s if checkpoint_every_s is None else checkpoint_every_s
        what = plan(what, is_quick=True)
    scenario = what if isinstance(what, Scenario) else what.scenario
    if scenario is None:
        raise UserError(
            "the best plan is not a pipeline, and only pipelines can be simulated so far",
            hint='set strategy.kind to "pipeline"',
        )
    checkpoint = None
    if checkpoint_every_s is not None:
        checkpoint = Checkpointing(every_s=checkpoint_every_s, stage_bytes=(0,) * scenario.num_stages)
    return simulate_scenario(scenario, num_steps=steps, seed=seed, faults=faults, checkpoint=checkpoint)


def run(
    job: "Job",
    *,
    cloud: str | None = None,
    runs: str | Path = "runs",
    resume: bool = True,
    faults: str | Path | None = None,
    restarts: int = 0,
    trackers: Sequence[str] = (),
    measure: bool = True,
    on_report: Callable[[str, Mapping[str, Any]], None] = _ignore,
    stop: "StopRequest | None" = None,
) -> "Trained":
    """Train the model of a job, and return where the run directory is.

    Without `cloud` every rank is a process on this machine, joined through an emulated WAN that has the
    figures of the job (so a script needs `if __name__ == "__main__":`). With it this process is a rank of
    that cloud, which torchrun, Slurm or Kubernetes may have started. `on_report` is called with the name of a
    cloud and what happened there: {"kind": "step" | "evaluation" | "link" | "note", …}.
    """
    from isthmus.events import StopRequest
    from isthmus.job.hub import check_model
    from isthmus.train.launch import Launch, find_rank

    check_model(job)
    launch = Launch(
        job=job.used(),
        root=Path(runs),
        resume=resume,
        trackers=tuple(trackers),
        cache=cache_folder(),
        source=cost_source,
        is_profiled=measure,
        on_report=on_report,
        stop=stop or StopRequest(),
    )
    if cloud is None:
        return launch.run_here(faults=None if faults is None else Path(faults), restarts=restarts)
    return launch.run_as(cloud, find_rank(os.environ, job.cloud_named(cloud)))


def report(folder: str | Path, *, beside: str | Path | None = None) -> "RunReport":
    """Read what a run did, and compare it with its plan; `folder` is runs/NAME/ID, or runs/NAME.

    With `beside`, another run, validation losses of both are compared after equal tokens.
    """
    from isthmus.observe.report import find_run, report_on

    return report_on(find_run(Path(folder)), beside=None if beside is None else find_run(Path(beside)))


def _with_profiles(job: "Job", *, note: Callable[[str], None], progress: Callable[[str], None]) -> "Job":
    """Return the job with what was measured here, if all its clouds are on this machine; else unchanged.

    What was measured is cached. Without torch nothing can be measured, and plans use the catalogue.
    """
    if all(cloud.profile is not None for cloud in job.cloud):
        return job
    why_not: str | None = "torch is not installed here"
    if importlib.util.find_spec("torch") is not None:
        from isthmus.train.profiles import Profiler, why_not_here

        why_not = why_not_here(job)
        if why_not is None:
            profiler = Profiler(
                cache=cache_folder(), note=note, report=lambda what: progress(f"measuring {what}")
            )
            return profiler.all_here(job)
    note(f"times are those of the catalogue: {why_not}")
    return job


def cost_source() -> "CostSource":
    """Return what measures the costs of models and caches them; without torch it measures nothing."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        from isthmus.plan.costs import nothing_measured

        return nothing_measured
    from isthmus.train.profiles import Measuring

    return Measuring(cache_folder() / "costs")


def cache_folder() -> Path:
    """Return the folder of cached files, by the XDG rules."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "isthmus"
