"""What the members of a run agree on, whatever its strategy, and what a plan needs to be made.

The first cloud makes the run config, once it has planned, and sends it to all others, so that no two sites
can differ. Each strategy adds its own fields in a subclass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from isthmus.job import CloudSpec, Job
from isthmus.plan.costs import CostSource, nothing_measured
from isthmus.plan.models import has_costs, model_config
from isthmus.plan.types import Facts, Member
from isthmus.train.data.training_data import Layout, divide_batch

CONFIG_FILE: Final = "config.json"
MODEL_FOLDER: Final = "model"
"""Where a run directory has the exported model."""
MAX_CONFIG_BYTES: Final = 8 * 2**20

ShardingName = Literal["none", "optimizer", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Facts):
    """What all members of a run agree on; the subclass of its kind adds the schedule."""

    kind: str
    seed: int
    run_id: str = ""
    """The name of the run directory, which the first cloud chooses."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """What the model's configuration takes from the data, which only some clouds read."""
    num_labels: int | None = None
    sharding: Mapping[str, ShardingName] = field(default_factory=dict)
    """What the ranks of a cloud shard, by its name; nothing where it is not named."""
    recompute: bool | Literal["auto"] = False
    offload_optimizer: bool = False
    optimizer_bits: Literal[8, 32] = 32
    keeps_padding: bool = False
    """Whether padding crosses too, as `Blueprint.mixes_tokens` says."""

    @property
    def members(self) -> Sequence[Member]:
        """All members of the run."""
        raise NotImplementedError

    def continues_without(self, cloud: str) -> bool:  # noqa: ARG002 - a strategy may say so
        """Whether the others continue where this cloud ends with an error."""
        return False


def sharding_of(cloud: CloudSpec) -> ShardingName:
    """What the ranks of a cloud shard; one rank alone shards nothing."""
    if cloud.ranks == 1 or cloud.sharding == "auto":
        return "none"
    return cloud.sharding


def layout_of(job: Job, num_microbatches: int) -> Layout:
    """How the batch of a step is divided into micro-batches."""
    return divide_batch(
        batch_tokens=job.train.batch_tokens,
        sequence_length=1 if job.data is None else job.data.sequence_length,
        num_microbatches=num_microbatches,
    )


def may_plan(job: Job, source: CostSource = nothing_measured) -> bool:
    """Whether a plan can be made once all clouds are measured."""
    return _why_no_costs(job, source) is None


def why_not_planned(job: Job, source: CostSource) -> str | None:
    """The first thing that the planner lacks; None where it knows enough."""
    for cloud in job.cloud:
        is_known = cloud.device == "cpu" or cloud.profile is not None or cloud.accelerator is not None
        if not is_known and (cloud.flops is None or cloud.memory_bytes is None):
            return f"cloud {cloud.name} does not say what its devices are; set its accelerator"
    return _why_no_costs(job, source)


def _why_no_costs(job: Job, source: CostSource) -> str | None:
    """The first figure of a link or of the model that the planner lacks."""
    for link in job.link:
        if link.bandwidth_bps is None or link.rtt_s is None:
            return f"the figures of link {link.name} are not known; isthmus probe JOB --write measures them"
    if not has_costs(job, source):
        return f"the costs of model_type {model_config(job).get('model_type')!r} are not known"
    return None
