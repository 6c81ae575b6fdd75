"""Adapters and frozen layers: what learns of a real stage, and what that spares."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.load import parse_job
from isthmus.job.lora import LoraSpec
from isthmus.model.blueprint import Blueprint, fresh_blueprint
from isthmus.model.families import HEADS
from isthmus.model.load import build_stage
from isthmus.plan.costs.arithmetic import Precision
from isthmus.plan.costs.devices import CATALOGUE
from isthmus.plan.costs.families import FAMILIES, Product
from isthmus.plan.costs.learning import Adapters, Learning, product_widths, read_adapters
from isthmus.plan.costs.parts import ModelCosts, Workload, model_costs
from isthmus.plan.costs.profile import PassTimes, Profile, Sample
from isthmus.plan.costs.shapes import ModelShape, Task, read_shape
from isthmus.plan.costs.times import estimated_times, learned_times, measured_times
from isthmus.plan.planner import plan
from tests.plan.jobs import TWO_CLOUDS

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"intermediate_size": 80, "num_key_value_heads": 2}
NAMED = {"llama": ("q_proj", "down_proj"), "gpt2": ("c_proj",), "bert": ("output.dense", "query")}
WORKLOAD = Workload(num_sequences=2, sequence_length=16)
CUTS = [range(2), range(1, 3), range(2, 4), range(4)]


def task_of(model_type: str) -> Task:
    return Task.MASKED_LM if FAMILIES[model_type].is_encoder else Task.CAUSAL_LM


def shape_of(model_type: str) -> ModelShape:
    return read_shape(blueprint_of(model_type).config.to_dict(), task=task_of(model_type))


@cache
def blueprint_of(model_type: str) -> Blueprint:
    config = {"model_type": model_type, **SIZES}
    if FAMILIES[model_type].is_gated:
        config |= GROUPED
    return fresh_blueprint(config, head=HEADS[task_of(model_type).value])


def costs_of(model_type: str, learning: Learning, workload: Workload = WORKLOAD) -> ModelCosts:
    return model_costs(shape_of(model_type), workload, learning)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_products_are_the_linear_modules_of_a_layer(model_type: str) -> None:
    blueprint, shape = blueprint_of(model_type), shape_of(model_type)
    with torch.device("meta"):
        layer = blueprint.model_class(blueprint.config).base_model.get_submodule(
            f"{blueprint.family.layers}.0"
        )
    found = {
        name: module.weight.shape[::-1] if isinstance(module, nn.Linear) else module.weight.shape
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    widths = product_widths(shape)
    assert found == {path: widths[product] for product, path in shape.family.products.items()}


@pytest.mark.parametrize("layers", CUTS, ids=str)
@pytest.mark.parametrize("targets", [False, True], ids=["all", "named"])
@pytest.mark.parametrize("model_type", NAMED)
def test_adapters_are_counted_as_a_stage_has_them(model_type: str, targets: bool, layers: range) -> None:
    spec = LoraSpec(r=3, targets=NAMED[model_type] if targets else None)
    learning = Learning(adapters=read_adapters(spec, shape_of(model_type)))
    stage = build_stage(blueprint_of(model_type), layers, seed=0, lora=spec)
    costs = costs_of(model_type, learning)
    assert costs.num_trained(layers) == sum(one.numel() for one in stage.parameters_by_name().values())
    assert costs.num_parameters(layers) == sum(one.numel() for one in stage.parameters())


@pytest.mark.parametrize("num_frozen", [0, 1, 2, 4])
@pytest.mark.parametrize("layers", CUTS, ids=str)
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_frozen_layers_are_counted_as_a_stage_has_them(
    model_type: str, layers: range, num_frozen: int
) -> None:
    stage = build_stage(blueprint_of(model_type), layers, seed=0, num_frozen_layers=num_frozen)
    costs = costs_of(model_type, Learning(num_frozen_layers=num_frozen))
    assert costs.num_trained(layers) == sum(one.numel() for one in stage.parameters_by_name().values())


def test_adapters_need_one_product_back_for_a_frozen_matrix() -> None:
    adapters = Adapters(rank=2, products=frozenset(FAMILIES["llama"].products))
    full, thin = costs_of("llama", Learning()), costs_of("llama", Learning(adapters=adapters))
    assert full.layers[1].backward_share == 2.0
    assert 1.0 < thin.layers[1].backward_share < 1.5
    assert thin.head.backward_share == 1.0
    assert not thin.embedding.has_backward
    assert thin.layers[1].flops == pytest.approx(
        full.layers[1].flops + 2 * WORKLOAD.num_tokens * adapters.num_parameters(shape_of("llama"))
    )


def test_nothing_goes_back_below_the_first_layer_that_learns() -> None:
    costs = costs_of("llama", Learning(num_frozen_layers=2))
    assert [part.has_backward for part in costs.parts(range(4))] == [False, False, False, True, True, True]
    times = estimated_times(costs, CATALOGUE["a100-40gb"])
    again = estimated_times(
        costs_of("llama", Learning(num_frozen_layers=2), replace(WORKLOAD, recompute=True)),
        CATALOGUE["a100-40gb"],
    )
    for one in (times, again):
        assert one.stage(range(2)).backward_s == 0.0
    assert again.layers[2].backward_s == pytest.approx(times.layers[2].backward_s + times.layers[2].forward_s)


@pytest.mark.parametrize("recompute", [False, True])
def test_measured_times_shrink_with_what_learns(recompute: bool) -> None:
    one = PassTimes(forward_s=1.0, backward_s=2.0)
    sample = Sample(
        num_sequences=2,
        sequence_length=16,
        precision=Precision.FLOAT32,
        embedding=one,
        layers=(one,) * 4,
        head=one,
    )
    profile = Profile(device="cpu", model_type="llama", samples=(sample,))
    workload = replace(WORKLOAD, recompute=recompute)
    measured = measured_times(profile, workload, num_layers=4)
    assert learned_times(measured, costs_of("llama", Learning(), workload)) == measured
    costs = costs_of("llama", Learning(num_frozen_layers=2), workload)
    found = learned_times(measured, costs)
    assert [one.backward_s for one in found.layers] == [0.0, 0.0, *[3.0 if recompute else 2.0] * 2]
    assert (found.embedding.backward_s, found.head.backward_s) == (0.0, 2.0)


def test_targets_go_by_the_end_of_their_names() -> None:
    both = read_adapters(LoraSpec(targets=("c_proj",)), shape_of("gpt2"))
    assert both.products == {Product.OUT, Product.DOWN}
    one = read_adapters(LoraSpec(targets=("mlp.c_proj",)), shape_of("gpt2"))
    assert one.products == {Product.DOWN}
    with pytest.raises(UserError, match="'proj', which is no linear module") as caught:
        read_adapters(LoraSpec(targets=("proj",)), shape_of("gpt2"))
    assert "c_attn, c_fc, c_proj" in (caught.value.hint or "")


def job_with(folder: Path, *overrides: str) -> Job:
    """Two clouds that train a 7 B model from its weights, of which only the configuration is there."""
    config = {"model_type": "llama", "num_hidden_layers": 32}
    (folder / "config.json").write_text(json.dumps(config))
    _, data = TWO_CLOUDS.split("[data]")
    text = f'name = "tuned"\n[model]\nsource = "{folder}"\n[data]{data}'
    given = ("strategy.kind=pipeline", "cloud.east.memory=20 GiB", "cloud.west.memory=20 GiB")
    return parse_job(text, file=Path("tuned.toml"), overrides=(*given, *overrides))


def test_a_large_model_is_tuned_where_it_could_not_be_trained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="memory"):
        plan(job_with(tmp_path), is_quick=True)
    tuned = plan(job_with(tmp_path, "model.lora.r=16"), is_quick=True)
    for stage in tuned.stages:
        assert stage.memory["gradients"] < stage.memory["weights"] / 50
        assert stage.memory["optimizer"] == 2 * stage.memory["gradients"]


def test_frozen_layers_spare_time_and_memory(tmp_path: Path) -> None:
    lora = ("model.lora.r=16", "strategy.layers=[16, 16]")
    whole, half = (
        plan(job_with(tmp_path, *lora, *more), is_quick=True) for more in ((), ("model.frozen_layers=16",))
    )
    assert half.estimate.step_s < whole.estimate.step_s
    assert "gradients" not in half.stages[0].memory
    assert "activations" not in half.stages[0].memory
    assert half.links[0].up_bytes == 0


def test_no_more_layers_are_frozen_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="33 layers cannot be frozen in a model of 32"):
        plan(job_with(tmp_path, "model.frozen_layers=33"))
