"""How much memory a rank of a stage needs at its fullest moment, part by part.

That moment is either the start of a backward pass, when all micro-batches of the window are kept and
gradients begin to flow, or the update of the weights, when none is.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np

from isthmus.plan.costs.arithmetic import WIDE_BYTES
from isthmus.plan.costs.bottlenecks import HalfCosts
from isthmus.plan.costs.parts import ModelCosts
from isthmus.plan.costs.stages import Figures, Mask, Stages, given

# cuBLAS takes 32 MiB for each thread that multiplies on a Hopper GPU; forward and backward have their own.
_WORKSPACE_BYTES: Final = 2 * 32 * 2**20
# One byte for each of two moments, and a float32 scale for every 256 of them.
_SMALL_STATE_BYTES: Final = 2 * (1 + WIDE_BYTES / 256)
_NUM_BUFFERED: Final = 2

Bytes = TypeVar("Bytes", int, Figures)
PlacedHalf: TypeAlias = tuple[HalfCosts, Mask]
"""Half of a bottleneck, and the stages that have it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Savers:
    """What a stage does to need less memory; recomputing is part of the workload.

    With any sharding `num_shards` ranks share weights, gradients and optimizer state; what is gathered is in
    the precision of the computation.
    """

    optimizer: OptimizerState = OptimizerState.FLOAT32
    sharding: Sharding = Sharding.NONE
    num_shards: int = 1
    offload_optimizer: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether ranks share anything."""
        return self.sharding is not Sharding.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse(Generic[Bytes]):
    """The memory of one rank by what it is for: of one stage, or of each of several."""

    weights: Bytes
    gradients: Bytes
    optimizer: Bytes
    gathered: Bytes
    """Weights of all shards, for the time of a step or of a layer, and gradients on their way to them."""
    activations: Bytes
    """Of all micro-batches in flight, and their bfloat16 copies of the weights."""
    working: Bytes
    """What a pass takes on top."""
    update: Bytes
    """What the optimizer takes on top, when there are no activations."""
    codec: int
    buffers: Bytes
    """Messages that have come or have not yet gone."""
    workspace: int
    """What the libraries for matrix products reserve."""

    @property
    def total_bytes(self: "MemoryUse[int]") -> int:
        """At the fullest moment."""
        return self.standing_bytes + max(self.activations + self.working, self.update)

    @property
    def standing_bytes(self) -> Bytes:
        """What is there all the time."""
        state = self.weights + self.gradients + self.optimizer + self.gathered
        return state + self.codec + self.buffers + self.workspace


Memory: TypeAlias = MemoryUse[int]
"""Of one stage."""


def stage_memory(
    costs: ModelCosts,
    layers: range,
    *,
    window: int,
    savers: Savers | None = None,
    halves: Sequence[HalfCosts] = (),
    codec_bytes: int = 0,
    num_buffered: int = _NUM_BUFFERED,
) -> Memory:
    """The memory of a rank whose stage holds these layers and keeps `window` micro-batches in flight.

    `halves` are those of the bottlenecks at its cuts. `num_buffered` messages of a boundary wait to be
    computed or sent.
    """
    found = stages_memory(
        costs,
        Stages.one(layers, num_layers=costs.num_layers),
        window=window,
        savers=savers or Savers(),
        halves=[(half, np.array(True)) for half in halves],
        codec_bytes=codec_bytes,
        num_buffered=num_buffered,
    )
    return MemoryUse(**{one.name: int(getattr(found, one.name)) for one in fields(found)})


def stages_memory(
    costs: ModelCosts,
    stages: Stages,
    *,
    window: int,
    savers: Savers,
    halves: Sequence[PlacedHalf] = (),
    codec_bytes: int = 0,
    num_buffered: int = _NUM_BUFFERED,
) -> MemoryUse[Figures]:
    """The same for each of several stages."""
    arithmetic = costs.workload.arithmetic
    if savers.is_sharded != arithmetic.is_gathered:
        raise ValueError("a stage is shared out exactly where its weights are gathered")
    num_owned, num_trained = costs.num_owned(stages), costs.num_learned(stages)
    num_held, num_learning = (np.ceil(one / savers.num_shards) for one in (num_owned, num_trained))
    kept = _kept_bytes(costs, stages)
    own = MemoryUse(
        # Where ranks share, FSDP2 offloads the shares of the weights too.
        weights=(0 if savers.is_sharded and savers.offload_optimizer else WIDE_BYTES) * num_held,
        gradients=WIDE_BYTES * (num_trained if savers.sharding is Sharding.OPTIMIZER else num_learning),
        optimizer=_moment_bytes(costs, stages, savers, num_learning),
        gathered=_gathered_bytes(costs, stages, savers, num_owned),
        activations=window * kept,
        working=_peak_bytes(costs, stages) - kept,
        update=_update_bytes(costs, stages, savers, halves),
        codec=codec_bytes,
        buffers=given(~stages.are_whole, num_buffered * costs.boundary_bytes),
        workspace=_WORKSPACE_BYTES if arithmetic.on_accelerator else 0,
    )
    return _with_halves(own, halves, savers)


def _with_halves(own: MemoryUse[Figures], halves: Sequence[PlacedHalf], savers: Savers) -> MemoryUse[Figures]:
    """With what every rank has whole; where FSDP2 offloads a rank's share of the rest, it stays."""
    has_moments = savers.is_sharded or not savers.offload_optimizer
    for half, where in halves:
        num_trained = given(where, half.num_trained)
        own = replace(
            own,
            weights=own.weights + given(where, WIDE_BYTES * half.num_parameters + half.buffer_bytes),
            gradients=own.gradients + WIDE_BYTES * num_trained,
            # Most of them are anchors by token id, of which moments are float32 in any case.
            optimizer=own.optimizer + (2 * WIDE_BYTES if has_moments else 0) * num_trained,
        )
    return own


