"""Reads files of faults (what fails, when, for how long) for an emulated WAN or a simulated run."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from isthmus.errors import JobError
from isthmus.job.fields import Frozen, Pair, PositiveTime, Text, Time
from isthmus.job.load import check, parse_toml, read_text
from isthmus.job.mistakes import Finding
from isthmus.units import suggest


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


_Duration = Annotated[PositiveTime, Field(alias="duration", examples=["5 s"])]
_Factor = Annotated[float, Field(gt=1, lt=1e6, examples=[10])]


class _Timed(Frozen):
    at_s: Time = Field(alias="at", examples=["30 s"])


class _OfLink(_Timed):
    between: Pair = Field(examples=[["east", "west"]])


class _Interruption(_OfLink):
    kind: Literal["cut", "blackhole"]
    duration_s: _Duration


class _SlowDown(_OfLink):
    kind: Literal["slow-down"]
    duration_s: _Duration
    factor: _Factor


class _Corruption(_OfLink):
    kind: Literal["corrupt"]
    num_bytes: int = Field(1, alias="bytes", ge=1, le=1024)
    sender: Text | None = Field(None, alias="from", examples=["east"])


class _SlowCloud(_Timed):
    kind: Literal["slow"]
    cloud: Text = Field(examples=["east"])
    duration_s: _Duration
    factor: _Factor


class _LostCloud(_Timed):
    kind: Literal["gone"]
    cloud: Text = Field(examples=["east"])


_Table = _Interruption | _SlowDown | _Corruption | _SlowCloud | _LostCloud


class _FaultFile(Frozen):
    fault: tuple[Annotated[_Table, Field(discriminator="kind")], ...] = Field(
        strict=False, min_length=1, examples=[[{"kind": "cut"}]]
    )


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
    tables = parse_toml(read_text(path, what="a file of faults"), path)
    read, findings = check(_FaultFile, tables)
    for number, fault in enumerate(read.fault if read else ()):
        findings += _strangers(number, fault, links, clouds)
    if findings or read is None:
        raise JobError(path, tuple(finding.as_problem(tables) for finding in findings))
    return tuple(sorted(map(_as_fault, read.fault), key=lambda fault: fault.at_s))


def _strangers(
    number: int,
    fault: _Table,
    links: Collection[tuple[str, str]] | None,
    clouds: Collection[str] | None,
) -> Iterator[Finding]:
    """Find the clouds and links of a fault that the job does not have."""
    place = ("fault", number)
    if isinstance(fault, _SlowCloud | _LostCloud):
        if clouds is None:
            what = f"{fault.kind!r} happens to a cloud, which only `isthmus simulate` plays"
            yield Finding(
                place=(*place, "kind"), what=what, cure='use a fault of a link, such as kind = "cut"'
            )
        elif fault.cloud not in clouds:
            what = f"the job has no cloud {fault.cloud!r}"
            yield Finding(place=(*place, "cloud"), what=what, cure=suggest(fault.cloud, clouds))
        return
    if links is not None and {fault.between, fault.between[::-1]}.isdisjoint(links):
        what = "the job has no link between {!r} and {!r}".format(*fault.between)
        cure = suggest("-".join(fault.between), ["-".join(pair) for pair in links])
        yield Finding(place=(*place, "between"), what=what, cure=cure)
    if isinstance(fault, _Corruption) and fault.sender not in (None, *fault.between):
        what = f"must be one of the two clouds, not {fault.sender!r}"
        yield Finding(place=(*place, "from"), what=what, cure=f"name one of {' and '.join(fault.between)}")


def _as_fault(table: _Table) -> Fault | CloudFault:
    values = {key: value for key, value in table if key != "kind"}
    if isinstance(table, _SlowCloud | _LostCloud):
        return CloudFault(kind=CloudFaultKind(table.kind), **values)
    return Fault(kind=FaultKind(table.kind), **values)
