"""The steps that a codec is made of, which may follow which, and how many bytes they make of a matrix.

A transform makes smaller or better-behaved matrices of a matrix; a format makes bytes of a matrix and ends
the codec. Sizes are exact and need no torch, so that the planner can ask for them: the recursion is that of
the coders in `isthmus.codec`, on shapes instead of tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from enum import StrEnum
from types import UnionType
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from isthmus.errors import FieldError

DEFAULT_GROUP: Final = 64
COORDINATE_GROUP: Final = 256
"""Coordinates in a subspace that share a scale unless the codec says how many."""
DEFAULT_EVERY: Final = 100


class Anchor(StrEnum):
    """What a subspace subtracts before it projects, besides the mean."""

    NONE = "none"
    TOKENS = "tokens"
    """The mean of the token id, known to both ends."""


STRICT: Final = ConfigDict(strict=True, extra="forbid")
SomeAnchor = Annotated[Anchor, Field(strict=False)]
Rank = Annotated[int, Field(ge=1, le=65536)]
_Share = Annotated[float, Field(gt=0, le=1)]


class _Step:
    """Writes a step as the job file has it: its arguments, then the options that are no defaults."""

    __slots__ = ()

    def __str__(self) -> str:
        inside = []
        for one in fields(self):  # type: ignore[arg-type]  # every step is a dataclass
            value = getattr(self, one.name)
            match one.name:
                case "is_stochastic" if value:
                    inside.append("stochastic")
                case "group" if value is None:
                    inside.append("scale=tensor")
                case name if name != "bits" and value != one.default:
                    inside.append(str(value) if one.default is MISSING else f"{name}={value}")
        return f"{step_name(self)}({', '.join(inside)})" if inside else step_name(self)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Raw(_Step):
    """The elements as they are."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Fp16(_Step):
    """Half precision: 11 bits of mantissa, up to 65504."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Bf16(_Step):
    """Half precision: 8 bits of mantissa, the range of float32."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Integers(_Step):
    """Integers of 8, 4 or 2 bits, with a scale per group of a row's elements, or one per tensor."""

    bits: Literal[8, 4, 2]
    is_stochastic: Annotated[bool, BeforeValidator(lambda value: value == "stochastic" or value)] = False
    group: Annotated[int, Field(ge=8, le=65536)] | None = DEFAULT_GROUP
    """None: one scale per tensor."""

    def __post_init__(self) -> None:
        if self.is_stochastic and self.bits == 2:
            raise FieldError("int2 clips large values, which no rounding makes unbiased", cure="leave it out")


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Rotate(_Step):
    """An orthogonal rotation of each row, in blocks, which spreads outliers."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Center(_Step):
    """The mean row of the message is subtracted and sent beside it."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class TopK(_Step):
    """The largest elements of each row."""

    ratio: _Share


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Svd(_Step):
    """Two thin factors; `ratio` is the share of elements kept."""

    ratio: _Share


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Subspace(_Step):
    """Coordinates in a basis that the sender learns from the activations and sends every so many steps."""

    rank: Rank
    anchor: SomeAnchor = Anchor.NONE
    every: Annotated[int, Field(ge=1, le=1_000_000)] = DEFAULT_EVERY


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Feedback(_Step):
    """What the last message lost is added to this one, times `decay`."""

    decay: _Share


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SameIndices(_Step):
    """A gradient at the indices that `topk` chose for the activation; no text names it."""

    ratio: _Share


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SameBasis(_Step):
    """A gradient in the basis of its activation's `subspace`, by the exact adjoint; no text names it."""

    rank: Rank


Format: TypeAlias = Raw | Fp16 | Bf16 | Integers
Transform: TypeAlias = Center | Rotate | TopK | Svd | Subspace | Feedback | SameIndices | SameBasis
CodecStep: TypeAlias = Format | Transform
Steps: TypeAlias = tuple[CodecStep, ...]

_UNLIKE_CLASS: Final[Mapping[type, str]] = {SameIndices: "same-indices", SameBasis: "same-basis"}
# Names of steps, a blank behind each.
_ORDER: Final = re.compile(
    r"((feedback (?!(raw )?$))?(center )?((topk|svd|same-indices) ){0,2}|(subspace|same-basis) )"
    r"(rotate (?=int))?((raw|fp16|bf16|int.) )?"
)


