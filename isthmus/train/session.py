"""What one cloud does from its job to the trained model.

meet the neighbours → agree on run, model and step → build the stage → train → bring the stages together
"""

import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from isthmus.errors import UserError
from isthmus.events import EVENTS_FOLDER, STARTED_KIND, EventLog
from isthmus.job import Job
from isthmus.model.export import merge, write_part
from isthmus.observe.trackers import Tracker
from isthmus.plan.lock_step import common_ranks
from isthmus.plan.search.plan_file import decisions_from_dict
from isthmus.train.agreement import Offer, Start
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.course import Course, Post, course_of
from isthmus.train.data.feed import Feed, Share
from isthmus.train.data.order import Cursor
from isthmus.train.data.token_files import tokens_of
from isthmus.train.data.training_data import TrainingData, open_data
from isthmus.train.device import Device
from isthmus.train.equipment import AUTOCAST, Equipment, Equipped, make_steering
from isthmus.train.journal import Journal, Report
from isthmus.train.keeping import Keeper, SaveInterval
from isthmus.train.neighbours import Neighbours
from isthmus.train.observer import StepEnded
from isthmus.train.parts import gather_parts
from isthmus.train.pipeline import pipeline_worker
from isthmus.train.preflight import read_decisions
from isthmus.train.ranks.world import World, join_world
from isthmus.train.runs import MODEL_FOLDER, PARTS_PREFIX, TOKENIZER_FOLDER, join_run
from isthmus.train.setup import Setup, blueprint_of, set_up
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.seat import Seat

# Links are served by Python threads beside the one that computes; neither may hold the other up for long.
SWITCH_INTERVAL_S: Final = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where runs are kept, and the one that the first cloud has chosen; other clouds learn it from there."""

    root: Path
    run_id: str | None = None
    open_trackers: Callable[[Path], Sequence[Tracker]] | None = None
    num_threads: int | None = None


def train_cloud(
    job: Job,
    endpoint: Endpoint,
    *,
    cloud: str,
    report: Report,
    place: Place,
    seat: Seat | None = None,
) -> Path:
    """Be one rank of one cloud of a job from the start to the exported model; gives the run's directory."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if place.num_threads is not None:
        torch.set_num_threads(place.num_threads)
    seat = seat or Seat()
    decisions = read_decisions(place.root / job.name / place.run_id) if place.run_id is not None else None
    setup = set_up(job, decisions=decisions, plans=False)
    device = Device(job.cloud_named(cloud).device, local_rank=seat.local_rank if seat.num_ranks > 1 else None)
    try:
        with join_world(seat, device, cloud=cloud, end=endpoint.abort) as world:
            return _Session(job, setup, cloud, endpoint, device, world, report, place).run()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the stage of cloud {cloud!r} does not fit into the memory of its device",
            hint="set train.recompute, lower strategy.max_in_flight, or use more micro-batches",
        ) from error


