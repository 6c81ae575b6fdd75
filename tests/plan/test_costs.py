"""Costs without torch: tables of the catalogue, and estimates from sizes."""

import json
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.job import load_job
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.costs import MeasuredModel, Training
from isthmus.model.heads import HEADS
from isthmus.plan.costs import Arithmetic, ModelCosts, Precision, Workload, parsed_table, table_text
from isthmus.plan.models import load_config, read_model
from isthmus.plan.planner import plan
from tests.plan.jobs import two_clouds
from tests.plan.sizes import LLAMA_7B, estimated, measured

EXAMPLES = Path(__file__).parents[2] / "examples"
BFLOAT16 = Arithmetic(precision=Precision.BFLOAT16)
XLM_R = {
    "model_type": "xlm-roberta",
    "vocab_size": 250002,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 514,
}


def close(found: ModelCosts, real: ModelCosts, *, rel: float) -> None:
    for figure in ("num_parameters", "num_trained", "flops", "kept_bytes"):
        for one, other in zip(found.parts(range(2)), real.parts(range(2)), strict=True):
            assert getattr(one, figure) == pytest.approx(getattr(other, figure), rel=rel), figure


@pytest.mark.parametrize(
    ("num_sequences", "length", "is_gathered"),
    [(1, 4096, False), (3, 1000, True), (32, 512, False), (4, 128, True)],
)
def test_the_catalogue_has_what_is_measured(num_sequences: int, length: int, is_gathered: bool) -> None:
    """Also at lengths and numbers of sequences between those of its tables."""
    workload = Workload(
        num_sequences=num_sequences,
        sequence_length=length,
        arithmetic=Arithmetic(precision=Precision.BFLOAT16, is_gathered=is_gathered),
    )
    shipped = read_model(two_clouds(), LLAMA_7B)
    assert shipped.note is None
    found, real = shipped.costs_of(workload), measured(LLAMA_7B, workload)
    close(found, real, rel=0.01)
    for one, other in zip(found.layers[:2], real.layers[:2], strict=True):
        assert 0.97 < one.backward_bytes / other.backward_bytes < 1.6


def test_the_catalogue_serves_any_number_of_layers_and_tokens_of_other_tasks_do_not() -> None:
    shallow = read_model(two_clouds(), {**LLAMA_7B, "num_hidden_layers": 5, "max_position_embeddings": 999})
    assert (shallow.note, shallow.num_layers, shallow.max_length) == (None, 5, 999)
    for changes in ({"hidden_size": 2048}, {"attention_bias": True}):
        assert "estimated" in str(read_model(two_clouds(), {**LLAMA_7B, **changes}).note)
    frozen = read_model(two_clouds("model.frozen_layers=2"), LLAMA_7B)
    assert "estimated" in str(frozen.note)


@pytest.mark.parametrize("name", ["plan-70b", "plan-two-clouds", "plan-encoder-decoder", "plan-generator"])
def test_examples_are_planned_without_estimates(name: str) -> None:
    model = read_model(load_job(EXAMPLES / f"{name}.toml"))
    assert model.note is None


def test_a_plan_says_that_its_costs_are_estimated() -> None:
    found = plan(two_clouds("strategy.kind=pipeline"), is_quick=True)
    assert any("estimated from its sizes" in note for note in found.notes)


@pytest.mark.parametrize("arithmetic", [Arithmetic(), BFLOAT16], ids=["float32", "bfloat16"])
def test_an_estimate_is_near_what_is_measured(arithmetic: Arithmetic) -> None:
    workload = Workload(num_sequences=4, sequence_length=2048, arithmetic=arithmetic)
    real, found = measured(LLAMA_7B, workload), estimated().costs(workload)
    for layers in (range(32), range(4, 9)):
        assert found.num_parameters(layers) == pytest.approx(real.num_parameters(layers), rel=0.01)
    flops = [one.layers[3].flops + one.layers[3].float32_flops for one in (found, real)]
    assert flops[0] == pytest.approx(flops[1], rel=0.02)
    assert 0.95 < found.layers[3].kept_bytes / real.layers[3].kept_bytes < 1.3


def test_a_table_is_read_as_it_was_written() -> None:
    config = {**LLAMA_7B, "hidden_size": 64, "vocab_size": 512, "num_attention_heads": 4}
    model = MeasuredModel(fresh_blueprint(config, head=HEADS["causal-lm"]), Training())
    model.costs(Workload(num_sequences=4, sequence_length=16))
    assert parsed_table(json.loads(table_text(model.table))) == model.table


def test_an_encoder_decoder_is_cut_between_its_halves_and_trains_adapters_alone() -> None:
    config = {"model_type": "encoder-decoder", "adapter_width": 8, "encoder": XLM_R, "decoder": XLM_R}
    model = read_model(two_clouds(), config)
    assert (model.num_layers, model.cuts) == (48, frozenset({24}))
    costs = model.costs_of(Workload(num_sequences=2, sequence_length=64))
    assert costs.layers[3].num_trained == 2 * 1024 * 8
    assert costs.layers[30].num_trained == 4 * 1024**2 + 2 * 1024 * 8
    assert not costs.embedding.has_backward
    with pytest.raises(UserError, match="no table 'decoder'"):
        read_model(two_clouds(), {"model_type": "encoder-decoder", "encoder": XLM_R})


def test_a_configuration_is_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    assert load_config(str(tmp_path)) == LLAMA_7B
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="no model is found"):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no model_type"),
        ({"model_type": "lama"}, "not known"),
        ({**LLAMA_7B, "num_hidden_layers": 513}, "513 layers cannot be planned"),
        ({**LLAMA_7B, "num_hidden_layers": 0}, "num_hidden_layers of the model's configuration is 0"),
    ],
)
def test_what_cannot_be_planned_is_said(config: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read_model(two_clouds(), config)
    assert caught.value.hint or "is 0" in words
