"""Exports the models of a run, at its end or from checkpoints before that."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.rundir import job_of
from isthmus.model.export import merge, write_part
from isthmus.train.build import Build, RunConfig, blueprint_of
from isthmus.train.checkpoint import Checkpoints, saved_steps
from isthmus.train.device import Device
from isthmus.train.in_cloud import World
from isthmus.train.keeper import load_weights
from isthmus.train.records import open_store
from isthmus.train.role import kind_of, read_config
from isthmus.train.runs import PARTS_PREFIX, TOKENIZER_FOLDER


def export_run(
    run: Path,
    folder: Path,
    *,
    steps: Mapping[str, int],
    dtype: torch.dtype | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Write the model as the checkpoints of clouds at these steps have it, built on the host stage by stage.

    Where each cloud trains a model of its own, each is in a folder of its own.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already", hint="name another folder with --out")
    job, config = _read(run)
    is_one = kind_of(job).saves_together
    scratch = Path(tempfile.mkdtemp(dir=run, prefix=PARTS_PREFIX))
    try:
        for cloud, step in steps.items():
            is_first = cloud == next(iter(steps))
            _write_parts(run, job, config, scratch, cloud=cloud, step=step, dtype=dtype, is_first=is_first)
        parts = sorted(scratch.iterdir())
        merge_models(run, parts, into=lambda name: folder if is_one else folder / name, note=note)
    finally:
        shutil.rmtree(scratch)


def merge_models(
    run: Path, parts: Sequence[Path], *, into: Callable[[str], Path], note: Callable[[str], None]
) -> None:
    """Join the parts of each model, `MODEL.CLOUD`, with the tokenizer of the run."""
    companions = [path for path in (run / TOKENIZER_FOLDER).glob("*") if path.is_file()]
    for name in sorted({part.stem for part in parts}):
        of_model = [part for part in parts if part.stem == name]
        for text in merge(of_model, into(name), companions=companions):
            note(text)


def steps_to_export(run: Path, *, wanted: int | None = None) -> dict[str, int]:
    """The newest whole step of each cloud that an export reads, or the one that is wanted."""
    job, _ = _read(run)
    kind, saved = kind_of(job), saved_steps(run, verify=True)
    if wanted is not None and not kind.saves_together:
        raise UserError(
            "each cloud of this run trains a model of its own and saves it at steps of its own",
            hint="leave --step out, which exports the newest of each",
        )
    asked = [one for one in saved if wanted in (None, one.step)]
    whole = {cloud: one.step for one in asked if one.problem is None for cloud in one.clouds}
    clouds = kind.clouds(job)
    if kind.saves_together and kind.continues:
        # The outer parameters are the same at all clouds; one that was away may have old ones alone.
        clouds = (max(clouds, key=lambda cloud: whole.get(cloud, -1)),)
    for cloud in clouds:
        if cloud not in whole:
            problem = next((one.problem for one in reversed(asked) if one.problem), "there is none")
            what = f"of cloud {cloud!r}" if wanted is None else f"of step {wanted}"
            raise UserError(
                f"the checkpoint {what} cannot be exported: {problem}",
                hint="isthmus checkpoints RUN --verify lists what there is",
            )
    return {cloud: whole[cloud] for cloud in clouds}


def _write_parts(
    run: Path,
    job: Job,
    config: RunConfig,
    folder: Path,
    *,
    cloud: str,
    step: int,
    dtype: torch.dtype | None,
    is_first: bool,
) -> None:
    build = Build(
        job=job.model_copy(update={"train": job.train.model_copy(update={"compile": False})}),
        config=config,
        cloud=cloud,
        blueprint=blueprint_of(job, config=config.model, num_labels=config.num_labels),
        device=Device("cpu"),
        world=World(),
    )
    role = kind_of(job).make(build)
    store = open_store(run, job.checkpoint.store)
    checkpoints = Checkpoints(store, cloud=cloud, job=job.meaning_digest)
    load_weights(checkpoints, role.built.stage, step, extra=role.extra())
    for name, stage in role.models(is_first=is_first).items():
        if dtype is not None:
            stage.model.to(dtype)
        write_part(stage, folder / f"{name}.{cloud}")


def _read(run: Path) -> tuple[Job, RunConfig]:
    """The job and the run config of a run, for one rank per cloud that computes nothing."""
    job, config = job_of(run), read_config(run)
    if job is None:
        raise UserError(f"{run} holds no job that this version reads", hint="name the folder of a run")
    return job, replace(config, sharding={}, recompute=False)
