"""Measures this machine for a plan, where its clouds are here and have no profile."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.job import Job
    from isthmus.plan.costs.source import CostSource
    from isthmus.train.profiles import Profiler

Tell = Callable[[str], None]


def cache_folder() -> Path:
    """Where things are kept that can be made again, as XDG has it."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "isthmus"


def cost_source() -> "CostSource":
    """Measures the costs of models, and keeps them in the user's cache; nothing is measured without torch."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        from isthmus.plan.costs.source import nothing_measured

        return nothing_measured
    from isthmus.train.costing import Measuring

    return Measuring(cache_folder() / "costs")


def new_profiler(*, is_wanted: bool, note: Tell, report: Tell = lambda _: None) -> "Profiler":
    """What profiles clouds on this machine, and keeps what it has measured in the user's cache."""
    from isthmus.train.profiles import Profiler

    return Profiler(cache=cache_folder(), note=note, report=report, is_wanted=is_wanted)


def learn_for_plan(job: "Job", *, is_wanted: bool, note: Tell, report: Tell) -> "Job":
    """The job with what was measured here, where all its clouds are on this machine; else as it is.

    Says where the times come from. Without torch nothing can be measured, and plans use the catalogue.
    """
    if all(cloud.profile is not None for cloud in job.cloud):
        return job
    if not is_wanted:
        note("times are those of the catalogue, since --no-profile was given")
        return job
    if importlib.util.find_spec("torch") is None:
        note("times are those of the catalogue, since torch is not installed here")
        return job
    from isthmus.train.profiles import why_not_here

    why_not = why_not_here(job)
    if why_not is not None:
        note(f"times are those of the catalogue: {why_not}")
        return job
    return new_profiler(is_wanted=True, note=note, report=report).all_here(job)
