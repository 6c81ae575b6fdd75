"""What one cloud does from its job to the trained model.

meet the neighbours → agree on run, model and step → build the stage → train → bring the stages together
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from isthmus.errors import UserError
from isthmus.events import EVENTS_FOLDER, EventLog
from isthmus.job import Job
from isthmus.job.boundary import HiddenSpec
from isthmus.job.write import replace_file
from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import Blueprint
from isthmus.model.boundary import boundary_of
from isthmus.model.export import merge, write_part
from isthmus.model.stage import Stage
from isthmus.plan.choice import PLAN_FILE, Decisions, decisions_from_dict, decisions_of, plan_to_json
from isthmus.train.agreement import Offer, Start, agree_on_step, pass_offer_on
from isthmus.train.checkpoint import Checkpoints, State
from isthmus.train.cut import SavedCuts
from isthmus.train.data import TrainingData, open_data
from isthmus.train.device import Device
from isthmus.train.feed import Feed
from isthmus.train.journal import Journal, Report, Tracker
from isthmus.train.optimizer import Decay, Optimizer, Schedule
from isthmus.train.parts import gather_parts
from isthmus.train.pipeline import Course, Post, pipeline_worker
from isthmus.train.runs import (
    MODEL_FOLDER,
    PARTS_PREFIX,
    TOKENIZER_FOLDER,
    find_unfinished,
    join_run,
    start_run,
)
from isthmus.train.savers import equip, optimizer_state
from isthmus.train.setup import Setup, blueprint_of, check_fits, set_up
from isthmus.train.steering import Steering
from isthmus.train.wiring import check_cuts, cuts_of, first_trained, num_frozen_layers, steering_terms
from isthmus.train.worker import StepEnded
from isthmus.wan.endpoint import Endpoint

# Links are served by Python threads beside the one that computes; neither may hold the other up for long.
SWITCH_INTERVAL_S: Final = 0.0005
_AUTOCAST: Final = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where runs are kept, and the one that the first cloud has chosen; other clouds learn it from there."""

    root: Path
    run_id: str | None = None
    open_trackers: Callable[[Path], Sequence[Tracker]] | None = None
    num_threads: int | None = None


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


