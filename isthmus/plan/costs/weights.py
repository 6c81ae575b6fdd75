"""The parameters of a model's parts, counted by product; vectors are norms and biases."""

from isthmus.plan.costs.families import Norm
from isthmus.plan.costs.shapes import ModelShape, Task


def attention_matrices(shape: ModelShape) -> dict[str, int]:
    """Those of a layer's attention."""
    queries = shape.num_heads * shape.head_width
    keys = shape.num_key_value_heads * shape.head_width
    return {"qkv": shape.width * (queries + 2 * keys), "out": queries * shape.width}


def inner_matrices(shape: ModelShape) -> dict[str, int]:
    """Those of a layer's feed-forward part, of all its experts where it has some."""
    one = max(1, shape.num_experts) * shape.width * shape.inner_width
    return {"up": 2 * one if shape.family.is_gated else one, "down": one}


def num_vector_parameters(shape: ModelShape) -> int:
    """Norms and biases of a layer."""
    queries = shape.num_heads * shape.head_width
    keys = shape.num_key_value_heads * shape.head_width
    num_ups = 2 if shape.family.is_gated else 1
    return (
        2 * num_norm_parameters(shape)
        + (2 * shape.head_width if shape.family.has_query_norm else 0)
        + (queries + 2 * keys if shape.has_qkv_bias else 0)
        + (shape.width if shape.has_out_bias else 0)
        + (num_ups * shape.inner_width + shape.width if shape.has_mlp_bias else 0)
    )


def num_norm_parameters(shape: ModelShape) -> int:
    """Of one norm."""
    return 2 * shape.width if shape.family.norm is Norm.LAYER else shape.width


def head_matrices(shape: ModelShape, num_classes: int) -> dict[str, int]:
    """Encoders have a product before that of the scores, but for one class per token or place."""
    if not shape.family.is_encoder or shape.task in (Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING):
        return {"scores": shape.width * num_classes}
    middle = shape.embedding_width if shape.task is Task.MASKED_LM else shape.width
    return {"transform": shape.width * middle, "scores": middle * num_classes}


def num_head_vector_parameters(shape: ModelShape, num_classes: int) -> int:
    """Norms and biases of the head."""
    if not shape.family.is_encoder:
        has_bias = shape.task in (Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING)
        return num_classes if has_bias else 0
    if shape.task is Task.MASKED_LM:
        return 3 * shape.embedding_width + shape.family.num_score_biases * num_classes
    return num_classes + (shape.width if shape.task is Task.SEQUENCE_CLASSIFICATION else 0)


def largest_up(shape: ModelShape) -> int:
    """The largest tensor that a feed-forward part begins with."""
    up = inner_matrices(shape)["up"]
    is_joint = shape.family.has_joint_projections or shape.num_experts or not shape.family.is_gated
    return up if is_joint else up // 2
