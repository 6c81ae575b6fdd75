"""What each part of a model costs: parameters, arithmetic, activations and what crosses a cut behind it.

A model is an embedding, its layers and a head with the loss; every figure is of one micro-batch on one rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.plan.activations import (
    WIDE_BYTES,
    Arithmetic,
    embedding_bytes_per_token,
    head_bytes_per_token,
    layer_bytes_per_token,
    scores_bytes_per_token,
)
from isthmus.plan.families import Norm, Rotary
from isthmus.plan.shapes import ModelShape, Task


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
    """The costs of an embedding, a layer or a head; a backward pass takes twice the forward's operations."""

    num_parameters: int
    matrices: Mapping[str, int]
    """The parameters that are multiplied with, by product; in bfloat16 each has a copy."""
    flops: float
    """Operations of a forward pass, in the precision of the computation."""
    float32_flops: float
    """Those that stay in float32 in any precision."""
    moved_bytes: float
    """Memory that a forward pass reads and writes outside of matrix products, where that takes the time."""
    kept_bytes: int
    """What a backward pass needs, as if nothing were recomputed."""
    working_bytes: int
    """The most that a backward pass holds on top of what is kept."""
    largest_parameter: int
    """Elements of the largest tensor of weights."""

    @property
    def cast_bytes(self) -> int:
        """Copies of the weights in bfloat16."""
        return 2 * sum(self.matrices.values())


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
    keeps_stream: bool
    """Whether a layer's input is among what it keeps, and not only copies of it."""
    shared_bytes: int
    """What the layers of a stage keep together for a micro-batch: the rotary tables."""

    @property
    def num_layers(self) -> int:
        """How many layers can be dealt out to stages."""
        return len(self.layers)

    @property
    def boundary_bytes(self) -> int:
        """What crosses a cut each way, uncoded: the residual stream, float32 in any precision."""
        return WIDE_BYTES * self.width * self.workload.num_tokens

    def parts(self, layers: range) -> tuple[PartCosts, ...]:
        """The parts of the stage that holds these layers, in their order."""
        first = (self.embedding,) if layers.start == 0 else ()
        last = (self.head,) if layers.stop == self.num_layers else ()
        return (*first, *(self.layers[layer] for layer in layers), *last)

    def num_parameters(self, layers: range) -> int:
        """The parameters of the stage that holds these layers; a cut unties embedding and head."""
        owned = sum(part.num_parameters for part in self.parts(layers))
        return owned - self.num_tied_parameters if len(layers) == self.num_layers else owned


def model_costs(shape: ModelShape, workload: Workload) -> ModelCosts:
    """The costs of all parts of a model."""
    by_window = {window: _layer(shape, workload, window) for window in set(shape.attention_windows)}
    table = shape.vocabulary_size * shape.embedding_width
    biases = shape.vocabulary_size * max(0, shape.family.num_score_biases - 1)
    return ModelCosts(
        workload=workload,
        width=shape.width,
        embedding=_embedding(shape, workload),
        layers=tuple(by_window[window] for window in shape.attention_windows),
        head=_head(shape, workload),
        num_tied_parameters=table + biases if shape.is_tied else 0,
        num_embedding_parameters=table,
        keeps_stream=not (shape.family.is_encoder and workload.arithmetic.is_mixed),
        shared_bytes=_shared_bytes(shape, workload),
    )


def _embedding(shape: ModelShape, workload: Workload) -> PartCosts:
    width, num_tokens = shape.embedding_width, workload.num_tokens
    norm = 2 * width if shape.family.is_encoder else 0
    matrices = {"projection": width * shape.width} if width != shape.width else {}
    bias = shape.width if matrices else 0
    vectors = shape.vocabulary_size + shape.num_positions + shape.num_token_types
    return PartCosts(
        num_parameters=vectors * width + norm + sum(matrices.values()) + bias,
        matrices=matrices,
        flops=2.0 * num_tokens * sum(matrices.values()),
        float32_flops=0.0,
        moved_bytes=2.0 * WIDE_BYTES * width * num_tokens,
        kept_bytes=round(num_tokens * embedding_bytes_per_token(shape, workload.arithmetic)),
        working_bytes=WIDE_BYTES * num_tokens * shape.width,
        largest_parameter=shape.vocabulary_size * width,
    )


def _layer(shape: ModelShape, workload: Workload, window: int | None) -> PartCosts:
    num_tokens = workload.num_tokens
    attention, inner = _attention_matrices(shape), _inner_matrices(shape)
    flops = 2.0 * num_tokens * sum(attention.values())
    flops += 4.0 * num_tokens * shape.num_heads * shape.head_width * _span(shape, workload, window)
    router = shape.width * shape.num_experts
    expert_flops = 0.0
    if shape.num_experts:
        share = shape.num_active_experts / shape.num_experts
        expert_flops = 2.0 * num_tokens * share * sum(inner.values())
        flops += 2.0 * num_tokens * router
    else:
        flops += 2.0 * num_tokens * sum(inner.values())
    kept = layer_bytes_per_token(
        shape, workload.arithmetic, sequence_length=workload.sequence_length, window=window
    )
    scores = scores_bytes_per_token(
        shape, workload.arithmetic, sequence_length=workload.sequence_length, window=window
    )
    return PartCosts(
        num_parameters=sum(attention.values()) + sum(inner.values()) + router + _layer_vectors(shape),
        # Experts are multiplied in float32, so they have no copies.
        matrices=attention | ({"router": router} if shape.num_experts else inner),
        flops=flops,
        float32_flops=expert_flops,
        moved_bytes=0.0,
        kept_bytes=round(num_tokens * kept),
        working_bytes=max(_layer_working_bytes(shape, workload, inner), round(num_tokens * scores)),
        largest_parameter=max(_largest_up(shape, inner), inner["down"], attention["out"]),
    )


