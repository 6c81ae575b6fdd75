"""What the user wrote: one TOML file as frozen, checked models."""

from isthmus.job.address import Address, parse_address
from isthmus.job.codec import CodecSpec, CodecStep, parse_codec
from isthmus.job.load import load_job
from isthmus.job.network import CloudSpec, CodecSpecs, LinkSpec
from isthmus.job.rundir import create_run_directory
from isthmus.job.schema import job_schema
from isthmus.job.sections import (
    AutoStrategy,
    CheckpointSpec,
    DataSpec,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    ModelSpec,
    PipelineStrategy,
    TrainSpec,
)
from isthmus.job.spec import Job
from isthmus.job.write import LinkFigures, dump_job, update_job_file

__all__ = [
    "Address",
    "AutoStrategy",
    "CheckpointSpec",
    "CloudSpec",
    "CodecSpec",
    "CodecSpecs",
    "CodecStep",
    "DataSpec",
    "DataStrategy",
    "GeneratorDiscriminatorStrategy",
    "Job",
    "LinkFigures",
    "LinkSpec",
    "ModelSpec",
    "PipelineStrategy",
    "TrainSpec",
    "create_run_directory",
    "dump_job",
    "job_schema",
    "load_job",
    "parse_address",
    "parse_codec",
    "update_job_file",
]
