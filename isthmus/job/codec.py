"""The one-line texts of a link: a codec such as "rotate | int4", a boundary such as "bottleneck(64)".

Both are made of steps: a name, and in brackets first an argument, then options, as in
`int4(stochastic, group=32)`. A codec is a chain of steps with "|" between them, a boundary is one step.
What a step takes are the fields of its class.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, Final

import pydantic
from pydantic import Field, ValidationError

from isthmus.errors import FieldError, UserError
from isthmus.job import codec_steps as named
from isthmus.job.codec_steps import STRICT, Anchor, CodeState, Integers, Rank, SomeAnchor, Steps
from isthmus.job.mistakes import meant_by, sentence
from isthmus.units import closest, suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """The steps that turn a matrix into bytes, in the order in which they are applied."""

    steps: Steps

    def __post_init__(self) -> None:
        named.check_order(self.steps)

    def __str__(self) -> str:
        return " | ".join(map(str, self.steps))

    @property
    def is_raw(self) -> bool:
        return self.steps == (named.Raw(),)

    def part_bytes(
        self, num_rows: int, width: int, *, state: CodeState = CodeState.STEADY, element_bytes: int = 4
    ) -> tuple[int, ...]:
        """Sizes of the parts of a payload; `element_bytes` is the size of an element where all is raw."""
        return named.part_bytes(self.steps, num_rows, width, state=state, element_bytes=element_bytes)

    def wire_bytes(self, num_rows: int, width: int, *, element_bytes: int = 4) -> int:
        """Bytes of a payload of so many tokens, exactly, without a basis that may come with it."""
        return sum(self.part_bytes(num_rows, width, element_bytes=element_bytes))

    def bits_per_element(self, num_rows: int, width: int) -> float:
        """Bits that one element of the matrix takes on the wire."""
        return 8 * self.wire_bytes(num_rows, width) / (num_rows * width)


def gradient_codec(forward: CodecSpec, backward: CodecSpec) -> CodecSpec:
    """Return the codec of gradients: the backward codec without what the activation decides for both."""
    return CodecSpec(steps=named.gradient_steps(forward.steps, backward.steps))


class Init(StrEnum):
    """What the projections of a bottleneck start from."""

    PCA = "pca"
    """The principal axes of what crossed during the warm-up."""
    RANDOM = "random"
    """Random orthonormal axes; for comparison."""
    FFN_SVD = "ffn-svd"
    """Within the layer before the cut: the decomposition of its first feed-forward matrix, no residual."""
    FFN_DATA = "ffn-data"
    """Within the layer before the cut: what keeps most of that matrix's output and of its input."""

    @property
    def is_within(self) -> bool:
        """Whether the cut parts attention and feed-forward of the layer before it."""
        return self in (Init.FFN_SVD, Init.FFN_DATA)


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class HiddenSpec:
    """Hidden states cross as they are."""

    def __str__(self) -> str:
        return "hidden"

    def crossing_width(self, hidden_width: int) -> int:
        """Numbers per token that cross."""
        return hidden_width

    def check_width(self, hidden_width: int) -> None:
        """Hidden states of any width may cross."""


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class MemorySpec(HiddenSpec):
    """The output of an encoder crosses as it is, which all layers of a decoder attend to."""

    def __str__(self) -> str:
        return "memory"


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class BottleneckSpec:
    """A trained projection to `rank` numbers per token; hidden states cross as they are until it begins."""

    rank: Rank
    init: Annotated[Init, Field(strict=False)] = Init.PCA
    anchor: SomeAnchor = Anchor.TOKENS
    num_warmup_steps: Annotated[int, Field(ge=0, lt=10**9)] = 100

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
_ITEM: Final = re.compile(r"\s*(?:(?P<option>\w+)\s*=\s*)?(?P<value>[\w.+-]{1,40})\s*", re.ASCII)
_NUMBER: Final = re.compile(r"\d{1,9}(?P<rest>\.\d{1,20})?(?P<exponent>[eE][+-]?\d{1,3})?", re.ASCII)

_CODECS: Final[Mapping[str, type[Any]]] = {
    **{kind.__name__.lower(): kind for kind in (named.Raw, named.Fp16, named.Bf16)},
    **{f"int{bits}": Integers for bits in (8, 4, 2)},
    **{kind.__name__.lower(): kind for kind in (named.TopK, named.Svd, named.Center, named.Rotate)},
    **{kind.__name__.lower(): kind for kind in (named.Subspace, named.Feedback)},
}
CODEC_NAMES: Final = tuple(_CODECS)