def _head(shape: ModelShape, workload: Workload) -> PartCosts:
    num_tokens, arithmetic = workload.num_tokens, workload.arithmetic
    num_classes = shape.vocabulary_size if shape.task.is_language_model else shape.num_labels
    matrices = _head_matrices(shape, num_classes)
    scores_bytes = WIDE_BYTES * num_classes * num_tokens
    norm = 0 if shape.family.is_encoder else _norm_parameters(shape)
    # The gradient of the loss and that of the scores, beside the probabilities; or, these gone, the weights'.
    gradient = arithmetic.element_bytes * num_classes * num_tokens
    gradient += _gradient_bytes(matrices["scores"], arithmetic) - scores_bytes
    return PartCosts(
        num_parameters=norm + sum(matrices.values()) + _head_vectors(shape, num_classes),
        matrices=matrices,
        flops=2.0 * num_tokens * sum(matrices.values()),
        float32_flops=0.0,
        moved_bytes=4.0 * scores_bytes,
        kept_bytes=round(num_tokens * head_bytes_per_token(shape, arithmetic, num_classes=num_classes)),
        working_bytes=max(2 * scores_bytes, gradient),
        largest_parameter=matrices["scores"],
    )


def _attention_matrices(shape: ModelShape) -> dict[str, int]:
    queries = shape.num_heads * shape.head_width
    keys = shape.num_key_value_heads * shape.head_width
    return {"qkv": shape.width * (queries + 2 * keys), "out": queries * shape.width}


def _inner_matrices(shape: ModelShape) -> dict[str, int]:
    one = max(1, shape.num_experts) * shape.width * shape.inner_width
    return {"up": 2 * one if shape.family.is_gated else one, "down": one}


def _layer_vectors(shape: ModelShape) -> int:
    """Norms and biases of a layer."""
    queries = shape.num_heads * shape.head_width
    keys = shape.num_key_value_heads * shape.head_width
    num_ups = 2 if shape.family.is_gated else 1
    return (
        2 * _norm_parameters(shape)
        + (2 * shape.head_width if shape.family.has_query_norm else 0)
        + (queries + 2 * keys if shape.has_qkv_bias else 0)
        + (shape.width if shape.has_out_bias else 0)
        + (num_ups * shape.inner_width + shape.width if shape.has_mlp_bias else 0)
    )


def _norm_parameters(shape: ModelShape) -> int:
    return 2 * shape.width if shape.family.norm is Norm.LAYER else shape.width


def _head_matrices(shape: ModelShape, num_classes: int) -> dict[str, int]:
    """Encoders have a product before that of the scores, but for one class per token or place."""
    if not shape.family.is_encoder or shape.task in (Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING):
        return {"scores": shape.width * num_classes}
    middle = shape.embedding_width if shape.task is Task.MASKED_LM else shape.width
    return {"transform": shape.width * middle, "scores": middle * num_classes}


def _head_vectors(shape: ModelShape, num_classes: int) -> int:
    if not shape.family.is_encoder:
        has_bias = shape.task in (Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING)
        return num_classes if has_bias else 0
    if shape.task is Task.MASKED_LM:
        return 3 * shape.embedding_width + shape.family.num_score_biases * num_classes
    return num_classes + (shape.width if shape.task is Task.SEQUENCE_CLASSIFICATION else 0)


def _span(shape: ModelShape, workload: Workload, window: int | None) -> float:
    """How many tokens each attends to, on average: those before it, or all."""
    length = workload.sequence_length
    if shape.family.is_encoder:
        return float(length)
    reach = length if window is None else min(length, window)
    return reach - reach * (reach - 1) / (2 * length)


def _layer_working_bytes(shape: ModelShape, workload: Workload, inner: Mapping[str, int]) -> int:
    """Gradients on their way through the feed-forward part, where a layer's backward pass begins."""
    arithmetic, num_tokens = workload.arithmetic, workload.num_tokens
    element, num_rows = arithmetic.element_bytes, num_tokens
    if shape.num_experts:
        element, num_rows = WIDE_BYTES, num_tokens * shape.num_active_experts
        arithmetic = Arithmetic(on_accelerator=arithmetic.on_accelerator)
    rows = num_rows * shape.inner_width * element
    num_held = 2 if shape.family.is_gated else 1
    at_down = rows + _gradient_bytes(inner["down"], arithmetic)
    # By then all that was kept of the activation is gone, which is twice what its gradients take.
    at_up = _gradient_bytes(_largest_up(shape, inner), arithmetic) - num_held * rows
    stream = num_tokens * shape.width * (WIDE_BYTES + (element if element < WIDE_BYTES else 0))
    return round(stream + max(at_down, num_held * rows, at_up))


def _largest_up(shape: ModelShape, inner: Mapping[str, int]) -> int:
    is_joint = shape.family.has_joint_projections or shape.num_experts or not shape.family.is_gated
    return inner["up"] if is_joint else inner["up"] // 2


def _gradient_bytes(num_weights: int, arithmetic: Arithmetic) -> int:
    """A product's new gradient of its weights, before it is added; in bfloat16 beside its wider copy."""
    return num_weights * (WIDE_BYTES + (arithmetic.element_bytes if arithmetic.is_mixed else 0))


def _shared_bytes(shape: ModelShape, workload: Workload) -> int:
    if shape.family.rotary is Rotary.NONE:
        return 0
    return 2 * WIDE_BYTES * workload.sequence_length * shape.rotary_width
