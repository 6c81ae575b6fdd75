import gc
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.model.blueprint import split_layers
from isthmus.model.random import RngKey
from isthmus.model.recompute import (
    ActivationSlot,
    Budgeted,
    Fixed,
    InputSize,
    Meter,
    fewest,
)
from isthmus.model.stage import Batch, Stage, StageInput, StageOutput
from tests.model.cases import (
    CONFIGS,
    RNG_KEY,
    assert_identical,
    blueprint,
    build,
    make_batch,
    run_pass,
)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(-5, 400))
def test_the_fewest_layers_that_free_enough_are_chosen(freed: list[int], needed_bytes: int) -> None:
    chosen = fewest(dict(enumerate(freed)), needed_bytes)
    counts = [
        count
        for count in range(len(freed) + 1)
        for some in itertools.combinations(freed, count)
        if sum(some) >= needed_bytes
    ]
    if counts:
        assert sum(freed[layer] for layer in chosen) >= needed_bytes
        assert len(chosen) == min(counts)
    else:
        assert chosen == {layer for layer, one in enumerate(freed) if one}


def test_among_equal_layers_the_earlier_recompute() -> None:
    assert fewest(dict.fromkeys(range(6), 10), 25) == {0, 1, 2}


# A memory in which everything is as a budget is to believe, and that remembers its peak.


@dataclass
class World:
    """Layers with given sizes and costs, run as a pipeline runs them."""

    bytes_per_token: Sequence[float]
    bytes_per_pair: Sequence[float]
    input_bytes_per_token: float = 4.0
    beside_bytes_per_token: float = 10.0
    standing_bytes: int = 5_000
    peak_bytes: float = 0.0
    num_recomputed: int = 0
    num_measured: int = 0
    kept: dict[int, float] = field(default_factory=dict)

    def own_bytes(self, layer: int, size: InputSize) -> float:
        return self.bytes_per_token[layer] * size.num_tokens + self.bytes_per_pair[layer] * size.num_pairs

    def input_bytes(self, size: InputSize) -> float:
        return self.input_bytes_per_token * size.num_tokens

    def beside_bytes(self, size: InputSize) -> float:
        return self.beside_bytes_per_token * size.num_tokens

    def forward(self, number: int, size: InputSize, slot: ActivationSlot) -> None:
        layers = range(len(self.bytes_per_token))
        recomputed = frozenset(layers) if slot.meter is not None else slot.recomputed
        own = sum(self.own_bytes(layer, size) for layer in layers if layer not in recomputed)
        self.kept[number] = len(layers) * self.input_bytes(size) + own + self.beside_bytes(size)
        self.num_recomputed += len(recomputed)
        if slot.meter is not None:
            self.num_measured += 1
            slot.measured(GivenMeter(self, size))
        self._look(self.beside_bytes(size))

    def backward(self, number: int, size: InputSize, slot: ActivationSlot) -> None:
        self._look(2 * self.beside_bytes(size))
        self.kept[number] -= self.beside_bytes(size)
        for layer in reversed(range(len(self.bytes_per_token))):
            own = self.own_bytes(layer, size)
            is_recomputed = slot.meter is not None or layer in slot.recomputed
            self._look(own * (2 if is_recomputed else 1))
            self.kept[number] -= self.input_bytes(size) + (0 if is_recomputed else own)
        del self.kept[number]
        slot.end()

    def _look(self, working_bytes: float) -> None:
        self.peak_bytes = max(self.peak_bytes, self.standing_bytes + sum(self.kept.values()) + working_bytes)


class GivenMeter(Meter):
    def __init__(self, world: World, size: InputSize) -> None:
        super().__init__()
        self.world = world
        self.size = size
        inputs = int(world.input_bytes(size))
        for layer in range(len(world.bytes_per_token)):
            self.input_bytes[layer] = inputs
            self.kept_bytes[layer] = inputs + int(world.own_bytes(layer, size))

    @property
    def beside_bytes(self) -> int:
        return int(self.world.beside_bytes(self.size))


def train(world: World, recompute: Budgeted | Fixed, lengths: Sequence[int], *, window: int) -> None:
    """Fill the window, then one back and one forward, as a stage does."""
    in_flight: list[tuple[int, InputSize, ActivationSlot]] = []
    for number, length in enumerate(lengths):
        if len(in_flight) == window:
            world.backward(*in_flight.pop(0))
        size = InputSize(2, length)
        slot = recompute.begin(size, window=window)
        world.forward(number, size, slot)
        in_flight.append((number, size, slot))
    for one in in_flight:
        world.backward(*one)


