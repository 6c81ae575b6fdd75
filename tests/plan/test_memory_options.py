"""Memory options are taken no more than needed, only those that a run accepts, and runs do as planned."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.job import Job, PipelineStrategy
from isthmus.job.load import parse_job
from isthmus.plan.job_facts import check_lock_step, cloud_facts
from isthmus.plan.memory import Sharding
from isthmus.plan.plan import (
    Form,
    PipelineSettings,
    Plan,
    decisions_of,
    follow,
    plan_to_json,
    planned_changes,
)
from isthmus.plan.planner import plan
from isthmus.plan.scenario import Policy
from isthmus.plan.study import MemoryOptions, Setting, memory_levels, study
from isthmus.plan.times import exchange_s
from tests.plan.jobs import THIRD_CLOUD, TWO_CLOUDS, link, two_clouds

PIPELINE = "strategy.kind=pipeline"
RANKS = ("cloud.east.ranks=4", "cloud.west.ranks=4")
LOCK_STEP = (PIPELINE, "strategy.policy=lock-step")


def with_memory(size: str, *changes: str) -> Job:
    return two_clouds(f"cloud.east.memory={size}", f"cloud.west.memory={size}", *changes)


def shardings(chosen: Plan) -> list[Sharding]:
    return [stage.sharding for stage in chosen.stages]


def microbatches(chosen: Plan) -> int:
    assert isinstance(chosen.settings, PipelineSettings)
    return chosen.settings.num_microbatches


def test_ranks_hold_copies_where_these_fit() -> None:
    chosen = plan(two_clouds(PIPELINE, *RANKS), is_quick=True)
    assert shardings(chosen) == [Sharding.NONE] * 2
    assert chosen.memory_words == ()
    assert chosen.memory_options == MemoryOptions()


def test_ranks_share_a_stage_out_where_copies_do_not_fit() -> None:
    chosen = plan(with_memory("7 GiB", PIPELINE, *RANKS), is_quick=True)
    assert shardings(chosen) == [Sharding.OPTIMIZER] * 2
    assert chosen.memory_words == ("sharding inside the cloud",)
    assert chosen.decisions is not None
    assert chosen.decisions.sharding == ("optimizer", "optimizer")


@pytest.mark.parametrize(("precision", "most"), [("bfloat16", 0.8), ("float32", 1.0)])
def test_a_shared_stage_keeps_its_stream_as_it_computes(precision: str, most: float) -> None:
    def kept_bytes(sharding: str) -> float:
        sharded = (f"cloud.east.sharding={sharding}", f"cloud.west.sharding={sharding}")
        fixed = ("strategy.layers=[6, 6]", "strategy.microbatches=16", f"train.precision={precision}")
        first = plan(two_clouds(PIPELINE, *RANKS, *sharded, *fixed), is_quick=True).stages[0]
        return first.memory["activations"] / first.window

    share = kept_bytes("optimizer") / kept_bytes("none")
    assert share == 1.0 if most == 1.0 else 0.5 < share < most


def test_what_the_job_says_of_a_cloud_is_kept() -> None:
    given_one = ("cloud.east.sharding=none", "cloud.west.sharding=optimizer")
    tight = plan(with_memory("7 GiB", PIPELINE, *RANKS, *given_one), is_quick=True)
    roomy = plan(two_clouds(PIPELINE, *RANKS, *given_one), is_quick=True)
    for chosen in (tight, roomy):
        found = dict(zip(chosen.clouds, shardings(chosen), strict=True))
        assert found == {"east": Sharding.NONE, "west": Sharding.OPTIMIZER}


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    sharding=st.tuples(*[st.sampled_from(["auto", "none", "optimizer"])] * 2),
    recompute=st.sampled_from(["true", "false", "auto"]),
    saver=st.sampled_from([(), ("train.optimizer_bits=8",), ("train.offload_optimizer=true",)]),
)
def test_no_level_is_one_that_a_run_refuses(
    ranks: tuple[int, int], sharding: tuple[str, str], recompute: str, saver: tuple[str, ...]
) -> None:
    names = ("east", "west")
    overrides = [f"cloud.{name}.ranks={number}" for name, number in zip(names, ranks, strict=True)]
    overrides += [f"cloud.{name}.sharding={one}" for name, one in zip(names, sharding, strict=True)]
    job = two_clouds(*overrides, f"train.recompute={recompute}", *saver)
    clouds = cloud_facts(job)
    found = memory_levels(job, clouds, Policy.WAN_ONE_F_ONE_B)
    assert len(found) == len(set(found))
    for level in found:
        for cloud, one in zip(clouds, sharding, strict=True):
            is_kept = one == "auto" or level.sharding_at(cloud) == one
            assert is_kept or cloud.num_ranks == 1
            assert level.sharding_at(cloud) is not Sharding.FULL, "ranks are not in lock-step"
        assert not (level.offload_optimizer and level.optimizer_bits == 8)
        assert level.recompute or recompute != "true"
    assert found[0].recompute == (recompute == "true"), "auto asks for nothing"


def test_a_last_resort_is_taken_only_where_nothing_else_fits() -> None:
    assert plan(with_memory("7 GiB", PIPELINE), is_quick=True).memory_words == ("recompute",)
    chosen = plan(with_memory("4 GiB", PIPELINE), is_quick=True)
    assert chosen.memory_options == MemoryOptions(recompute=True, offload_optimizer=True)
    small = plan(with_memory("4 GiB", PIPELINE, "train.offload_optimizer=false", *RANKS), is_quick=True)
    assert shardings(small) == [Sharding.OPTIMIZER] * 2


def test_a_last_resort_may_spare_a_stage() -> None:
    chosen = plan(with_memory("12 GiB"))
    by_form = {one.form: one.memory_words for one in reversed(chosen.runners_up)}
    assert (chosen.form, chosen.memory_words) == (Form.PIPELINE, ())
    assert by_form[Form.ALONE] == ("optimizer on the host",)
    assert Form.DATA not in by_form, "as many clouds as the pipeline, which needs no last resort"


def test_the_memory_of_a_cpu_is_not_spared_by_its_host() -> None:
    job = two_clouds("cloud.east.device=cpu", "cloud.east.accelerator=cpu")
    east, west = cloud_facts(job)
    on_host = next(
        one for one in memory_levels(job, (east, west), Policy.WAN_ONE_F_ONE_B) if one.offload_optimizer
    )
    assert not on_host.at(east).offload_optimizer
    assert on_host.at(west).offload_optimizer


def test_ranks_in_lock_step_share_out_everything_where_they_must() -> None:
    roomy = plan(two_clouds(*LOCK_STEP, *RANKS), is_quick=True)
    assert shardings(roomy) == [Sharding.NONE] * 2
    tight = plan(with_memory("2500 MiB", *LOCK_STEP, *RANKS), is_quick=True)
    assert shardings(tight) == [Sharding.FULL] * 2
    assert all(one % 4 == 0 for one in (microbatches(roomy), microbatches(tight)))


@pytest.mark.parametrize("given", [(), (PIPELINE,)], ids=["auto", "pipeline"])
def test_ranks_get_into_step_by_themselves_where_only_that_fits(given: tuple[str, ...]) -> None:
    job = with_memory("2500 MiB", *given, *RANKS)
    chosen = plan(job, is_quick=True)
    assert isinstance(chosen.settings, PipelineSettings)
    assert chosen.settings.policy is Policy.LOCK_STEP
    assert shardings(chosen) == [Sharding.FULL] * 2
    assert "in lock-step" in chosen.what
    written = planned_changes(job, chosen)
    assert written["strategy"]["policy"] == "lock-step"
    assert all(written[f"cloud.{name}"] == {"sharding": "full"} for name in ("east", "west"))
    assert chosen.decisions is not None
    assert chosen.decisions.policy == "lock-step"


def test_ranks_are_not_in_step_where_others_are_as_fast() -> None:
    chosen = plan(two_clouds(PIPELINE, *RANKS), is_quick=True)
    assert isinstance(chosen.settings, PipelineSettings)
    assert chosen.settings.policy is Policy.WAN_ONE_F_ONE_B


def test_a_policy_of_the_job_is_kept_and_named_where_it_is_in_the_way() -> None:
    own = ("strategy.policy=wan-1f1b",)
    with pytest.raises(UserError, match="nothing fits") as caught:
        plan(with_memory("2500 MiB", PIPELINE, *RANKS, *own))
    assert 'set strategy.policy to "lock-step"' in (caught.value.hint or "")
    assert plan(with_memory("2500 MiB", PIPELINE, *RANKS, "strategy.policy=lock-step"), is_quick=True)
    with pytest.raises(UserError, match="needs ranks in lock-step") as caught:
        plan(two_clouds(PIPELINE, *RANKS, *own, "cloud.east.sharding=full"))
    assert "lock-step" in (caught.value.hint or "")


def test_a_cloud_that_shares_out_all_of_its_stage_needs_no_policy() -> None:
    chosen = plan(two_clouds(PIPELINE, *RANKS, "cloud.east.sharding=full"), is_quick=True)
    assert isinstance(chosen.settings, PipelineSettings)
    assert chosen.settings.policy is Policy.LOCK_STEP
    assert {one.cloud: one.sharding for one in chosen.stages}["east"] is Sharding.FULL
    assert microbatches(chosen) % 4 == 0


def test_ranks_of_unequal_clouds_cannot_keep_in_step() -> None:
    with pytest.raises(UserError, match="nothing fits"):
        plan(with_memory("2500 MiB", PIPELINE, "cloud.east.ranks=4", "cloud.west.ranks=2"))


@pytest.mark.parametrize("size", ["7 GiB", "4500 MiB", "4 GiB", "3 GiB"])
@pytest.mark.parametrize("ranks", [(), RANKS], ids=["one rank", "four ranks"])
def test_a_run_does_what_was_planned_and_what_would_be_written(size: str, ranks: Sequence[str]) -> None:
    job = with_memory(size, PIPELINE, *ranks)
    try:
        chosen = plan(job, is_quick=True)
    except UserError:
        return
    assert chosen.decisions is not None
    decisions = decisions_of(plan_to_json(chosen))
    run = follow(job, chosen.clouds, decisions)
    assert run.train.recompute == chosen.memory_options.recompute
    assert run.train.optimizer_bits == chosen.memory_options.optimizer_bits
    assert run.train.offload_optimizer == chosen.memory_options.offload_optimizer
    found = {cloud.name: cloud.sharding for cloud in run.cloud}
    assert found == {stage.cloud: stage.sharding.value for stage in chosen.stages}
    changes = planned_changes(job, chosen)
    assert run.train == job.train.model_copy(update=changes.get("train", {}))
    clouds = {name.removeprefix("cloud.") for name in changes if name.startswith("cloud.")}
    assert clouds == (set(chosen.clouds) if ranks else set())
    again = plan(run, is_quick=True)
    assert (again.memory_words, shardings(again)) == (chosen.memory_words, shardings(chosen))


def test_a_run_that_is_not_planned_holds_copies_and_what_the_job_says() -> None:
    run = follow(two_clouds(*RANKS, "cloud.west.sharding=optimizer"), ("east", "west"), None)
    assert [cloud.sharding for cloud in run.cloud] == ["none", "optimizer"]


def test_recompute_as_memory_asks_for_stays_so() -> None:
    text = TWO_CLOUDS + 'recompute = "auto"\nmemory_budget = "6 GiB"\n'
    sizes = ("cloud.east.memory=7 GiB", "cloud.west.memory=7 GiB")
    job = parse_job(text, file=Path("two.toml"), overrides=(PIPELINE, *sizes))
    chosen = plan(job, is_quick=True)
    assert chosen.memory_options.recompute
    assert "train" not in planned_changes(job, chosen)
    assert follow(job, chosen.clouds, chosen.decisions).train.recompute == "auto"


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    ranks=st.tuples(*[st.sampled_from([1, 2, 4])] * 3),
    sharding=st.tuples(*[st.sampled_from(["auto", "auto", "none", "optimizer"])] * 3),
    memory=st.sampled_from(["2 GiB", "3 GiB", "5 GiB", "9 GiB"]),
)
def test_what_is_planned_is_what_ranks_can_do(
    ranks: tuple[int, ...], sharding: tuple[str, ...], memory: str
) -> None:
    names = ("east", "west", "north")
    changes = [f"cloud.{name}.ranks={number}" for name, number in zip(names, ranks, strict=True)]
    changes += [f"cloud.{name}.sharding={one}" for name, one in zip(names, sharding, strict=True)]
    changes += [f"cloud.{name}.memory={memory}" for name in names]
    job = two_clouds(PIPELINE, *changes, more=THIRD_CLOUD + link("west", "north"))
    try:
        chosen = plan(job, is_quick=True)
    except UserError:
        return
    assert chosen.decisions is not None
    assert isinstance(job.strategy, PipelineStrategy)
    followed = follow(job, chosen.clouds, chosen.decisions)
    decided = {"policy": chosen.decisions.policy, "microbatches": chosen.decisions.num_microbatches}
    check_lock_step(followed, job.strategy.model_copy(update=decided))
    is_full = Sharding.FULL in shardings(chosen)
    assert is_full == (chosen.decisions.policy == Policy.LOCK_STEP.value), "one is for the other"
    assert not is_full or len(set(ranks)) == 1


@pytest.mark.parametrize("policy", ["lock-step", "1f1b", "auto"])
def test_given_windows_that_grow_are_cut_where_stages_would_wait_for_ever(policy: str) -> None:
    given_windows = (PIPELINE, "strategy.windows=[2, 3]", f"strategy.policy={policy}")
    chosen = plan(with_memory("4 GiB", *given_windows), is_quick=True)
    assert chosen.estimate.is_simulated
    if policy != "auto":
        assert chosen.stages[1].window <= chosen.stages[0].window


def test_sequences_that_cannot_be_dealt_out_evenly_are_named() -> None:
    shared = ("cloud.east.sharding=full", "train.batch_tokens=103424")
    with pytest.raises(UserError, match="the 101 sequences of a step cannot be divided evenly among 4 ranks"):
        plan(two_clouds(PIPELINE, *RANKS, *shared))


def test_gradients_of_a_shared_stage_are_reduced_in_float32() -> None:
    east = cloud_facts(two_clouds("cloud.east.inside_bandwidth=8 Gbps", *RANKS))[0]
    ready = study(two_clouds(PIPELINE, *RANKS))
    full = ready.synchronous_levels[0]
    costs = ready.costs(0, Setting(num_microbatches=16, memory=full))
    layer = costs.layers[0]
    forward_s, backward_s = exchange_s(layer, costs, full.at(east), east)
    assert forward_s == pytest.approx(3 / 4 * 2 * layer.num_parameters / 1e9)
    assert backward_s == pytest.approx(3 / 4 * (2 + 4) * layer.num_parameters / 1e9)
