"""How much memory a rank of a stage needs at its fullest moment, part by part.

That moment is either the start of a backward pass, when all micro-batches of the window are kept and
gradients begin to flow, or the update of the weights, when none is.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from isthmus.plan.costs.activations import WIDE_BYTES
from isthmus.plan.costs.bottlenecks import HalfCosts
from isthmus.plan.costs.parts import ModelCosts, PartCosts

# cuBLAS takes 32 MiB for each thread that multiplies on a Hopper GPU; forward and backward have their own.
_WORKSPACE_BYTES: Final = 2 * 32 * 2**20
# One byte for each of two moments, and a float32 scale for every 256 of them.
_SMALL_STATE_BYTES: Final = 2 * (1 + WIDE_BYTES / 256)


class OptimizerState(enum.Enum):
    """What AdamW remembers of each parameter."""

    FLOAT32 = "float32"
    EIGHT_BIT = "8-bit"


class Sharding(enum.StrEnum):
    """What of a stage is dealt out to the ranks of its cloud, and for how long."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    """Weights are gathered once a step and gradients reduced once, so ranks hold both whole in between."""
    FULL = "full"
    """Each layer is gathered when it runs, and reduced when it has."""


class WeightStorage(enum.Enum):
    """What weights and gradients are kept in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """With a master copy in float32 that the optimizer updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Savers:
    """What a stage does to need less memory; recomputing is part of the workload.

    With any sharding `num_shards` ranks share weights, gradients and optimizer state; what is gathered is in
    the precision of the computation.
    """

    optimizer: OptimizerState = OptimizerState.FLOAT32
    weights: WeightStorage = WeightStorage.FLOAT32
    sharding: Sharding = Sharding.NONE
    num_shards: int = 1
    offload_optimizer: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether ranks share anything."""
        return self.sharding is not Sharding.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of one rank by what it is for, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    master: int
    """The float32 copy of weights that are kept narrower."""
    gathered: int
    """Weights of all shards, for the time of a step or of a layer, and gradients on their way to them."""
    activations: int
    """Of all micro-batches in flight, and their bfloat16 copies of the weights."""
    working: int
    """What a pass takes on top."""
    update: int
    """What the optimizer takes on top, when there are no activations."""
    codec: int
    buffers: int
    """Messages that have come or have not yet gone."""
    workspace: int
    """What the libraries for matrix products reserve."""

    @property
    def total_bytes(self) -> int:
        """At the fullest moment."""
        return self.standing_bytes + max(self.activations + self.working, self.update)

    @property
    def standing_bytes(self) -> int:
        """What is there all the time."""
        state = self.weights + self.gradients + self.optimizer + self.master + self.gathered
        return state + self.codec + self.buffers + self.workspace


