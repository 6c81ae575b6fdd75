"""Sizes of what a subspace puts on the wire: editions of its basis, and rows in it."""

from typing import Final

from isthmus.job.codec_steps import DEFAULT_GROUP, Anchor, CodecStep, Integers, Subspace

TAG_BYTES: Final = 8
"""Every message names its edition by this much of its digest."""
PLAIN_TAG_BYTES: Final = 1
"""A message before there is a basis, in evaluation, says so by a shorter tag, and goes as bf16."""
ANCHORS_PER_EDITION: Final = 256
"""Token ids whose anchors an edition sets anew: those where it helps most."""
ANCHOR_GROUP: Final = 16
"""Elements of an anchor that share a scale: few, so that a dimension that stands out spoils few others."""

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
    rows = width * rank * _HALF_BYTES + anchors * anchor_bytes(width)
    return TAG_BYTES + _NUMBER_BYTES + singles + rows + rank


def anchor_bytes(width: int) -> int:
    """An anchor in an edition: a byte for each element, and a half for each group of them."""
    return width + -(-width // ANCHOR_GROUP) * _HALF_BYTES


def num_due(age: int, *, every: int) -> int:
    """Editions that are due after the first until this age: at 1, 2, 4, … steps, then every so many."""
    return min(age, every - 1).bit_length() + age // every


def num_editions(subspace: Subspace, num_steps: int, *, age: int = 0) -> int:
    """Editions in so many steps of a code that has this age by then; the first edition comes at age 0."""
    return _num_until(age + num_steps, subspace.every) - _num_until(age, subspace.every)


def shared_bits_bytes(num_rows: int, num_bits: int) -> int:
    """Rows whose directions take so many bits together: a byte of scale for each row, and the bits."""
    return num_rows * (1 + -(-num_bits // 8))


def _num_until(age: int, every: int) -> int:
    return 1 + num_due(age - 1, every=every) if age > 0 else 0
