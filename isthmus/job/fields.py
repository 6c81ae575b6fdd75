"""Types of the job's fields: text with a unit in the file, plain SI numbers in Python."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
)

from isthmus.job.address import Address, format_proxy, parse_address, parse_proxy, parse_public_address
from isthmus.job.boundary import BottleneckSpec, BoundarySpec, HiddenSpec, parse_boundary
from isthmus.job.codec import CODEC_NAMES, CodecSpec, parse_codec
from isthmus.job.findings import FieldError, show_value, suggest
from isthmus.units import (
    format_bandwidth,
    format_bytes,
    format_duration,
    format_flops,
    parse_bandwidth_bps,
    parse_bytes,
    parse_duration_s,
    parse_flops,
)

FROM_FILE: Final = "from a job file"
"""Validation context of values read from a job file, where a number other than 0 needs its unit."""

_MAX_STRIPES: Final = 64
# Wide enough for all that is built or planned, and narrow enough to catch a unit that slipped.
_SLOWEST_BPS: Final = 1e3
_FASTEST_BPS: Final = 100e12
_LONGEST_TRIP_S: Final = 60
_SLOWEST_FLOPS: Final = 1e9
_FASTEST_FLOPS: Final = 1e18
_LARGEST_MEMORY_BYTES: Final = 2**50
_SLOWEST_MEMORY_BYTES_PER_S: Final = 1e6
_FASTEST_MEMORY_BYTES_PER_S: Final = 1e15
_HIGHEST_PRICE_USD: Final = 1_000_000


class Frozen(BaseModel):
    """A part of the job: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounded:
    """A number that the file writes with its unit, and the bounds it must keep."""

    parse: Callable[[str], float]
    format: Callable[..., str]
    least: float
    most: float = math.inf

    def read(self, value: object, info: ValidationInfo) -> float:
        """Return the number in SI units, within the bounds."""
        number = self._number(value, info)
        if not number >= self.least:
            raise FieldError(f"must be at least {self.write(self.least)}, not {show_value(value)}")
        if not number <= self.most:
            raise FieldError(f"must be at most {self.write(self.most)}, not {show_value(value)}")
        return number

    def write(self, number: float) -> str:
        """Return the text that reads back as the same number."""
        return self.format(number, exact=True)

    def _number(self, value: object, info: ValidationInfo) -> float:
        match value:
            case str():
                return self.parse(value)
            case bool():
                pass
            case int() | float():
                return self.parse(str(value)) if info.context == FROM_FILE else value
        raise FieldError(f"must be text with a unit, not {show_value(value)}")


_BANDWIDTH: Final = _Bounded(
    parse=parse_bandwidth_bps, format=format_bandwidth, least=_SLOWEST_BPS, most=_FASTEST_BPS
)
_DURATION: Final = _Bounded(parse=parse_duration_s, format=format_duration, least=0)
_TRIP: Final = replace(_DURATION, most=_LONGEST_TRIP_S)
_MEMORY: Final = _Bounded(parse=parse_bytes, format=format_bytes, least=1, most=_LARGEST_MEMORY_BYTES)
_FLOPS: Final = _Bounded(parse=parse_flops, format=format_flops, least=_SLOWEST_FLOPS, most=_FASTEST_FLOPS)
_HEARTBEAT_TIMEOUT: Final = replace(_DURATION, least=1, most=3600)
_CHECKPOINT_INTERVAL: Final = replace(_DURATION, least=1, most=7 * 86400)
_CACHE: Final = replace(_MEMORY, least=0)
_DEADLINE: Final = replace(_DURATION, least=1)


def _parse_bytes_per_s(text: str) -> float:
    size, slash, second = text.rpartition("/")
    if not slash or second.strip() != "s":
        raise ValueError(f"{text!r} is not a speed of memory such as '3.35 TB/s'")
    return parse_bytes(size)


def _format_bytes_per_s(bytes_per_s: float, *, exact: bool = False) -> str:
    return f"{format_bytes(round(bytes_per_s), exact=exact)}/s"


_MEMORY_BANDWIDTH: Final = _Bounded(
    parse=_parse_bytes_per_s,
    format=_format_bytes_per_s,
    least=_SLOWEST_MEMORY_BYTES_PER_S,
    most=_FASTEST_MEMORY_BYTES_PER_S,
)


def _read_directions(value: object, info: ValidationInfo) -> tuple[float, ...]:
    both = value if isinstance(value, list | tuple) else (value, value)
    if len(both) != 2:
        raise FieldError(f"must be one bandwidth or a list of two, not of {len(both)}")
    return tuple(_BANDWIDTH.read(one, info) for one in both)


def _write_directions(both_bps: tuple[float, float]) -> str | list[str]:
    first, second = map(_BANDWIDTH.write, both_bps)
    return first if first == second else [first, second]


def _address(parse: Callable[[str], Address]) -> PlainValidator:
    def read(value: object) -> Address:
        if isinstance(value, Address):
            return value
        if isinstance(value, str):
            return parse(value)
        raise FieldError(f"must be text, not {show_value(value)}")

    return PlainValidator(read, json_schema_input_type=str)


