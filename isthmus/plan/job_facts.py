"""What planning and running read from a job alike: clouds, lines, the policy, and what cuts agree with."""

import ipaddress
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job, LinkSpec, PipelineStrategy, stage_order
from isthmus.job.codec import BottleneckSpec, BoundarySpec, MemorySpec
from isthmus.plan.memory import Sharding
from isthmus.plan.scenario import Line, Policy
from isthmus.plan.times import (
    CATALOGUE,
    Accelerator,
    CloudFacts,
    Profile,
    accelerator_of,
    find_accelerator,
    new_accelerator,
    read_profile,
)


def cloud_facts(job: Job) -> tuple[CloudFacts, ...]:
    """All clouds, in the order of the job."""
    own = {one.name: accelerator_of(one) for one in job.accelerator}
    return tuple(_cloud(cloud, own, sharing=num_sharing(cloud, job)) for cloud in job.cloud)


def is_here(cloud: CloudSpec, job: Job) -> bool:
    """Whether a cloud is this machine's CPU: it names no accelerator, and the job no other machine."""
    hosts = [one.listen.host for one in job.cloud if one.listen is not None]
    return cloud.device == "cpu" and cloud.accelerator is None and all(map(is_loopback, hosts))


def is_loopback(host: str) -> bool:
    """Whether an address leads back to the machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def num_sharing(cloud: CloudSpec, job: Job) -> int:
    """How many ranks of the job compute on this machine's CPU, where the cloud does; else 1.

    A cloud's own ranks share it too.
    """
    if not is_here(cloud, job):
        return 1
    return sum(one.ranks for one in job.cloud if is_here(one, job))


def line(link: LinkSpec, first: str) -> Line:
    """A link as seen from one of its ends, the figures of which must be known."""
    for key, value in (("bandwidth", link.bandwidth_bps), ("rtt", link.rtt_s)):
        if value is None:
            raise UserError(
                f"link {link.name} has no {key}, without which nothing can be planned",
                hint=f"measure it with `isthmus probe JOB --write`, or set link.{link.name}.{key}",
            )
    there, back = link.bandwidth_bps or (1.0, 1.0)
    down_bps, up_bps = (there, back) if first == link.between[0] else (back, there)
    return Line(
        down_bps=down_bps,
        up_bps=up_bps,
        latency_s=(link.rtt_s or 0.0) / 2,
        jitter_s=link.jitter_s / 2,
        handling_s=link.handling_s,
    )


def _cloud(cloud: CloudSpec, own: Mapping[str, Accelerator], *, sharing: int) -> CloudFacts:
    """A cloud; what it shares with others of this machine is divided between them."""
    try:
        profile = None if cloud.profile is None else read_profile(Path(cloud.profile))
    except UserError as error:
        again = f"isthmus profile JOB --cloud {cloud.name} --out {shlex.quote(cloud.profile or '')}"
        raise UserError(
            f"cloud.{cloud.name}.profile cannot be used: {error.message}", hint=f"measure it again: {again}"
        ) from None
    accelerator = _accelerator(cloud, own, profile).shared_by(sharing)
    price = accelerator.usd_per_hour
    whole = None if price is None else price * cloud.ranks
    is_known = cloud.accelerator is not None or cloud.flops is not None or accelerator.is_cpu
    return CloudFacts(
        name=cloud.name,
        num_ranks=cloud.ranks,
        accelerator=accelerator,
        profile=profile,
        capacity_bytes=cloud.memory_bytes or (accelerator.memory_bytes if is_known else None),
        usd_per_hour=whole if cloud.usd_per_hour is None else cloud.usd_per_hour,
        sharding=None if cloud.sharding == "auto" else Sharding(cloud.sharding),
        inside_bytes_per_s=cloud.inside_bps / 8,
    )


def _accelerator(cloud: CloudSpec, own: Mapping[str, Accelerator], profile: Profile | None) -> Accelerator:
    if cloud.accelerator is not None:
        found = find_accelerator(cloud.accelerator, own=own)
        return found if cloud.flops is None else replace(found, flops=cloud.flops)
    if cloud.device == "cpu" or (profile is not None and profile.device == "cpu"):
        return CATALOGUE["cpu"]
    if cloud.flops is not None and cloud.memory_bytes is not None:
        return new_accelerator(cloud.name, flops=cloud.flops, memory_bytes=cloud.memory_bytes)
    if profile is not None:
        return replace(CATALOGUE["a100-80gb"], name=cloud.name, usd_per_hour=None)
    raise UserError(
        f"cloud {cloud.name!r} does not say what its devices are",
        hint=f'set cloud.{cloud.name}.accelerator, such as "h100", or its flops and memory, or measure it: '
        "isthmus profile JOB",
    )


OPEN: Final = "auto"
"""The policy of a job that leaves it to the plan."""


def policy_of(job: Job, strategy: PipelineStrategy) -> Policy:
    """The policy of the job, else lock-step where a cloud is fully sharded."""
    if strategy.policy != OPEN:
        return Policy(strategy.policy)
    return Policy.LOCK_STEP if any(_is_fully_sharded(one) for one in job.cloud) else Policy.WAN_ONE_F_ONE_B


def check_lock_step(job: Job, strategy: PipelineStrategy) -> None:
    """Refuse a fully sharded cloud whose ranks do not run the same schedule."""
    for cloud in job.cloud:
        if _is_fully_sharded(cloud):
            _check(job, cloud, strategy)


def common_ranks(job: Job) -> int:
    """The number of which a step's micro-batches must be a multiple: 1 where no cloud is fully sharded."""
    return max((one.ranks for one in job.cloud if _is_fully_sharded(one)), default=1)


