"""What the planner knows of a job: devices, lines, the model and a step, each checked as it is read."""

import ipaddress
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job, LinkSpec
from isthmus.plan.costs.arithmetic import Arithmetic, Precision
from isthmus.plan.costs.devices import CATALOGUE, Accelerator, find_accelerator, new_accelerator
from isthmus.plan.costs.memory import Sharding
from isthmus.plan.costs.profile import Profile, read_profile
from isthmus.plan.costs.shapes import Task, load_config
from isthmus.plan.scenario import Line

_UNKNOWN_BYTES: Final = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudFacts:
    """A cloud: what one rank of it is, and what the whole of it costs."""

    name: str
    num_ranks: int
    accelerator: Accelerator
    profile: Profile | None
    capacity_bytes: int | None
    """Of one rank's memory, None where it is unknown."""
    usd_per_hour: float | None
    sharding: Sharding | None = None
    """What its ranks share out, None where the plan chooses."""
    inside_bytes_per_s: float = 25e9
    """Between its devices, of each."""

    def room_bytes(self, share: float) -> int:
        """What a plan may fill of a rank's memory."""
        return _UNKNOWN_BYTES if self.capacity_bytes is None else int(share * self.capacity_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step computes."""

    num_sequences: int
    sequence_length: int
    precision: Precision
    num_steps: int
    is_compiled: bool = False

    @property
    def num_tokens(self) -> int:
        """Of all clouds together."""
        return self.num_sequences * self.sequence_length

    def arithmetic(self, cloud: CloudFacts) -> Arithmetic:
        """How a cloud computes it."""
        return Arithmetic(precision=self.precision, on_accelerator=not cloud.accelerator.is_cpu)


def cloud_facts(job: Job) -> tuple[CloudFacts, ...]:
    """All clouds, in the order of the job."""
    own = {
        one.name: new_accelerator(
            one.name,
            flops=one.flops,
            flops_float32=one.flops_float32,
            achievable=one.achievable,
            memory_bytes=one.memory_bytes,
            memory_bandwidth=one.memory_bandwidth_bytes_per_s,
            usd_per_hour=one.usd_per_hour,
        )
        for one in job.accelerator
    }
    return tuple(_cloud(cloud, own, sharing=num_sharing(cloud, job)) for cloud in job.cloud)


def step_facts(job: Job) -> StepFacts:
    """A step of the job, which is whole sequences."""
    if job.data is None:
        raise UserError("the job has no [data] section", hint="docs/job.md shows what it holds")
    length, num_tokens = job.data.sequence_length, job.train.batch_tokens
    if num_tokens % length:
        near = max(1, round(num_tokens / length)) * length
        raise UserError(
            f"a batch of {num_tokens} tokens is no whole number of sequences of {length} tokens",
            hint=f"set train.batch_tokens to {near}",
        )
    return StepFacts(
        num_sequences=num_tokens // length,
        sequence_length=length,
        precision=Precision(job.train.precision),
        num_steps=job.train.steps,
        is_compiled=job.train.compile,
    )


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


def model_config(job: Job) -> Mapping[str, object]:
    """The configuration of the job's model."""
    if job.model is None:
        raise UserError("the job has no [model] section", hint="docs/job.md shows what it holds")
    if job.model.source is None:
        return job.model.config or {}
    config = load_config(job.model.source)
    if config.get("quantization_config") is not None:
        raise UserError(
            f"{job.model.source} holds quantised weights, which cannot be trained",
            hint="start from the model in bfloat16 or float32",
        )
    return config


def task(job: Job) -> Task:
    """What the model learns."""
    return Task.CAUSAL_LM if job.data is None else Task(job.data.task)


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
    profile = _profile(cloud.name, cloud.profile) if cloud.profile is not None else None
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


def _profile(cloud: str, file: str) -> Profile:
    try:
        return read_profile(Path(file))
    except UserError as error:
        raise UserError(
            f"cloud.{cloud}.profile cannot be used: {error.message}",
            hint=f"measure it again: isthmus profile JOB --cloud {cloud} --out {shlex.quote(file)}",
        ) from None


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
