"""Below frozen layers nothing goes back, and what was there before does not cross again."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from isthmus.errors import FrameError
from isthmus.job.codec import parse_codec
from isthmus.model.blueprint import Blueprint
from isthmus.model.stage import Batch
from isthmus.plan.codecs import Pair
from isthmus.plan.job_facts import first_trained
from isthmus.plan.types import Member
from isthmus.train.device import Device
from isthmus.train.frozen_cache import Admission, Cache
from isthmus.train.pipeline import PipelineConfig
from tests.model.cases import blueprint, make_batch
from tests.train.chain import (
    CLOUDS,
    SCHEDULE,
    WEIGHT_DECAY,
    Chain,
    CutCase,
    Given,
    chain,
    config,
    make_stages,
)
from tests.train.reference import assert_same, parameters_of, train_across
from tests.train.resuming import keep_all, take_up
from tests.train.test_exactness import batches

CACHE_BYTES = 1 << 20
# How many stages, how many layers are frozen, and so how many stages; and what is cached.
CASES = [
    (3, 2, 1, 0), (2, 2, 1, CACHE_BYTES), (3, 2, 1, CACHE_BYTES),
    (4, 2, 2, CACHE_BYTES), (2, 1, 0, CACHE_BYTES), (2, 4, 1, CACHE_BYTES),
]  # fmt: skip


def epochs(plan: Blueprint, *, num_steps: int) -> list[list[Batch]]:
    """The same two steps again and again."""
    two = batches(plan, 3, num_steps=2)
    return [two[step % 2] for step in range(num_steps)]


def agreed_on(num_stages: int, num_frozen: int, **changes: Any) -> PipelineConfig:
    cuts = (CutCase(),) * (num_stages - 1)
    return config(num_stages, 3, **{"cuts": cuts, "first_trained": num_frozen, **changes})


def trained(
    plan: Blueprint, agreed: PipelineConfig, steps: Sequence[Sequence[Batch]], num_frozen_layers: int
) -> Chain:
    with chain(plan, agreed, num_frozen_layers=num_frozen_layers) as found:
        found.run(Given(steps))
        for number, link in enumerate(found.links):
            streams = link.end(CLOUDS[number + 1]).counters().sent
            assert ("backward" in streams) == (number >= agreed.pipeline.first_trained)
    return found


@pytest.mark.parametrize(("num_stages", "num_layers", "num_frozen", "cache_bytes"), CASES)
def test_frozen_stages_equal_one_process(
    num_stages: int, num_layers: int, num_frozen: int, cache_bytes: int
) -> None:
    plan = blueprint("llama")
    steps = epochs(plan, num_steps=5)
    agreed = agreed_on(num_stages, num_frozen, cache_bytes=cache_bytes)
    stages = make_stages(plan, agreed, num_frozen_layers=num_layers)
    train_across(
        stages,
        steps,
        cuts=(CutCase(),) * (num_stages - 1),
        seed=11,
        learning_rates=[SCHEDULE.at(step) for step in range(5)],
        weight_decay=WEIGHT_DECAY,
        max_norm=0.5,
    )
    found = trained(plan, agreed, steps, num_layers)
    assert_same(parameters_of(found.stages), parameters_of(stages))
    crossed = [sum(one.num_elements for one in found.records[0].steps if one.step >= 2)]
    assert (crossed == [0]) == (cache_bytes > 0 and num_frozen > 0)


@pytest.mark.parametrize(("num_stages", "num_layers", "num_frozen"), [(2, 2, 1), (4, 2, 2)])
def test_a_cache_that_is_full_lets_the_rest_cross(num_stages: int, num_layers: int, num_frozen: int) -> None:
    plan = blueprint("llama")
    steps = epochs(plan, num_steps=4)
    row_bytes = 4 * plan.config.hidden_size
    small = agreed_on(num_stages, num_frozen, cache_bytes=20 * row_bytes, num_steps=4)
    found = trained(plan, small, steps, num_layers)
    plain = trained(plan, agreed_on(num_stages, num_frozen, num_steps=4), steps, num_layers)
    assert_same(parameters_of(found.stages), parameters_of(plain.stages))
    for record in found.records[:num_frozen]:
        first, *_, last = (one.num_elements for one in record.steps)
        assert 0 < last < first
    cache = found.wires[num_frozen][Member(CLOUDS[num_frozen - 1])].cache
    assert cache is not None
    assert 0 < cache.admission.held_bytes <= 20 * row_bytes
    assert cache.saved_bytes > 0


def test_sequences_are_known_wherever_they_come_again() -> None:
    plan = blueprint("llama")
    both = make_batch(plan.head, lengths=(5, 5), seed=1)
    third, fourth = (make_batch(plan.head, lengths=(5, 5), seed=seed) for seed in (2, 3))

    def mixed(one: Batch, other: Batch) -> Batch:
        ids = torch.stack([one.ids[0], other.ids[1]])
        return Batch(ids=ids, labels=ids.clone(), num_targets=plan.head.num_targets(ids))

    steps = [[both, third, fourth], [mixed(both, third), mixed(third, fourth), mixed(fourth, both)]]
    agreed = agreed_on(2, 1, cache_bytes=CACHE_BYTES, num_steps=2)
    found = trained(plan, agreed, steps, 2)
    assert [one.num_elements for one in found.records[0].steps] == [30 * 16, 0]


def test_codecs_and_evaluation_go_with_the_cache() -> None:
    plan = blueprint("llama")
    steps = epochs(plan, num_steps=4)
    held_out = batches(plan, 2, num_steps=1)[0]
    pair = Pair(forward=parse_codec("rotate | int8"), backward=parse_codec("raw"))
    options = {
        "cuts": (CutCase(codecs=pair),),
        "num_steps": 4,
        "evaluate_every": 2,
        "num_validation_microbatches": 2,
        "evaluates_without_codecs": True,
    }
    found = [
        trained_with(plan, agreed_on(2, 1, cache_bytes=size, **options), steps, held_out)
        for size in (0, CACHE_BYTES)
    ]
    assert_same(parameters_of(found[1].stages), parameters_of(found[0].stages))
    losses = [[(one.is_plain, one.loss) for one in run.records[0].evaluations] for run in found]
    assert losses[0] == losses[1]
    assert [is_plain for is_plain, _ in losses[0]] == [False, True] * 2


def trained_with(
    plan: Blueprint, agreed: PipelineConfig, steps: Sequence[Sequence[Batch]], held_out: Sequence[Batch]
) -> Chain:
    with chain(plan, agreed, num_frozen_layers=2) as found:
        found.run(Given(steps, held_out))
    return found


@pytest.mark.parametrize(("num_stages", "num_layers", "num_frozen"), [(2, 2, 1), (4, 2, 2)])
def test_a_resumed_run_starts_with_an_empty_cache_at_both_ends(
    num_stages: int, num_layers: int, num_frozen: int
) -> None:
    plan = blueprint("llama")
    steps = epochs(plan, num_steps=5)
    agreed = agreed_on(num_stages, num_frozen, cache_bytes=CACHE_BYTES)
    with chain(plan, agreed, num_frozen_layers=num_layers) as whole:
        kept = keep_all(whole)
        whole.run(Given(steps))
    with chain(plan, agreed, num_frozen_layers=num_layers) as resumed:
        resumed.run(Given(steps), first_step=2, states=take_up(resumed, kept, 2))
    assert_same(parameters_of(resumed.stages), parameters_of(whole.stages))
    assert [one.num_elements > 0 for one in resumed.records[0].steps] == [True, True, False]


def test_the_sender_is_held_to_the_rule() -> None:
    batch = make_batch(blueprint("llama").head, lengths=(3, 2))
    assert batch.mask is not None
    integers = {"ids": batch.ids, "mask": batch.mask}
    without, with_padding = (
        Admission(max_bytes=100, row_bytes=10, keeps_padding=keeps) for keeps in (False, True)
    )
    sequences = without.know(integers)
    assert sequences.valid_BT.sum(1).tolist() == [3, 2]
    assert sequences.keys == without.know(integers).keys
    assert sequences.keys != with_padding.know(integers).keys
    with pytest.raises(FrameError, match="cache"):
        Cache(without).complete(None, {**integers, "held": torch.tensor([0])}, Device("cpu").side_stream())


def test_the_first_trained_stage() -> None:
    layers = (range(2), range(2, 3), range(3, 5))
    assert [first_trained(layers, count) for count in range(6)] == [0, 0, 1, 2, 2, 2]
