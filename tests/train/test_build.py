"""What a member builds its stage from: memory options, sharding, and what it must tell."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from isthmus.errors import FrameError, UserError
from isthmus.job.codec import BottleneckSpec
from isthmus.model.recompute import ActivationSlot, Budgeted, Fixed, InputSize
from isthmus.plan.memory import OptimizerState
from isthmus.plan.types import pack_facts, unpack_facts
from isthmus.train import in_cloud
from isthmus.train.build import Build, blueprint_of, optimizer_state
from isthmus.train.device import Device
from isthmus.train.in_cloud import World, shard
from isthmus.train.optimizer import Optimizer
from isthmus.train.pipeline import PipelineConfig
from isthmus.train.pipeline_config import decide, run_config, stage_layers
from isthmus.train.pipeline_role import pipeline_stage
from isthmus.wan.handshake import RankSpec
from tests.model.cases import blueprint, build, make_batch
from tests.train.chain import SCHEDULE, Given, chain, config
from tests.train.reference import assert_same, parameters_of
from tests.train.test_setup import tiny_job

CPU = Device("cpu")
Options = dict[str, Any]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """What FSDP2 is told of each module, the whole stage last; nothing is shared out."""
    told: list[Options] = []
    monkeypatch.setattr(in_cloud, "init_device_mesh", lambda kind, shape: (kind, shape))
    monkeypatch.setattr(in_cloud, "fully_shard", lambda _, **options: told.append(options))
    monkeypatch.setattr(in_cloud, "prepare_shards", lambda _: None)
    return told


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_lies_on_the_host_is_pinned_for_an_accelerator(given: list[Options], device: str) -> None:
    (stage,) = build(blueprint("llama"), [range(4)])
    shard(stage, device=torch.device(device), num_ranks=2, offload=True)
    assert len(given) == 5
    for options in given:
        policy = options["offload_policy"]
        assert isinstance(policy, CPUOffloadPolicy)
        assert policy.pin_memory == (device == "cuda")


def made(*overrides: str, num_ranks: int = 1, cloud: str = "west") -> Build:
    job = tiny_job(f"cloud.west.ranks={num_ranks}", *overrides)
    plan = blueprint_of(job, config={}, num_labels=None)
    return Build(
        job=job,
        config=run_config(job, decide(job), plan, num_validation_microbatches=0),
        cloud=cloud,
        blueprint=plan,
        device=CPU,
        world=World(RankSpec(num_ranks=num_ranks)),
    )


def agreed(build: Build) -> PipelineConfig:
    assert isinstance(build.config, PipelineConfig)
    return build.config


def test_a_stage_recomputes_as_the_run_config_says() -> None:
    assert pipeline_stage(made()).recompute == Fixed()
    stage = pipeline_stage(made("train.recompute=true"))
    assert stage.recompute == Fixed(frozenset(stage.layers))
    auto = pipeline_stage(made("train.recompute=auto", "cloud.west.memory=8 GiB")).recompute
    assert isinstance(auto, Budgeted)
    assert auto._budget_bytes == int(0.9 * 8 * 2**30)
    stage = pipeline_stage(made("train.recompute=auto", "train.memory_budget=1 GiB"))
    assert isinstance(stage.recompute, Budgeted)
    assert stage.recompute._budget_bytes == 2**30
    assert stage.recompute._standing_bytes() == 16 * sum(one.numel() for one in stage.parameters())


def test_ranks_of_a_fully_sharded_stage_recompute_alike(given: list[Options]) -> None:
    assert not given
    build = made("train.recompute=auto", num_ranks=2)
    build = replace(build, config=replace(build.config, sharding={"west": "full"}))
    stage = pipeline_stage(build)
    assert stage.recompute == Fixed(frozenset(stage.layers))
    assert "compute alike" in stage.notes[-1]


def test_what_the_optimizer_remembers_is_as_the_run_config_says() -> None:
    assert optimizer_state(made().config) is OptimizerState.FLOAT32
    assert optimizer_state(made("train.optimizer_bits=8").config) is OptimizerState.EIGHT_BIT


def test_a_pipeline_within_a_budget_and_with_moments_on_the_host_gives_the_same() -> None:
    plan = blueprint("llama")
    agreed = config(3, 4, num_steps=5)
    steps = [
        [make_batch(plan.head, lengths=(length, 3), seed=10 * step + length) for length in lengths]
        for step, lengths in enumerate([(24, 6, 20, 9), (12, 16, 8, 23), *[(23, 7, 7, 22)] * 3])
    ]
    found = []
    chosen: list[int] = []
    budgets: list[Watched] = []
    for is_saving in (False, True):
        with chain(plan, agreed) as links:
            if is_saving:
                for index, stage in enumerate(links.stages):
                    budget = Watched(budget_bytes=450_000, standing_bytes=lambda: 60_000)
                    budget.chosen = chosen
                    budgets.append(budget)
                    stage.recompute = budget
                    links.optimizers[index] = Optimizer(
                        stage.parameters_by_name(),
                        schedule=SCHEDULE,
                        weight_decay=0.1,
                        max_norm=0.5,
                        offload=True,
                    )
            links.run(Given(steps))
            found.append(parameters_of(links.stages))
    assert_same(found[1], found[0])
    assert {0} < set(chosen)
    assert not any(budget._in_flight for budget in budgets)


class Watched(Budgeted):
    chosen: list[int]

    def begin(self, size: InputSize, *, window: int) -> ActivationSlot:
        slot = super().begin(size, window=window)
        if slot.meter is None:
            self.chosen.append(len(slot.recomputed))
        return slot


@pytest.mark.parametrize("offloads", [False, True])
def test_the_jobs_offload_reaches_fsdp(given: list[Options], offloads: bool) -> None:
    options = ("cloud.west.sharding=optimizer", f"train.offload_optimizer={str(offloads).lower()}")
    pipeline_stage(made(*options, num_ranks=2))
    assert given
    assert all(isinstance(one["offload_policy"], CPUOffloadPolicy) == offloads for one in given)


def test_halves_of_bottlenecks_stay_whole(given: list[Options]) -> None:
    (stage,) = build(blueprint("llama"), [range(2)], outbound=BottleneckSpec(rank=4))
    shard(stage, device=torch.device("cpu"), num_ranks=2)
    assert stage.down is not None
    assert given[-1]["ignored_params"] == set(stage.down.parameters())


@pytest.mark.parametrize(
    ("num_ranks", "cache_bytes", "first_trained", "is_said"),
    [((1, 2), 1000, 1, True), ((1, 1), 1000, 1, False), ((1, 2), 0, 1, False), ((1, 2), 1000, 0, False)],
)
def test_a_cache_that_cannot_be_is_said(
    num_ranks: tuple[int, ...], cache_bytes: int, first_trained: int, is_said: bool
) -> None:
    build = made(num_ranks=num_ranks[1])
    pipeline = replace(agreed(build).pipeline, first_trained=first_trained)
    config = replace(agreed(build), pipeline=pipeline, cache_bytes=cache_bytes)
    stage = pipeline_stage(replace(build, config=config))
    assert any("is not cached" in note for note in stage.notes) == is_said


def test_a_run_config_returns_from_the_line_as_it_was() -> None:
    found = made("link.east-west.codec=auto", num_ranks=2).config
    assert unpack_facts(pack_facts(found), PipelineConfig) == found
    coded = made("link.east-west.codec=rotate | int4", "link.east-west.boundary=bottleneck(4)").config
    assert unpack_facts(pack_facts(coded), PipelineConfig) == coded


@pytest.mark.parametrize("text", [None, 3, "", "[]", "{}", '{"pipeline": 3, "seed": 1}', "x" * 10**6])
def test_a_run_config_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(FrameError, match="PipelineConfig"):
        unpack_facts(text, PipelineConfig)


def test_layers_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(UserError, match="planned with 4 layers, but the model has 5"):
        stage_layers(tiny_job(), replace(decide(tiny_job()), layers=(2, 2)), 5)
