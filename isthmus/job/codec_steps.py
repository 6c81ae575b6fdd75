"""The steps that a codec is made of, and which may follow which.

A transform makes smaller or better-behaved matrices of a matrix; a format makes bytes of a matrix and ends
the codec.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from isthmus.job.findings import FieldError

DEFAULT_GROUP: Final = 64
DEFAULT_EVERY: Final = 100


class Anchor(StrEnum):
    """What a subspace takes off before it projects, besides the mean."""

    NONE = "none"
    TOKENS = "tokens"
    """The mean of the token id, known to both ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """The elements as they are."""

    def __str__(self) -> str:
        return "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16:
    """Half precision: 11 bits of mantissa, up to 65504."""

    def __str__(self) -> str:
        return "fp16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16:
    """Half precision: 8 bits of mantissa, the range of float32."""

    def __str__(self) -> str:
        return "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """Integers of 8, 4 or 2 bits, with a scale per group of a row's elements, or one per tensor."""

    bits: int
    group: int | None = DEFAULT_GROUP
    """None: one scale per tensor."""
    is_stochastic: bool = False

    def __str__(self) -> str:
        inside = ["stochastic"] if self.is_stochastic else []
        if self.group is None:
            inside.append("scale=tensor")
        elif self.group != DEFAULT_GROUP:
            inside.append(f"group={self.group}")
        return f"int{self.bits}({', '.join(inside)})" if inside else f"int{self.bits}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate:
    """An orthogonal rotation of each row, in blocks, which spreads outliers."""

    def __str__(self) -> str:
        return "rotate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Center:
    """The mean row of the message is taken off and sent beside it."""

    def __str__(self) -> str:
        return "center"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The largest elements of each row."""

    ratio: float

    def __str__(self) -> str:
        return f"topk({self.ratio})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Svd:
    """Two thin factors; `ratio` is the share of elements kept."""

    ratio: float

    def __str__(self) -> str:
        return f"svd({self.ratio})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subspace:
    """Coordinates in a basis that the sender learns from the activations and sends every so many steps."""

    rank: int
    anchor: Anchor = Anchor.NONE
    every: int = DEFAULT_EVERY

    def __str__(self) -> str:
        inside = [str(self.rank)]
        if self.anchor is not Anchor.NONE:
            inside.append(f"anchor={self.anchor}")
        if self.every != DEFAULT_EVERY:
            inside.append(f"every={self.every}")
        return f"subspace({', '.join(inside)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What the last message lost is added to this one, times `decay`."""

    decay: float

    def __str__(self) -> str:
        return f"feedback({self.decay})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SameIndices:
    """A gradient at the indices that `topk` chose for the activation; no text names it."""

    ratio: float

    def __str__(self) -> str:
        return f"same-indices({self.ratio})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SameBasis:
    """A gradient in the basis of its activation's `subspace`, by the exact adjoint; no text names it."""

    rank: int

    def __str__(self) -> str:
        return f"same-basis({self.rank})"


Format: TypeAlias = Raw | Fp16 | Bf16 | Integers
Transform: TypeAlias = Center | Rotate | TopK | Svd | Subspace | Feedback | SameIndices | SameBasis
CodecStep: TypeAlias = Format | Transform


def check_order(steps: tuple[CodecStep, ...]) -> None:
    """Say why a step cannot stand where it does, if one cannot."""
    for index, step in enumerate(steps):
        if any(type(one) is type(step) for one in steps[:index]):
            raise FieldError(f"{_name(step)} is there twice", cure="give each step once")
        _check_company(step, steps)
        _check_place(steps, index)


def gradient_steps(forward: tuple[CodecStep, ...], backward: tuple[CodecStep, ...]) -> tuple[CodecStep, ...]:
    """The steps of a gradient: what the activation has settled already is neither chosen nor sent again."""
    match forward, backward:
        case (Feedback() | Center(), *rest), _:
            return gradient_steps(tuple(rest), backward)
        case (Subspace() as subspace, *_), _:
            _check_in_subspace(subspace, backward)
            own = tuple(step for step in backward if step != subspace)
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


