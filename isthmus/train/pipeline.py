"""The actor of a pipeline: what one member computes, a method for each kind of work.

    PipelineConfig   what all members agree on: the schedule, the cuts, which layers are where
    Passes           runs a stage forward and back on one micro-batch after the other
    PipelineActor    READ            takes its micro-batches from the data, where the member reads any
                     FORWARD         activation ──► stage ──► activation for the next stage, or the loss
                     BACKWARD        gradient ──► stage ──► gradient for the stage before
                     REDUCE          sums gradients over ranks, and reads losses and norms from the device
                     UPDATE          clips by the norm over all stages, and takes the step
                     FIT             begins a bottleneck with what its warm-up has shown
                     EVALUATE, SCORE forwards on held-out data, and what they came to

What arrives waits under its kind, step and micro-batch until its pass runs; what a pass makes waits likewise
until its message leaves.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.events import WAITING_KIND, Span, steady_s
from isthmus.job.codec import BoundarySpec, HiddenSpec
from isthmus.model.random import RngKey
from isthmus.model.stage import Batch, Stage, StageInput, StageOutput
from isthmus.plan.end_of_step import Read, Reduced, Round, Scored, Seen, Updated, Verdict, condensed
from isthmus.plan.pipeline_parts import HIDDEN, SENDING_HALF, Pipeline
from isthmus.plan.types import (
    Facts,
    Gathered,
    Member,
    Message,
    MessageKind,
    Ran,
    Work,
    WorkKind,
    pack_facts,
    unpack_facts,
)
from isthmus.train.build import BuiltStage, RunConfig
from isthmus.train.data.training_data import Source
from isthmus.train.device import Mark, PassClock
from isthmus.train.frozen_cache import HELD, Admission, held_of
from isthmus.train.in_cloud import Reduction, begin_down, begin_up
from isthmus.train.integers import IDS
from isthmus.train.metrics import Judge, added

_HIDDEN: Final = HiddenSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(RunConfig):
    """What all members of a pipeline run agree on: the schedule, and what actors and wires need beside it."""

    kind: Literal["pipeline"] = "pipeline"
    pipeline: Pipeline
    layers: tuple[int, ...] = ()
    """The number of layers of each stage."""
    boundaries: tuple[BoundarySpec, ...] = ()
    """What crosses each cut, in order; hidden states everywhere where nothing is said."""
    cache_bytes: int = 0
    """The most that the first trained stage keeps of what frozen layers gave."""
    num_encoder_layers: int = 0
    """Of an encoder–decoder; 0 for other models."""
    pairing: str = ""
    """See `TrainingData`: what both clouds know that read the texts and their translations."""
    tokenizer: Mapping[str, str] = field(default_factory=dict)
    """The files of a tokenizer that was trained on the data, where evaluations translate."""

    @property
    def target_stage(self) -> int | None:
        """The stage that reads translations, where texts do not leave the clouds of the encoder."""
        starts = [one.start for one in self.stage_layers]
        return starts.index(self.num_encoder_layers) if self.pairing else None

    def is_in_decoder(self, cut: int) -> bool:
        """Whether hidden states of a decoder cross behind a stage, and the memory beside them."""
        return 0 < self.num_encoder_layers < sum(self.layers[: cut + 1])

    @property
    def members(self) -> Sequence[Member]:
        """All members, stage by stage."""
        return self.pipeline.members

    def boundary(self, cut: int) -> BoundarySpec:
        """What crosses the cut behind a stage."""
        return self.boundaries[cut] if self.boundaries else _HIDDEN

    @property
    def stage_layers(self) -> tuple[range, ...]:
        """The layers of each stage."""
        return tuple(range(start, stop) for start, stop in pairwise((0, *accumulate(self.layers))))

    @property
    def num_warmup_steps(self) -> int:
        """Steps before bottlenecks start, all at once."""
        return self.pipeline.fit_step or 0

    @property
    def common_ranks(self) -> int:
        """The number of which a step's micro-batches are a multiple: the ranks of fully sharded stages."""
        pipeline = self.pipeline
        return max((pipeline.num_ranks[index] for index in pipeline.grouped_stages), default=1)

    @property
    def is_cached(self) -> bool:
        """Whether the first trained stage caches the output of frozen layers."""
        # With several ranks a sequence comes to another one every time.
        pipeline = self.pipeline
        return pipeline.first_trained > 0 and self.cache_bytes > 0 and set(pipeline.num_ranks) <= {1}

    def admission(self, hidden_width: int) -> Admission:
        """Which sequences the cache of the first trained stage has; of one state at each end."""
        row_bytes = torch.float32.itemsize * hidden_width
        return Admission(max_bytes=self.cache_bytes, row_bytes=row_bytes, keeps_padding=self.keeps_padding)


