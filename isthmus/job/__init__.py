"""Reads the job file, one TOML file, into frozen, checked models."""

from isthmus.job.codec import CodecSpec, gradient_codec, parse_codec
from isthmus.job.fields import Address, parse_address
from isthmus.job.load import dump_job, load_job, update_job_file
from isthmus.job.rundir import create_run_directory
from isthmus.job.sections import (
    AutoStrategy,
    CheckpointSpec,
    CloudSpec,
    CodecSpecs,
    DataSpec,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    LinkSpec,
    ModelSpec,
    PipelineStrategy,
    TrainSpec,
)
from isthmus.job.spec import Job, job_schema, stage_order

__all__ = [
    "Address",
    "AutoStrategy",
    "CheckpointSpec",
    "CloudSpec",
    "CodecSpec",
    "CodecSpecs",
    "DataSpec",
    "DataStrategy",
    "GeneratorDiscriminatorStrategy",
    "Job",
    "LinkSpec",
    "ModelSpec",
    "PipelineStrategy",
    "TrainSpec",
    "create_run_directory",
    "dump_job",
    "gradient_codec",
    "job_schema",
    "load_job",
    "parse_address",
    "parse_codec",
    "stage_order",
    "update_job_file",
]
