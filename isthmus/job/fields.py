"""Types of the job's fields: text with units and addresses in the file, plain SI numbers in Python."""

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from isthmus.errors import FieldError
from isthmus.job.codec import CODEC_NAMES, BoundarySpec, CodecSpec, parse_boundary, parse_codec
from isthmus.job.mistakes import show_value
from isthmus.units import BANDWIDTH, BYTES, BYTES_PER_S, DURATION, FLOPS, Quantity, suggest

_ADDRESS: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")
_HOST: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?")
_PROXY_SCHEME: Final = "http://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host (a DNS name, or an IP address without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address that "host:port" or "[IPv6]:port" names."""
    found = _ADDRESS.fullmatch(text)
    if found is not None and 1 <= int(found["port"]) <= 65535:
        ipv6, name = found["ipv6"], found["host"]
        if _is_host(name) if ipv6 is None else _is_ip(ipv6, version=6):
            return Address(host=name if ipv6 is None else ipv6, port=int(found["port"]))
    bare = text.strip("[]")
    cure = 'write "host:port", a port up to 65535, an IPv6 host in brackets: "[2001:db8::7]:7600"'
    if _is_ip(bare, version=6):
        cure = f'add a port: "[{bare}]:7600"'
    elif _is_host(text):
        cure = f'add a port: "{text}:7600"'
    raise FieldError(f"{text!r} is no address", cure=cure)


def parse_public_address(text: str) -> Address:
    """Return an address that other clouds can dial."""
    address = parse_address(text)
    if address.host in ("0.0.0.0", "::"):  # noqa: S104 this refuses it
        raise FieldError(
            f"other clouds cannot dial {address.host!r}",
            cure="give the host under which they reach this cloud",
        )
    return address


def parse_proxy(text: str) -> Address:
    """Return the address of the HTTP CONNECT proxy that "http://host:port" names."""
    if not text.startswith(_PROXY_SCHEME):
        raise FieldError(f"{text!r} is no HTTP proxy", cure='write "http://host:port"')
    return parse_address(text.removeprefix(_PROXY_SCHEME).removesuffix("/"))


def format_proxy(address: Address) -> str:
    """Return the proxy's address as the job file writes it."""
    return f"{_PROXY_SCHEME}{address}"


def _is_host(text: str) -> bool:
    if re.fullmatch(r"[0-9.]+", text):
        return _is_ip(text, version=4)
    return _HOST.fullmatch(text) is not None and len(text) <= 253


