"""Memory of a rank: against torch's allocator, and by what saves it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from isthmus.job.sections import LoraSpec
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.stage import Stage
from isthmus.plan.costs import Arithmetic, Precision, Task, Workload
from isthmus.plan.memory import Memory, OptimizerState, Sharding, StageOptions, stage_memory
from isthmus.train.build import AUTOCAST
from isthmus.train.device import Device
from isthmus.train.in_cloud import Reduction, World, shard
from isthmus.train.profiling import Rig, Size
from tests.plan.sizes import estimated, measured

SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
LLAMA = {"model_type": "llama", **SMALL, "intermediate_size": 352, "num_key_value_heads": 2}
GEMMA = {**LLAMA, "model_type": "gemma", "head_dim": 32}
BERT = {"model_type": "bert", **SMALL, "intermediate_size": 512, "max_position_embeddings": 128}
BIG = estimated(num_key_value_heads=8)
ON_GPU = Workload(num_sequences=1, sequence_length=2048, arithmetic=Arithmetic(precision=Precision.BFLOAT16))


def take_step(rig: Rig, window: int, step: int) -> None:
    rig.begin()
    for microbatch in range(window):
        rig.forward(microbatch, step=step)
    rig.backward(0, step=step)
    rig.forward(window, step=step)
    for microbatch in range(1, window + 1):
        rig.backward(microbatch, step=step)
    rig.update()


def allocated_bytes(
    config: dict[str, Any],
    task: Task,
    layers: range,
    workload: Workload,
    window: int,
    *,
    num_frozen_layers: int = 0,
    lora: LoraSpec | None = None,
    sharding: Sharding = Sharding.NONE,
) -> int:
    """The most that torch's allocator held in the second step of a real stage."""
    blueprint = fresh_blueprint(config, head=HEADS[task.value])
    size = Size(
        num_sequences=workload.num_sequences,
        sequence_length=workload.sequence_length,
        precision=workload.arithmetic.precision,
    )
    stage = build_stage(
        blueprint,
        layers,
        seed=0,
        recompute=workload.recompute,
        num_frozen_layers=num_frozen_layers,
        lora=lora,
    )
    reduction = share_out(stage, sharding, size.precision)
    return most_bytes(Rig(stage, device=Device("cpu"), size=size, reduction=reduction), window)


