"""The clouds of a job and the links between them."""

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
    Text,
    TripTime,
    matching,
    parse_codec_choice,
)
from isthmus.job.mistakes import show_value

_RAW: Final = parse_codec("raw")


def _or_listen(gateway: Address | None, info: ValidationInfo) -> Address | None:
    return gateway or info.data.get("listen")


class CloudSpec(Frozen):
    """One cluster, with a fast network inside."""

    # `isthmus` would make a strange server name; `authority` names the authority's own files.
    name: Annotated[
        str,
        matching(
            r"(?!(isthmus|authority)$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
            what="is no DNS label, or reserved",
            cure="use up to 63 of a-z, 0-9 and '-', with no '-' at either end, not isthmus or authority",
        ),
    ] = Field(examples=["east"])
    """DNS label in lower case; part of the TLS server name."""
    device: Literal["cuda", "npu", "xpu", "cpu", "auto"] = Field("auto", examples=["cuda"])
    """Kind of device."""
    ranks: int = Field(1, ge=1, le=16384, examples=[8])
    """Number of devices, one process each; at most 16384."""
    sharding: Literal["auto", "none", "optimizer", "full"] = "auto"
    """What of a stage is sharded over the cloud's ranks: nothing, all but the gathered weights of a step, or
    all, with the same schedule on all ranks; "auto": the plan chooses, and nothing without one."""
    memory_bytes: Memory | None = Field(None, alias="memory", examples=["80 GiB"])
    """Memory of one device."""
    flops: Flops | None = Field(None, examples=["312 TFLOPS"])
    """Computing speed of one device."""
    accelerator: Text | None = Field(None, examples=["h100"])
    """The device's name in the catalogue or in an [[accelerator]] table."""
    profile: Text | None = Field(None, examples=["east.profile.json"])
    """File that `isthmus profile` wrote on this cloud; its figures override the catalogue's."""
    listen: Listen | None = Field(None, examples=["east.example.com:7600"])
    """Where other clouds reach this one; a cloud without it only dials out."""
    gateway: Annotated[Gateway | None, AfterValidator(_or_listen)] = Field(
        None, validate_default=True, examples=["10.0.0.5:7600"]
    )
    """Where the cloud's own ranks reach its gateway; as `listen` unless given."""
    proxy: Proxy | None = Field(None, examples=["http://10.0.0.1:3128"])
    """HTTP CONNECT proxy for dialling out."""
    certificates: Text = "certs"
    """Folder of this cloud's key and certificates."""
    usd_per_hour: Price | None = Field(None, examples=[20.0])
    """Price of the whole cloud."""
    inside_bps: Bandwidth = Field(200e9, alias="inside_bandwidth")
    """Bandwidth between its devices, of each, for planning."""


class CodecSpecs(Frozen):
    """The codecs of a link: one for activations, one for gradients."""

    forward: CodecChoice = Field(_RAW, examples=["rotate | int4"])
    """Codec of activations, or "auto"."""
    backward: CodecChoice = Field(_RAW, examples=["rotate | int4(stochastic)"])
    """Codec of gradients, or "auto"."""

    @model_validator(mode="after")
    def _fit_each_other(self) -> Self:
        if isinstance(self.forward, CodecSpec):
            if isinstance(self.backward, CodecSpec):
                gradient_codec(self.forward, self.backward)
            first, *rest = self.forward.steps
            if isinstance(first, Feedback):
                raise FieldError(
                    "the forward codec can have no feedback: what one sample lost would be added to another",
                    cure=f'leave it to the backward codec: forward = "{CodecSpec(steps=tuple(rest))}"',
                )
        return self


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

    between: Pair = Field(examples=[["east", "west"]])
    """Names of the two clouds."""
    bandwidth_bps: Directions | None = Field(None, alias="bandwidth", examples=["1 Gbps"])
    """Bandwidth, one text for both ways or a list: first to second cloud, second to first."""
    rtt_s: TripTime | None = Field(None, alias="rtt", examples=["60 ms"])
    """Round-trip time, as ping shows it."""
    jitter_s: TripTime = Field(0.0, alias="jitter", examples=["2 ms"])
    """Variation of the round-trip time."""
    handling_s: TripTime = Field(0.0, alias="handling", examples=["1.5 ms"])
    """Time that both ends take to hand a message over, beside its travel; for planning."""
    connection_bps: Bandwidth | None = Field(None, alias="connection_bandwidth", examples=["150 Mbps"])
    """The most that one TCP connection reaches."""
    stripes: Stripes = Field("auto", examples=[8])
    """TCP connections that carry bulk data: "auto" or 1 to 64."""
    heartbeat_timeout_s: HeartbeatTimeout = Field(30.0, alias="heartbeat_timeout")
    """A peer that is silent for this long is lost; 1 s to 1 h."""
    usd_per_gib: Price | None = Field(None, examples=[0.08])
    """Price of what crosses, per GiB."""
    codec: Annotated[
        CodecSpecs,
        BeforeValidator(_read_codecs, json_schema_input_type=str | CodecSpecs),
        WrapSerializer(_write_codecs),
    ] = Field(CodecSpecs(), examples=["rotate | int4"])
    """Codec of both directions, a table with `forward` and `backward`, or "auto"."""
    boundary: BoundaryChoice = Field(HiddenSpec(), examples=["bottleneck(64, warmup=100)"])
    """What crosses between stages: "hidden" states, or a trained bottleneck."""
    guard_every: int = Field(50, ge=0)
    """Every so many-th coded message is measured by its sender; 0 for none."""
    guard_cosine: float = Field(0.98, ge=-1, le=1)
    """A codec is made less lossy when what arrives has a lower cosine to what was sent."""

    @property
    def name(self) -> str:
        """The link's name in messages and overrides, such as east-west."""
        return "-".join(self.between)

    def peer_of(self, cloud_name: str) -> str:
        """Return the cloud at the other end."""
        first, second = self.between
        return second if cloud_name == first else first