class _Session:
    """One rank's run, step by step; `data` is at the first cloud only."""

    def __init__(
        self,
        job: Job,
        setup: Setup,
        cloud: str,
        endpoint: Endpoint,
        device: Device,
        world: World,
        report: Report,
        place: Place,
    ) -> None:
        self._job = job
        self._setup = setup
        self._cloud = cloud
        self._device = device
        self._world = world
        self._report = report
        self._place = place
        self._neighbours = Neighbours(endpoint, world, clouds=setup.clouds, cloud=cloud)
        self._is_first = self._neighbours.index == 0

    def run(self) -> Path:
        """Agree, build, train, export."""
        data = self._open_data(self._place.run_id) if self._is_first and self._is_leader else None
        self._neighbours.meet(self._job, note=self._note)
        offer = self._neighbours.agree_on_offer(self._offer(data))
        if offer.decisions is not None:
            self._setup = set_up(self._job, decisions=decisions_from_dict(offer.decisions))
        run = join_run(self._place.root, self._job, offer.run_id)
        if self._is_first and data is None:
            data = self._open_data(offer.run_id)
        checkpoints = Checkpoints(run, cloud=self._cloud, keep=self._job.checkpoint.keep)
        start = self._neighbours.agree_on_start(checkpoints.steps())
        course, equipped = self._equip(offer)
        keeper = Keeper(checkpoints, self._world, stage=equipped.stage, optimizer=equipped.optimizer)
        self._train(course, equipped, keeper, start, data, run)
        self._export(equipped, keeper, run)
        return run

    @property
    def _is_leader(self) -> bool:
        return self._world.seat.is_leader

    def _note(self, text: str) -> None:
        self._report(json.dumps({"kind": "note", "text": text}))

    def _open_data(self, run_id: str | None) -> TrainingData:
        if run_id is None:
            raise ValueError("the first cloud chooses the run")
        run = join_run(self._place.root, self._job, run_id)
        tokens = tokens_of(self._job, root=self._place.root, note=self._note)
        return open_data(self._job, tokenizer_folder=run / TOKENIZER_FOLDER, tokens=tokens)

    def _offer(self, data: TrainingData | None) -> Offer | None:
        if data is None or self._place.run_id is None:
            return None
        held_out = data.validation_batches(
            num_sequences=self._setup.layout.num_sequences, multiple_of=self._num_in_step
        )
        decisions = self._setup.decisions
        return Offer(
            run_id=self._place.run_id,
            config=dict(data.facts.config),
            num_labels=data.facts.num_labels,
            num_validation_microbatches=sum(1 for _ in held_out),
            decisions=None if decisions is None else asdict(decisions),
        )

    def _equip(self, offer: Offer) -> tuple[Course, Equipped]:
        blueprint = blueprint_of(self._job, config=offer.config, num_labels=offer.num_labels)
        course = course_of(
            self._job,
            self._setup,
            blueprint,
            num_validation_microbatches=offer.num_validation_microbatches,
        )
        job = self._setup.followed(self._job)
        equipment = Equipment(
            job=job,
            cloud=job.cloud_named(self._cloud),
            setup=self._setup,
            blueprint=blueprint,
            device=self._device,
            world=self._world,
        )
        return course, equipment.make(course)

    def _train(
        self,
        course: Course,
        equipped: Equipped,
        keeper: Keeper,
        start: Start,
        data: TrainingData | None,
        run: Path,
    ) -> None:
        state = keeper.load(start.step) if start.step else None
        post = self._neighbours.post(course)
        with ExitStack() as stack:
            cursor = None if state is None else state.cursor
            feed = stack.enter_context(self._feed(data, course, start, cursor)) if data else None

            def save(ended: StepEnded) -> None:
                standings = steering.standings if feed else ()
                keeper.save_after(ended, cursor=feed.cursor if feed else None, standings=standings)

            journal = stack.enter_context(self._journal(run, start, save, post))
            steering = make_steering(self._job, self._setup, course, equipped.stage, note=journal.note)
            self._tell_beginning(journal, equipped, start)
            worker, traffic = pipeline_worker(
                course=course,
                post=post,
                stage=equipped.stage,
                optimizer=equipped.optimizer,
                device=self._device,
                source=feed,
                observer=journal,
                autocast=AUTOCAST[self._job.train.precision],
                should_save=SaveInterval(self._job.checkpoint.every_s, last_step=course.num_steps - 1),
                steer=steering,
                world=self._world,
                reduction=equipped.reduction,
            )
            with traffic:
                if state is not None:
                    traffic.restore(state.cuts, step=start.step)
                    steering.restore(state.standings or steering.standings)
                worker.run(course.turns(start.step, stage=post.index, rank=post.rank))
                self._neighbours.agree_on_end()
            for cut in traffic.up_cuts:
                if cut.cache is not None:
                    journal.note(cut.cache.describe())

    def _feed(self, data: TrainingData, course: Course, start: Start, cursor: Cursor | None) -> Feed:
        share = functools.partial(course.routing.share, 0, self._world.seat.rank)
        held_out = share(step=0, is_evaluation=True)
        return Feed(
            data,
            self._setup.layout,
            cursor=cursor,
            share=Share(training=lambda step: share(step=step), validation=held_out),
            first_step=start.step,
            num_in_step=self._num_in_step,
        )

    @property
    def _num_in_step(self) -> int:
        """Ranks of a cloud that run one sequence of passes, and so need as many micro-batches each."""
        return common_ranks(self._setup.followed(self._job))

    def _tell_beginning(self, journal: Journal, equipped: Equipped, start: Start) -> None:
        if not self._is_leader:
            return
        for note in (*(self._setup.notes if self._is_first else ()), *equipped.stage.notes):
            journal.note(note)
        if start.step:
            journal.note(f"resumed after step {start.step}")

    @contextmanager
    def _journal(
        self, run: Path, start: Start, save: Callable[[StepEnded], None], post: Post
    ) -> Iterator[Journal]:
        is_first = self._is_first and self._is_leader
        opens = self._place.open_trackers if is_first else None
        trackers = opens(run) if opens is not None else ()
        name = self._cloud if self._is_leader else f"{self._cloud}.{post.rank}"
        path = run / EVENTS_FOLDER / f"{name}.jsonl"
        try:
            with EventLog(path, clock_offset_s=start.clock_offset_s) as log:
                log.fact(STARTED_KIND, {"step": start.step})
                yield Journal(
                    log,
                    is_first=is_first,
                    links=[*post.up_links.values(), *post.down_links.values()],
                    report=self._report,
                    save=save,
                    trackers=trackers,
                )
        finally:
            for tracker in trackers:
                tracker.close()

    def _export(self, equipped: Equipped, keeper: Keeper, run: Path) -> None:
        tensors = keeper.export()
        if not self._is_leader:
            return
        own = run / f"{PARTS_PREFIX}{self._cloud}"
        write_part(equipped.stage, own / self._cloud, tensors=tensors)
        parts = gather_parts(own, up=self._neighbours.up, down=self._neighbours.down)
        if self._is_first:
            companions = [path for path in (run / TOKENIZER_FOLDER).glob("*") if path.is_file()]
            for note in merge(parts, run / MODEL_FOLDER, companions=companions):
                self._note(note)
        shutil.rmtree(own)
