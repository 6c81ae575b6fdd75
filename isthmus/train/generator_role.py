"""The role of a cloud in generator–discriminator pre-training: its own model, its own data, its schedule."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from torch import Tensor

from isthmus.errors import UserError
from isthmus.job import DataSpec, Job, ModelSpec
from isthmus.job.codec import HiddenSpec
from isthmus.job.sections import TrainSpec
from isthmus.model.blueprint import Blueprint, fresh_blueprint, pretrained_blueprint
from isthmus.model.heads import DETECTION, HEADS
from isthmus.model.random import seed_from
from isthmus.model.stage import Stage
from isthmus.plan.costs import CostSource
from isthmus.plan.feed import (
    FACTS,
    DiscriminatorState,
    GeneratorDiscriminator,
    GeneratorState,
    feed_scheduler,
)
from isthmus.plan.feed_plan import clouds_of, feed_of, spec_of, strategy_of
from isthmus.plan.plan import Decisions, Plan
from isthmus.plan.types import Action, Event, Facts, Lost, Member, Outcome, Scheduler, Stop
from isthmus.train.build import MODEL_FOLDER, Build, BuiltStage, RunConfig, layout_of, sharding_of
from isthmus.train.coding import CutEnd
from isthmus.train.data.samples import MaskedSamples
from isthmus.train.data.tokenizer import token_values, vocabulary_size
from isthmus.train.data.training_data import Source, TrainingData
from isthmus.train.generator import (
    BatchForm,
    DiscriminatorActor,
    GeneratorActor,
    KeptBatches,
    MaskedBatches,
    WholeModel,
)
from isthmus.train.loop import Actor
from isthmus.train.wire import Observer

_LAYERS: Final = "num_hidden_layers"
# XLM-E's generator has 4 layers to the discriminator's 12, of the same width.
_LAYER_SHARE: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedConfig(RunConfig):
    """What generators and discriminator agree on."""

    kind: Literal["generator-discriminator"] = "generator-discriminator"
    feed: GeneratorDiscriminator
    form: BatchForm
    tokenizer: str
    """The digest of the vocabulary that all clouds must have."""
    tokens: Mapping[str, Any] = field(default_factory=dict)
    """What a fresh generator's configuration takes from the tokenizer."""

    @property
    def members(self) -> Sequence[Member]:
        """The discriminator's members, then those of each generator."""
        return self.feed.members

    def continues_without(self, cloud: str) -> bool:
        """Whether a generator may be lost."""
        return self.feed.on_lost == "continue" and self.feed.generator_of(cloud) is not None


def own_job(job: Job, cloud: str) -> Job:
    """The job as one cloud sees it: a generator has a model and data of its own."""
    judge, *_ = clouds_of(job)
    if cloud == judge:
        return job
    whole = job.given_model
    spec = spec_of(strategy_of(job), cloud)
    model = spec.model or strategy_of(job).generator or _smaller(whole)
    vocabulary = {key: one for key, one in (whole.config or {}).items() if key == "vocab_size"}
    if model.config is not None:
        model = model.model_copy(update={"config": {**vocabulary, **model.config}})
    own = {"source": spec.source, "text_column": spec.text_column}
    changes = {"pair_column": spec.pair_column, **{key: one for key, one in own.items() if one is not None}}
    data = DataSpec.model_validate({**job.given_data.model_dump(), **changes, "validation_share": 0.0})
    return job.model_copy(update={"model": model, "data": data})