def train_cloud(job: Job, endpoint: Endpoint, *, cloud: str, report: Report, place: Place) -> Path:
    """Be one cloud of a job from the start to the exported model; gives the run's directory."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if place.num_threads is not None:
        torch.set_num_threads(place.num_threads)
    decisions = read_decisions(place.root / job.name / place.run_id) if place.run_id is not None else None
    setup = set_up(job, decisions=decisions, plans=False)
    post = _meet(endpoint, setup, cloud)
    try:
        return _Session(job, setup, post, report, place).run()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the stage of cloud {cloud!r} does not fit into the memory of its device",
            hint="set train.recompute, lower strategy.max_in_flight, or use more micro-batches",
        ) from error


def _meet(endpoint: Endpoint, setup: Setup, cloud: str) -> Post:
    index = setup.clouds.index(cloud)
    up = endpoint.link(setup.clouds[index - 1]) if index > 0 else None
    down = endpoint.link(setup.clouds[index + 1]) if index + 1 < len(setup.clouds) else None
    return Post(cloud=cloud, index=index, up=up, down=down)


class _Session:
    """One cloud's run, step by step; `data` is at the first cloud only."""

    def __init__(self, job: Job, setup: Setup, post: Post, report: Report, place: Place) -> None:
        self._job = job
        self._setup = setup
        self._post = post
        self._report = report
        self._place = place
        self._device = Device(job.cloud_named(post.cloud).device)
        self._links = [link for link in (post.up, post.down) if link is not None]

    def run(self) -> Path:
        """Agree, build, train, export."""
        data = self._open_data()
        offer = pass_offer_on(self._offer(data), up=self._post.up, down=self._post.down)
        if offer.decisions is not None:
            self._setup = set_up(self._job, decisions=decisions_from_dict(offer.decisions))
        run = join_run(self._place.root, self._job, offer.run_id)
        checkpoints = Checkpoints(run, cloud=self._post.cloud, keep=self._job.checkpoint.keep)
        start = agree_on_step(set(checkpoints.steps()), up=self._post.up, down=self._post.down)
        blueprint = blueprint_of(self._job, config=offer.config, num_labels=offer.num_labels)
        course = self._course(offer, blueprint)
        stage = self._build(blueprint, course)
        self._train(stage, course, start, checkpoints, data, run)
        self._export(stage, run)
        return run

    def _open_data(self) -> TrainingData | None:
        if self._post.up is not None:
            return None
        if self._place.run_id is None:
            raise ValueError("the first cloud chooses the run")
        run = join_run(self._place.root, self._job, self._place.run_id)
        return open_data(self._job, tokenizer_folder=run / TOKENIZER_FOLDER)

    def _offer(self, data: TrainingData | None) -> Offer | None:
        if data is None or self._place.run_id is None:
            return None
        held_out = data.validation_batches(num_sequences=self._setup.layout.num_sequences)
        decisions = self._setup.decisions
        return Offer(
            run_id=self._place.run_id,
            config=dict(data.facts.config),
            num_labels=data.facts.num_labels,
            num_validation_microbatches=sum(1 for _ in held_out),
            decisions=None if decisions is None else asdict(decisions),
        )

    def _build(self, blueprint: Blueprint, course: Course) -> Stage:
        index = self._post.index
        hidden = HiddenSpec()
        stage = build_stage(
            blueprint,
            self._setup.stage_layers(blueprint.num_layers)[index],
            seed=self._job.seed,
            recompute=self._setup.recompute,
            inbound=hidden if self._post.up is None else course.cut(index - 1).boundary,
            outbound=hidden if self._post.down is None else course.cut(index).boundary,
            num_frozen_layers=num_frozen_layers(self._job),
            lora=None if self._job.model is None else self._job.model.lora,
        ).to(self._device.torch_device)
        return equip(stage, self._job, cloud=self._post.cloud, device=self._device)

    def _course(self, offer: Offer, blueprint: Blueprint) -> Course:
        return Course(
            num_stages=len(self._setup.clouds),
            num_steps=self._job.train.steps,
            num_microbatches=self._setup.layout.num_microbatches,
            seed=self._job.seed,
            max_in_flight=self._setup.max_in_flight,
            policy=self._setup.policy,
            evaluate_every=self._job.train.evaluate_every or None,
            num_validation_microbatches=offer.num_validation_microbatches,
            keeps_padding=blueprint.family.router is not None,
            cuts=cuts_of(self._job, self._setup.clouds, planned=self._setup.codecs),
            evaluates_plain=self._job.train.evaluate_without_codec,
            first_trained=first_trained(
                self._setup.stage_layers(blueprint.num_layers), num_frozen_layers(self._job)
            ),
            cache_bytes=self._job.model.cache_frozen_bytes if self._job.model is not None else 0,
        )

    def _train(
        self,
        stage: Stage,
        course: Course,
        start: Start,
        checkpoints: Checkpoints,
        data: TrainingData | None,
        run: Path,
    ) -> None:
        optimizer = make_optimizer(self._job, stage)
        state = None
        if start.step:
            state = checkpoints.load(start.step, stage=stage, optimizer=optimizer)
        with ExitStack() as stack:
            cursor = None if state is None else state.cursor
            feed = stack.enter_context(Feed(data, self._setup.layout, cursor=cursor)) if data else None

            def save(ended: StepEnded) -> None:
                new = State(
                    step=ended.step + 1,
                    layers=(stage.layers.start, stage.layers.stop),
                    cursor=feed.cursor if feed else None,
                    cuts=ended.cuts or SavedCuts(),
                    standings=steering.standings if feed else (),
                )
                checkpoints.save(new, stage=stage, optimizer=optimizer)

            journal = stack.enter_context(self._journal(run, start, save))
            steering = self._steering(course, stage, journal)
            for note in (*(self._setup.notes if feed else ()), *stage.notes):
                journal.note(note)
            if start.step:
                journal.note(f"resumed at step {start.step}")
            worker, traffic = pipeline_worker(
                course=course,
                post=self._post,
                stage=stage,
                optimizer=optimizer,
                device=self._device,
                source=feed,
                observer=journal,
                autocast=_AUTOCAST[self._job.train.precision],
                should_save=_Interval(self._job.checkpoint.every_s, last_step=course.num_steps - 1),
                steer=steering,
            )
            if state is not None:
                traffic.restore(state.cuts, step=start.step)
                steering.restore(state.standings or steering.standings)
            with traffic:
                worker.run(course.turns(start.step))
            if traffic.up_cut is not None and traffic.up_cut.cache is not None:
                journal.note(traffic.up_cut.cache.describe())

    def _steering(self, course: Course, stage: Stage, journal: Journal) -> Steering:
        layout, data = self._setup.layout, self._job.data
        num_rows = layout.num_sequences * (data.sequence_length if data is not None else 1)
        terms = steering_terms(
            self._job,
            self._setup.clouds,
            course.cuts,
            num_rows=num_rows,
            hidden_width=stage.model.config.hidden_size,
            trained_from=course.first_trained,
        )
        return Steering(terms, num_microbatches=course.num_microbatches, note=journal.note)

    @contextmanager
    def _journal(self, run: Path, start: Start, save: Callable[[StepEnded], None]) -> Iterator[Journal]:
        is_first = self._post.up is None
        opens = self._place.open_trackers if is_first else None
        trackers = opens(run) if opens is not None else ()
        path = run / EVENTS_FOLDER / f"{self._post.cloud}.jsonl"
        try:
            with EventLog(path, clock_offset_s=start.clock_offset_s) as log:
                yield Journal(
                    log,
                    is_first=is_first,
                    links=self._links,
                    report=self._report,
                    save=save,
                    trackers=trackers,
                )
        finally:
            for tracker in trackers:
                tracker.close()

    def _export(self, stage: Stage, run: Path) -> None:
        own = run / f"{PARTS_PREFIX}{self._post.cloud}"
        write_part(stage, own / self._post.cloud)
        parts = gather_parts(own, up=self._post.up, down=self._post.down)
        if self._post.up is None:
            companions = [path for path in (run / TOKENIZER_FOLDER).glob("*") if path.is_file()]
            for note in merge(parts, run / MODEL_FOLDER, companions=companions):
                self._report(json.dumps({"kind": "note", "text": note}))
        shutil.rmtree(own)


def make_optimizer(job: Job, stage: Stage) -> Optimizer:
    """The optimizer of a stage, as the job's `[train]` says."""
    train = job.train
    schedule = Schedule(
        peak=train.learning_rate,
        num_steps=train.steps,
        num_warmup_steps=round(train.warmup_share * train.steps),
        decay=Decay(train.decay),
    )
    return Optimizer(
        stage.parameters_by_name(),
        schedule=schedule,
        weight_decay=train.weight_decay,
        max_norm=train.max_norm or None,
        state=optimizer_state(job),
        offload=train.offload_optimizer,
    )


class _Interval:
    """Says after which steps to save: when the time has come, and at the end."""

    def __init__(self, every_s: float, *, last_step: int) -> None:
        self._every_s = every_s
        self._last_step = last_step
        self._saved_s = time.monotonic()

    def __call__(self, step: int) -> bool:
        now_s = time.monotonic()
        if step != self._last_step and now_s - self._saved_s < self._every_s:
            return False
        self._saved_s = now_s
        return True
