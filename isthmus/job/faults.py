"""Reads files of faults (what fails, when, for how long) for a run on this machine or a simulated one.

Times count from the first step of a run. Random ones are drawn from the seed of the file.
"""

import random
from collections.abc import Collection, Iterator, Mapping
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
    """The ways in which a cloud or a rank of it fails."""

    SLOW = "slow"
    GONE = "gone"
    KILL = "kill"
    FREEZE = "freeze"
    FILL_DISK = "fill-disk"
    SPOIL = "spoil"
    """A bit of the newest checkpoint is flipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudFault:
    """One disturbance of a cloud, `at_s` seconds after the start; being gone has no end and no `factor`."""

    at_s: float
    kind: CloudFaultKind
    cloud: str
    rank: int | None = None
    """The rank that it happens to; all ranks of the cloud where none is given."""
    duration_s: float = 0.0
    factor: float = 1.0


_Duration = Annotated[PositiveTime, Field(alias="duration", examples=["5 s"])]
_Factor = Annotated[float, Field(gt=1, lt=1e6, examples=[10])]


class _Timed(Frozen):
    at_s: Time = Field(alias="at", examples=["30 s"])
    until_s: Time | None = Field(None, alias="until", examples=["2 min"])
    """The fault happens at a random time from `at` to this."""
    times: int = Field(1, ge=1, le=1000)
    """How often it happens."""


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


class _Killed(_Timed):
    kind: Literal["kill"]
    cloud: Text = Field(examples=["east"])
    rank: int | None = Field(None, ge=0)


class _Frozen(_Killed):
    kind: Literal["freeze"]  # type: ignore[assignment]
    duration_s: _Duration


class _FullDisk(_Timed):
    kind: Literal["fill-disk"]
    cloud: Text = Field(examples=["east"])
    duration_s: _Duration


class _Spoilt(_Timed):
    kind: Literal["spoil"]
    cloud: Text = Field(examples=["east"])


_OfCloud = _SlowCloud | _LostCloud | _Killed | _Frozen | _FullDisk | _Spoilt
_Table = _Interruption | _SlowDown | _Corruption | _OfCloud


class _FaultFile(Frozen):
    seed: int = Field(0, ge=0)
    fault: tuple[Annotated[_Table, Field(discriminator="kind")], ...] = Field(
        strict=False, min_length=1, examples=[[{"kind": "cut"}]]
    )


def load_faults(path: Path, *, links: Collection[tuple[str, str]] | None = None) -> tuple[Fault, ...]:
    """Return the faults of links in a TOML file by time; `links` are the pairs of clouds that it may name."""
    found = _load(path, links=links, clouds=None)
    return tuple(fault for fault in found if isinstance(fault, Fault))


def load_script(
    path: Path, *, links: Collection[tuple[str, str]], clouds: Mapping[str, int], is_simulated: bool = True
) -> tuple[Fault | CloudFault, ...]:
    """Return the faults of links and of clouds in a TOML file by time; some can only be simulated.

    `clouds` has the number of ranks of each cloud, by its name.
    """
    return _load(path, links=links, clouds=clouds, is_simulated=is_simulated)


def _load(
    path: Path,
    *,
    links: Collection[tuple[str, str]] | None,
    clouds: Mapping[str, int] | None,
    is_simulated: bool = False,
) -> tuple[Fault | CloudFault, ...]:
    tables = parse_toml(read_text(path, what="a file of faults"), path)
    read, findings = check(_FaultFile, tables)
    for number, fault in enumerate(read.fault if read else ()):
        findings += _strangers(number, fault, links, clouds, is_simulated=is_simulated)
    if findings or read is None:
        raise JobError(path, tuple(finding.as_problem(tables) for finding in findings))
    found = [
        one for number, table in enumerate(read.fault) for one in _faults(table, f"{read.seed}.{number}")
    ]
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def _strangers(
    number: int,
    fault: _Table,
    links: Collection[tuple[str, str]] | None,
    clouds: Mapping[str, int] | None,
    *,
    is_simulated: bool,
) -> Iterator[Finding]:
    """Find the clouds and links of a fault that the job does not have."""
    place = ("fault", number)
    if fault.until_s is not None and fault.until_s <= fault.at_s:
        yield Finding(place=(*place, "until"), what="must be later than `at`", cure="give a later time")
    if isinstance(fault, _OfCloud):
        if clouds is None:
            what = f"{fault.kind!r} happens to a cloud, which only `isthmus simulate` and `run` play"
            cure = 'use a fault of a link, such as kind = "cut"'
            yield Finding(place=(*place, "kind"), what=what, cure=cure)
        elif fault.cloud not in clouds:
            what = f"the job has no cloud {fault.cloud!r}"
            yield Finding(place=(*place, "cloud"), what=what, cure=suggest(fault.cloud, clouds))
        elif isinstance(fault, _SlowCloud | _LostCloud) and not is_simulated:
            what = f"{fault.kind!r} happens to a cloud only in `isthmus simulate`"
            cure = 'use kind = "freeze" with a duration' if fault.kind == "slow" else 'use kind = "kill"'
            yield Finding(place=(*place, "kind"), what=what, cure=cure)
        elif isinstance(fault, _Killed) and (fault.rank or 0) >= clouds[fault.cloud]:
            what = f"cloud {fault.cloud!r} has no rank {fault.rank}"
            cure = f"give one from 0 to {clouds[fault.cloud] - 1}, or none for all"
            yield Finding(place=(*place, "rank"), what=what, cure=cure)
        return
    if links is not None and {fault.between, fault.between[::-1]}.isdisjoint(links):
        what = "the job has no link between {!r} and {!r}".format(*fault.between)
        cure = suggest("-".join(fault.between), ["-".join(pair) for pair in links])
        yield Finding(place=(*place, "between"), what=what, cure=cure)
    if isinstance(fault, _Corruption) and fault.sender not in (None, *fault.between):
        what = f"must be one of the two clouds, not {fault.sender!r}"
        yield Finding(place=(*place, "from"), what=what, cure=f"name one of {' and '.join(fault.between)}")


def _faults(table: _Table, seed: str) -> Iterator[Fault | CloudFault]:
    """The faults that a table stands for, each at a time of its own."""
    values = {key: value for key, value in table if key not in ("kind", "at_s", "until_s", "times")}
    draw = random.Random(seed)  # noqa: S311 (no secret)
    for _ in range(table.times):
        at_s = table.at_s if table.until_s is None else draw.uniform(table.at_s, table.until_s)
        if isinstance(table, _OfCloud):
            yield CloudFault(kind=CloudFaultKind(table.kind), at_s=at_s, **values)
        else:
            yield Fault(kind=FaultKind(table.kind), at_s=at_s, **values)
