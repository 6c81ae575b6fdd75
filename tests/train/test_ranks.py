"""Clouds of several ranks train like one process, whatever their sizes, sharded and not."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.plan.pipeline import Policy
from isthmus.train.sharding import Sharding
from tests.model.cases import blueprint
from tests.train.ranks import Case, Crew, Found, whole_model
from tests.train.test_exactness import alone

# Sums of float32 in another order; a weight moves by up to 3e-3 a step.
ATOL = 2e-6


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew() as ready:
        yield ready


def assert_like_one_process(case: Case, found: dict[tuple[str, int], Found]) -> None:
    expected, losses = alone(blueprint(case.model), case.steps(), autocast=case.autocast)
    parameters = whole_model(found, case.ranks)
    for name, value in expected.items():
        np.testing.assert_allclose(parameters[name], value.numpy(), rtol=0, atol=ATOL, err_msg=name)
    assert found["north", 0].losses == pytest.approx(losses, rel=1e-5)


SIZES = [(2, 1), (1, 2), (2, 2), (3, 1)]


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.OPTIMIZER])
@pytest.mark.parametrize("ranks", SIZES, ids=str)
def test_clouds_of_any_size_equal_one_process(crew: Crew, ranks: tuple[int, ...], sharding: Sharding) -> None:
    case = Case(ranks=ranks, sharding=sharding)
    found = crew.run(case)
    assert_like_one_process(case, found)
    norms = [one.norms for one in found.values()]
    assert all(one == norms[0] for one in norms)


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.OPTIMIZER])
def test_ranks_without_a_micro_batch_take_part(crew: Crew, sharding: Sharding) -> None:
    case = Case(ranks=(3, 1), num_microbatches=2, num_steps=2, sharding=sharding)
    found = crew.run(case)
    assert sorted(found["north", rank].num_passes for rank in range(3)) == [1, 1, 2]
    assert_like_one_process(case, found)


@pytest.mark.parametrize("policy", [Policy.GPIPE, Policy.ONE_F_ONE_B])
def test_ranks_in_lock_step_may_share_out_every_layer(crew: Crew, policy: Policy) -> None:
    case = Case(
        ranks=(2, 2), sharding=Sharding.FULL, policy=policy, num_microbatches=4, num_held_out=3, num_steps=2
    )
    assert_like_one_process(case, crew.run(case))


@pytest.mark.parametrize("policy", [Policy.GPIPE, Policy.ONE_F_ONE_B])
def test_every_policy_has_an_order_for_clouds_of_unequal_size(crew: Crew, policy: Policy) -> None:
    case = Case(ranks=(1, 2, 1), policy=policy, num_microbatches=5, num_steps=2)
    assert_like_one_process(case, crew.run(case))


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.OPTIMIZER])
def test_evaluations_are_shared_among_ranks_and_leave_no_trace(crew: Crew, sharding: Sharding) -> None:
    case = Case(ranks=(1, 3), num_held_out=4, sharding=sharding)
    found = crew.run(case)
    assert_like_one_process(case, found)
    validation = found["north", 0].validation
    assert [num_targets for _, num_targets in validation] == [
        sum(batch.num_targets for batch in case.held_out())
    ] * 2
    single = crew.run(Case(ranks=(1, 1), num_held_out=4))["north", 0].validation
    for (loss_sum, _), (expected, _) in zip(validation, single, strict=True):
        assert loss_sum == pytest.approx(expected, rel=1e-5)


CODECS = [("int4(stochastic)", "int4(stochastic)"), ("svd(0.5)", "topk(0.2) | int8"), ("subspace(4)", "raw")]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.OPTIMIZER])
def test_a_resumed_run_of_several_ranks_ends_the_same_to_the_bit(
    crew: Crew, codec: tuple[str, str], sharding: Sharding, tmp_path: Path
) -> None:
    case = Case(
        ranks=(2, 2) if codec is CODECS[0] else (2, 1), codec=codec, sharding=sharding, folder=tmp_path
    )
    expected = whole_model(crew.run(case), case.ranks)
    resumed = whole_model(crew.run(replace(case, first_step=2)), case.ranks)
    assert expected.keys() == resumed.keys()
    assert all((resumed[name] == value).all() for name, value in expected.items())


def test_bfloat16_is_gathered_and_float32_is_kept(crew: Crew) -> None:
    case = Case(ranks=(2, 1), sharding=Sharding.OPTIMIZER, autocast=torch.bfloat16)
    found = crew.run(case)
    expected, losses = alone(blueprint(case.model), case.steps(), autocast=case.autocast)
    parameters = whole_model(found, case.ranks)
    assert all(one.dtype == np.float32 for one in parameters.values())
    assert found["north", 0].losses == pytest.approx(losses, rel=5e-3)
    moved = max(float(np.abs(parameters[name] - one.numpy()).max()) for name, one in expected.items())
    assert 0 < moved < 2e-2
