"""Generators and a discriminator in one process: a thread for each, joined by links in memory."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.heads import DETECTION, HEADS
from isthmus.model.load import build_stage
from isthmus.model.stage import Stage
from isthmus.plan.feed import FACTS, GeneratorDiscriminator, feed_scheduler
from isthmus.plan.types import Facts, Member, Message, Save, Stop, Work
from isthmus.train.build import BuiltStage
from isthmus.train.data.samples import LabelledSequence, MaskedSamples, Pick
from isthmus.train.device import Device, Mark
from isthmus.train.generator import (
    BatchForm,
    DiscriminatorActor,
    GeneratorActor,
    KeptBatches,
    MaskedBatches,
    WholeModel,
)
from isthmus.train.loop import Loop, OnEvent, save_nothing
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.train.wire import Inbox, Wire
from isthmus.wan.memory import MemoryLink
from isthmus.wan.shaping import Shape
from tests.model.cases import COMMON, CONFIGS, PAD, SEED, VOCABULARY_SIZE
from tests.train.chain import Logged, Record

FORM = BatchForm(num_sequences=3, sequence_length=12, vocabulary_size=VOCABULARY_SIZE, pad_id=PAD)
MASK = 3
JUDGE = Member("judge")
SCHEDULE = Schedule(peak=3e-3, num_steps=12, num_warmup_steps=2)
MAX_NORM = 0.5


@dataclass(frozen=True)
class Words:
    """Sequences of several lengths, of a language of its own."""

    language: int

    def __len__(self) -> int:
        return 7

    def read(self, pick: Pick) -> LabelledSequence:
        drawn = np.random.default_rng([self.language, pick.index])
        ids = drawn.integers(4, VOCABULARY_SIZE, size=int(drawn.integers(4, FORM.sequence_length + 1)))
        return LabelledSequence(ids=ids, labels=ids)


def source(language: int) -> MaskedBatches:
    samples = MaskedSamples(
        samples=Words(language),
        seed=language,
        mask_id=MASK,
        special_ids=(PAD, 2, MASK),
        num_tokens=VOCABULARY_SIZE,
        to_mask_share=1.0,
    )
    return MaskedBatches(samples=samples, seed=language, num_sequences=3, pad_id=PAD)


def stage(*, is_generator: bool, **changes: Any) -> Stage:
    head = HEADS["masked-lm"] if is_generator else DETECTION
    values = {"model_type": "bert", **COMMON, **CONFIGS["bert"], **changes}
    plan = fresh_blueprint(values, head=head, num_labels=None if is_generator else 1)
    return build_stage(plan, range(plan.num_layers), seed=SEED)


@dataclass(frozen=True)
class TakingTurns:
    """An actor that shares the generators of the process with others, and so computes alone."""

    actor: Any
    lock: threading.Lock

    def run(self, work: Work) -> Facts | None:
        with self.lock:
            facts: Facts | None = self.actor.run(work)
            return facts

    def tensors(self, message: Message) -> tuple[Mapping[str, Tensor], Mark]:
        found: tuple[Mapping[str, Tensor], Mark] = self.actor.tensors(message)
        return found

    def take(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        self.actor.take(message, tensors)

    def drop(self, message: Message) -> None:
        self.actor.drop(message)


@dataclass
class Saved:
    """What a member needs to go on from a step."""

    step: int
    facts: Facts | None
    tensors: dict[str, Tensor]
    moments: dict[str, Tensor]
    kept: dict[str, Tensor]


@dataclass
class Trainee:
    """One member: its model, its actor, and what it has saved."""

    member: Member
    stage: Stage
    optimizer: Optimizer
    actor: Any
    kept: KeptBatches | None = None
    record: Record = field(default_factory=Record)
    saves: list[Saved] = field(default_factory=list)
    stop: Stop | None = None

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.stage.model.named_parameters()}

    def save(self, action: Save, done: OnEvent) -> Callable[[], None]:
        kept = self.kept.tensors() if self.kept is not None else {}
        self.saves.append(
            Saved(
                action.step,
                action.facts,
                self.parameters,
                {name: one.clone() for name, one in self.optimizer.tensors().items()},
                {name: one.clone() for name, one in kept.items()},
            )
        )
        return save_nothing(action, done)

    def load(self, saved: Saved) -> None:
        with torch.no_grad():
            for name, one in self.stage.model.named_parameters():
                one.copy_(saved.tensors[name])
        self.optimizer.load_tensors({name: one.clone() for name, one in saved.moments.items()})
        for name, one in saved.kept.items():
            self.kept.tensors()[name].copy_(one)  # type: ignore[union-attr]


def trainee(spec: GeneratorDiscriminator, member: Member, loss_weights: Sequence[float] = ()) -> Trainee:
    index = spec.generator_of(member.cloud)
    own = stage(is_generator=index is not None, **({} if index is None else {"num_hidden_layers": 1 + index}))
    optimizer = Optimizer(own.parameters_by_name(), schedule=SCHEDULE, weight_decay=0.1, max_norm=MAX_NORM)
    built = BuiltStage(stage=own, optimizer=optimizer, device=Device("cpu"))
    model = WholeModel(built, seed=20 + (index or 0), track=member.cloud, on_span=lambda _: None)
    if index is None:
        leaders = [one.members[0] for one in spec.generators]
        weights = loss_weights or [1.0] * len(leaders)
        return Trainee(member, own, optimizer, DiscriminatorActor(model, FORM, leaders, loss_weights=weights))
    kept = KeptBatches(spec.max_kept, FORM)
    actor = GeneratorActor(model, FORM, source(index), kept, seed=index, temperature=1.0)
    return Trainee(member, own, optimizer, actor, kept)


def train(
    spec: GeneratorDiscriminator,
    shapes: Sequence[Shape],
    *,
    resumed: Mapping[Member, Saved] | None = None,
    loss_weights: Sequence[float] = (),
    send: Mapping[Member, Any] | None = None,
) -> dict[Member, Trainee]:
    """Train all members over links of these shapes, from what they had saved if anything.

    Members in `send` are played by the test, which gets their end of the link.
    """
    lock, found = threading.Lock(), {}
    for member in spec.members:
        if member not in (send or {}):
            found[member] = trainee(spec, member, loss_weights)
            if resumed is not None:
                found[member].load(resumed[member])
    with ExitStack() as stack:
        links = {
            one.members[0]: stack.enter_context(MemoryLink("judge", one.members[0].cloud, shape=shape))
            for one, shape in zip(spec.generators, shapes, strict=True)
        }
        with ThreadPoolExecutor(len(spec.members)) as pool:

            def be(member: Member) -> None:
                ends = {
                    peer: link.end(member.cloud) for peer, link in links.items() if member in (JUDGE, peer)
                }
                peers = {(peer if member == JUDGE else JUDGE): end for peer, end in ends.items()}
                try:
                    if send is not None and member in send:
                        send[member](peers[JUDGE])
                    else:
                        _run(spec, found[member], peers, lock, (resumed or {}).get(member))
                except BaseException as error:
                    for link in links.values():
                        link.end(member.cloud if member != JUDGE else "judge").abort(repr(error))
                    raise

            for future in [pool.submit(be, member) for member in spec.members]:
                future.result(timeout=120)
    return found


def _run(
    spec: GeneratorDiscriminator,
    own: Trainee,
    links: Mapping[Member, Any],
    lock: threading.Lock,
    saved: Saved | None,
) -> None:
    inbox = Inbox()
    wires = {
        peer: Wire(link, here=own.member, peer=peer, inbox=inbox, observer=own.record, facts=FACTS)
        for peer, link in links.items()
    }
    scheduler = Logged(feed_scheduler(spec, own.member), own.record)
    actor = TakingTurns(own.actor, lock)
    with Loop(scheduler, actor, wires, inbox, tell=own.record.tell, save=own.save) as loop:
        own.stop = loop.run(saved.step if saved else 0, saved.facts if saved else None)
