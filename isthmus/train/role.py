"""What a session knows of a strategy: the kind of the run, and the role of one member in it.

    RunKind    before anything is built: which clouds agree along which links, what is refused, the run config
    Role       one member in one epoch: its model, scheduler, actor and wires, and what it saves and exports

A new strategy implements both in its file in `train`, and is listed in `KINDS`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final, Protocol

from pydantic import JsonValue
from torch import Tensor

from isthmus.errors import FrameError, RankLost, UserError
from isthmus.job import Job
from isthmus.job.load import replace_file
from isthmus.model.blueprint import Blueprint
from isthmus.model.stage import Stage
from isthmus.plan.costs import CostSource
from isthmus.plan.plan import Decisions, Plan
from isthmus.plan.types import (
    Carried,
    Facts,
    Member,
    Message,
    MessageKind,
    Scheduler,
    pack_facts,
    unpack_facts,
)
from isthmus.train.build import Build, BuiltStage, RunConfig
from isthmus.train.coding import CodecState, CutEnd
from isthmus.train.data.training_data import Feed, Source, TrainingData
from isthmus.train.data_role import DataKind
from isthmus.train.device import Mark
from isthmus.train.generator_role import FeedKind
from isthmus.train.loop import Actor, Loop, Saver, save_nothing
from isthmus.train.pipeline_role import PipelineKind
from isthmus.train.watch import Watch
from isthmus.train.wire import AnyWire, Delivery, Failure, Inbox, Observer, Wire, pack_message, read_message
from isthmus.wan.link import Link

MAX_CONFIG_BYTES: Final = 8 * 2**20
_CONFIG_FILE: Final = "config.json"


class Role(Protocol):
    """What one member does in one epoch of a run."""

    @property
    def built(self) -> BuiltStage:
        """The model and what trains it; checkpoints hold them by parameter name."""

    @property
    def peers(self) -> Sequence[Member]:
        """The members that this one exchanges messages with; those of its own cloud take facts alone."""

    @property
    def facts(self) -> Mapping[MessageKind, type[Facts]]:
        """The facts that messages carry."""

    @property
    def state(self) -> type[Facts]:
        """The facts that the scheduler saves and starts from."""

    def scheduler(self) -> Scheduler:
        """A fresh scheduler."""

    def actor(self, observer: Observer, source: Source | None) -> Actor:
        """What computes, with the data of this member if it reads any."""

    def feed(self, data: TrainingData, *, step: int) -> Feed | None:
        """The micro-batches of this member from a step on, where the kind says that it reads.

        None where the actor reads by itself.
        """

    def cut(self, peer: Member) -> CutEnd | None:
        """This end of the cut between two stages; None where tensors cross as they are."""

    def extra(self) -> Mapping[str, Tensor]:
        """Tensors beside weights and moments that are saved, and loaded in place, by name.

        Of those that are not sharded the leader's are saved.
        """

    def models(self, *, is_first: bool) -> Mapping[str, Stage]:
        """The stages whose weights are exported at the end, by the folder in the run directory.

        `is_first` at the first cloud of those that have come to the end.
        """

    def describe(self, model: Path, data: TrainingData) -> str | None:
        """What to say of the exported model, at the first cloud."""


class RunKind(Protocol):
    """What choosing a run and its session ask of a strategy before a member is built."""

    @property
    def config(self) -> type[RunConfig]:
        """The run config that `config_of` makes."""

    @property
    def saves_together(self) -> bool:
        """Whether all clouds start from one step; else each from the newest that it has saved."""

    @property
    def continues(self) -> bool:
        """Whether the others continue without a cloud that is lost, and meet it again while they train."""

    @property
    def chooses(self) -> bool:
        """Whether a plan may choose something, so that it is worth to measure first."""

    def clouds(self, job: Job) -> tuple[str, ...]:
        """All clouds in order; the first makes the run config and exports the model."""

    def links(self, job: Job) -> Sequence[tuple[str, str]]:
        """The links along which clouds agree; together they join all clouds."""

    def data_job(self, job: Job, cloud: str) -> Job:
        """The job with the model and the data of one cloud."""

    def plan(self, job: Job, *, known: Job | None = None, source: CostSource) -> Plan | None:
        """The plan for `known`, the job with what was measured; None where too little is known."""

    def decide(self, job: Job, decisions: Decisions | None = None) -> Decisions:
        """Complete the decisions of a plan, or decide by a rule; refuse a job that cannot run."""

    def check(self, job: Job, known: Job, decisions: Decisions, blueprint: Blueprint) -> None:
        """Refuse what cannot run or could not be exported, before any cloud starts."""

    def check_data(self, job: Job, decisions: Decisions, data: TrainingData) -> None:
        """Refuse data that cannot fill a step."""

    def reads(self, config: RunConfig, cloud: str) -> bool:
        """Whether the members of a cloud read data."""

    def config_of(
        self, job: Job, decisions: Decisions, blueprint: Blueprint, data: TrainingData, *, run_id: str
    ) -> RunConfig:
        """The run config, at the first cloud."""

    def make(self, build: Build) -> Role:
        """Build the model and what trains it on the device of this member."""


_PIPELINE: Final = PipelineKind()
KINDS: Final[Mapping[str, RunKind]] = {
    "pipeline": _PIPELINE,
    "data": DataKind(),
    "generator-discriminator": FeedKind(),
}


def kind_of(job: Job) -> RunKind:
    """The kind that a job runs as; a pipeline where the plan chooses, and refuses what cannot run yet."""
    if job.strategy.kind == "generator-discriminator":
        return FeedKind(continues=job.strategy.on_lost == "continue")
    return KINDS.get(job.strategy.kind, _PIPELINE)


def pack_config(config: RunConfig) -> str:
    """A run config as text, with its kind."""
    return pack_facts(config, max_bytes=MAX_CONFIG_BYTES)


def unpack_config(text: object) -> RunConfig:
    """The run config that `pack_config` gave; anything else is an error of the peer."""
    try:
        about = json.loads(text) if isinstance(text, str) and len(text) <= MAX_CONFIG_BYTES else None
    except ValueError:
        about = None
    kind = about.get("kind") if isinstance(about, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise FrameError("a run config without its kind")
    return unpack_facts(text, KINDS[kind].config, max_bytes=MAX_CONFIG_BYTES)


def write_config(run: Path, config: RunConfig) -> None:
    """Keep the run config in the run directory, since models are built from it when they are exported."""
    replace_file(run / _CONFIG_FILE, pack_config(config))


def read_config(run: Path) -> RunConfig:
    """The run config of a run directory."""
    try:
        return unpack_config((run / _CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, FrameError) as error:
        raise UserError(
            f"{run / _CONFIG_FILE} cannot be read, so the stages of the run are not known: {error}",
            hint="start the run again with this version: isthmus run JOB; it writes the file",
        ) from error


@dataclass(slots=True, eq=False)
class InsideWire:
    """The path between this rank and another one of its cloud: facts alone, where ranks watch each other."""

    watch: Watch
    _: KW_ONLY
    here: Member
    peer: Member
    inbox: Inbox
    facts: Mapping[MessageKind, type[Facts]]
    cache: None = None

    def open(self) -> None:
        """Start to take in what arrives."""
        self.watch.hear(self.peer.rank, self._take)

    def send(self, message: Message, tensors: Mapping[str, Tensor], ready: Mark) -> None:  # noqa: ARG002
        """Send a message; tensors go through collectives."""
        self.watch.tell(self.peer.rank, pack_message(message, {}, {}, None).header)

    def _take(self, found: JsonValue | RankLost) -> None:
        if isinstance(found, RankLost):
            self.inbox.put(Failure(member=self.peer, error=found))
            return
        try:
            message, _ = read_message(found, self.facts, sender=self.peer, to=self.here)
        except FrameError as error:
            self.inbox.put(Failure(member=self.peer, error=error))
        else:
            self.inbox.put(Delivery(message=message, tensors={}, travel_s=0.0, facts=Carried()))

    def state(self, step: int) -> None:
        """Nothing is coded."""

    def load(self, state: CodecState) -> None:
        """Nothing is coded."""

    def close(self) -> None:
        """The connection stays until the world ends."""

    def abandon(self) -> None:
        """The connection stays until the world ends."""


def open_loop(
    role: Role,
    member: Member,
    links: Mapping[Member, Link],
    *,
    observer: Observer,
    source: Source | None,
    save: Saver = save_nothing,
    scheduler: Scheduler | None = None,
) -> Loop:
    """The loop of a member, with its scheduler, its actor and a wire to each peer."""
    inbox = Inbox()
    wires: dict[Member, AnyWire] = {
        peer: open_wire(role, link, here=member, inbox=inbox, observer=observer)
        for peer, link in links.items()
    }
    watch = role.built.world.watch
    for peer in role.peers:
        if watch is not None and peer.cloud == member.cloud:
            wires[peer] = InsideWire(watch, here=member, peer=peer, inbox=inbox, facts=role.facts)
    actor = role.actor(observer, source)
    return Loop(scheduler or role.scheduler(), actor, wires, inbox, tell=observer.tell, save=save)


def open_wire(role: Role, link: Link, *, here: Member, inbox: Inbox, observer: Observer) -> Wire:
    """A wire over a link to a member of another cloud."""
    return Wire(
        link,
        here=here,
        peer=link.peer,
        inbox=inbox,
        observer=observer,
        facts=role.facts,
        cut=role.cut(link.peer),
    )
