"""Costs that are measured on fake tensors are those of real stages."""

import functools
from typing import Any

import pytest
import torch

from isthmus.job.sections import LoraSpec
from isthmus.model.blueprint import Blueprint, fresh_blueprint
from isthmus.model.costs import MeasuredModel, Training
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch
from isthmus.plan.costs import Arithmetic, ModelCosts, Precision, Workload
from isthmus.plan.memory import StageOptions, stage_memory
from isthmus.plan.pipeline_parts import HIDDEN
from isthmus.train.pipeline import MEMORY, Passes
from tests.model.tiny import tiny_blueprint

SIZES = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("causal-lm", {"num_key_value_heads": 2, "intermediate_size": 160}),
    "gpt2": ("causal-lm", {}),
    "olmo2": ("causal-lm", {"intermediate_size": 160}),
    "bert": ("masked-lm", {"intermediate_size": 256}),
}
NUM_SEQUENCES, LENGTH = 4, 32
AUTOCAST = {Precision.FLOAT32: None, Precision.BFLOAT16: torch.bfloat16}


def blueprint(model_type: str) -> Blueprint:
    task, changes = MODELS[model_type]
    return fresh_blueprint({"model_type": model_type, **SIZES, **changes}, head=HEADS[task])


def workload(**changes: Any) -> Workload:
    recompute = changes.pop("recompute", False)
    arithmetic = Arithmetic(**{"on_accelerator": False, **changes})
    return Workload(
        num_sequences=NUM_SEQUENCES, sequence_length=LENGTH, arithmetic=arithmetic, recompute=recompute
    )


def model_of(model_type: str) -> Blueprint:
    if model_type in TRANSLATORS:
        return translator(model_type)
    return blueprint(model_type) if model_type in MODELS else tiny_blueprint(model_type)


@functools.cache
def measured(model_type: str, load: Workload, training: Training = Training()) -> ModelCosts:  # noqa: B008 frozen
    return MeasuredModel(model_of(model_type), training).costs(load)