def budgeted(world: World, budget_bytes: int, **options: int) -> Budgeted:
    return Budgeted(budget_bytes=budget_bytes, standing_bytes=lambda: world.standing_bytes, **options)


def worlds() -> st.SearchStrategy[World]:
    layers = st.integers(2, 12)
    per_token = layers.flatmap(lambda n: st.lists(st.floats(10, 60), min_size=n, max_size=n))
    return st.builds(
        lambda tokens, pair: World(bytes_per_token=tokens, bytes_per_pair=[pair] * len(tokens)),
        per_token,
        st.floats(0, 0.05),
    )


@settings(max_examples=60, deadline=None)
@given(worlds(), st.lists(st.integers(16, 400), min_size=20, max_size=60), st.integers(1, 5), st.floats(0, 1))
def test_no_step_is_over_a_budget_that_can_be_kept(
    world: World, lengths: list[int], window: int, between: float
) -> None:
    largest, num_layers = InputSize(2, 400), len(world.bytes_per_token)
    least = window * (num_layers * world.input_bytes(largest) + world.beside_bytes(largest))
    own = [world.own_bytes(layer, largest) for layer in range(num_layers)]
    working = max(2 * (max(own) + world.input_bytes(largest)), 2 * world.beside_bytes(largest))
    lowest = 1.05 * (world.standing_bytes + least + working)
    budget = int(lowest + between * window * sum(own))
    train(world, budgeted(world, budget, max_length=400), lengths, window=window)
    assert world.peak_bytes <= budget


def test_only_what_is_needed_is_recomputed() -> None:
    lengths = [320, 480, 720, 1600, 240, 400, *[280, 360, 440, 500] * 10, 1600]
    nothing, some = (World([30.0] * 8, [0.0] * 8) for _ in range(2))
    train(nothing, Fixed(), lengths, window=2)
    budget = int(0.7 * nothing.peak_bytes)
    train(some, budgeted(some, budget, max_length=1600), lengths, window=2)
    assert some.peak_bytes <= budget < nothing.peak_bytes
    after_measuring = some.num_recomputed - 8 * some.num_measured
    assert some.num_measured == 6
    assert 0 < after_measuring <= 8


def test_one_length_is_measured_twice_and_room_is_used() -> None:
    world = World([30.0] * 8, [0.1] * 8)
    train(world, budgeted(world, 10**9), [128] * 12, window=3)
    assert world.num_measured == 2
    assert world.num_recomputed == 16


def test_a_budget_that_cannot_be_kept_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World([30.0] * 4, [0.0] * 4)
    train(world, budgeted(world, 6_000), [100] * 8, window=2)
    assert world.num_recomputed == 4 * 8
    (record,) = caplog.records
    assert "too small even with everything recomputed" in record.getMessage()


# The real thing.


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "bert"])
def test_any_layers_may_recompute_without_a_trace(model_type: str) -> None:
    plan = blueprint(model_type)
    batch = make_batch(plan.head)
    (whole,) = build(plan, [range(plan.num_layers)], untie=True)
    expected = run_pass([whole], batch)
    for count in range(1, plan.num_layers + 1):
        for layers in itertools.combinations(range(plan.num_layers), count):
            whole.zero_grad()
            whole.recompute = Fixed(frozenset(layers))
            found = run_pass([whole], batch)
            assert torch.equal(found.loss, expected.loss)
            assert_identical(found.grads, expected.grads)


class Switching:
    """Recomputes other layers each time, and measures some."""

    def __init__(self) -> None:
        self.count = 0
        self.num_ended = 0
        self.meters: list[Meter] = []

    def begin(self, size: InputSize, *, window: int) -> ActivationSlot:  # noqa: ARG002
        self.count += 1
        meter = Meter() if self.count % 2 else None
        layers = frozenset(layer for layer in range(4) if (self.count >> layer) & 1)
        return ActivationSlot(recomputed=layers, meter=meter, measured=self.meters.append, end=self._end)

    def _end(self) -> None:
        self.num_ended += 1


