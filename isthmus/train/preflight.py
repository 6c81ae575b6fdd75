"""What is found out before any cloud starts: which run to go on with, and all that is wrong with a job."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job
from isthmus.job.write import replace_file
from isthmus.model.source import Checkpoint, Source
from isthmus.plan.cuts import check_cuts, links_along, num_frozen_layers
from isthmus.plan.search.choice import Decisions
from isthmus.plan.search.plan_file import PLAN_FILE, decisions_of, plan_to_json
from isthmus.train.data.columns import read_texts
from isthmus.train.data.corpus import open_rows
from isthmus.train.data.token_files import TokenFiles, tokens_of
from isthmus.train.data.training_data import open_data
from isthmus.train.fitting import check_fits
from isthmus.train.runs import TOKENIZER_FOLDER, find_unfinished, start_run
from isthmus.train.setup import Setup, blueprint_of, set_up
from isthmus.wan.devices import Devices, require_kind, require_one_each
from isthmus.wan.seat import Seat


def choose_run(job: Job, *, root: Path, resume: bool, note: Callable[[str], None]) -> Path:
    """Find all that is wrong with job, model and data; then give the run to go on with, or a new one.

    The tokens that are made for this are those that the run reads.
    """
    tokens = tokens_of(job, root=root, note=note)
    run = find_unfinished(root, job) if resume else None
    if run is not None and (run / TOKENIZER_FOLDER).exists():
        folder = run / TOKENIZER_FOLDER
        check_job(job, tokenizer_folder=folder, tokens=tokens, decisions=read_decisions(run))
        return run
    with tempfile.TemporaryDirectory() as scratch:
        setup = check_job(job, tokenizer_folder=Path(scratch) / TOKENIZER_FOLDER, tokens=tokens)
        run = start_run(root, job, tokenizer=Path(scratch) / TOKENIZER_FOLDER)
    if setup.plan is not None:
        replace_file(run / PLAN_FILE, plan_to_json(setup.plan))
    return run


def read_decisions(run: Path) -> Decisions | None:
    """What was planned when the run began, None where nothing was."""
    path = run / PLAN_FILE
    return decisions_of(path.read_text(encoding="utf-8")) if path.exists() else None


def check_job(
    job: Job,
    *,
    tokenizer_folder: Path,
    tokens: TokenFiles | None = None,
    decisions: Decisions | None = None,
) -> Setup:
    """Refuse a job that cannot run, in one sentence, before any cloud starts."""
    setup = set_up(job, decisions=decisions)
    data = open_data(job, tokenizer_folder=tokenizer_folder, tokens=tokens)
    blueprint = blueprint_of(job, config=data.facts.config, num_labels=data.facts.num_labels)
    check_fits(job, setup, blueprint)
    stage_layers = setup.stage_layers(blueprint.num_layers)
    check_cuts(
        links_along(job, setup.clouds),
        stage_layers,
        num_frozen=num_frozen_layers(job),
        hidden_width=blueprint.config.hidden_size,
        num_steps=job.train.steps,
    )
    data.steps(setup.layout).close()
    return setup


def check_all_devices(job: Job) -> None:
    """Refuse to start all clouds here if one of them lacks devices; clouds may share them, ranks may not."""
    found = find_devices()
    for cloud in job.cloud:
        require_kind(cloud, found)
        require_one_each(cloud, found, num_ranks=cloud.ranks)


def check_device(cloud: CloudSpec, seat: Seat) -> None:
    """Refuse to be a rank of a cloud that would have no device of its own here."""
    found = find_devices()
    require_kind(cloud, found)
    # A launcher may show every rank a single device, its own; whether it is, the ranks find out together.
    if seat.num_ranks > 1 and found.num_devices > 1:
        require_one_each(cloud, found, num_ranks=seat.local_rank + 1)


def find_devices() -> Devices:
    """What torch finds on this machine."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return Devices()
    return Devices(kind=found.type, num_devices=torch.accelerator.device_count())


def look_at_model(job: Job) -> str:
    """What the job's model is, without its weights, which a folder must have beside it."""
    # A run has the ids of its tokenizer; those that a family assumes may lie beyond a small vocabulary.
    blueprint = blueprint_of(job, config=dict.fromkeys(("bos_token_id", "eos_token_id")), num_labels=None)
    name = None if job.model is None else job.model.source
    if name is not None and Path(name).is_dir():
        Checkpoint(Source(name)).tensors()
    return f"{name or 'fresh'}: {blueprint.config.model_type} of {blueprint.num_layers} layers"


def look_at_data(job: Job) -> str:
    """Where the job's data is, once a row of it was read."""
    if job.data is None:
        raise UserError("the job has no [data] section", hint="docs/job.md shows what it holds")
    for source in filter(None, (job.data.source, job.data.validation_source)):
        row = next(iter(open_rows(source)), None)
        if row is None:
            raise UserError(f"{source!r} is empty", hint="name files with something in them")
        read_texts(row, job.data)
    return job.data.source
