"""What a backward pass needs of its forward pass, in bytes per token, operation by operation.

The residual stream and the norms are float32 in either precision. In bfloat16 each matrix product casts what
it reads, once per product, and keeps that instead; attention and feed-forward parts keep what they gave. What
two operations share is counted once. A product whose weights do not learn needs nothing of its input; an
adapter beside it does, and always has a copy of its own in bfloat16.

Where weights are gathered in bfloat16 the residual stream is too, and products read it as it is. Norms that
are formulas still compute in float32, on a copy.
"""

from collections.abc import Collection
from typing import Final

from isthmus.plan.costs.arithmetic import WIDE_BYTES, Arithmetic, Precision
from isthmus.plan.costs.families import Norm, Product, Rotary
from isthmus.plan.costs.learning import ALL, Adapters, Depth, Learning
from isthmus.plan.costs.shapes import Activation, ModelShape, Task

_READ_STREAM: Final = {Product.QUERY, Product.KEY, Product.VALUE, Product.QUERY_KEY_VALUE}
_READ_INNER: Final = {Product.GATE, Product.UP, Product.GATE_UP}


def layer_bytes_per_token(
    shape: ModelShape,
    arithmetic: Arithmetic,
    *,
    sequence_length: int,
    window: int | None,
    learning: Learning = ALL,
    depth: Depth = Depth.ABOVE,
) -> float:
    """What one layer keeps, its input included where that needs a gradient."""
    if depth is Depth.FROZEN:
        return 0.0
    attention = attention_bytes_per_token(
        shape, arithmetic, sequence_length=sequence_length, window=window, learning=learning
    )
    inner = _inner_bytes(shape, arithmetic, learning)
    dropouts = 2 * dropout_bytes(shape.residual_dropout, shape.width, arithmetic)
    kept = sum(_stream_bytes(shape, arithmetic, learning)) + attention + inner + dropouts
    if depth is Depth.LOWEST:
        kept -= _gradient_norm_bytes(shape, arithmetic, learning)
    return kept if learning.adapters is None else kept + _adapter_bytes(shape, arithmetic, learning.adapters)


def head_bytes_per_token(
    shape: ModelShape, arithmetic: Arithmetic, *, num_classes: int, learns: bool = True
) -> float:
    """What norm, head and loss keep: above all the logarithm of each class's probability, in float32."""
    scores = WIDE_BYTES * num_classes
    num_readers = 1 if learns else 0
    read = _read_bytes(shape.width, arithmetic, num_readers=num_readers)
    if not shape.family.is_encoder:
        return _norm_bytes(shape, arithmetic, learns=learns) + read + scores
    if shape.task is not Task.MASKED_LM:
        return read + scores
    between = read + shape.embedding_width * arithmetic.element_bytes
    return (
        between
        + _layer_norm_bytes(shape.embedding_width, arithmetic)
        + _read_bytes(shape.embedding_width, arithmetic, num_readers=num_readers)
        + scores
    )


def embedding_bytes_per_token(shape: ModelShape, arithmetic: Arithmetic) -> float:
    """What the embedding keeps beside the first layer's input."""
    width = shape.embedding_width
    ids = 8
    kept = ids + dropout_bytes(shape.embedding_dropout, width, arithmetic)
    if shape.family.is_encoder:
        kept += _layer_norm_bytes(width, arithmetic)
        kept += dropout_bytes(shape.residual_dropout, width, arithmetic)
        if width != shape.width:
            kept += _read_bytes(width, arithmetic)
    return kept


def is_attention_fused(shape: ModelShape, arithmetic: Arithmetic, *, has_mask: bool = False) -> bool:
    """Whether no matrix of scores is kept: not with dropout on a CPU, nor grouped heads in float32 on a GPU.

    A mask has each group's keys and values copied for all its queries, which ends the group.
    """
    if not arithmetic.on_accelerator:
        return not shape.attention_dropout
    is_narrow = arithmetic.precision is Precision.BFLOAT16
    return is_narrow or has_mask or shape.num_heads == shape.num_key_value_heads


def scores_bytes_per_token(
    shape: ModelShape,
    arithmetic: Arithmetic,
    *,
    sequence_length: int,
    window: int | None,
    learning: Learning = ALL,
) -> float:
    """What a backward pass holds in attention above what is kept by then, where the scores are a matrix.

    That is two gradients of it, when what the feed-forward part kept is gone; on accelerators softmax's
    backward also multiplies gradient and result into a third.
    """
    if is_attention_fused(shape, arithmetic, has_mask=_has_mask(sequence_length, window)):
        return 0.0
    num_matrices = 3 if arithmetic.on_accelerator else 2
    gradients = num_matrices * WIDE_BYTES * shape.num_heads * sequence_length
    return max(0.0, gradients - _inner_bytes(shape, arithmetic, learning))