def _gathered_bytes(costs: ModelCosts, stages: Stages, savers: Savers, num_owned: Figures) -> Figures:
    element_bytes = costs.workload.arithmetic.element_bytes
    match savers.sharding:
        case Sharding.NONE:
            return np.zeros(())
        case Sharding.OPTIMIZER:
            return element_bytes * num_owned
        case Sharding.FULL:
            # A layer and the next, which is fetched ahead; a rank alone fetches nothing.
            largest = stages.largest(costs.each(lambda part: part.num_parameters))
            gathered = min(2, savers.num_shards) * element_bytes * largest
            if not costs.workload.recompute:
                return gathered
            # Gradients of the layer above are on their way to their owners; the highest, at which a pass is
            # fullest unless it recomputes, has none above.
            return gathered + WIDE_BYTES * stages.largest(
                [0, *(layer.num_trained for layer in costs.layers), 0]
            )


def _moment_bytes(costs: ModelCosts, stages: Stages, savers: Savers, num_learning: Figures) -> Figures:
    """Two moments of each number; those of embeddings are float32 in any case."""
    if savers.offload_optimizer:
        return np.zeros(())
    if savers.optimizer is OptimizerState.FLOAT32:
        return 2 * WIDE_BYTES * num_learning
    num_table = np.ceil(costs.embedding.num_trained / savers.num_shards)
    num_wide = np.minimum(num_learning, given(stages.are_first, num_table))
    return 2 * WIDE_BYTES * num_wide + np.rint(_SMALL_STATE_BYTES * (num_learning - num_wide))


def _kept_bytes(costs: ModelCosts, stages: Stages) -> Figures:
    """What one micro-batch in flight keeps at a stage; nothing where no backward follows."""
    own = stages.total(costs.each(lambda part: part.kept_bytes))
    arrived = _arrived_bytes(costs, stages)
    return np.where(_have_backward(costs, stages), np.maximum(0.0, own + arrived), 0.0)


def _peak_bytes(costs: ModelCosts, stages: Stages) -> Figures:
    """The most that one micro-batch takes at a stage, in its forward or its backward."""
    kept = costs.each(lambda part: part.kept_bytes)
    # A forward starts from what the parts before it keep.
    forward = costs.each(lambda part: part.forward_bytes - part.kept_bytes)
    peak = np.maximum(
        stages.peak(kept, costs.each(lambda part: part.backward_bytes)), stages.peak(kept, forward)
    )
    alone = stages.largest(costs.each(lambda part: part.forward_bytes))
    arrived = _arrived_bytes(costs, stages)
    return np.where(_have_backward(costs, stages), np.maximum(0.0, peak + arrived), alone + arrived)


def _arrived_bytes(costs: ModelCosts, stages: Stages) -> Figures:
    of_layers = np.array([*costs.arrival_bytes, 0.0], dtype=np.float64)
    return np.where(stages.are_first, 0.0, of_layers[stages.starts])


def _have_backward(costs: ModelCosts, stages: Stages) -> Mask:
    return np.asarray(stages.total(costs.each(lambda part: part.has_backward)) > 0)


def _update_bytes(costs: ModelCosts, stages: Stages, savers: Savers, halves: Sequence[PlacedHalf]) -> Figures:
    """Roots of the second moments, parameter by parameter; on an accelerator one kernel does it all."""
    is_fused = costs.workload.arithmetic.on_accelerator
    if is_fused or savers.offload_optimizer or savers.optimizer is OptimizerState.EIGHT_BIT:
        return np.zeros(())
    largest = stages.largest(costs.each(lambda part: part.largest_parameter))
    for half, where in halves:
        largest = np.where(where, np.maximum(largest, half.largest_parameter), largest)
    return 2 * WIDE_BYTES * largest
