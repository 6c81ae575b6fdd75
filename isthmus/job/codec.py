"""The one-line texts of a link: a codec such as "rotate | int4", a boundary such as "bottleneck(64)".

Both are made of steps: a name, and in brackets first an argument, then options, as in
`int4(stochastic, group=32)`. A codec is a chain of steps with "|" between them, a boundary is one step.
What each step takes stands in `_CODECS` and `_BOUNDARIES`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final, Generic, TypeVar

from isthmus.errors import FieldError, UserError
from isthmus.job.codec_steps import (
    DEFAULT_EVERY,
    DEFAULT_GROUP,
    Anchor,
    Bf16,
    Center,
    CodecStep,
    CodeState,
    Feedback,
    Fp16,
    Integers,
    Raw,
    Rotate,
    Steps,
    Subspace,
    Svd,
    TopK,
    check_order,
    gradient_steps,
    part_bytes,
)
from isthmus.units import suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """The steps that turn a matrix into bytes, in the order in which they are applied."""

    steps: Steps

    def __post_init__(self) -> None:
        check_order(self.steps)

    def __str__(self) -> str:
        return " | ".join(map(str, self.steps))

    @property
    def is_raw(self) -> bool:
        return self.steps == (Raw(),)

    def part_bytes(
        self, num_rows: int, width: int, *, state: CodeState = CodeState.STEADY, element_bytes: int = 4
    ) -> tuple[int, ...]:
        """Sizes of the parts of a payload; `element_bytes` is the size of an element where all is raw."""
        return part_bytes(self.steps, num_rows, width, state=state, element_bytes=element_bytes)

    def wire_bytes(self, num_rows: int, width: int, *, element_bytes: int = 4) -> int:
        """Bytes of a payload of so many tokens, exactly, without a basis that may come with it."""
        return sum(self.part_bytes(num_rows, width, element_bytes=element_bytes))

    def bits_per_element(self, num_rows: int, width: int) -> float:
        """Bits that one element of the matrix takes on the wire."""
        return 8 * self.wire_bytes(num_rows, width) / (num_rows * width)


def gradient_codec(forward: CodecSpec, backward: CodecSpec) -> CodecSpec:
    """How gradients cross: the backward codec, less what the activation has decided for both directions."""
    return CodecSpec(steps=gradient_steps(forward.steps, backward.steps))


class Init(StrEnum):
    """What the projections of a bottleneck start from."""

    PCA = "pca"
    """The principal axes of what crossed during the warm-up."""
    RANDOM = "random"
    """Random orthonormal axes; for comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenSpec:
    """Hidden states cross as they are."""

    def __str__(self) -> str:
        return "hidden"

    def crossing_width(self, hidden_width: int) -> int:
        """Numbers per token that cross."""
        return hidden_width

    def check_width(self, hidden_width: int) -> None:
        """Hidden states of any width may cross."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckSpec:
    """A trained projection to `rank` numbers per token; hidden states cross as they are until it begins."""

    rank: int
    init: Init = Init.PCA
    anchor: Anchor = Anchor.TOKENS
    num_warmup_steps: int = 100

    def __str__(self) -> str:
        return (
            f"bottleneck({self.rank}, init={self.init}, anchor={self.anchor}, warmup={self.num_warmup_steps})"
        )

    def crossing_width(self, hidden_width: int) -> int:  # noqa: ARG002 the other kind's width depends on it
        """Numbers per token that cross once the warm-up is over."""
        return self.rank

    def check_width(self, hidden_width: int) -> None:
        """Refuse a rank that saves nothing."""
        if self.rank >= hidden_width:
            raise UserError(
                f"{self} is no bottleneck where hidden states are {hidden_width} wide",
                hint=f'use fewer numbers than {hidden_width}, or boundary = "hidden"',
            )


BoundarySpec = HiddenSpec | BottleneckSpec


_STEP: Final = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:\((?P<inside>[^()]*)\)\s*)?", re.ASCII)
_ITEM: Final = re.compile(
    r"(?:(?P<option>[A-Za-z_]\w*)\s*=\s*)?"
    r"(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<word>[A-Za-z_]\w*))",
    re.ASCII,
)
_MOST_DIGITS: Final = 9
_MOST_RANK: Final = 65536

_Value = int | float | str
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """What may stand at one place in the brackets: one of some words, or a number within bounds."""

    sets: str
    """The field of the step that it sets."""
    what: str = ""
    words: Mapping[str, object] = field(default_factory=dict)
    least: int | None = None
    """Of a whole number; None for a share above 0."""
    most: int = 1
    example: str = ""

    def read(self, value: _Value, *, of: str) -> object:
        """The value of the field, or a refusal; `of` names the place."""
        if self.words:
            takes, is_taken = " or ".join(self.words), value in self.words
        elif self.least is None:
            takes = "a number above 0 and at most 1"
            is_taken = not isinstance(value, str) and 0 < value <= 1
        else:
            takes = f"a whole number from {self.least} to {self.most}"
            is_taken = isinstance(value, int) and self.least <= value <= self.most
        if not is_taken:
            cure = suggest(str(value), self.words) if self.words else f"for example {self.example}"
            raise FieldError(f"{of} must be {takes}, not {value}", cure=cure)
        if self.words:
            return self.words[str(value)]
        return float(value) if self.least is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form(Generic[_Made]):
    """How a step is written: what makes it, its argument if it has one, its options by their names."""

    make: Callable[..., _Made]
    argument: _Slot | None = None
    is_required: bool = True
    options: Mapping[str, _Slot] = field(default_factory=dict)
    no_argument: str = ""
    """Why there is no argument, where one might be expected."""

    def read(self, name: str, arguments: list[_Value], options: Mapping[str, _Value], text: str) -> _Made:
        """The step that a text names, its arguments and options checked."""
        values: dict[str, object] = {}
        slot = self.argument
        if slot is None and arguments:
            raise FieldError(f"{name} takes no argument, not {text}{self.no_argument}", cure="leave it out")
        if slot is not None and len(arguments) != 1 and (arguments or self.is_required):
            raise FieldError(
                f"{name} takes one argument, {slot.what}, not {text}", cure=f"for example {slot.example}"
            )
        if slot is not None and arguments:
            values[slot.sets] = slot.read(arguments[0], of=f"{slot.what} in {text}")
        for option, value in options.items():
            slot = self.options.get(option)
            if slot is None:
                cure = suggest(option, self.options) if self.options else "leave it out"
                raise FieldError(f"{name} has no option {option!r}", cure=cure)
            if slot.sets in values:
                raise FieldError(f"{text} has two options for the {slot.sets}", cure=f"leave {option} out")
            values[slot.sets] = slot.read(value, of=f"{option} of {name}")
        return self.make(**values)


def _share(sets: str, what: str, example: str) -> _Slot:
    return _Slot(sets=sets, what=what, example=example)


def _rank(what: str, example: str) -> _Slot:
    return _Slot(sets="rank", what=what, least=1, most=_MOST_RANK, example=example)


def _words(sets: str, choices: type[StrEnum]) -> _Slot:
    return _Slot(sets=sets, words={str(one): one for one in choices})


_SCALES: Final = {
    "group": _Slot(sets="group", least=8, most=65536, example=f"group={DEFAULT_GROUP}"),
    "scale": _Slot(sets="group", words={"tensor": None}),
}
_STOCHASTIC: Final = _Slot(
    sets="is_stochastic", what="the rounding", words={"stochastic": True}, example='"int4(stochastic)"'
)
_CODECS: Final[Mapping[str, _Form[CodecStep]]] = {
    "raw": _Form(make=Raw),
    "fp16": _Form(make=Fp16),
    "bf16": _Form(make=Bf16),
    **{
        f"int{bits}": _Form(
            make=partial(Integers, bits=bits), argument=_STOCHASTIC, is_required=False, options=_SCALES
        )
        for bits in (8, 4)
    },
    "int2": _Form(
        make=partial(Integers, bits=2),
        options=_SCALES,
        no_argument=": its levels clip large values, which no rounding makes unbiased",
    ),
    "topk": _Form(make=TopK, argument=_share("ratio", "the share of elements kept", '"topk(0.1)"')),
    "svd": _Form(make=Svd, argument=_share("ratio", "the share of elements kept", '"svd(0.6)"')),
    "center": _Form(make=Center),
    "rotate": _Form(make=Rotate),
    "subspace": _Form(
        make=Subspace,
        argument=_rank("the number of directions kept", '"subspace(64)"'),
        options={
            "anchor": _words("anchor", Anchor),
            "every": _Slot(sets="every", least=1, most=1_000_000, example=f"every={DEFAULT_EVERY}"),
        },
    ),
    "feedback": _Form(
        make=Feedback,
        argument=_share(
            "decay", "the share of the last error that is added", 'backward = "feedback(0.9) | topk(0.1)"'
        ),
    ),
}
_BOUNDARIES: Final[Mapping[str, _Form[BoundarySpec]]] = {
    "hidden": _Form(make=HiddenSpec),
    "bottleneck": _Form(
        make=BottleneckSpec,
        argument=_rank("how many numbers of a token cross", '"bottleneck(64, warmup=100)"'),
        options={
            "init": _words("init", Init),
            "anchor": _words("anchor", Anchor),
            "warmup": _Slot(
                sets="num_warmup_steps", least=0, most=10**_MOST_DIGITS - 1, example="warmup=100"
            ),
        },
    ),
}
CODEC_NAMES: Final = tuple(_CODECS)


def parse_codec(text: str) -> CodecSpec:
    """Return the codec that a text names, or say where it stops making sense."""
    cure = 'a codec reads like "svd(0.6) | fp16"'
    steps = [_read_step(one, _CODECS, noun="codec", whole=text, cure=cure) for one in text.split("|")]
    return CodecSpec(steps=tuple(steps))


def read_codec(value: object) -> object:
    """The codec that a text names; other values are returned for pydantic to check."""
    return parse_codec(value) if isinstance(value, str) else value


def parse_boundary(text: str) -> BoundarySpec:
    """Return the boundary that a text names, or say what is wrong with it."""
    cure = 'write "hidden", or a bottleneck such as "bottleneck(64, warmup=100)"'
    spec = _read_step(text, _BOUNDARIES, noun="boundary", whole=text, cure=cure)
    if isinstance(spec, BottleneckSpec) and spec.num_warmup_steps == 0:
        options = {f"init={Init.PCA}": spec.init, f"anchor={Anchor.TOKENS}": spec.anchor}
        for observed in (one for one, value in options.items() if one.endswith(f"={value}")):
            raise FieldError(
                f"{observed} is taken from hidden states of the warm-up, and warmup is 0",
                cure="set warmup to 1 or more, or both init=random and anchor=none",
            )
    return spec


def _read_step(text: str, forms: Mapping[str, _Form[_Made]], *, noun: str, whole: str, cure: str) -> _Made:
    found, text = _STEP.fullmatch(text), text.strip()
    if found is None:
        raise FieldError(f"{text!r} in {whole!r} is no step of a {noun}", cure=cure)
    name = found["name"]
    if name not in forms:
        raise FieldError(f"unknown {noun} {name!r}", cure=suggest(name, forms))
    arguments: list[_Value] = []
    options: dict[str, _Value] = {}
    for item in [] if found["inside"] is None else found["inside"].split(","):
        option, value = _read_item(item.strip(), text, cure=cure)
        if option in options or (option is None and options):
            raise FieldError(
                f"{item.strip()!r} in {text!r} comes too late or twice",
                cure="give the argument first, then each option once",
            )
        if option is None:
            arguments.append(value)
        else:
            options[option] = value
    return forms[name].read(name, arguments, options, text)


def _read_item(item: str, text: str, *, cure: str) -> tuple[str | None, _Value]:
    found = _ITEM.fullmatch(item)
    if found is None:
        raise FieldError(f"{item!r} in {text!r} is no number, word or option=value", cure=cure)
    number = found["number"]
    if number is None:
        return found["option"], found["word"]
    if len(number) <= _MOST_DIGITS and number.isdigit():
        return found["option"], int(number)
    if number.isdigit() or not math.isfinite(float(number)):
        raise FieldError(f"{text!r} needs a number that is not so large", cure=cure)
    return found["option"], float(number)
