"""An edition of a basis: what both ends of a cut must hold alike, as the bytes that say so.

Neither end computes with anything but what these bytes hold, so that floats derived on different devices
never have to agree. In order:

    digest       8 bytes   of all that follows; messages name their edition by it
    number       int64     counts from 1
    mean         float32   (width)
    deviations   float32   (rank) standard deviation along each direction
    slots        int32     (anchors) which anchors are set
    vectors      float16   (width, rank) orthonormal columns
    anchors      int8      (anchors, width) mean of a token id, less the mean of all, behind bf16 scales
    bits         uint8     (rank) for integers whose bits are shared out; zeros otherwise

Eight bits are enough for anchors: both ends take off the same, so what rounding does to one is no error of a
message. Vectors have sixteen, for along the strongest of them a rounded one would lose as much as all others.
"""

import hashlib
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from isthmus.codec.base import Key, Message, flat_bytes, from_bytes
from isthmus.codec.integers import IntegerCoder
from isthmus.codec.moments import NUM_SLOTS
from isthmus.codec.waterfill import MAX_BITS, ColumnCode, column_code
from isthmus.errors import FrameError
from isthmus.job.codec_steps import Integers
from isthmus.job.subspace_sizes import ANCHOR_GROUP, TAG_BYTES, anchor_bytes

# Kept as halves, which end at 65504.
_MOST_ANCHOR: Final = 2.0**15
_NUMBER_BYTES: Final = 8
_BYTES: Final = IntegerCoder(Integers(bits=8, group=ANCHOR_GROUP))
# Only stochastic rounding would look at it.
_ANY_MESSAGE: Final = Message(key=Key(step=0, microbatch=0), seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes that the bytes of an edition follow; `num_bits` are shared out, or None."""

    width: int
    rank: int
    num_anchors: int
    num_bits: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """One edition, as float32 on the device of a cut's end."""

    packed: Tensor
    """On the host."""
    number: int
    mean_D: Tensor
    deviation_R: Tensor
    vectors_DR: Tensor
    slot_U: Tensor
    anchor_UD: Tensor
    tag: Tensor
    code: ColumnCode | None

    @property
    def digest(self) -> bytes:
        """What messages name it by."""
        return tag_bytes(self.packed[:TAG_BYTES])


def tag_bytes(tag: Tensor) -> bytes:
    """The tag of a message, on the host."""
    return tag.cpu().numpy().tobytes()


def pack_edition(
    *,
    number: int,
    mean_D: Tensor,
    deviation_R: Tensor,
    vectors_DR: Tensor,
    slot_U: Tensor,
    anchor_UD: Tensor,
    bits: tuple[int, ...],
) -> Tensor:
    """The bytes of an edition, on the host."""
    content = torch.cat(
        [
            flat_bytes(one.cpu())
            for one in (
                torch.tensor([number], dtype=torch.int64),
                mean_D.to(torch.float32),
                deviation_R.to(torch.float32),
                slot_U.to(torch.int32),
                vectors_DR.to(torch.float16),
                *_BYTES.encode(anchor_UD.cpu().float().clamp(-_MOST_ANCHOR, _MOST_ANCHOR), _ANY_MESSAGE),
                torch.tensor(bits, dtype=torch.uint8),
            )
        ]
    )
    return torch.cat([torch.frombuffer(bytearray(_digest(content)), dtype=torch.uint8), content])


def unpack_edition(packed: Tensor, shapes: Shapes, *, device: torch.device) -> Edition:
    """The edition that the bytes hold; they have the right number."""
    packed = packed.cpu()
    if _digest(packed[TAG_BYTES:]) != tag_bytes(packed[:TAG_BYTES]):
        raise FrameError("a basis that differs from what was sent")
    number, mean, deviations, slots, vectors, anchors, bits = _split(packed, shapes)
    slot_U = from_bytes(slots, torch.int32).long()
    if not bool(((slot_U >= 0) & (slot_U < NUM_SLOTS)).all()):
        raise FrameError("a basis with anchors for token ids that are none")
    deviation_R = from_bytes(deviations, torch.float32).to(device)
    return Edition(
        packed=packed,
        number=int(from_bytes(number, torch.int64)),
        mean_D=from_bytes(mean, torch.float32).to(device),
        deviation_R=deviation_R,
        vectors_DR=_halves(vectors, (shapes.width, shapes.rank)).to(device),
        slot_U=slot_U.to(device),
        anchor_UD=_bytes(anchors, (shapes.num_anchors, shapes.width)).to(device),
        tag=packed[:TAG_BYTES].to(device),
        code=None if shapes.num_bits is None else _code(bits.tolist(), shapes.num_bits, deviation_R),
    )


def _split(packed: Tensor, shapes: Shapes) -> list[Tensor]:
    width, rank, anchors = shapes.width, shapes.rank, shapes.num_anchors
    rows_bytes = (2 * width * rank, anchors * anchor_bytes(width))
    sizes = (_NUMBER_BYTES, 4 * width, 4 * rank, 4 * anchors, *rows_bytes, rank)
    ends = accumulate(sizes, initial=TAG_BYTES)
    return [packed[start:stop] for start, stop in pairwise(ends)]


def _halves(part: Tensor, shape: tuple[int, int]) -> Tensor:
    return from_bytes(part, torch.float16).view(shape).float()


def _bytes(part: Tensor, shape: tuple[int, int]) -> Tensor:
    """On the host, where every end comes to the same numbers."""
    start = part.numel() - math.prod(shape)
    return _BYTES.decode(iter((part[:start], part[start:])), shape, _ANY_MESSAGE)


def _code(bits: list[int], num_bits: int, deviation_R: Tensor) -> ColumnCode:
    if sum(bits) != num_bits or max(bits) > MAX_BITS:
        raise FrameError(f"a basis that shares out {sum(bits)} bits instead of {num_bits}")
    return column_code(bits, deviation_R)


def _digest(content: Tensor) -> bytes:
    return hashlib.blake2b(content.numpy().tobytes(), digest_size=TAG_BYTES).digest()