def stage_memory(
    costs: ModelCosts,
    layers: range,
    *,
    window: int,
    savers: Savers | None = None,
    halves: Sequence[HalfCosts] = (),
    codec_bytes: int = 0,
    num_buffered: int = 2,
) -> Memory:
    """The memory of a rank whose stage holds these layers and keeps `window` micro-batches in flight.

    `halves` are those of the bottlenecks at its cuts. `num_buffered` messages of a boundary wait to be
    computed or sent.
    """
    savers = savers or Savers()
    arithmetic = costs.workload.arithmetic
    if savers.is_sharded != arithmetic.is_gathered:
        raise ValueError("a stage is shared out exactly where its weights are gathered")
    num_owned, num_trained = costs.num_parameters(layers), costs.num_trained(layers)
    num_held, num_learning = (-(-one // savers.num_shards) for one in (num_owned, num_trained))
    is_narrow = savers.weights is WeightStorage.BFLOAT16
    weight_bytes = 2 if is_narrow else WIDE_BYTES
    is_cast = arithmetic.is_mixed and not is_narrow
    kept = _kept_bytes(costs, layers, has_copies=is_cast)
    has_boundary = len(layers) < costs.num_layers
    own = Memory(
        # Where ranks share, FSDP2 offloads the shares of the weights too.
        weights=0 if savers.is_sharded and savers.offload_optimizer else weight_bytes * num_held,
        gradients=weight_bytes * (num_trained if savers.sharding is Sharding.OPTIMIZER else num_learning),
        optimizer=0 if savers.offload_optimizer else _moment_bytes(costs, layers, savers, num_learning),
        master=WIDE_BYTES * num_learning if is_narrow and not savers.offload_optimizer else 0,
        gathered=_gathered_bytes(costs, layers, savers, num_owned),
        activations=window * kept,
        working=_working_bytes(costs, layers, kept, is_cast=is_cast),
        update=_update_bytes(costs, layers, savers, halves),
        codec=codec_bytes,
        buffers=num_buffered * costs.boundary_bytes if has_boundary else 0,
        workspace=_WORKSPACE_BYTES if arithmetic.on_accelerator else 0,
    )
    return _with_halves(own, halves, savers)


def _with_halves(own: Memory, halves: Sequence[HalfCosts], savers: Savers) -> Memory:
    """With what every rank has whole; where FSDP2 offloads a rank's share of the rest, it stays."""
    num_trained = sum(half.num_trained for half in halves)
    has_moments = savers.is_sharded or not savers.offload_optimizer
    return replace(
        own,
        weights=own.weights + sum(WIDE_BYTES * half.num_parameters + half.buffer_bytes for half in halves),
        gradients=own.gradients + WIDE_BYTES * num_trained,
        # Most of them are anchors by token id, of which moments are float32 in any case.
        optimizer=own.optimizer + (2 * WIDE_BYTES * num_trained if has_moments else 0),
    )


def _gathered_bytes(costs: ModelCosts, layers: range, savers: Savers, num_owned: int) -> int:
    element_bytes = costs.workload.arithmetic.element_bytes
    match savers.sharding:
        case Sharding.NONE:
            return 0
        case Sharding.OPTIMIZER:
            return element_bytes * num_owned
        case Sharding.FULL:
            # A layer and the next, which is fetched ahead; a rank alone fetches nothing.
            largest = max(part.num_parameters for part in costs.parts(layers))
            gathered = min(2, savers.num_shards) * element_bytes * largest
            # Gradients of the layer above are on their way to their owners; the highest, at which a pass is
            # fullest unless it recomputes, has none above.
            reduced = max(costs.layers[layer].num_trained for layer in layers)
            return gathered + (WIDE_BYTES * reduced if costs.workload.recompute else 0)


def _moment_bytes(costs: ModelCosts, layers: range, savers: Savers, num_learning: int) -> int:
    """Two moments of each number; those of embeddings are float32 in any case."""
    if savers.optimizer is OptimizerState.FLOAT32:
        return 2 * WIDE_BYTES * num_learning
    num_table = costs.embedding.num_trained if layers.start == 0 else 0
    num_wide = min(num_learning, -(-num_table // savers.num_shards))
    return 2 * WIDE_BYTES * num_wide + round(_SMALL_STATE_BYTES * (num_learning - num_wide))


def _kept_bytes(costs: ModelCosts, layers: range, *, has_copies: bool) -> int:
    """What one micro-batch in flight keeps at a stage."""
    if not any(part.has_backward for part in costs.parts(layers)):
        return 0
    stream_bytes = costs.boundary_bytes
    is_recomputed = costs.workload.recompute
    kept = costs.shared_bytes
    for part in costs.parts(layers):
        is_layer = part is not costs.embedding and part is not costs.head
        if is_layer and is_recomputed:
            kept += stream_bytes if part.has_backward else 0
        else:
            kept += part.kept_bytes + (part.cast_bytes if has_copies else 0)
    # What crosses is kept too: what came is often the first layer's input, and kept as such.
    first = costs.layers[layers.start]
    if layers.start > 0 and not (first.has_backward if is_recomputed else first.keeps_input):
        kept += stream_bytes
    return kept + (stream_bytes if layers.stop < costs.num_layers else 0)


def _working_bytes(costs: ModelCosts, layers: range, kept: int, *, is_cast: bool) -> int:
    """The most above what is kept: where a backward pass begins, or at its end in the embedding.

    A stage that does not learn has forward passes alone, which hold about as much.
    """
    top = _layer_working_bytes(costs, costs.layers[layers.stop - 1], is_cast=is_cast)
    if layers.stop == costs.num_layers:
        top = max(costs.head.working_bytes, top - costs.head.kept_bytes)
    candidates = [top]
    if layers.start == 0 and costs.embedding.num_trained:
        # By then this micro-batch has given back all it kept.
        table = costs.workload.arithmetic.stream_bytes * costs.num_embedding_parameters
        candidates.append(table + costs.embedding.working_bytes - kept)
    return max(candidates)


def _layer_working_bytes(costs: ModelCosts, layer: PartCosts, *, is_cast: bool) -> int:
    arithmetic = costs.workload.arithmetic
    # Gradients that are narrower than their sums are added to them when a layer has all of its own.
    is_late = arithmetic.stream_bytes < WIDE_BYTES
    working = layer.working_bytes + (arithmetic.stream_bytes * layer.num_trained if is_late else 0)
    if not costs.workload.recompute:
        return working
    copies = layer.cast_bytes if is_cast else 0
    return working + layer.kept_bytes + copies - costs.boundary_bytes


def _update_bytes(costs: ModelCosts, layers: range, savers: Savers, halves: Sequence[HalfCosts]) -> int:
    """Roots of the second moments, parameter by parameter; on an accelerator one kernel does it all."""
    is_fused = costs.workload.arithmetic.on_accelerator
    if is_fused or savers.offload_optimizer or savers.optimizer is OptimizerState.EIGHT_BIT:
        return 0
    largest = [part.largest_parameter for part in costs.parts(layers)]
    largest += [half.largest_parameter for half in halves]
    return 2 * WIDE_BYTES * max(largest)
