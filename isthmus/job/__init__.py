"""Reads the job file, one TOML file, into frozen, checked models."""

from isthmus.job.codec import CodecSpec, parse_codec
from isthmus.job.fields import Address
from isthmus.job.load import load_job
from isthmus.job.sections import (
    CloudSpec,
    DataSpec,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    LinkSpec,
    ModelSpec,
    PipelineStrategy,
)
from isthmus.job.spec import Job, stage_order

__all__ = [
    "Address",
    "CloudSpec",
    "CodecSpec",
    "DataSpec",
    "DataStrategy",
    "GeneratorDiscriminatorStrategy",
    "Job",
    "LinkSpec",
    "ModelSpec",
    "PipelineStrategy",
    "load_job",
    "parse_codec",
    "stage_order",
]
