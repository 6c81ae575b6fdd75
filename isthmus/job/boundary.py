"""The one-line text of a link's boundary, such as "bottleneck(64, init=pca)": what crosses the cut there."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from isthmus.errors import UserError
from isthmus.job.findings import FieldError, suggest

_KINDS: Final = ("hidden", "bottleneck")
_FORM: Final = re.compile(r"\s*(?P<kind>\w+)\s*(?:\((?P<inside>[^()]*)\))?\s*", re.ASCII)
_OPTION: Final = re.compile(r"\s*(?P<name>\w+)\s*=\s*(?P<value>\w+)\s*", re.ASCII)
_WHOLE: Final = re.compile(r"[0-9]{1,9}")
_EXAMPLE: Final = 'write "hidden", or a bottleneck such as "bottleneck(64, warmup=100)"'


class Init(StrEnum):
    """What the projections of a bottleneck start from."""

    PCA = "pca"
    """The principal axes of what crossed during the warm-up."""
    RANDOM = "random"
    """Random orthonormal axes; for comparison."""


class Anchor(StrEnum):
    """What both ends of a bottleneck know beforehand, and so need not send."""

    TOKENS = "tokens"
    """A mean per token id."""
    NONE = "none"
    """One mean for all tokens."""


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
        """Refuse a bottleneck that is none."""
        if self.rank >= hidden_width:
            raise UserError(
                f"{self} is no bottleneck where hidden states are {hidden_width} wide",
                hint=f'use fewer numbers than {hidden_width}, or boundary = "hidden"',
            )


BoundarySpec = HiddenSpec | BottleneckSpec


def parse_boundary(text: str) -> BoundarySpec:
    """Return the boundary that a text names, or say what is wrong with it."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise FieldError(f"{text!r} is no boundary", cure=_EXAMPLE)
    kind, inside = found["kind"], found["inside"]
    if kind not in _KINDS:
        raise FieldError(f"unknown boundary {kind!r}", cure=suggest(kind, _KINDS))
    if kind == "bottleneck":
        return _bottleneck(inside)
    if inside is not None:
        raise FieldError("a hidden boundary takes no arguments", cure='write "hidden"')
    return HiddenSpec()


def _bottleneck(inside: str | None) -> BottleneckSpec:
    rank, *options = (inside or "").split(",")
    texts = _options(options)
    spec = BottleneckSpec(
        rank=_whole("the rank of a bottleneck", rank.strip(), least=1),
        init=Init(_choice("init", texts.get("init", Init.PCA), tuple(Init))),
        anchor=Anchor(_choice("anchor", texts.get("anchor", Anchor.TOKENS), tuple(Anchor))),
        num_warmup_steps=_whole("warmup", texts.get("warmup", "100"), least=0),
    )
    _check_warmup(spec)
    return spec


def _options(items: list[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for item in items:
        found = _OPTION.fullmatch(item)
        if found is None:
            raise FieldError(f"{item.strip()!r} is no option of a bottleneck", cure=_EXAMPLE)
        name = found["name"]
        if name not in ("init", "anchor", "warmup"):
            raise FieldError(
                f"a bottleneck has no option {name!r}", cure=suggest(name, ("init", "anchor", "warmup"))
            )
        if name in texts:
            raise FieldError(f"{name} is given twice", cure="keep one of them")
        texts[name] = found["value"]
    return texts


def _whole(what: str, text: str, *, least: int) -> int:
    if not _WHOLE.fullmatch(text) or int(text) < least:
        raise FieldError(f"{what} must be a whole number from {least} on, not {text!r}", cure=_EXAMPLE)
    return int(text)


def _choice(name: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise FieldError(f"{name} must be {' or '.join(known)}, not {text!r}", cure=suggest(text, known))
    return text


def _check_warmup(spec: BottleneckSpec) -> None:
    """What is learnt from hidden states that cross as they are needs some that do."""
    if spec.num_warmup_steps > 0:
        return
    for option, is_learnt in (
        ("init=pca", spec.init is Init.PCA),
        ("anchor=tokens", spec.anchor is Anchor.TOKENS),
    ):
        if is_learnt:
            raise FieldError(
                f"{option} is taken from hidden states of the warm-up, and warmup is 0",
                cure="set warmup to 1 or more, or both init=random and anchor=none",
            )
