"""What a plan decides, put into a job: for the job file, and of memory for a run, which does the same.

What the job asks for stays as it is. Where it leaves open whether ranks share their stage out, and nothing is
planned, they hold copies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from isthmus.job import Job
from isthmus.plan.costs.memory import Sharding
from isthmus.plan.scenario import Caps
from isthmus.plan.search.choice import DataSettings, Decisions, PipelineSettings, Plan
from isthmus.plan.search.sparing import Sparing

_OPEN: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Keys of the job's `[strategy]` and `[train]`, and of its clouds by name."""

    strategy: Mapping[str, object] = field(default_factory=dict)
    train: Mapping[str, object] = field(default_factory=dict)
    clouds: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def sections(self) -> dict[str, Mapping[str, object]]:
        """The sections with something to set."""
        every = {"strategy": self.strategy, "train": self.train}
        return {name: keys for name, keys in every.items() if keys}


def planned_changes(job: Job, plan: Plan) -> Changes:
    """What is to be set in a job so that it does as planned."""
    spared = _spared(job, plan.sparing, {one.cloud: one.sharding.value for one in plan.stages})
    return replace(spared, strategy=_strategy(plan))


def follow(job: Job, clouds: Sequence[str], decisions: Decisions | None) -> Job:
    """The job with nothing left open about memory; `clouds` are those of the stages."""
    wanted = Changes()
    if decisions is not None:
        wanted = _spared(job, decisions.sparing, dict(zip(clouds, decisions.sharding, strict=False)))
    copies = {"sharding": Sharding.NONE.value}
    return job.model_copy(
        update={
            "train": job.train.model_copy(update=wanted.train),
            "cloud": tuple(
                one.model_copy(update=wanted.clouds.get(one.name, copies)) if one.sharding == _OPEN else one
                for one in job.cloud
            ),
        }
    )


def _strategy(plan: Plan) -> dict[str, object]:
    match plan.settings:
        case PipelineSettings() as settings:
            counts = [stop - start for start, stop in (stage.layers or (0, 0) for stage in plan.stages)]
            return {
                "kind": "pipeline",
                "clouds": list(plan.clouds),
                "layers": counts,
                "microbatches": settings.num_microbatches,
                **({"policy": settings.policy.value} if settings.policy.keeps_order else {}),
                **_bound(settings.max_in_flight),
            }
        case DataSettings() as settings:
            return {
                "kind": "data",
                "inner_steps": settings.inner_steps,
                "fragments": settings.num_fragments,
                "bits": settings.bits,
            }
        case None:
            return {"kind": "generator-discriminator", "discriminator_cloud": plan.clouds[-1]}


def _bound(caps: Caps | None) -> dict[str, object]:
    if caps is None:
        return {}
    return {"max_in_flight": list(caps) if isinstance(caps, tuple) else caps}


def _spared(job: Job, sparing: Sparing, sharding: Mapping[str, str]) -> Changes:
    train: dict[str, object] = {}
    # "auto" recomputes by itself what memory asks for.
    if sparing.recompute and job.train.recompute is False:
        train["recompute"] = True
    if sparing.offload_optimizer and not job.train.offload_optimizer:
        train["offload_optimizer"] = True
    if sparing.optimizer_bits != job.train.optimizer_bits:
        train["optimizer_bits"] = sparing.optimizer_bits
    free = (one for one in job.cloud if one.sharding == _OPEN and one.ranks > 1 and one.name in sharding)
    return Changes(train=train, clouds={one.name: {"sharding": sharding[one.name]} for one in free})
