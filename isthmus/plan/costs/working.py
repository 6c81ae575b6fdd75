"""The most that a backward pass holds on top of what is kept, in bytes: gradients on their way."""

from dataclasses import replace

from isthmus.plan.costs.activations import (
    dropout_bytes,
    scores_bytes_per_token,
)
from isthmus.plan.costs.arithmetic import WIDE_BYTES, Arithmetic, Precision
from isthmus.plan.costs.families import Product
from isthmus.plan.costs.learning import Learning
from isthmus.plan.costs.shapes import Activation, ModelShape
from isthmus.plan.costs.weights import inner_matrices, largest_up


def layer_working_bytes(
    shape: ModelShape,
    arithmetic: Arithmetic,
    learning: Learning,
    *,
    num_tokens: int,
    sequence_length: int,
    window: int | None,
) -> int:
    """Of one layer: in its feed-forward part, where its backward pass begins, or in attention's scores."""
    scores = scores_bytes_per_token(
        shape, arithmetic, sequence_length=sequence_length, window=window, learning=learning
    )
    return max(_inner_bytes(shape, arithmetic, learning, num_tokens), round(num_tokens * scores))


def weight_gradient_bytes(num_weights: int, arithmetic: Arithmetic) -> int:
    """A product's new gradient of its weights, before it is added; in bfloat16 beside its wider copy."""
    return num_weights * _gradient_bytes(arithmetic)


def _gradient_bytes(arithmetic: Arithmetic) -> int:
    """Of an element of a gradient that a product has made: as wide as what it is of, beside what it made."""
    return arithmetic.stream_bytes + (arithmetic.element_bytes if arithmetic.is_mixed else 0)


def _inner_bytes(shape: ModelShape, arithmetic: Arithmetic, learning: Learning, num_tokens: int) -> int:
    element, num_rows = arithmetic.element_bytes, num_tokens
    if shape.num_experts:
        element, num_rows = arithmetic.stream_bytes, num_tokens * shape.num_active_experts
        if arithmetic.is_mixed:
            arithmetic = replace(arithmetic, precision=Precision.FLOAT32)
    rows = num_rows * shape.inner_width * element
    num_held = 2 if shape.family.is_gated else 1
    stream = num_tokens * shape.width * _gradient_bytes(arithmetic)
    mask = num_tokens * dropout_bytes(shape.residual_dropout, shape.width, arithmetic)
    at_activation = _activation_bytes(shape, arithmetic, rows) - mask
    if not learning.has_weights:
        # An adapter's gradient of its input, the product's own, and their sum, when that input is gone; in
        # bfloat16 the first is cast to float32 and back.
        num_sums = (4 if arithmetic.is_mixed else 2) if learning.num_readers(Product.DOWN) else 0
        at_sum = num_sums * rows - (0 if arithmetic.is_mixed else mask)
        return round(stream + max(num_held * rows, at_activation, at_sum))
    dropped = num_tokens * shape.width * element if shape.residual_dropout else 0
    at_down = rows + weight_gradient_bytes(inner_matrices(shape)["down"], arithmetic) + dropped - mask
    # By then all that was kept of the activation is gone, which is twice what its gradients take.
    at_up = weight_gradient_bytes(largest_up(shape), arithmetic) - num_held * rows
    return round(stream + max(at_down, num_held * rows, at_activation, at_up))


def _activation_bytes(shape: ModelShape, arithmetic: Arithmetic, rows: float) -> float:
    """Of an activation that is several operations: the gradients of its last product's both sides."""
    if shape.activation is not Activation.SPELLED_OUT:
        return 0.0
    if not (arithmetic.is_mixed and arithmetic.on_accelerator):
        return 2 * rows
    # All three are float32, and the narrow copies that the product behind it read are gone.
    wide_rows = rows * WIDE_BYTES / arithmetic.element_bytes
    return 3 * wide_rows - arithmetic.element_bytes * inner_matrices(shape)["down"]
