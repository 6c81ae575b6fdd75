"""From the words of a codec's text to its steps: which arguments each takes, and within which bounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from isthmus.job.codec_steps import (
    DEFAULT_EVERY,
    DEFAULT_GROUP,
    Anchor,
    Bf16,
    Center,
    CodecStep,
    Feedback,
    Fp16,
    Integers,
    Raw,
    Rotate,
    Subspace,
    Svd,
    TopK,
)
from isthmus.job.findings import FieldError, suggest

CodecValue = int | float | str

_LEAST_GROUP: Final = 8
_MOST_GROUP: Final = 65536
_MOST_RANK: Final = 65536
_MOST_EVERY: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepText:
    """One step as it is written: its name, positional arguments, and named options."""

    name: str
    arguments: list[CodecValue]
    options: dict[str, CodecValue]

    def __str__(self) -> str:
        inside = [*map(str, self.arguments), *(f"{name}={value}" for name, value in self.options.items())]
        return f"{self.name}({', '.join(inside)})" if inside else self.name

    def one_number(self, *, what: str, example: str) -> int | float:
        """The only argument, a number."""
        match self.arguments:
            case [int() | float() as number]:
                return number
        raise FieldError(f"{self.name} takes one number, {what}, not {self}", cure=f"for example {example}")

    def only_options(self, *known: str) -> None:
        """Refuse options that the step does not have."""
        for option in self.options:
            if option not in known:
                raise FieldError(
                    f"{self.name} has no option {option!r}",
                    cure=suggest(option, known) if known else "leave it out",
                )

    def whole(self, option: str, default: int, *, least: int, most: int) -> int:
        """A named whole number within bounds."""
        value = self.options.get(option, default)
        if not isinstance(value, int) or not least <= value <= most:
            raise FieldError(
                f"{option} of {self.name} must be a whole number from {least} to {most}, not {value}",
                cure=f"for example {option}={default}",
            )
        return value


def _plain(step: CodecStep) -> Callable[[StepText], CodecStep]:
    def read(text: StepText) -> CodecStep:
        text.only_options()
        if text.arguments:
            raise FieldError(f"{text.name} takes no arguments, not {text}", cure="leave the brackets out")
        return step

    return read


def _integers(bits: int) -> Callable[[StepText], CodecStep]:
    def read(text: StepText) -> CodecStep:
        text.only_options("group", "scale")
        is_stochastic = _is_stochastic(text, may_be=bits > 2)
        return Integers(bits=bits, group=_group(text), is_stochastic=is_stochastic)

    return read


def _is_stochastic(text: StepText, *, may_be: bool) -> bool:
    match text.arguments:
        case []:
            return False
        case ["stochastic"] if may_be:
            return True
        case ["stochastic"]:
            raise FieldError(
                f"{text.name} cannot be stochastic: its levels clip what is large, which no rounding makes "
                "unbiased",
                cure=f'write "int4(stochastic)", or "{text.name}"',
            )
    takes, example = ('"stochastic", ', "stochastic, group=32") if may_be else ("", "group=32")
    raise FieldError(
        f"{text.name} takes {takes}group=… or scale=tensor, not {text}",
        cure=f'for example "{text.name}({example})"',
    )


def _group(text: StepText) -> int | None:
    match text.options:
        case {"group": _, "scale": _}:
            raise FieldError("scale=tensor leaves no groups", cure="give one of group=… and scale=tensor")
        case {"scale": "tensor"}:
            return None
        case {"scale": scale}:
            raise FieldError(f"scale must be tensor, not {scale}", cure="groups are set by group=…")
    return text.whole("group", DEFAULT_GROUP, least=_LEAST_GROUP, most=_MOST_GROUP)


def _topk(text: StepText) -> CodecStep:
    return TopK(ratio=_share(text, what="the share of elements kept", example='"topk(0.1)"'))


def _svd(text: StepText) -> CodecStep:
    return Svd(ratio=_share(text, what="the share of elements kept", example='"svd(0.6)"'))


def _feedback(text: StepText) -> CodecStep:
    what, example = "the share of the last error that is added", 'backward = "feedback(0.9) | topk(0.1)"'
    return Feedback(decay=_share(text, what=what, example=example))


def _share(text: StepText, *, what: str, example: str) -> float:
    text.only_options()
    number = text.one_number(what=what, example=example)
    if not 0 < number <= 1:
        raise FieldError(f"{text} must have a number above 0 and at most 1", cure=f"for example {example}")
    return float(number)


def _subspace(text: StepText) -> CodecStep:
    text.only_options("anchor", "every")
    example = '"subspace(64)"'
    rank = text.one_number(what="the number of directions kept", example=example)
    if not isinstance(rank, int) or not 1 <= rank <= _MOST_RANK:
        raise FieldError(
            f"{text} must keep a whole number of directions, from 1 to {_MOST_RANK}",
            cure=f"for example {example}",
        )
    anchor = text.options.get("anchor", Anchor.NONE)
    if anchor not in tuple(Anchor):
        raise FieldError(
            f"anchor must be {' or '.join(Anchor)}, not {anchor}", cure=suggest(str(anchor), map(str, Anchor))
        )
    every = text.whole("every", DEFAULT_EVERY, least=1, most=_MOST_EVERY)
    return Subspace(rank=rank, anchor=Anchor(anchor), every=every)


READERS: Final[Mapping[str, Callable[[StepText], CodecStep]]] = {
    "raw": _plain(Raw()),
    "fp16": _plain(Fp16()),
    "bf16": _plain(Bf16()),
    "int8": _integers(8),
    "int4": _integers(4),
    "int2": _integers(2),
    "topk": _topk,
    "svd": _svd,
    "center": _plain(Center()),
    "rotate": _plain(Rotate()),
    "subspace": _subspace,
    "feedback": _feedback,
}
