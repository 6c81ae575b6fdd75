"""The kinds of strategies that a session can run, and the run config as text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from isthmus.errors import FrameError, UserError
from isthmus.job import Job
from isthmus.job.load import replace_file
from isthmus.plan.types import pack_facts, unpack_facts
from isthmus.train.data_role import DataKind
from isthmus.train.generator_role import FeedKind
from isthmus.train.pipeline_role import PipelineKind
from isthmus.train.role import RunKind
from isthmus.train.run_config import CONFIG_FILE, MAX_CONFIG_BYTES, RunConfig

_PIPELINE: Final = PipelineKind()
KINDS: Final[Mapping[str, RunKind]] = {
    "pipeline": _PIPELINE,
    "data": DataKind(),
    "generator-discriminator": FeedKind(),
}


def kind_of(job: Job) -> RunKind:
    """The kind that a job runs as; a pipeline where the plan chooses, and refuses what cannot run yet."""
    return KINDS.get(job.strategy.kind, _PIPELINE)


def pack_config(config: RunConfig) -> str:
    """A run config as text, with its kind."""
    return pack_facts(config, max_bytes=MAX_CONFIG_BYTES)


def unpack_config(text: object) -> RunConfig:
    """The run config that `pack_config` gave; anything else is an error of the peer."""
    try:
        about = json.loads(text) if isinstance(text, str) and len(text) <= MAX_CONFIG_BYTES else None
    except ValueError:
        about = None
    kind = about.get("kind") if isinstance(about, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise FrameError("a run config without its kind")
    return unpack_facts(text, KINDS[kind].config, max_bytes=MAX_CONFIG_BYTES)


def write_config(run: Path, config: RunConfig) -> None:
    """Keep the run config in the run directory, since models are built from it when they are exported."""
    replace_file(run / CONFIG_FILE, pack_config(config))


def read_config(run: Path) -> RunConfig:
    """The run config of a run directory."""
    try:
        return unpack_config((run / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, FrameError) as error:
        raise UserError(
            f"{run / CONFIG_FILE} cannot be read, so the stages of the run are not known: {error}",
            hint="start the run again with this version: isthmus run JOB; it writes the file",
        ) from error