def read_codec(value: object) -> CodecSpec | Literal["auto"]:
    """Return the codec of one direction, "auto" where the planner is to choose it."""
    if isinstance(value, CodecSpec):
        return value
    if not isinstance(value, str):
        raise FieldError(f"must be the text of a codec, not {show_value(value)}")
    name = value.strip()
    if name == "auto":
        return "auto"
    if name.isidentifier() and name not in CODEC_NAMES:
        raise FieldError(f"unknown codec {name!r}", cure=suggest(name, ("auto", *CODEC_NAMES)))
    return parse_codec(value)


def _read_boundary(value: object) -> BoundarySpec:
    if isinstance(value, HiddenSpec | BottleneckSpec):
        return value
    if not isinstance(value, str):
        raise FieldError(f"must be the text of a boundary, not {show_value(value)}")
    return parse_boundary(value)


def _read_stripes(value: object) -> int | Literal["auto"]:
    match value:
        case "auto":
            return "auto"
        case int() if not isinstance(value, bool) and 1 <= value <= _MAX_STRIPES:
            return value
    raise FieldError(f'must be "auto" or a whole number from 1 to {_MAX_STRIPES}, not {show_value(value)}')


def _read_caps(value: object) -> int | tuple[int, ...]:
    each = value if isinstance(value, list | tuple) else [value]
    counts = [one for one in each if isinstance(one, int) and not isinstance(one, bool) and one >= 1]
    if not each or len(counts) < len(each):
        raise FieldError(
            f"must be a whole number of at least 1 or a list of such, not {show_value(value)}",
            cure="for example 8, or [8, 2] for two stages",
        )
    return tuple(counts) if each is value else counts[0]


def _read_pair(value: object) -> tuple[str, str]:
    match value:
        case [str(first), str(second)]:
            return first, second
    raise FieldError("must be a list of the names of two clouds")


Bandwidth = Annotated[
    float, BeforeValidator(_BANDWIDTH.read, json_schema_input_type=str), PlainSerializer(_BANDWIDTH.write)
]
Directions = Annotated[
    tuple[float, float],
    BeforeValidator(_read_directions, json_schema_input_type=str | tuple[str, str]),
    PlainSerializer(_write_directions),
]
TripTime = Annotated[
    float,
    BeforeValidator(_TRIP.read, json_schema_input_type=str | Literal[0]),
    PlainSerializer(_TRIP.write),
]
HeartbeatTimeout = Annotated[
    float,
    BeforeValidator(_HEARTBEAT_TIMEOUT.read, json_schema_input_type=str),
    PlainSerializer(_DURATION.write),
]
CheckpointInterval = Annotated[
    float,
    BeforeValidator(_CHECKPOINT_INTERVAL.read, json_schema_input_type=str),
    PlainSerializer(_DURATION.write),
]
Deadline = Annotated[
    float, BeforeValidator(_DEADLINE.read, json_schema_input_type=str), PlainSerializer(_DURATION.write)
]
MemoryBandwidth = Annotated[
    float,
    BeforeValidator(_MEMORY_BANDWIDTH.read, json_schema_input_type=str),
    PlainSerializer(_MEMORY_BANDWIDTH.write),
]
Memory = Annotated[
    int, BeforeValidator(_MEMORY.read, json_schema_input_type=str), PlainSerializer(_MEMORY.write)
]
CacheMemory = Annotated[
    int, BeforeValidator(_CACHE.read, json_schema_input_type=str | Literal[0]), PlainSerializer(_CACHE.write)
]
Flops = Annotated[
    float, BeforeValidator(_FLOPS.read, json_schema_input_type=str), PlainSerializer(_FLOPS.write)
]
Price = Annotated[float, Field(ge=0, le=_HIGHEST_PRICE_USD)]
Listen = Annotated[Address, _address(parse_public_address), PlainSerializer(str)]
Gateway = Annotated[Address, _address(parse_address), PlainSerializer(str)]
Proxy = Annotated[Address, _address(parse_proxy), PlainSerializer(format_proxy)]
CodecChoice = Annotated[
    CodecSpec | Literal["auto"], PlainValidator(read_codec, json_schema_input_type=str), PlainSerializer(str)
]
BoundaryChoice = Annotated[
    BoundarySpec, PlainValidator(_read_boundary, json_schema_input_type=str), PlainSerializer(str)
]
Stripes = Annotated[
    int | Literal["auto"],
    BeforeValidator(
        _read_stripes,
        json_schema_input_type=Annotated[int, Field(ge=1, le=_MAX_STRIPES)] | Literal["auto"],
    ),
]
_Cap = Annotated[int, Field(ge=1)]
Caps = Annotated[
    int | tuple[int, ...],
    BeforeValidator(_read_caps, json_schema_input_type=_Cap | tuple[_Cap, ...]),
]
Pair = Annotated[tuple[str, str], BeforeValidator(_read_pair, json_schema_input_type=tuple[str, str])]
