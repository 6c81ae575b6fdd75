"""What each part of a model costs: parameters, arithmetic, activations and what crosses a cut behind it.

A model is an embedding, its layers and a head with the loss; every figure is of one micro-batch on one rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from isthmus.plan.costs.activations import (
    embedding_bytes_per_token,
    head_bytes_per_token,
    layer_bytes_per_token,
)
from isthmus.plan.costs.arithmetic import WIDE_BYTES, Arithmetic
from isthmus.plan.costs.families import Norm, Product, Rotary
from isthmus.plan.costs.learning import ALL, Depth, Learning
from isthmus.plan.costs.shapes import ModelShape
from isthmus.plan.costs.stages import Figures, Stages, given
from isthmus.plan.costs.weights import (
    attention_matrices,
    head_matrices,
    inner_matrices,
    largest_up,
    num_head_vector_parameters,
    num_norm_parameters,
    num_vector_parameters,
)
from isthmus.plan.costs.working import layer_working_bytes, weight_gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One micro-batch, and how it is computed."""

    num_sequences: int
    sequence_length: int
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    recompute: bool = False

    @property
    def num_tokens(self) -> int:
        """All that are computed, padding included."""
        return self.num_sequences * self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """The costs of an embedding, a layer or a head.

    Live bytes are those of one micro-batch on its way through a stage, counted from what the parts before it
    keep: `forward_bytes` is the peak of the part's forward above that, `backward_bytes` the peak of its
    backward above that and what the part itself keeps.
    """

    num_parameters: int
    num_trained: int
    """The parameters that are trained, which have gradients and moments."""
    flops: float
    """Operations of a forward pass, in the precision of the computation."""
    float32_flops: float
    """Those that stay in float32 in any precision."""
    moved_bytes: float
    """Memory that a forward pass reads and writes outside of matrix products, where that takes the time."""
    kept_bytes: float
    """What stays for the backward pass, with the part's output in the place of its input."""
    forward_bytes: float = 0.0
    backward_bytes: float
    largest_parameter: int
    """Elements of the largest tensor that is trained."""
    backward_share: float = 2.0
    """Operations of a backward pass, as a share of the forward's: less where weights are not trained."""
    num_kernels: float = 0.0
    """Kernels of a forward pass; 0 where they are not known."""
    num_backward_kernels: float = 0.0

    @property
    def has_backward(self) -> bool:
        """Whether a gradient comes to it."""
        return self.backward_share > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """All parts of a model under one workload."""

    workload: Workload
    width: int
    embedding: PartCosts
    layers: tuple[PartCosts, ...]
    head: PartCosts
    num_tied_parameters: int
    """Parameters of the head that are the embedding's where one stage holds both."""
    num_embedding_parameters: int
    """Of the table of tokens, whose gradient is made whole."""
    arrival_bytes: tuple[float, ...]
    """What a stage that is not the first keeps of what arrives, and of masks and positions; by the number of
    its first layer."""

    @property
    def num_layers(self) -> int:
        """How many layers can be dealt out to stages."""
        return len(self.layers)

    @property
    def boundary_bytes(self) -> int:
        """The residual stream at a cut, of one micro-batch."""
        return self.workload.arithmetic.stream_bytes * self.width * self.workload.num_tokens

    def parts(self, layers: range) -> tuple[PartCosts, ...]:
        """The parts of the stage that holds these layers, in their order."""
        first = (self.embedding,) if layers.start == 0 else ()
        last = (self.head,) if layers.stop == self.num_layers else ()
        return (*first, *self.layers[layers.start : layers.stop], *last)

    def each(self, figure: Callable[[PartCosts], float]) -> list[float]:
        """A figure of each part, in their order."""
        return [figure(part) for part in self.parts(range(self.num_layers))]

    def num_parameters(self, layers: range) -> int:
        """The parameters of the stage that holds these layers."""
        return int(self.num_owned(Stages.one(layers, num_layers=self.num_layers)))

    def num_trained(self, layers: range) -> int:
        """Those of them that learn."""
        return int(self.num_learned(Stages.one(layers, num_layers=self.num_layers)))

    def num_owned(self, stages: Stages) -> Figures:
        """The parameters of stages; a cut unties embedding and head."""
        owned = stages.total(self.each(lambda part: part.num_parameters))
        return owned - given(stages.are_whole, self.num_tied_parameters)

    def num_learned(self, stages: Stages) -> Figures:
        """Those of them that learn; weights that are tied to a frozen embedding are frozen with it."""
        trained = stages.total(self.each(lambda part: part.num_trained))
        return trained - given(stages.are_whole, min(self.num_tied_parameters, self.head.num_trained))


