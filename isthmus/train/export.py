"""Exports the model of a run from a checkpoint, also of a run that has not ended."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.rundir import job_of
from isthmus.model.export import merge, write_part
from isthmus.train.build import Build, blueprint_of
from isthmus.train.checkpoint import Checkpoints, saved_steps
from isthmus.train.device import Device
from isthmus.train.in_cloud import World
from isthmus.train.keeper import load_weights
from isthmus.train.kinds import kind_of, read_config
from isthmus.train.run_config import RunConfig
from isthmus.train.runs import PARTS_PREFIX, TOKENIZER_FOLDER
from isthmus.train.store import open_store


def export_run(
    run: Path,
    folder: Path,
    *,
    step: int,
    dtype: torch.dtype | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Write the model as the checkpoint of a step has it; stages are built on the host, one at a time."""
    if folder.exists():
        raise UserError(f"{folder} exists already", hint="name another folder with --out")
    job, config = _read(run)
    kind = kind_of(job)
    if not kind.saves_together:
        raise UserError(
            "each cloud of this run trains a model of its own and saves it at steps of its own",
            hint=f"let the run end: it exports all models to {run}",
        )
    if job.strategy.kind == "data":
        raise UserError(
            "checkpoints of data parallel hold outer parameters beside those of each cloud, and only a run "
            "exports them so far",
            hint=f"continue the run to its end: it exports the model to {run}",
        )
    scratch = Path(tempfile.mkdtemp(dir=run, prefix=PARTS_PREFIX))
    try:
        parts = []
        for cloud in kind.clouds(job):
            parts.append(scratch / cloud)
            _write_stage(run, job, config, parts[-1], step=step, dtype=dtype)
        companions = [path for path in (run / TOKENIZER_FOLDER).glob("*") if path.is_file()]
        for text in merge(parts, folder, companions=companions):
            note(text)
    finally:
        shutil.rmtree(scratch)


def newest_step(run: Path, *, wanted: int | None = None) -> int:
    """The newest step that restores the run, or the one that is wanted if it does."""
    hint = "isthmus checkpoints RUN --verify lists what there is"
    steps = saved_steps(run, verify=True)
    whole = [one.step for one in steps if one.problem is None]
    if wanted is None and whole:
        return whole[-1]
    if wanted is None:
        raise UserError("the run has no checkpoint that restores it", hint=hint)
    if wanted not in whole:
        problem = next((one.problem for one in steps if one.step == wanted), "there is none")
        raise UserError(f"the checkpoint of step {wanted} cannot be exported: {problem}", hint=hint)
    return wanted


def _write_stage(
    run: Path, job: Job, config: RunConfig, folder: Path, *, step: int, dtype: torch.dtype | None
) -> None:
    cloud = folder.name
    build = Build(
        job=job.model_copy(update={"train": job.train.model_copy(update={"compile": False})}),
        config=config,
        cloud=cloud,
        blueprint=blueprint_of(job, config=config.model, num_labels=config.num_labels),
        device=Device("cpu"),
        world=World(),
    )
    stage = kind_of(job).make(build).built.stage
    store = open_store(run, job.checkpoint.store)
    load_weights(Checkpoints(store, cloud=cloud, job=job.meaning_digest), stage, step)
    if dtype is not None:
        stage.model.to(dtype)
    write_part(stage, folder)


def _read(run: Path) -> tuple[Job, RunConfig]:
    """The job and the run config of a run, for one rank per cloud that computes nothing."""
    job, config = job_of(run), read_config(run)
    if job is None:
        raise UserError(f"{run} holds no job that this version reads", hint="name the folder of a run")
    return job, replace(config, sharding={}, recompute=False)
