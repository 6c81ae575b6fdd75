"""Weights from a checkpoint: each stage reads its own tensors and no others."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from isthmus.errors import UserError
from isthmus.job import hub
from isthmus.job.hub import INDEX_FILE, WEIGHTS_FILE
from isthmus.model.blueprint import pretrained_blueprint, split_layers
from isthmus.model.export import merge, write_part
from isthmus.model.heads import HEADS
from isthmus.model.load import PretrainedTensor, build_stage
from tests.model.cases import (
    CONFIGS,
    NUM_LABELS,
    assert_identical,
    blueprint,
    build,
    language_head,
    make_batch,
    parameters,
    run_pass,
)
from tests.model.tiny import tiny_values

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def save_model(
    model_type: str, folder: Path, *, max_shard_size: int | str = "1GB", **changes: Any
) -> PreTrainedModel:
    """A model as transformers makes and saves it, with random weights."""
    plan = blueprint(model_type, **changes)
    torch.manual_seed(1)
    model: PreTrainedModel = plan.head.auto_class.from_config(plan.config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def expected_values(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_pretrained_weights_arrive_where_they_belong(model_type: str, tmp_path: Path) -> None:
    model = save_model(model_type, tmp_path)
    plan = pretrained_blueprint(str(tmp_path), head=language_head(model_type))
    stages = build(plan, split_layers(plan.num_layers, 3))
    assert_identical(parameters(stages), expected_values(model))


def short_name(name: str) -> str:
    """A parameter's name without what its model is a part of."""
    return name.rpartition("language_model.")[2].removeprefix("model.")


@pytest.mark.parametrize("model_type", ["gemma3", "llama4", "mistral3", "qwen3_5"])
def test_the_text_part_of_a_composite_model_is_loaded_and_exported(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**tiny_values(model_type), vision_config=VISION)
    torch.manual_seed(1)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(tmp_path / "whole")
    plan = pretrained_blueprint(str(tmp_path / "whole"), head=HEADS["causal-lm"])
    stages = build(plan, split_layers(plan.num_layers, 2))
    assert any("only the text part" in note for note in stages[0].notes)
    tied = {"lm_head.weight": whole.get_input_embeddings().weight}
    text = tied | {short_name(name): one for name, one in whole.named_parameters()}
    assert_identical(
        {short_name(name): one for name, one in parameters(stages).items()},
        {short_name(name): text[short_name(name)].detach() for name in parameters(stages)},
    )
    for number, stage in enumerate(stages):
        write_part(stage, tmp_path / f"part{number}")
    merge([tmp_path / "part0", tmp_path / "part1"], tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_identical(expected_values(loaded), parameters(stages))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_no_two_parameters_share_memory_once_they_are_untied(model_type: str, tmp_path: Path) -> None:
    save_model(model_type, tmp_path)
    plan = pretrained_blueprint(str(tmp_path), head=language_head(model_type))
    cuts = split_layers(plan.num_layers, 2)
    tensors = [one for stage in build(plan, [*cuts, *cuts]) for one in stage.tensors_by_name().values()]
    places = [one.untyped_storage().data_ptr() for one in tensors]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "bert", "mixtral"])
def test_a_stage_needs_no_shard_of_another(model_type: str, tmp_path: Path) -> None:
    model = save_model(model_type, tmp_path, max_shard_size=1)
    plan = pretrained_blueprint(str(tmp_path), head=language_head(model_type))
    layers = split_layers(plan.num_layers, 3)[1]
    files = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    own = {file for name, file in files.items() if f".{layers[0]}." in name}
    assert 0 < len(own) < len(files)
    for file in set(files.values()) - own:
        (tmp_path / file).unlink()
    stages = build(plan, [layers])
    expected = expected_values(model)
    assert_identical(parameters(stages), {name: expected[name] for name in plan.layout.owned_by(layers)})
    with pytest.raises(UserError, match="lacks model-"):
        build(plan, [range(1)])


def test_a_stage_fetches_only_its_own_shards_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model("llama", tmp_path, max_shard_size=1)
    (tmp_path / "tokenizer.json").write_text("{}")
    fetched: list[str] = []

    def fetch(name: str, file: str, *, local_files_only: bool) -> str:
        assert not local_files_only
        assert name == "someone/tiny"
        if not (tmp_path / file).is_file():
            raise EntryNotFoundError(f"no {file}")
        fetched.append(file)
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(hub, "_why_unreachable", lambda: None)
    plan = pretrained_blueprint("someone/tiny", head=HEADS["causal-lm"])
    assert fetched == ["config.json"]
    stages = build(plan, [range(1, 2)])
    files = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    own = plan.layout.owned_by(range(1, 2))
    assert set(fetched) == {"config.json", INDEX_FILE, *(files[name] for name in own)}
    assert_identical(parameters(stages), {name: expected_values(model)[name] for name in own})


