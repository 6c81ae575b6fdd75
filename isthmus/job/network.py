"""The clouds of a job and the links between them."""

import re
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WrapSerializer,
    model_validator,
)

from isthmus.errors import FieldError
from isthmus.job.codec import CodecSpec, HiddenSpec, gradient_codec, parse_codec
from isthmus.job.codec_steps import Feedback
from isthmus.job.fields import (
    Address,
    Bandwidth,
    BoundaryChoice,
    CodecChoice,
    Directions,
    Flops,
    Frozen,
    Gateway,
    HeartbeatTimeout,
    Listen,
    Memory,
    Pair,
    Price,
    Proxy,
    Stripes,
    TripTime,
    parse_codec_choice,
    show_value,
)

_CLOUD_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_RAW: Final = parse_codec("raw")
_MAX_RANKS: Final = 16384


def _checked_cloud_name(name: str) -> str:
    if not _CLOUD_NAME.fullmatch(name):
        raise FieldError(
            f"{name!r} is no DNS label", cure="use up to 63 of a-z, 0-9 and '-', with no '-' at either end"
        )
    # The first would make a strange server name; the second names the authority's own files.
    if name in ("isthmus", "authority"):
        raise FieldError(f"{name!r} is reserved", cure="choose another name")
    return name


def _or_listen(gateway: Address | None, info: ValidationInfo) -> Address | None:
    return gateway or info.data.get("listen")


class CloudSpec(Frozen):
    """One cluster, with a fast network inside."""

    name: Annotated[str, AfterValidator(_checked_cloud_name)] = Field(
        description="DNS label in lower case; part of the TLS server name", examples=["east"]
    )
    device: Literal["cuda", "npu", "xpu", "cpu", "auto"] = Field(
        default="auto", description="kind of device", examples=["cuda"]
    )
    ranks: int = Field(
        default=1,
        ge=1,
        le=_MAX_RANKS,
        description="number of devices, one process each; at most 16384",
        examples=[8],
    )
    sharding: Literal["auto", "none", "optimizer", "full"] = Field(
        default="auto",
        description="what of a stage the cloud's ranks share out: nothing, all but the gathered weights of a "
        'step, or all, where ranks run in lock-step; "auto": the plan chooses, and nothing without one',
        examples=["optimizer"],
    )
    memory_bytes: Memory | None = Field(
        default=None, alias="memory", description="memory of one device", examples=["80 GiB"]
    )
    flops: Flops | None = Field(
        default=None, description="computing speed of one device", examples=["312 TFLOPS"]
    )
    accelerator: str | None = Field(
        default=None,
        min_length=1,
        description="the device's name in the catalogue or in an [[accelerator]] table",
        examples=["h100"],
    )
    profile: str | None = Field(
        default=None,
        min_length=1,
        description="file that `isthmus profile` wrote on this cloud; its figures override the catalogue's",
        examples=["east.profile.json"],
    )
    listen: Listen | None = Field(
        default=None,
        description="where other clouds reach this one; a cloud without it only dials out",
        examples=["east.example.com:7600"],
    )
    gateway: Annotated[Gateway | None, AfterValidator(_or_listen)] = Field(
        default=None,
        validate_default=True,
        description="where the cloud's own ranks reach its gateway; as `listen` unless given",
        examples=["10.0.0.5:7600"],
    )
    proxy: Proxy | None = Field(
        default=None, description="HTTP CONNECT proxy for dialling out", examples=["http://10.0.0.1:3128"]
    )
    certificates: str = Field(
        default="certs",
        min_length=1,
        description="folder of this cloud's key and certificates",
        examples=["certs"],
    )
    usd_per_hour: Price | None = Field(default=None, description="price of the whole cloud", examples=[20.0])
    inside_bps: Bandwidth = Field(
        default=200e9,
        alias="inside_bandwidth",
        description="between its devices, of each, for planning",
        examples=["200 Gbps"],
    )


class CodecSpecs(Frozen):
    """The codecs of a link: one for activations, one for gradients."""

    forward: CodecChoice = Field(
        default=_RAW, description='codec of activations, or "auto"', examples=["rotate | int4"]
    )
    backward: CodecChoice = Field(
        default=_RAW, description='codec of gradients, or "auto"', examples=["rotate | int4(stochastic)"]
    )

    @model_validator(mode="after")
    def _fit_each_other(self) -> Self:
        if isinstance(self.forward, CodecSpec):
            if isinstance(self.backward, CodecSpec):
                gradient_codec(self.forward, self.backward)
            _check_forward(self.forward, self.backward)
        return self


