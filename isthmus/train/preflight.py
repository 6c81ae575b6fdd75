"""What is found out before any cloud starts: which run to go on with, and all that is wrong with a job."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from isthmus.errors import UserError
from isthmus.job import CloudSpec, Job
from isthmus.job.boundary import BottleneckSpec
from isthmus.job.rundir import choosing, lock_run
from isthmus.model.blueprint import Blueprint
from isthmus.model.source import Checkpoint, Source
from isthmus.plan.costs.source import CostSource, nothing_measured
from isthmus.plan.cuts import check_cuts, links_along, num_frozen_layers
from isthmus.plan.search.choice import Decisions, Plan
from isthmus.plan.search.plan_file import PLAN_FILE, decisions_of, plan_to_json
from isthmus.train.build import blueprint_of
from isthmus.train.data.columns import read_texts
from isthmus.train.data.corpus import open_rows
from isthmus.train.data.token_files import TokenFiles, tokens_of
from isthmus.train.data.training_data import open_data
from isthmus.train.fitting import check_fits
from isthmus.train.runs import TOKENIZER_FOLDER, find_unfinished, go_on, refuse_changed, start_run
from isthmus.train.setup import Setup, may_plan, set_up
from isthmus.wan.devices import Devices, require_kind, require_one_each
from isthmus.wan.handshake import Seat

Learn = Callable[[Job], Job]
"""Gives a job with what is known of its clouds beside it: profiles, and their share of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a job that can run comes to: its plan, where one was made, and the digest of its data."""

    plan: Plan | None
    data_sha256: str


@contextmanager
def choose_run(
    job: Job,
    *,
    root: Path,
    resume: bool,
    note: Callable[[str], None],
    is_shared: bool = False,
    learn: Learn | None = None,
    source: CostSource = nothing_measured,
) -> Iterator[Path]:
    """Find all that is wrong with job, model and data; then hold the run to go on with, or a new one.

    The tokens that are made for this are those that the run reads. With `is_shared` other clouds of the run
    may be run from this disk, too. A new run is planned with what `learn` finds out; one that goes on keeps
    its plan, and nothing is measured.
    """
    with ExitStack() as held:
        with choosing(root, job, note=note):
            run = find_unfinished(root, job) if resume else None
            if run is not None:
                held.enter_context(lock_run(run, note=note, is_shared=is_shared))
                _go_on(run, job, root=root, note=note)
            else:
                if resume:
                    refuse_changed(root, job)
                run = _start(job, root=root, note=note, learn=learn, source=source)
                held.enter_context(lock_run(run, note=note, is_shared=is_shared))
        yield run


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
    plans: bool = True,
    learn: Learn | None = None,
    source: CostSource = nothing_measured,
) -> Checked:
    """Refuse a job that cannot run, in one sentence, before any cloud starts.

    A first plan, with the catalogue's times, refuses what can be refused before clouds are measured.
    """
    setup, known = set_up(job, decisions=decisions, plans=plans, source=source), job
    data = open_data(job, tokenizer_folder=tokenizer_folder, tokens=tokens)
    blueprint = blueprint_of(job, config=data.facts.config, num_labels=data.facts.num_labels)
    if learn is not None and plans and decisions is None and may_plan(job, source):
        known = learn(job)
        setup = set_up(job, known=known, source=source)
    check_export(job, setup, blueprint)
    check_fits(known, setup, blueprint)
    stage_layers = setup.stage_layers(blueprint.num_layers)
    check_cuts(
        links_along(job, setup.clouds),
        stage_layers,
        num_frozen=num_frozen_layers(job),
        hidden_width=blueprint.config.hidden_size,
        num_steps=job.train.steps,
    )
    data.steps(setup.layout).close()
    return Checked(plan=setup.plan, data_sha256=data.sha256)


def check_unplanned(job: Job, *, root: Path, note: Callable[[str], None]) -> None:
    """Refuse a job that cannot run, as far as that can be told before all clouds have met."""
    with tempfile.TemporaryDirectory() as scratch:
        tokens = tokens_of(job, root=root, note=note)
        check_job(job, tokenizer_folder=Path(scratch) / TOKENIZER_FOLDER, tokens=tokens, plans=False)


def _go_on(run: Path, job: Job, *, root: Path, note: Callable[[str], None]) -> None:
    """Check a job against a run that was stopped; what was planned for it holds, and is not planned again."""
    checked = check_job(
        job,
        tokenizer_folder=run / TOKENIZER_FOLDER,
        tokens=tokens_of(job, root=root, note=note),
        decisions=read_decisions(run),
        plans=False,
    )
    go_on(run, job, data_sha256=checked.data_sha256, note=note)


def _start(
    job: Job, *, root: Path, note: Callable[[str], None], learn: Learn | None, source: CostSource
) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = Path(scratch) / TOKENIZER_FOLDER
        tokens = tokens_of(job, root=root, note=note)
        checked = check_job(job, tokenizer_folder=tokenizer, tokens=tokens, learn=learn, source=source)
        plan = None if checked.plan is None else plan_to_json(checked.plan)
        return start_run(root, job, tokenizer=tokenizer, data_sha256=checked.data_sha256, plan=plan)


def check_export(job: Job, setup: Setup, blueprint: Blueprint) -> None:
    """Refuse to train what no exported model could hold."""
    bottlenecks = [
        link for link in links_along(job, setup.clouds) if isinstance(link.boundary, BottleneckSpec)
    ]
    lora = None if job.model is None else job.model.lora
    if bottlenecks and lora is not None and not lora.merge:
        raise UserError(
            f"an adapter alone cannot hold {bottlenecks[0].boundary}, which would be trained with it",
            hint="set model.lora.merge = true, so that the whole model is exported",
        )
    if bottlenecks and blueprint.brings_code:
        raise UserError(
            f"a model with code of its own cannot be exported with {bottlenecks[0].boundary}",
            hint='leave link.boundary at "hidden", and set link.codec instead',
        )


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
