"""The role of a cloud in data parallel: the whole model, its part of the data, wires to all other clouds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Final

from torch import Tensor

from isthmus.errors import UserError
from isthmus.job import DataSpec, DataStrategy, Job, ModelSpec
from isthmus.model.blueprint import Blueprint
from isthmus.model.export import describe_exported
from isthmus.model.stage import Stage
from isthmus.plan.costs import CostSource
from isthmus.plan.data import FACTS, data_scheduler
from isthmus.plan.data_times import are_alike
from isthmus.plan.membership import DataParallel, DataState, num_fragments_of
from isthmus.plan.models import why_not_planned
from isthmus.plan.plan import DataSettings, Decisions, Plan
from isthmus.plan.planner import plan
from isthmus.plan.replicated import MOST_DELAY_STEPS, MOST_MICROBATCHES
from isthmus.plan.types import Member, Scheduler
from isthmus.train.build import (
    AUTOCAST,
    MODEL_FOLDER,
    Build,
    RunConfig,
    check_fits,
    layout_of,
    sharding_of,
)
from isthmus.train.coding import CutEnd
from isthmus.train.data.tokenizer import trains_tokenizer
from isthmus.train.data.training_data import Feed, RankShare, Source, TrainingData, check_enough
from isthmus.train.data_parallel import DataParallelActor
from isthmus.train.in_cloud import OwnParts
from isthmus.train.outer import Outer, OuterRule, make_fragments
from isthmus.train.wire import Observer

_INNER_STEPS: Final = 30
_BITS: Final = 4
_CODECS: Final = {4: "int4", 8: "int8", 16: "bf16", 32: "raw"}
# SparseLoCo: 64 of 4096 elements, by 12-bit indices and 2-bit levels.
_SPARSE_CODEC: Final = "topk(0.015625) | int2"
_SPARSE_FEEDBACK: Final = 0.95
# Another cloud may be slow, not lost.
_LEAST_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(RunConfig):
    """What all members of a data-parallel run agree on."""

    data: DataParallel
    rule: OuterRule

    @property
    def members(self) -> Sequence[Member]:
        """The ranks of all clouds."""
        return self.data.members

    def continues_without(self, cloud: str) -> bool:  # noqa: ARG002 - any may be lost
        """Every cloud holds the whole model."""
        return True


class DataKind:
    """Each cloud holds the whole model; those that stay continue without one that is lost."""

    config = DataConfig
    saves_together = True
    continues = True
    chooses = True

    def clouds(self, job: Job) -> tuple[str, ...]:
        """All clouds of the job."""
        return tuple(cloud.name for cloud in job.cloud)

    def links(self, job: Job) -> Sequence[tuple[str, str]]:
        """One between each two clouds."""
        return list(combinations(self.clouds(job), 2))

    def data_job(self, job: Job, cloud: str) -> Job:
        """A cloud may have data of its own, which need not leave it."""
        return job.reading_at(cloud)

    def plan(self, job: Job, *, known: Job | None = None, source: CostSource) -> Plan | None:
        """How often and how exactly to synchronise; None where the planner knows too little."""
        known = known or job
        _check(job)
        return None if why_not_planned(known, source) is not None else plan(known, source=source)

    def decide(self, job: Job, decisions: Decisions | None = None) -> Decisions:
        """What the job and the plan leave open, by a rule."""
        strategy, notes = _check(job), []
        sync = None if decisions is None else decisions.sync
        if sync is None:
            steps = 1 if strategy.how == "exact" else strategy.inner_steps or _INNER_STEPS
            bits = strategy.bits or (32 if steps == 1 else _BITS)
            sync = DataSettings(
                inner_steps=steps, num_fragments=strategy.fragments or 0, bits=bits, delay_steps=1
            )
            notes.append(f"synchronisation: {strategy.how}, {steps} steps apart, {bits} bit, by rule")
        number = strategy.microbatches or _num_microbatches(job)
        layout_of(job, number * _num_ranks(job))
        decided = decisions or Decisions(
            num_microbatches=1,
            recompute=job.train.recompute is True,
            offload_optimizer=job.train.offload_optimizer,
            optimizer_bits=job.train.optimizer_bits,
        )
        return replace(decided, num_microbatches=number, sync=sync, reasons=(*decided.reasons, *notes))

    def check(self, job: Job, known: Job, decisions: Decisions, blueprint: Blueprint) -> None:  # noqa: ARG002
        """Refuse a model that does not fit into one cloud."""
        check_fits(job, [range(blueprint.num_layers)] * len(job.cloud), blueprint)

    def check_data(self, job: Job, decisions: Decisions, data: TrainingData) -> None:
        """Refuse data that cannot fill a step."""
        check_enough(data.samples, layout_of(job, decisions.num_microbatches * _num_ranks(job)))

    def reads(self, config: RunConfig, cloud: str) -> bool:  # noqa: ARG002 - all do
        """Every cloud reads its own part."""
        return True

    def config_of(
        self, job: Job, decisions: Decisions, blueprint: Blueprint, data: TrainingData, *, run_id: str
    ) -> DataConfig:
        """The schedule and the rule of the outer step."""
        strategy, sync, layout = (
            _check(job),
            decisions.sync,
            layout_of(job, decisions.num_microbatches * _num_ranks(job)),
        )
        if sync is None:
            raise ValueError("the run config needs decisions that are complete")
        rule = rule_of(strategy, sync)
        every = sync.inner_steps
        fragments = num_fragments_of(blueprint.num_layers, sync.num_fragments or None, sync_every=every)
        delay = sync.delay_steps if strategy.delay is None else strategy.delay
        schedule = DataParallel(
            clouds=tuple(tuple(Member(one.name, rank) for rank in range(one.ranks)) for one in job.cloud),
            num_steps=job.train.steps,
            num_microbatches=decisions.num_microbatches,
            sync_every=every,
            num_fragments=fragments,
            delay_steps=min(delay, every - 1)
            if strategy.delay is not None
            else min(delay, every - 1, MOST_DELAY_STEPS),
            quorum=strategy.quorum or len(job.cloud) // 2 + 1,
            grace_s=strategy.grace_s,
            save_every_s=job.checkpoint.every_s,
            gathers=rule.gathers,
            adapts=not are_alike(job.cloud),
            evaluate_every=job.train.evaluate_every or None,
            num_validation_microbatches=sum(
                1 for _ in data.validation_batches(num_sequences=layout.num_sequences)
            ),
            on_partition=strategy.on_partition,
            wait_s=max(job.checkpoint.patience_s, _LEAST_WAIT_S),
        )
        return DataConfig(
            kind="data",
            run_id=run_id,
            seed=job.seed,
            model=dict(data.facts.config),
            num_labels=data.facts.num_labels,
            sharding={one.name: sharding_of(one) for one in job.cloud},
            recompute=job.train.recompute if job.train.recompute == "auto" else decisions.recompute,
            offload_optimizer=decisions.offload_optimizer,
            optimizer_bits=8 if decisions.optimizer_bits == 8 else 32,
            keeps_padding=blueprint.mixes_tokens,
            data=schedule,
            rule=rule,
        )

    def make(self, build: Build) -> "DataRole":
        """Build the whole model."""
        return DataRole(build)


class DataRole:
    """One cloud of data parallel."""

    facts = FACTS
    state = DataState

    def __init__(self, build: Build) -> None:
        config = build.config
        if not isinstance(config, DataConfig):
            raise TypeError(f"data parallel is built from its own run config, not of {config.kind}")
        self.built = build.make(build.stage(range(build.blueprint.num_layers)))
        self._config = config
        self._job = build.job
        self._member = Member(build.cloud, build.world.rank)
        own = config.data.clouds[config.data.cloud_of(self._member)]
        inside = own[1:] if self._member == own[0] else own[:1]
        others = [cloud[self._member.rank] for cloud in config.data.clouds if cloud != own]
        self.peers = [*inside, *others]
        train = build.job.train
        parts = OwnParts(build.world, self.built.stage.parameters_by_name())
        self._outer = Outer(
            make_fragments(parts.tensors, build.blueprint.layout, config.data.num_fragments),
            config.rule,
            schedule=self.built.optimizer.schedule,
            weight_decay=train.weight_decay,
            max_norm=train.max_norm or None,
            seed=config.seed,
            sharded=parts.sharded,
            share=parts.share,
        )

    def scheduler(self) -> Scheduler:
        """The schedule of this cloud."""
        return data_scheduler(self._config.data, self._member)

    def actor(self, observer: Observer, source: Source | None) -> DataParallelActor:
        """The local steps and the rounds."""
        if source is None:
            raise ValueError("every cloud of data parallel reads data")
        return DataParallelActor(
            self._config.data,
            self._member,
            self.built,
            self._outer,
            seed=self._config.seed,
            on_span=observer.span,
            source=source,
        )

    def feed(self, data: TrainingData, *, step: int) -> Feed:
        """This rank's micro-batches: its share of the cloud's own data, or of what all clouds read."""
        spec = self._config.data
        number, members = spec.num_microbatches, list(spec.members)
        whole = layout_of(self._job, number * len(members))
        if self._job.cloud_named(self._member.cloud).data is not None:
            members = [one for one in members if one.cloud == self._member.cloud]
            whole = replace(whole, num_microbatches=number * len(members))
        first = members.index(self._member) * number
        return Feed(data, whole, share=_Share(range(first, first + number)), first_step=step)

    def cut(self, peer: Member) -> CutEnd | None:  # noqa: ARG002 - of none
        """Nothing is cut."""
        return None

    def extra(self) -> Mapping[str, Tensor]:
        """The outer parameters, their moments and what error feedback keeps."""
        return self._outer.tensors()

    def models(self, *, is_first: bool) -> Mapping[str, Stage]:
        """The outer parameters, from the first cloud."""
        if not is_first:
            return {}
        self._outer.put_in_place()
        return {MODEL_FOLDER: self.built.stage}

    def describe(self, model: Path, data: TrainingData) -> str | None:
        """The loss of the exported model on held-out data."""
        job = self._job
        if not job.train.evaluate_every:
            return None
        whole = layout_of(job, self._config.data.num_microbatches * len(self._config.members))
        return describe_exported(
            model,
            head=data.head,
            batches=data.validation_batches(num_sequences=whole.num_sequences),
            device=self.built.device.torch_device,
            autocast=AUTOCAST[job.train.precision],
            trust_remote_code=job.given_model.trust_remote_code,
        )


@dataclass(frozen=True, slots=True)
class _Share(RankShare):
    """Some micro-batches of every step, and all of an evaluation."""

    numbers: range

    def __call__(self, *, step: int, is_evaluation: bool = False) -> range:  # noqa: ARG002 - the same in each
        return range(2**31) if is_evaluation else self.numbers


def rule_of(strategy: DataStrategy, sync: DataSettings) -> OuterRule:
    """The outer step that a strategy asks for."""
    how = "exact" if sync.inner_steps == 1 and strategy.how == "streaming" else strategy.how
    match how:
        case "exact":
            return OuterRule(sync="exact", codec=_CODECS[sync.bits])
        case "sparse":
            rate = strategy.outer_learning_rate or 1.0
            return OuterRule(
                sync="sparse", codec=_SPARSE_CODEC, learning_rate=rate, feedback=_SPARSE_FEEDBACK
            )
    return OuterRule(
        sync="streaming",
        codec=_CODECS[sync.bits],
        learning_rate=strategy.outer_learning_rate or 0.7,
        momentum=strategy.outer_momentum,
        mixing=strategy.mixing,
    )


def _check(job: Job) -> DataStrategy:
    """The strategy of a job that can run."""
    strategy = job.strategy
    if not isinstance(strategy, DataStrategy):
        raise TypeError(f"a job with the strategy {strategy.kind}")
    for what, hint in _refusals(job, job.given_model, job.given_data, strategy):
        raise UserError(what, hint=hint)
    return strategy


def _refusals(
    job: Job, model: ModelSpec, data: DataSpec, strategy: DataStrategy
) -> Iterator[tuple[str, str]]:
    one = job.cloud[0]
    for cloud in job.cloud:
        if cloud.ranks != one.ranks:
            counts = f"{one.name!r} has {one.ranks}, {cloud.name!r} {cloud.ranks}"
            yield (
                f"each rank exchanges its shards with the same rank of other clouds: {counts}",
                f'set cloud.{cloud.name}.ranks = {one.ranks}, or strategy.kind = "pipeline"',
            )
    if one.ranks > 1 and strategy.how == "exact":
        yield (
            f"exact synchronisation runs one rank in each cloud, and {one.name!r} has {one.ranks}",
            'set strategy.sync = "streaming"',
        )
    linked = {frozenset(link.between) for link in job.link}
    for first, second in combinations((cloud.name for cloud in job.cloud), 2):
        if {first, second} not in linked:
            yield (
                f"data parallel needs a link between each two clouds so far, not so {first!r} and {second!r}",
                f'add a [[link]] with between = ["{first}", "{second}"]',
            )
    if model.lora or model.abnet or model.frozen_layers:
        cure = "leave model.lora, model.abnet and model.frozen_layers out"
        yield "data parallel trains all weights so far", cure
    if (strategy.quorum or 1) > len(job.cloud):
        yield f"a quorum of {strategy.quorum} of {len(job.cloud)} clouds", "lower strategy.quorum"
    named = [cloud.name for cloud in job.cloud if cloud.data is not None]
    if named and trains_tokenizer(data, model):
        yield (
            f"the data of {named[0]!r} alone would give another tokenizer than that of the job",
            "name one in data.tokenizer",
        )


def _num_ranks(job: Job) -> int:
    return sum(cloud.ranks for cloud in job.cloud)


def _num_microbatches(job: Job) -> int:
    """The most micro-batches, up to four, into which a rank's part of a step can be divided."""
    num_sequences = job.train.batch_tokens // job.given_data.sequence_length // _num_ranks(job)
    return max((one for one in range(1, MOST_MICROBATCHES + 1) if num_sequences % one == 0), default=1)
