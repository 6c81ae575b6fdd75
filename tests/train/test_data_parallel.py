"""Data parallel between clouds in one process: a thread for each, joined by links in memory."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.errors import Aborted, BadUpdate, IsthmusError, LinkError
from isthmus.model.blueprint import Blueprint
from isthmus.model.load import build_stage
from isthmus.model.random import RngKey
from isthmus.model.stage import Batch, Stage, StageInput
from isthmus.plan.data import FACTS, data_scheduler
from isthmus.plan.end_of_step import total_norm
from isthmus.plan.membership import DataParallel, RoundEnded
from isthmus.plan.types import (
    Done,
    Event,
    Facts,
    Joined,
    Lost,
    Member,
    Message,
    MessageKind,
    Outcome,
    Save,
    Stop,
    WorkKind,
)
from isthmus.train.build import BuiltStage
from isthmus.train.data_parallel import DataParallelActor
from isthmus.train.device import Device, Mark
from isthmus.train.loop import Loop, OnEvent, save_nothing
from isthmus.train.optimizer import Optimizer
from isthmus.train.outer import Outer, OuterRule, make_fragments
from isthmus.train.wire import Inbox, Wire
from isthmus.wan.memory import MemoryLink
from isthmus.wan.shaping import Shape
from tests.model.cases import SEED, blueprint
from tests.train.chain import SCHEDULE, WEIGHT_DECAY, Given, Logged, Record, TakingTurns
from tests.train.reference import parameters_of, train_alone
from tests.train.test_exactness import batches

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


@dataclass
class Cloud:
    """One cloud, ready to run."""

    member: Member
    stage: Any
    optimizer: Optimizer
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
                if cloud.member.cloud in pair:
                    link.end(cloud.member.cloud).abort(repr(error))
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
    on_save: Callable[[Cloud, int, Facts | None], None] = lambda _cloud, _step, _facts: None,
    inboxes: dict[Member, Inbox] | None = None,
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
        if inboxes is not None:
            inboxes[member] = inbox
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
        cloud = Cloud(member, stage, optimizer, outer, None, record)  # type: ignore[arg-type]
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
    cloud: Cloud, on_save: Callable[[Cloud, int, Facts | None], None], action: Save, done: OnEvent
) -> Callable[[], None]:
    on_save(cloud, action.step, action.facts)
    return save_nothing(action, done)


def run(
    agreed: DataParallel,
    rule: OuterRule,
    *,
    begin: Callable[[Cloud], Facts | None] = lambda _: None,
    **more: Any,
) -> Clouds:
    plan = blueprint("llama", num_hidden_layers=3)
    steps = batches(plan, agreed.num_microbatches * len(agreed.clouds), num_steps=agreed.num_steps)
    with ExitStack() as stack:
        found = make(stack, plan, agreed, rule, steps, **more)
        found.run([begin(cloud) for cloud in found.clouds])
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


@pytest.mark.parametrize("num_clouds", [1, 3])
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


@pytest.mark.parametrize("num_clouds", [1, 3])
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


@pytest.mark.parametrize("rule", [STREAMING, SPARSE], ids=["streaming", "sparse"])
def test_bytes_on_the_wire_are_those_of_the_formula(rule: OuterRule) -> None:
    """Streaming: 2 (R - 1) / R of 4.25 bits; sparse: R - 1 times 0.2227 bit; of whole rows of 4096 each."""
    agreed = spec(3, gathers=rule.gathers)
    found = run(agreed, rule)
    check_same_outer(found)
    rows = [one.num_rows for one in found.clouds[0].outer.fragments]
    all_rows = sum(rows[agreed.fragment(number)] for number in range(agreed.num_rounds))
    num_received = 0
    for cloud in found.clouds:
        spans = [one for one in cloud.record.spans if one.kind == "transfer"]
        assert {one.name.split()[0] for one in spans} == ({"delta"} if rule.gathers else {"delta", "commit"})
        num_received += sum(one.num_bytes for one in spans)
    if rule.gathers:
        expected = 3 * 2 * all_rows * (64 * (12 + 2) + 16) / 8
    else:
        # Each shard goes to its owner from two others, and from it to two others.
        expected = 2 * 2 * all_rows * 4096 * (4 + 16 / 64) / 8
    assert num_received == expected


@dataclass
class Kept:
    """What one cloud saved at a step."""

    facts: Facts | None
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    outer: dict[str, Tensor]


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in tensors.items()}


@pytest.mark.parametrize("rule", [STREAMING, SPARSE, EXACT], ids=["streaming", "sparse", "exact"])
def test_a_run_that_continues_ends_with_the_same_bits(rule: OuterRule) -> None:
    make_spec = exact if rule.sync == "exact" else spec
    agreed = make_spec(2, gathers=rule.gathers, save_every_s=0.0)
    kept: dict[Member, dict[int, Kept]] = {}

    def keep(cloud: Cloud, step: int, facts: Facts | None) -> None:
        one = Kept(
            facts,
            copies(cloud.stage.tensors_by_name()),
            copies(cloud.optimizer.tensors()),
            copies(cloud.outer.tensors()),
        )
        kept.setdefault(cloud.member, {})[step] = one

    whole = run(agreed, rule, on_save=keep)
    every = list(kept.values())
    assert every[0].keys() == every[1].keys()
    step = sorted(every[0])[len(every[0]) // 2]
    assert 0 < step < agreed.num_steps

    def take_up(cloud: Cloud) -> Facts | None:
        saved = kept[cloud.member][step]
        with torch.no_grad():
            for name, tensor in cloud.stage.tensors_by_name().items():
                tensor.copy_(saved.weights[name])
            for name, tensor in cloud.outer.tensors().items():
                tensor.copy_(saved.outer[name])
        cloud.optimizer.load_tensors(copies(saved.moments))
        return saved.facts

    again = run(agreed, rule, begin=take_up)
    for one, other in zip(whole.clouds, again.clouds, strict=True):
        for values, expected in zip(one.outer.values, other.outer.values, strict=True):
            assert torch.equal(values, expected)
        first, second = (copies(cloud.stage.tensors_by_name()) for cloud in (one, other))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_cloud_that_is_lost_and_returns_is_brought_up_to_date() -> None:
    """The others continue at once; it gets the donor's state, and all end with the same bits."""
    agreed = spec(3, num_steps=48, quorum=2, grace_s=30.0)
    lost, others = Member("south"), (Member("north"), Member("east"))
    inboxes: dict[Member, Inbox] = {}
    seen: list[str] = []

    def on_event(member: Member, event: Event) -> None:
        if member != others[0] or not isinstance(event, Done) or event.work.kind is not WorkKind.OUTER:
            return
        # What a session reports when a cloud is lost, and when it has met the others again.
        if event.work.step == 4 and "lost" not in seen:
            seen.append("lost")
            for one in others:
                inboxes[one].put(Lost(lost))
                inboxes[lost].put(Lost(one))
        if event.work.step == 12 and "joined" not in seen:
            seen.append("joined")
            for one in others:
                inboxes[one].put(Joined(lost))
                inboxes[lost].put(Joined(one))

    found = run(agreed, STREAMING, on_event=on_event, inboxes=inboxes)
    assert seen == ["lost", "joined"]
    last = [cloud.outer.values for cloud in found.clouds]
    for own in last[1:]:
        assert all(torch.equal(one, other) for one, other in zip(own, last[0], strict=True))
    contents = [{one.number: one.content for one in found.rounds(index)} for index in range(3)]
    for told in contents[1:]:
        assert all(contents[0][number] == content for number, content in told.items())
    assert len(contents[2]) < len(contents[0]) == agreed.num_rounds
    sent = [one for one in found.clouds[2].record.spans if one.name.startswith("state")]
    assert sent
    assert any(len(one.shares) == 2 for one in found.rounds(0))
    assert len(found.rounds(0)[-1].shares) == 3


