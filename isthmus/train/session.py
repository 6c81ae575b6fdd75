"""What one cloud does from its job to the trained model.

meet the neighbours → agree on run, model and step → build the stage → train → bring the stages together
"""

import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from isthmus.errors import UserError
from isthmus.events import EVENTS_FOLDER, STARTED_KIND, EventLog
from isthmus.job import Job
from isthmus.model.blueprint import Blueprint
from isthmus.model.export import merge, write_part
from isthmus.model.stage import Stage
from isthmus.plan.search.choice import decisions_from_dict
from isthmus.train.agreement import Offer, Start, agree_on_end, agree_on_step, pass_offer_on
from isthmus.train.checkpoint import Checkpoints, State
from isthmus.train.course import Course, Post
from isthmus.train.crossing.cut import SavedCuts
from isthmus.train.crossing.steering import Steering
from isthmus.train.crossing.wiring import cuts_of, first_trained, num_frozen_layers, steering_terms
from isthmus.train.data.feed import Feed, Share
from isthmus.train.data.training_data import TrainingData, open_data
from isthmus.train.device import Device
from isthmus.train.equipment import AUTOCAST, Equipment, make_optimizer
from isthmus.train.journal import Journal, Report, Tracker
from isthmus.train.keeping import Keeper
from isthmus.train.optimize.optimizer import Optimizer
from isthmus.train.parts import gather_parts
from isthmus.train.pipeline import pipeline_worker
from isthmus.train.preflight import read_decisions
from isthmus.train.ranks.reduction import Reduction
from isthmus.train.ranks.world import World, join_world
from isthmus.train.runs import (
    MODEL_FOLDER,
    PARTS_PREFIX,
    TOKENIZER_FOLDER,
    join_run,
)
from isthmus.train.setup import Setup, blueprint_of, set_up
from isthmus.train.worker import StepEnded
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.link import Link
from isthmus.wan.seat import Seat

