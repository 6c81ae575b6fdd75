"""Processes that are ranks of clouds, started once, for many cases: importing torch takes them seconds."""

import multiprocessing
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from isthmus.job import Job
from isthmus.job.codec import parse_boundary, parse_codec
from isthmus.job.load import parse_job
from isthmus.job.sections import LoraSpec
from isthmus.model.blueprint import Blueprint
from isthmus.model.recompute import Budgeted
from isthmus.model.stage import Batch
from isthmus.plan.codecs import Pair
from isthmus.plan.memory import OptimizerState, Sharding
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.scenario import Policy
from isthmus.plan.types import Member, Outcome
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.device import Device
from isthmus.train.in_cloud import (
    Reduction,
    World,
    awaited_gradient_bytes,
    join_world,
    shard,
    whole,
)
from isthmus.train.keeper import Keeper
from isthmus.train.members import Neighbours
from isthmus.train.pipeline import PipelineConfig
from isthmus.train.pipeline_role import peers_of
from isthmus.train.records import DiskStore
from isthmus.wan.certificates import Identity
from isthmus.wan.endpoint import Endpoint, Site
from isthmus.wan.handshake import RankSpec
from isthmus.wan.local import LocalWan
from tests.model.cases import blueprint
from tests.train.chain import (
    CLOUDS,
    CutCase,
    Given,
    Record,
    assert_pure,
    config,
    make_loop,
    make_optimizer,
    make_stages,
)
from tests.train.resuming import restore, save_now, state_of
from tests.train.test_exactness import batches
from tests.train.test_setup import TINY, links


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all ranks of a case do."""

    ranks: tuple[int, ...]
    sharding: Sharding = Sharding.NONE
    num_microbatches: int = 5
    num_steps: int = 3
    first_step: int = 0
    num_held_out: int = 0
    policy: Policy = Policy.WAN_ONE_F_ONE_B
    codec: tuple[str, str] | None = None
    guard_every: int = 0
    boundary: str = "hidden"
    autocast: torch.dtype | None = None
    model: str = "llama"
    changes: dict[str, Any] = field(default_factory=dict)
    """To the model's configuration."""
    lora: LoraSpec | None = None
    optimizer_state: OptimizerState = OptimizerState.FLOAT32
    offload: bool = False
    budget_bytes: int | None = None
    """Within which layers recompute, as is measured."""
    folder: Path | None = None
    """Where every step is saved, and the first step is taken from."""
    interrupted: tuple[str, int, int] | None = None
    """The cloud and the rank that are asked to stop behind a step."""

    @property
    def blueprint(self) -> Blueprint:
        return blueprint(self.model, **self.changes)

    @property
    def config(self) -> PipelineConfig:
        forward, backward = map(parse_codec, self.codec or ("raw", "raw"))
        pair = Pair(forward=forward, backward=backward)
        boundary = parse_boundary(self.boundary)
        cut = CutCase(codecs=pair, boundary=boundary, guard_every=self.guard_every)
        is_full = self.sharding is Sharding.FULL
        return config(
            len(self.ranks),
            self.num_microbatches,
            num_steps=self.num_steps,
            num_ranks=self.ranks,
            policy=self.policy,
            cuts=(cut,) * (len(self.ranks) - 1),
            grouped_stages=frozenset(
                stage for stage, ranks in enumerate(self.ranks) if is_full and ranks > 1
            ),
            evaluate_every=2 if self.num_held_out else None,
            num_validation_microbatches=self.num_held_out,
            save_every_s=None if self.folder is None else 0.0,
        )

    @property
    def job(self) -> Job:
        names = CLOUDS[: len(self.ranks)]
        clouds = "".join(
            f'[[cloud]]\nname = "{name}"\ndevice = "cpu"\nranks = {number}\nlisten = "127.0.0.1:{port}"\n'
            for port, (name, number) in enumerate(zip(names, self.ranks, strict=True), start=7600)
        )
        network = clouds + links(*pairwise(names))
        return parse_job(TINY + network, file=Path("tiny.toml"))

    def steps(self) -> list[list[Batch]]:
        return batches(self.blueprint, self.num_microbatches, num_steps=self.num_steps)

    def held_out(self) -> list[Batch]:
        count = self.num_held_out
        return batches(self.blueprint, count, num_steps=1)[0] if count else []