def _check_in_subspace(subspace: Subspace, backward: tuple[CodecStep, ...]) -> None:
    for step in backward:
        if isinstance(step, Subspace) and step != subspace:
            raise FieldError(
                f"a gradient crosses in the basis of its activation, {subspace}, not in that of {step}",
                cure=f'let the backward codec begin with "{subspace}", or leave that to the forward one',
            )
        if isinstance(step, Feedback | Center | TopK | Svd):
            raise FieldError(
                f"{_name(step)} has no place behind a subspace: the gradient already crosses in its basis",
                cure='take a format for the backward codec, such as "int4(stochastic)"',
            )


def _check_company(step: CodecStep, steps: tuple[CodecStep, ...]) -> None:
    if not any(isinstance(one, Subspace) for one in steps):
        return
    match step:
        case Center():
            raise FieldError(
                "center has no place with a subspace, which has a mean of its own",
                cure=_advise("leave center out", _without(step, steps)),
            )
        case Feedback():
            raise FieldError(
                "feedback has no place with a subspace: it is for gradients, and those cross in the basis of "
                "their activations",
                cure=_advise("leave feedback out", _without(step, steps)),
            )


def _check_place(steps: tuple[CodecStep, ...], index: int) -> None:
    step, before, behind = steps[index], steps[:index], steps[index + 1 :]
    match step:
        case Raw() | Fp16() | Bf16() | Integers() if behind:
            raise FieldError(
                f"{_name(behind[0])} cannot follow {_name(step)}: after {_name(step)} there are only bytes",
                cure=_one_format_last(steps),
            )
        case Feedback() if before:
            raise FieldError(
                "feedback must be the first step, since it gives back what all the others lost",
                cure=_advise("let feedback come first", (step, *_without(step, steps))),
            )
        case Feedback() if not any(not isinstance(one, Raw) for one in behind):
            raise FieldError("feedback needs a step behind it that loses something", cure='such as "int4"')
        case Center() if any(not isinstance(one, Feedback) for one in before):
            raise FieldError(
                f"center cannot follow {_name(before[-1])}: it takes off the mean of the tensors themselves",
                cure=_advise(f"let center come before {_name(before[-1])}", _center_first(steps)),
            )
        case Subspace() if before:
            raise FieldError(
                f"subspace cannot follow {_name(before[-1])}: it learns the basis of the tensors themselves",
                cure=_advise("leave out what comes before subspace", steps[index:]),
            )
        case Svd() | TopK() if any(isinstance(one, Subspace) for one in before):
            raise FieldError(
                f"{_name(step)} cannot follow subspace, which has already kept the directions that matter",
                cure=_advise(f"leave {_name(step)} out, or take a smaller subspace", _without(step, steps)),
            )
        case Rotate() if not (behind and isinstance(behind[0], Integers)):
            raise FieldError(
                "rotate must stand directly before int8, int4 or int2: it spreads outliers among those that "
                "share a scale, and no other step has scales",
                cure='for example "rotate | int4"',
            )


def _one_format_last(steps: tuple[CodecStep, ...]) -> str:
    formats = tuple(step for step in steps if isinstance(step, Format))
    if len(formats) > 1:
        choices = dict.fromkeys(f'"{one}"' for one in formats)
        return f"give one format: {' or '.join(choices)}"
    codec = _quoted((*(step for step in steps if step not in formats), *formats))
    return (
        f"a format is the last step: {codec}" if codec else 'a format is the last step, as in "rotate | int8"'
    )


def _center_first(steps: tuple[CodecStep, ...]) -> tuple[CodecStep, ...]:
    """Behind feedback at most."""
    places = {Feedback: 0, Center: 1}
    return tuple(sorted(steps, key=lambda step: places.get(type(step), 2)))


def _advise(advice: str, steps: tuple[CodecStep, ...]) -> str:
    """The advice, and the codec that it leads to, unless that would be refused as well."""
    codec = _quoted(steps)
    return f"{advice}: {codec}" if codec else advice


def _quoted(steps: tuple[CodecStep, ...]) -> str | None:
    try:
        check_order(steps)
    except FieldError:
        return None
    codec = " | ".join(map(str, steps))
    return f'backward = "{codec}"' if isinstance(steps[0], Feedback) else f'"{codec}"'


def _without(step: CodecStep, steps: tuple[CodecStep, ...]) -> tuple[CodecStep, ...]:
    return tuple(one for one in steps if one != step)


def _name(step: CodecStep) -> str:
    return str(step).partition("(")[0]
