"""Reads files of faults (what fails, when, for how long) for a run on this machine or a simulated one.

Times count from the first step of a run. Random ones are drawn from the seed of the file.
"""

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Final, Literal

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


class _OfCloud(_Timed):
    cloud: Text = Field(examples=["east"])


class _SlowCloud(_OfCloud):
    kind: Literal["slow"]
    duration_s: _Duration
    factor: _Factor


class _AtOnce(_OfCloud):
    kind: Literal["gone", "spoil"]


class _FullDisk(_OfCloud):
    kind: Literal["fill-disk"]
    duration_s: _Duration


class _Killed(_OfCloud):
    kind: Literal["kill"]
    rank: int | None = Field(None, ge=0)


class _FrozenCloud(_OfCloud):
    kind: Literal["freeze"]
    rank: int | None = Field(None, ge=0)
    duration_s: _Duration


_CloudTable = _SlowCloud | _AtOnce | _FullDisk | _Killed | _FrozenCloud
_Table = _Interruption | _SlowDown | _Corruption | _CloudTable


class _FaultFile(Frozen):
    seed: int = Field(0, ge=0)
    fault: tuple[Annotated[_Table, Field(discriminator="kind")], ...] = Field(
        strict=False, min_length=1, examples=[[{"kind": "cut"}]]
    )


def load_faults(
    path: Path,
    *,
    links: Collection[tuple[str, str]],
    clouds: Mapping[str, int],
    verb: Literal["probe", "run", "simulate"],
) -> tuple[Fault | CloudFault, ...]:
    """Return the faults in a TOML file by time, which the command `verb` is to play.

    `links` are the pairs of clouds that it may name, `clouds` the numbers of ranks by cloud.
    """
    tables = parse_toml(read_text(path, what="a file of faults"), path)
    read, findings = check(_FaultFile, tables)
    for number, fault in enumerate(read.fault if read else ()):
        found = (
            _cloud_conflicts(fault, clouds, verb)
            if isinstance(fault, _OfCloud)
            else _link_conflicts(fault, links)
        )
        findings += [
            Finding(place=("fault", number, key), what=what, cure=cure)
            for key, what, cure in (*_time_conflicts(fault), *found)
        ]
    if findings or read is None:
        raise JobError(path, tuple(finding.as_problem(tables) for finding in findings))
    drawn = [_faults(table, f"{read.seed}.{number}") for number, table in enumerate(read.fault)]
    return tuple(sorted(chain(*drawn), key=lambda fault: fault.at_s))


_Conflict = tuple[str, str, str]
"""A key, what is wrong with it, and the cure."""
_SIMULATED_ONLY: Final = {"slow": 'use kind = "freeze" with a duration', "gone": 'use kind = "kill"'}


def _time_conflicts(fault: _Table) -> Iterator[_Conflict]:
    if fault.until_s is not None and fault.until_s <= fault.at_s:
        yield "until", "must be later than `at`", "give a later time"


def _cloud_conflicts(fault: _CloudTable, clouds: Mapping[str, int], verb: str) -> Iterator[_Conflict]:
    kind, rank = fault.kind, fault.rank if isinstance(fault, _Killed | _FrozenCloud) else None
    if verb == "probe":
        what = f"{kind!r} happens to a cloud, which only `isthmus simulate` and `run` play"
        yield "kind", what, 'use a fault of a link, such as kind = "cut"'
    elif fault.cloud not in clouds:
        yield "cloud", f"the job has no cloud {fault.cloud!r}", suggest(fault.cloud, clouds)
    elif verb == "run" and kind in _SIMULATED_ONLY:
        yield "kind", f"{kind!r} happens to a cloud only in `isthmus simulate`", _SIMULATED_ONLY[kind]
    elif (rank or 0) >= clouds[fault.cloud]:
        cure = f"give one from 0 to {clouds[fault.cloud] - 1}, or none for all"
        yield "rank", f"cloud {fault.cloud!r} has no rank {rank}", cure


def _link_conflicts(
    fault: _Interruption | _SlowDown | _Corruption, links: Collection[tuple[str, str]]
) -> Iterator[_Conflict]:
    if {fault.between, fault.between[::-1]}.isdisjoint(links):
        what = "the job has no link between {!r} and {!r}".format(*fault.between)
        yield "between", what, suggest("-".join(fault.between), ["-".join(pair) for pair in links])
    if isinstance(fault, _Corruption) and fault.sender not in (None, *fault.between):
        what = f"must be one of the two clouds, not {fault.sender!r}"
        yield "from", what, f"name one of {' and '.join(fault.between)}"


def _faults(table: _Table, seed: str) -> Iterator[Fault | CloudFault]:
    """Yield the faults of a table, each at a time of its own."""
    values = {key: value for key, value in table if key not in ("kind", "at_s", "until_s", "times")}
    draw = random.Random(seed)  # noqa: S311 (no secret)
    for _ in range(table.times):
        at_s = table.at_s if table.until_s is None else draw.uniform(table.at_s, table.until_s)
        if isinstance(table, _OfCloud):
            yield CloudFault(kind=CloudFaultKind(table.kind), at_s=at_s, **values)
        else:
            yield Fault(kind=FaultKind(table.kind), at_s=at_s, **values)