MEMORY: Final = "memory"
"""The output of an encoder, which every stage of its decoder gets."""

Arrived = Mapping[str, Tensor]
"""Hidden states by their name, and the memory by its own; or the gradients of both."""


@dataclass(slots=True, eq=False)
class Passes:
    """Runs a stage on micro-batches.

    A frozen stage runs as in evaluation, without dropout. `sends_gradients` is false where the stage before
    is frozen, or there is none. Until `num_warmup_steps` hidden states cross where a bottleneck is to start.
    """

    stage: Stage
    _: KW_ONLY
    device: torch.device
    seed: int
    autocast: torch.dtype | None = None
    is_frozen: bool = False
    sends_gradients: bool = True
    num_warmup_steps: int = 0
    on_near_end: Callable[[], None] = lambda: None
    window: int = 1
    """The most micro-batches in flight at a time."""
    keeps_scores: bool = False
    in_flight: dict[tuple[int, int], tuple[Arrived, StageOutput, int]] = field(default_factory=dict)
    """By step and micro-batch: what arrived for it, what it gave, and the targets of its step."""

    def train(self, is_training: bool) -> None:
        """Switch between training and evaluation."""
        self.stage.train(is_training and not self.is_frozen)

    def forward(
        self,
        batch: Batch,
        arrived: Arrived,
        *,
        step: int,
        item: int,
        num_step_targets: int,
        is_evaluation: bool = False,
    ) -> StageOutput:
        """Run a micro-batch, with what arrived for it."""
        is_training = not is_evaluation and not self.is_frozen
        if is_training and self.sends_gradients:
            for one in arrived.values():
                one.requires_grad_()
        inputs = StageInput(
            batch=batch.to(self.device),
            crossing=arrived.get(HIDDEN),
            memory=arrived.get(MEMORY),
            rng_key=RngKey(seed=self.seed, step=step, microbatch=item),
            is_warming_up=step < self.num_warmup_steps,
            window=self.window,
            on_near_end=self.on_near_end,
            keeps_scores=self.keeps_scores or is_evaluation,
        )
        with torch.set_grad_enabled(is_training), self.precision():
            output: StageOutput = self.stage(inputs)
        if is_training:
            self.in_flight[step, item] = arrived, output, num_step_targets
        return output

    def backward(self, *, step: int, item: int, gradients: Arrived) -> dict[str, Tensor]:
        """Run a micro-batch back, given the gradients of what it sent; gives those of what had arrived."""
        arrived, output, num_step_targets = self.in_flight.pop((step, item))
        output.backward(
            grad=gradients.get(HIDDEN),
            memory_grad=gradients.get(MEMORY),
            loss_weight=1 / max(num_step_targets, 1),
        )
        return {name: one.grad for name, one in arrived.items() if one.grad is not None}

    def precision(self) -> AbstractContextManager[None]:
        """The context in which the model computes."""
        if self.autocast is None:
            return nullcontext()
        # Without its cache, in which copies of weights would outlive the layers that are recomputed.
        return torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=False)


TARGETS: Final = "targets"
"""How many targets a micro-batch has, and how many its whole step has."""
# Shorter waits for data are not reported.
_LEAST_WAIT_S: Final = 0.001
_MAX_GATHERED_BYTES: Final = 16 * 1024 * 1024
_NEEDED_BY: Final = {
    WorkKind.FORWARD: MessageKind.ACTIVATION,
    WorkKind.EVALUATE: MessageKind.EVALUATION,
    WorkKind.BACKWARD: MessageKind.GRADIENT,
}

