"""The keys that the configuration of a model may have, known without transformers.

Those of transformers 5.17 to 5.22; a test holds them to the installed version.
"""

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from isthmus.errors import FieldError
from isthmus.job.fields import (
    CacheMemory,
    Caps,
    CheckpointInterval,
    Deadline,
    Flops,
    Frozen,
    Memory,
    MemoryBandwidth,
    Price,
    show_value,
)
from isthmus.units import closest


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALL: Final = _keys("""
    _name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id hidden_size id2label
    initializer_range is_encoder_decoder label2id max_position_embeddings model_type num_attention_heads
    num_hidden_layers output_attentions output_hidden_states pad_token_id problem_type return_dict
    tie_word_embeddings transformers_version use_cache vocab_size
""")
_DECODER: Final = _ALL | _keys("""
    attention_dropout hidden_act intermediate_size num_key_value_heads rms_norm_eps rope_parameters
""")
_WINDOWED: Final = _DECODER | _keys("layer_types max_window_layers sliding_window use_sliding_window")
_ENCODER: Final = _ALL | _keys("""
    add_cross_attention attention_probs_dropout_prob classifier_dropout hidden_act hidden_dropout_prob
    intermediate_size is_decoder layer_norm_eps type_vocab_size
""")
_GPT_NEOX: Final = _ALL | _keys("""
    attention_bias attention_dropout classifier_dropout hidden_act hidden_dropout intermediate_size is_decoder
    layer_norm_eps rope_parameters use_parallel_residual
""")
_MIXTRAL: Final = _DECODER | _keys("""
    head_dim num_experts num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef
    router_jitter_noise sliding_window
""")
_GPT2: Final = _ALL | _keys("""
    activation_function add_cross_attention attn_pdrop embd_pdrop layer_norm_epsilon n_embd n_head n_inner
    n_layer n_positions reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx scale_attn_weights
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
""")

MODEL_KEYS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "llama": _DECODER | _keys("attention_bias head_dim mlp_bias pretraining_tp"),
        "qwen2": _WINDOWED,
        "qwen3": _WINDOWED | _keys("attention_bias head_dim"),
        "mistral": _DECODER | _keys("head_dim sliding_window"),
        "gemma": _DECODER | _keys("attention_bias head_dim use_bidirectional_attention"),
        "phi3": _DECODER | _keys("embd_pdrop original_max_position_embeddings resid_pdrop sliding_window"),
        "gpt_neox": _GPT_NEOX,
        "mixtral": _MIXTRAL,
        "gpt2": _GPT2,
        "bert": _ENCODER,
        "roberta": _ENCODER,
        "xlm-roberta": _ENCODER,
        "electra": _ENCODER
        | _keys("embedding_size summary_activation summary_last_dropout summary_type summary_use_proj"),
    }
)


def unknown_key(model_type: str, keys: Collection[str], known: Collection[str]) -> tuple[str, str] | None:
    """What is wrong with the first key that a configuration does not have, and the cure; None if all do."""
    key = next((one for one in keys if one not in known), None)
    if key is None:
        return None
    meant = closest(key, known)
    cure = f"did you mean {meant!r}?" if meant else "transformers' documentation lists them"
    return f"the configuration of {model_type} has no key {key!r}", cure