def step_name(step: object) -> str:
    """Return the name of a step without its arguments."""
    if isinstance(step, Integers):
        return f"int{step.bits}"
    return _UNLIKE_CLASS.get(type(step), type(step).__name__.lower())


def _has(kinds: type | UnionType, steps: Steps) -> bool:
    return any(isinstance(one, kinds) for one in steps)


def check_order(steps: Steps) -> None:
    """Refuse steps that cannot stand where they do, or not together."""
    names = "".join(f"{step_name(one)} " for one in steps)
    is_each_once = len(set(map(type, steps))) == len(steps)
    if is_each_once and _ORDER.fullmatch(names):
        return
    raise FieldError(
        f"{' | '.join(map(str, steps))} is no codec",
        cure="keep this order, each step once: feedback (of a step with losses), center, topk or svd; "
        "or in their place subspace; then rotate (before integers), and a format",
    )


def gradient_steps(forward: Steps, backward: Steps) -> Steps:
    """Return the steps of a gradient: what the activation has decided is neither chosen nor sent again."""
    match forward, backward:
        case (Feedback() | Center(), *rest), _:
            return gradient_steps(tuple(rest), backward)
        case (Subspace() as subspace, *_), _:
            own = tuple(step for step in backward if step != subspace)
            if _has(Subspace | Feedback | Center | TopK | Svd, own):
                raise FieldError(
                    f"a gradient crosses in the basis of its activation, {subspace}, with a format at most",
                    cure='take a format for the backward codec, such as "int4(stochastic)"',
                )
            return (SameBasis(rank=subspace.rank), *own)
        case _, (Feedback() | Center() as first, *rest):
            return (first, *gradient_steps(forward, tuple(rest)))
        case (TopK(ratio=one), *_), (TopK(ratio=other), *rest) if one == other:
            return (SameIndices(ratio=one), *rest)
        case _, (Subspace(), *_):
            raise FieldError(
                "a gradient has a subspace only where its activation has one: it is the same basis",
                cure="give the forward codec the subspace too",
            )
    return backward


TAG_BYTES: Final = 8
"""Every message names its basis version by this much of a digest."""
PLAIN_TAG_BYTES: Final = 1
"""A message before there is a basis, in evaluation, says so by a shorter tag, and goes as bf16."""
ANCHORS_PER_VERSION: Final = 256
"""Token ids whose anchors a basis version sets anew: those where it helps most."""
NUM_ANCHOR_SLOTS: Final = 4096
"""Token ids that have an anchor of their own; larger ones share the same slots."""
ANCHOR_GROUP: Final = 16
"""Elements of an anchor that share a scale: few, so that a dimension that stands out spoils few others."""

_FLOAT32_BYTES: Final = 4
_SLOT_BYTES: Final = 4
_HALF_BYTES: Final = 2


def num_directions(subspace: Subspace, width: int) -> int:
    """Columns of the basis: the rank asked for, unless the rows themselves are narrower."""
    return min(subspace.rank, width)


def num_anchors(subspace: Subspace) -> int:
    """Anchors in a basis version."""
    return ANCHORS_PER_VERSION if subspace.anchor is Anchor.TOKENS else 0


def in_subspace(rest: Steps) -> Steps:
    """Return the steps behind a subspace: its coordinates are of similar size, so more share a scale."""
    return tuple(
        replace(one, group=COORDINATE_GROUP)
        if isinstance(one, Integers) and one.group == DEFAULT_GROUP
        else one
        for one in rest
    )


def basis_part_bytes(subspace: Subspace, width: int) -> tuple[int, ...]:
    """Mean, basis, slots of anchors, scales of anchors and anchors of one basis version."""
    anchors = num_anchors(subspace)
    return (
        width * _FLOAT32_BYTES,
        width * num_directions(subspace, width) * _HALF_BYTES,
        anchors * _SLOT_BYTES,
        *_integer_bytes(Integers(bits=8, group=ANCHOR_GROUP), anchors, width),
    )


def basis_bytes(subspace: Subspace, width: int) -> int:
    """What a basis version adds to the message that it comes with."""
    return sum(basis_part_bytes(subspace, width))


