"""Drives one rank of one cloud from its job to the trained model.

each epoch:  meet the neighbours → agree on run config and step → build → train → export
             a member is lost → end all links, wait for it, and begin the next epoch

Where a strategy continues without a cloud, the others stay in their epoch and meet it again as they train.
Nothing of an epoch reaches the next one but what was saved: links have new sessions, so that a packet of an
earlier life is refused, and the model is built and loaded anew.
"""

import gc
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from isthmus.errors import (
    Aborted,
    FrameError,
    IsthmusError,
    LinkError,
    NotReady,
    RankLost,
    Refused,
    UserError,
)
from isthmus.events import EVENTS_FOLDER, STARTED_KIND, EventLog, StopRequest
from isthmus.job import Job
from isthmus.job.rundir import join_run
from isthmus.model.export import write_part
from isthmus.observe.trackers import Tracker
from isthmus.plan.types import Facts, Member, Outcome, Save, pack_facts, unpack_facts
from isthmus.train.build import MODEL_FOLDER, Build, RunConfig, blueprint_of
from isthmus.train.checkpoint import SCHEDULER, Checkpoints
from isthmus.train.data.token_files import tokens_of
from isthmus.train.data.training_data import TrainingData, open_data
from isthmus.train.device import Device
from isthmus.train.disturbed import full_marker
from isthmus.train.export import merge_models
from isthmus.train.in_cloud import World, join_world
from isthmus.train.journal import Journal, Report
from isthmus.train.keeper import Keeper, State, load_weights
from isthmus.train.loop import Loop, OnEvent
from isthmus.train.members import (
    Choose,
    Neighbours,
    SavedSteps,
    Start,
    choose_own,
    choose_recent,
    choose_start,
    fresh_folder,
)
from isthmus.train.records import open_store
from isthmus.train.rejoin import Hail, Joining, Rejoin
from isthmus.train.role import Role, RunKind, kind_of, open_loop, open_wire, pack_config, write_config
from isthmus.train.runs import PARTS_PREFIX, TOKENIZER_FOLDER, read_decisions
from isthmus.train.wire import AnyWire, Met
from isthmus.units import format_duration
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.handshake import RankSpec
from isthmus.wan.link import Link

# Links are served by Python threads beside the one that computes; neither may hold the other up for long.
SWITCH_INTERVAL_S: Final = 0.0005
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
    is_disturbed: bool = False
    """Whether a script of faults is played, which may fill the disk."""


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
    local_rank = spec.local_rank if spec.num_ranks > 1 else None
    session = _Session(
        job=job,
        endpoint=endpoint,
        spec=spec,
        member=Member(cloud, spec.rank),
        kind=kind_of(job),
        device=Device(job.cloud_named(cloud).device, local_rank=local_rank),
        report=report,
        options=options,
        stop=stop or StopRequest(),
        run_id=options.run_id,
    )
    try:
        return session.run()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the stage of cloud {cloud!r} does not fit into the memory of its device",
            hint="set train.recompute, lower strategy.max_in_flight, or use more micro-batches",
        ) from error