def _checked_targets(targets: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if targets is not None and (not targets or not all(targets)):
        raise FieldError("must name modules of a layer", cure='for example ["q_proj", "v_proj"]')
    return targets


class LoraSpec(Frozen):
    """Small adapters are trained beside the model's own weights, which stay as they are."""

    r: int = Field(default=16, ge=1, le=4096, description="rank of the adapters", examples=[16])
    alpha: float = Field(
        default=32.0, gt=0, description="weight of the adapters, times their rank", examples=[32.0]
    )
    targets: Annotated[
        Annotated[tuple[str, ...], Field(strict=False)] | None, AfterValidator(_checked_targets)
    ] = Field(
        default=None,
        description="modules of each layer that get one, by the end of their name; all linear ones if absent",
        examples=[["q_proj", "v_proj"]],
    )
    merge: bool = Field(
        default=False,
        description="export the whole model with the adapters in its weights, beside the adapter alone",
        examples=[True],
    )


def _checked_config(config: dict[str, object]) -> dict[str, object]:
    for key, value in config.items():
        _check_config_value(key, value)
    model_type = str(config.get("model_type"))
    # Of other models transformers knows the keys, when one is built.
    if wrong := unknown_key(model_type, config, MODEL_KEYS.get(model_type, config)):
        what, cure = wrong
        raise FieldError(what, cure=cure)
    return config


def _check_config_value(key: str, value: object) -> None:
    match value:
        case dict():
            for inner, one in value.items():
                _check_config_value(f"{key}.{inner}", one)
        case list():
            for index, one in enumerate(value):
                _check_config_value(f"{key}[{index}]", one)
        case str() | int():
            pass
        case float() if math.isfinite(value):
            pass
        case _:
            raise FieldError(
                f"{key} cannot be {show_value(value)}",
                cure="use text, finite numbers, true, false, lists and tables",
            )


class ModelSpec(Frozen):
    """What is trained: existing weights, or a configuration for fresh ones."""

    source: str | None = Field(
        default=None,
        min_length=1,
        description="Hugging Face name or local folder",
        examples=["Qwen/Qwen3-0.6B"],
    )
    config: Annotated[dict[str, object], AfterValidator(_checked_config)] | None = Field(
        default=None,
        description="configuration of a model with fresh weights",
        examples=[{"model_type": "llama"}],
    )
    frozen_layers: int = Field(
        default=0,
        ge=0,
        description="layers, from the first on, that are not trained, and the embedding with them",
        examples=[12],
    )
    cache_frozen_bytes: CacheMemory = Field(
        default=2 * 1024**3,
        alias="cache_frozen",
        description="host memory for what frozen stages gave, so that it crosses once; 0 for none",
        examples=["4 GiB"],
    )
    trust_remote_code: bool = Field(
        default=False,
        description="run the Python code that the folder or repository of model or tokenizer brings, if any",
        examples=[True],
    )
    lora: LoraSpec | None = Field(
        default=None,
        description="train low-rank adapters instead of the weights; needs `peft`",
        examples=[{"r": 16}],
    )

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
        return self


Task = Literal[
    "causal-lm", "masked-lm", "sequence-classification", "token-classification", "question-answering"
]


class DataSpec(Frozen):
    """What is trained on."""

    source: str = Field(
        min_length=1,
        description='files, a Hugging Face dataset as "hf:...", or "builtin:...", which the package brings',
        examples=["corpus/*.jsonl"],
    )
    sequence_length: int = Field(
        default=1024, ge=1, description="tokens per sequence, at most for a task that pads", examples=[1024]
    )
    task: Task = Field(
        default="causal-lm", description="what the model learns to do", examples=["sequence-classification"]
    )
    tokenizer: str = Field(
        default="auto",
        min_length=1,
        description='folder or Hugging Face name, "trained" on this data, or "auto": the model\'s own if any',
        examples=["Qwen/Qwen3-0.6B"],
    )
    text_column: str | None = Field(
        default=None,
        min_length=1,
        description='column of the text, or of the words for token classification; "text" or "tokens"',
        examples=["sentence"],
    )
    pair_column: str | None = Field(
        default=None,
        min_length=1,
        description="column of the second text, where pairs are classified",
        examples=["hypothesis"],
    )
    label_column: str | None = Field(
        default=None,
        min_length=1,
        description='column of the label, or of the tags of the words; "label" or "tags"',
        examples=["topic"],
    )
    validation_source: str | None = Field(
        default=None,
        min_length=1,
        description="what is evaluated on, as source; a share of source unless given",
        examples=["corpus/held-out.jsonl"],
    )
    validation_share: float = Field(
        default=0.05,
        ge=0,
        le=0.5,
        description="share of source that is never trained on; unused with validation_source",
        examples=[0.05],
    )

    @model_validator(mode="after")
    def _columns_fit_the_task(self) -> Self:
        labelled = ("sequence-classification", "token-classification")
        readers = {
            "text_column": ("causal-lm", "masked-lm", *labelled),
            "pair_column": ("sequence-classification",),
            "label_column": labelled,
        }
        for key, tasks in readers.items():
            if getattr(self, key) is not None and self.task not in tasks:
                raise FieldError(
                    f"has a {key}, which {self.task} does not read",
                    cure=f"leave it out, or set task to {' or '.join(tasks)}",
                )
        return self


def _checked_counts(counts: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if counts is not None and (not counts or min(counts) < 1):
        raise FieldError("must be a list of whole numbers of at least 1", cure="for example [12, 20]")
    return counts


def _checked_names(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if names is not None and (not names or len(set(names)) < len(names)):
        raise FieldError("must name clouds, each of them once", cure='for example ["east", "west"]')
    return names


Counts = Annotated[tuple[int, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]


class AutoStrategy(Frozen):
    """The planner chooses, and says why."""

    kind: Literal["auto"] = Field(description="the planner chooses the strategy", examples=["auto"])


class PipelineStrategy(Frozen):
    """Each cloud holds some of the layers; activations and gradients cross the links."""

    kind: Literal["pipeline"] = Field(
        description="each cloud holds some of the layers", examples=["pipeline"]
    )
    microbatches: int | None = Field(
        default=None,
        ge=1,
        description="micro-batches per step; chosen by the planner unless given",
        examples=[16],
    )
    max_in_flight: Caps | None = Field(
        default=None,
        description="the most micro-batches whose activations a rank keeps: one number for all stages, or a "
        "list in the order of the stages; all of a step unless given",
        examples=[8],
    )
    policy: Literal["auto", "wan-1f1b", "lock-step", "1f1b", "gpipe"] = Field(
        default="auto",
        description="which pass goes first; 1f1b and gpipe do not hide the round trip; auto: wan-1f1b, or "
        "lock-step where ranks must share out all of a stage",
        examples=["wan-1f1b"],
    )
    clouds: Annotated[Names | None, AfterValidator(_checked_names)] = Field(
        default=None,
        description="the clouds in the order of their stages; chosen by the planner unless given",
        examples=[["east", "west"]],
    )
    layers: Annotated[Counts | None, AfterValidator(_checked_counts)] = Field(
        default=None,
        description="layers of each stage, in the order of the stages; chosen by the planner unless given",
        examples=[[12, 20]],
    )
    windows: Annotated[Counts | None, AfterValidator(_checked_counts)] = Field(
        default=None,
        description="micro-batches in flight at a rank of each stage, for planning; workers measure theirs",
        examples=[[6, 1]],
    )

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

    kind: Literal["data"] = Field(description="each cloud holds the whole model", examples=["data"])
    inner_steps: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="steps of each cloud between two synchronisations; chosen by the planner unless given",
        examples=[30],
    )
    fragments: int | None = Field(
        default=None,
        ge=1,
        description="parts of the model that are synchronised in turn; about 3 layers each unless given",
        examples=[8],
    )
    bits: Literal[4, 8, 16, 32] | None = Field(
        default=None,
        description="bits per parameter that cross the links; chosen by the planner unless given",
        examples=[4],
    )


class GeneratorDiscriminatorStrategy(Frozen):
    """One cloud trains a generator, another a discriminator; token ids cross the links."""

    kind: Literal["generator-discriminator"] = Field(
        description="one cloud generates, another discriminates", examples=["generator-discriminator"]
    )
    generator: ModelSpec | None = Field(
        default=None,
        description="the generator; the model with a third of its layers unless given",
        examples=[{"source": "xlm-roberta-base"}],
    )
    discriminator_cloud: str | None = Field(
        default=None,
        min_length=1,
        description="the cloud that the others feed; chosen by the planner unless given",
        examples=["west"],
    )


Strategy = Annotated[
    AutoStrategy | PipelineStrategy | DataStrategy | GeneratorDiscriminatorStrategy,
    Field(discriminator="kind"),
]


def why_not_run(kind: str) -> str | None:
    """Why `isthmus run` cannot follow a strategy, None where it can; "auto" runs as a pipeline."""
    return None if kind in ("auto", "pipeline") else f"strategy {kind!r} cannot be run yet"


class TrainSpec(Frozen):
    """How long and how fast."""

    steps: int = Field(default=1000, ge=1, description="optimizer steps", examples=[1000])
    batch_tokens: int = Field(
        default=524288, ge=1, description="tokens per step, of all clouds together", examples=[524288]
    )
    learning_rate: float = Field(default=3e-4, gt=0, le=1, description="peak learning rate", examples=[3e-4])
    warmup_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="share of the steps in which the learning rate rises to its peak",
        examples=[0.05],
    )
    decay: Literal["cosine", "linear", "constant"] = Field(
        default="cosine",
        description="how the learning rate then falls to a tenth, or does not",
        examples=["cosine"],
    )
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="weight decay of AdamW", examples=[0.1])
    max_norm: float = Field(
        default=1.0,
        ge=0,
        description="norm to which the gradient of all stages is clipped; 0 for no clipping",
        examples=[1.0],
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the computation; weights are float32", examples=["bfloat16"]
    )
    recompute: bool | Literal["auto"] = Field(
        default=False,
        description='recompute activations instead of keeping them; "auto": as memory_budget asks for',
        examples=["auto"],
    )
    memory_budget_bytes: Memory | None = Field(
        default=None,
        alias="memory_budget",
        description='memory of a device for all that it holds, with recompute = "auto"; '
        "limits.memory_share of it unless given",
        examples=["40 GiB"],
    )
    optimizer_bits: Literal[32, 8] = Field(
        default=32, description="bits of each moment of AdamW; 8 needs `torchao`", examples=[8]
    )
    offload_optimizer: bool = Field(
        default=False, description="keep the moments of AdamW in memory of the host", examples=[True]
    )
    compile: bool = Field(default=False, description="compile the layers with torch.compile", examples=[True])
    evaluate_every: int = Field(
        default=100, ge=0, description="steps between two evaluations; 0 for none", examples=[100]
    )
    evaluate_without_codec: bool = Field(
        default=False,
        description="evaluate a second time with everything crossing raw",
        examples=[True],
    )

    @model_validator(mode="after")
    def _savers_fit(self) -> Self:
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
        return self


class CheckpointSpec(Frozen):
    """When the state of the run is saved."""

    every_s: CheckpointInterval = Field(
        default=300.0,
        alias="every",
        description="time between two checkpoints; 1 s to 7 d",
        examples=["5 min"],
    )
    keep: int = Field(
        default=2,
        ge=2,
        description="how many checkpoints are kept; a crash may fall between the saves of two clouds",
        examples=[2],
    )


class LimitsSpec(Frozen):
    """What the planner must keep to."""

    deadline_s: Deadline | None = Field(
        default=None, alias="deadline", description="the most that the whole run may take", examples=["3 d"]
    )
    budget_usd: float | None = Field(
        default=None, gt=0, description="the most that the whole run may cost", examples=[500.0]
    )
    codec_loss: Literal["none", "slight", "some"] = Field(
        default="slight",
        description="the quality that codecs and rare synchronisation may cost",
        examples=["none"],
    )
    memory_share: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of a device's memory that a plan may fill",
        examples=[0.9],
    )

    @property
    def counts_money(self) -> bool:
        """Whether a plan is to save money: within a budget, or wherever a deadline leaves time for it."""
        return self.budget_usd is not None or self.deadline_s is not None


def plain_name(name: str) -> str:
    """A device's name without what people spell differently: `H-100` is `h100`."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


class AcceleratorSpec(Frozen):
    """One kind of device: a new entry of the catalogue, or one that replaces the catalogue's own."""

    name: str = Field(min_length=1, description="what `cloud.accelerator` calls it", examples=["h100"])
    flops: Flops = Field(description="peak computing speed in bfloat16", examples=["989 TFLOPS"])
    flops_float32: Flops | None = Field(
        default=None,
        description="peak computing speed in float32; a sixteenth of `flops` unless given",
        examples=["67 TFLOPS"],
    )
    achievable: float = Field(
        default=0.4, gt=0, le=1, description="share of the peak that training reaches", examples=[0.4]
    )
    memory_bytes: Memory = Field(alias="memory", description="memory of one device", examples=["80 GiB"])
    memory_bandwidth_bytes_per_s: MemoryBandwidth | None = Field(
        default=None,
        alias="memory_bandwidth",
        description="speed of that memory; as an A100's unless given",
        examples=["3.35 TB/s"],
    )
    usd_per_hour: Price | None = Field(default=None, description="price of one device", examples=[2.5])
