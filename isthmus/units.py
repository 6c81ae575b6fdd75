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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantity:
    """A kind of number: factors of its units, other spellings read, and where each shown unit starts."""

    factors: Mapping[str, Decimal]
    shown_from: Mapping[str, Decimal]
    also: Mapping[str, Decimal] = field(default_factory=dict)

    def parse(self, text: str) -> Decimal:
        """Return the number in base units; a FieldError says in one sentence why the text is none."""
        found = _NUMBER_AND_UNIT.fullmatch(text)
        if found is None:
            raise FieldError(f"{text!r} is not a number followed by a unit {self._units}")
        # Decimals of any exponent are read, so the bound comes before the arithmetic.
        if not math.isfinite(float(found["number"])):
            raise FieldError(f"{text!r} is too large")
        number, unit = Decimal(found["number"]), found["unit"]
        if number < 0:
            raise FieldError(f"{text!r} is negative")
        if not unit and number:
            raise FieldError(f"{text!r} has no unit {self._units}")
        value = number * self._factor(number, unit, text) if unit else number
        if not math.isfinite(float(value)):
            raise FieldError(f"{text!r} is too large")
        return value

    def _factor(self, number: Decimal, unit: str, text: str) -> Decimal:
        factors = {**self.factors, **self.also}
        if unit in factors:
            return factors[unit]
        size = unit.removesuffix("/s")
        if self is _BANDWIDTH and size in _BYTES.factors and size != unit:
            bits = self.rounded(float(8 * number * _BYTES.factors[size]))
            raise FieldError(f"{text!r} is in bytes per second", cure=f"did you mean {bits!r}?")
        # As in "5 minutes".
        words = sorted(one for one in factors if unit.startswith(one))
        meant = closest(unit, factors) or max(words, key=len, default=None)
        cure = f"did you mean '{_digits(number)} {meant}'?" if meant else None
        raise FieldError(f"{text!r} has the unknown unit {unit!r} {self._units}", cure=cure)

    @property
    def _units(self) -> str:
        return f"(units: {', '.join(self.factors)})"

    def rounded(self, value: float) -> str:
        """Return a short text for people, with four significant digits."""
        number = _checked(value)
        unit = next((unit for unit, start in self.shown_from.items() if number >= start), self._base)
        return f"{_digits(Decimal(f'{number / self.factors[unit]:.{_NUM_SHOWN_DIGITS}g}'))} {unit}"

    def exact(self, value: float) -> str:
        """Return the shortest text that reads back as the very same number, in the largest such unit."""
        number = _checked(value)
        if not number:
            return f"0 {self._base}"
        scaled = {unit: number / factor for unit, factor in _largest_first(self.factors).items()}
        same = [
            f"{_digits(count)} {unit}"
            for unit, count in scaled.items()
            if type(value)(count * self.factors[unit]) == value
        ]
        return min(same, key=lambda text: (len(text), "." in text))

    @property
    def _base(self) -> str:
        return next(unit for unit, factor in self.factors.items() if factor == 1)


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


def parse_bandwidth_bps(text: str) -> float:
    """Return bits per second from a text such as "1 Gbps" or "1 Gbit/s"."""
    return float(_BANDWIDTH.parse(text))


def parse_duration_s(text: str) -> float:
    """Return seconds from a text such as "25 ms"."""
    return float(_DURATION.parse(text))


def parse_bytes(text: str) -> int:
    """Return bytes, to the nearest whole one, from a text such as "80 GiB"."""
    return round(_BYTES.parse(text))


def parse_flops(text: str) -> float:
    """Return floating-point operations per second from a text such as "312 TFLOPS"."""
    return float(_FLOPS.parse(text))


def format_bandwidth(bps: float, *, exact: bool = False) -> str:
    """Return "199.8 Mbps" for people, or with `exact` a text that reads back as the same number."""
    return _BANDWIDTH.exact(bps) if exact else _BANDWIDTH.rounded(bps)


def shorten(value: float) -> float:
    """A number with three figures, as many as people read."""
    return float(f"{value:.3g}")


def format_duration(seconds: float, *, exact: bool = False) -> str:
    """Return "40.12 ms" for people, or with `exact` a text that reads back as the same number."""
    return _DURATION.exact(seconds) if exact else _DURATION.rounded(seconds)


def format_bytes(num_bytes: int, *, exact: bool = False) -> str:
    """Return "1.5 GiB" for people, or with `exact` a text that reads back as the same number."""
    return _BYTES.exact(num_bytes) if exact else _BYTES.rounded(num_bytes)


def format_flops(flops: float, *, exact: bool = False) -> str:
    """Return "312 TFLOPS" for people, or with `exact` a text that reads back as the same number."""
    return _FLOPS.exact(flops) if exact else _FLOPS.rounded(flops)


def _checked(value: float) -> Decimal:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a finite number of at least 0")
    return Decimal(str(value))


def _digits(number: Decimal) -> str:
    plain = f"{number.normalize():f}"
    return plain if len(plain) <= _NUM_PLAIN_DIGITS else str(number.normalize())


def _powers(base: int, *units: str) -> dict[str, Decimal]:
    return {unit: Decimal(base) ** power for power, unit in enumerate(units)}


def _largest_first(factors: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return dict(sorted(factors.items(), key=lambda item: -item[1]))


_BITS: Final = _powers(1000, "bps", "kbps", "Mbps", "Gbps")
_BANDWIDTH: Final = _Quantity(
    factors=_BITS,
    shown_from=_largest_first(_BITS),
    also=_powers(1000, "bit/s", "kbit/s", "Mbit/s", "Gbit/s"),
)
_DURATION: Final = _Quantity(
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
_BYTES: Final = _Quantity(
    factors=_powers(1000, "B", "KB", "MB", "GB", "TB") | _BINARY,
    shown_from=_largest_first(_BINARY),
)
_OPERATIONS: Final = _powers(1000, "FLOPS", "KFLOPS", "MFLOPS", "GFLOPS", "TFLOPS", "PFLOPS", "EFLOPS")
_FLOPS: Final = _Quantity(
    factors=_OPERATIONS,
    shown_from=_largest_first(_OPERATIONS),
)
