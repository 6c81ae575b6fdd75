"""The sections of a job: what is trained and how, the clouds, and the links between them."""

import json
import tomllib
from collections.abc import Collection, Mapping
from importlib.resources import files
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
    CLOUD_NAME,
    Address,
    Bandwidth,
    BoundaryChoice,
    CacheMemory,
    Caps,
    CheckpointInterval,
    CodecChoice,
    Count,
    Counts,
    Deadline,
    Directions,
    Flops,
    Frozen,
    Gateway,
    HeartbeatTimeout,
    LayerNumbers,
    Listen,
    Memory,
    MemoryBandwidth,
    Names,
    Pair,
    Patience,
    Price,
    Proxy,
    Share,
    Stripes,
    Text,
    Time,
    TripTime,
    matching,
    parse_codec_choice,
)
from isthmus.job.mistakes import show_value
from isthmus.units import closest

_MODEL_KEYS_FILE: Final = files("isthmus.job").joinpath("model_keys.toml")
MODEL_KEYS: Final[Mapping[str, Collection[str]]] = {
    model_type: keys.split() for model_type, keys in tomllib.loads(_MODEL_KEYS_FILE.read_text()).items()
}
"""The keys of a model's configuration, known without transformers."""


def unknown_key(model_type: str, keys: Collection[str], known: Collection[str]) -> tuple[str, str] | None:
    """Return what is wrong with the first key that a configuration does not have, and the cure."""
    key = next((one for one in keys if one not in known), None)
    if key is None:
        return None
    meant = closest(key, known)
    cure = f"did you mean {meant!r}?" if meant else "transformers' documentation lists them"
    return f"the configuration of {model_type} has no key {key!r}", cure


class LoraSpec(Frozen):
    """Small adapters are trained beside the model's own weights, which stay as they are."""

    r: int = Field(16, ge=1, le=4096)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Weight of the adapters, times their rank."""
    targets: Names | None = Field(None, examples=[["q_proj", "v_proj"]])
    """Modules of each layer that get an adapter, by the end of their name; all linear ones if absent."""
    merge: bool = False
    """Export the whole model with the adapters in its weights, beside the adapter alone."""


def _checked_config(config: dict[str, object]) -> dict[str, object]:
    try:
        json.dumps(config, allow_nan=False)
    except (TypeError, ValueError) as error:
        cure = "use text, finite numbers, true, false, lists and tables"
        raise FieldError(f"has a value of the wrong kind: {error}", cure=cure) from None
    model_type = str(config.get("model_type"))
    # Of other models transformers knows the keys, when one is built.
    if wrong := unknown_key(model_type, config, MODEL_KEYS.get(model_type, config)):
        what, cure = wrong
        raise FieldError(what, cure=cure)
    return config


class ABNetSpec(Frozen):
    """The model is an encoder; joined with a second one by adapters, both translate."""

    decoder: Text | None = Field(None, examples=["google-bert/bert-base-german-cased"])
    """Hugging Face name or local folder of the second encoder, which decodes; as the first unless given."""
    decoder_config: Annotated[dict[str, object], AfterValidator(_checked_config)] | None = Field(
        None, examples=[{"model_type": "bert"}]
    )
    """Its configuration where weights are fresh; as the first's unless given."""
    adapter_width: Count = 512
    """Inner width of the feed-forward in each adapter."""
    encoder_adapters: LayerNumbers | None = Field(None, examples=[[4, 5]])
    """Layers of the encoder that have an adapter behind them, from 0 on; all unless given."""
    decoder_adapters: LayerNumbers | None = Field(None, examples=[[0, 2, 4]])
    """Layers of the decoder that have one; all unless given."""
    frozen: bool = True
    """Train adapters and head alone; false trains the encoders' own weights as well."""