def parse_codec(text: str) -> CodecSpec:
    """Return the codec that a text names, or say where it stops making sense."""
    cure = 'a codec reads like "svd(0.6) | fp16"'
    return CodecSpec(
        steps=tuple(_read_step(one, _CODECS, noun="codec", cure=cure) for one in text.split("|"))
    )


def read_codec(value: object) -> object:
    """Return the codec that a text names; other values are returned for pydantic to check."""
    return parse_codec(value) if isinstance(value, str) else value


def parse_boundary(text: str) -> BoundarySpec:
    """Return the boundary that a text names, or say what is wrong with it."""
    cure = 'write "hidden", "memory", or a bottleneck such as "bottleneck(64, warmup=100)"'
    kinds = {"hidden": HiddenSpec, "memory": MemorySpec, "bottleneck": BottleneckSpec}
    spec = _read_step(text, kinds, noun="boundary", cure=cure)
    if isinstance(spec, BottleneckSpec):
        _check_start(spec)
    boundary: BoundarySpec = spec
    return boundary


def _check_start(spec: BottleneckSpec) -> None:
    if spec.init is Init.FFN_SVD and spec.anchor is Anchor.TOKENS:
        raise FieldError("init=ffn-svd has no anchors", cure="set anchor=none, or init=ffn-data")
    if spec.init.is_within and spec.num_warmup_steps == 0:
        raise FieldError(f"init={spec.init} begins after a warm-up, and warmup is 0", cure="set warmup=1")
    if (spec.init is Init.PCA or spec.anchor is Anchor.TOKENS) and spec.num_warmup_steps == 0:
        raise FieldError(
            "init=pca and anchor=tokens are taken from hidden states of the warm-up, and warmup is 0",
            cure="set warmup to 1 or more, or both init=random and anchor=none",
        )


def _read_step(text: str, kinds: Mapping[str, type[Any]], *, noun: str, cure: str) -> Any:
    found, text = _STEP.fullmatch(text), text.strip()
    if found is None:
        raise FieldError(f"{text!r} is no step of a {noun}", cure=cure)
    name = found["name"]
    if name not in kinds:
        raise FieldError(f"unknown {noun} {name!r}", cure=suggest(name, kinds))
    example = f"docs/codecs.md shows what {name} takes"
    kind, values = kinds[name], dict[str, object]()
    keys = {_OPTIONS.get(one.name, one.name): one.name for one in fields(kind)}
    if keys.pop("bits", None):
        values["bits"] = int(name.removeprefix("int"))
    for item in [] if found["inside"] is None else found["inside"].split(","):
        key, value = _read_item(item, keys, text=text, cure=example)
        if key in values:
            raise FieldError(f"{item.strip()!r} in {text!r} gives {key} twice", cure=example)
        values[key] = value
    try:
        return kind(**values)
    except ValidationError as error:
        raise _refusal(error, keys, text=text, cure=example) from None


_OPTIONS: Final = {"is_stochastic": "stochastic", "num_warmup_steps": "warmup"}
"""How the fields are written whose names in the file are others."""


def _read_item(item: str, keys: Mapping[str, str], *, text: str, cure: str) -> tuple[str, object]:
    """Return the field and its value; an argument without a name is that of the first field."""
    found = _ITEM.fullmatch(item)
    if found is None:
        raise FieldError(f"{item.strip()!r} in {text!r} is no number, word or option=value", cure=cure)
    option, value = found["option"] or next(iter(keys), "an argument"), found["value"]
    if (option, value) == ("scale", "tensor"):
        return "group", None
    number = _NUMBER.fullmatch(value)
    if number is None:
        return keys.get(option, option), value
    return keys.get(option, option), float(value) if number["rest"] or number["exponent"] else int(value)


def _refusal(error: ValidationError, keys: Mapping[str, str], *, text: str, cure: str) -> FieldError:
    detail = error.errors(include_url=False)[0]
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, FieldError):
        return inner
    field = str(detail["loc"][0])
    option = next((one for one, name in keys.items() if name == field), field)
    meant = meant_by(detail) or (None if field in keys.values() else closest(option, keys))
    return FieldError(
        f"{option} of {text}: {sentence([detail])}", cure=f"did you mean {meant!r}?" if meant else cure
    )