@dataclass(slots=True, kw_only=True)
class _Session:
    """One rank's run, from start to end: one epoch after the other, until one comes to the end."""

    job: Job
    endpoint: Endpoint
    spec: RankSpec
    member: Member
    kind: RunKind
    device: Device
    report: Report
    options: SessionOptions
    stop: StopRequest
    run_id: str | None
    """The name of the run directory, once this member knows it."""
    data: TrainingData | None = None
    reasons: tuple[str, ...] = ()
    """The reasons of the plan, at the leader of the first cloud."""
    epoch: int = 0
    is_training: bool = False
    until_s: float = math.inf
    """The time, of the monotonic clock, at which this member no longer waits for one that was lost."""

    def run(self) -> Trained:
        """Form epochs until one of them ends the run; a loss opens the next one."""
        self.endpoint.may_return = self._patience_s > 0
        secret = self.endpoint.inside_secret if self.spec.num_ranks > 1 else b""
        while True:
            try:
                with join_world(
                    self.spec,
                    self.device,
                    cloud=self.member.cloud,
                    secret=secret,
                    end=self.endpoint.part if self._patience_s else self.endpoint.abort,
                    patience_s=self.until_s - time.monotonic(),
                ) as world:
                    return self._be_in_epoch(world)
            except (LinkError, RankLost) as error:
                if not self._may_reform(error):
                    raise
                self._begin_again(error.message)
            # What the last epoch held is in cycles, and the next one needs its memory.
            gc.collect()

    @property
    def _patience_s(self) -> float:
        return self.job.checkpoint.patience_s

    def _may_reform(self, error: IsthmusError) -> bool:
        """Whether waiting for who was lost can help; not where a cloud has ended or refused the run."""
        is_second = isinstance(error, NotReady) and self.epoch == 0
        is_final = is_second or isinstance(error, Aborted | FrameError) or type(error) is Refused
        return not is_final and self._patience_s > 0 and time.monotonic() < self.until_s

    def _begin_again(self, reason: str) -> None:
        if self.is_training or self.until_s == math.inf:
            self.until_s = time.monotonic() + self._patience_s
            wait = format_duration(self._patience_s)
            then = "this cloud joins the others" if self.kind.continues else "all continue"
            self.note(f"{reason}; waiting for it up to {wait}, then {then} from what was saved last")
        self.is_training = False
        self.endpoint.renew(reason)

    def _be_in_epoch(self, world: World) -> Trained:
        """Meet, agree, build, train, export."""
        choose = self.options.choose if self.run_id is None else None
        neighbours = Neighbours(
            self.endpoint.link,
            world,
            clouds=self.kind.clouds(self.job),
            cloud=self.member.cloud,
            links=self.kind.links(self.job),
        )
        decides = neighbours.index == 0 and world.is_leader
        if decides and choose is None:
            self._open_data()
        joining = None
        if self.kind.continues:
            joining = neighbours.hail(self.job, note=self.note, until_s=self.until_s)
        if joining is None:
            neighbours.meet(self.job, note=self.note, until_s=self.until_s)
            profile = self.options.profile or (lambda: None)
            profiles = neighbours.gather_profiles(profile, is_wanted=choose is not None)
            if choose is not None:
                self.run_id = choose(profiles)
                self._open_data()
            config = neighbours.agree_on_config(self._config() if decides else None)
        else:
            config = neighbours.agree_on_config(None, joining)
            if self.run_id not in (None, config.run_id):
                self.data = None
        others = {one.cloud for one in config.members} - {self.member.cloud}
        self.endpoint.contains_aborts = all(map(config.continues_without, others))
        self.run_id = config.run_id
        run = join_run(self.options.root, self.job, config.run_id)
        if world.is_leader:
            write_config(run, config)
        if self.kind.reads(config, self.member.cloud):
            self._open_data()
        checkpoints = Checkpoints(
            open_store(run, self.job.checkpoint.store),
            cloud=self.member.cloud,
            keep=self.job.checkpoint.keep,
            job=self.job.meaning_digest,
            note=self.note,
        )
        saved = checkpoints.inspect() if world.is_leader else SavedSteps()
        start = neighbours.agree_on_start(
            replace(saved, epoch=self.epoch),
            num_steps=self.job.train.steps,
            choose=self._choose_start,
            joining=joining,
        )
        self.epoch = start.epoch
        build = Build(
            job=self.job,
            config=config,
            cloud=self.member.cloud,
            blueprint=blueprint_of(self.job, config=config.model, num_labels=config.num_labels),
            device=self.device,
            world=world,
        )
        return _Epoch(
            session=self,
            world=world,
            neighbours=neighbours,
            start=start,
            joining=joining,
            run=run,
            config=config,
            role=self.kind.make(build),
            checkpoints=checkpoints,
        ).live()

    @property
    def _choose_start(self) -> Choose:
        if not self.kind.saves_together:
            return choose_own
        return choose_recent if self.kind.continues else choose_start

    def note(self, text: str) -> None:
        if self.spec.is_leader:
            self.report(json.dumps({"kind": "note", "text": text}))

    def _open_data(self) -> None:
        if self.data is None and self.run_id is not None:
            run = join_run(self.options.root, self.job, self.run_id)
            tokens = tokens_of(self.job, root=self.options.root, note=self.note)
            job = self.kind.data_job(self.job, self.member.cloud)
            self.data = open_data(job, tokenizer_folder=run / TOKENIZER_FOLDER, tokens=tokens)

    def _config(self) -> RunConfig:
        """The run config, from the data and from what was planned when the run started."""
        job, data, run_id = self.job, self.data, self.run_id
        if data is None or run_id is None:
            raise ValueError("a run config is made from the data of a run")
        decisions = self.kind.decide(job, read_decisions(self.options.root / job.name / run_id))
        self.reasons = decisions.reasons
        blueprint = blueprint_of(job, config=data.facts.config, num_labels=data.facts.num_labels)
        return self.kind.config_of(job, decisions, blueprint, data, run_id=run_id)


