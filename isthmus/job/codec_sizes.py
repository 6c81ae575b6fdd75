"""How many bytes a codec makes of a matrix: exact, and without torch, so that the planner can ask.

The recursion is that of the coders in `isthmus.codec`, on shapes instead of tensors.
"""

from enum import StrEnum
from typing import Final

from isthmus.job.codec_steps import (
    Bf16,
    Center,
    CodecStep,
    Feedback,
    Fp16,
    Integers,
    Raw,
    Rotate,
    SameBasis,
    SameIndices,
    Subspace,
    Svd,
    TopK,
)
from isthmus.job.subspace_sizes import (
    PLAIN_TAG_BYTES,
    TAG_BYTES,
    edition_bytes,
    num_directions,
    shared_bits,
    shared_bits_bytes,
)

_FLOAT32_BYTES: Final = 4
_HALF_BYTES: Final = 2


class CodeState(StrEnum):
    """What a message of a codec with a basis holds; codecs without one know only steady messages."""

    FIRST = "first"
    """No basis exists yet."""
    REFRESH = "refresh"
    """A new basis rides with the message."""
    STEADY = "steady"


def part_bytes(
    steps: tuple[CodecStep, ...],
    *,
    num_rows: int,
    width: int,
    state: CodeState = CodeState.STEADY,
    element_bytes: int = _FLOAT32_BYTES,
) -> tuple[int, ...]:
    """The sizes of the parts of a payload, in order; `element_bytes` is what a plain `raw` element takes."""
    match steps:
        case (Raw(),):
            return (num_rows * width * element_bytes,)
        case (Subspace() as subspace, *rest):
            return _subspace_bytes(subspace, tuple(rest), num_rows, width, state)
        case (Feedback(), *rest):
            return part_bytes(tuple(rest), num_rows=num_rows, width=width, state=state)
    return _chain_bytes(steps, num_rows, width)


def num_kept(ratio: float, width: int) -> int:
    """How many elements of a row of this width `topk(ratio)` keeps."""
    return max(1, min(width, round(ratio * width)))


def index_bits(width: int) -> int:
    """Bits of one packed index into a row."""
    return max(1, (width - 1).bit_length())


def index_bytes(num_indices: int, width: int) -> int:
    """Bytes that say where a row's elements were: a bit for each, or packed indices, whichever is smaller."""
    return min(packed_bytes(width, 1), packed_bytes(num_indices, index_bits(width)))


def is_bitmap(num_indices: int, width: int) -> bool:
    """Whether it is a bit for each."""
    return packed_bytes(width, 1) <= packed_bytes(num_indices, index_bits(width))


def svd_rank(ratio: float, num_rows: int, width: int) -> int | None:
    """The rank whose two factors are `ratio` of the matrix, None where they would not be smaller."""
    if num_rows == 0 or width == 0:
        return None
    rank = max(1, int(ratio * num_rows * width / (num_rows + width)))
    return rank if rank * (num_rows + width) < num_rows * width else None


def packed_bytes(num_values: int, bits: int) -> int:
    """Bytes of one row of values of this many bits each, packed."""
    return -(-num_values * bits // 8)


def num_groups(width: int, group: int) -> int:
    """Groups of a row; the last may be short."""
    return -(-width // group)


def _chain_bytes(steps: tuple[CodecStep, ...], num_rows: int, width: int) -> tuple[int, ...]:
    match steps:
        case () | (Raw(),):
            return (num_rows * width * _FLOAT32_BYTES,)
        case (Fp16() | Bf16(),):
            return (num_rows * width * _HALF_BYTES,)
        case (Integers() as integers,):
            return _integer_bytes(integers, num_rows, width)
        case (Center(), *rest):
            mean_bytes = width * _HALF_BYTES if num_rows else 0
            return (mean_bytes, *_chain_bytes(tuple(rest), num_rows, width))
        case (Rotate(), *rest):
            return _chain_bytes(tuple(rest), num_rows, width)
        case (TopK(ratio=ratio), *rest):
            kept = num_kept(ratio, width)
            return (num_rows * index_bytes(kept, width), *_chain_bytes(tuple(rest), num_rows, kept))
        case (SameIndices(ratio=ratio), *rest):
            return _chain_bytes(tuple(rest), num_rows, num_kept(ratio, width))
        case (SameBasis(rank=rank), *rest):
            return _chain_bytes(tuple(rest), num_rows, min(rank, width))
        case (Svd(ratio=ratio), *rest):
            return _svd_bytes(ratio, tuple(rest), num_rows, width)
    raise ValueError(f"no codec has the steps {steps}")


def _integer_bytes(integers: Integers, num_rows: int, width: int) -> tuple[int, ...]:
    if integers.group is None:
        num_values = num_rows * width
        return (_FLOAT32_BYTES if num_values else 0, packed_bytes(num_values, integers.bits))
    scale_bytes = num_groups(width, integers.group) * _HALF_BYTES
    return (num_rows * scale_bytes, num_rows * packed_bytes(width, integers.bits))


def _svd_bytes(ratio: float, rest: tuple[CodecStep, ...], num_rows: int, width: int) -> tuple[int, ...]:
    rank = svd_rank(ratio, num_rows, width)
    if rank is None:
        return _chain_bytes(rest, num_rows, width)
    return (*_chain_bytes(rest, rank, num_rows), *_chain_bytes(rest, rank, width))


def _subspace_bytes(
    subspace: Subspace, rest: tuple[CodecStep, ...], num_rows: int, width: int, state: CodeState
) -> tuple[int, ...]:
    if state is CodeState.FIRST:
        return (PLAIN_TAG_BYTES, num_rows * width * _HALF_BYTES)
    head_bytes = edition_bytes(subspace, width) if state is CodeState.REFRESH else TAG_BYTES
    rank, integers = num_directions(subspace, width), shared_bits(rest)
    if integers is not None:
        return (head_bytes, shared_bits_bytes(num_rows, rank * integers.bits))
    return (head_bytes, *_chain_bytes(rest, num_rows, rank))