class ModelSpec(Frozen):
    """What is trained: existing weights, or a configuration for fresh ones."""

    source: Text | None = Field(None, examples=["Qwen/Qwen3-0.6B"])
    """Hugging Face name or local folder."""
    config: Annotated[dict[str, object], AfterValidator(_checked_config)] | None = Field(
        None, examples=[{"model_type": "llama"}]
    )
    """Configuration of a model with fresh weights."""
    frozen_layers: int = Field(0, ge=0)
    """Layers, from the first on, that are not trained, and the embedding with them."""
    cache_frozen_bytes: CacheMemory = Field(2 * 1024**3, alias="cache_frozen")
    """Host memory for the outputs of frozen stages, so that they cross once; 0 for none."""
    trust_remote_code: bool = False
    """Run the Python code that the folder or repository of model or tokenizer brings, if any."""
    lora: LoraSpec | None = Field(None, examples=[{"r": 16}])
    """Train low-rank adapters instead of the weights; needs `peft`."""
    abnet: ABNetSpec | None = Field(None, examples=[{"adapter_width": 512}])
    """Join this encoder with a second one, for translation."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.source is None) == (self.config is None):
            which = "neither source nor config" if self.source is None else "both source and config"
            raise FieldError(
                f"has {which}", cure='give one: source = "Qwen/Qwen3-0.6B", or a [model.config] table'
            )
        if self.lora is not None and self.source is None:
            raise FieldError(
                "has adapters for fresh weights, which would never learn anything themselves",
                cure="start from weights by source, or leave the [model.lora] table out",
            )
        if self.abnet is not None:
            self._check_abnet(self.abnet)
        return self

    def _check_abnet(self, abnet: ABNetSpec) -> None:
        if (abnet.decoder if self.source is None else abnet.decoder_config) is not None:
            given, other = ("fresh", "decoder_config") if self.source is None else ("pretrained", "decoder")
            raise FieldError(
                f"has an encoder of {given} weights, and a decoder of others",
                cure=f"give the decoder by abnet.{other}, or leave it out",
            )
        if self.lora is not None:
            raise FieldError("has both lora and abnet", cure="leave one of the tables out")


_LABELLED: Final = ("sequence-classification", "token-classification")
_READERS: Final = {
    "text_column": ("causal-lm", "masked-lm", *_LABELLED, "translation"),
    "pair_column": ("masked-lm", "sequence-classification", "translation"),
    "label_column": _LABELLED,
    "id_column": ("translation",),
}


class DataSpec(Frozen):
    """The training data."""

    source: Text = Field(examples=["corpus/*.jsonl"])
    """Files, a Hugging Face dataset as "hf:...", or "builtin:...", which the package brings."""
    sequence_length: Count = 1024
    """Tokens per sequence, at most for a task that pads."""
    task: Literal[
        "causal-lm",
        "masked-lm",
        "sequence-classification",
        "token-classification",
        "question-answering",
        "translation",
    ] = "causal-lm"
    """What the model learns to do."""
    tokenizer: Text = Field("auto", examples=["Qwen/Qwen3-0.6B"])
    """Folder or Hugging Face name, "trained" on this data, or "auto": the model's own if any."""
    text_column: Text | None = Field(None, examples=["sentence"])
    """Column of the text, or of the words for token classification; "text" or "tokens"."""
    pair_column: Text | None = Field(None, examples=["hypothesis"])
    """Column of the second text, where pairs are classified, or masked together, and of the translation."""
    label_column: Text | None = Field(None, examples=["topic"])
    """Column of the label, or of the tags of the words; "label" or "tags"."""
    id_column: Text | None = Field(None, examples=["id"])
    """Column that names each text and its translation, where two clouds read them: texts stay in the first
    cloud, translations in that of the decoder. Both have the same ids, in any order."""
    validation_source: Text | None = Field(None, examples=["corpus/held-out.jsonl"])
    """Data for evaluations, written as source; a share of source unless given."""
    validation_share: float = Field(0.05, ge=0, le=0.5)
    """Share of source that is never trained on; unused with validation_source."""

    @model_validator(mode="after")
    def _columns_fit_the_task(self) -> Self:
        for key, tasks in _READERS.items():
            if getattr(self, key) is not None and self.task not in tasks:
                raise FieldError(
                    f"has a {key}, which {self.task} does not read",
                    cure=f"leave it out, or set task to {' or '.join(tasks)}",
                )
        return self


class AutoStrategy(Frozen):
    """The planner chooses, and says why."""

    kind: Literal["auto"] = Field(examples=["auto"])
    """The planner chooses the strategy."""


