"""Clouds of several ranks train like one process, whatever their sizes, sharded and not."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.job.sections import LoraSpec
from isthmus.model.costs import MeasuredModel, Training
from isthmus.plan.costs import Arithmetic, Precision, stream_bytes
from isthmus.plan.memory import OptimizerState, Sharding
from isthmus.plan.scenario import Policy
from isthmus.plan.types import Outcome
from isthmus.train.records import DiskStore, Records
from tests.model.cases import blueprint
from tests.train.ranks import Case, Crew, Found, whole_model
from tests.train.test_exactness import alone

# Trees of processes.
pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("policy", [Policy.GPIPE, Policy.ONE_F_ONE_B, Policy.LOCK_STEP])
def test_ranks_in_lock_step_may_share_out_every_layer(crew: Crew, policy: Policy) -> None:
    case = Case(
        ranks=(2, 2), sharding=Sharding.FULL, policy=policy, num_microbatches=4, num_held_out=4, num_steps=2
    )
    assert_like_one_process(case, crew.run(case))


@pytest.mark.parametrize("policy", [Policy.GPIPE, Policy.ONE_F_ONE_B, Policy.LOCK_STEP])
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


def test_codecs_that_the_guard_has_changed_are_those_of_all_ranks_and_of_a_resumed_run(
    crew: Crew, tmp_path: Path
) -> None:
    coarse = Case(ranks=(2, 2), codec=("int2", "int4(stochastic)"), num_steps=4)
    case = replace(coarse, guard_every=1, folder=tmp_path)
    expected = whole_model(crew.run(case), case.ranks)
    for first_step in (1, 2):
        resumed = whole_model(crew.run(replace(case, first_step=first_step)), case.ranks)
        assert all((resumed[name] == value).all() for name, value in expected.items())
    unguarded = whole_model(crew.run(coarse), case.ranks)
    assert not all((unguarded[name] == value).all() for name, value in expected.items())


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.OPTIMIZER])
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 1), (2, 2))], ids=str)
def test_another_number_of_ranks_goes_on_from_what_was_saved(
    crew: Crew, before: tuple[int, ...], after: tuple[int, ...], sharding: Sharding, tmp_path: Path
) -> None:
    case = Case(ranks=before, sharding=sharding, folder=tmp_path)
    expected = whole_model(crew.run(case), before)
    found = whole_model(crew.run(replace(case, ranks=after, first_step=2)), after)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=ATOL, err_msg=name)


def test_bfloat16_is_gathered_and_float32_is_kept(crew: Crew) -> None:
    case = Case(ranks=(2, 1), sharding=Sharding.OPTIMIZER, autocast=torch.bfloat16)
    found = crew.run(case)
    expected, losses = alone(blueprint(case.model), case.steps(), autocast=case.autocast)
    parameters = whole_model(found, case.ranks)
    assert all(one.dtype == np.float32 for one in parameters.values())
    assert found["north", 0].losses == pytest.approx(losses, rel=5e-3)
    moved = max(float(np.abs(parameters[name] - one.numpy()).max()) for name, one in expected.items())
    assert 0 < moved < 2e-2


# Wide enough for moments in 8 bits, whose blocks end where the parts of two and of three ranks do.
WIDE = {"hidden_size": 96, "intermediate_size": 96, "vocab_size": 96}
# A moment at the edge between two codes may fall to either side.
COARSE_ATOL = 2e-4


EIGHT_BIT = Case(
    ranks=(3, 1), sharding=Sharding.OPTIMIZER, optimizer_state=OptimizerState.EIGHT_BIT, changes=WIDE
)


def test_moments_in_8_bits_are_shared_out(crew: Crew) -> None:
    found = whole_model(crew.run(EIGHT_BIT), (3, 1))
    for name, value in whole_model(crew.run(replace(EIGHT_BIT, ranks=(1, 1))), (1, 1)).items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=COARSE_ATOL, err_msg=name)


def test_shared_moments_in_8_bits_are_saved_whole_and_go_on_to_the_bit(crew: Crew, tmp_path: Path) -> None:
    # The embedding's parts end within a block on three ranks.
    case = replace(EIGHT_BIT, changes={**WIDE, "vocab_size": 80}, num_steps=2, folder=tmp_path)
    expected = whole_model(crew.run(case), case.ranks)
    manifest = Records(DiskStore(tmp_path)).manifest("step-00000001/north")
    saved = manifest.tensors
    assert saved["optimizer/exp_avg/model.embed_tokens.weight"].shape == (80, 96)
    assert saved["optimizer/exp_avg.codes/model.layers.0.mlp.gate_proj.weight"].shape == (96, 96)
    assert saved["optimizer/exp_avg.scale/model.layers.0.mlp.gate_proj.weight"].shape == (
        12,
        96 * 96 // 256 // 12,
    )
    assert {len(one.pieces) for name, one in saved.items() if name.startswith("optimizer/exp_avg")} >= {3}
    assert all(one.is_whole for one in saved.values())
    resumed = whole_model(crew.run(replace(case, first_step=1)), case.ranks)
    assert all((resumed[name] == value).all() for name, value in expected.items())


ADAPTED = Case(ranks=(1, 1), lora=LoraSpec(r=4, alpha=8.0), num_microbatches=4, num_held_out=4)


@pytest.fixture(scope="module")
def adapted(crew: Crew) -> dict[str, Any]:
    return whole_model(crew.run(ADAPTED), (1, 1))


def test_adapters_are_shared_out(crew: Crew, adapted: dict[str, Any], tmp_path: Path) -> None:
    case = replace(ADAPTED, ranks=(1, 3), sharding=Sharding.OPTIMIZER, folder=tmp_path)
    found = whole_model(crew.run(case), case.ranks)
    for name, value in adapted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=ATOL, err_msg=name)
    resumed = whole_model(crew.run(replace(case, first_step=2)), case.ranks)
    assert all((resumed[name] == value).all() for name, value in found.items())


@pytest.mark.parametrize(("autocast", "atol"), [(None, ATOL), (torch.bfloat16, 2e-2)], ids=str)
def test_adapters_are_shared_out_layer_by_layer(
    crew: Crew, adapted: dict[str, Any], autocast: torch.dtype | None, atol: float
) -> None:
    case = replace(
        ADAPTED, ranks=(2, 2), sharding=Sharding.FULL, policy=Policy.ONE_F_ONE_B, autocast=autocast
    )
    found = whole_model(crew.run(case), case.ranks)
    for name, value in adapted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=atol, err_msg=name)
        assert (found[name] == value).all() == (".lora_" not in name), name


@pytest.mark.parametrize("sharding", [Sharding.OPTIMIZER, Sharding.FULL])
def test_shares_in_host_memory_change_nothing(crew: Crew, sharding: Sharding, tmp_path: Path) -> None:
    case = Case(ranks=(2, 2), sharding=sharding, policy=Policy.ONE_F_ONE_B, num_microbatches=4, num_steps=2)
    expected = whole_model(crew.run(case), case.ranks)
    offloaded = replace(case, offload=True, folder=tmp_path)
    for one in (offloaded, replace(offloaded, first_step=1)):
        found = whole_model(crew.run(one), case.ranks)
        assert all((found[name] == value).all() for name, value in expected.items())


# Begun with the mean and directions drawn from the seed, both ends are what one process would have.
DRAWN = Case(ranks=(1, 1), boundary="bottleneck(5, init=random, anchor=none, warmup=1)", num_held_out=2)


@pytest.fixture(scope="module")
def narrowed(crew: Crew) -> dict[str, Any]:
    return whole_model(crew.run(DRAWN), (1, 1))


@pytest.mark.parametrize(
    ("ranks", "sharding"),
    [((3, 1), Sharding.NONE), ((1, 2, 1), Sharding.OPTIMIZER), ((2, 2), Sharding.OPTIMIZER)],
    ids=str,
)
def test_bottlenecks_begin_alike_at_all_ranks(
    crew: Crew, narrowed: dict[str, Any], ranks: tuple[int, ...], sharding: Sharding
) -> None:
    case = replace(DRAWN, ranks=ranks, sharding=sharding)
    found = crew.run(case)
    parameters = whole_model(found, ranks)
    if len(ranks) > 2:
        narrowed = whole_model(crew.run(replace(DRAWN, ranks=(1,) * len(ranks))), (1,) * len(ranks))
    for name, value in narrowed.items():
        if ".observed." not in name:
            np.testing.assert_allclose(parameters[name], value, rtol=0, atol=ATOL, err_msg=name)


def test_ranks_in_lock_step_may_have_a_bottleneck(crew: Crew) -> None:
    case = replace(DRAWN, num_microbatches=4, policy=Policy.ONE_F_ONE_B, autocast=torch.bfloat16)
    expected = whole_model(crew.run(case), (1, 1))
    found = whole_model(crew.run(replace(case, ranks=(2, 2), sharding=Sharding.FULL)), (2, 2))
    for name, value in expected.items():
        if ".observed." not in name:
            np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-2, err_msg=name)


@pytest.mark.parametrize("first_step", [1, 2, 3])
def test_what_ranks_have_observed_is_taken_up_again(crew: Crew, first_step: int, tmp_path: Path) -> None:
    case = Case(
        ranks=(2, 1),
        boundary="bottleneck(5, warmup=2)",
        sharding=Sharding.OPTIMIZER,
        num_steps=4,
        folder=tmp_path,
    )
    expected = whole_model(crew.run(case), case.ranks)
    assert all(np.isfinite(value).all() for value in expected.values())
    resumed = whole_model(crew.run(replace(case, first_step=first_step)), case.ranks)
    assert all((resumed[name] == value).all() for name, value in expected.items())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.OPTIMIZER])
def test_what_crosses_has_the_bytes_that_plans_count(
    crew: Crew, sharding: Sharding, autocast: torch.dtype | None
) -> None:
    case = Case(ranks=(2, 1), sharding=sharding, autocast=autocast, num_steps=1)
    sent_bytes = sum(one.sent_bytes for one in crew.run(case).values())
    precision = Precision.FLOAT32 if autocast is None else Precision.BFLOAT16
    counted = MeasuredModel(case.blueprint, Training()).table.messages
    is_narrow = counted.leave_narrow(
        Arithmetic(precision=precision), is_sharded=sharding is not Sharding.NONE
    )
    assert is_narrow == (autocast is not None and sharding is not Sharding.NONE)
    planned_bytes = 0
    for batch in case.steps()[0]:
        num_tokens = batch.ids.numel() if batch.mask is None else int(batch.mask.sum())
        payload_bytes = num_tokens * case.blueprint.config.hidden_size * stream_bytes(is_narrow=is_narrow)
        planned_bytes += counted.forward_bytes(payload_bytes, num_tokens=num_tokens)
        planned_bytes += counted.backward_bytes(payload_bytes)
    # Headers of messages this short vary by some digits and lengths.
    assert sent_bytes == pytest.approx(planned_bytes, rel=0.05)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_budget_is_kept_where_ranks_share_and_changes_nothing(
    crew: Crew, autocast: torch.dtype | None
) -> None:
    case = Case(ranks=(2, 1), sharding=Sharding.OPTIMIZER, autocast=autocast)
    expected = whole_model(crew.run(case), case.ranks)
    for budget_bytes in (1, 10**12):
        found = whole_model(crew.run(replace(case, budget_bytes=budget_bytes)), case.ranks)
        assert all((found[name] == value).all() for name, value in expected.items())


@pytest.mark.parametrize(
    ("ranks", "sharding", "who"),
    [
        ((2, 1), Sharding.NONE, ("north", 1)),
        ((1, 3), Sharding.OPTIMIZER, ("east", 2)),
        ((2, 2), Sharding.FULL, ("east", 0)),
    ],
    ids=str,
)
def test_an_interruption_of_any_rank_saves_a_common_step_at_all(
    crew: Crew, ranks: tuple[int, ...], sharding: Sharding, who: tuple[str, int], tmp_path: Path
) -> None:
    case = Case(
        ranks=ranks,
        sharding=sharding,
        policy=Policy.ONE_F_ONE_B if sharding is Sharding.FULL else Policy.WAN_ONE_F_ONE_B,
        num_microbatches=4,
        num_steps=4,
        codec=CODECS[0],
        folder=tmp_path,
    )
    found = crew.run(replace(case, interrupted=(*who, 0)))
    assert {one.outcome for one in found.values()} == {Outcome.INTERRUPTED}
    (step,) = {one.saved[-1] for one in found.values()}
    assert 1 <= step <= 3
    resumed = whole_model(crew.run(replace(case, first_step=step)), ranks)
    expected = whole_model(crew.run(replace(case, folder=None)), ranks)
    assert all((resumed[name] == value).all() for name, value in expected.items())
