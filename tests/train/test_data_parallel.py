"""Data parallel between clouds in one process: a thread for each, joined by links in memory."""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.model.blueprint import Blueprint
from isthmus.model.load import build_stage
from isthmus.model.random import RngKey
from isthmus.model.stage import Batch, Stage, StageInput
from isthmus.plan.data import FACTS, data_scheduler
from isthmus.plan.membership import DataParallel, RoundEnded
from isthmus.plan.types import Event, Facts, Member, Outcome, Save, Stop
from isthmus.train.build import BuiltStage
from isthmus.train.data_parallel import DataParallelActor
from isthmus.train.device import Device
from isthmus.train.loop import Loop, OnEvent, save_nothing
from isthmus.train.optimizer import Optimizer, total_norm
from isthmus.train.outer import Outer, OuterRule, make_fragments
from isthmus.train.wire import Inbox, Wire
from isthmus.wan.memory import MemoryLink
from isthmus.wan.shaping import Shape
from tests.model.cases import SEED, blueprint, make_batch
from tests.train.chain import SCHEDULE, WEIGHT_DECAY, Given, Logged, Record, TakingTurns
from tests.train.reference import parameters_of, train_alone

CLOUDS = ("north", "east", "south", "west")
EXACT = OuterRule(sync="exact", codec="raw")
STREAMING = OuterRule(sync="streaming", codec="int4", learning_rate=0.7, momentum=0.9, mixing=0.5)
SPARSE = OuterRule(sync="sparse", codec="topk(0.015625) | int2", learning_rate=1.0, feedback=0.95)
MAX_NORM = 0.5


def spec(num_clouds: int, **more: Any) -> DataParallel:
    bare = DataParallel(
        clouds=tuple((Member(name),) for name in CLOUDS[:num_clouds]),
        num_steps=12,
        num_microbatches=2,
        sync_every=6,
        num_fragments=3,
        delay_steps=1,
        quorum=num_clouds,
        wait_s=60.0,
        adapts=False,
    )
    return replace(bare, **more)


def exact(num_clouds: int, **more: Any) -> DataParallel:
    return spec(num_clouds, num_steps=5, sync_every=1, num_fragments=1, delay_steps=0, **more)


def batches(plan: Blueprint, num_microbatches: int, *, num_steps: int) -> list[list[Batch]]:
    """Micro-batches of several lengths, all different."""
    lengths = ((9, 4), (3, 7), (5, 5), (8, 2))
    return [
        [
            make_batch(plan.head, lengths=lengths[(step + number) % 4], seed=100 * step + number)
            for number in range(num_microbatches)
        ]
        for step in range(num_steps)
    ]


@dataclass
class Cloud:
    """One cloud, ready to run."""

    member: Member
    stage: Any
    outer: Outer
    loop: Loop
    record: Record
    stopped: Stop | None = None


@dataclass
class Clouds:
    """Clouds that hold the same model, with a link between each two."""

    spec: DataParallel
    clouds: list[Cloud] = field(default_factory=list)
    links: dict[tuple[str, str], MemoryLink] = field(default_factory=dict)
    saved: list[tuple[Facts | None, dict[str, Tensor]]] = field(default_factory=list)

    def run(self, states: Sequence[Facts | None] = ()) -> None:
        with ThreadPoolExecutor(len(self.clouds)) as pool:
            starts = states or [None] * len(self.clouds)
            futures = [pool.submit(self._be, *one) for one in zip(self.clouds, starts, strict=True)]
            for future in futures:
                future.result(timeout=120)

    def _be(self, cloud: Cloud, state: Facts | None) -> None:
        try:
            with cloud.loop:
                cloud.stopped = cloud.loop.run(0, state)
        except BaseException as error:
            for pair, link in self.links.items():
                link.end(pair[0]).abort(repr(error))
            raise

    def rounds(self, index: int) -> list[RoundEnded]:
        return [one for one in self.clouds[index].record.told if isinstance(one, RoundEnded)]