def _smaller(model: ModelSpec) -> ModelSpec:
    """A model of the same configuration with a third of its layers."""
    number = (model.config or {}).get(_LAYERS)
    if not isinstance(number, int):
        raise UserError(
            f"the job has no [strategy.generator], and [model.config] has no {_LAYERS} to take a third of",
            hint='write [strategy.generator] with source = "…" or a config',
        )
    return ModelSpec(config={**(model.config or {}), _LAYERS: max(1, number // _LAYER_SHARE)})


def feed_blueprint(model: ModelSpec, tokens: Mapping[str, Any], *, is_generator: bool) -> Blueprint:
    """A masked language model, or an encoder that tells which tokens were replaced."""
    head, num_labels = (HEADS["masked-lm"], None) if is_generator else (DETECTION, 1)
    if model.source is None:
        return fresh_blueprint({**tokens, **(model.config or {})}, head=head, num_labels=num_labels)
    return pretrained_blueprint(
        model.source, head=head, num_labels=num_labels, trust_remote_code=model.trust_remote_code
    )


def vocabulary_digest(tokenizer: Any) -> str:
    """Two tokenizers with this digest mean the same by each id."""
    known = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.special_tokens_map.items())]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class FeedKind:
    """Generators feed a discriminator; each cloud trains a model of its own."""

    continues: bool = False
    """Whether the discriminator continues without a generator, and meets it again while it trains."""
    config: ClassVar[type[RunConfig]] = FeedConfig
    saves_together: ClassVar[bool] = False
    chooses: ClassVar[bool] = False

    def clouds(self, job: Job) -> tuple[str, ...]:
        """The discriminator's cloud, then those of the generators."""
        return clouds_of(job)

    def links(self, job: Job) -> Sequence[tuple[str, str]]:
        """From the discriminator to each generator."""
        judge, *clouds = clouds_of(job)
        return [(judge, name) for name in clouds]

    def data_job(self, job: Job, cloud: str) -> Job:
        """The job with the data that a cloud reads."""
        return own_job(job, cloud)

    def plan(self, job: Job, *, known: Job | None = None, source: CostSource) -> Plan | None:  # noqa: ARG002
        """The job leaves nothing open that a run needs."""
        return None

    def decide(self, job: Job, decisions: Decisions | None = None) -> Decisions:
        """Refuse a job that cannot run."""
        strategy, (judge, *clouds) = strategy_of(job), clouds_of(job)
        _check(job, judge, clouds)
        num_sequences = layout_of(job, strategy.batches).num_sequences
        for cloud in job.cloud:
            if cloud.ranks > num_sequences:
                raise UserError(
                    f"cloud {cloud.name!r} has {cloud.ranks} ranks for batches of {num_sequences} sequences",
                    hint="lower strategy.batches, raise train.batch_tokens, or use fewer ranks",
                )
        return decisions or Decisions(
            num_microbatches=strategy.batches,
            recompute=job.train.recompute is True,
            reasons=() if strategy.discriminator_cloud else (f"discriminator: {judge}, the first cloud",),
            offload_optimizer=job.train.offload_optimizer,
            optimizer_bits=job.train.optimizer_bits,
        )

    def check(self, job: Job, known: Job, decisions: Decisions, blueprint: Blueprint) -> None:
        """All that can be wrong with models is known once there are tokens."""

    def check_data(self, job: Job, decisions: Decisions, data: TrainingData) -> None:  # noqa: ARG002
        """Refuse a model that cannot be built, or does not know all tokens."""
        size, tokens = vocabulary_size(data.tokenizer), token_values(data.tokenizer, {})
        judge, *clouds = clouds_of(job)
        for name in (judge, *clouds):
            found = feed_blueprint(own_job(job, name).given_model, tokens, is_generator=name != judge)
            if found.config.vocab_size < size:
                raise UserError(
                    f"the model of cloud {name!r} has {found.config.vocab_size} tokens, the tokenizer {size}",
                    hint="name one tokenizer in data.tokenizer that all models know",
                )

    def reads(self, config: RunConfig, cloud: str) -> bool:
        """Generators read."""
        return of_feed(config).feed.generator_of(cloud) is not None

    def config_of(
        self, job: Job, decisions: Decisions, blueprint: Blueprint, data: TrainingData, *, run_id: str
    ) -> FeedConfig:
        """The run config, with the tokenizer of the first cloud."""
        form = BatchForm(
            num_sequences=layout_of(job, decisions.num_microbatches).num_sequences,
            sequence_length=job.given_data.sequence_length,
            vocabulary_size=vocabulary_size(data.tokenizer),
            pad_id=data.pad_id,
        )
        return FeedConfig(
            seed=job.seed,
            run_id=run_id,
            model=dict(data.facts.config),
            recompute=decisions.recompute or job.train.recompute,
            sharding={one.name: sharding_of(one) for one in job.cloud},
            offload_optimizer=decisions.offload_optimizer,
            optimizer_bits=8 if decisions.optimizer_bits == 8 else 32,
            keeps_padding=blueprint.mixes_tokens,
            feed=feed_of(
                strategy_of(job),
                clouds_of(job),
                num_steps=job.train.steps,
                max_bytes=form.max_bytes,
                save_every_s=job.checkpoint.every_s,
                num_ranks={one.name: one.ranks for one in job.cloud},
            ),
            form=form,
            tokenizer=vocabulary_digest(data.tokenizer),
            tokens=token_values(data.tokenizer, {}),
        )

    def make(self, build: Build) -> "FeedRole":
        """Build the model of this cloud."""
        config, job = of_feed(build.config), own_job(build.job, build.cloud)
        index = config.feed.generator_of(build.cloud)
        tokens = config.model if index is None else config.tokens
        blueprint = feed_blueprint(job.given_model, tokens, is_generator=index is not None)
        if index is not None:
            steps = math.ceil(
                config.feed.generators[index].quota / config.feed.generators[index].batches_per_step
            )
            job = job.model_copy(update={"train": job.train.model_copy(update={"steps": steps})})
        own = replace(build, job=job, blueprint=blueprint)
        built = own.make(own.stage(range(blueprint.num_layers)))
        return FeedRole(config, Member(build.cloud, build.world.rank), built, job=job)


def of_feed(config: RunConfig) -> FeedConfig:
    """The run config of this kind; another kind is the caller's mistake."""
    if not isinstance(config, FeedConfig):
        raise TypeError(f"a generator is built from the run config of its kind, not of {config.kind}")
    return config


def _check(job: Job, judge: str, clouds: Sequence[str]) -> None:
    if not clouds:
        raise UserError("generator and discriminator need two clouds", hint="add a [[cloud]] and a [[link]]")
    if (task := job.given_data.task) != "masked-lm":
        raise UserError(f"generators do not learn {task}", hint='set data.task to "masked-lm"')
    if job.train.evaluate_every not in (0, TrainSpec.model_fields["evaluate_every"].default):
        raise UserError(
            f"train.evaluate_every = {job.train.evaluate_every}, but a discriminator has no data to hold out",
            hint="leave it out: the report has the accuracy on each batch before it is trained on",
        )
    linked = {frozenset(link.between): link for link in job.link}
    for name in clouds:
        link = linked.get(frozenset((judge, name)))
        if link is None:
            raise UserError(
                f"no link joins generator {name!r} to the discriminator's cloud {judge!r}",
                hint=f'add a [[link]] with between = ["{judge}", "{name}"]',
            )
        if not isinstance(link.boundary, HiddenSpec):
            raise UserError(
                f"no hidden states cross {link.name}, so it has no {link.boundary}",
                hint="leave link.boundary out",
            )
    models = [own_job(job, name).given_model for name in (judge, *clouds)]
    if any(one.lora or one.abnet or one.frozen_layers for one in models):
        raise UserError(
            "generator-discriminator trains whole models: neither adapters nor frozen layers are offered",
            hint="leave model.lora, model.abnet and model.frozen_layers out",
        )


@dataclass(frozen=True, slots=True)
class Reforming:
    """A scheduler whose member meets all others again when one of them is lost."""

    scheduler: Scheduler
    member: Member

    def on(self, event: Event, now_s: float) -> Sequence[Action]:
        """Take in what happened; a loss ends this epoch."""
        if isinstance(event, Lost) and event.final and event.member.cloud != self.member.cloud:
            return (Stop(Outcome.REFORM, f"{event.member} is lost: {event.reason}"),)
        return self.scheduler.on(event, now_s)


class FeedRole:
    """One generator, or the discriminator."""

    facts = FACTS

    def __init__(self, config: FeedConfig, member: Member, built: BuiltStage, *, job: Job) -> None:
        self.built = built
        self._config = config
        self._member = member
        self._job = job
        self._index = config.feed.generator_of(member.cloud)
        self._kept = KeptBatches(config.feed.max_kept, config.form) if self._index is not None else None
        self._batches: MaskedBatches | None = None

    @property
    def peers(self) -> Sequence[Member]:
        """Of a leader its siblings, and the leaders of the generators or of the discriminator."""
        feed, index = self._config.feed, self._index
        leader, *siblings = feed.discriminator if index is None else feed.generators[index].members
        if self._member != leader:
            return [leader]
        others = [one.members[0] for one in feed.generators] if index is None else feed.discriminator[:1]
        return [*siblings, *others]

    @property
    def state(self) -> type[Facts]:
        """What its scheduler saves."""
        return DiscriminatorState if self._index is None else GeneratorState

    def scheduler(self) -> Scheduler:
        """The schedule of this member; all form a new epoch where a lost cloud is waited for."""
        scheduler = feed_scheduler(self._config.feed, self._member)
        goes_on = self._index is None and self._config.feed.on_lost == "continue"
        return scheduler if goes_on else Reforming(scheduler, self._member)

    def actor(self, observer: Observer, source: Source | None) -> Actor:  # noqa: ARG002 - batches have numbers
        """What trains the model of this cloud."""
        config, index = self._config, self._index
        seed = seed_from("generator", config.seed, index)
        model = WholeModel(
            self.built,
            seed=config.seed if index is None else seed,
            track=self._member.cloud,
            on_span=observer.span,
        )
        if index is None:
            leaders = [one.members[0] for one in config.feed.generators]
            weights = [spec_of(strategy_of(self._job), one.cloud).loss_weight for one in leaders]
            return DiscriminatorActor(model, config.form, leaders, loss_weights=weights)
        if self._batches is None or self._kept is None:
            raise ValueError("a generator computes once it has data")
        temperature = strategy_of(self._job).temperature
        return GeneratorActor(
            model, config.form, self._batches, self._kept, seed=seed, temperature=temperature
        )

    def feed(self, data: TrainingData, *, step: int) -> None:  # noqa: ARG002
        """Read batches by their numbers; refuses another tokenizer."""
        if self._index is None:
            return
        if vocabulary_digest(data.tokenizer) != self._config.tokenizer:
            raise UserError(
                f"generator {self._member.cloud!r} has another tokenizer than the discriminator",
                hint="name one folder or name in data.tokenizer, the same for all clouds",
            )
        if not isinstance(data.samples, MaskedSamples):
            raise TypeError("a generator reads what can be masked")
        seed = seed_from("order", self._config.seed, self._index)
        samples = replace(
            data.samples,
            seed=seed,
            masked_share=strategy_of(self._job).masked_share,
            to_mask_share=1.0,
        )
        self._batches = MaskedBatches(
            samples=samples, seed=seed, num_sequences=self._config.form.num_sequences, pad_id=data.pad_id
        )

    def cut(self, peer: Member) -> CutEnd | None:  # noqa: ARG002
        """No hidden states cross."""
        return None

    def extra(self) -> Mapping[str, Tensor]:
        """The batches that the discriminator may ask for again."""
        return {} if self._kept is None else self._kept.tensors()

    def models(self, *, is_first: bool) -> Mapping[str, Stage]:  # noqa: ARG002 - every cloud has its own
        """A whole model."""
        folder = MODEL_FOLDER if self._index is None else f"generator-{self._member.cloud}"
        return {folder: self.built.stage}

    def describe(self, model: Path, data: TrainingData) -> str | None:  # noqa: ARG002
        """The accuracy of the last steps stands in the report."""
        return None