def check_even(job: Job, *, num_sequences: int, sequence_length: int) -> None:
    """Refuse a step that cannot be divided evenly among ranks with the same schedule."""
    number = common_ranks(job)
    if num_sequences % number:
        raise UserError(
            f"the {num_sequences} sequences of a step cannot be divided evenly among {number} ranks",
            hint=f"set train.batch_tokens to a multiple of {number * sequence_length}",
        )


def _is_fully_sharded(cloud: CloudSpec) -> bool:
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


def check_lists(strategy: PipelineStrategy, *, num_clouds: int) -> None:
    """Refuse lists that have not one entry for each stage."""
    lists = {"layers": strategy.layers, "windows": strategy.windows, "max_in_flight": strategy.max_in_flight}
    for key, given in lists.items():
        if isinstance(given, tuple) and len(given) != num_clouds:
            raise UserError(
                f"strategy.{key} has {len(given)} entries for {num_clouds} stages",
                hint=f"give one number for each stage, or leave {key} out",
            )


def run_order(job: Job) -> tuple[str, ...]:
    """The clouds as a run takes them where the job leaves their order open; none where no row joins them."""
    try:
        return stage_order(job)
    except UserError:
        return ()


def links_along(job: Job, clouds: Sequence[str]) -> tuple[LinkSpec, ...]:
    """The links between neighbouring stages, in order."""
    by_pair = {frozenset(link.between): link for link in job.link}
    return tuple(by_pair[frozenset(pair)] for pair in pairwise(clouds))


def num_frozen_layers(job: Job) -> int:
    """How many of the model's first layers are not trained."""
    return 0 if job.model is None else job.model.frozen_layers


def first_trained(stage_layers: Sequence[range], num_frozen: int) -> int:
    """The first stage with anything to learn; the last one has the head."""
    trained = (number for number, layers in enumerate(stage_layers) if layers.stop > num_frozen)
    return next(trained, len(stage_layers) - 1)


def check_cuts(
    links: Sequence[LinkSpec],
    stage_layers: Sequence[range],
    *,
    num_frozen: int,
    hidden_width: int,
    num_steps: int,
) -> None:
    """Refuse bottlenecks that are none, that cannot learn, that do not begin together, or never."""
    check_frozen(num_frozen, num_layers=stage_layers[-1].stop)
    for link in links:
        link.boundary.check_width(hidden_width)
    for link in links[: first_trained(stage_layers, num_frozen)]:
        if isinstance(link.boundary, BottleneckSpec):
            raise frozen_bottleneck(link)
    warmups = {link.boundary.num_warmup_steps for link in links if isinstance(link.boundary, BottleneckSpec)}
    if len(warmups) > 1:
        raise UserError(
            f"the bottlenecks of a run begin together, but have warm-ups of {sorted(warmups)} steps",
            hint="give all of them the same warmup",
        )
    for link in links:
        if isinstance(link.boundary, BottleneckSpec):
            _check_begins(link.name, link.boundary, num_steps=num_steps)


def _check_begins(name: str, bottleneck: BottleneckSpec, *, num_steps: int) -> None:
    num_warmup_steps = bottleneck.num_warmup_steps
    if num_warmup_steps >= num_steps:
        steps = "step" if num_warmup_steps == 1 else "steps"
        raise UserError(
            f"the bottleneck of {name} begins after {num_warmup_steps} {steps}, but the run has {num_steps}",
            hint=f"lower its warmup, or set train.steps to more than {num_warmup_steps}",
        )