def make(
    stack: ExitStack,
    plan: Blueprint,
    agreed: DataParallel,
    rule: OuterRule,
    steps: Sequence[Sequence[Batch]],
    *,
    shape: Shape | None = None,
    held_out: Sequence[Batch] = (),
    on_event: Callable[[Member, Event], None] = lambda _member, _event: None,
    on_save: Callable[[Cloud, Facts | None], None] = lambda _cloud, _facts: None,
) -> Clouds:
    """Each cloud reads its own micro-batches of every step."""
    found = Clouds(agreed)
    names = [cloud[0].cloud for cloud in agreed.clouds]
    for pair in combinations(names, 2):
        found.links[pair] = stack.enter_context(MemoryLink(*pair, shape=shape))
    lock = threading.Lock()
    number = agreed.num_microbatches
    for index, (member,) in enumerate(agreed.clouds):
        stage = build_stage(plan, range(plan.num_layers), seed=SEED, untie=True)
        optimizer = Optimizer(
            stage.parameters_by_name(), schedule=SCHEDULE, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM
        )
        fragments = make_fragments(stage.parameters_by_name(), plan.layout, agreed.num_fragments)
        outer = Outer(
            fragments, rule, schedule=SCHEDULE, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM, seed=SEED
        )
        own = [step[index * number : (index + 1) * number] for step in steps]
        record, inbox = Record(), Inbox()
        actor = DataParallelActor(
            agreed,
            member,
            BuiltStage(
                stage=TakingTurns(stage, lock),  # type: ignore[arg-type]
                optimizer=optimizer,
                device=Device("cpu"),
            ),
            outer,
            seed=11,
            on_span=record.span,
            source=Given(own, held_out),
        )
        wires = {
            Member(one): Wire(
                next(link for pair, link in found.links.items() if {*pair} == {member.cloud, one}).end(
                    member.cloud
                ),
                here=member,
                peer=Member(one),
                inbox=inbox,
                observer=record,
                facts=FACTS,
            )
            for one in names
            if one != member.cloud
        }
        cloud = Cloud(member, stage, outer, None, record)  # type: ignore[arg-type]
        cloud.loop = Loop(
            Logged(data_scheduler(agreed, member), record),
            actor,
            wires,
            inbox,
            tell=record.tell,
            save=functools.partial(save, cloud, on_save),
            on_event=lambda event, _now_s, member=member: on_event(member, event),  # type: ignore[misc]
        )
        found.clouds.append(cloud)
    return found


def save(
    cloud: Cloud, on_save: Callable[[Cloud, Facts | None], None], action: Save, done: OnEvent
) -> Callable[[], None]:
    on_save(cloud, action.facts)
    return save_nothing(action, done)


def run(agreed: DataParallel, rule: OuterRule, **more: Any) -> Clouds:
    plan = blueprint("llama", num_hidden_layers=3)
    steps = batches(plan, agreed.num_microbatches * len(agreed.clouds), num_steps=agreed.num_steps)
    with ExitStack() as stack:
        found = make(stack, plan, agreed, rule, steps, **more)
        found.run()
        return found


def check_same_outer(found: Clouds) -> None:
    """All clouds have applied the same rounds, and had the same bits after each."""
    first = [(one.number, one.digest, one.content) for one in found.rounds(0)]
    assert [number for number, _, _ in first] == list(range(found.spec.num_rounds))
    for index, cloud in enumerate(found.clouds):
        assert cloud.stopped is not None
        assert cloud.stopped.outcome is Outcome.FINISHED
        assert [(one.number, one.digest, one.content) for one in found.rounds(index)] == first
        for own, other in zip(cloud.outer.values, found.clouds[0].outer.values, strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize("num_clouds", [1, 2, 3, 4])
def test_exact_synchronisation_equals_one_process(num_clouds: int) -> None:
    plan = blueprint("llama", num_hidden_layers=3)
    agreed = exact(num_clouds)
    found = run(agreed, EXACT)
    stage = build_stage(plan, range(plan.num_layers), seed=SEED, untie=True)
    steps = batches(plan, 2 * num_clouds, num_steps=agreed.num_steps)
    rates = [SCHEDULE.at(step) for step in range(agreed.num_steps)]
    losses = train_alone(
        stage, steps, seed=11, learning_rates=rates, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM
    )
    check_same_outer(found)
    expected = parameters_of([stage])
    for cloud in found.clouds:
        for name, value in parameters_of([cloud.stage]).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6, msg=name)
    counts = [
        [sum(batch.num_targets for batch in step[2 * one : 2 * one + 2]) for step in steps]
        for one in range(num_clouds)
    ]
    for number, loss in enumerate(losses):
        told = [
            cloud.record.steps[number].loss * counts[one][number] for one, cloud in enumerate(found.clouds)
        ]
        assert sum(told) / sum(count[number] for count in counts) == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("rule", [STREAMING, SPARSE], ids=["streaming", "sparse"])
