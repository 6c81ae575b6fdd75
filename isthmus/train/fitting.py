"""Whether what a stage must hold at the least fits into the memory of its cloud."""

import os
from typing import Final

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job
from isthmus.model.blueprint import Blueprint
from isthmus.train.setup import Setup
from isthmus.units import format_bytes

# Of a weight or a gradient in float32.
_WIDE_BYTES: Final = 4


def check_fits(job: Job, setup: Setup, blueprint: Blueprint) -> None:
    """Refuse a stage whose weights, gradients and moments alone are over the memory of its cloud."""
    job = setup.followed(job)
    for name, layers in zip(setup.clouds, setup.stage_layers(blueprint.num_layers), strict=True):
        cloud = job.cloud_named(name)
        needed_bytes = _state_bytes(
            job,
            cloud,
            num_parameters=sum(blueprint.anatomy.owned_by(layers).values()),
            num_trained=_num_trained(job, blueprint, layers),
        )
        memory_bytes = _memory_bytes(cloud)
        if memory_bytes is not None and needed_bytes > memory_bytes:
            raise UserError(
                f"the stage of cloud {name!r} needs {format_bytes(needed_bytes)} for weights, gradients "
                f"and optimizer, but it has {format_bytes(memory_bytes)}",
                hint="take a smaller model, or add clouds, so that each holds fewer layers",
            )


def _num_trained(job: Job, blueprint: Blueprint, layers: range) -> int:
    """The weights of a stage that learn; adapters are too small to keep it from fitting."""
    if job.model is None or job.model.lora is not None:
        return 0
    anatomy, num_frozen = blueprint.anatomy, job.model.frozen_layers
    parts = [anatomy.layers[layer] for layer in layers if layer >= num_frozen]
    parts += [anatomy.first] if layers.start == 0 and num_frozen == 0 else []
    parts += [anatomy.last] if layers.stop == anatomy.num_layers else []
    return sum(sum(part.values()) for part in parts)


def _state_bytes(job: Job, cloud: CloudSpec, *, num_parameters: int, num_trained: int) -> int:
    """What one rank holds; what layers gather for a moment does not count."""
    has_moments = cloud.device == "cpu" or not job.train.offload_optimizer
    moment_bytes = job.train.optimizer_bits // 4 * num_trained if has_moments else 0
    gathered_bytes = _WIDE_BYTES * (num_parameters + num_trained)
    share_bytes = -(-(gathered_bytes + moment_bytes) // cloud.ranks)
    match cloud.sharding:
        case "optimizer":
            return gathered_bytes + share_bytes
        case "full":
            return share_bytes
    return gathered_bytes + moment_bytes


def _memory_bytes(cloud: CloudSpec) -> int | None:
    if cloud.memory_bytes is not None:
        return cloud.memory_bytes
    if cloud.device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
