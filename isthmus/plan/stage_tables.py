"""Times and memory of every possible stage of a model at one cloud, as tables (a, b) over its layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from isthmus.job import CodecSpec
from isthmus.job.codec import gradient_codec
from isthmus.job.codec_steps import (
    NUM_ANCHOR_SLOTS,
    Anchor,
    Feedback,
    Subspace,
    Svd,
    num_directions,
    svd_rank,
)
from isthmus.plan.codecs import Crossing, Pair
from isthmus.plan.costs import WIDE_BYTES, ModelCosts, PartCosts, PartSize, Stages
from isthmus.plan.job_facts import CloudFacts
from isthmus.plan.memory import Sharding, StageOptions, stages_memory
from isthmus.plan.step_time import Table
from isthmus.plan.times import ModelTimes

# Python, the scheduler and the wires for every pass, whatever its size; a profile has it in its figures.
_PASS_OVERHEAD_S: Final = 2e-4
# Between a device and its host: about what PCIe 4 gives.
_HOST_BYTES_PER_S: Final = 20e9
# Reading and writing that a codec does for each byte that it is given.
_CODING_PASSES: Final = 16
# Two moments of four bytes, there and back.
_OFFLOADED_BYTES_PER_PARAMETER: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTables:
    """Bytes (a, b) of any stage: with nothing in flight, what each micro-batch adds, and at the update."""

    empty: Table
    each: Table
    update: Table

    @classmethod
    def of(
        cls,
        costs: ModelCosts,
        options: StageOptions,
        *,
        up: PartSize | None = None,
        down: PartSize | None = None,
    ) -> "MemoryTables":
        """Count the stages of a model, all at once; `up` and `down` lie at their cuts."""
        stages = Stages.every(costs.num_layers)
        ends = ((up, ~stages.are_first), (down, ~stages.are_last))
        halves = [(half, where) for half, where in ends if half is not None]
        found = stages_memory(costs, stages, window=1, options=options, halves=halves)
        standing, has_layers = found.standing_bytes, stages.starts < stages.stops
        return cls(
            empty=np.where(has_layers, standing + found.working, np.inf),
            each=np.where(has_layers, np.maximum(1.0, found.activations), np.inf),
            update=np.where(has_layers, standing + found.update, np.inf),
        )

    def num_fitting(self, room_bytes: int) -> Table:
        """Micro-batches in flight that fit into the room; 0 where layers alone are too much."""
        with np.errstate(invalid="ignore"):
            fitting = np.floor((room_bytes - self.empty) / self.each)
        return np.where(np.isfinite(self.each) & (self.update <= room_bytes), np.maximum(fitting, 0.0), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """A cloud under one setting: tables (a, b) over the layers from a to before b, times of one rank."""

    forward_s: Table
    backward_s: Table
    update_s: Table
    num_fitting: Table
    """Micro-batches in flight that the memory of one rank has room for; 0 where layers alone are too much."""


def stage_table(
    costs: ModelCosts, times: ModelTimes, options: StageOptions, cloud: CloudFacts, *, num_fitting: Table
) -> StageTable:
    """Time every stage at a cloud."""
    overhead_s = _PASS_OVERHEAD_S if cloud.profile is None else 0.0
    return StageTable(
        forward_s=_pass_s("forward", costs, times, options, cloud) + overhead_s,
        backward_s=_pass_s("backward", costs, times, options, cloud) + overhead_s,
        update_s=_update_s(costs, times, options, cloud),
        num_fitting=num_fitting,
    )


def _pass_s(
    kind: Literal["forward", "backward"],
    costs: ModelCosts,
    times: ModelTimes,
    options: StageOptions,
    cloud: CloudFacts,
) -> Table:
    """Time one pass of every stage.

    The host launches ahead of the device, so a pass takes the longer of launching its parts and computing.
    """
    parts = (times.embedding, *times.layers, times.head)
    own_s = [float(getattr(one, f"{kind}_s")) for one in parts]
    gather_s = costs.each(lambda part: exchange_s(part, costs, options, cloud)[kind == "backward"])
    # Beside what moves for a layer another one is computed; for the ends of a model there is none.
    computed_s = [max(one_s, wait_s) if one_s else 0.0 for one_s, wait_s in zip(own_s, gather_s, strict=True)]
    computed_s[0], computed_s[-1] = own_s[0] + gather_s[0], own_s[-1] + gather_s[-1]
    launched_s = [float(getattr(one, f"{kind}_launch_s")) for one in parts]
    return np.maximum(
        _summed(costs, computed_s) + float(getattr(times.beside, f"{kind}_s")),
        _summed(costs, launched_s) + float(getattr(times.beside, f"{kind}_launch_s")),
    )


def _update_s(costs: ModelCosts, times: ModelTimes, options: StageOptions, cloud: CloudFacts) -> Table:
    """Time the optimizer on what a rank owns, and the sum of gradients over the ranks."""
    num_owned = _summed(costs, costs.each(lambda part: part.num_trained)) / options.num_shards
    optimizer_s = num_owned * times.update_s_per_parameter
    if options.offload_optimizer:
        optimizer_s += num_owned * _OFFLOADED_BYTES_PER_PARAMETER / _HOST_BYTES_PER_S
    exchanged_bytes = _summed(costs, costs.each(lambda part: _exchanged_bytes(part, costs, options)))
    share = (cloud.num_ranks - 1) / cloud.num_ranks
    return np.asarray(optimizer_s + share * exchanged_bytes / cloud.inside_bytes_per_s)


def _summed(costs: ModelCosts, figures: Sequence[float]) -> Table:
    """Sum the figures of the parts of every stage."""
    return np.maximum(Stages.every(costs.num_layers).total(figures), 0.0)


def _exchanged_bytes(part: PartCosts, costs: ModelCosts, options: StageOptions) -> int:
    """At the end of a step: gradients are summed, then the sums or all weights gathered."""
    match options.sharding:
        case Sharding.NONE:
            return 2 * WIDE_BYTES * part.num_trained
        case Sharding.OPTIMIZER:
            gathered = costs.workload.arithmetic.element_bytes * part.num_parameters
            return WIDE_BYTES * part.num_trained + gathered
        case Sharding.FULL:
            return 0


def exchange_s(
    part: PartCosts, costs: ModelCosts, options: StageOptions, cloud: CloudFacts
) -> tuple[float, float]:
    """Time what moves in a forward and in a backward of a part whose weights are sharded.

    Weights are gathered in both as they are computed with, and gradients reduced in float32.
    """
    if options.sharding is not Sharding.FULL:
        return 0.0, 0.0
    share = (options.num_shards - 1) / options.num_shards
    gathered_bytes = share * part.num_parameters * costs.workload.arithmetic.element_bytes
    reduced_bytes = share * part.num_trained * WIDE_BYTES
    rate = cloud.inside_bytes_per_s
    return gathered_bytes / rate, (gathered_bytes + reduced_bytes) / rate


def coding_s(
    codec: CodecSpec, num_elements: int, num_bytes: int, *, sender: CloudFacts, receiver: CloudFacts
) -> float:
    """Time the coding of a message at both ends, copies between devices and hosts included."""
    total_s = 0.0
    for cloud, is_sender in ((sender, True), (receiver, False)):
        profile = cloud.profile
        coding = None if profile is None else profile.coding(str(codec))
        if coding is not None:
            total_s += coding.encode_s(num_elements) if is_sender else coding.decode_s(num_elements)
            continue
        if not codec.is_raw:
            # Codecs compute in float32 whatever they are given.
            moved_bytes = _CODING_PASSES * WIDE_BYTES * num_elements
            total_s += moved_bytes / cloud.accelerator.memory_bandwidth
        if not cloud.accelerator.is_cpu:
            speed = None
            if profile is not None:
                speed = profile.to_host_bytes_per_s if is_sender else profile.from_host_bytes_per_s
            total_s += num_bytes / (speed or _HOST_BYTES_PER_S)
    return total_s


def codec_state_bytes(codecs: Pair, crossing: Crossing) -> tuple[int, int]:
    """Count what the codecs of a cut keep between messages on one wire, at the sending and receiving stage.

    Error feedback keeps what the last message lost, an SVD the directions of the last message. A subspace
    keeps its basis at both ends, and what it learns the next one from at the sender of activations.
    """
    shape = crossing.num_rows, crossing.width
    learned, basis = _subspace_state_bytes(codecs.forward, crossing.width)
    sender_bytes = _sender_state_bytes(codecs.forward, *shape) + learned + basis
    gradients = gradient_codec(codecs.forward, codecs.backward)
    return sender_bytes, basis + (_sender_state_bytes(gradients, *shape) if crossing.has_gradient else 0)


def _sender_state_bytes(codec: CodecSpec, num_rows: int, width: int) -> int:
    num_elements = 0
    for step in codec.steps:
        match step:
            case Feedback():
                num_elements += num_rows * width
            case Svd(ratio=ratio):
                num_elements += width * (svd_rank(ratio, num_rows, width) or 0)
    return WIDE_BYTES * num_elements


def _subspace_state_bytes(codec: CodecSpec, width: int) -> tuple[int, int]:
    """Count the sums that a basis is learned from, and the basis with its anchors by token id."""
    match codec.steps:
        case (Subspace() as subspace, *_):
            num_slots = NUM_ANCHOR_SLOTS if subspace.anchor is Anchor.TOKENS else 0
            # A sum, two weights and the number of a row for each slot.
            learned = WIDE_BYTES * (width * width + width + num_slots * (width + 4))
            basis = WIDE_BYTES * width * (1 + num_directions(subspace, width))
            return learned, basis + 2 * num_slots * width
    return 0, 0