@pytest.mark.parametrize("num_clouds", [2, 3])
def test_outer_parameters_are_the_same_bits_everywhere(num_clouds: int, rule: OuterRule) -> None:
    agreed = spec(num_clouds, gathers=rule.gathers)
    found = run(agreed, rule)
    check_same_outer(found)


class Reference:
    """Streaming DiLoCo in one process, parameter by parameter."""

    def __init__(self, agreed: DataParallel, rule: OuterRule) -> None:
        plan = blueprint("llama", num_hidden_layers=3)
        self.agreed, self.rule, self.number = agreed, rule, len(agreed.clouds)
        self.stages = [
            build_stage(plan, range(plan.num_layers), seed=SEED, untie=True) for _ in agreed.clouds
        ]
        self.local = [parameters_in_place(stage) for stage in self.stages]
        self.outer = {name: one.clone() for name, one in self.local[0].items()}
        self.momentum = {name: torch.zeros_like(one) for name, one in self.outer.items()}
        self.optimizers = [
            Optimizer(
                one.parameters_by_name(), schedule=SCHEDULE, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM
            )
            for one in self.stages
        ]
        self.steps = batches(plan, 2 * self.number, num_steps=agreed.num_steps)
        self.parts: list[list[str]] = [[], [], []]
        for name in self.outer:
            self.parts[0 if "embed" in name else 1 if "layers" in name else 2].append(name)
        self.tokens = [[0] * self.number for _ in self.parts]
        self.unmixed: list[int] = []

    def run(self) -> None:
        for step in range(self.agreed.num_steps + 1):
            for one in range(self.number if step else 0):
                self.train(one, step - 1)
            for number in range(self.agreed.num_rounds):
                if self.agreed.due(number) == step:
                    if number - 3 in self.unmixed:
                        self.mix(number - 3)
                    self.take(number)
            for number in [*self.unmixed]:
                if step in (self.agreed.num_steps, self.agreed.due(number) + self.agreed.delay_steps):
                    self.mix(number)

    def train(self, one: int, step: int) -> None:
        own = self.steps[step][2 * one : 2 * one + 2]
        count = sum(batch.num_targets for batch in own)
        for item, batch in enumerate(own):
            key = RngKey(seed=11, step=step, microbatch=2 * one + item)
            self.stages[one](StageInput(batch=batch, rng_key=key)).backward(loss_weight=1 / count)
        self.optimizers[one].update(step, norm=total_norm(self.optimizers[one].squared_norms()))
        for fragment in self.tokens:
            fragment[one] += count

    def take(self, number: int) -> None:
        counts, self.tokens[number % 3] = self.tokens[number % 3], [0] * self.number
        self.unmixed.append(number)
        for name in self.parts[number % 3]:
            deltas = [
                (self.outer[name] - own[name]) * count / sum(counts)
                for own, count in zip(self.local, counts, strict=True)
            ]
            delta = torch.stack(deltas).sum(0)
            self.momentum[name] = self.rule.momentum * self.momentum[name] + delta
            change = delta + self.rule.momentum * self.momentum[name]
            self.outer[name] = self.outer[name] - self.rule.learning_rate * change

    def mix(self, number: int) -> None:
        self.unmixed.remove(number)
        for name in self.parts[number % 3]:
            for own in self.local:
                own[name].mul_(self.rule.mixing).add_((1 - self.rule.mixing) * self.outer[name])


def parameters_in_place(stage: Stage) -> dict[str, Tensor]:
    return {name: one.detach() for name, one in stage.model.named_parameters()}


@pytest.mark.parametrize("num_clouds", [1, 2, 3])
def test_streaming_is_the_published_algorithm(num_clouds: int) -> None:
    agreed = spec(num_clouds, delay_steps=2)
    rule = replace(STREAMING, codec="raw")
    found = run(agreed, rule)
    check_same_outer(found)
    expected_of = Reference(agreed, rule)
    expected_of.run()
    for cloud, expected in zip(found.clouds, expected_of.local, strict=True):
        for name, value in parameters_in_place(cloud.stage).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5, msg=name)
    for fragment, matrix in zip(found.clouds[0].outer.fragments, found.clouds[0].outer.values, strict=True):
        for name, value in fragment.pieces(matrix).items():
            torch.testing.assert_close(value, expected_of.outer[name], rtol=1e-3, atol=1e-5, msg=name)
