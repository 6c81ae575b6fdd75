"""The catalogue of accelerators, and times that follow from it or from a profile."""

import pytest

from isthmus.errors import UserError
from isthmus.plan.costs import Arithmetic, Precision, Workload
from isthmus.plan.times import (
    CATALOGUE,
    DEFAULT_ACHIEVABLE,
    estimated_times,
    find_accelerator,
    new_accelerator,
)
from tests.plan.sizes import LLAMA_7B, estimated, measured

BFLOAT16 = Arithmetic(precision=Precision.BFLOAT16)


@pytest.mark.parametrize("name", [name for name, one in CATALOGUE.items() if not one.is_cpu])
def test_every_row_is_sane(name: str) -> None:
    one = CATALOGUE[name]
    assert one.name == name
    assert 1e12 <= one.flops_float32 <= one.flops < 1e16
    assert 0 < one.achievable <= 1
    assert 2**33 < one.memory_bytes < 2**39
    assert 5e10 < one.memory_bandwidth < 1e13
    assert one.usd_per_hour is not None
    assert 0 < one.usd_per_hour < 100
    assert one.effective_flops(Precision.BFLOAT16) >= one.effective_flops(Precision.FLOAT32)
    assert one.effective_flops(Precision.BFLOAT16) < one.flops


def test_a_cpu_is_a_few_cores_and_slower_without_units_for_bfloat16() -> None:
    cpu = CATALOGUE["cpu"]
    assert 5e10 < cpu.effective_flops(Precision.FLOAT32) < 2.5e11
    assert 1e10 < cpu.effective_flops(Precision.BFLOAT16) < cpu.effective_flops(Precision.FLOAT32) / 2


@pytest.mark.parametrize("spelling", ["a100-80gb", "A100 80GB", "a100_80gb", "A100-80GB"])
def test_spelling_does_not_matter(spelling: str) -> None:
    assert find_accelerator(spelling) is CATALOGUE["a100-80gb"]


def test_the_users_own_come_first() -> None:
    mine = new_accelerator("h100", flops=8e14, memory_bytes=2**36, usd_per_hour=1.5)
    assert find_accelerator("H100", own={"h100": mine}) is mine
    assert mine.flops_float32 == 5e13
    assert mine.achievable == DEFAULT_ACHIEVABLE


def test_the_exact_name_wins_over_another_spelling() -> None:
    plain, dashed = (
        new_accelerator(name, flops=flops, memory_bytes=2**36)
        for name, flops in (("x100", 1e14), ("X-100", 2e14))
    )
    own = {"x100": plain, "X-100": dashed}
    assert find_accelerator("x100", own=own) is plain
    assert find_accelerator("X-100", own=own) is dashed
    assert find_accelerator("h100", own={"H-100": dashed}) is dashed, "the job's own replaces the catalogue's"


def test_an_unknown_device_says_how_to_add_it() -> None:
    with pytest.raises(UserError, match="'h10' is not in the catalogue") as caught:
        find_accelerator("h10")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("did you mean 'h100'?")
    assert "[[accelerator]]" in caught.value.hint
    with pytest.raises(UserError) as caught:
        find_accelerator("abacus")
    assert caught.value.hint is not None
    assert "known are v100-16gb" in caught.value.hint


def test_an_estimate_is_operations_over_speed() -> None:
    device = new_accelerator("x", flops=1e15, flops_float32=1e14, achievable=0.5, memory_bytes=2**36)
    costs = estimated().costs(Workload(num_sequences=1, sequence_length=2048, arithmetic=BFLOAT16))
    times = estimated_times(costs, device)
    layer = costs.layers[0]
    assert times.layers[0].forward_s == pytest.approx(layer.flops / 5e14)
    assert times.layers[0].backward_s == pytest.approx(2 * layer.flops / 5e14)
    whole = times.stage(range(32))
    assert whole.forward_s > 32 * times.layers[0].forward_s
    assert times.stage(range(4, 6)).backward_s == pytest.approx(2 * times.layers[0].backward_s)
    # Some 7 billion parameters, 2 operations each per token and a little more, at half a peak of 10**15.
    assert whole.forward_s == pytest.approx(2048 * 2 * 6.6e9 / 5e14, rel=0.1)


def test_recomputing_adds_a_forward_to_layers_alone() -> None:
    model = estimated(num_hidden_layers=2)
    device = CATALOGUE["a100-80gb"]
    plain, again = (
        estimated_times(
            model.costs(Workload(num_sequences=1, sequence_length=128, recompute=recompute)), device
        )
        for recompute in (False, True)
    )
    assert again.layers[0].backward_s == pytest.approx(1.5 * plain.layers[0].backward_s)
    assert again.head == plain.head
    assert again.embedding == plain.embedding


def test_experts_run_at_the_speed_of_float32() -> None:
    workload = Workload(num_sequences=1, sequence_length=512, arithmetic=BFLOAT16)
    config = {**LLAMA_7B, "model_type": "mixtral", "num_hidden_layers": 1}
    costs, device = measured(config, workload), CATALOGUE["h100"]
    forward_s = estimated_times(costs, device).layers[0].forward_s
    assert forward_s > costs.layers[0].float32_flops / device.effective_flops(Precision.FLOAT32)
