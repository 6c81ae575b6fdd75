"""The one-line text of a codec, such as "rotate | int4(group=64)", and its parsed form."""

import math
import re
from dataclasses import dataclass
from typing import Final, NoReturn

from isthmus.job.findings import FieldError, suggest

CodecValue = int | float | str

CODEC_NAMES: Final = ("raw", "fp16", "bf16", "int8", "int4", "topk", "svd", "rotate", "subspace")

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<word>[A-Za-z_]\w*)|(?P<mark>[|(),=]))", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecStep:
    """One step of a codec: its name, positional arguments, and named options."""

    name: str
    arguments: tuple[CodecValue, ...] = ()
    options: tuple[tuple[str, CodecValue], ...] = ()

    def __str__(self) -> str:
        inside = [*map(str, self.arguments), *(f"{name}={value}" for name, value in self.options)]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """The steps that turn a tensor into bytes, in the order in which they are applied."""

    steps: tuple[CodecStep, ...]

    def __str__(self) -> str:
        return " | ".join(map(str, self.steps))


def parse_codec(text: str) -> CodecSpec:
    """Return the codec that a text names, or say where it stops making sense."""
    return _Parser(text).codec()


class _Parser:
    """Reads codec: step ("|" step)*; step: name ["(" item ("," item)* ")"]; item: value | word "=" value."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def codec(self) -> CodecSpec:
        steps = [self._step()]
        while self._accept("|"):
            steps.append(self._step())
        if self._text[self._position :].strip():
            self._fail("'|' or the end")
        return CodecSpec(steps=tuple(steps))

    def _step(self) -> CodecStep:
        start = self._start()
        name = self._take("word")
        if name is None:
            self._fail("the name of a codec")
        if name not in CODEC_NAMES:
            raise FieldError(
                f"unknown codec {name!r} at column {start + 1} of {self._text!r}",
                cure=suggest(name, CODEC_NAMES),
            )
        arguments, options = self._items() if self._accept("(") else ([], {})
        return CodecStep(name=name, arguments=tuple(arguments), options=tuple(options.items()))

    def _items(self) -> tuple[list[CodecValue], dict[str, CodecValue]]:
        arguments: list[CodecValue] = []
        options: dict[str, CodecValue] = {}
        while True:
            self._item(arguments, options)
            if self._accept(")"):
                return arguments, options
            if not self._accept(","):
                self._fail("',' or ')'")

    def _item(self, arguments: list[CodecValue], options: dict[str, CodecValue]) -> None:
        start = self._start()
        value = self._value()
        if isinstance(value, str) and self._accept("="):
            if value in options:
                self._fail("an option not yet given", at=start)
            options[value] = self._value()
        elif options:
            self._fail("an option, since arguments go before options", at=start)
        else:
            arguments.append(value)

    def _value(self) -> CodecValue:
        start = self._start()
        word = self._take("word")
        if word is not None:
            return word
        number = self._take("number")
        if number is None:
            self._fail("a number or a word")
        if number.isdigit():
            return int(number)
        if not math.isfinite(float(number)):
            self._fail("a number that is not so large", at=start)
        return float(number)

    def _accept(self, mark: str) -> bool:
        found = _TOKEN.match(self._text, self._position)
        if found is None or found["mark"] != mark:
            return False
        self._position = found.end()
        return True

    def _take(self, kind: str) -> str | None:
        found = _TOKEN.match(self._text, self._position)
        if found is None or found[kind] is None:
            return None
        self._position = found.end()
        return found[kind]

    def _start(self) -> int:
        rest = self._text[self._position :]
        return self._position + len(rest) - len(rest.lstrip())

    def _fail(self, expected: str, *, at: int | None = None) -> NoReturn:
        column = (self._start() if at is None else at) + 1
        raise FieldError(
            f"expected {expected} at column {column} of {self._text!r}",
            cure='a codec reads like "svd(0.6) | fp16"',
        )
