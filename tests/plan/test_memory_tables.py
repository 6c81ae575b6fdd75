"""Tables of memory: every spot is what the stage there needs, whatever the model and however it saves."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.job.sections import LoraSpec
from isthmus.plan.costs import Arithmetic, Figures, ModelCosts, PartSize, Precision, Stages, Workload
from isthmus.plan.memory import (
    MemoryUse,
    OptimizerState,
    Sharding,
    StageOptions,
    stage_memory,
    stages_memory,
)
from isthmus.plan.models import read_model
from tests.plan.jobs import two_clouds
from tests.plan.sizes import estimated

SMALL = Workload(num_sequences=1, sequence_length=64)
FIGURES = st.integers(0, 2**40)
HALVES = st.none() | st.builds(
    PartSize, num_parameters=FIGURES, num_trained=FIGURES, largest_trained=FIGURES, buffer_bytes=FIGURES
)
WORKLOADS = st.builds(
    Workload,
    num_sequences=st.integers(1, 3),
    sequence_length=st.sampled_from([16, 1000]),
    arithmetic=st.builds(
        Arithmetic,
        precision=st.sampled_from(Precision),
        on_accelerator=st.booleans(),
        is_gathered=st.booleans(),
    ),
    recompute=st.booleans(),
)


@st.composite
def savers_for(draw: st.DrawFn, workload: Workload) -> StageOptions:
    is_sharded = workload.arithmetic.is_gathered
    kinds = [Sharding.OPTIMIZER, Sharding.FULL] if is_sharded else [Sharding.NONE]
    return StageOptions(
        optimizer=draw(st.sampled_from(OptimizerState)),
        sharding=draw(st.sampled_from(kinds)),
        num_shards=draw(st.integers(1, 9)) if is_sharded else 1,
        offload_optimizer=draw(st.booleans()),
    )


@st.composite
def models(draw: st.DrawFn, workload: Workload) -> ModelCosts:
    """All of it is trained, its upper layers, or adapters."""
    num_layers = draw(st.integers(1, 7))
    model = estimated(
        num_hidden_layers=num_layers,
        hidden_size=draw(st.sampled_from([64, 8192])),
        num_attention_heads=4,
        num_key_value_heads=draw(st.sampled_from([2, 4])),
        tie_word_embeddings=draw(st.booleans()),
        num_experts=draw(st.sampled_from([None, 4])),
        num_frozen=draw(st.integers(0, num_layers)),
        lora=draw(st.none() | st.builds(LoraSpec, r=st.integers(1, 8))),
    )
    return model.costs(workload)


@st.composite
def mixtures(draw: st.DrawFn, workload: Workload) -> ModelCosts:
    """A model whose layers are those of two models in any order."""
    one, other = draw(models(workload)), draw(models(workload))
    kinds = st.sampled_from([*one.layers, *other.layers])
    layers = draw(st.lists(kinds, min_size=1, max_size=7))
    return replace(one, layers=tuple(layers), arrival_bytes=one.arrival_bytes[:1] * len(layers))


def every_stage(
    costs: ModelCosts, options: StageOptions, *, up: PartSize | None = None, down: PartSize | None = None
) -> MemoryUse[Figures]:
    stages = Stages.every(costs.num_layers)
    ends = ((up, ~stages.are_first), (down, ~stages.are_last))
    halves = [(half, where) for half, where in ends if half is not None]
    return stages_memory(costs, stages, window=1, options=options, halves=halves)


def check(
    costs: ModelCosts, options: StageOptions, *, up: PartSize | None = None, down: PartSize | None = None
) -> None:
    """Every spot of the tables is what the stage there needs, to the byte."""
    tables, size = every_stage(costs, options, up=up, down=down), costs.num_layers + 1
    standing, least = tables.standing_bytes, tables.least_bytes()
    for start, stop in combinations(range(size), 2):
        ends = up if start > 0 else None, down if stop < size - 1 else None
        halves = [one for one in ends if one is not None]
        memory = stage_memory(costs, range(start, stop), window=1, options=options, halves=halves)
        for name in ("activations", "working", "update"):
            figures = np.broadcast_to(getattr(tables, name), (size, size))
            assert figures[start, stop] == getattr(memory, name)
        assert standing[start, stop] == memory.standing_bytes
        if memory.activations:
            assert least[start, stop] == memory.total_bytes


@settings(deadline=None)
@given(st.data(), WORKLOADS, HALVES, HALVES)
def test_every_spot_is_what_the_stage_there_needs(
    data: st.DataObject, workload: Workload, up: PartSize | None, down: PartSize | None
) -> None:
    costs = data.draw(models(workload))
    check(costs, data.draw(savers_for(workload)), up=up, down=down)


@settings(deadline=None)
@given(st.data(), WORKLOADS)
def test_layers_may_come_in_any_order(data: st.DataObject, workload: Workload) -> None:
    costs = data.draw(mixtures(workload))
    check(costs, data.draw(savers_for(workload)))


@settings(deadline=None, max_examples=20)
@given(st.data(), WORKLOADS)
def test_an_encoder_and_a_decoder_are_one_model(data: st.DataObject, workload: Workload) -> None:
    halves = {
        key: {"model_type": model_type, "num_hidden_layers": data.draw(st.integers(1, 3))}
        for key, model_type in (("encoder", "bert"), ("decoder", "roberta"))
    }
    model = read_model(two_clouds(), {"model_type": "encoder-decoder", **halves})
    check(model.costs_of(workload), data.draw(savers_for(workload)))


def test_what_a_stage_keeps_depends_on_its_first_layer() -> None:
    costs = estimated(num_hidden_layers=8).costs(SMALL)
    arrival_bytes = [1000.0 * layer for layer in range(8)]
    each = every_stage(replace(costs, arrival_bytes=tuple(arrival_bytes)), StageOptions()).activations
    assert each[4, 7] == each[1, 4] + 3000


@settings(deadline=None)
@given(st.data(), st.integers(1, 7))
def test_figures_of_stages_are_those_of_their_parts(data: st.DataObject, num_layers: int) -> None:
    values = st.lists(st.integers(-5, 2**50), min_size=num_layers + 2, max_size=num_layers + 2)
    figures = data.draw(values)
    stages = Stages.every(num_layers)
    found = [stages.total(figures), stages.largest(figures)]
    for start, stop in combinations(range(num_layers + 1), 2):
        parts = parts_of(figures, start, stop)
        one = Stages.one(range(start, stop), num_layers=num_layers)
        assert [table[start, stop] for table in found] == [sum(parts), max(parts)]
        assert [one.total(figures), one.largest(figures)] == [sum(parts), max(parts)]
        highest = max(sum(parts[: place + 1]) + other for place, other in enumerate(parts))
        assert stages.peak(figures, figures)[start, stop] == one.peak(figures, figures) == highest


def parts_of(figures: Sequence[int], start: int, stop: int) -> Sequence[int]:
    first, *layers, last = figures
    embedding = [first] if start == 0 else []
    head = [last] if stop == len(layers) else []
    return [*embedding, *layers[start:stop], *head]


@pytest.mark.parametrize("sharding", Sharding)
def test_a_model_of_any_size_is_too_large_rather_than_small(sharding: Sharding) -> None:
    model = estimated(num_hidden_layers=3, hidden_size=2**70)
    arithmetic = Arithmetic(is_gathered=sharding is not Sharding.NONE, on_accelerator=False)
    costs = model.costs(replace(SMALL, arithmetic=arithmetic, recompute=True))
    for optimizer in OptimizerState:
        options = StageOptions(
            sharding=sharding, num_shards=2 if arithmetic.is_gathered else 1, optimizer=optimizer
        )
        fitting = every_stage(costs, options).num_fitting(2**50)
        assert not any(fitting[start, stop] for start, stop in combinations(range(4), 2))
        assert stage_memory(costs, range(2), window=1, options=options).total_bytes > 2**140
