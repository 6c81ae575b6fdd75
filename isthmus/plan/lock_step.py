"""What `sharding = "full"` needs: each layer is gathered by all ranks of a cloud at once, in lock-step."""

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job, PipelineStrategy
from isthmus.plan.pipeline import Policy


def check_lock_step(job: Job, strategy: PipelineStrategy) -> None:
    """Refuse a cloud that shares all of its stage out where its ranks do not run one sequence of passes."""
    for cloud in job.cloud:
        if cloud.ranks > 1 and cloud.sharding == "full" and (error := _obstacle(job, cloud, strategy)):
            raise error


def can_lock_step(job: Job, strategy: PipelineStrategy) -> bool:
    """Whether every cloud could share all of its stage out."""
    return all(_obstacle(job, cloud, strategy) is None for cloud in job.cloud)


def _obstacle(job: Job, cloud: CloudSpec, strategy: PipelineStrategy) -> UserError | None:
    if Policy(strategy.policy) is Policy.WAN_ONE_F_ONE_B:
        return UserError(
            f'sharding = "full" of cloud {cloud.name!r} needs ranks in lock-step, which policy '
            f"{strategy.policy} does not keep",
            hint='set strategy.policy to "1f1b" or "gpipe", or sharding to "optimizer"',
        )
    if {one.ranks for one in job.cloud} != {cloud.ranks}:
        return UserError(
            f'sharding = "full" of cloud {cloud.name!r} needs as many ranks in every cloud',
            hint='set sharding to "optimizer"',
        )
    if strategy.microbatches is None or strategy.microbatches % cloud.ranks:
        return UserError(
            f'sharding = "full" of cloud {cloud.name!r} needs as many micro-batches at each of its '
            f"{cloud.ranks} ranks",
            hint=f"set strategy.microbatches to a multiple of {cloud.ranks}",
        )
    return None
