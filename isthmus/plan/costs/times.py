"""How long each part of a model takes on a device: estimated from its costs, or as a profile measured it.

Every pass of every part costs `fixed + per token`. The part that grows with the tokens is arithmetic and
memory traffic; the fixed part is what it costs to call and to launch some tens of kernels, whatever their
size. On an accelerator the host launches ahead of the device, so a stage takes the longer of launching all
its parts and computing them. On a CPU the thread that calls is the one that computes, so the two add up.
"""

from dataclasses import dataclass, replace
from typing import Final

from isthmus.errors import UserError
from isthmus.plan.costs import WIDE_BYTES, ModelCosts, PartCosts, Precision, Workload
from isthmus.plan.costs.devices import Accelerator
from isthmus.plan.costs.profile import NO_TIME, PassTimes, Profile

# AdamW as torch runs it over lists of tensors, one kernel after the other, and the norm before it.
_UPDATE_BYTES_PER_PARAMETER: Final = 21 * WIDE_BYTES
# A gradient of the whole table is zeroed, filled and added to the one there is.
_TABLE_PASSES: Final = 4
# Products of a backward pass for each of the forward pass, where all learns.
_MEASURED_SHARE: Final = 2.0
# A backward pass launches about twice the kernels of a forward pass.
_BACKWARD_LAUNCHES: Final = 2.0
# Embedding, head and what stands beside the layers of a stage (masks, rotary tables, the loss), in layers.
_END_LAUNCHES: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTimes:
    """One micro-batch through each part of a model on one rank, and the update of its weights."""

    embedding: PassTimes
    layers: tuple[PassTimes, ...]
    head: PassTimes
    update_s_per_parameter: float
    beside: PassTimes = NO_TIME
    """What each pass of a stage takes beside its parts."""

    def stage(self, layers: range) -> PassTimes:
        """The stage that holds these layers."""
        total = sum((self.layers[layer] for layer in layers), self.beside)
        if layers.start == 0:
            total += self.embedding
        return total + self.head if layers.stop == len(self.layers) else total


def estimated_times(costs: ModelCosts, accelerator: Accelerator, *, is_compiled: bool = False) -> ModelTimes:
    """From operations and bytes, at the speeds that the accelerator reaches, and launches of all layers."""
    precision = costs.workload.arithmetic.precision
    table_bytes = WIDE_BYTES * costs.num_embedding_parameters if costs.embedding.has_backward else 0
    table_s = _TABLE_PASSES * table_bytes / accelerator.memory_bandwidth
    launch_s = accelerator.layer_launch_s(is_compiled=is_compiled)
    end_s = _END_LAUNCHES * accelerator.layer_launch_s(is_compiled=False)
    layers = (
        _launched(_estimated(part, accelerator, precision), part, launch_s, accelerator)
        for part in costs.layers
    )
    embedding, head = (
        _launched(_estimated(part, accelerator, precision), part, end_s, accelerator)
        for part in (costs.embedding, costs.head)
    )
    return ModelTimes(
        embedding=embedding + PassTimes(forward_s=0.0, backward_s=table_s),
        layers=tuple(_again(one) if costs.workload.recompute else one for one in layers),
        head=head,
        update_s_per_parameter=_UPDATE_BYTES_PER_PARAMETER / accelerator.memory_bandwidth,
    )


def _launched(times: PassTimes, part: PartCosts, launch_s: float, accelerator: Accelerator) -> PassTimes:
    """The same with what it takes to launch a part: side by side with computing, or on a CPU on top of it."""
    forward_s, backward_s = launch_s, _BACKWARD_LAUNCHES * launch_s if part.has_backward else 0.0
    if accelerator.is_cpu:
        return times + PassTimes(forward_s=forward_s, backward_s=backward_s)
    return replace(times, forward_launch_s=forward_s, backward_launch_s=backward_s)


def measured_times(profile: Profile, workload: Workload, *, num_layers: int) -> ModelTimes:
    """As the profile has it, for a micro-batch of this size."""
    sample = profile.sample(
        num_sequences=workload.num_sequences,
        sequence_length=workload.sequence_length,
        precision=workload.arithmetic.precision,
    )
    if len(sample.layers) != num_layers:
        raise UserError(
            f"the profile of {profile.device} is of a model with {len(sample.layers)} layers, "
            f"not {num_layers}",
            hint="measure again: isthmus profile JOB",
        )
    return ModelTimes(
        embedding=sample.embedding,
        layers=tuple(_again(one) if workload.recompute else one for one in sample.layers),
        head=sample.head,
        update_s_per_parameter=profile.update_s_per_parameter,
        beside=sample.beside,
    )


def learned_times(times: ModelTimes, costs: ModelCosts) -> ModelTimes:
    """Times that were measured while all learned, for a model of which less does."""
    is_recomputed = costs.workload.recompute
    pairs = zip(times.layers, costs.layers, strict=True)
    return replace(
        times,
        embedding=_learned(times.embedding, costs.embedding, is_recomputed=False),
        layers=tuple(_learned(one, part, is_recomputed=is_recomputed) for one, part in pairs),
        head=_learned(times.head, costs.head, is_recomputed=False),
    )


def _learned(times: PassTimes, part: PartCosts, *, is_recomputed: bool) -> PassTimes:
    def learn(forward_s: float, backward_s: float) -> float:
        again_s = forward_s if is_recomputed and part.has_backward else 0.0
        own_s = backward_s - (forward_s if is_recomputed else 0.0)
        return part.backward_share / _MEASURED_SHARE * own_s + again_s

    return replace(
        times,
        backward_s=learn(times.forward_s, times.backward_s),
        backward_launch_s=learn(times.forward_launch_s, times.backward_launch_s),
    )


def _estimated(part: PartCosts, accelerator: Accelerator, precision: Precision) -> PassTimes:
    products_s = part.flops / accelerator.effective_flops(precision)
    products_s += part.float32_flops / accelerator.effective_flops(Precision.FLOAT32)
    moved_s = part.moved_bytes / accelerator.memory_bandwidth
    backward_s = part.backward_share * products_s + (2 * moved_s if part.has_backward else 0.0)
    return PassTimes(forward_s=products_s + moved_s, backward_s=backward_s)


def _again(times: PassTimes) -> PassTimes:
    """With the forward pass run again before the backward, if there is one."""
    if not times.backward_s:
        return times
    return replace(
        times,
        backward_s=times.backward_s + times.forward_s,
        backward_launch_s=times.backward_launch_s + times.forward_launch_s,
    )