def most_bytes(rig: Rig, window: int) -> int:
    take_step(rig, window, 0)
    held_before = rig.held_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        take_step(rig, window, 1)
    inner: Any = profiler.profiler
    events = [one for one in inner.kineto_results.events() if one.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return held_before + peak


def small(precision: Precision, recompute: bool, *, is_gathered: bool = False) -> Workload:
    arithmetic = Arithmetic(precision=precision, on_accelerator=False, is_gathered=is_gathered)
    return Workload(num_sequences=4, sequence_length=64, arithmetic=arithmetic, recompute=recompute)


def share_out(stage: Stage, sharding: Sharding, precision: Precision) -> Reduction | None:
    if sharding is Sharding.NONE:
        return None
    is_full = sharding is Sharding.FULL
    device, dtype = torch.device("cpu"), AUTOCAST[precision.value]
    shard(stage, device=device, num_ranks=1, compute_dtype=dtype, keeps_sharded=is_full)
    return Reduction(World(), stage, sharding=sharding.value)


@pytest.mark.parametrize(("precision", "recompute"), [(Precision.FLOAT32, False), (Precision.BFLOAT16, True)])
@pytest.mark.parametrize(
    ("config", "layers", "window"),
    [(LLAMA, range(2), 3), (LLAMA, range(4, 6), 1), (BERT, range(2, 4), 3)],
)
def test_the_allocator_agrees(
    config: dict[str, Any], layers: range, window: int, precision: Precision, recompute: bool
) -> None:
    task = Task.MASKED_LM if config is BERT else Task.CAUSAL_LM
    workload = small(precision, recompute)
    costs = measured(config, workload, task=task)
    predicted = stage_memory(costs, layers, window=window, num_buffered=0)
    found = allocated_bytes(config, task, layers, workload, window)
    assert predicted.total_bytes == pytest.approx(found, rel=0.06)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(("precision", "recompute"), [(Precision.FLOAT32, True), (Precision.BFLOAT16, False)])
@pytest.mark.parametrize("sharding", [Sharding.OPTIMIZER, Sharding.FULL])
@pytest.mark.parametrize(
    ("config", "layers", "window"), [(LLAMA, range(2, 4), 3), (GEMMA, range(2), 3), (BERT, range(4, 6), 1)]
)
def test_the_allocator_agrees_where_ranks_share(
    config: dict[str, Any],
    layers: range,
    window: int,
    sharding: Sharding,
    precision: Precision,
    recompute: bool,
) -> None:
    task = Task.MASKED_LM if config is BERT else Task.CAUSAL_LM
    workload = small(precision, recompute, is_gathered=True)
    costs = measured(config, workload, task=task)
    options = StageOptions(sharding=sharding)
    predicted = stage_memory(costs, layers, window=window, options=options, num_buffered=0)
    found = allocated_bytes(config, task, layers, workload, window, sharding=sharding)
    assert predicted.total_bytes == pytest.approx(found, rel=0.06)


ALL_LINEAR = LoraSpec(r=4)
TWO_LINEAR = LoraSpec(r=4, targets=("q_proj", "v_proj"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(
    ("config", "layers", "window", "lora", "num_frozen", "recompute"),
    [
        (LLAMA, range(2), 3, ALL_LINEAR, 0, False),
        (LLAMA, range(2, 4), 3, ALL_LINEAR, 0, True),
        (LLAMA, range(4, 6), 1, TWO_LINEAR, 0, False),
        (BERT, range(2, 4), 3, ALL_LINEAR, 0, False),
        (LLAMA, range(4), 3, ALL_LINEAR, 2, False),
        (LLAMA, range(3), 3, None, 1, False),
        (LLAMA, range(2, 4), 3, None, 2, True),
        (BERT, range(1, 4), 3, None, 2, False),
    ],
)
def test_the_allocator_agrees_where_little_learns(
    config: dict[str, Any],
    layers: range,
    window: int,
    lora: LoraSpec | None,
    num_frozen: int,
    recompute: bool,
    precision: Precision,
) -> None:
    task = Task.MASKED_LM if config is BERT else Task.CAUSAL_LM
    workload = small(precision, recompute)
    costs = measured(config, workload, task=task, num_frozen=num_frozen, lora=lora)
    predicted = stage_memory(costs, layers, window=window, num_buffered=0)
    found = allocated_bytes(config, task, layers, workload, window, num_frozen_layers=num_frozen, lora=lora)
    assert predicted.total_bytes == pytest.approx(found, rel=0.06)


def test_a_stage_that_does_not_learn_keeps_nothing() -> None:
    costs = estimated(num_key_value_heads=8, num_frozen=16).costs(ON_GPU)
    found = stage_memory(costs, range(8, 16), window=4)
    assert (found.gradients, found.optimizer, found.activations) == (0, 0, 0)
    assert found.weights == memory().weights


def memory(workload: Workload = ON_GPU, *, window: int = 4, options: StageOptions | None = None) -> Memory:
    is_gathered = options is not None and options.is_sharded
    workload = replace(workload, arithmetic=replace(workload.arithmetic, is_gathered=is_gathered))
    return stage_memory(BIG.costs(workload), range(8, 16), window=window, options=options)


def test_what_is_shared_out_must_be_gathered() -> None:
    with pytest.raises(ValueError, match="exactly where its weights are gathered"):
        stage_memory(BIG.costs(ON_GPU), range(8, 16), window=4, options=StageOptions(sharding=Sharding.FULL))


def test_float32_training_takes_sixteen_bytes_a_parameter() -> None:
    costs = BIG.costs(ON_GPU)
    num_parameters = costs.num_parameters(range(8, 16))
    found = memory()
    assert found.weights + found.gradients + found.optimizer == 16 * num_parameters
    assert found.total_bytes > 16 * num_parameters


def test_activations_grow_with_the_window_and_nothing_else_does() -> None:
    small, large = memory(window=1), memory(window=5)
    assert large.activations == 5 * small.activations
    assert replace(large, activations=small.activations) == small


def test_recomputing_keeps_the_stream_alone() -> None:
    plain, again = memory(), memory(replace(ON_GPU, recompute=True))
    assert again.activations < plain.activations / 6
    assert again.working > plain.working
    assert again.weights == plain.weights


def test_logits_are_the_largest_thing_of_a_small_last_stage() -> None:
    model = estimated(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28)
    workload = replace(ON_GPU, sequence_length=8192)
    found = stage_memory(model.costs(workload), range(26, 28), window=1)
    logits_bytes = 4 * 151936 * 8192
    assert found.working >= 2 * logits_bytes
    assert found.total_bytes > 3 * logits_bytes


def test_eight_bit_state_and_offload_shrink_the_optimizer() -> None:
    plain = memory()
    small = memory(options=StageOptions(optimizer=OptimizerState.EIGHT_BIT))
    assert small.optimizer == pytest.approx(plain.optimizer / 4, rel=0.02)
    away = memory(options=StageOptions(offload_optimizer=True))
    assert away.optimizer == 0
    assert away.total_bytes < small.total_bytes


def test_shards_divide_the_state_and_add_what_is_gathered() -> None:
    plain = memory()
    shared = memory(options=StageOptions(sharding=Sharding.OPTIMIZER, num_shards=8))
    for part in ("weights", "optimizer"):
        assert getattr(shared, part) == pytest.approx(getattr(plain, part) / 8, rel=1e-6)
    assert shared.gathered == plain.weights // 2, "in bfloat16"
    assert shared.gradients == plain.gradients, "they are reduced once a step, and whole until then"
    assert shared.total_bytes < plain.total_bytes


def test_ranks_in_lock_step_gather_one_layer_and_the_next() -> None:
    plain = memory()
    shared = memory(options=StageOptions(sharding=Sharding.FULL, num_shards=8))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(shared, part) == pytest.approx(getattr(plain, part) / 8, rel=1e-6)
    assert 0 < shared.gathered < plain.weights


def test_shares_on_the_host_leave_what_is_gathered() -> None:
    options = StageOptions(sharding=Sharding.OPTIMIZER, num_shards=8, offload_optimizer=True)
    away = memory(options=options)
    assert (away.weights, away.optimizer) == (0, 0)
    assert away.gathered > 0


def test_codecs_and_messages_are_counted() -> None:
    costs = BIG.costs(ON_GPU)
    found = stage_memory(costs, range(8, 16), window=1, codec_bytes=10**9, num_buffered=3)
    assert found.codec == 10**9
    assert found.buffers == 3 * costs.boundary_bytes
    whole = stage_memory(costs, range(32), window=1)
    assert whole.buffers == 0


def test_moments_of_embeddings_are_float32_in_any_case() -> None:
    costs = BIG.costs(ON_GPU)
    coarse = StageOptions(optimizer=OptimizerState.EIGHT_BIT)
    stages = (range(1), range(1, 2))
    first, second = (stage_memory(costs, layers, window=1, options=coarse) for layers in stages)
    table = costs.embedding.num_trained
    per_number = 2 * (1 + 4 / 256)
    assert first.optimizer == 8 * table + round(per_number * costs.layers[0].num_trained)
    assert second.optimizer == round(per_number * costs.layers[1].num_trained)