def attention_bytes_per_token(
    shape: ModelShape,
    arithmetic: Arithmetic,
    *,
    sequence_length: int,
    window: int | None,
    learning: Learning = ALL,
) -> float:
    """Queries, keys, values and what comes of them, with their own norms."""
    element, wide = arithmetic.element_bytes, WIDE_BYTES
    queries = shape.num_heads * shape.head_width
    keys = shape.num_key_value_heads * shape.head_width
    beside = 0.0
    if shape.family.has_query_norm:
        beside = (queries + keys) * (wide + (element if learning.has_weights else 0))
        beside += wide * (shape.num_heads + shape.num_key_value_heads)
    has_mask = _has_mask(sequence_length, window)
    if not is_attention_fused(shape, arithmetic, has_mask=has_mask):
        # All is made in float32; with dropout its mask or factors and the product are kept as well.
        per_score = wide
        if shape.attention_dropout:
            per_score += wide + (1 if arithmetic.on_accelerator else wide)
        return beside + queries * (3 * wide + element) + per_score * shape.num_heads * sequence_length
    if has_mask:
        keys = queries
        beside += element * sequence_length
    kept = (queries + keys) * element
    if shape.family.rotary is Rotary.SPLIT:
        # Values are part of the joint product, all of which stays; the result is copied into order.
        kept += (queries + 2 * keys) * element + queries * element
    else:
        kept += keys * element
    return beside + kept + queries * element + wide * shape.num_heads


def _has_mask(sequence_length: int, window: int | None) -> bool:
    """Whether attention is given a mask: a window that no token outgrows needs none."""
    return window is not None and window <= sequence_length


def _stream_bytes(shape: ModelShape, arithmetic: Arithmetic, learning: Learning) -> tuple[float, ...]:
    """The residual stream at the two norms, and the norms' results as the products behind them read them."""
    width = shape.width
    reads = _read_bytes(width, arithmetic, num_readers=_num_readers(shape, learning, _READ_STREAM))
    inner_readers = _num_readers(shape, learning, _READ_INNER) + (1 if shape.num_experts else 0)
    inner_reads = _read_bytes(width, arithmetic, num_readers=inner_readers)
    first = _norm_bytes(shape, arithmetic, learns=learning.has_weights)
    second = first
    if shape.has_parallel_residual:
        second -= arithmetic.stream_bytes * width  # both norms read the layer's input
    return first, reads, second, inner_reads


def _num_readers(shape: ModelShape, learning: Learning, products: Collection[Product]) -> int:
    return learning.num_readers(*(one for one in shape.family.products if one in products))


def _norm_bytes(shape: ModelShape, arithmetic: Arithmetic, *, learns: bool) -> float:
    """Its input, its statistics, and for weights of a norm that is a formula the normalised input too."""
    if shape.family.norm is Norm.LAYER:
        return _layer_norm_bytes(shape.width, arithmetic)
    scaled_bytes = WIDE_BYTES if shape.family.norm is Norm.WIDE_RMS else arithmetic.stream_bytes
    return WIDE_BYTES * (shape.width + 1) + (scaled_bytes * shape.width if learns else 0)


def _layer_norm_bytes(width: int, arithmetic: Arithmetic) -> float:
    return arithmetic.stream_bytes * width + 2 * WIDE_BYTES


def _gradient_norm_bytes(shape: ModelShape, arithmetic: Arithmetic, learning: Learning) -> float:
    """What a layer's first norm keeps for the gradient of the layer's input alone."""
    if shape.family.is_encoder:
        return 0.0
    if learning.has_weights and shape.family.norm is Norm.LAYER:
        return 0.0
    return _norm_bytes(shape, arithmetic, learns=False)


def _adapter_bytes(shape: ModelShape, arithmetic: Arithmetic, adapters: Adapters) -> float:
    """What comes out of their first halves; and in bfloat16 a copy of attention's result."""
    kept = len(adapters.products) * adapters.rank * arithmetic.element_bytes
    if arithmetic.is_mixed and Product.OUT in adapters.products:
        kept += shape.num_heads * shape.head_width * arithmetic.element_bytes
    return kept


def _read_bytes(width: int, arithmetic: Arithmetic, *, num_readers: int = 1) -> float:
    """What products keep of what they read: itself, or each a copy of its own."""
    if arithmetic.is_mixed:
        return width * num_readers * arithmetic.element_bytes
    return width * arithmetic.stream_bytes if num_readers else 0.0


def _inner_bytes(shape: ModelShape, arithmetic: Arithmetic, learning: Learning) -> float:
    """The feed-forward part: before and behind the activation, and gate times up where gated."""
    width = shape.inner_width
    if shape.num_experts:
        return _expert_bytes(shape, arithmetic, learning)
    num_unread = 1 - learning.num_readers(Product.DOWN)
    if shape.activation is Activation.SPELLED_OUT:
        # Its power is taken in float32 on accelerators, and all that follows stays so.
        per_element = (
            16 if arithmetic.is_mixed and arithmetic.on_accelerator else 5 * arithmetic.element_bytes
        )
        return width * (per_element - num_unread * arithmetic.element_bytes)
    is_rectified = shape.activation is Activation.RECTIFIED
    num_kept = 1 if is_rectified else 2 - (0 if shape.family.is_gated else num_unread)
    if shape.family.is_gated:
        num_kept += 2 - num_unread
    return num_kept * width * arithmetic.element_bytes


def _expert_bytes(shape: ModelShape, arithmetic: Arithmetic, learning: Learning) -> float:
    """Experts work on copies of their tokens, as wide as their weights whatever the precision of the rest."""
    routing = WIDE_BYTES * (shape.num_experts + 1) + 36 * shape.num_active_experts
    widths = 2 * shape.width + 4 * shape.inner_width
    if not learning.has_weights:
        widths -= shape.width + shape.inner_width
    elements = shape.num_active_experts * widths
    return routing + arithmetic.stream_bytes * elements


def dropout_bytes(share: float, width: int, arithmetic: Arithmetic) -> float:
    """A mask of one byte per element on an accelerator, the factors themselves on a CPU."""
    if not share:
        return 0.0
    return width * (1 if arithmetic.on_accelerator else arithmetic.element_bytes)