@dataclass(frozen=True)
class Found:
    """What one rank came to."""

    parameters: dict[str, Any]
    losses: list[float]
    norms: list[float]
    validation: list[tuple[float, int]]
    num_passes: int
    sent_bytes: int
    """On the line, in the last step."""
    outcome: Outcome
    saved: list[int]


@dataclass(frozen=True)
class Task:
    """What one process is told to be."""

    case: Case
    job: Job
    cloud: str
    spec: RankSpec
    identity: Identity
    site: Site


@dataclass
class Crew:
    """So many processes, each of which is one rank of every case in turn."""

    size: int = 4
    _pipes: list[Connection] = field(default_factory=list)
    _processes: list[BaseProcess] = field(default_factory=list)

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for _ in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def run(self, case: Case) -> dict[tuple[str, int], Found]:
        """Have every rank of a case trained, and give what each found."""
        with LocalWan(case.job) as wan:
            tasks = [
                Task(
                    case,
                    case.job,
                    cloud.name,
                    wan.rank_spec(cloud.name, rank),
                    wan.identity(cloud.name),
                    wan.site(cloud.name, rank),
                )
                for cloud in case.job.cloud
                for rank in range(cloud.ranks)
            ]
            pipes = [self._pipes[number] for number in _assign([task.spec for task in tasks])]
            for pipe, task in zip(pipes, tasks, strict=True):
                pipe.send(task)
            answers: list[Any] = [pipe.recv() if pipe.poll(120) else "no answer" for pipe in pipes]
        wrong = [answer for answer in answers if isinstance(answer, str)]
        assert not wrong, wrong
        return {(task.cloud, task.spec.rank): answer for task, answer in zip(tasks, answers, strict=True)}


def _assign(specs: Sequence[RankSpec]) -> list[int]:
    """A process for each spec; torch remembers the rank that a process had in a mesh of the same size."""
    free = list(range(4))
    found: dict[int, int] = {}
    for position in sorted(range(len(specs)), key=lambda one: -specs[one].num_ranks):
        wanted = [2 * specs[position].rank, *free] if specs[position].rank < 2 else [3]
        found[position] = next(one for one in wanted if one in free)
        free.remove(found[position])
    return [found[position] for position in range(len(specs))]


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        task = pipe.recv()
        try:
            pipe.send(_train(task))
        except Exception as error:  # noqa: BLE001 (the test is told)
            pipe.send(f"{task.cloud} {task.spec.rank}: {error!r}")


def _train(task: Task) -> Found:
    device = Device("cpu")
    is_coarse = task.case.optimizer_state is OptimizerState.EIGHT_BIT
    with (
        # torchao compiles its update, which takes a C++ compiler and long; uncompiled it does the same.
        torch.compiler.set_stance("force_eager") if is_coarse else nullcontext(),
        Endpoint(
            task.job, cloud=task.cloud, rank=task.spec.rank, identity=task.identity, site=task.site
        ) as endpoint,
        join_world(
            task.spec, device, cloud=task.cloud, secret=endpoint.inside_secret, end=endpoint.abort
        ) as world,
    ):
        return _Rank(task, endpoint, world, device).train()