def num_due(age: int, *, every: int) -> int:
    """Count the versions after the first until this age: at 1, 2, 4, … steps, then every so many."""
    return min(age, every - 1).bit_length() + age // every


def num_versions(subspace: Subspace, num_steps: int, *, age: int = 0) -> int:
    """Count the basis versions in so many steps from this age of the codec on; the first is at age 0."""
    until, before = (
        1 + num_due(one - 1, every=subspace.every) if one > 0 else 0 for one in (age + num_steps, age)
    )
    return until - before


class CodeState(StrEnum):
    """What a message of a codec with a basis holds; codecs without one know only steady messages."""

    FIRST = "first"
    """No basis exists yet."""
    REFRESH = "refresh"
    """A new basis rides with the message."""
    STEADY = "steady"


def part_bytes(
    steps: Steps,
    num_rows: int,
    width: int,
    *,
    state: CodeState = CodeState.STEADY,
    element_bytes: int = _FLOAT32_BYTES,
) -> tuple[int, ...]:
    """Sizes of the parts of a payload; `element_bytes` is the size of an element where all is raw."""
    match steps:
        case ():
            return (num_rows * width * _FLOAT32_BYTES,)
        case (Raw(),):
            return (num_rows * width * element_bytes,)
        case (Fp16() | Bf16(),):
            return (num_rows * width * _HALF_BYTES,)
        case (Integers() as integers,):
            return _integer_bytes(integers, num_rows, width)
        case (Feedback() | Rotate(), *rest):
            return part_bytes(tuple(rest), num_rows, width)
    return _transformed_bytes(steps[0], steps[1:], num_rows, width, state)


def num_kept(ratio: float, width: int) -> int:
    """Return how many elements of a row of this width `topk(ratio)` keeps."""
    return max(1, min(width, round(ratio * width)))


def index_bits(width: int) -> int:
    """Bits of one packed index into a row."""
    return max(1, (width - 1).bit_length())


def index_bytes(num_indices: int, width: int) -> int:
    """Bytes that say where a row's elements were: a bit for each, or packed indices, whichever is smaller."""
    return min(packed_bytes(width, 1), packed_bytes(num_indices, index_bits(width)))


def is_bitmap(num_indices: int, width: int) -> bool:
    """Whether indices cross as a bitmap."""
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


def _transformed_bytes(
    step: CodecStep, rest: Steps, num_rows: int, width: int, state: CodeState
) -> tuple[int, ...]:
    match step:
        case Center():
            return (width * _HALF_BYTES if num_rows else 0, *part_bytes(rest, num_rows, width))
        case TopK(ratio=ratio):
            kept = num_kept(ratio, width)
            return (num_rows * index_bytes(kept, width), *part_bytes(rest, num_rows, kept))
        case SameIndices(ratio=ratio):
            return part_bytes(rest, num_rows, num_kept(ratio, width))
        case SameBasis(rank=rank):
            return part_bytes(in_subspace(rest), num_rows, min(rank, width))
        case Svd(ratio=ratio):
            both = svd_rank(ratio, num_rows, width)
            sides = [(num_rows, width)] if both is None else [(both, num_rows), (both, width)]
            return tuple(size for side in sides for size in part_bytes(rest, *side))
        case Subspace() if state is CodeState.FIRST:
            return (PLAIN_TAG_BYTES, num_rows * width * _HALF_BYTES)
        case Subspace():
            version_bytes = basis_bytes(step, width) if state is CodeState.REFRESH else 0
            coordinates = part_bytes(in_subspace(rest), num_rows, num_directions(step, width))
            return (TAG_BYTES + version_bytes, *coordinates)
    raise ValueError(f"no codec has the step {step}")


def _integer_bytes(integers: Integers, num_rows: int, width: int) -> tuple[int, ...]:
    if integers.group is None:
        num_values = num_rows * width
        return (_FLOAT32_BYTES if num_values else 0, packed_bytes(num_values, integers.bits))
    scale_bytes = num_groups(width, integers.group) * _HALF_BYTES
    return (num_rows * scale_bytes, num_rows * packed_bytes(width, integers.bits))