def check_memory(link: LinkSpec, num_encoder_layers: int) -> None:
    """Refuse the output of an encoder at the boundary of a model that has none."""
    if isinstance(link.boundary, MemorySpec) and num_encoder_layers == 0:
        raise UserError(
            f'link {link.name} has the boundary "memory", but the model is no encoder–decoder',
            hint='set it to "hidden", or set data.task = "translation" and take a model such as T5',
        )


def check_stacks(
    stages: Sequence[range],
    boundaries: Sequence[BoundarySpec],
    *,
    num_encoder_layers: int,
    is_joined: bool,
    num_frozen: int,
) -> None:
    """Refuse a cut within a stack whose layers share weights, and what cannot lie within a decoder."""
    for layers in stages:
        if is_joined and layers.start not in (0, num_encoder_layers):
            raise UserError(
                f"T5 cannot be cut before layer {layers.start}: the layers of its encoder share a table of "
                "relative positions, and so do those of its decoder",
                hint=f"cut it where the encoder ends: strategy.layers = [{num_encoder_layers}, …]",
            )
    for cut, (layers, boundary) in enumerate(zip(stages, boundaries, strict=False)):
        if isinstance(boundary, MemorySpec) and layers.stop != num_encoder_layers:
            raise UserError(
                f'the boundary "memory" lies behind layer {layers.stop - 1}, but the encoder has '
                f"{num_encoder_layers} layers",
                hint="let strategy.layers end a stage there, or leave it out",
            )
        if layers.stop > num_encoder_layers and isinstance(boundary, BottleneckSpec):
            raise UserError(
                f"cut {cut + 1} lies within the decoder, where no exported model could hold {boundary}",
                hint='set its boundary to "hidden", and give the link a codec instead',
            )
    check_frozen(num_frozen, num_layers=stages[-1].stop, num_encoder_layers=num_encoder_layers)


def check_frozen(num_frozen: int, *, num_layers: int, num_encoder_layers: int = 0) -> None:
    """Refuse to freeze more layers than there are, or a part of an encoder, or layers of a decoder."""
    if num_encoder_layers and num_frozen not in (0, num_encoder_layers):
        raise UserError(
            f"{num_frozen} layers cannot be frozen in an encoder–decoder whose encoder has "
            f"{num_encoder_layers}",
            hint=f"set model.frozen_layers to {num_encoder_layers}, for the whole encoder, or to 0",
        )
    if num_frozen > num_layers:
        raise UserError(
            f"{num_frozen} layers cannot be frozen in a model of {num_layers}",
            hint=f"set model.frozen_layers to at most {num_layers}",
        )


def frozen_bottleneck(link: LinkSpec) -> UserError:
    """What is said of a bottleneck with nothing but frozen layers before it."""
    return UserError(
        f"link {link.name} has a bottleneck, which is trained, but all layers below it are frozen",
        hint="lower model.frozen_layers, or give the link a codec instead",
    )


def frozen_notes(job: Job, clouds: Sequence[str], stage_layers: Sequence[range]) -> Iterator[str]:
    """What frozen layers save on the WAN with these stages, and which cut would save more."""
    num_frozen = num_frozen_layers(job)
    if num_frozen == 0 or len(clouds) < 2:
        return
    frozen = f"{num_frozen} frozen {'layer' if num_frozen == 1 else 'layers'}"
    number = first_trained(stage_layers, num_frozen)
    if number == 0:
        yield (
            f"{frozen}: they save nothing on the WAN, since {clouds[0]} trains layers above them; "
            f"with strategy.layers = [{num_frozen}, …] nothing would go back, and sequences could be cached"
        )
        return
    between = " and ".join(link.name for link in links_along(job, clouds[: number + 1]))
    yield f"{frozen}: nothing goes back over {between}{_cached(job, clouds, clouds[number])}"


def _cached(job: Job, clouds: Sequence[str], receiver: str) -> str:
    """Whether the first trained stage keeps what frozen layers gave."""
    if job.model is None or job.model.cache_frozen_bytes == 0:
        return ", and nothing is cached, as model.cache_frozen says"
    if any(job.cloud_named(cloud).ranks > 1 for cloud in clouds):
        return ", but nothing is cached: with several ranks a sequence comes to another one every time"
    return f"; {receiver} caches what comes, so a sequence crosses once as far as model.cache_frozen holds it"