@pytest.mark.parametrize("model_type", ["gemma", "electra"])
def test_no_tensor_of_another_stage_is_read(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(model_type, tmp_path)
    plan = pretrained_blueprint(str(tmp_path), head=language_head(model_type))
    read: list[str] = []
    original = PretrainedTensor.__getitem__

    def reading(self: PretrainedTensor, index: Any) -> Tensor:
        read.append(self.name)
        return original(self, index)

    monkeypatch.setattr(PretrainedTensor, "__getitem__", reading)
    first, middle, last = split_layers(3, 3)
    build(plan, [first])
    assert set(read) == set(plan.layout.owned_by(first))
    read.clear()
    build(plan, [middle])
    assert set(read) == set(plan.layout.owned_by(middle))
    read.clear()
    build(plan, [last])
    givers = set(plan.ties.values()) - set(plan.layout.last)
    assert set(read) == (set(plan.layout.owned_by(last)) - set(plan.ties)) | givers


def test_tied_weights_stay_tied_in_one_stage_and_are_untied_by_a_cut(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    plan = pretrained_blueprint(str(tmp_path), head=HEADS["causal-lm"])
    assert plan.is_tied_across_layers
    (whole,) = build(plan, [range(3)])
    assert whole.model.get_parameter(EMBEDDING) is whole.model.get_parameter(OUTPUT)
    assert whole.notes == ()
    first, last = build(plan, split_layers(3, 2))
    assert "untied" in first.notes[0]
    assert "untied" in last.notes[0]
    assert torch.equal(first.model.get_parameter(EMBEDDING), last.model.get_parameter(OUTPUT))
    assert not last.model.config.tie_word_embeddings


def test_a_new_head_starts_fresh_and_alike_in_every_cut(tmp_path: Path) -> None:
    plan = blueprint("bert")
    torch.manual_seed(1)
    plan.head.auto_class.from_config(plan.config).base_model.save_pretrained(tmp_path)
    head = HEADS["sequence-classification"]
    plan = pretrained_blueprint(str(tmp_path), head=head, num_labels=NUM_LABELS)
    whole = build(plan, [range(4)])
    cut = build(plan, split_layers(4, 2))
    assert_identical(parameters(cut), parameters(whole))
    assert all(name in cut[1].notes[0] for name in ("bert.pooler.dense.weight", "classifier.weight"))
    assert cut[0].notes == ()
    batch = make_batch(head)
    assert torch.equal(run_pass(cut, batch).loss, run_pass(whole, batch).loss)


def test_the_weights_may_have_another_type_than_the_file(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path)
    plan = pretrained_blueprint(str(tmp_path), head=HEADS["causal-lm"])
    (stage,) = build(plan, [range(4)], dtype=torch.bfloat16)
    for name, value in expected_values(model).items():
        assert torch.equal(parameters([stage])[name], value.bfloat16())


def test_fresh_weights_depend_on_the_seed() -> None:
    plan = blueprint("llama")

    one, same, other = (build_stage(plan, range(4), seed=seed) for seed in (1, 1, 2))
    assert_identical(parameters([one]), parameters([same]))
    name = "model.layers.2.mlp.up_proj.weight"
    assert not torch.equal(parameters([one])[name], parameters([other])[name])
    assert not torch.equal(parameters([one])[name], parameters([one])[name.replace("2", "1")])


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    plan = blueprint("bert", HEADS["token-classification"])
    plan.head.auto_class.from_config(plan.config).save_pretrained(tmp_path)
    plan = pretrained_blueprint(str(tmp_path), head=plan.head, num_labels=7)
    with pytest.raises(UserError, match=r"classifier\.\w+ has shape \(3,.*\) in .*, not \(7") as caught:
        build(plan, split_layers(4, 2))
    assert "num_labels" in str(caught.value.hint)


def test_a_missing_layer_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    plan = pretrained_blueprint(str(tmp_path), head=HEADS["causal-lm"])
    with pytest.raises(UserError, match=r"no weights for model\.layers\.4\..* of LlamaForCausalLM"):
        build(plan, split_layers(5, 2))


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    plan = pretrained_blueprint(str(tmp_path), head=HEADS["causal-lm"])
    with pytest.raises(UserError, match="no safetensors") as caught:
        build(plan, [range(4)])
    assert "save_pretrained" in str(caught.value.hint)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{broken"])
def test_broken_weights_are_named(content: bytes, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(content)
    plan = pretrained_blueprint(str(tmp_path), head=HEADS["causal-lm"])
    with pytest.raises(UserError, match="no safetensors file"):
        build(plan, [range(4)])


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(content: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path, max_shard_size=1)
    (tmp_path / INDEX_FILE).write_text(content)
    plan = pretrained_blueprint(str(tmp_path), head=HEADS["causal-lm"])
    with pytest.raises(UserError, match="no index"):
        build(plan, [range(4)])
