"""Costs from a configuration alone, against transformers' own models and classes of configurations."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.errors import UserError
from isthmus.model.families import HEADS
from isthmus.model.stage import Batch, StageInput
from isthmus.plan.costs.arithmetic import Arithmetic, Precision
from isthmus.plan.costs.families import FAMILIES
from isthmus.plan.costs.parts import ModelCosts, Workload, model_costs
from isthmus.plan.costs.shapes import Activation, Task, load_config, read_shape
from tests.model.cases import CASES, COMMON, CONFIGS, ENCODERS, MOMENT, NUM_LABELS, blueprint, build

WORKLOAD = Workload(num_sequences=2, sequence_length=64)
SEVENTY_B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
EIGHT_BY_SEVEN_B = {"model_type": "mixtral"}


def costs_of(model_type: str, task: Task, workload: Workload = WORKLOAD, **changes: Any) -> ModelCosts:
    values = {"model_type": model_type, **COMMON, **CONFIGS[model_type], **changes}
    num_labels = None if task.is_language_model else NUM_LABELS
    return model_costs(read_shape(values, task=task, num_labels=num_labels), workload)


@pytest.mark.parametrize(("model_type", "head"), CASES)
def test_parameters_of_every_part_are_those_of_the_real_model(model_type: str, head: str) -> None:
    costs = costs_of(model_type, Task(head))
    real = blueprint(model_type, HEADS[head])
    assert costs.embedding.num_parameters == sum(real.anatomy.first.values())
    assert [layer.num_parameters for layer in costs.layers] == [
        sum(layer.values()) for layer in real.anatomy.layers
    ]
    assert costs.head.num_parameters == sum(real.anatomy.last.values())
    assert (costs.num_tied_parameters > 0) == real.is_tied_across_layers
    whole = range(real.num_layers)
    (stage,) = build(real, [whole])
    assert costs.num_parameters(whole) == sum(one.numel() for one in stage.model.parameters())
    assert costs.num_parameters(range(1)) == sum(real.anatomy.owned_by(range(1)).values())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_configuration_leaves_out_is_as_transformers_has_it(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    assert read_shape({"model_type": model_type}) == read_shape(config.to_dict())
    bare = {"model_type": model_type, **COMMON, **CONFIGS[model_type]}
    full = CONFIG_MAPPING[model_type](**{key: value for key, value in bare.items() if key != "model_type"})
    assert read_shape(bare) == read_shape(full.to_dict())


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("has_dropout", [False, True])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_kept_bytes_of_a_layer_are_what_autograd_saves(
    model_type: str, has_dropout: bool, precision: Precision
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "max_position_embeddings": 64}
    full = {**COMMON, **CONFIGS[model_type]}
    sizes |= {"num_key_value_heads": 3} if "num_key_value_heads" in full else {}
    sizes |= {"head_dim": 16} if "head_dim" in full else {}
    sizes |= {"intermediate_size": 224} if "intermediate_size" in full else {}
    sizes |= {"sliding_window": 64, "use_sliding_window": False} if "max_window_layers" in full else {}
    sizes |= {"sliding_window": 64} if model_type == "mistral" else {}
    if model_type == "gpt2":
        sizes["n_positions"] = sizes.pop("max_position_embeddings")
    if not has_dropout:
        sizes |= {key: 0.0 for key in full if "drop" in key}
    arithmetic = Arithmetic(precision=precision, on_accelerator=False)
    workload = Workload(num_sequences=2, sequence_length=64, arithmetic=arithmetic)
    task = Task("masked-lm" if model_type in ENCODERS else "causal-lm")
    costs = costs_of(model_type, task, workload, **sizes)
    kept, casts = saved_bytes(model_type, precision, **sizes)
    shared_bytes = costs.arrival_bytes[1] - costs.boundary_bytes * round(
        costs.arrival_bytes[1] / costs.boundary_bytes
    )
    assert costs.layers[1].kept_bytes + shared_bytes == pytest.approx(kept + casts, rel=0.005)


def saved_bytes(model_type: str, precision: Precision, **changes: Any) -> tuple[int, int]:
    """What a forward pass of one layer leaves for its backward: activations, and copies of weights."""
    (stage,) = build(blueprint(model_type, **changes), [range(1, 2)])
    ids = torch.randint(3, COMMON["vocab_size"], (2, 64), generator=torch.Generator().manual_seed(0))
    weights = {one.untyped_storage().data_ptr() for one in stage.parameters()}
    shapes = {tuple(sorted(one.shape)) for one in stage.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    is_mixed = precision is Precision.BFLOAT16
    casting = torch.autocast("cpu", dtype=torch.bfloat16) if is_mixed else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), casting:
        crossing = torch.zeros(2, 64, 96, requires_grad=True)
        output = stage(StageInput(batch=Batch(ids=ids, num_targets=128), crossing=crossing, moment=MOMENT))
    del output
    found = {place: tensor for place, tensor in saved.items() if place not in weights}
    copies = {
        place: tensor
        for place, tensor in found.items()
        if tensor.dtype is torch.bfloat16 and tuple(sorted(tensor.shape)) in shapes
    }
    kept = sum(one.untyped_storage().nbytes() for place, one in found.items() if place not in copies)
    return kept, sum(one.untyped_storage().nbytes() for one in copies.values())


def test_seventy_billion_parameters_and_six_operations_for_each() -> None:
    costs = model_costs(read_shape(SEVENTY_B), Workload(num_sequences=1, sequence_length=4096))
    num_parameters = costs.num_parameters(range(80))
    assert num_parameters == 70_553_706_496
    parts = costs.parts(range(80))
    num_multiplied = num_parameters - costs.embedding.num_parameters
    per_token = sum(part.flops for part in parts) / 4096
    # Two operations per weight, and the scores of attention on top, which see half of the tokens.
    scores = 80 * 4 * 8192 * (4096 + 1) / 2
    assert per_token == pytest.approx(2 * num_multiplied + scores, rel=1e-4)
    assert costs.boundary_bytes == 4 * 8192 * 4096


def test_a_mixture_holds_all_experts_and_computes_the_active_ones() -> None:
    shape, expert = read_shape(EIGHT_BY_SEVEN_B), 3 * 4096 * 14336
    own, gathered = (
        model_costs(
            shape,
            Workload(
                num_sequences=1,
                sequence_length=128,
                arithmetic=Arithmetic(precision=Precision.BFLOAT16, is_gathered=is_gathered),
            ),
        )
        for is_gathered in (False, True)
    )
    assert own.num_parameters(range(32)) == 46_702_792_704
    assert own.layers[0].num_parameters > 8 * expert
    # In the type of their weights, which only what is gathered has in bfloat16.
    assert own.layers[0].float32_flops == 2 * 128 * 2 * expert
    assert gathered.layers[0].float32_flops == 0
    assert gathered.layers[0].flops == own.layers[0].flops + own.layers[0].float32_flops


def test_a_window_shortens_attention_and_nothing_else() -> None:
    config = {"model_type": "mistral", "num_hidden_layers": 2}
    workload = Workload(num_sequences=1, sequence_length=8192)
    near = model_costs(read_shape({**config, "sliding_window": 1024}), workload).layers[0]
    far = model_costs(read_shape({**config, "sliding_window": 8192}), workload).layers[0]
    assert near.num_parameters == far.num_parameters
    scores = 8192 * 4 * 4096
    assert far.flops - near.flops == pytest.approx(scores * (4096.5 - (1024 - 1024 * 1023 / (2 * 8192))))


def test_layers_may_differ_in_their_window() -> None:
    shape = read_shape(
        {
            "model_type": "qwen2",
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 512,
            "max_window_layers": 3,
        }
    )
    assert shape.attention_windows == (None, None, None, 512)
    listed = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "sliding_window": 512,
        "use_sliding_window": True,
    }
    kinds = ["sliding_attention", "full_attention"]
    assert read_shape({**listed, "layer_types": kinds}).attention_windows == (512, None)


def test_a_configuration_is_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}))
    shape = read_shape(load_config(str(tmp_path)))
    assert shape.num_layers == 3
    assert shape.inner_width == 4 * 768
    assert shape.activation is Activation.SPELLED_OUT


@pytest.mark.parametrize("text", ["[1]", "{", ""])
def test_a_broken_configuration_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="no configuration of a model"):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "has no model_type"),
        ({"model_type": "lama"}, "model_type 'lama' are not known"),
        ({"model_type": "llama", "hidden_size": -4}, "hidden_size .* is -4"),
        ({"model_type": "llama", "num_hidden_layers": 2.5}, "num_hidden_layers .* is 2.5"),
        ({"model_type": "bert", "hidden_dropout_prob": 2}, "residual_dropout .* is 2"),
    ],
)
def test_an_absurd_configuration_is_one_sentence(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_shape(values)


def test_more_layers_than_can_be_planned_are_refused() -> None:
    assert read_shape({"model_type": "llama", "num_hidden_layers": 512}).num_layers == 512
    with pytest.raises(UserError, match="a model of 100000 layers cannot be planned, 512 are the most"):
        read_shape({"model_type": "llama", "num_hidden_layers": 100_000})
    with pytest.raises(UserError, match="a model of 513 layers"):
        read_shape({"model_type": "gpt2", "n_layer": 513})


def test_a_name_that_goes_on_behind_a_known_one_is_no_slip() -> None:
    with pytest.raises(UserError, match="the costs of model_type 'qwen3_moe' are not known") as caught:
        read_shape({"model_type": "qwen3_moe"})
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("models of these types can be planned: ")
    assert "mixtral" in caught.value.hint


def test_a_mistyped_family_is_guessed() -> None:
    with pytest.raises(UserError) as caught:
        read_shape({"model_type": "lamma"})
    assert caught.value.hint == "did you mean 'llama'?"