class PipelineStrategy(Frozen):
    """Each cloud holds some of the layers; activations and gradients cross the links."""

    kind: Literal["pipeline"] = Field(examples=["pipeline"])
    """Each cloud holds some of the layers."""
    microbatches: Count | None = Field(None, examples=[16])
    """Micro-batches per step; chosen by the planner unless given."""
    max_in_flight: Caps | None = Field(None, examples=[8])
    """The most micro-batches whose activations a rank keeps: one number for all stages, or a list in the
    order of the stages; all of a step unless given."""
    policy: Literal["auto", "wan-1f1b", "lock-step", "1f1b", "gpipe"] = "auto"
    """Which pass goes first; 1f1b and gpipe do not overlap the round trip; auto: wan-1f1b, or lock-step where
    ranks must shard all of a stage."""
    clouds: Names | None = Field(None, examples=[["east", "west"]])
    """The clouds in the order of their stages; chosen by the planner unless given."""
    layers: Counts | None = Field(None, examples=[[12, 20]])
    """Layers of each stage, in the order of the stages; chosen by the planner unless given."""
    windows: Counts | None = Field(None, examples=[[6, 1]])
    """Micro-batches in flight at a rank of each stage, for planning; workers measure theirs."""

    @model_validator(mode="after")
    def _lists_fit(self) -> Self:
        keys = ("clouds", "layers", "windows", "max_in_flight")
        given = {key: one for key in keys if isinstance(one := getattr(self, key), tuple)}
        if len({len(one) for one in given.values()}) > 1:
            counts = ", ".join(f"{len(one)} {key}" for key, one in given.items())
            raise FieldError(f"has {counts}", cure="give one entry for each stage")
        return self


class DataStrategy(Frozen):
    """Each cloud holds the whole model; parameters or gradients cross the links."""

    kind: Literal["data"] = Field(examples=["data"])
    """Each cloud holds the whole model."""
    sync: Literal["auto", "exact", "streaming", "sparse"] = "auto"
    """What crosses: gradients of every step, coded changes of a fragment at a time, or the largest of them;
    auto: streaming, or exact where inner_steps is 1."""
    inner_steps: int | None = Field(None, ge=1, le=10_000, examples=[30])
    """Steps of each cloud between two synchronisations; chosen by the planner unless given."""
    fragments: Count | None = Field(None, examples=[8])
    """Parts of the model that are synchronised in turn; about 3 layers each unless given."""
    bits: Literal[4, 8, 16, 32] | None = Field(None, examples=[4])
    """Bits per parameter that cross the links; chosen by the planner unless given."""
    microbatches: Count | None = Field(None, examples=[4])
    """Micro-batches of a rank in a step."""
    delay: int | None = Field(None, ge=0, le=1000, examples=[2])
    """Steps after which what was sent is mixed in; as the line needs unless given."""
    mixing: float = Field(0.5, ge=0, lt=1)
    """Share of a cloud's own parameters that stays when others are mixed in; for streaming."""
    outer_learning_rate: float | None = Field(None, gt=0, le=2, examples=[0.7])
    """Learning rate of the outer step: 0.7, and 1.0 for sparse, unless given."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of the outer step; for streaming."""
    quorum: Count | None = Field(None, examples=[2])
    """The least number of clouds whose changes make a round; more than half of all unless given."""
    grace_s: Time = Field(60.0, alias="grace")
    """How long a round that has its quorum waits for the other clouds that are there."""
    on_partition: Literal["wait", "continue"] = "wait"
    """With "wait", only clouds that are more than half of all continue."""

    @model_validator(mode="after")
    def _sync_fits(self) -> Self:
        if self.sync == "exact" and (self.inner_steps or 1) > 1:
            raise FieldError("has inner_steps, and exact synchronisation is every step", cure="leave it out")
        if self.sync == "sparse" and self.bits is not None:
            raise FieldError("has bits, which sparse synchronisation fixes", cure="leave bits out")
        return self

    @property
    def how(self) -> Literal["exact", "streaming", "sparse"]:
        """How clouds synchronise."""
        return ("exact" if self.inner_steps == 1 else "streaming") if self.sync == "auto" else self.sync


class GeneratorSpec(Frozen):
    """The generator of one cloud: its model, its own data, and its share of what the discriminator sees."""

    model: ModelSpec | None = Field(None, examples=[{"source": "xlm-roberta-base"}])
    """Its model; strategy.generator unless given."""
    source: Text | None = Field(None, examples=["corpus/sw.jsonl"])
    """Its data, which no other cloud reads; data.source unless given."""
    text_column: Text | None = Field(None, examples=["sentence"])
    """Column of its text; data.text_column unless given."""
    pair_column: Text | None = Field(None, examples=["translation"])
    """Column of a translation: both are masked as one sequence; none unless given."""
    size: float = Field(1.0, gt=0, examples=[2.5e9])
    """Size of its data, in a unit that all generators share."""
    quota: Count | None = Field(None, examples=[10_000])
    """The batches that it makes; its share of all unless given."""
    loss_weight: float = Field(1.0, gt=0)
    """What its batches count in the discriminator's loss."""