def saved_bytes(model: Blueprint, layers: range, *, autocast: torch.dtype | None) -> int:
    """What a real stage leaves for its backward, as autograd says: storages that are no parameters."""
    stage = build_stage(model, layers, seed=0)
    passes = Passes(stage, device=torch.device("cpu"), seed=0, autocast=autocast)
    passes.train(True)
    own = {one.untyped_storage().data_ptr() for one in (*stage.parameters(), *stage.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(NUM_SEQUENCES, LENGTH, dtype=torch.int64)
    batch = Batch(ids=ids, labels=ids, num_targets=1)
    names = ([HIDDEN] if layers.start else []) + ([MEMORY] if stage.has_memory else [])
    arrived = {name: torch.zeros(NUM_SEQUENCES, LENGTH, SIZES["hidden_size"]) for name in names}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        passes.forward(batch, arrived, step=0, item=0, num_step_targets=1)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("model_type", "precision"),
    [
        *((one, Precision.FLOAT32) for one in MODELS),
        ("llama", Precision.BFLOAT16),
        ("bert", Precision.BFLOAT16),
    ],
)
def test_a_layer_keeps_what_autograd_saves(model_type: str, precision: Precision) -> None:
    model = blueprint(model_type)
    costs = measured(model_type, workload(precision=precision))
    one, two = (saved_bytes(model, range(1, stop), autocast=AUTOCAST[precision]) for stop in (2, 3))
    # The output of a layer takes the place of its input, which both are of one size.
    assert costs.layers[1].kept_bytes == pytest.approx(two - one, rel=0.001)


@pytest.mark.parametrize("model_type", MODELS)
def test_parameters_are_those_of_the_model(model_type: str) -> None:
    model = blueprint(model_type)
    costs = measured(model_type, workload())
    for layers in (range(2), range(2, 4), range(4, 5)):
        stage = build_stage(model, layers, seed=0)
        assert costs.num_parameters(layers) == sum(one.numel() for one in stage.parameters())
    whole = build_stage(model, range(5), seed=0)
    assert costs.num_parameters(range(5)) == sum(one.numel() for one in whole.parameters())


def test_operations_of_a_layer_are_those_of_its_products() -> None:
    layer = measured("llama", workload(on_accelerator=True, precision=Precision.BFLOAT16)).layers[2]
    num_tokens, width, inner = NUM_SEQUENCES * LENGTH, 64, 160
    products = 2 * width * width + 2 * width * (width // 2) + 3 * width * inner
    attention = 2 * width * LENGTH
    assert layer.flops == 2 * num_tokens * products + num_tokens * attention
    assert layer.backward_share == pytest.approx(2, abs=0.1)
    assert 30 < layer.num_kernels < 80


def test_recomputing_keeps_the_input_alone_and_needs_the_rest_in_the_backward() -> None:
    costs, again = measured("llama", workload()), measured("llama", workload(recompute=True))
    stream_bytes = 4 * NUM_SEQUENCES * LENGTH * 64
    assert again.layers[2].kept_bytes == stream_bytes
    assert again.layers[2].backward_bytes >= costs.layers[2].kept_bytes - stream_bytes
    assert again.layers[2].flops == costs.layers[2].flops
    # A recomputation ends before the last product, whose result no backward needs.
    assert 1.5 < again.layers[2].backward_share < costs.layers[2].backward_share


def test_frozen_layers_keep_nothing_and_adapters_are_what_is_trained() -> None:
    frozen = measured("llama", workload(), Training(num_frozen_layers=2))
    assert [part.has_backward for part in frozen.parts(range(5))] == [False] * 3 + [True] * 4
    assert frozen.layers[0].kept_bytes == 0 < frozen.layers[2].kept_bytes
    assert frozen.num_trained(range(2)) == 0
    thin = measured("llama", workload(), Training(lora=LoraSpec(r=4, targets=("q_proj",))))
    assert thin.layers[1].num_trained == 4 * (64 + 64)
    assert thin.layers[1].backward_share < 1.5


def test_an_accelerator_keeps_no_scores_and_narrow_masks_of_dropout() -> None:
    here, there = (measured("bert", workload(on_accelerator=one)) for one in (False, True))
    num_scores = NUM_SEQUENCES * 4 * LENGTH * LENGTH
    assert here.layers[2].kept_bytes - there.layers[2].kept_bytes > 4 * num_scores


def test_memory_of_a_stage_grows_with_its_layers_and_its_window() -> None:
    costs = measured("llama", workload())
    small, large = (stage_memory(costs, range(1, stop), window=1, options=StageOptions()) for stop in (2, 4))
    assert small.activations < large.activations
    assert stage_memory(costs, range(1, 2), window=3).activations == 3 * small.activations


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gemma2", "granite", "glm4", "cohere"])
def test_families_that_no_formula_knows_are_measured(model_type: str) -> None:
    model = tiny_blueprint(model_type)
    costs = measured(model_type, workload(precision=Precision.BFLOAT16, on_accelerator=True))
    assert costs.num_layers == model.num_layers
    assert all(part.flops + part.float32_flops > 0 for part in costs.layers)
    assert all(part.kept_bytes > 0 and part.num_kernels > 10 for part in costs.layers)


BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 4,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 160,
    "max_position_embeddings": 64,
}
# Encoder–decoders of four and three layers; what T5 shares between its layers cannot be parted.
TRANSLATORS: dict[str, dict[str, Any]] = {
    "bart": BART,
    "pegasus": BART,
    "t5": {"d_model": 64, "num_layers": 4, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 16, "d_ff": 128},
}

ONE_FAST = ["bart", *(pytest.param(one, marks=pytest.mark.slow) for one in ("pegasus", "t5"))]


def translator(model_type: str) -> Blueprint:
    tokens = {"vocab_size": 512, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    values = {"model_type": model_type, **tokens, **TRANSLATORS[model_type]}
    return fresh_blueprint(values, head=HEADS["translation"])


@pytest.mark.parametrize("model_type", ONE_FAST)
def test_parameters_of_encoder_and_decoder_are_those_of_their_stages(model_type: str) -> None:
    model = translator(model_type)
    costs = measured(model_type, workload())
    within = [] if model_type == "t5" else [range(2), range(2, 4), range(4, 6), range(6, 7)]
    for layers in (range(4), range(4, 7), *within):
        stage = build_stage(model, layers, seed=0)
        assert costs.num_parameters(layers) == sum(one.numel() for one in stage.parameters())
    whole = build_stage(model, range(7), seed=0)
    assert costs.num_parameters(range(7)) == sum(one.numel() for one in whole.parameters())
    trained = sum(one.numel() for one in whole.parameters() if one.requires_grad)
    # The positions of Pegasus are constants here.
    assert costs.num_trained(range(7)) == pytest.approx(trained, rel=0.03)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("model_type", ONE_FAST)
def test_encoder_and_decoder_keep_what_autograd_saves(model_type: str, precision: Precision) -> None:
    model = translator(model_type)
    costs = measured(model_type, workload(precision=precision))
    encoder, decoder = (
        saved_bytes(model, layers, autocast=AUTOCAST[precision]) for layers in (range(4), range(4, 7))
    )
    kept = [sum(part.kept_bytes for part in costs.parts(layers)) for layers in (range(4), range(4, 7))]
    # What leaves is kept beside it.
    stream_bytes = 4 * NUM_SEQUENCES * LENGTH * 64
    assert encoder < kept[0] < 1.01 * encoder + stream_bytes
    # What arrives is counted whole, which in a model this small is a little more than what is kept of it.
    assert 0.999 * decoder < kept[1] + costs.arrival_bytes[4] < 1.03 * decoder


def test_a_frozen_encoder_has_no_backward_and_the_decoder_reads_its_memory() -> None:
    costs = measured("bart", workload(), Training(num_frozen_layers=4))
    assert [part.has_backward for part in costs.parts(range(7))] == [False] * 5 + [True] * 4
    assert costs.num_trained(range(4)) == 0 < costs.num_trained(range(4, 7))


def test_a_decoder_layer_counts_the_products_with_the_memory() -> None:
    layers = measured("bart", workload(on_accelerator=True)).layers
    num_tokens, width = NUM_SEQUENCES * LENGTH, 64
    self_attention = 4 * width * width + 2 * width * LENGTH
    cross_attention = 4 * width * width + 2 * width * LENGTH
    assert layers[1].float32_flops == 2 * num_tokens * (self_attention + 2 * width * 128)
    both = self_attention + cross_attention
    assert layers[5].float32_flops == 2 * num_tokens * (both + 2 * width * 160)
