"""What the user wrote: one TOML file as frozen, checked models."""

from isthmus.job.address import Address, parse_address
from isthmus.job.codec import CodecSpec, gradient_codec, gradient_wire_bytes, parse_codec
from isthmus.job.codec_sizes import CodeState
from isthmus.job.codec_steps import CodecStep
from isthmus.job.limits import AcceleratorSpec, LimitsSpec
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
from isthmus.job.spec import Job, stage_order
from isthmus.job.write import LinkFigures, dump_job, update_job_file, update_job_sections

__all__ = [
    "AcceleratorSpec",
    "Address",
    "AutoStrategy",
    "CheckpointSpec",
    "CloudSpec",
    "CodeState",
    "CodecSpec",
    "CodecSpecs",
    "CodecStep",
    "DataSpec",
    "DataStrategy",
    "GeneratorDiscriminatorStrategy",
    "Job",
    "LimitsSpec",
    "LinkFigures",
    "LinkSpec",
    "ModelSpec",
    "PipelineStrategy",
    "TrainSpec",
    "create_run_directory",
    "dump_job",
    "gradient_codec",
    "gradient_wire_bytes",
    "job_schema",
    "load_job",
    "parse_address",
    "parse_codec",
    "stage_order",
    "update_job_file",
    "update_job_sections",
]