def model_costs(shape: ModelShape, workload: Workload, learning: Learning = ALL) -> ModelCosts:
    """The costs of all parts of a model of which so much is trained, by formula."""
    kinds = [(window, learning.depth(layer)) for layer, window in enumerate(shape.attention_windows)]
    by_kind = {kind: _layer(shape, workload, learning, *kind) for kind in set(kinds)}
    table = shape.vocabulary_size * shape.embedding_width
    biases = shape.vocabulary_size * max(0, shape.family.num_score_biases - 1)
    shared_bytes = _shared_bytes(shape, workload)
    # Where a layer does not keep what it reads, what arrived stays beside it.
    num_streams = 1 if _keeps_input(shape, workload, learning) or workload.recompute else 2
    return ModelCosts(
        workload=workload,
        width=shape.width,
        embedding=_embedding(shape, workload, learns=learning.has_embedding, shared_bytes=shared_bytes),
        layers=tuple(by_kind[kind] for kind in kinds),
        # A head for classes is not in a checkpoint, so it learns beside adapters too.
        head=_head(shape, workload, learns=learning.has_weights or not shape.task.is_language_model),
        num_tied_parameters=table + biases if shape.is_tied else 0,
        num_embedding_parameters=table,
        arrival_bytes=(shared_bytes + num_streams * _stream_bytes(shape, workload),) * len(kinds),
    )


def _stream_bytes(shape: ModelShape, workload: Workload) -> int:
    return workload.arithmetic.stream_bytes * shape.width * workload.num_tokens


def _embedding(shape: ModelShape, workload: Workload, *, learns: bool, shared_bytes: int) -> PartCosts:
    width, num_tokens = shape.embedding_width, workload.num_tokens
    norm = 2 * width if shape.family.is_encoder else 0
    matrices = {"projection": width * shape.width} if width != shape.width else {}
    bias = shape.width if matrices else 0
    vectors = shape.vocabulary_size + shape.num_positions + shape.num_token_types
    num_parameters = vectors * width + norm + sum(matrices.values()) + bias
    arithmetic, stream_bytes = workload.arithmetic, _stream_bytes(shape, workload)
    kept_bytes = float(shared_bytes)
    if learns:
        kept_bytes += stream_bytes + round(num_tokens * embedding_bytes_per_token(shape, arithmetic))
        kept_bytes += _cast_bytes(matrices, arithmetic)
    # Its gradient is a whole table, when all that layers kept is gone.
    table_bytes = arithmetic.stream_bytes * shape.vocabulary_size * width
    return PartCosts(
        num_parameters=num_parameters,
        num_trained=num_parameters if learns else 0,
        flops=2.0 * num_tokens * sum(matrices.values()),
        float32_flops=0.0,
        moved_bytes=2.0 * WIDE_BYTES * width * num_tokens,
        kept_bytes=kept_bytes,
        forward_bytes=stream_bytes,
        backward_bytes=(table_bytes + stream_bytes - kept_bytes) if learns else 0.0,
        largest_parameter=shape.vocabulary_size * width if learns else 0,
        backward_share=2.0 if learns else 0.0,
    )


def _layer(
    shape: ModelShape, workload: Workload, learning: Learning, window: int | None, depth: Depth
) -> PartCosts:
    num_tokens, adapters = workload.num_tokens, learning.adapters
    attention, inner = attention_matrices(shape), inner_matrices(shape)
    router = shape.width * shape.num_experts
    num_weights = sum(attention.values()) + sum(inner.values()) + router + num_vector_parameters(shape)
    num_adapted = 0 if adapters is None else adapters.num_parameters(shape)
    num_learning = num_adapted if adapters else num_weights
    # Experts are multiplied in the type of their weights: in float32, unless these are gathered in bfloat16.
    are_wide = workload.arithmetic.is_mixed
    matrices = attention | ({"router": router} if shape.num_experts else inner)
    product_flops = 2.0 * num_tokens * sum(matrices.values())
    expert_flops = _expert_flops(shape, workload, inner)
    # Both sides of these products have a gradient, or learn.
    other_flops = 2.0 * num_tokens * num_adapted
    other_flops += 4.0 * num_tokens * shape.num_heads * shape.head_width * _span(shape, workload, window)
    num_trained = 0 if depth is Depth.FROZEN else num_learning
    copied = _cast_bytes(_copied(shape, matrices, num_adapted, depth), workload.arithmetic)
    kept_bytes = _layer_kept_bytes(shape, workload, learning, window, depth) + copied
    backward_bytes = layer_working_bytes(
        shape,
        workload.arithmetic,
        learning,
        num_tokens=num_tokens,
        sequence_length=workload.sequence_length,
        window=window,
    )
    if workload.arithmetic.stream_bytes < WIDE_BYTES:
        # Gradients that are narrower than their sums are added to them when a layer has all of its own.
        backward_bytes += workload.arithmetic.stream_bytes * num_trained
    forward_bytes = backward_bytes if depth is Depth.FROZEN else 0
    if workload.recompute and depth is not Depth.FROZEN:
        stream_bytes = _stream_bytes(shape, workload)
        kept_bytes, backward_bytes = stream_bytes, backward_bytes + kept_bytes - stream_bytes
    return PartCosts(
        num_parameters=num_weights + num_adapted,
        num_trained=num_trained,
        flops=product_flops + other_flops + (0.0 if are_wide else expert_flops),
        float32_flops=expert_flops if are_wide else 0.0,
        moved_bytes=0.0,
        kept_bytes=kept_bytes,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        largest_parameter=_largest_learning(shape, learning, depth),
        backward_share=_backward_share(product_flops + expert_flops, other_flops, learning, depth),
    )


