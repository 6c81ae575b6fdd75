"""Drives one rank of one cloud from its job to the trained model.

meet the neighbours → agree on run config and step → build the stage → train → gather and export the stages
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from isthmus.errors import UserError
from isthmus.events import EVENTS_FOLDER, STARTED_KIND, EventLog, StopRequest
from isthmus.job import Job
from isthmus.job.rundir import join_run
from isthmus.model.export import merge, write_part
from isthmus.observe.trackers import Tracker
from isthmus.plan.types import Facts, Member, Outcome, Save, pack_facts, unpack_facts
from isthmus.train.build import Build, BuiltStage, blueprint_of
from isthmus.train.checkpoint import Checkpoints, Keeper, State
from isthmus.train.data.token_files import tokens_of
from isthmus.train.data.training_data import Feed, TrainingData, open_data
from isthmus.train.device import Device
from isthmus.train.in_cloud import World, join_world
from isthmus.train.journal import Journal, Report
from isthmus.train.kinds import kind_of, write_config
from isthmus.train.loop import OnEvent
from isthmus.train.members import Neighbours, SavedSteps, Start, fresh_folder
from isthmus.train.role import Role, RunKind, open_loop
from isthmus.train.run_config import MODEL_FOLDER, RunConfig
from isthmus.train.runs import PARTS_PREFIX, TOKENIZER_FOLDER, read_decisions
from isthmus.train.store import open_store
from isthmus.train.wire import Wire
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.handshake import RankSpec
from isthmus.wan.link import Link

# Links are served by Python threads beside the one that computes; neither may hold the other up for long.
SWITCH_INTERVAL_S: Final = 0.0005
_SCHEDULER: Final = "state"
_GATHERED_FILE: Final = "gathered.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What a command gives to its ranks beside the job; `run_id` is known at the first cloud only."""

    root: Path
    """The folder of run directories."""
    run_id: str | None = None
    open_trackers: Callable[[Path], Sequence[Tracker]] | None = None
    num_threads: int | None = None
    choose: Callable[[Mapping[str, str]], str] | None = None
    """Chooses the run at the first cloud, where it is planned from the profiles that all clouds send."""
    profile: Callable[[], str | None] | None = None
    """Measures this cloud, if the first cloud asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The run directory of a rank, and the step at which it was stopped, if it was."""

    run: Path
    stopped_at: int | None = None


