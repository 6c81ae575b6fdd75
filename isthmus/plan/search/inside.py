"""What moves inside a cloud: weights that are gathered, gradients that are summed, what goes to the host."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from isthmus.job import CodecSpec
from isthmus.plan.costs.arithmetic import WIDE_BYTES
from isthmus.plan.costs.memory import Savers, Sharding
from isthmus.plan.costs.parts import ModelCosts, PartCosts
from isthmus.plan.costs.stages import Stages
from isthmus.plan.costs.times import ModelTimes
from isthmus.plan.search.facts import CloudFacts
from isthmus.plan.search.walks import Table

# Between a device and its host: about what PCIe 4 gives.
_HOST_BYTES_PER_S: Final = 20e9
# Reading and writing that a codec does for each byte that it is given.
_CODING_PASSES: Final = 16
# Two moments of four bytes, there and back.
_OFFLOADED_BYTES_PER_PARAMETER: Final = 16


def between(first: float, layers: Sequence[float], last: float) -> Table:
    """Sums (a, b) over the layers from a to before b, with the ends of the model where a stage has them."""
    return np.maximum(Stages.every(len(layers)).total([first, *layers, last]), 0.0)


def whole_passes_s(times: ModelTimes, forward_s: Table, backward_s: Table) -> tuple[Table, Table]:
    """Tables of passes from those of computing alone: with what is beside the parts, and with launches.

    The host launches ahead of the device, so a pass takes the longer of launching its parts and computing.
    """
    beside = times.beside
    launch_forward_s = between(
        times.embedding.forward_launch_s,
        [one.forward_launch_s for one in times.layers],
        times.head.forward_launch_s,
    )
    launch_backward_s = between(
        times.embedding.backward_launch_s,
        [one.backward_launch_s for one in times.layers],
        times.head.backward_launch_s,
    )
    return (
        np.maximum(forward_s + beside.forward_s, launch_forward_s + beside.forward_launch_s),
        np.maximum(backward_s + beside.backward_s, launch_backward_s + beside.backward_launch_s),
    )


def updating_s(costs: ModelCosts, times: ModelTimes, savers: Savers, cloud: CloudFacts) -> Table:
    """Tables (a, b) of the optimizer on what a rank owns, and of the sum of gradients over the ranks."""
    trained = _summed(costs, lambda part: part.num_trained)
    optimizer_s = trained / savers.num_shards * times.update_s_per_parameter
    if savers.offload_optimizer:
        optimizer_s += trained / savers.num_shards * _OFFLOADED_BYTES_PER_PARAMETER / _HOST_BYTES_PER_S
    exchanged_bytes = _summed(costs, lambda part: _exchanged_bytes(part, costs, savers))
    share = (cloud.num_ranks - 1) / cloud.num_ranks
    return np.asarray(optimizer_s + share * exchanged_bytes / cloud.inside_bytes_per_s)


def _summed(costs: ModelCosts, count: Callable[[PartCosts], int]) -> Table:
    """Sums (a, b) over the parts of any stage."""
    return np.maximum(Stages.every(costs.num_layers).total(costs.each(count)), 0.0)


def _exchanged_bytes(part: PartCosts, costs: ModelCosts, savers: Savers) -> int:
    """At the end of a step: gradients are summed, then the sums or all weights gathered."""
    match savers.sharding:
        case Sharding.NONE:
            return 2 * WIDE_BYTES * part.num_trained
        case Sharding.OPTIMIZER:
            gathered = costs.workload.arithmetic.element_bytes * part.num_parameters
            return WIDE_BYTES * part.num_trained + gathered
        case Sharding.FULL:
            return 0


def exchange_s(part: PartCosts, costs: ModelCosts, savers: Savers, cloud: CloudFacts) -> tuple[float, float]:
    """What moves in a forward and in a backward of a part whose weights are shared out.

    Weights are gathered in both as they are computed with, and gradients reduced in float32.
    """
    if savers.sharding is not Sharding.FULL:
        return 0.0, 0.0
    share = (savers.num_shards - 1) / savers.num_shards
    gathered_bytes = share * part.num_parameters * costs.workload.arithmetic.element_bytes
    reduced_bytes = share * part.num_trained * WIDE_BYTES
    rate = cloud.inside_bytes_per_s
    return gathered_bytes / rate, (gathered_bytes + reduced_bytes) / rate


def coding_s(
    codec: CodecSpec, num_elements: int, num_bytes: int, *, sender: CloudFacts, receiver: CloudFacts
) -> float:
    """What coding a message takes at both ends, copies between devices and hosts included."""
    encoding, decoding = (
        None if one.profile is None else one.profile.coding(str(codec)) for one in (sender, receiver)
    )
    if encoding is None:
        speed = None if sender.profile is None else sender.profile.to_host_bytes_per_s
        encode_s = _guessed_s(codec, num_elements, sender) + _copy_s(num_bytes, sender, speed)
    else:
        encode_s = encoding.encode_s(num_elements)
    if decoding is None:
        speed = None if receiver.profile is None else receiver.profile.from_host_bytes_per_s
        decode_s = _guessed_s(codec, num_elements, receiver) + _copy_s(num_bytes, receiver, speed)
    else:
        decode_s = decoding.decode_s(num_elements)
    return encode_s + decode_s


def _guessed_s(codec: CodecSpec, num_elements: int, cloud: CloudFacts) -> float:
    """By the memory's bandwidth; codecs compute in float32 whatever they are given."""
    if codec.is_raw:
        return 0.0
    return _CODING_PASSES * WIDE_BYTES * num_elements / cloud.accelerator.memory_bandwidth


def _copy_s(num_bytes: int, cloud: CloudFacts, bytes_per_s: float | None) -> float:
    if cloud.accelerator.is_cpu:
        return 0.0
    return num_bytes / (bytes_per_s or _HOST_BYTES_PER_S)
