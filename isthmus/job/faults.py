"""What goes wrong, when, and for how long: a file of faults, for an emulated WAN or a simulated run."""

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from isthmus.errors import JobError, Problem, UserError
from isthmus.units import closest, parse_duration_s

T = TypeVar("T")


class FaultKind(StrEnum):
    """The ways in which a link fails."""

    CUT = "cut"
    BLACKHOLE = "blackhole"
    SLOW_DOWN = "slow-down"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One disturbance of the link between two clouds, `at_s` seconds after the start.

    Only a slow-down has a `factor`; only corruption has `num_bytes`, of what `sender` sends.
    """

    at_s: float
    kind: FaultKind
    between: tuple[str, str]
    duration_s: float = 0.0
    factor: float = 1.0
    num_bytes: int = 1
    sender: str | None = None


class CloudFaultKind(StrEnum):
    """The ways in which a cloud fails."""

    SLOW = "slow"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudFault:
    """One disturbance of a cloud, `at_s` seconds after the start; being gone has no end and no `factor`."""

    at_s: float
    kind: CloudFaultKind
    cloud: str
    duration_s: float = 0.0
    factor: float = 1.0


_EXAMPLE: Final = '[[fault]] at = "30 s", kind = "cut", between = ["east", "west"], duration = "5 s"'
_COMMON_KEYS: Final = ("at", "kind", "between")
_KEYS: Final[Mapping[FaultKind | CloudFaultKind, tuple[str, ...]]] = {
    FaultKind.CUT: (*_COMMON_KEYS, "duration"),
    FaultKind.BLACKHOLE: (*_COMMON_KEYS, "duration"),
    FaultKind.SLOW_DOWN: (*_COMMON_KEYS, "duration", "factor"),
    FaultKind.CORRUPT: (*_COMMON_KEYS, "bytes", "from"),
    CloudFaultKind.SLOW: ("at", "kind", "cloud", "duration", "factor"),
    CloudFaultKind.GONE: ("at", "kind", "cloud"),
}
_MAX_CORRUPT_BYTES: Final = 1024


def load_faults(path: Path, *, links: Collection[tuple[str, str]] | None = None) -> tuple[Fault, ...]:
    """Return the faults of links in a TOML file by time; `links` are the pairs of clouds that it may name."""
    found = _load(path, links=links, clouds=None)
    return tuple(fault for fault in found if isinstance(fault, Fault))


def load_script(
    path: Path, *, links: Collection[tuple[str, str]], clouds: Collection[str]
) -> tuple[Fault | CloudFault, ...]:
    """Return the faults of links and of clouds in a TOML file by time."""
    return _load(path, links=links, clouds=clouds)


def _load(
    path: Path, *, links: Collection[tuple[str, str]] | None, clouds: Collection[str] | None
) -> tuple[Fault | CloudFault, ...]:
    problems: list[Problem] = []
    pairs = None if links is None else {frozenset(pair) for pair in links}
    tables = _tables(_read(path), problems)
    faults = [_Entry(number, table, problems, pairs, clouds).fault() for number, table in tables]
    if problems:
        raise JobError(path, tuple(problems))
    return tuple(sorted((fault for fault in faults if fault), key=lambda fault: fault.at_s))


def _tables(document: dict[str, object], problems: list[Problem]) -> list[tuple[int, dict[str, object]]]:
    """Return the [[fault]] tables with their numbers, and note whatever else there is."""
    entries = document.pop("fault", None)
    problems += [Problem(key=key, what="is not a known key", cure=_EXAMPLE) for key in document]
    if not isinstance(entries, list) or not entries:
        problems.append(Problem(key="fault", what="is missing", cure=_EXAMPLE))
        return []
    numbered = list(enumerate(entries))
    problems += [
        Problem(key=f"fault[{number}]", what="must be a table", cure=_EXAMPLE)
        for number, entry in numbered
        if not isinstance(entry, dict)
    ]
    return [(number, entry) for number, entry in numbered if isinstance(entry, dict)]


class _Entry:
    """One [[fault]] table; notes every problem in it and goes on."""

    def __init__(
        self,
        number: int,
        table: dict[str, object],
        problems: list[Problem],
        pairs: Collection[frozenset[str]] | None,
        clouds: Collection[str] | None,
    ) -> None:
        self._number = number
        self._table = table
        self._problems = problems
        self._pairs = pairs
        self._clouds = clouds

    def fault(self) -> Fault | CloudFault | None:
        kinds = [*FaultKind] if self._clouds is None else [*FaultKind, *CloudFaultKind]
        kind = self._read("kind", self._kind, cure=f"use one of {', '.join(kinds)}")
        if kind is None:
            return None
        self._refuse_others(kind, _KEYS[kind])
        return self._of_link(kind) if isinstance(kind, FaultKind) else self._of_cloud(kind)

    def _of_cloud(self, kind: CloudFaultKind) -> CloudFault:
        allowed = _KEYS[kind]
        return CloudFault(
            at_s=self._read("at", _duration_s, cure='such as at = "30 s"') or 0.0,
            kind=kind,
            cloud=self._read("cloud", self._cloud, cure='such as cloud = "east"') or "",
            duration_s=self._if(allowed, "duration", _positive_s, cure='such as duration = "5 s"') or 0.0,
            factor=self._if(allowed, "factor", _factor, cure="such as factor = 10") or 1.0,
        )

    def _of_link(self, kind: FaultKind) -> Fault:
        allowed = _KEYS[kind]
        between = self._read("between", self._pair, cure='such as between = ["east", "west"]') or ("", "")
        return Fault(
            at_s=self._read("at", _duration_s, cure='such as at = "30 s"') or 0.0,
            kind=kind,
            between=between,
            duration_s=self._if(allowed, "duration", _positive_s, cure='such as duration = "5 s"') or 0.0,
            factor=self._if(allowed, "factor", _factor, cure="such as factor = 10") or 1.0,
            num_bytes=self._if(self._table, "bytes", _num_bytes, cure="such as bytes = 1") or 1,
            sender=self._if(self._table, "from", partial(_one_of, between), cure="name one of `between`"),
        )

    def _refuse_others(self, kind: FaultKind | CloudFaultKind, allowed: Collection[str]) -> None:
        for key in sorted(self._table.keys() - set(allowed)):
            meant = closest(key, allowed)
            cure = f"did you mean {meant!r}?" if meant else f"a {kind} takes {', '.join(allowed)}"
            self._note(key, f"is not a key of a {kind}", cure)

    def _if(self, present: Collection[str], key: str, parse: Callable[[object], T], *, cure: str) -> T | None:
        return self._read(key, parse, cure=cure) if key in present else None

    def _read(self, key: str, parse: Callable[[object], T], *, cure: str) -> T | None:
        if key not in self._table:
            self._note(key, "is missing", cure)
            return None
        try:
            return parse(self._table[key])
        except ValueError as error:
            self._note(key, str(error), cure)
            return None

    def _note(self, key: str, what: str, cure: str) -> None:
        self._problems.append(Problem(key=f"fault[{self._number}]: {key}", what=what, cure=cure))

    def _kind(self, value: object) -> FaultKind | CloudFaultKind:
        for kind in _KEYS:
            if value == kind.value:
                if isinstance(kind, CloudFaultKind) and self._clouds is None:
                    raise ValueError(f"{value!r} happens to a cloud, which only `isthmus simulate` plays")
                return kind
        raise ValueError(f"{value!r} is no kind of fault")

    def _cloud(self, value: object) -> str:
        if not isinstance(value, str) or value not in (self._clouds or ()):
            raise ValueError(f"the job has no cloud {value!r}")
        return value

    def _pair(self, value: object) -> tuple[str, str]:
        match value:
            case [str(first), str(second)] if first != second:
                if self._pairs is not None and frozenset((first, second)) not in self._pairs:
                    raise ValueError(f"the job has no link between {first!r} and {second!r}")
                return first, second
        raise ValueError(f"must name two clouds, not {value!r}")


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read: {why}", hint="give the path of a file of faults") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}", hint=f"write faults as {_EXAMPLE}") from None


def _duration_s(value: object) -> float:
    if not isinstance(value, str):
        raise ValueError(f"must be a text with a unit, not {value!r}")
    return parse_duration_s(value)


def _positive_s(value: object) -> float:
    duration_s = _duration_s(value)
    if not duration_s:
        raise ValueError("must be more than 0")
    return duration_s


def _factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 < value < 1e6:
        raise ValueError(f"must be a number above 1 and below a million, not {value!r}")
    return float(value)


def _num_bytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_CORRUPT_BYTES:
        raise ValueError(f"must be a whole number from 1 to {_MAX_CORRUPT_BYTES}, not {value!r}")
    return value


def _one_of(clouds: Collection[str], value: object) -> str:
    if value not in clouds:
        raise ValueError(f"must be one of the two clouds, not {value!r}")
    return str(value)