class GeneratorDiscriminatorStrategy(Frozen):
    """One cloud trains a discriminator, the others generators; token ids cross the links, one way."""

    kind: Literal["generator-discriminator"] = Field(examples=["generator-discriminator"])
    """Generators replace some tokens, and the discriminator tells which."""
    generator: ModelSpec | None = Field(None, examples=[{"source": "xlm-roberta-base"}])
    """The model of each generator; [model] with a third of its layers unless given."""
    generators: dict[Text, GeneratorSpec] = Field({}, examples=[{"east": {"source": "corpus/sw.jsonl"}}])
    """What generators have of their own, by cloud."""
    discriminator_cloud: Text | None = Field(None, examples=["west"])
    """The cloud that the others feed; chosen by the planner unless given, the first by isthmus run."""
    batches: Count = 1
    """Batches in a step of the discriminator; a generator takes a step with each of its own."""
    masked_share: float = Field(0.15, gt=0, lt=1)
    """Share of the tokens that a generator masks and replaces."""
    temperature: float = Field(1.0, gt=0)
    """Temperature at which it draws replacements."""
    size_exponent: float = Field(0.7, ge=0, le=1)
    """A generator's share of the stream is its size to this power."""
    max_queued: Count = 8
    """The most batches of one generator that wait at the discriminator."""
    on_lost: Literal["wait", "continue"] = "wait"
    """Whether all meet a lost generator again, within checkpoint.patience, or go on without it."""
    wait_s: Deadline = Field(3600.0, alias="wait")
    """With "continue": how long after a loss the run may end without the generator's quota."""

    @model_validator(mode="after")
    def _has_generators_elsewhere(self) -> Self:
        if self.discriminator_cloud in self.generators:
            raise FieldError(
                f"has a generator in the discriminator's cloud, {self.discriminator_cloud!r}",
                cure=f"leave [strategy.generators.{self.discriminator_cloud}] out",
            )
        return self


Strategy = Annotated[
    AutoStrategy | PipelineStrategy | DataStrategy | GeneratorDiscriminatorStrategy,
    Field(discriminator="kind"),
]


class TrainSpec(Frozen):
    """The length of the run, the batch and the optimizer."""

    steps: Count = 1000
    """Optimizer steps."""
    batch_tokens: Count = 524288
    """Tokens per step, of all clouds together."""
    learning_rate: float = Field(3e-4, gt=0, le=1)
    """Peak learning rate."""
    warmup_share: float = Field(0.05, ge=0, le=1)
    """Share of the steps in which the learning rate rises to its peak."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """The shape in which the learning rate then falls to a tenth; constant: it does not fall."""
    weight_decay: float = Field(0.1, ge=0, le=10)
    """Weight decay of AdamW."""
    max_norm: float = Field(1.0, ge=0)
    """Norm to which the gradient of all stages is clipped; 0 for no clipping."""
    precision: Literal["float32", "bfloat16"] = Field("float32", examples=["bfloat16"])
    """Precision of the computation; weights are float32."""
    recompute: Literal[True, False, "auto"] = Field(False, examples=["auto"])
    """Recompute activations instead of keeping them; "auto": as memory_budget asks for."""
    memory_budget_bytes: Memory | None = Field(None, alias="memory_budget", examples=["40 GiB"])
    """Memory of a device for all that it holds, with recompute = "auto"; limits.memory_share of it unless
    given."""
    optimizer_bits: Literal[32, 8] = 32
    """Bits of each moment of AdamW; 8 needs `torchao`."""
    offload_optimizer: bool = False
    """Keep the moments of AdamW in memory of the host."""
    compile: bool = False
    """Compile the layers with torch.compile."""
    evaluate_every: int = Field(100, ge=0)
    """Steps between two evaluations; 0 for none."""
    evaluate_without_codec: bool = False
    """Evaluate a second time with everything crossing raw."""
    evaluate_texts: int = Field(500, ge=0)
    """The most held-out texts that an evaluation translates, for BLEU; 0 for none."""
    evaluate_beams: int = Field(1, ge=1, le=64)
    """Beams of such a translation; 1: greedily."""
    keep_best: Literal["loss", "accuracy", "f1", "matthews", "bleu"] | None = Field(None, examples=["bleu"])
    """The metric by which the best evaluated weights are kept, and exported; the last ones unless given."""

    @model_validator(mode="after")
    def _memory_options_fit(self) -> Self:
        if self.memory_budget_bytes is not None and self.recompute != "auto":
            raise FieldError(
                "has a memory_budget, which nothing keeps to unless layers recompute as it asks for",
                cure='set recompute = "auto", or leave memory_budget out',
            )
        if self.optimizer_bits == 8 and self.offload_optimizer:
            raise FieldError(
                "has moments in 8 bits and on the host, and both together are not offered",
                cure="leave out optimizer_bits or offload_optimizer",
            )
        if self.keep_best is not None and self.evaluate_every == 0:
            raise FieldError("keeps the best weights, but never evaluates", cure="set evaluate_every")
        return self


class CheckpointSpec(Frozen):
    """When the state of the run is saved, and where."""

    every_s: CheckpointInterval = Field(300.0, alias="every")
    """The most time whose work may be lost; 1 s to 7 d."""
    overhead: Share = 0.01
    """The most of the time that saves may take; where that asks for it, they are rarer than `every`."""
    keep: int = Field(2, ge=2)
    """How many checkpoints are kept; a crash may fall between the saves of two clouds."""
    store: Text | None = Field(None, examples=["s3://bucket/prefix"])
    """Where this site keeps them: a folder, or an address of fsspec; in the run directory if absent."""
    patience_s: Patience = Field(3600.0, alias="patience", examples=["1 h"])
    """How long the others wait for a cloud that is lost before they fail; 0: they fail at once."""


class LimitsSpec(Frozen):
    """Limits that a plan must keep."""

    deadline_s: Deadline | None = Field(None, alias="deadline", examples=["3 d"])
    """The most that the whole run may take."""
    budget_usd: float | None = Field(None, gt=0, examples=[500.0])
    """The most that the whole run may cost."""
    codec_loss: Literal["none", "slight", "some"] = "slight"
    """The quality that codecs and rare synchronisation may cost."""
    memory_share: Share = 0.9
    """Share of a device's memory that a plan may fill."""

    @property
    def counts_money(self) -> bool:
        """Whether a plan is to save money: within a budget, or wherever a deadline leaves time for it."""
        return self.budget_usd is not None or self.deadline_s is not None


