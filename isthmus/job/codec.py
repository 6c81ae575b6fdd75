"""The one-line text of a codec, such as "rotate | int4(group=32)", and its parsed form."""

import math
import re
from dataclasses import dataclass
from typing import Final, NoReturn

from isthmus.job.codec_reading import READERS, CodecValue, StepText
from isthmus.job.codec_sizes import CodeState, part_bytes
from isthmus.job.codec_steps import CodecStep, Raw, check_order, gradient_steps
from isthmus.job.findings import FieldError, suggest

CODEC_NAMES: Final = tuple(READERS)

_MOST_DIGITS: Final = 9
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<word>[A-Za-z_]\w*)|(?P<mark>[|(),=]))", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """The steps that turn a matrix into bytes, in the order in which they are applied."""

    steps: tuple[CodecStep, ...]

    def __post_init__(self) -> None:
        check_order(self.steps)

    def __str__(self) -> str:
        return " | ".join(map(str, self.steps))

    @property
    def is_raw(self) -> bool:
        """Whether elements cross as they are."""
        return self.steps == (Raw(),)

    def part_bytes(
        self, num_rows: int, width: int, *, state: CodeState = CodeState.STEADY, element_bytes: int = 4
    ) -> tuple[int, ...]:
        """Sizes of the parts of a payload; `element_bytes` is the size of an element where all is raw."""
        return part_bytes(
            self.steps, num_rows=num_rows, width=width, state=state, element_bytes=element_bytes
        )

    def wire_bytes(
        self, num_rows: int, width: int, *, state: CodeState = CodeState.STEADY, element_bytes: int = 4
    ) -> int:
        """Bytes of a payload of so many tokens, exactly."""
        return sum(self.part_bytes(num_rows, width, state=state, element_bytes=element_bytes))

    def bits_per_element(self, num_rows: int, width: int, *, element_bytes: int = 4) -> float:
        """Bits that one element of the matrix takes on the wire."""
        return 8 * self.wire_bytes(num_rows, width, element_bytes=element_bytes) / (num_rows * width)


def read_codec(value: object) -> object:
    """The codec that a text names; anything else is left to whoever checks it."""
    return parse_codec(value) if isinstance(value, str) else value


def gradient_codec(forward: CodecSpec, backward: CodecSpec) -> CodecSpec:
    """How gradients cross: the backward codec, less what the activation has settled for both directions."""
    return CodecSpec(steps=gradient_steps(forward.steps, backward.steps))


def gradient_wire_bytes(
    forward: CodecSpec, backward: CodecSpec, num_rows: int, width: int, *, element_bytes: int = 4
) -> int:
    """Bytes of the payload of a gradient of so many tokens, exactly."""
    return gradient_codec(forward, backward).wire_bytes(num_rows, width, element_bytes=element_bytes)


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
        return READERS[name](StepText(name=name, arguments=arguments, options=options))

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
        if len(number) <= _MOST_DIGITS and number.isdigit():
            return int(number)
        if number.isdigit() or not math.isfinite(float(number)):
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
