"""The sections of a job that say what is trained and how."""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from isthmus.job.fields import CheckpointInterval, Frozen
from isthmus.job.findings import FieldError, show_value


def _checked_config(config: dict[str, object]) -> dict[str, object]:
    for key, value in config.items():
        _check_config_value(key, value)
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

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.source is None) == (self.config is None):
            which = "neither source nor config" if self.source is None else "both source and config"
            raise FieldError(
                f"has {which}", cure='give one: source = "Qwen/Qwen3-0.6B", or a [model.config] table'
            )
        return self


class DataSpec(Frozen):
    """What is trained on."""

    source: str = Field(
        min_length=1,
        description='files, a Hugging Face dataset, or "builtin:..." which ships with the package',
        examples=["corpus/*.jsonl"],
    )
    sequence_length: int = Field(default=1024, ge=1, description="tokens per sequence", examples=[1024])


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


class DataStrategy(Frozen):
    """Each cloud holds the whole model; parameters or gradients cross the links."""

    kind: Literal["data"] = Field(description="each cloud holds the whole model", examples=["data"])


class GeneratorDiscriminatorStrategy(Frozen):
    """One cloud trains a generator, another a discriminator; token ids cross the links."""

    kind: Literal["generator-discriminator"] = Field(
        description="one cloud generates, another discriminates", examples=["generator-discriminator"]
    )


Strategy = Annotated[
    AutoStrategy | PipelineStrategy | DataStrategy | GeneratorDiscriminatorStrategy,
    Field(discriminator="kind"),
]


class TrainSpec(Frozen):
    """How long and how fast."""

    steps: int = Field(default=1000, ge=1, description="optimizer steps", examples=[1000])
    batch_tokens: int = Field(
        default=524288, ge=1, description="tokens per step, of all clouds together", examples=[524288]
    )
    learning_rate: float = Field(default=3e-4, gt=0, le=1, description="peak learning rate", examples=[3e-4])


class CheckpointSpec(Frozen):
    """When the state of the run is saved."""

    every_s: CheckpointInterval = Field(
        default=300.0,
        alias="every",
        description="time between two checkpoints; 1 s to 7 d",
        examples=["5 min"],
    )