@dataclass(slots=True, kw_only=True)
class _Epoch:
    """A member's part in one epoch, once all have agreed: from what was saved to the end or a loss."""

    session: _Session
    world: World
    neighbours: Neighbours
    start: Start
    joining: Joining | None
    """What was heard from the clouds that trained before this one came; None where all began together."""
    run: Path
    config: RunConfig
    role: Role
    checkpoints: Checkpoints

    def live(self) -> Trained:
        """Train from the state that was saved, and export the model unless the run was stopped before."""
        built = self.role.built
        session = self.session
        keeper = Keeper(
            self.checkpoints,
            self.world,
            stage=built.stage,
            optimizer=built.optimizer,
            device=session.device,
            extra=self.role.extra,
            note=session.note,
            patience_s=session.job.checkpoint.every_s,
            full_marker=full_marker(self.run, session.member.cloud) if session.options.is_disturbed else None,
        )
        stopped_at = self._train(keeper)
        if stopped_at is None:
            self._export(keeper)
        return Trained(run=self.run, stopped_at=stopped_at)

    @property
    def _is_first(self) -> bool:
        """Whether this is the leader of the first cloud."""
        return self.neighbours.is_first

    # Training.

    @property
    def _continues(self) -> bool:
        """Whether this cloud continues without any other that is lost."""
        return self.session.kind.continues and self.session.endpoint.contains_aborts

    def _train(self, keeper: Keeper) -> int | None:
        """Train to the end, or to the step at which an orderly stop was asked for."""
        session, role, start = self.session, self.role, self.start
        state = keeper.load(start.step) if start.step else None
        links = self.neighbours.links(self._met)
        with ExitStack() as stack:
            feed = None
            if session.data is not None:
                feed = role.feed(session.data, step=start.step)
            if feed is not None:
                stack.enter_context(feed)
            journal = stack.enter_context(self._journal(links))
            self._note_start(journal)

            def save(action: Save, done: OnEvent) -> Callable[[], None]:
                state = _state(action, loop.wires)
                return keeper.save(state, done, safe_step=action.safe_step, on_span=journal.span)

            loop = open_loop(role, session.member, links, observer=journal, source=feed, save=save)
            facts = None if state is None else _restore(state, loop.wires, role.state)
            stack.callback(keeper.close)
            rejoin = self._rejoin(loop, journal)
            if self._continues:
                loop.lost |= {one for one in role.peers if one not in loop.wires}
                loop.on_lost = rejoin.expect
            asked = session.stop.honoured_by(lambda: loop.interrupt("the user or the system asked for it"))
            with loop, asked:
                session.is_training = True
                with rejoin:
                    rejoin.begin(links.values() if self.joining is not None else (), loop.lost)
                    ended = loop.run(start.step, facts, restarts=start.life)
                self.neighbours.part_with({*ended.without, *(member.cloud for member in loop.lost)})
                self._end_together()
            for wire in loop.wires.values():
                if wire.cache is not None:
                    journal.note(wire.cache.describe())
        if ended.outcome is Outcome.INTERRUPTED:
            return ended.step
        if session.job.train.keep_best is not None:
            self._take_up_best(ended.step)
        return None

    def _take_up_best(self, step: int) -> None:
        """Set the weights back to the best ones, which the leader knows; 0 where none were judged."""
        best_step = int(self.world.broadcast(step))
        if 0 < best_step < self.session.job.train.steps:
            stage = self.role.built.stage
            load_weights(self.checkpoints, stage, best_step, extra=self.role.extra())

    @property
    def _met(self) -> Sequence[Member]:
        """The peers that are there."""
        if self.joining is None:
            return self.role.peers
        return [one for one in self.role.peers if one.cloud in self.joining.clouds]

    def _rejoin(self, loop: Loop, journal: Journal) -> Rejoin:
        """What meets peers again that are lost."""

        def take(link: Link) -> None:
            journal.add_link(link)
            wire = open_wire(self.role, link, here=self.session.member, inbox=loop.inbox, observer=journal)
            loop.inbox.put(Met(wire=wire))

        start, config = self.start, pack_config(self.config)
        hail = Hail(is_training=True, epoch=start.epoch, clock_offset_s=start.clock_offset_s, config=config)
        renew, cloud = self.session.endpoint.renewed, self.session.member.cloud
        return Rejoin(cloud=cloud, renew=renew, hail=hail, on_met=take, note=journal.note)

    def _end_together(self) -> None:
        """End with the others; where they continue without a cloud, a loss changes nothing any more."""
        if not self._continues:
            self.neighbours.agree_on_end()
            return
        with suppress(LinkError):
            self.neighbours.agree_on_end()

    def _note_start(self, journal: Journal) -> None:
        if not self.world.is_leader:
            return
        is_anew = self.start.epoch > 1
        reasons = () if is_anew else self.session.reasons
        for note in (*reasons, *self.role.built.stage.notes):
            journal.note(note)
        if self.start.step or is_anew:
            where = f"after step {self.start.step}" if self.start.step else "from the first step"
            journal.note(f"resumed {where}{f', epoch {self.start.epoch}' if is_anew else ''}")
        if self.start.note is not None:
            journal.note(self.start.note)

    @contextmanager
    def _journal(self, links: Mapping[Member, Link]) -> Iterator[Journal]:
        opens = self.session.options.open_trackers if self._is_first else None
        trackers = opens(self.run) if opens is not None else ()
        cloud, rank = self.session.member
        path = self.run / EVENTS_FOLDER / f"{cloud if self.world.is_leader else f'{cloud}.{rank}'}.jsonl"
        try:
            with EventLog(path, clock_offset_s=self.start.clock_offset_s) as log:
                log.fact(STARTED_KIND, {"step": self.start.step, "epoch": self.start.epoch})
                yield Journal(
                    log,
                    is_first=self._is_first,
                    links=list(links.values()),
                    report=self.session.report,
                    trackers=trackers,
                )
        finally:
            for tracker in trackers:
                tracker.close()

    # The end.

    def _export(self, keeper: Keeper) -> None:
        """Write what this cloud has of each model, and join the parts of all clouds at the first."""
        own = self.run / f"{PARTS_PREFIX}{self.session.member.cloud}"
        if self.world.is_leader:
            fresh_folder(own)
        scratch = own / _GATHERED_FILE
        for folder, stage in self.role.models(is_first=self.neighbours.is_of_first).items():
            tensors = keeper.export(scratch)
            if self.world.is_leader:
                write_part(stage, own / f"{folder}.{self.session.member.cloud}", tensors=tensors)
                scratch.unlink(missing_ok=True)
        if self.world.is_leader:
            parts = self.neighbours.gather_parts(own)
            if self._is_first:
                self._merge(parts)
            shutil.rmtree(own)
        if not self._is_first:
            # Until then the first cloud may need our part again.
            self._end_together()
            return
        with suppress(LinkError, RankLost):
            self.neighbours.agree_on_end()

    def _merge(self, parts: Sequence[Path]) -> None:
        run, note, data = self.run, self.session.note, self.session.data
        merge_models(run, parts, into=lambda name: run / name, note=note)
        described = None if data is None else self.role.describe(run / MODEL_FOLDER, data)
        if described is not None:
            note(described)


def _state(save: Save, wires: Mapping[Member, AnyWire]) -> State:
    states = {peer: wire.state(save.step) for peer, wire in wires.items()}
    return State(
        step=save.step,
        facts={} if save.facts is None else {SCHEDULER: pack_facts(save.facts)},
        wires={peer: one for peer, one in states.items() if one is not None},
        best_step=save.best_step,
    )


def _restore(state: State, wires: Mapping[Member, AnyWire], kind: type[Facts]) -> Facts | None:
    """Give wires their codec state; returns the facts of the scheduler."""
    for peer in state.wires.keys() & wires.keys():
        wires[peer].load(state.wires[peer])
    text = state.facts.get(SCHEDULER)
    return None if text is None else unpack_facts(text, kind)
