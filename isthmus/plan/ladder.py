"""What a link may be coded by: a ladder from the mildest codec to the strongest, and what each puts across.

A basis that has to be sent counts by the steps that it serves.
"""

import enum
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import BeforeValidator, PlainSerializer

from isthmus.errors import FrameError
from isthmus.job.codec import CodecSpec, gradient_codec, gradient_wire_bytes, parse_codec, read_codec
from isthmus.job.codec_steps import SameBasis, SameIndices, Subspace
from isthmus.job.findings import FieldError
from isthmus.job.subspace_sizes import TAG_BYTES, edition_bytes, num_editions

_SHARES_OF_WIDTH: Final = (4, 8, 16)
_LEAST_RANK: Final = 8


class Loss(enum.IntEnum):
    """How much quality a codec may cost, by what it cost a small language model (docs/results.md)."""

    NONE = 0
    SLIGHT = 1
    """Less than a few seeds could show: 8 bits cost 0.0 % of the loss over one cut and over three."""
    SOME = 2
    """Little, and it can be measured: 4 bits cost 0.5 % of the loss over one cut and 1.4 % over three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A codec for each direction; `is_joint` where they make sense only together."""

    forward: CodecSpec
    backward: CodecSpec
    loss: Loss
    is_joint: bool = False


# What codecs cost at each cut, as a share of the validation loss; it adds up over the cuts of a pipeline.
# bf16 and subspaces were not measured: their figures only keep the order of the ladder.
_LOSS_PER_CUT: Final = {"subspace": 0.01, "int4": 0.005, "int8": 0.0001, "bf16": 0.00001}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The steps that codecs are chosen for; every pair of ranks has a learner of its own."""

    num_steps: int
    num_microbatches: int
    num_learners: int = 1

    def __post_init__(self) -> None:
        if min(self.num_steps, self.num_microbatches, self.num_learners) < 1:
            raise ValueError(f"nothing crosses in {self}")

    @property
    def num_messages(self) -> int:
        """Each way, of all steps."""
        return self.num_steps * self.num_microbatches

    @property
    def num_at_once(self) -> int:
        """Ranks that send at the same time when a step begins, and when it ends."""
        return min(self.num_learners, self.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What one micro-batch puts across a cut; above frozen layers nothing goes back."""

    num_rows: int
    width: int
    element_bytes: int = 4
    """Of an element that crosses raw."""
    has_gradient: bool = True
    stretch: Stretch | None = None
    """None for a run without end, in which editions count for nothing."""


CodecText = Annotated[CodecSpec, BeforeValidator(read_codec), PlainSerializer(str, return_type=str)]
"""A codec that crosses and is kept as its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The codecs of a link."""

    forward: CodecText
    backward: CodecText

    @property
    def is_possible(self) -> bool:
        """Whether gradients can cross as the backward codec says, behind this forward codec."""
        try:
            gradient_codec(self.forward, self.backward)
        except FieldError:
            return False
        return True

    @property
    def subspace(self) -> Subspace | None:
        """The step by which activations and gradients share a basis, which is learned."""
        return next((step for step in self.forward.steps if isinstance(step, Subspace)), None)

    @property
    def has_subspace(self) -> bool:
        """Whether there is one."""
        return self.subspace is not None

    @property
    def projects_gradients(self) -> bool:
        """Whether gradients cross only where their activation did: what stays behind is no error."""
        steps = gradient_codec(self.forward, self.backward).steps
        return any(isinstance(step, SameBasis | SameIndices) for step in steps)

    def forward_bytes(self, crossing: Crossing) -> int:
        """Bytes of an activation on the line, without the editions that some bring along."""
        return self.forward.wire_bytes(
            crossing.num_rows, crossing.width, element_bytes=crossing.element_bytes
        )

    def edition_bytes(self, crossing: Crossing, *, age: int = 0) -> float:
        """Bytes that editions add to an activation, on average; codes that hold already have an age."""
        subspace, stretch = self.subspace, crossing.stretch
        if subspace is None or stretch is None:
            return 0.0
        num = stretch.num_learners * num_editions(subspace, stretch.num_steps, age=age)
        return num * (edition_bytes(subspace, crossing.width) - TAG_BYTES) / stretch.num_messages

    def backward_bytes(self, crossing: Crossing) -> int:
        """Bytes of its gradient on the line."""
        if not crossing.has_gradient:
            return 0
        return gradient_wire_bytes(
            self.forward,
            self.backward,
            crossing.num_rows,
            crossing.width,
            element_bytes=crossing.element_bytes,
        )

    def bytes_both_ways(self, crossing: Crossing) -> int:
        """Bytes of an activation and its gradient."""
        return self.forward_bytes(crossing) + self.backward_bytes(crossing)


