"""How much memory a rank of a stage needs at its fullest moment, part by part.

That moment is either the start of a backward pass, when all micro-batches of the window are kept and
gradients begin to flow, or the update of the weights, when none is. The halves of a bottleneck are float32
and whole on every rank, however the ranks share the rest of their stage.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np

from isthmus.job.codec import BottleneckSpec
from isthmus.job.codec_steps import Anchor
from isthmus.plan.costs import WIDE_BYTES, Figures, Mask, ModelCosts, PartSize, Stages, given

# As the model has them; a test holds them to it.
_MAX_ENTRIES: Final = 2**24
_MIN_OBSERVED_IDS: Final = 8192
_ROW_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The bottleneck of a link; hidden states of full width cross until it begins."""

    num_warmup_steps: int
    hidden_width: int
    down: PartSize
    """The half of the sending stage."""
    up: PartSize
    """The half of the receiving stage."""


def bottleneck_costs(spec: BottleneckSpec, *, width: int, vocabulary_size: int) -> Bottleneck:
    """A bottleneck between stages of a model of this width and vocabulary."""
    projection, anchors = spec.rank * width, _anchors(spec, width, vocabulary_size)
    num_anchors = sum(anchors)
    # The factor that scales rows by token id.
    unit_bytes = WIDE_BYTES if spec.anchor is Anchor.TOKENS else 0
    return Bottleneck(
        num_warmup_steps=spec.num_warmup_steps,
        hidden_width=width,
        # The sender's anchors are not trained.
        down=PartSize(
            num_parameters=projection + num_anchors,
            num_trained=projection,
            largest_trained=projection,
            buffer_bytes=unit_bytes + _observed_bytes(spec, width, vocabulary_size),
        ),
        up=PartSize(
            num_parameters=projection + num_anchors,
            num_trained=projection + num_anchors,
            largest_trained=max(projection, *anchors),
            buffer_bytes=unit_bytes,
        ),
    )