def microbatches(
    stage: Stage, batches: Sequence[Batch], crossings: Sequence[Tensor | None]
) -> list[StageOutput]:
    """All forwards, then all backwards, so that several are in flight."""
    outputs = [
        stage(StageInput(batch=batch, crossing=crossing, rng_key=RngKey(seed=7, step=0, microbatch=number)))
        for number, (batch, crossing) in enumerate(zip(batches, crossings, strict=True))
    ]
    for output, batch in zip(outputs, batches, strict=True):
        grad = None if output.crossing is None else torch.ones_like(output.crossing)
        output.backward(grad=grad, loss_weight=1 / batch.num_targets)
    return outputs


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3", "electra"])
@pytest.mark.parametrize("autocast", [False, True])
def test_choices_and_measuring_leave_no_trace_with_several_in_flight(model_type: str, autocast: bool) -> None:
    plan = blueprint(model_type)
    batches = [make_batch(plan.head, lengths=(3 + n, 9 - n), seed=n) for n in range(5)]
    switching = Switching()
    for index in range(2):
        layers = split_layers(plan.num_layers, 2)[index]
        grads = []
        for recompute in (Fixed(), switching):
            (stage,) = build(plan, [layers], untie=True)
            stage.recompute = recompute
            hidden = [
                torch.ones(*batch.ids.shape, 16).requires_grad_() if index else None for batch in batches
            ]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                microbatches(stage, batches, hidden)
            grads.append({name: p.grad for name, p in stage.model.named_parameters()})
        assert_identical(grads[1], grads[0])
    assert switching.num_ended == switching.count == 10
    assert len(switching.meters) == 5


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_layer_keeps_what_its_graph_holds(model_type: str) -> None:
    """What a meter says of a layer is what a pass that keeps the layer saves more than one that does not."""
    plan = blueprint(model_type, num_hidden_layers=2)
    batch = make_batch(plan.head)
    (stage,) = build(plan, [range(2)], untie=True)
    measured: list[Meter] = []
    stage.recompute = Measuring(measured)
    stage(StageInput(batch=batch, rng_key=RNG_KEY)).backward()
    (meter,) = measured
    assert meter.kept_bytes.keys() == meter.input_bytes.keys() == {0, 1}
    standing = [*stage.parameters(), *stage.buffers()]
    kept = Meter()
    stage.recompute = Fixed()
    with kept.beside(lambda: standing):
        stage(StageInput(batch=batch, rng_key=RNG_KEY))
    inputs = sum(meter.input_bytes.values())
    total = meter.beside_bytes + sum(meter.kept_bytes.values())
    assert total == pytest.approx(kept.beside_bytes, abs=inputs + 0.1 * total)
    assert all(meter.kept_bytes[layer] > meter.input_bytes[layer] > 0 for layer in range(2))


def test_what_a_meter_ran_is_freed_at_once() -> None:
    weight = torch.ones(3, requires_grad=True)
    alive: list[weakref.ref[Tensor]] = []

    def run() -> Tensor:
        output = (weight * 2).exp()  # an operation that keeps its own output
        alive.append(weakref.ref(output))
        return output

    meter = Meter()
    gc.disable()
    try:
        meter.run_layer(0, run, hidden=torch.ones(3), others=[weight])
        with meter.beside(lambda: [weight]):
            run()
    finally:
        gc.enable()
    assert [one() for one in alive] == [None] * 2
    assert meter.kept_bytes[0] == meter.beside_bytes == 12


@dataclass
class Measuring:
    meters: list[Meter]

    def begin(self, size: InputSize, *, window: int) -> ActivationSlot:  # noqa: ARG002
        return ActivationSlot(meter=Meter(), measured=self.meters.append)


def test_a_budget_drives_a_stage_and_evaluation_takes_no_room() -> None:
    plan = blueprint("llama")
    (plain,) = build(plan, [range(4)], untie=True)
    (stage,) = build(plan, [range(4)], untie=True)
    budget = Budgeted(budget_bytes=200_000, standing_bytes=lambda: 40_000)
    stage.recompute = budget
    for step in range(8):
        batch = make_batch(plan.head, lengths=(4 + 3 * step, 5), seed=step)
        for one in (plain, stage):
            output = one(StageInput(batch=batch, rng_key=RNG_KEY, window=2))
            output.backward(loss_weight=1 / batch.num_targets)
        with torch.no_grad():
            assert stage(StageInput(batch=batch, rng_key=RNG_KEY)).slot == ActivationSlot()
    assert_identical(
        {name: p.grad for name, p in stage.model.named_parameters()},
        {name: p.grad for name, p in plain.model.named_parameters()},
    )
    assert not budget._in_flight