def _is_ip(text: str, *, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


_FROM_FILE: Final = "from a file"


class Frozen(BaseModel):
    """A part of the job: immutable, no unknown keys, no silent conversions.

    The text below a field is its description in the JSON schema.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def from_tables(cls, tables: Mapping[str, object]) -> Self:
        """Return the model of TOML tables, where a number other than 0 needs its unit."""
        return cls.model_validate(tables, by_alias=True, by_name=False, context=_FROM_FILE)

    @classmethod
    def toml_schema(cls) -> dict[str, Any]:
        """Return the JSON schema of those tables, by the keys that TOML uses."""
        return cls.model_json_schema(schema_generator=_TomlSchema)


class _TomlSchema(GenerateJsonSchema):
    """JSON schema in TOML's words: units as text, no null, no titles that repeat the key."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        json_schema = super().model_schema(schema)
        # Only a model, not a field by itself, writes its defaults with their units.
        model = cast("type[Frozen]", schema["cls"]).model_construct()
        for key, default in model.model_dump(mode="json", exclude_none=True).items():
            json_schema["properties"][key]["default"] = default
        for node in json_schema["properties"].values():
            if "description" in node:
                node["description"] = " ".join(node["description"].split())
        return json_schema

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002 pydantic's signature
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """A number that the file writes with its unit, and the bounds it must keep; annotates a field's type."""

    quantity: Quantity
    least: float
    most: float = math.inf

    def read(self, value: object, info: ValidationInfo) -> float:
        """Return the number in SI units, within the bounds."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise FieldError(f"must be text with a unit, not {show_value(value)}")
        needs_unit = isinstance(value, str) or info.context == _FROM_FILE
        number = self.quantity.parse(str(value)) if needs_unit else float(value)
        for bound, word in ((self.least, "least"), (self.most, "most")):
            if not (number >= bound if word == "least" else number <= bound):
                raise FieldError(f"must be at {word} {self.write(bound)}, not {show_value(value)}")
        return number

    def write(self, number: float) -> str:
        """Return the text that reads back as the same number."""
        return self.quantity.format(number, exact=True)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        text: CoreSchema = core_schema.str_schema()
        may_be_0 = self.least == 0
        return core_schema.with_info_before_validator_function(
            lambda value, info: cast("type", source)(self.read(value, info)),
            handler(source),
            serialization=core_schema.plain_serializer_function_ser_schema(self.write),
            json_schema_input_schema=(
                core_schema.union_schema([text, core_schema.literal_schema([0])]) if may_be_0 else text
            ),
        )


# Bounds are wide enough for all that is built or planned, and narrow enough to catch a wrong unit.
_BANDWIDTH: Final = _Measure(quantity=BANDWIDTH, least=1e3, most=100e12)
_DURATION: Final = _Measure(quantity=DURATION, least=1)
_MEMORY: Final = _Measure(quantity=BYTES, least=1, most=2**50)

Bandwidth = Annotated[float, _BANDWIDTH]
TripTime = Annotated[float, replace(_DURATION, least=0, most=60)]
HeartbeatTimeout = Annotated[float, replace(_DURATION, most=3600)]
CheckpointInterval = Annotated[float, replace(_DURATION, most=7 * 86400)]
Patience = Annotated[float, replace(_DURATION, least=0, most=30 * 86400)]
Deadline = Annotated[float, _DURATION]
Time = Annotated[float, replace(_DURATION, least=0)]
PositiveTime = Annotated[float, replace(_DURATION, least=1e-3)]
Memory = Annotated[int, _MEMORY]
CacheMemory = Annotated[int, replace(_MEMORY, least=0)]
MemoryBandwidth = Annotated[float, _Measure(quantity=BYTES_PER_S, least=1e6, most=1e15)]
Flops = Annotated[float, _Measure(quantity=FLOPS, least=1e9, most=1e18)]
Price = Annotated[float, Field(ge=0, le=1_000_000)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Counts = Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
LayerNumbers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
Text = Annotated[str, Field(min_length=1)]


def matching(pattern: str, *, what: str, cure: str) -> AfterValidator:
    """Refuses text that a regular expression does not match."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise FieldError(f"{text!r} {what}", cure=cure)
        return text

    return AfterValidator(check)


def _checked_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise FieldError("must have each name once")
    return names


# `isthmus` would make a strange server name; `authority` names the authority's own files.
CLOUD_NAME: Final = r"(?!(?:isthmus|authority)(?:\.|$))[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
"""The names of clouds: DNS labels in lower case, which are a part of TLS server names."""

Names = Annotated[tuple[Text, ...], Field(strict=False, min_length=1), AfterValidator(_checked_names)]


def _read_directions(value: object, info: ValidationInfo) -> tuple[float, ...]:
    both = value if isinstance(value, list | tuple) else (value, value)
    if len(both) != 2:
        raise FieldError(f"must be one bandwidth or a list of two, not of {len(both)}")
    return tuple(_BANDWIDTH.read(one, info) for one in both)


def _write_directions(both_bps: tuple[float, float]) -> str | list[str]:
    first, second = map(_BANDWIDTH.write, both_bps)
    return first if first == second else [first, second]


Directions = Annotated[
    tuple[float, float],
    BeforeValidator(_read_directions, json_schema_input_type=str | tuple[str, str]),
    PlainSerializer(_write_directions),
]


def _text_of(noun: str, kinds: type | UnionType, parse: Callable[[str], object]) -> PlainValidator:
    """Reads the text of one of these classes; an object of them is left as it is."""

    def read(value: object) -> object:
        if isinstance(value, kinds):
            return value
        if isinstance(value, str):
            return parse(value)
        raise FieldError(f"must be {noun}, not {show_value(value)}")

    return PlainValidator(read, json_schema_input_type=str)


def parse_codec_choice(text: str) -> CodecSpec | Literal["auto"]:
    """Return the codec of one direction, "auto" where the planner is to choose it."""
    name = text.strip()
    if name == "auto":
        return "auto"
    if name.isidentifier() and name not in CODEC_NAMES:
        raise FieldError(f"unknown codec {name!r}", cure=suggest(name, ("auto", *CODEC_NAMES)))
    return parse_codec(text)


Listen = Annotated[Address, _text_of("text", Address, parse_public_address), PlainSerializer(str)]
Gateway = Annotated[Address, _text_of("text", Address, parse_address), PlainSerializer(str)]
Proxy = Annotated[Address, _text_of("text", Address, parse_proxy), PlainSerializer(format_proxy)]
CodecChoice = Annotated[
    CodecSpec | Literal["auto"],
    _text_of("the text of a codec", CodecSpec, parse_codec_choice),
    PlainSerializer(str),
]
BoundaryChoice = Annotated[
    BoundarySpec, _text_of("the text of a boundary", BoundarySpec, parse_boundary), PlainSerializer(str)
]


Stripes = Literal["auto"] | Annotated[int, Field(ge=1, le=64)]
Caps = Count | Counts
Pair = Annotated[tuple[Text, Text], Field(strict=False)]
