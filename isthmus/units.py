"""Text with a unit to SI numbers and back: "1 Gbps" is 1e9 bits per second, "25 ms" is 0.025 seconds."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

from isthmus.errors import FieldError

_NUMBER_AND_UNIT: Final = re.compile(
    r"\s*(?P<number>[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)\s*(?P<unit>\S*)\s*"
)
_NUM_SHOWN_DIGITS: Final = 4
_NUM_PLAIN_DIGITS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantity:
    """A kind of number: factors of its units, other spellings read, and where each shown unit starts."""

    factors: Mapping[str, Decimal]
    shown_from: Mapping[str, Decimal]
    also: Mapping[str, Decimal] = field(default_factory=dict)
    is_whole: bool = False

    def parse(self, text: str) -> float:
        """Return the number in base units; a FieldError says in one sentence why the text is none."""
        found = _NUMBER_AND_UNIT.fullmatch(text)
        units = f"(units: {', '.join(self.factors)})"
        if found is None:
            raise FieldError(f"{text!r} is not a number followed by a unit {units}")
        # Decimals of any exponent are read, so the bound comes before the arithmetic.
        if not math.isfinite(float(found["number"])):
            raise FieldError(f"{text!r} is too large")
        number, unit = Decimal(found["number"]), found["unit"]
        if number < 0:
            raise FieldError(f"{text!r} is negative")
        factor = {**self.factors, **self.also, "": 0 if number == 0 else None}.get(unit)
        if factor is None:
            what = f"has the unknown unit {unit!r}" if unit else "has no unit"
            raise FieldError(f"{text!r} {what} {units}", cure=self._cure(number, unit))
        value = number * factor
        if not math.isfinite(float(value)):
            raise FieldError(f"{text!r} is too large")
        return round(value) if self.is_whole else float(value)

    def _cure(self, number: Decimal, unit: str) -> str | None:
        size = BYTES_PER_S.factors.get(unit)
        if self is BANDWIDTH and size is not None:
            return f"bandwidths count bits: did you mean {self.format(float(8 * number * size))!r}?"
        # As in "5 minutes".
        factors = {**self.factors, **self.also}
        words = sorted((one for one in factors if unit.startswith(one)), key=len)
        meant = closest(unit, factors) or next(reversed(words), None)
        return f"did you mean '{_digits(number)} {meant}'?" if unit and meant else None

    def format(self, value: float, *, exact: bool = False) -> str:
        """Return "199.8 Mbps" for people, or with `exact` a text that reads back as the same number."""
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{value!r} is not a finite number of at least 0")
        number, base = Decimal(str(value)), next(unit for unit, one in self.factors.items() if one == 1)
        if not exact:
            unit = next((unit for unit, start in self.shown_from.items() if number >= start), base)
            return f"{_digits(Decimal(f'{number / self.factors[unit]:.{_NUM_SHOWN_DIGITS}g}'))} {unit}"
        if not number:
            return f"0 {base}"
        same = [
            f"{_digits(number / factor)} {unit}"
            for unit, factor in _largest_first(self.factors).items()
            if type(value)(number / factor * factor) == value
        ]
        return min(same, key=lambda text: (len(text), "." in text))


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that a mistyped one most likely stands for."""
    by_lower = {choice.lower(): choice for choice in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.7)
    return by_lower[near[0]] if near else None


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the cure for a word that is not among the known ones."""
    choices = list(known)
    if not choices:
        return "there is nothing to choose from"
    meant = closest(word, choices)
    return f"did you mean {meant!r}?" if meant else f"choose from {', '.join(choices)}"


def join_words(words: Sequence[str]) -> str:
    """Return the words as in "east, west and north"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _digits(number: Decimal) -> str:
    plain = f"{number.normalize():f}"
    return plain if len(plain) <= _NUM_PLAIN_DIGITS else str(number.normalize())


def _powers(base: int, *units: str) -> dict[str, Decimal]:
    return {unit: Decimal(base) ** power for power, unit in enumerate(units)}


def _largest_first(factors: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return dict(sorted(factors.items(), key=lambda item: -item[1]))


_BITS: Final = _powers(1000, "bps", "kbps", "Mbps", "Gbps")
BANDWIDTH: Final = Quantity(
    factors=_BITS,
    shown_from=_largest_first(_BITS),
    also=_powers(1000, "bit/s", "kbit/s", "Mbit/s", "Gbit/s"),
)
DURATION: Final = Quantity(
    factors={
        "us": Decimal("1e-6"),
        "ms": Decimal("1e-3"),
        "s": Decimal(1),
        "min": Decimal(60),
        "h": Decimal(3600),
        "d": Decimal(86400),
    },
    # A person reads "90 s" with more ease than "1.5 min".
    shown_from={
        "d": Decimal(2 * 86400),
        "h": Decimal(2 * 3600),
        "min": Decimal(2 * 60),
        "s": Decimal(1),
        "ms": Decimal("1e-3"),
        "us": Decimal("1e-9"),
    },
)
_BINARY: Final = _powers(1024, "B", "KiB", "MiB", "GiB", "TiB")
_SIZES: Final = _powers(1000, "B", "KB", "MB", "GB", "TB") | _BINARY
BYTES: Final = Quantity(factors=_SIZES, shown_from=_largest_first(_BINARY), is_whole=True)
_SPEEDS: Final = {f"{unit}/s": factor for unit, factor in _SIZES.items()}
BYTES_PER_S: Final = Quantity(factors=_SPEEDS, shown_from=_largest_first(_SPEEDS), is_whole=True)
_OPERATIONS: Final = _powers(1000, "FLOPS", "KFLOPS", "MFLOPS", "GFLOPS", "TFLOPS", "PFLOPS", "EFLOPS")
FLOPS: Final = Quantity(
    factors=_OPERATIONS,
    shown_from=_largest_first(_OPERATIONS),
)

format_bandwidth: Final = BANDWIDTH.format
format_duration: Final = DURATION.format
format_bytes: Final = BYTES.format


def shorten(value: float) -> float:
    """Return a number with three significant figures."""
    return float(f"{value:.3g}")
