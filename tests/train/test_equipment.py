"""What a rank makes its stage from: how it is shared out, and what it must say."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from isthmus.job.boundary import BottleneckSpec
from isthmus.train.device import Device
from isthmus.train.equipment import Equipment
from isthmus.train.ranks import sharding
from isthmus.train.ranks.sharding import shard
from isthmus.train.ranks.world import Alone
from isthmus.train.setup import blueprint_of, set_up
from isthmus.wan.seat import Seat
from tests.model.cases import blueprint, build
from tests.train.chain import course
from tests.train.test_setup import tiny_job

Options = dict[str, Any]


class Fellows(Alone):
    """A world of several ranks, as far as its size goes."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.seat = Seat(num_ranks=num_ranks)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """What FSDP2 is told of each module, the whole stage last; nothing is shared out."""
    told: list[Options] = []
    monkeypatch.setattr(sharding, "init_device_mesh", lambda kind, shape: (kind, shape))
    monkeypatch.setattr(sharding, "fully_shard", lambda _, **options: told.append(options))
    monkeypatch.setattr(sharding, "_prepare", lambda _: None)
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


def equipment(shares: str, *overrides: str, num_ranks: int = 2) -> Equipment:
    job = tiny_job("cloud.west.ranks=2", f"cloud.west.sharding={shares}", *overrides)
    return Equipment(
        job=job,
        cloud=job.cloud_named("west"),
        setup=set_up(job),
        blueprint=blueprint_of(job, config={}, num_labels=None),
        device=Device("cpu"),
        world=Fellows(num_ranks),
    )


@pytest.mark.parametrize("offloads", [False, True])
def test_the_jobs_offload_reaches_fsdp(given: list[Options], offloads: bool) -> None:
    made = equipment("optimizer", f"train.offload_optimizer={str(offloads).lower()}")
    made.stage(course(2, 1, num_ranks=(1, 2)))
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
    agreed = course(2, 1, num_ranks=num_ranks, cache_bytes=cache_bytes, first_trained=first_trained)
    stage = equipment("none", num_ranks=num_ranks[1]).stage(agreed)
    assert any("is not cached" in note for note in stage.notes) == is_said