def _cast_bytes(matrices: Mapping[str, int], arithmetic: Arithmetic) -> int:
    """Copies of the weights in bfloat16."""
    return 2 * sum(matrices.values()) if arithmetic.is_mixed else 0


def _expert_flops(shape: ModelShape, workload: Workload, inner: Mapping[str, int]) -> float:
    if not shape.num_experts:
        return 0.0
    share = shape.num_active_experts / shape.num_experts
    return 2.0 * workload.num_tokens * share * sum(inner.values())


def _backward_share(product_flops: float, other_flops: float, learning: Learning, depth: Depth) -> float:
    """Two products for each of the forward pass: for its input, and for its weights if they learn."""
    if depth is Depth.FROZEN:
        return 0.0
    num_each = 2.0 if learning.has_weights else 1.0
    return (num_each * product_flops + 2.0 * other_flops) / (product_flops + other_flops)


def _copied(shape: ModelShape, matrices: Mapping[str, int], num_adapted: int, depth: Depth) -> dict[str, int]:
    """The weights of which a backward pass needs a copy: where an input has a gradient, or in adapters."""
    if depth is Depth.FROZEN:
        return {}
    # In the lowest layer the first products have one if a norm before them learns.
    is_first_needed = depth is Depth.ABOVE or not (num_adapted or shape.family.is_encoder)
    needed = {name: size for name, size in matrices.items() if is_first_needed or name != "qkv"}
    return needed | ({"adapters": num_adapted} if num_adapted else {})


def _keeps_input(shape: ModelShape, workload: Workload, learning: Learning) -> bool:
    """Norms before a part keep what they read, or a wider copy; encoders have none there, only products."""
    arithmetic = workload.arithmetic
    if not shape.family.is_encoder:
        return shape.family.norm is Norm.LAYER or arithmetic.stream_bytes == WIDE_BYTES
    reads = learning.num_readers(Product.QUERY, Product.KEY, Product.VALUE)
    return reads > 0 and not arithmetic.is_mixed


def _layer_kept_bytes(
    shape: ModelShape, workload: Workload, learning: Learning, window: int | None, depth: Depth
) -> int:
    kept = layer_bytes_per_token(
        shape,
        workload.arithmetic,
        sequence_length=workload.sequence_length,
        window=window,
        learning=learning,
        depth=depth,
    )
    return round(workload.num_tokens * kept)


def _largest_learning(shape: ModelShape, learning: Learning, depth: Depth) -> int:
    if depth is Depth.FROZEN:
        return 0
    if learning.adapters is not None:
        return learning.adapters.largest_parameter(shape)
    attention, inner = attention_matrices(shape), inner_matrices(shape)
    return max(largest_up(shape), inner["down"], attention["out"])


def _head(shape: ModelShape, workload: Workload, *, learns: bool) -> PartCosts:
    num_tokens, arithmetic = workload.num_tokens, workload.arithmetic
    num_classes = shape.vocabulary_size if shape.task.is_language_model else shape.num_labels
    matrices = head_matrices(shape, num_classes)
    scores_bytes = WIDE_BYTES * num_classes * num_tokens
    norm = 0 if shape.family.is_encoder else num_norm_parameters(shape)
    # The gradient of the loss and that of the scores, beside the probabilities; or, these gone, the weights'.
    gradient = arithmetic.element_bytes * num_classes * num_tokens
    gradient += (weight_gradient_bytes(matrices["scores"], arithmetic) if learns else 0) - scores_bytes
    num_parameters = norm + sum(matrices.values()) + num_head_vector_parameters(shape, num_classes)
    kept = head_bytes_per_token(shape, arithmetic, num_classes=num_classes, learns=learns)
    return PartCosts(
        num_parameters=num_parameters,
        num_trained=num_parameters if learns else 0,
        flops=2.0 * num_tokens * sum(matrices.values()),
        float32_flops=0.0,
        moved_bytes=4.0 * scores_bytes,
        kept_bytes=round(num_tokens * kept)
        + _cast_bytes(matrices, arithmetic)
        - _stream_bytes(shape, workload),
        backward_bytes=max(2 * scores_bytes, gradient),
        largest_parameter=matrices["scores"] if learns else 0,
        backward_share=2.0 if learns else 1.0,
    )


def _span(shape: ModelShape, workload: Workload, window: int | None) -> float:
    """How many tokens each attends to, on average: those before it, or all."""
    length = workload.sequence_length
    if shape.family.is_encoder:
        return float(length)
    reach = length if window is None else min(length, window)
    return reach - reach * (reach - 1) / (2 * length)


def _shared_bytes(shape: ModelShape, workload: Workload) -> int:
    if shape.family.rotary is Rotary.NONE:
        return 0
    return 2 * workload.arithmetic.stream_bytes * workload.sequence_length * shape.rotary_width