Key = tuple[MessageKind, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Microbatch:
    """A micro-batch at a stage: integers on the host, what else arrived on the device."""

    batch: Batch
    num_step_targets: int
    arrived: Arrived = field(default_factory=dict)
    cached: tuple[int, ...] | None = None
    """The sequences that the first trained stage has cached; None where nothing is cached."""

    @property
    def is_cached(self) -> bool:
        """Whether there is nothing to compute below the first trained stage."""
        return self.cached is not None and len(self.cached) == len(self.batch.ids)


class _Result(NamedTuple):
    """What the last stage made of a micro-batch; tensors are on the device."""

    is_plain: bool
    """Whether it belongs to the round of an evaluation that crosses without codecs."""
    num_targets: int
    loss: Tensor
    num_correct: Tensor | None
    judged: Any = None
    """What the judge has kept of it."""


class PipelineActor:
    """Computes the works of one member of a pipeline."""

    def __init__(
        self,
        config: PipelineConfig,
        member: Member,
        built: BuiltStage,
        *,
        on_span: Callable[[Span], None],
        source: Source | None = None,
        judge: Judge | None = None,
    ) -> None:
        pipeline = config.pipeline
        self._config = config
        self._index = pipeline.stage_of(member)
        self._is_frozen = self._index < pipeline.first_trained
        self._stage = built.stage
        self._optimizer = built.optimizer
        self._source = source
        self._judge = judge
        self._world = built.world
        self._reduction = built.reduction or Reduction(built.world, built.stage)
        self._on_span = on_span
        self._track = member.cloud if len(pipeline.stages[self._index]) == 1 else str(member)
        self._clock = PassClock(built.device, track=self._track, on_span=on_span)
        self._passes = Passes(
            built.stage,
            device=built.device.torch_device,
            seed=config.seed,
            autocast=built.autocast,
            is_frozen=self._is_frozen,
            sends_gradients=self._index > pipeline.first_trained,
            num_warmup_steps=config.num_warmup_steps,
            on_near_end=self._clock.near_end,
            window=pipeline.first_windows()[self._index],
        )
        reads_for_cache = source is not None and config.is_cached
        self._admission = config.admission(built.stage.model.config.hidden_size) if reads_for_cache else None
        """Tells the first stage, which reads the data, what the cache of the first trained one will hold."""
        self._microbatches: dict[Key, _Microbatch] = {}
        self._targets: dict[Key, _Microbatch] = {}
        self._gradients: dict[Key, Arrived] = {}
        self._outgoing: dict[Key, tuple[Mapping[str, Tensor], Mark]] = {}
        self._basis: Mapping[str, Tensor] = {}
        self._basis_to_send: Mapping[str, Tensor] = {}
        self._results: list[_Result] = []

    def run(self, work: Work) -> Facts | None:
        """Carry out a work; only REDUCE and SCORE read the device."""
        match work.kind:
            case WorkKind.FORWARD | WorkKind.EVALUATE:
                return self._pass(work, self._forward)
            case WorkKind.BACKWARD:
                return self._pass(work, self._backward)
            case WorkKind.READ:
                return self._begin(work)
            case WorkKind.FIT:
                self._fit(work)
                return None
            case WorkKind.REDUCE:
                return self._reduce(work)
            case WorkKind.UPDATE:
                return self._update(work)
            case WorkKind.SCORE:
                return self._score()
            case _:
                raise ValueError(f"a pipeline does not {work.kind.value}")

    def tensors(self, message: Message) -> tuple[Mapping[str, Tensor], Mark]:
        """What a message carries, and when it is ready on the device."""
        if message.kind is MessageKind.BASIS:
            return self._basis_to_send, Mark()
        return self._outgoing.pop((message.kind, message.step, message.item), ({}, Mark()))

    def take(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        """Keep what has arrived until a pass needs it."""
        key = message.kind, message.step, message.item
        match message.kind:
            case MessageKind.GRADIENT:
                self._gradients[key] = tensors
            case MessageKind.ACTIVATION | MessageKind.EVALUATION:
                self._microbatches[key] = _read_microbatch(tensors)
            case MessageKind.BASIS:
                self._basis = tensors

    def drop(self, message: Message) -> None:
        """A pipeline keeps no message."""

    # The start of a step or of an evaluation.

    def _begin(self, work: Work) -> Facts | None:
        is_evaluation = bool(work.item)
        self._clock.begin()
        self._reduction.begin()
        self._passes.train(not is_evaluation)
        self._results.clear()
        return None if self._source is None else self._read(self._source, work.step, is_evaluation)

    def _read(self, source: Source, step: int, is_evaluation: bool) -> Read:
        """Wait for the micro-batches of this member; an evaluation has them once in each of its rounds."""
        asked_s = steady_s()
        batches = source.validation() if is_evaluation else source.training(step)
        now_s = steady_s()
        if now_s - asked_s >= _LEAST_WAIT_S:
            self._on_span(
                Span(track=self._track, name=f"data {step}", kind=WAITING_KIND, start_s=asked_s, end_s=now_s)
            )
        own = (sum(batch.num_targets for batch in batches), sum(_num_tokens(batch) for batch in batches))
        num_targets, num_tokens = self._world.all_reduce(own)
        self._lay_out(batches, step, is_evaluation, num_targets)
        return Read(num_targets=num_targets, num_tokens=num_tokens)

    def _lay_out(
        self, batches: Sequence[Batch], step: int, is_evaluation: bool, num_step_targets: int
    ) -> None:
        pipeline, rank = self._config.pipeline, self._world.rank
        share = pipeline.routing.share(self._index, rank, step=step, is_evaluation=is_evaluation)
        found = self._targets if self._index else self._microbatches
        kind = MessageKind.EVALUATION if is_evaluation else MessageKind.ACTIVATION
        num_rounds = pipeline.num_rounds if is_evaluation else 1
        for number in range(num_rounds):
            for microbatch, batch in zip(share, batches, strict=True):
                item = number * pipeline.num_validation_microbatches + microbatch
                cached = None
                if self._admission is not None and not self._index and not number:
                    cached = self._admission.meet(self._admission.know(_integers(batch)))
                found[kind, step, item] = _Microbatch(
                    batch=batch, num_step_targets=num_step_targets, cached=cached
                )

    def _fit(self, work: Work) -> None:
        """Fit one half of a bottleneck; the leader of the sending half has the basis for the other one."""
        if work.item == SENDING_HALF:
            if self._stage.down is None:
                raise ValueError("a bottleneck is fitted that this stage does not have")
            basis = begin_down(self._stage.down, self._world)
            self._basis_to_send = {name: tensor.detach().cpu() for name, tensor in basis.items()}
        elif self._stage.up is not None:
            begin_up(self._stage.up, self._world, self._basis)

    # Passes.

    def _pass(self, work: Work, compute: Callable[[Work], Mapping[str, Tensor] | None]) -> Ran:
        tensors, mark = self._clock.run(work.kind.value, work.name, partial(compute, work))
        if tensors is not None:
            self._outgoing[_NEEDED_BY[work.kind], work.step, work.item] = tensors, mark
        return Ran(busy_s=self._clock.take_busy_s())

    def _forward(self, work: Work) -> Mapping[str, Tensor] | None:
        key = _NEEDED_BY[work.kind], work.step, work.item
        found = self._microbatches.pop(key)
        if key in self._targets:
            found = _paired(found, self._targets.pop(key))
        if self._is_frozen and found.is_cached:
            return self._carried(found)
        is_evaluation = work.kind is WorkKind.EVALUATE
        output = self._passes.forward(
            found.batch,
            found.arrived,
            step=work.step,
            item=work.item,
            num_step_targets=found.num_step_targets,
            is_evaluation=is_evaluation,
        )
        if output.loss is not None:
            is_plain = is_evaluation and self._config.pipeline.is_without_codecs(work)
            judged = self._judged(work, found.batch, output) if is_evaluation else None
            loss, num_targets = output.loss.detach(), found.batch.num_targets
            self._results.append(_Result(is_plain, num_targets, loss, output.num_correct, judged))
        return None if output.crossing is None else self._carried(found, output)

    def _judged(self, work: Work, batch: Batch, output: StageOutput) -> Any:
        if self._judge is None or output.scores is None:
            return None
        number = work.item % self._config.pipeline.num_validation_microbatches
        return self._judge.keep(output.scores, output.memory, batch, number=number)

    def _carried(self, found: _Microbatch, output: StageOutput | None = None) -> dict[str, Tensor]:
        """What the next stage gets with a micro-batch."""
        tensors = _integers(found.batch)
        if self._index + 1 == self._config.target_stage:
            tensors[IDS] = torch.zeros_like(tensors[IDS])  # texts do not leave the clouds of the encoder
        tensors[TARGETS] = torch.tensor([found.batch.num_targets, found.num_step_targets])
        if found.cached is not None and self._is_frozen:
            # Behind the first trained stage there is nothing more to leave out.
            tensors[HELD] = torch.tensor(found.cached, dtype=torch.int64)
        crosses = {} if output is None else {HIDDEN: output.crossing, MEMORY: output.memory}
        return tensors | {name: one.detach() for name, one in crosses.items() if one is not None}

    def _backward(self, work: Work) -> Mapping[str, Tensor] | None:
        arrived = self._gradients.pop((MessageKind.GRADIENT, work.step, work.item), {})
        return self._passes.backward(step=work.step, item=work.item, gradients=arrived) or None

    # The end of a step or of an evaluation.

    def _reduce(self, work: Work) -> Gathered:
        self._clock.settle()
        self._reduction.reduce()
        losses = _read_device(one.loss for one in self._results)
        norms = self._reduction.squared_norms(self._optimizer.squared_norms())
        own = Reduced(
            seen=work.facts if isinstance(work.facts, Seen) else Seen(),
            loss_sum=math.fsum(losses),
            num_targets=sum(one.num_targets for one in self._results),
            squared_norms=condensed(norms),
            busy_s=self._clock.take_busy_s(),
        )
        return self._gather(own)

    def _update(self, work: Work) -> Gathered:
        text = None if work.facts is None else pack_facts(work.facts)
        verdict = unpack_facts(self._world.broadcast(text), Verdict)

        update = partial(self._optimizer.update, work.step, norm=verdict.norm)
        self._clock.run(work.kind.value, work.name, update)
        self._passes.window = verdict.windows[self._index]
        learning_rate = self._optimizer.schedule.at(work.step)
        return Gathered(of=(Updated(verdict=verdict, learning_rate=learning_rate),))

    def _score(self) -> Gathered:
        self._clock.settle()
        rounds = []
        for is_plain in (False, True)[: self._config.pipeline.num_rounds]:
            own = [one for one in self._results if one.is_plain == is_plain]
            losses = tuple(_read_device(one.loss for one in own))
            num_correct = sum(_read_device(one.num_correct for one in own))
            num_targets = sum(one.num_targets for one in own)
            counts = self._counts([one.judged for one in own if one.judged is not None])
            rounds.append(
                Round(losses=losses, num_correct=num_correct, num_targets=num_targets, counts=counts)
            )
        return self._with_metrics(self._gather(Scored(rounds=tuple(rounds))))

    def _counts(self, judged: list[Any]) -> tuple[int, ...]:
        if self._judge is None:
            return ()
        with self._passes.precision():
            return self._judge.counts(judged)

    def _with_metrics(self, members: Gathered) -> Gathered:
        """The metrics of each round, with what was found at the first of these members."""
        scored = [one for one in members.of if isinstance(one, Scored)]
        if self._judge is None:
            return members
        rounds = zip(*(one.rounds for one in scored), strict=True)
        found = [self._judge.metrics(added([one.counts for one in every])) for every in rounds]
        metrics = tuple(tuple(one.items()) for one in found)
        return Gathered(of=(replace(scored[0], metrics=metrics), *scored[1:]))

    def _gather(self, own: Reduced | Scored) -> Gathered:
        """The facts of all ranks of this cloud at its leader; those of this rank elsewhere."""
        texts = self._world.gather(pack_facts(own, max_bytes=_MAX_GATHERED_BYTES))
        if texts is None or self._world.num_ranks == 1:
            return Gathered(of=(own,))
        found = (unpack_facts(one, type(own), max_bytes=_MAX_GATHERED_BYTES) for one in texts)
        return Gathered(of=tuple(found))


def _paired(found: _Microbatch, own: _Microbatch) -> _Microbatch:
    """A micro-batch whose texts have arrived with the translations that this member has read."""
    keys = found.batch.keys
    if keys is None or own.batch.keys is None or not torch.equal(keys, own.batch.keys):
        raise FrameError("a micro-batch of other texts than those whose translations are due")
    batch = replace(found.batch, labels=own.batch.labels, num_targets=own.batch.num_targets)
    return replace(found, batch=batch, num_step_targets=own.num_step_targets)


def _read_device(values: Iterable[Tensor | None]) -> list[Any]:
    found = [one for one in values if one is not None]
    return torch.stack(found).tolist() if found else []


def _integers(batch: Batch) -> dict[str, Tensor]:
    values = {one.name: getattr(batch, one.name) for one in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _read_microbatch(tensors: Mapping[str, Tensor]) -> _Microbatch:
    """The micro-batch that a peer has sent, checked."""
    ids, targets, memory = tensors.get(IDS), tensors.get(TARGETS), tensors.get(MEMORY)
    if ids is None or ids.ndim != 2 or targets is None or targets.shape != (2,) or int(targets.min()) < 0:
        raise FrameError("a micro-batch without ids or targets")
    names = {one.name for one in fields(Batch)} - {"num_targets"}
    planes = {name: tensors[name] for name in names & tensors.keys()}
    for name, plane in planes.items():
        num_alike = 1 if name in ("labels", "keys") else None
        if plane.is_floating_point() or plane.shape[:num_alike] != ids.shape[:num_alike]:
            raise FrameError(f"a micro-batch whose {name} do not fit its ids")
    if memory is not None and (memory.ndim != 3 or memory.shape[:2] != ids.shape):
        raise FrameError("a micro-batch whose memory does not fit its ids")
    num_targets, num_step_targets = targets.tolist()
    return _Microbatch(
        batch=Batch(num_targets=num_targets, **planes),
        num_step_targets=num_step_targets,
        arrived={name: tensors[name] for name in (HIDDEN, MEMORY) if name in tensors},
        cached=held_of(tensors) if HELD in tensors else None,
    )


def _num_tokens(batch: Batch) -> int:
    return batch.ids.numel() if batch.mask is None else int(batch.mask.sum())