def _anchors(spec: BottleneckSpec, width: int, vocabulary_size: int) -> tuple[int, ...]:
    """The elements of each tensor of anchors, of which both ends have the same."""
    if spec.anchor is Anchor.NONE:
        return (width,)
    if vocabulary_size * width <= _MAX_ENTRIES:
        return width, vocabulary_size * width
    code_width = max(1, min(width // 2, max(2 * spec.rank, _MAX_ENTRIES // vocabulary_size)))
    return width, vocabulary_size * code_width, code_width * width


def _observed_bytes(spec: BottleneckSpec, width: int, vocabulary_size: int) -> int:
    """Sums of the warm-up, which stay: of all hidden states, of their scatter, and by token id."""
    whole = WIDE_BYTES * (width * width + width + 3)
    if spec.anchor is Anchor.NONE:
        return whole
    num_rows = min(vocabulary_size, max(_MIN_OBSERVED_IDS, _MAX_ENTRIES // width))
    return whole + WIDE_BYTES * (num_rows + 1) * (width + 2) + _ROW_NUMBER_BYTES * vocabulary_size


# cuBLAS takes 32 MiB for each thread that multiplies on a Hopper GPU; forward and backward have their own.
_WORKSPACE_BYTES: Final = 2 * 32 * 2**20
# One byte for each of two moments, and a float32 scale for every 256 of them.
_SMALL_STATE_BYTES: Final = 2 * (1 + WIDE_BYTES / 256)
_NUM_BUFFERED: Final = 2

Bytes = TypeVar("Bytes", int, Figures)
PlacedHalf: TypeAlias = tuple[PartSize, Mask]
"""Half of a bottleneck, and the stages that have it."""


class OptimizerState(enum.Enum):
    """What AdamW remembers of each parameter."""

    FLOAT32 = "float32"
    EIGHT_BIT = "8-bit"


class Sharding(enum.StrEnum):
    """What of a stage is sharded over the ranks of its cloud, and for how long."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    """Weights are gathered once a step and gradients reduced once, so ranks hold both whole in between."""
    FULL = "full"
    """Each layer is gathered when it runs, and reduced when it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Memory options of one stage; recomputing is part of the workload.

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
    """What all micro-batches in flight keep, with their bfloat16 copies of the weights."""
    working: Bytes
    """What a pass takes on top."""
    update: Bytes
    """What the optimizer takes on top, when there are no activations."""
    codec: int
    buffers: Bytes
    """Messages that have arrived or wait to be sent."""
    workspace: int
    """What the libraries for matrix products reserve."""

    @property
    def total_bytes(self: "MemoryUse[int]") -> int:
        """The bytes at the fullest moment."""
        return self.standing_bytes + max(self.activations + self.working, self.update)

    def num_fitting(self: "MemoryUse[Figures]", room_bytes: float) -> Figures:
        """With one micro-batch in flight here, how many fit into the room; 0 where layers are too much."""
        left = room_bytes - self.standing_bytes
        fitting = np.floor((left - self.working) / np.maximum(1.0, self.activations))
        return np.where(self.update <= left, np.maximum(fitting, 0.0), 0.0)

    def least_bytes(self: "MemoryUse[Figures]") -> Figures:
        """What a rank needs for one micro-batch in flight, where this has one."""
        return self.standing_bytes + np.maximum(np.maximum(1.0, self.activations) + self.working, self.update)

    @property
    def standing_bytes(self) -> Bytes:
        """What is there all the time."""
        state = self.weights + self.gradients + self.optimizer + self.gathered
        return state + self.codec + self.buffers + self.workspace


Memory: TypeAlias = MemoryUse[int]
"""The memory of one stage."""


def stage_memory(
    costs: ModelCosts,
    layers: range,
    *,
    window: int,
    options: StageOptions | None = None,
    halves: Sequence[PartSize] = (),
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
        options=options or StageOptions(),
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
    options: StageOptions,
    halves: Sequence[PlacedHalf] = (),
    codec_bytes: int = 0,
    num_buffered: int = _NUM_BUFFERED,
) -> MemoryUse[Figures]:
    """The memory of a rank of each of several stages."""
    arithmetic = costs.workload.arithmetic
    if options.is_sharded != arithmetic.is_gathered:
        raise ValueError("a stage is sharded exactly where its weights are gathered")
    num_owned, num_trained = costs.num_owned(stages), costs.num_learned(stages)
    num_held, num_learning = (np.ceil(one / options.num_shards) for one in (num_owned, num_trained))
    kept = _kept_bytes(costs, stages)
    own = MemoryUse(
        # Where ranks share, FSDP2 offloads the shares of the weights too.
        weights=(0 if options.is_sharded and options.offload_optimizer else WIDE_BYTES) * num_held,
        gradients=WIDE_BYTES * (num_trained if options.sharding is Sharding.OPTIMIZER else num_learning),
        optimizer=_moment_bytes(costs, stages, options, num_learning),
        gathered=_gathered_bytes(costs, stages, options, num_owned),
        activations=window * kept,
        working=_peak_bytes(costs, stages) - kept,
        update=_update_bytes(costs, stages, options, halves),
        codec=codec_bytes,
        buffers=given(~stages.are_whole, num_buffered * costs.boundary_bytes),
        workspace=_WORKSPACE_BYTES if arithmetic.on_accelerator else 0,
    )
    return _with_halves(own, halves, options)


def _with_halves(
    own: MemoryUse[Figures], halves: Sequence[PlacedHalf], options: StageOptions
) -> MemoryUse[Figures]:
    """Adds the halves, which every rank has whole; FSDP2 does not offload them."""
    has_moments = options.is_sharded or not options.offload_optimizer
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


def _gathered_bytes(costs: ModelCosts, stages: Stages, options: StageOptions, num_owned: Figures) -> Figures:
    """Gathered weights, and where layers are gathered one by one what that adds to the peak of a pass."""
    element_bytes = costs.workload.arithmetic.element_bytes
    match options.sharding:
        case Sharding.NONE:
            return np.zeros(())
        case Sharding.OPTIMIZER:
            return element_bytes * num_owned
        case Sharding.FULL:
            # Embedding and head are gathered as one for the whole of a pass.
            ends = num_owned - stages.total([0, *(layer.num_parameters for layer in costs.layers), 0])
            peak = _sharded_peak_bytes(costs, stages, num_shards=options.num_shards)
            whole = _peak_bytes(costs, stages)
            # A stage without layers has no peak.
            added = np.subtract(peak, whole, out=np.zeros(peak.shape), where=stages.starts < stages.stops)
            return element_bytes * ends + np.maximum(0.0, added)


def _moment_bytes(costs: ModelCosts, stages: Stages, options: StageOptions, num_learning: Figures) -> Figures:
    """Two moments of each number; those of embeddings are float32 in any case."""
    if options.offload_optimizer:
        return np.zeros(())
    if options.optimizer is OptimizerState.FLOAT32:
        return 2 * WIDE_BYTES * num_learning
    num_table = np.ceil(costs.embedding.num_trained / options.num_shards)
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


def _sharded_peak_bytes(costs: ModelCosts, stages: Stages, *, num_shards: int) -> Figures:
    """The same where each layer is gathered when it runs, with the gradients that wait to be reduced.

    The layer that runs next is gathered ahead, unless a rank is alone. A layer's gradients stay until its
    backward has ended and are then copied to be reduced, while the backward of the layer below runs; those of
    the head wait for the end of the pass.
    """
    element_bytes = costs.workload.arithmetic.element_bytes
    own = np.array(
        [0.0, *(element_bytes * layer.num_parameters for layer in costs.layers), 0], dtype=np.float64
    )
    trained = np.array([0.0, *(layer.num_trained for layer in costs.layers), 0], dtype=np.float64)
    largest = np.array([0.0, *(layer.largest_parameter for layer in costs.layers), 0], dtype=np.float64)
    ahead = float(num_shards > 1)
    kept = np.array(costs.each(lambda part: part.kept_bytes))
    forward = own + ahead * np.append(own[1:], 0) + costs.each(lambda part: part.forward_bytes)
    gathered = own + ahead * np.append(0, own[:-1])
    backward = gathered + element_bytes * largest + costs.each(lambda part: part.backward_bytes)
    # Gradients in bfloat16 are made float32 before they are copied.
    num_wide = 1 if element_bytes == WIDE_BYTES else 2
    copied = gathered + (element_bytes + num_wide * WIDE_BYTES) * trained - kept
    from_above = WIDE_BYTES * np.append(trained[1:], 0)
    without_top = replace(stages, stops=stages.stops - 1)
    in_layers = np.maximum(
        stages.peak(kept, [*np.maximum(backward, copied)[:-1], -np.inf]),
        without_top.peak(kept, backward + from_above),
    ) + given(stages.are_last, element_bytes * costs.head.num_trained)
    peak = np.maximum(in_layers, np.maximum(stages.peak(kept, backward), stages.peak(kept, forward - kept)))
    arrived = _arrived_bytes(costs, stages)
    has_backward = _have_backward(costs, stages)
    return np.where(has_backward, np.maximum(0.0, peak + arrived), stages.largest(forward) + arrived)


def _arrived_bytes(costs: ModelCosts, stages: Stages) -> Figures:
    of_layers = np.array([*costs.arrival_bytes, 0.0], dtype=np.float64)
    return np.where(stages.are_first, 0.0, of_layers[stages.starts])


def _have_backward(costs: ModelCosts, stages: Stages) -> Mask:
    return np.asarray(stages.total(costs.each(lambda part: part.has_backward)) > 0)


def _update_bytes(
    costs: ModelCosts, stages: Stages, options: StageOptions, halves: Sequence[PlacedHalf]
) -> Figures:
    """Roots of the second moments, parameter by parameter; on an accelerator one kernel does it all."""
    is_fused = costs.workload.arithmetic.on_accelerator
    if is_fused or options.offload_optimizer or options.optimizer is OptimizerState.EIGHT_BIT:
        return np.zeros(())
    largest = stages.largest(costs.each(lambda part: part.largest_parameter))
    for half, where in halves:
        largest = np.where(where, np.maximum(largest, half.largest_trained), largest)
    return 2 * WIDE_BYTES * largest
