"""Sizes of what a subspace puts on the wire: editions of its basis, and rows in it."""

from typing import Final

from isthmus.job.codec_steps import DEFAULT_GROUP, Anchor, CodecStep, Integers, Subspace

TAG_BYTES: Final = 8
"""Every message names its edition by this much of its digest."""
PLAIN_TAG_BYTES: Final = 1
"""A message before there is a basis, in evaluation, says so by a shorter tag, and goes as bf16."""
ANCHORS_PER_EDITION: Final = 256
"""Token ids whose anchors an edition sets anew: those where it helps most."""

_NUMBER_BYTES: Final = 8
_FLOAT32_BYTES: Final = 4
_SLOT_BYTES: Final = 4
_HALF_BYTES: Final = 2


def num_directions(subspace: Subspace, width: int) -> int:
    """Columns of the basis: the rank asked for, unless the rows themselves are narrower."""
    return min(subspace.rank, width)


def num_anchors(subspace: Subspace) -> int:
    """Anchors in an edition."""
    return ANCHORS_PER_EDITION if subspace.anchor is Anchor.TOKENS else 0


def shared_bits(rest: tuple[CodecStep, ...]) -> Integers | None:
    """The integers whose bits are shared out among the directions by variance, where they follow directly.

    With a group or one scale of its own, the format is meant as it is everywhere else.
    """
    match rest:
        case (Integers(group=group) as integers,) if group == DEFAULT_GROUP:
            return integers
    return None


def edition_bytes(subspace: Subspace, width: int) -> int:
    """Digest, number, mean, deviations, slots, basis, anchors and bits of one edition."""
    rank, anchors = num_directions(subspace, width), num_anchors(subspace)
    singles = (width + rank) * _FLOAT32_BYTES + anchors * _SLOT_BYTES
    halves = width * (rank + anchors) * _HALF_BYTES
    return TAG_BYTES + _NUMBER_BYTES + singles + halves + rank


def shared_bits_bytes(num_rows: int, num_bits: int) -> int:
    """Rows whose directions take so many bits together: a byte of scale for each row, and the bits."""
    return num_rows * (1 + -(-num_bits // 8))
