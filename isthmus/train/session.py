"""What one cloud does from its job to the trained model.

meet the neighbours → agree on run, model and step → build the stage → train → bring the stages together
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from isthmus.errors import UserError
from isthmus.events import EVENTS_FOLDER, EventLog
from isthmus.job import Job
from isthmus.model.anatomy import split_layers
from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import Blueprint
from isthmus.model.export import merge, write_part
from isthmus.model.stage import Stage
from isthmus.train.agreement import Offer, Start, agree_on_step, pass_offer_on
from isthmus.train.checkpoint import Checkpoints, State
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
from isthmus.train.setup import Setup, blueprint_of, check_fits, set_up
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
        check_job(job, tokenizer_folder=run / TOKENIZER_FOLDER)
        return run
    with tempfile.TemporaryDirectory() as scratch:
        check_job(job, tokenizer_folder=Path(scratch) / TOKENIZER_FOLDER)
        return start_run(root, job, tokenizer=Path(scratch) / TOKENIZER_FOLDER)


def check_job(job: Job, *, tokenizer_folder: Path) -> Setup:
    """Refuse a job that cannot run, in one sentence, before any cloud starts."""
    setup = set_up(job)
    data = open_data(job, tokenizer_folder=tokenizer_folder)
    blueprint = blueprint_of(job, config=data.facts.config, num_labels=data.facts.num_labels)
    check_fits(job, setup, blueprint)
    data.steps(setup.layout).close()
    return setup


def train_cloud(job: Job, endpoint: Endpoint, *, cloud: str, report: Report, place: Place) -> Path:
    """Be one cloud of a job from the start to the exported model; gives the run's directory."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if place.num_threads is not None:
        torch.set_num_threads(place.num_threads)
    setup = set_up(job)
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
        run = join_run(self._place.root, self._job, offer.run_id)
        checkpoints = Checkpoints(run, cloud=self._post.cloud, keep=self._job.checkpoint.keep)
        start = agree_on_step(set(checkpoints.steps()), up=self._post.up, down=self._post.down)
        blueprint = blueprint_of(self._job, config=offer.config, num_labels=offer.num_labels)
        stage = self._build(blueprint)
        course = self._course(offer, blueprint)
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
        return Offer(
            run_id=self._place.run_id,
            config=dict(data.facts.config),
            num_labels=data.facts.num_labels,
            num_validation_microbatches=sum(1 for _ in held_out),
        )

    def _build(self, blueprint: Blueprint) -> Stage:
        layers = split_layers(blueprint.num_layers, len(self._setup.clouds))[self._post.index]
        stage = build_stage(blueprint, layers, seed=self._job.seed, recompute=self._job.train.recompute)
        return stage.to(self._device.torch_device)

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
        cursor = None
        if start.step:
            cursor = checkpoints.load(start.step, stage=stage, optimizer=optimizer).cursor
        with ExitStack() as stack:
            feed = stack.enter_context(Feed(data, self._setup.layout, cursor=cursor)) if data else None

            def save(step: int) -> None:
                layers = (stage.layers.start, stage.layers.stop)
                state = State(step=step, layers=layers, cursor=feed.cursor if feed else None)
                checkpoints.save(state, stage=stage, optimizer=optimizer)

            journal = stack.enter_context(self._journal(run, start, save))
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
            )
            with traffic:
                worker.run(course.turns(start.step))

    @contextmanager
    def _journal(self, run: Path, start: Start, save: Callable[[int], None]) -> Iterator[Journal]:
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
            merge(parts, run / MODEL_FOLDER, companions=companions)
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
        dict(stage.model.named_parameters()),
        schedule=schedule,
        weight_decay=train.weight_decay,
        max_norm=train.max_norm or None,
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
