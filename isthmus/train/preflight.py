"""What is found out before any cloud starts: which run to go on with, and all that is wrong with a job."""

import tempfile
from pathlib import Path

from isthmus.job import Job
from isthmus.job.write import replace_file
from isthmus.model.boundary import boundary_of
from isthmus.plan.search.choice import PLAN_FILE, Decisions, decisions_of, plan_to_json
from isthmus.train.crossing.wiring import check_cuts, cuts_of, num_frozen_layers
from isthmus.train.data.training_data import open_data
from isthmus.train.fitting import check_fits
from isthmus.train.runs import TOKENIZER_FOLDER, find_unfinished, start_run
from isthmus.train.setup import Setup, blueprint_of, set_up


def choose_run(job: Job, *, root: Path, resume: bool) -> Path:
    """Find all that is wrong with job, model and data; then give the run to go on with, or a new one."""
    run = find_unfinished(root, job) if resume else None
    if run is not None and (run / TOKENIZER_FOLDER).exists():
        check_job(job, tokenizer_folder=run / TOKENIZER_FOLDER, decisions=read_decisions(run))
        return run
    with tempfile.TemporaryDirectory() as scratch:
        setup = check_job(job, tokenizer_folder=Path(scratch) / TOKENIZER_FOLDER)
        run = start_run(root, job, tokenizer=Path(scratch) / TOKENIZER_FOLDER)
    if setup.plan is not None:
        replace_file(run / PLAN_FILE, plan_to_json(setup.plan))
    return run


def read_decisions(run: Path) -> Decisions | None:
    """What was planned when the run began, None where nothing was."""
    path = run / PLAN_FILE
    return decisions_of(path.read_text(encoding="utf-8")) if path.exists() else None


def check_job(job: Job, *, tokenizer_folder: Path, decisions: Decisions | None = None) -> Setup:
    """Refuse a job that cannot run, in one sentence, before any cloud starts."""
    setup = set_up(job, decisions=decisions)
    data = open_data(job, tokenizer_folder=tokenizer_folder)
    blueprint = blueprint_of(job, config=data.facts.config, num_labels=data.facts.num_labels)
    check_fits(job, setup, blueprint)
    stage_layers = setup.stage_layers(blueprint.num_layers)
    cuts = cuts_of(job, setup.clouds, planned=setup.codecs)
    check_cuts(cuts, stage_layers, num_frozen=num_frozen_layers(job))
    for cut in cuts:
        boundary_of(cut.boundary, hidden_width=blueprint.config.hidden_size)
    data.steps(setup.layout).close()
    return setup
