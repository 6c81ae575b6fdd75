"""Bottlenecks in a plan: what their halves hold, and the steps before they begin."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from isthmus.errors import UserError
from isthmus.job.codec import BottleneckSpec, parse_boundary
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.bottleneck import Down, Half, Up
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.plan.costs import Arithmetic, PartSize, Precision, Workload
from isthmus.plan.memory import (
    Memory,
    OptimizerState,
    Sharding,
    StageOptions,
    bottleneck_costs,
    stage_memory,
)
from isthmus.plan.plan import Plan, Warmup, plan_to_dict
from isthmus.plan.planner import plan
from isthmus.train.device import Device
from isthmus.train.profiling import Rig, Size
from tests.plan.jobs import THIRD_CLOUD, link, two_clouds
from tests.plan.sizes import estimated, measured
from tests.plan.test_memory import LLAMA, most_bytes, small

NUM_WARMUP_STEPS = 20
BOTTLENECK = f"link.0.boundary=bottleneck(64, warmup={NUM_WARMUP_STEPS})"
CUT = ("strategy.kind=pipeline", "strategy.layers=[6, 6]", "strategy.microbatches=16")


def bottleneck(text: str) -> BottleneckSpec:
    spec = parse_boundary(text)
    assert isinstance(spec, BottleneckSpec)
    return spec


@pytest.mark.parametrize(
    ("width", "vocabulary_size"),
    [(64, 300), (1024, 2**14), (512, 40_000), (2048, 20_000), (32, 700_000), (1, 2**25)],
    ids=str,
)
@pytest.mark.parametrize("anchor", ["tokens", "none"])
@pytest.mark.parametrize("rank", [1, 24])
def test_halves_are_those_of_the_model(rank: int, anchor: str, width: int, vocabulary_size: int) -> None:
    spec = bottleneck(f"bottleneck({rank}, anchor={anchor})")
    costs = bottleneck_costs(spec, width=width, vocabulary_size=vocabulary_size)
    with torch.device("meta"):
        down = Down(spec, width=width, vocabulary_size=vocabulary_size, seed=0)
        up = Up(spec, width=width, vocabulary_size=vocabulary_size)
    assert costs.down == counted(down)
    assert costs.up == counted(up)


def counted(half: Half) -> PartSize:
    assert all(one.dtype is torch.float32 for one in half.parameters())
    learning = [one.numel() for one in half.parameters() if one.requires_grad]
    return PartSize(
        num_parameters=sum(one.numel() for one in half.parameters()),
        num_trained=sum(learning),
        largest_trained=max(learning),
        buffer_bytes=sum(one.nbytes for one in half.buffers()),
    )


@pytest.mark.parametrize(("precision", "recompute"), [(Precision.FLOAT32, True), (Precision.BFLOAT16, False)])
@pytest.mark.parametrize("text", ["bottleneck(16)", "bottleneck(16, anchor=none)"])
@pytest.mark.parametrize("side", ["inbound", "outbound"])
def test_the_allocator_agrees(side: str, text: str, precision: Precision, recompute: bool) -> None:
    spec, workload = bottleneck(text), small(precision, recompute)
    layers, window = (range(4, 6), 1) if side == "inbound" else (range(2), 3)
    boundary: dict[str, Any] = {side: spec}
    blueprint = fresh_blueprint(LLAMA, head=HEADS["causal-lm"])
    stage = build_stage(blueprint, layers, seed=0, recompute=recompute, **boundary)
    size = Size(
        num_sequences=workload.num_sequences,
        sequence_length=workload.sequence_length,
        precision=precision,
    )
    rig = Rig(stage, device=Device("cpu"), size=size)
    rig._width = spec.rank
    costs = measured(LLAMA, workload)
    both = bottleneck_costs(spec, width=costs.width, vocabulary_size=blueprint.config.vocab_size)
    half = both.up if side == "inbound" else both.down
    predicted = stage_memory(costs, layers, window=window, num_buffered=0, halves=[half])
    found = most_bytes(rig, window) + half.buffer_bytes
    # What kernels in bfloat16 take for themselves on a CPU grows with its threads.
    assert predicted.total_bytes == pytest.approx(found, rel=0.03)


def added(options: StageOptions) -> tuple[int, int, int]:
    """What two halves add to the memory of a rank: weights, gradients and moments."""
    arithmetic = Arithmetic(precision=Precision.BFLOAT16, is_gathered=options.is_sharded)
    workload = Workload(num_sequences=1, sequence_length=512, arithmetic=arithmetic)
    costs = estimated().costs(workload)

    def memory(halves: Sequence[PartSize]) -> Memory:
        return stage_memory(costs, range(8, 16), window=2, options=options, halves=halves)

    half = PartSize(num_parameters=10_000, num_trained=2560, largest_trained=2560, buffer_bytes=77)
    without, having = memory(()), memory((half, half))
    assert having.gathered == without.gathered
    return (
        having.weights - without.weights,
        having.gradients - without.gradients,
        having.optimizer - without.optimizer,
    )


def test_halves_are_whole_on_every_rank() -> None:
    whole = (2 * 40_077, 2 * 4 * 2560, 2 * 8 * 2560)
    assert added(StageOptions()) == whole
    for sharding in (Sharding.OPTIMIZER, Sharding.FULL):
        assert added(StageOptions(sharding=sharding, num_shards=8)) == whole
        # What FSDP2 offloads is what it shares out.
        assert added(StageOptions(sharding=sharding, num_shards=8, offload_optimizer=True)) == whole
    assert added(StageOptions(offload_optimizer=True)) == (*whole[:2], 0)
    # Most of what learns are anchors by token id.
    assert added(StageOptions(optimizer=OptimizerState.EIGHT_BIT)) == whole


def planned(*overrides: str, more: str = "") -> Plan:
    return plan(two_clouds(*CUT, *overrides, more=more), is_quick=True)


def test_the_warm_up_takes_what_raw_hidden_states_take() -> None:
    narrow, raw = planned(BOTTLENECK), planned("link.0.codec=raw")
    estimate, warmup = narrow.estimate, narrow.estimate.warmup
    assert warmup == Warmup(
        num_steps=NUM_WARMUP_STEPS,
        step_s=raw.estimate.step_s,
        wan_bytes=raw.estimate.wan_bytes,
        usd_per_step=raw.estimate.usd_per_step,
    )
    assert warmup.step_s > estimate.step_s
    assert estimate.total_s == pytest.approx(20 * warmup.step_s + 80 * estimate.step_s)
    assert estimate.total_wan_bytes == pytest.approx(20 * warmup.wan_bytes + 80 * estimate.wan_bytes)
    assert estimate.total_usd == pytest.approx(
        20 * (warmup.usd_per_step or 0) + 80 * (estimate.usd_per_step or 0)
    )


def test_hidden_states_cross_the_whole_run_as_they_are() -> None:
    estimate = planned().estimate
    assert estimate.warmup is None
    assert estimate.total_wan_bytes == 100 * estimate.wan_bytes
    assert (
        planned("link.0.boundary=bottleneck(64, init=random, anchor=none, warmup=0)").estimate.warmup is None
    )


def test_other_links_keep_their_codecs_in_the_warm_up() -> None:
    row = ("strategy.layers=[4, 4, 4]", "link.1.codec=int8")
    more = THIRD_CLOUD + link("west", "north")
    both, narrow = (planned(*row, *boundary, more=more) for boundary in ((), (BOTTLENECK,)))
    assert both.scenario is not None
    assert narrow.scenario is not None
    assert narrow.warmup_scenario is not None
    assert narrow.warmup_scenario.hops[1] == narrow.scenario.hops[1] == both.scenario.hops[1]
    assert narrow.warmup_scenario.hops[0].forward_bytes > 20 * narrow.scenario.hops[0].forward_bytes


def test_a_plan_says_what_the_warm_up_takes() -> None:
    found = planned(BOTTLENECK)
    assert any(note.startswith("the first 20 steps cross raw: ") for note in found.notes)
    once = planned("link.0.boundary=bottleneck(64, warmup=1)")
    assert any(note.startswith("the first step crosses raw: ") for note in once.notes)
    values = plan_to_dict(found)
    assert values["estimate"]["warmup"]["num_steps"] == NUM_WARMUP_STEPS
    assert values["estimate"]["total_wan_bytes"] == found.estimate.total_wan_bytes
    assert values["warmup_scenario"]["hops"] != values["scenario"]["hops"]


def test_a_deadline_counts_the_warm_up() -> None:
    estimate = planned(BOTTLENECK).estimate
    assert estimate.warmup is not None
    deadline_s = estimate.total_s - 9.5 * estimate.step_s
    with pytest.raises(UserError, match=r"longer than limits\.deadline"):
        planned(BOTTLENECK, f"limits.deadline={deadline_s:.6f} s")


def test_both_stages_hold_their_half() -> None:
    roomy = [f"cloud.{name}.memory=4000 GiB" for name in ("east", "west")]
    narrow, raw = (
        planned(*roomy, "strategy.windows=[4, 4]", more) for more in (BOTTLENECK, "link.0.codec=raw")
    )
    costs = bottleneck_costs(bottleneck("bottleneck(64)"), width=2048, vocabulary_size=32000)
    more_bytes = [
        one.memory_bytes - other.memory_bytes for one, other in zip(narrow.stages, raw.stages, strict=True)
    ]
    assert more_bytes == [costs.down.held_bytes, costs.up.held_bytes]


def test_halves_take_room_from_what_is_in_flight() -> None:
    raw = planned("link.0.codec=raw", "strategy.windows=[16, 16]", "train.recompute=true")
    held = [stage.memory_bytes for stage in raw.stages]
    exact = [f"cloud.{stage.cloud}.memory={size} B" for stage, size in zip(raw.stages, held, strict=True)]
    tight = ("strategy.windows=[16, 16]", "train.recompute=true", "limits.memory_share=1.0", *exact)
    assert [stage.window for stage in planned("link.0.codec=raw", *tight).stages] == [16, 16]
    narrow = planned(BOTTLENECK, *tight)
    assert all(stage.window < 16 for stage in narrow.stages)
    assert all(stage.memory_bytes <= (stage.capacity_bytes or 0) for stage in narrow.stages)


def test_memory_bounds_the_warm_up_too() -> None:
    given = (BOTTLENECK, "train.recompute=true", "limits.memory_share=1.0")
    roomy, four = planned(*given), planned(*given, "strategy.windows=[4, 1]")
    assert [stage.window for stage in roomy.stages] == [4, 1]
    assert roomy.scenario is not None
    assert roomy.scenario.max_in_flight is None
    assert roomy.stages[0].memory_bytes > four.stages[0].memory_bytes, "more is in flight before"
    tight = planned(*given, f"cloud.east.memory={four.stages[0].memory_bytes} B")
    assert tight.stages[0].memory_bytes == four.stages[0].memory_bytes
    for scenario in (tight.scenario, tight.warmup_scenario):
        assert scenario is not None
        assert isinstance(scenario.max_in_flight, tuple)
        assert scenario.max_in_flight[0] == 4
