"""What clouds of several ranks cannot do, said in one sentence before anything starts."""

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job, LinkSpec, PipelineStrategy
from isthmus.job.boundary import BottleneckSpec
from isthmus.plan.pipeline import Policy


def check_ranks(job: Job, strategy: PipelineStrategy) -> None:
    """Refuse what cannot run on the ranks that the job gives its clouds."""
    for link in job.link:
        _check_link(job, link)
    for cloud in job.cloud:
        if cloud.ranks > 1 and cloud.sharding != "none":
            _check_sharding(job, cloud)
        if cloud.ranks > 1 and cloud.sharding == "full":
            _check_lock_step(job, cloud, strategy)


def _check_link(job: Job, link: LinkSpec) -> None:
    several = [name for name in link.between if job.cloud_named(name).ranks > 1]
    if several and isinstance(link.boundary, BottleneckSpec):
        raise UserError(
            f"link {link.name} has a bottleneck, which each end must begin alone, but cloud {several[0]!r} "
            f"has {job.cloud_named(several[0]).ranks} ranks",
            hint=f"set cloud.{several[0]}.ranks to 1, or give the link a codec instead",
        )


def _check_sharding(job: Job, cloud: CloudSpec) -> None:
    if job.train.optimizer_bits == 8:
        raise UserError(
            f"cloud {cloud.name!r} shares its optimizer state out, which cannot be done with 8 bits",
            hint=f'set cloud.{cloud.name}.sharding to "none", or train.optimizer_bits to 32',
        )
    if job.model is not None and job.model.lora is not None:
        raise UserError(
            f"cloud {cloud.name!r} shares its weights out, which cannot be done with adapters",
            hint=f'set cloud.{cloud.name}.sharding to "none"',
        )


def _check_lock_step(job: Job, cloud: CloudSpec, strategy: PipelineStrategy) -> None:
    if Policy(strategy.policy) is Policy.WAN_ONE_F_ONE_B:
        raise UserError(
            f'sharding = "full" of cloud {cloud.name!r} needs ranks in lock-step, which policy '
            f"{strategy.policy} does not keep",
            hint='set strategy.policy to "1f1b" or "gpipe", or sharding to "optimizer"',
        )
    if {one.ranks for one in job.cloud} != {cloud.ranks}:
        raise UserError(
            f'sharding = "full" of cloud {cloud.name!r} needs as many ranks in every cloud',
            hint='set sharding to "optimizer"',
        )
    if strategy.microbatches is None or strategy.microbatches % cloud.ranks:
        raise UserError(
            f'sharding = "full" of cloud {cloud.name!r} needs as many micro-batches at each of its '
            f"{cloud.ranks} ranks",
            hint=f"set strategy.microbatches to a multiple of {cloud.ranks}",
        )
