"""From a job to what every stage must know, and all that can be wrong with it before anything starts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.job import AutoStrategy, CloudSpec, Job, PipelineStrategy
from isthmus.model.anatomy import split_layers
from isthmus.model.blueprint import Blueprint, fresh_blueprint, pretrained_blueprint
from isthmus.model.heads import HEADS
from isthmus.plan.pipeline import Policy
from isthmus.train.batches import Layout, divide_batch
from isthmus.units import format_bytes

_MICROBATCHES_PER_STAGE: Final = 8
# Weights, gradients and the two moments of AdamW, in float32.
_STATE_BYTES_PER_PARAMETER: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A pipeline along the links: its clouds in the order of their stages, and how a step is divided."""

    clouds: tuple[str, ...]
    layout: Layout
    policy: Policy
    max_in_flight: int
    notes: tuple[str, ...]


def set_up(job: Job) -> Setup:
    """Choose what the job leaves open, with reasons, and refuse what cannot run."""
    if job.data is None or job.model is None:
        missing = "[data]" if job.data is None else "[model]"
        raise UserError(f"the job has no {missing} section", hint="docs/job.md shows what it holds")
    notes: list[str] = []
    strategy = _pipeline(job, notes)
    clouds = stage_order(job)
    _check_supported(job)
    num_microbatches = strategy.microbatches
    if num_microbatches is None:
        num_microbatches = _choose_microbatches(job, job.data.sequence_length, len(clouds), notes)
    layout = divide_batch(
        batch_tokens=job.train.batch_tokens,
        sequence_length=job.data.sequence_length,
        num_microbatches=num_microbatches,
    )
    return Setup(
        clouds=clouds,
        layout=layout,
        policy=Policy(strategy.policy),
        max_in_flight=strategy.max_in_flight or num_microbatches,
        notes=tuple(notes),
    )


def stage_order(job: Job) -> tuple[str, ...]:
    """The clouds in a row, each linked to the next: in the job's order, else along the links."""
    names = tuple(cloud.name for cloud in job.cloud)
    linked = {frozenset(link.between) for link in job.link}
    for order in (names, _along_links(names, linked)):
        if len(order) == len(names) and all(frozenset(pair) in linked for pair in pairwise(order)):
            return order
    raise UserError(
        "the links do not join the clouds in a row, which a pipeline needs",
        hint="list the clouds in the order of their stages, and give each a [[link]] to the next",
    )


def blueprint_of(job: Job, *, config: Mapping[str, Any], num_labels: int | None) -> Blueprint:
    """The job's model, with what its configuration takes from the data."""
    if job.model is None or job.data is None:
        raise UserError("the job has no [model] or no [data] section")
    head = HEADS[job.data.task]
    if job.model.source is not None:
        return pretrained_blueprint(job.model.source, head=head, num_labels=num_labels)
    return fresh_blueprint({**(job.model.config or {}), **config}, head=head, num_labels=num_labels)


def check_fits(job: Job, setup: Setup, blueprint: Blueprint) -> None:
    """Refuse a stage whose weights, gradients and moments alone are over the memory of its cloud."""
    cuts = split_layers(blueprint.num_layers, len(setup.clouds))
    for name, layers in zip(setup.clouds, cuts, strict=True):
        needed_bytes = _STATE_BYTES_PER_PARAMETER * sum(blueprint.anatomy.owned_by(layers).values())
        memory_bytes = _memory_bytes(job.cloud_named(name))
        if memory_bytes is not None and needed_bytes > memory_bytes:
            raise UserError(
                f"the stage of cloud {name!r} needs {format_bytes(needed_bytes)} for weights, gradients "
                f"and optimizer, but it has {format_bytes(memory_bytes)}",
                hint="take a smaller model, or add clouds, so that each holds fewer layers",
            )


def _pipeline(job: Job, notes: list[str]) -> PipelineStrategy:
    match job.strategy:
        case PipelineStrategy():
            return job.strategy
        case AutoStrategy():
            notes.append("strategy: pipeline, since it is the only one so far")
            return PipelineStrategy(kind="pipeline")
    raise UserError(
        f"strategy {job.strategy.kind!r} cannot be run yet", hint='set strategy.kind to "pipeline"'
    )


def _check_supported(job: Job) -> None:
    for cloud in job.cloud:
        if cloud.ranks > 1:
            raise UserError(
                f"cloud {cloud.name!r} has {cloud.ranks} ranks, but a stage runs on one so far",
                hint=f"set cloud.{cloud.name}.ranks to 1",
            )
    for link in job.link:
        for codec in (link.codec.forward, link.codec.backward):
            if str(codec) not in ("raw", "auto"):
                raise UserError(
                    f'link {link.name} has codec "{codec}", but only "raw" can be run so far',
                    hint=f'set link.{link.name}.codec to "raw"',
                )


def _choose_microbatches(job: Job, sequence_length: int, num_stages: int, notes: list[str]) -> int:
    num_sequences = max(1, job.train.batch_tokens // sequence_length)
    most = _MICROBATCHES_PER_STAGE * num_stages
    chosen = max(one for one in range(1, min(most, num_sequences) + 1) if num_sequences % one == 0)
    notes.append(
        f"micro-batches: {chosen}, the most up to {most} ({_MICROBATCHES_PER_STAGE} a stage) "
        f"that divide the {num_sequences} sequences of a step"
    )
    return chosen


def _along_links(names: Sequence[str], linked: set[frozenset[str]]) -> tuple[str, ...]:
    """Follow the links from the first cloud that has only one."""
    ends = [name for name in names if sum(name in pair for pair in linked) <= 1]
    order = ends[:1]
    while order:
        following = [name for name in names if name not in order and frozenset((order[-1], name)) in linked]
        if len(following) != 1:
            break
        order.append(following[0])
    return tuple(order)


def _memory_bytes(cloud: CloudSpec) -> int | None:
    if cloud.memory_bytes is not None:
        return cloud.memory_bytes
    if cloud.device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