RAW: Final = parse_codec("raw")
RAW_PAIR: Final = Pair(forward=RAW, backward=RAW)


def texts_of(pair: Pair) -> tuple[str, str]:
    """The codec of activations and that of gradients, as one-line texts."""
    return str(pair.forward), str(pair.backward)


def read_pair(texts: object) -> Pair:
    """The codecs that a peer or a checkpoint names."""
    match texts:
        case [str(forward), str(backward)]:
            return _parse_pair(forward, backward)
    raise FrameError(f"no two codecs of a link are named by {str(texts)[:100]}")


@functools.lru_cache(maxsize=1024)
def _parse_pair(forward: str, backward: str) -> Pair:
    try:
        pair = Pair(forward=parse_codec(forward), backward=parse_codec(backward))
    except ValueError as error:
        raise FrameError(f"a codec that cannot be: {str(error)[:200]}") from error
    if not pair.is_possible:
        raise FrameError(f"gradients by {backward[:100]!r} cannot follow activations by {forward[:100]!r}")
    return pair


def expected_loss(pairs: Iterable[Pair]) -> float:
    """What codecs cost over all cuts, as a share of the loss: the more the more cuts there are."""
    return sum(max(_loss_per_cut(one.forward), _loss_per_cut(one.backward)) for one in pairs)


def _loss_per_cut(codec: CodecSpec) -> float:
    return max((share for name, share in _LOSS_PER_CUT.items() if name in str(codec)), default=0.0)


def num_learners(num_senders: int, num_receivers: int) -> int:
    """Pairs of ranks that speak across a cut when the ranks at both sides take turns."""
    return math.lcm(num_senders, num_receivers)


def ladder(width: int, *, shares_ids: bool = False) -> tuple[Rung, ...]:
    """The codecs for cuts of this width, mildest first; anchors only where token ids may cross."""
    plain = (
        _rung("raw", "raw", Loss.NONE),
        _rung("bf16", "bf16", Loss.SLIGHT),
        _rung("rotate | int8", "rotate | int8(stochastic)", Loss.SLIGHT),
        _rung("center | rotate | int4", "rotate | int4(stochastic)", Loss.SOME),
    )
    anchor = ", anchor=tokens" if shares_ids else ""
    ranks = [rank for share in _SHARES_OF_WIDTH if (rank := width // share) >= _LEAST_RANK]
    joint = (
        _rung(f"subspace({rank}{anchor}) | int4", "int4(stochastic)", Loss.SOME, is_joint=True)
        for rank in ranks
    )
    return (*plain, *joint)


def widen(pair: Pair, crossing: Crossing, *, rungs: Sequence[Rung], of_gradient: bool = False) -> Pair | None:
    """The next milder codec for one direction, None where there is none; the other stays where it can."""
    candidates = (_widened(pair, rung, of_gradient=of_gradient) for rung in reversed(rungs))
    measure = Pair.backward_bytes if of_gradient else Pair.forward_bytes
    return next(
        (one for one in candidates if one.is_possible and measure(one, crossing) > measure(pair, crossing)),
        None,
    )


def _widened(pair: Pair, rung: Rung, *, of_gradient: bool) -> Pair:
    if rung.is_joint or pair.has_subspace:
        return Pair(forward=rung.forward, backward=rung.backward)
    if of_gradient:
        return Pair(forward=pair.forward, backward=rung.backward)
    return Pair(forward=rung.forward, backward=pair.backward)


def _rung(forward: str, backward: str, loss: Loss, *, is_joint: bool = False) -> Rung:
    return Rung(forward=parse_codec(forward), backward=parse_codec(backward), loss=loss, is_joint=is_joint)