def plain_name(name: str) -> str:
    """Return a device's name without what people spell differently: `H-100` is `h100`."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


class AcceleratorSpec(Frozen):
    """One kind of device: a new entry of the catalogue, or one that replaces the catalogue's own."""

    name: Text = Field(examples=["h100"])
    """What `cloud.accelerator` calls it."""
    flops: Flops = Field(examples=["989 TFLOPS"])
    """Peak computing speed in bfloat16."""
    flops_float32: Flops | None = Field(None, examples=["67 TFLOPS"])
    """Peak computing speed in float32; a sixteenth of `flops` unless given."""
    achievable: Share = 0.4
    """Share of the peak that training reaches."""
    memory_bytes: Memory = Field(alias="memory", examples=["80 GiB"])
    """Memory of one device."""
    memory_bandwidth_bytes_per_s: MemoryBandwidth | None = Field(
        None, alias="memory_bandwidth", examples=["3.35 TB/s"]
    )
    """Speed of that memory; as an A100's unless given."""
    usd_per_hour: Price | None = Field(None, examples=[2.5])
    """Price of one device."""


_RAW: Final = parse_codec("raw")


def _or_listen(gateway: Address | None, info: ValidationInfo) -> Address | None:
    return gateway or info.data.get("listen")


class CloudData(Frozen):
    """What a cloud reads in place of the job's data."""

    source: Text = Field(examples=["corpus/*.jsonl"])
    """As data.source; it need not leave the cloud."""
    text_column: Text | None = Field(None, examples=["sentence"])
    """As data.text_column; the job's unless given."""
    validation_source: Text | None = Field(None, examples=["corpus/held-out.jsonl"])
    """As data.validation_source; the job's unless given."""


class CloudSpec(Frozen):
    """One cluster, with a fast network inside."""

    name: Annotated[
        str,
        matching(
            CLOUD_NAME,
            what="is no DNS label, or reserved",
            cure="use up to 63 of a-z, 0-9 and '-', with no '-' at either end, not isthmus or authority",
        ),
    ] = Field(examples=["east"])
    """DNS label in lower case; part of the TLS server name."""
    data: CloudData | None = Field(None, examples=[{"source": "corpus/*.jsonl"}])
    """What it reads in place of the job's data; for data parallel, and for data.id_column."""
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
    """What crosses between stages: "hidden" states, the "memory" of an encoder, or a trained bottleneck."""
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
