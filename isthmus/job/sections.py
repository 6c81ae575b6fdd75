"""The sections of a job that say what is trained and how."""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from isthmus.job.fields import CacheMemory, Caps, CheckpointInterval, Frozen, Memory
from isthmus.job.findings import FieldError, show_value
from isthmus.job.lora import LoraSpec
from isthmus.job.model_keys import MODEL_KEYS, unknown_key


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