def _check_forward(forward: CodecSpec, backward: CodecSpec | Literal["auto"]) -> None:
    first, *rest = forward.steps
    if isinstance(first, Feedback):
        raise FieldError(
            "the forward codec can have no feedback: what one sample lost would be added to another",
            cure=_feedback_cure(first, CodecSpec(steps=tuple(rest)), backward),
        )


def _feedback_cure(feedback: Feedback, forward: CodecSpec, backward: CodecSpec | Literal["auto"]) -> str:
    try:
        gradients = _with_feedback(feedback, forward if isinstance(backward, str) else backward)
        gradient_codec(forward, gradients)
    except FieldError:
        return f'leave it out: forward = "{forward}"'
    return f'use it for gradients: codec = {{ forward = "{forward}", backward = "{gradients}" }}'


def _with_feedback(feedback: Feedback, codec: CodecSpec) -> CodecSpec:
    if isinstance(codec.steps[0], Feedback):
        return codec
    return CodecSpec(steps=(feedback, *codec.steps))


def _read_codecs(value: object) -> object:
    if isinstance(value, dict | CodecSpecs):
        return value
    if not isinstance(value, str):
        raise FieldError(f"must be the text of a codec or a table, not {show_value(value)}")
    both = parse_codec_choice(value)
    return {"forward": both, "backward": both}


def _write_codecs(codecs: CodecSpecs, serialize: SerializerFunctionWrapHandler) -> object:
    return str(codecs.forward) if codecs.forward == codecs.backward else serialize(codecs)


class LinkSpec(Frozen):
    """The WAN between two clouds."""

    between: Pair = Field(description="names of the two clouds", examples=[["east", "west"]])
    bandwidth_bps: Directions | None = Field(
        default=None,
        alias="bandwidth",
        description="bandwidth, one text for both ways or a list: first to second cloud, second to first",
        examples=["1 Gbps"],
    )
    rtt_s: TripTime | None = Field(
        default=None, alias="rtt", description="round-trip time, as ping shows it", examples=["60 ms"]
    )
    jitter_s: TripTime = Field(
        default=0.0, alias="jitter", description="variation of the round-trip time", examples=["2 ms"]
    )
    handling_s: TripTime = Field(
        default=0.0,
        alias="handling",
        description="what both ends take to hand a message over, beside its way; for planning",
        examples=["1.5 ms"],
    )
    connection_bps: Bandwidth | None = Field(
        default=None,
        alias="connection_bandwidth",
        description="the most that one TCP connection reaches",
        examples=["150 Mbps"],
    )
    stripes: Stripes = Field(
        default="auto", description='TCP connections that carry bulk traffic: "auto" or 1 to 64', examples=[8]
    )
    heartbeat_timeout_s: HeartbeatTimeout = Field(
        default=30.0,
        alias="heartbeat_timeout",
        description="a peer that is silent for this long is lost; 1 s to 1 h",
        examples=["30 s"],
    )
    usd_per_gib: Price | None = Field(
        default=None, description="price of the traffic, per GiB", examples=[0.08]
    )
    codec: Annotated[
        CodecSpecs,
        BeforeValidator(_read_codecs, json_schema_input_type=str | CodecSpecs),
        WrapSerializer(_write_codecs),
    ] = Field(
        default=CodecSpecs(),
        description='codec of both directions, a table with `forward` and `backward`, or "auto"',
        examples=["rotate | int4"],
    )
    boundary: BoundaryChoice = Field(
        default=HiddenSpec(),
        description='what crosses between stages: "hidden" states, or a trained bottleneck',
        examples=["bottleneck(64, warmup=100)"],
    )
    guard_every: int = Field(
        default=50,
        ge=0,
        description="every so many-th coded message is measured by its sender; 0 for none",
        examples=[50],
    )
    guard_cosine: float = Field(
        default=0.98,
        ge=-1,
        le=1,
        description="a codec is made milder when what arrives has a lower cosine to what was sent",
        examples=[0.98],
    )

    @property
    def name(self) -> str:
        """The link's name in messages and overrides, such as east-west."""
        return "-".join(self.between)

    def peer_of(self, cloud_name: str) -> str:
        """Return the cloud at the other end."""
        first, second = self.between
        return second if cloud_name == first else first