def train_cloud(
    job: Job,
    endpoint: Endpoint,
    *,
    cloud: str,
    report: Report,
    options: SessionOptions,
    spec: RankSpec | None = None,
    stop: StopRequest | None = None,
) -> Trained:
    """Be one rank of one cloud of a job from the start to the exported model, or to an orderly stop."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    spec = spec or RankSpec()
    device = Device(job.cloud_named(cloud).device, local_rank=spec.local_rank if spec.num_ranks > 1 else None)
    kind = kind_of(job)
    secret = endpoint.inside_secret if spec.num_ranks > 1 else b""
    try:
        with join_world(spec, device, cloud=cloud, secret=secret, end=endpoint.abort) as world:
            session = _Session(
                job=job,
                member=Member(cloud, spec.rank),
                kind=kind,
                neighbours=Neighbours(
                    endpoint.link, world, clouds=kind.clouds(job), cloud=cloud, links=kind.links(job)
                ),
                device=device,
                world=world,
                report=report,
                options=options,
                stop=stop or StopRequest(),
            )
            return session.run()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the stage of cloud {cloud!r} does not fit into the memory of its device",
            hint="set train.recompute, lower strategy.max_in_flight, or use more micro-batches",
        ) from error


@dataclass(slots=True, kw_only=True)
class _Session:
    """One rank's run, from start to end."""

    job: Job
    member: Member
    kind: RunKind
    neighbours: Neighbours
    device: Device
    world: World
    report: Report
    options: SessionOptions
    stop: StopRequest
    reasons: tuple[str, ...] = ()
    """The reasons of the plan, at the leader of the first cloud."""

    def run(self) -> Trained:
        """Agree, build, train, export."""
        run_id, choose = self.options.run_id, self.options.choose
        decides = self._is_first and self._is_leader
        data = self._open_data(run_id) if decides and run_id is not None else None
        self.neighbours.meet(self.job, note=self._note)
        profile = self.options.profile or (lambda: None)
        profiles = self.neighbours.gather_profiles(profile, is_wanted=choose is not None)
        if choose is not None:
            run_id = choose(profiles)
            data = self._open_data(run_id)
        own = None if data is None or run_id is None else self._config(data, run_id)
        config = self.neighbours.agree_on_config(own)
        run = join_run(self.options.root, self.job, config.run_id)
        if self._is_leader:
            write_config(run, config)
        if data is None and self.kind.reads(config, self.member.cloud):
            data = self._open_data(config.run_id)
        checkpoints = Checkpoints(
            open_store(run, self.job.checkpoint.store),
            cloud=self.member.cloud,
            keep=self.job.checkpoint.keep,
            job=self.job.meaning_digest,
            note=self._note,
        )
        saved = checkpoints.inspect() if self._is_leader else SavedSteps()
        start = self.neighbours.agree_on_start(
            saved, num_steps=self.job.train.steps, is_common=self.kind.saves_together
        )
        build = Build(
            job=self.job,
            config=config,
            cloud=self.member.cloud,
            blueprint=blueprint_of(self.job, config=config.model, num_labels=config.num_labels),
            device=self.device,
            world=self.world,
        )
        role = self.kind.make(build)
        built = role.built
        keeper = Keeper(
            checkpoints,
            self.world,
            stage=built.stage,
            optimizer=built.optimizer,
            device=self.device,
            extra=role.extra,
            note=self._note,
            patience_s=self.job.checkpoint.every_s,
        )
        stopped_at = self._train(role, keeper, start, data, run)
        if stopped_at is None:
            self._export(role, keeper, run)
            if data is not None and self._is_first and self._is_leader:
                note = role.describe(run / MODEL_FOLDER, data)
                if note is not None:
                    self._note(note)
        return Trained(run=run, stopped_at=stopped_at)

    @property
    def _is_first(self) -> bool:
        return self.neighbours.index == 0

    @property
    def _is_leader(self) -> bool:
        return self.world.is_leader

    def _note(self, text: str) -> None:
        self.report(json.dumps({"kind": "note", "text": text}))

    # The start.

    def _open_data(self, run_id: str) -> TrainingData:
        run = join_run(self.options.root, self.job, run_id)
        tokens = tokens_of(self.job, root=self.options.root, note=self._note)
        job = self.kind.data_job(self.job, self.member.cloud)
        return open_data(job, tokenizer_folder=run / TOKENIZER_FOLDER, tokens=tokens)

    def _config(self, data: TrainingData, run_id: str) -> RunConfig:
        """The run config, from the data and from what was planned when the run started."""
        job, about = self.job, data.facts
        decisions = self.kind.decide(job, read_decisions(self.options.root / job.name / run_id))
        self.reasons = decisions.reasons
        blueprint = blueprint_of(job, config=about.config, num_labels=about.num_labels)
        return self.kind.config_of(job, decisions, blueprint, data, run_id=run_id)

    # Training.

    def _train(
        self, role: Role, keeper: Keeper, start: Start, data: TrainingData | None, run: Path
    ) -> int | None:
        """Train to the end, or to the step at which an orderly stop was asked for."""
        state = keeper.load(start.step) if start.step else None
        links = self.neighbours.links(role.peers)
        with ExitStack() as stack:
            cursor = None if state is None else state.cursor
            feed = None
            if data is not None:
                feed = role.feed(data, step=start.step, cursor=cursor)
            if feed is not None:
                stack.enter_context(feed)
            journal = stack.enter_context(self._journal(run, start, links))
            self._note_start(journal, role.built, start)

            def save(action: Save, done: OnEvent) -> Callable[[], None]:
                state = _state(action.step, action.facts, feed, loop.wires)
                return keeper.save(state, done, safe_step=action.safe_step, on_saved=journal.saved)

            loop = open_loop(role, self.member, links, observer=journal, source=feed, save=save)
            facts = None if state is None else _restore(state, loop.wires, role.state)
            stack.callback(keeper.close)
            with loop, self.stop.honoured_by(lambda: loop.interrupt("the user or the system asked for it")):
                ended = loop.run(start.step, facts)
                self.neighbours.agree_on_end()
            for wire in loop.wires.values():
                if wire.cache is not None:
                    journal.note(wire.cache.describe())
        return ended.step if ended.outcome is Outcome.INTERRUPTED else None

    def _note_start(self, journal: Journal, built: BuiltStage, start: Start) -> None:
        if not self._is_leader:
            return
        for note in (*self.reasons, *built.stage.notes):
            journal.note(note)
        if start.step:
            journal.note(f"resumed after step {start.step}")
        if start.note is not None:
            journal.note(start.note)

    @contextmanager
    def _journal(self, run: Path, start: Start, links: Mapping[Member, Link]) -> Iterator[Journal]:
        is_first = self._is_first and self._is_leader
        opens = self.options.open_trackers if is_first else None
        trackers = opens(run) if opens is not None else ()
        cloud, rank = self.member
        path = run / EVENTS_FOLDER / f"{cloud if self._is_leader else f'{cloud}.{rank}'}.jsonl"
        try:
            with EventLog(path, clock_offset_s=start.clock_offset_s) as log:
                log.fact(STARTED_KIND, {"step": start.step})
                yield Journal(
                    log,
                    is_first=is_first,
                    links=list(links.values()),
                    report=self.report,
                    trackers=trackers,
                )
        finally:
            for tracker in trackers:
                tracker.close()

    # The end.

    def _export(self, role: Role, keeper: Keeper, run: Path) -> None:
        """Write what this cloud has of each model, and join the parts of all clouds at the first."""
        own = run / f"{PARTS_PREFIX}{self.member.cloud}"
        if self._is_leader:
            fresh_folder(own)
        scratch = own / _GATHERED_FILE
        models = role.models()
        for folder, stage in models.items():
            tensors = keeper.export(scratch)
            if self._is_leader:
                write_part(stage, own / f"{folder}.{self.member.cloud}", tensors=tensors)
                scratch.unlink(missing_ok=True)
        if not self._is_leader:
            return
        parts = self.neighbours.gather_parts(own)
        if self._is_first:
            companions = [path for path in (run / TOKENIZER_FOLDER).glob("*") if path.is_file()]
            for folder in sorted({part.stem for part in parts}):
                of_model = [part for part in parts if part.stem == folder]
                for note in merge(of_model, run / folder, companions=companions):
                    self._note(note)
        shutil.rmtree(own)


def _state(step: int, facts: Facts | None, feed: Feed | None, wires: Mapping[Member, Wire]) -> State:
    states = {peer: wire.state(step) for peer, wire in wires.items()}
    return State(
        step=step,
        cursor=feed.cursor if feed is not None else None,
        facts={} if facts is None else {_SCHEDULER: pack_facts(facts)},
        wires={peer: one for peer, one in states.items() if one is not None},
    )


def _restore(state: State, wires: Mapping[Member, Wire], kind: type[Facts]) -> Facts | None:
    """Give wires their codec state; returns the facts of the scheduler."""
    for peer in state.wires.keys() & wires.keys():
        wires[peer].load(state.wires[peer])
    text = state.facts.get(_SCHEDULER)
    return None if text is None else unpack_facts(text, kind)