# What one cloud does wrong is named, and never in the outer parameters of the others.


def not_a_number(coded: Tensor) -> Tensor:
    return torch.full((coded.numel() // 4,), torch.nan).view(torch.uint8)


def shortened(coded: Tensor) -> Tensor:
    return coded[: coded.numel() // 2]


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        pytest.param(not_a_number, "not finite", id="nan"),
        pytest.param(shortened, "of another shape", id="shape", marks=pytest.mark.slow),
    ],
)
def test_an_update_that_cannot_be_used_is_in_no_round_and_its_cloud_is_named(
    spoil: Callable[[Tensor], Tensor], what: str
) -> None:
    """The others continue without that cloud; nothing of it is in their parameters."""
    agreed = spec(3, quorum=2, grace_s=30.0, wait_s=10.0)
    with ExitStack() as stack:
        plan = blueprint("llama", num_hidden_layers=3)
        steps = batches(plan, 6, num_steps=agreed.num_steps)
        inboxes: dict[Member, Inbox] = {}
        refused: list[tuple[Member, LinkError]] = []
        found = make(stack, plan, agreed, replace(STREAMING, codec="raw"), steps, inboxes=inboxes)
        (bad,) = [cloud for cloud in found.clouds if cloud.member.cloud == "south"]
        tensors = bad.loop.actor.tensors

        def spoilt(message: Message) -> tuple[Mapping[str, Tensor], Mark]:
            found, mark = tensors(message)
            is_spoilt = message.kind is MessageKind.DELTA and message.to != (bad.member,)
            return {name: spoil(one) if is_spoilt else one for name, one in found.items()}, mark

        bad.loop.actor.tensors = spoilt  # type: ignore[method-assign]

        def refuse(cloud: str, lost: Member, error: LinkError) -> None:
            """As a session does, at once for all clouds."""
            refused.append((lost, error))
            for one in {"north", "east"} - {cloud}:
                inboxes[Member(one)].put(Lost(lost))
            for one in ("north", "east"):
                found.links[one, "south"].end(one).start_abort(Aborted(one, error.message))

        for cloud in found.clouds[:2]:
            cloud.loop.on_lost = functools.partial(refuse, cloud.member.cloud)
        with pytest.raises(LinkError, match=f"aborted the run: .*south.* its update of round [01] .*{what}"):
            found.run()
    assert {lost for lost, _ in refused} == {bad.member}
    assert all(isinstance(error, BadUpdate | Aborted) for _, error in refused)
    for index, cloud in enumerate(found.clouds[:2]):
        assert cloud.stopped is not None
        assert [one.number for one in found.rounds(index)] == list(range(agreed.num_rounds))
        # The first fragment has rows for one owner alone, who may have used none of that cloud.
        assert all(share.cloud != 2 for one in found.rounds(index)[1:] for share in one.shares)
        assert all(bool(one.isfinite().all()) for one in cloud.outer.values)
        assert torch.equal(cloud.outer.values[0], found.clouds[0].outer.values[0])


def test_a_cloud_stops_with_its_name_rather_than_send_what_is_not_finite() -> None:
    def ruin(cloud: Cloud) -> None:
        if cloud.member.cloud == "east":
            next(iter(parameters_in_place(cloud.stage).values())).fill_(torch.nan)

    with pytest.raises(IsthmusError, match="the parameters of cloud 'east' are not finite in round 0"):
        run(spec(2, wait_s=2.0), STREAMING, begin=ruin)


@pytest.mark.slow
def test_clouds_with_other_weights_are_named() -> None:
    """As when one of them has other files behind model.source."""

    def change(cloud: Cloud) -> None:
        if cloud.member.cloud == "east":
            cloud.outer.values[1][0, 0] += 1.0

    with pytest.raises(IsthmusError, match=r"clouds .* have other parameters after 2 rounds") as found:
        run(spec(3, wait_s=6.0), STREAMING, begin=change)
    assert "'east'" in str(found.value)