class _Rank:
    def __init__(self, task: Task, endpoint: Endpoint, world: World, device: Device) -> None:
        self.case, self.task, self.endpoint, self.world, self.device = (
            task.case,
            task,
            endpoint,
            world,
            device,
        )
        self.index = CLOUDS.index(task.cloud)
        self.config = self.case.config
        self.stage = make_stages(self.case.blueprint, self.config, lora=self.case.lora)[self.index]
        self.reduction = self._reduction()
        if self.case.budget_bytes is not None:
            self.stage.recompute = Budgeted(
                budget_bytes=self.case.budget_bytes,
                standing_bytes=self._standing_bytes,
            )
        self.optimizer = make_optimizer(self.stage, 0.5, state=self.case.optimizer_state)

    def _reduction(self) -> Reduction:
        sharding = self.case.sharding if self.world.num_ranks > 1 else Sharding.NONE
        if sharding is Sharding.NONE:
            return Reduction(self.world, self.stage)
        shard(
            self.stage,
            device=self.device.torch_device,
            num_ranks=self.world.num_ranks,
            keeps_sharded=sharding is Sharding.FULL,
            compute_dtype=self.case.autocast,
            offload=self.case.offload,
        )
        return Reduction(self.world, self.stage, sharding=sharding.value)

    def _standing_bytes(self) -> int:
        return awaited_gradient_bytes(self.stage) if isinstance(self.stage, FSDPModule) else 0

    def train(self) -> Found:
        record = Record()
        member = Member(self.task.cloud, self.world.rank)
        clouds = CLOUDS[: len(self.case.ranks)]
        neighbours = Neighbours(self.endpoint.link, self.world, clouds=clouds, cloud=self.task.cloud)
        loop, wires = make_loop(
            self.config,
            member,
            scheduler=PipelineScheduler(self.config.pipeline, member),
            stage=self.stage,
            links=neighbours.links(peers_of(self.config.pipeline, member)),
            record=record,
            device=self.device,
            optimizer=self.optimizer,
            source=self._source() if self.index == 0 else None,
            autocast=self.case.autocast,
            world=self.world,
            reduction=self.reduction,
        )
        facts = None
        if self.case.folder is not None:
            checkpoints = Checkpoints(DiskStore(self.case.folder), cloud=self.task.cloud, keep=9)
            keeper = Keeper(checkpoints, self.world, stage=self.stage, optimizer=self.optimizer)
            record.on_save = lambda saved: save_now(keeper, state_of(saved))
            if self.case.first_step:
                facts = restore(keeper.load(self.case.first_step), wires)
        if self.case.interrupted is not None:
            cloud, rank, step = self.case.interrupted
            if member == (cloud, rank):
                record.on_step = lambda ended: loop.interrupt("SIGTERM") if ended.step == step else None
        with loop:
            stop = loop.run(self.case.first_step, facts)
            # Nobody closes a link that another still listens to.
            neighbours.agree_on_end()
        assert_pure(self.config.pipeline, member, record)
        return Found(
            parameters={name: one.numpy() for name, one in self._parameters().items()},
            losses=[one.loss for one in record.steps],
            norms=[one.norm for one in record.steps],
            validation=[(one.loss_sum, one.num_targets) for one in record.evaluations],
            num_passes=sum(span.kind == "forward" for span in record.spans),
            sent_bytes=record.steps[-1].num_bytes,
            outcome=stop.outcome,
            saved=[one.step for one in record.saves],
        )

    def _parameters(self) -> dict[str, Tensor]:
        return {name: whole(one).detach().clone() for name, one in self.stage.tensors_by_name().items()}

    def _source(self) -> Given:
        routing, rank = self.config.pipeline.routing, self.world.rank
        own = [
            [batch for number, batch in enumerate(step) if number in routing.share(0, rank, step=index)]
            for index, step in enumerate(self.case.steps())
        ]
        share = routing.share(0, rank, step=0, is_evaluation=True)
        held_out = [batch for number, batch in enumerate(self.case.held_out()) if number in share]
        return Given(own, held_out)


def whole_model(found: dict[tuple[str, int], Found], ranks: Sequence[int]) -> dict[str, Any]:
    """The parameters of all stages, after making sure that the ranks of a cloud have the same."""
    joined: dict[str, Any] = {}
    for cloud, number in zip(CLOUDS, ranks, strict=False):
        first = found[cloud, 0].parameters
        for rank in range(1, number):
            other = found[cloud, rank].parameters
            assert all((other[name] == first[name]).all() for name in first), (cloud, rank)
        joined |= first
    return joined
