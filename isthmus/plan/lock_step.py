"""What `sharding = "full"` needs: each layer is gathered by all ranks of a cloud at once, in lock-step."""

from typing import Final

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job, PipelineStrategy
from isthmus.plan.scenario import Policy

OPEN: Final = "auto"
"""The policy of a job that leaves it to the plan."""


def policy_of(job: Job, strategy: PipelineStrategy) -> Policy:
    """As the job says, else lock-step where a cloud shares out all of its stage."""
    if strategy.policy != OPEN:
        return Policy(strategy.policy)
    return Policy.LOCK_STEP if any(_is_shared_out(one) for one in job.cloud) else Policy.WAN_ONE_F_ONE_B


def check_lock_step(job: Job, strategy: PipelineStrategy) -> None:
    """Refuse a cloud that shares all of its stage out where its ranks do not run one sequence of passes."""
    for cloud in job.cloud:
        if _is_shared_out(cloud):
            _check(job, cloud, strategy)


def common_ranks(job: Job) -> int:
    """Of which a step's micro-batches must be a multiple: 1 where no cloud shares out all of its stage."""
    return max((one.ranks for one in job.cloud if _is_shared_out(one)), default=1)


def check_even(job: Job, *, num_sequences: int, sequence_length: int) -> None:
    """Refuse a step that ranks in lock-step cannot deal out evenly, however it is divided."""
    number = common_ranks(job)
    if num_sequences % number:
        raise UserError(
            f"the {num_sequences} sequences of a step cannot be dealt out evenly to {number} ranks",
            hint=f"set train.batch_tokens to a multiple of {number * sequence_length}",
        )


def _is_shared_out(cloud: CloudSpec) -> bool:
    return cloud.ranks > 1 and cloud.sharding == "full"


def _check(job: Job, cloud: CloudSpec, strategy: PipelineStrategy) -> None:
    start = f'sharding = "full" of cloud {cloud.name!r} needs'
    if not policy_of(job, strategy).keeps_order:
        raise UserError(
            f"{start} ranks in lock-step, which policy {strategy.policy} does not keep",
            hint='set strategy.policy to "lock-step", or sharding to "optimizer"',
        )
    if {one.ranks for one in job.cloud} != {cloud.ranks}:
        raise UserError(f"{start} as many ranks in every cloud", hint='set sharding to "optimizer"')
    if strategy.microbatches is not None and strategy.microbatches % cloud.ranks:
        raise UserError(
            f"{start} as many micro-batches at each of its {cloud.ranks} ranks",
            hint=f"set strategy.microbatches to a multiple of {cloud.ranks}",
        )