# Links are served by Python threads beside the one that computes; neither may hold the other up for long.
SWITCH_INTERVAL_S: Final = 0.0005
_PATIENCE_S: Final = 5.0
"""A neighbour that has not come by then is named."""


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
        self._cloud = job.cloud_named(cloud)
        self._endpoint = endpoint
        self._device = device
        self._world = world
        self._report = report
        self._place = place
        self._index = setup.clouds.index(cloud)
        self._is_first = self._index == 0
        self._up = self._leaders_link(self._index - 1)
        self._down = self._leaders_link(self._index + 1)

    def run(self) -> Path:
        """Agree, build, train, export."""
        data = self._open_data(self._place.run_id) if self._is_first and self._is_leader else None
        self._meet_neighbours()
        offer = self._agree_on_offer(data)
        if offer.decisions is not None:
            self._setup = set_up(self._job, decisions=decisions_from_dict(offer.decisions))
        run = join_run(self._place.root, self._job, offer.run_id)
        if self._is_first and data is None:
            data = self._open_data(offer.run_id)
        checkpoints = Checkpoints(run, cloud=self._cloud.name, keep=self._job.checkpoint.keep)
        start = self._agree_on_start(checkpoints)
        blueprint = blueprint_of(self._job, config=offer.config, num_labels=offer.num_labels)
        course = self._course(offer, blueprint)
        equipment = self._equipment(blueprint)
        stage = equipment.stage(course)
        optimizer = make_optimizer(equipment.job, stage, offload=not equipment.is_sharded)
        keeper = Keeper(checkpoints, self._world, stage=stage, optimizer=optimizer)
        reduction = equipment.reduction(stage)
        self._train(stage, optimizer, reduction, course, start, keeper, data, run)
        self._export(stage, keeper, run)
        return run

    @property
    def _is_leader(self) -> bool:
        return self._world.seat.is_leader

    def _leaders_link(self, stage: int) -> Link | None:
        if not self._is_leader or not 0 <= stage < len(self._setup.clouds):
            return None
        return self._endpoint.link(self._setup.clouds[stage])

    def _meet_neighbours(self) -> None:
        """Say whom this cloud waits for, once it has waited a little."""
        for link in filter(None, (self._up, self._down)):
            try:
                link.wait_ready(timeout_s=_PATIENCE_S)
            except TimeoutError:
                peer = self._job.cloud_named(link.peer.cloud)
                place = f" at {peer.listen}" if peer.listen is not None else ""
                self._note(f"waiting for cloud {peer.name!r}{place}")
                link.wait_ready()

    def _note(self, text: str) -> None:
        self._report(json.dumps({"kind": "note", "text": text}))

    def _agree_on_offer(self, data: TrainingData | None) -> Offer:
        words = None
        if self._is_leader:
            words = asdict(pass_offer_on(self._offer(data), up=self._up, down=self._down))
        return Offer(**self._world.spread(words))

    def _agree_on_start(self, checkpoints: Checkpoints) -> Start:
        words = None
        if self._is_leader:
            words = asdict(agree_on_step(set(checkpoints.steps()), up=self._up, down=self._down))
        return Start(**self._world.spread(words))

    def _agree_on_end(self) -> None:
        self._world.gather(None)
        if self._is_leader:
            agree_on_end(up=self._up, down=self._down)
        self._world.spread(None)

    def _post(self, course: Course) -> Post:
        """Meet every rank that this one will speak to."""
        return Post(
            cloud=self._cloud.name,
            index=self._index,
            rank=self._world.seat.rank,
            up=self._up,
            down=self._down,
            ups=self._links(course, self._index - 1),
            downs=self._links(course, self._index + 1),
        )

    def _links(self, course: Course, stage: int) -> dict[int, Link]:
        if not 0 <= stage < course.num_stages:
            return {}
        peers = course.routing.peers(self._index, self._world.seat.rank, neighbour=stage)
        return {peer: self._endpoint.link(self._setup.clouds[stage], peer) for peer in peers}

    def _open_data(self, run_id: str | None) -> TrainingData:
        if run_id is None:
            raise ValueError("the first cloud chooses the run")
        run = join_run(self._place.root, self._job, run_id)
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

    def _equipment(self, blueprint: Blueprint) -> Equipment:
        job = self._setup.followed(self._job)
        return Equipment(
            job=job,
            cloud=job.cloud_named(self._cloud.name),
            setup=self._setup,
            blueprint=blueprint,
            device=self._device,
            world=self._world,
        )

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
            num_ranks=tuple(self._job.cloud_named(name).ranks for name in self._setup.clouds),
        )

    def _feed(self, data: TrainingData, course: Course, start: Start, state: State | None) -> Feed:
        share = functools.partial(course.routing.share, 0, self._world.seat.rank)
        held_out = share(step=0, is_evaluation=True)
        return Feed(
            data,
            self._setup.layout,
            cursor=None if state is None else state.cursor,
            share=Share(training=lambda step: share(step=step), validation=held_out),
            first_step=start.step,
        )

    def _train(
        self,
        stage: Stage,
        optimizer: Optimizer,
        reduction: Reduction,
        course: Course,
        start: Start,
        keeper: Keeper,
        data: TrainingData | None,
        run: Path,
    ) -> None:
        state = keeper.load(start.step) if start.step else None
        post = self._post(course)
        with ExitStack() as stack:
            feed = stack.enter_context(self._feed(data, course, start, state)) if data else None

            def save(ended: StepEnded) -> None:
                new = State(
                    step=ended.step + 1,
                    layers=(stage.layers.start, stage.layers.stop),
                    cursor=feed.cursor if feed else None,
                    cuts=ended.cuts or SavedCuts(),
                    standings=steering.standings if feed else (),
                )
                keeper.save(new)

            journal = stack.enter_context(self._journal(run, start, save, post))
            steering = self._steering(course, stage, journal)
            if self._is_leader:
                for note in (*(self._setup.notes if feed else ()), *stage.notes):
                    journal.note(note)
                if start.step:
                    journal.note(f"resumed after step {start.step}")
            worker, traffic = pipeline_worker(
                course=course,
                post=post,
                stage=stage,
                optimizer=optimizer,
                device=self._device,
                source=feed,
                observer=journal,
                autocast=AUTOCAST[self._job.train.precision],
                should_save=_Interval(self._job.checkpoint.every_s, last_step=course.num_steps - 1),
                steer=steering,
                world=self._world,
                reduction=reduction,
            )
            if state is not None:
                traffic.restore(state.cuts, step=start.step)
                steering.restore(state.standings or steering.standings)
            with traffic:
                worker.run(course.turns(start.step, stage=post.index, rank=post.rank))
                self._agree_on_end()
            for cut in traffic.up_cuts:
                if cut.cache is not None:
                    journal.note(cut.cache.describe())

    def _steering(self, course: Course, stage: Stage, journal: Journal) -> Steering:
        layout, data = self._setup.layout, self._job.data
        num_rows = layout.num_sequences * (data.sequence_length if data is not None else 1)
        terms = steering_terms(
            self._job,
            self._setup.clouds,
            course.cuts,
            num_rows=num_rows,
            num_microbatches=course.num_microbatches,
            num_steps=course.num_steps,
            hidden_width=stage.model.config.hidden_size,
            trained_from=course.first_trained,
        )
        return Steering(terms, num_microbatches=course.num_microbatches, note=journal.note)

    @contextmanager
    def _journal(
        self, run: Path, start: Start, save: Callable[[StepEnded], None], post: Post
    ) -> Iterator[Journal]:
        is_first = self._is_first and self._is_leader
        opens = self._place.open_trackers if is_first else None
        trackers = opens(run) if opens is not None else ()
        name = self._cloud.name if self._is_leader else f"{self._cloud.name}.{post.rank}"
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

    def _export(self, stage: Stage, keeper: Keeper, run: Path) -> None:
        tensors = keeper.export()
        if not self._is_leader:
            return
        own = run / f"{PARTS_PREFIX}{self._cloud.name}"
        write_part(stage, own / self._cloud.name, tensors=tensors)
        parts = gather_parts(own, up=self._up, down=self._down)
        if self._is_first:
            companions = [path for path in (run / TOKENIZER_FOLDER).glob("*") if path.is_file()]
            for note in merge(parts, run / MODEL_FOLDER, companions=companions):
                self._note(note)
        shutil.rmtree(own)


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
