"""What of a model is trained decides what it costs: adapters, frozen layers, and times measured of all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.load import parse_job
from isthmus.job.sections import LoraSpec
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.plan.costs import Precision, Workload
from isthmus.plan.planner import plan
from isthmus.plan.times import (
    CATALOGUE,
    PassTimes,
    Profile,
    Sample,
    estimated_times,
    measured_times,
)
from tests.model.cases import COMMON, CONFIGS
from tests.plan.jobs import TWO_CLOUDS
from tests.plan.sizes import estimated, measured

WORKLOAD = Workload(num_sequences=2, sequence_length=16)
CUTS = [range(4), range(2), range(2, 3), range(3, 4)]
NAMED = {"llama": ("q_proj", "v_proj"), "gpt2": ("c_proj",)}


def config_of(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **COMMON, **CONFIGS[model_type], "num_hidden_layers": 4}


@pytest.mark.slow
@pytest.mark.parametrize("targets", [False, True], ids=["all", "named"])
@pytest.mark.parametrize("model_type", NAMED)
def test_adapters_are_counted_as_a_stage_has_them(model_type: str, targets: bool) -> None:
    spec = LoraSpec(r=3, targets=NAMED[model_type] if targets else None)
    blueprint = fresh_blueprint(config_of(model_type), head=HEADS["causal-lm"])
    costs = measured(config_of(model_type), WORKLOAD, lora=spec)
    for layers in CUTS:
        stage = build_stage(blueprint, layers, seed=0, lora=spec)
        assert costs.num_trained(layers) == sum(one.numel() for one in stage.parameters_by_name().values())
        assert costs.num_parameters(layers) == sum(one.numel() for one in stage.parameters())


@pytest.mark.parametrize(("model_type", "num_frozen"), [("llama", 1), ("llama", 4), ("gpt2", 0), ("gpt2", 2)])
def test_frozen_layers_are_counted_as_a_stage_has_them(model_type: str, num_frozen: int) -> None:
    blueprint = fresh_blueprint(config_of(model_type), head=HEADS["causal-lm"])
    costs = measured(config_of(model_type), WORKLOAD, num_frozen=num_frozen)
    for layers in CUTS:
        stage = build_stage(blueprint, layers, seed=0, num_frozen_layers=num_frozen)
        assert costs.num_trained(layers) == sum(one.numel() for one in stage.parameters_by_name().values())


def test_an_estimate_counts_adapters_beside_all_products() -> None:
    spec = LoraSpec(r=2)
    full, thin = (estimated(lora=one).costs(WORKLOAD) for one in (None, spec))
    real = measured(config_of("llama"), WORKLOAD, lora=spec)
    own = estimated(**config_of("llama"), lora=spec).costs(WORKLOAD)
    assert own.layers[1].num_trained == real.layers[1].num_trained
    assert full.layers[1].backward_share == 2.0
    assert 1.0 < thin.layers[1].backward_share < 1.5
    assert thin.head.backward_share == 1.0
    assert not thin.embedding.has_backward


def test_nothing_goes_back_below_the_first_layer_that_is_trained() -> None:
    model = estimated(num_hidden_layers=4, num_frozen=2)
    costs = model.costs(WORKLOAD)
    assert [part.has_backward for part in costs.parts(range(4))] == [False, False, False, True, True, True]
    times, again = (
        estimated_times(model.costs(replace(WORKLOAD, recompute=one)), CATALOGUE["a100-40gb"])
        for one in (False, True)
    )
    for one in (times, again):
        assert one.stage(range(2)).backward_s == 0.0
    assert again.layers[2].backward_s == pytest.approx(times.layers[2].backward_s + times.layers[2].forward_s)


@pytest.mark.parametrize("recompute", [False, True])
def test_measured_times_shrink_with_what_is_trained(recompute: bool) -> None:
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
    whole = measured_times(profile, estimated(num_hidden_layers=4).costs(workload))
    assert whole.head == one
    assert whole.layers == (replace(one, backward_s=3.0 if recompute else 2.0),) * 4
    found = measured_times(profile, estimated(num_hidden_layers=4, num_frozen=2).costs(workload))
    assert [one.backward_s for one in found.layers] == [0.0, 0.0, *[3.0 if recompute else 2.0] * 2]
    assert (found.embedding.backward_s, found.head.backward_s) == (0.0, 2.0)


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
