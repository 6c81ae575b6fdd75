"""Parts that stages wrote, joined into a folder that transformers loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from isthmus.errors import UserError
from isthmus.job.hub import INDEX_FILE
from isthmus.model.blueprint import Blueprint, pretrained_blueprint, split_layers
from isthmus.model.export import merge, write_part
from isthmus.model.heads import HEADS
from isthmus.model.stage import Stage, StageInput
from tests.model.cases import (
    CONFIGS,
    assert_identical,
    blueprint,
    build,
    language_head,
    make_batch,
    parameters,
    scores_of,
)
from tests.model.test_weights import save_model

FAMILIES_AND_HEADS = [
    *[(model_type, language_head(model_type).name) for model_type in CONFIGS],
    ("bert", "sequence-classification"),
    ("llama", "token-classification"),
    ("gpt2", "sequence-classification"),
    ("electra", "question-answering"),
]


def stage_scores(stages: list[Stage], plan: Blueprint) -> Tensor:
    batch = make_batch(plan.head)
    crossing = None
    with torch.no_grad():
        for stage in stages[:-1]:
            crossing = stage.eval()(StageInput(batch=batch, crossing=crossing)).crossing
        return scores_of(stages[-1].eval(), StageInput(batch=batch, crossing=crossing))


def loaded_scores(folder: Path, plan: Blueprint) -> Tensor:
    batch = make_batch(plan.head)
    model, report = plan.head.auto_class.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        return plan.head.scores(model(input_ids=batch.ids, attention_mask=batch.mask))


def write_parts(stages: list[Stage], folder: Path, *, max_file_bytes: int = 10**9) -> list[Path]:
    parts = [folder / f"part-{index}" for index in range(len(stages))]
    for stage, part in zip(stages, parts, strict=True):
        write_part(stage, part, max_file_bytes=max_file_bytes)
    return parts


@pytest.mark.parametrize(("model_type", "head"), FAMILIES_AND_HEADS)
def test_the_joined_model_gives_the_scores_of_its_stages(model_type: str, head: str, tmp_path: Path) -> None:
    plan = blueprint(model_type, HEADS[head])
    stages = build(plan, split_layers(plan.num_layers, 2))
    merge(write_parts(stages, tmp_path), tmp_path / "model")
    assert torch.equal(loaded_scores(tmp_path / "model", plan), stage_scores(stages, plan))


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm-roberta", "electra", "qwen3"])
def test_ties_of_a_pretrained_model_are_no_loss(model_type: str, tmp_path: Path) -> None:
    save_model(model_type, tmp_path / "origin")
    plan = pretrained_blueprint(str(tmp_path / "origin"), head=language_head(model_type))
    stages = build(plan, split_layers(plan.num_layers, 2))
    with torch.no_grad():
        for number, parameter in enumerate(stages[-1].parameters()):
            parameter.add_(number)
    merge(write_parts(stages, tmp_path), tmp_path / "model")
    assert torch.equal(loaded_scores(tmp_path / "model", plan), stage_scores(stages, plan))


def test_an_export_is_where_the_next_training_starts(tmp_path: Path) -> None:
    plan = blueprint("gemma")
    stages = build(plan, split_layers(3, 3))
    merge(write_parts(stages, tmp_path), tmp_path / "model")
    again = pretrained_blueprint(str(tmp_path / "model"), head=plan.head)
    assert not again.is_tied_across_layers
    assert_identical(parameters(build(again, split_layers(3, 2))), parameters(stages))


def test_experts_are_exported_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    plan = blueprint("mixtral")
    merge(write_parts(build(plan, split_layers(3, 2)), tmp_path), tmp_path / "model")
    names = json.loads((tmp_path / "model" / INDEX_FILE).read_text())["weight_map"]
    assert "model.layers.2.block_sparse_moe.experts.1.w3.weight" in names


def test_files_are_split_at_their_largest_size(tmp_path: Path) -> None:
    plan = blueprint("llama")
    stages = build(plan, split_layers(4, 2))
    merge(write_parts(stages, tmp_path, max_file_bytes=4000), tmp_path / "model")
    index = json.loads((tmp_path / "model" / INDEX_FILE).read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert sorted(files) == sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in parameters(stages).values())
    assert torch.equal(loaded_scores(tmp_path / "model", plan), stage_scores(stages, plan))


def test_a_single_tied_stage_is_exported_tied(tmp_path: Path) -> None:
    plan = blueprint("qwen3")
    stages = build(plan, [range(3)])
    merge(write_parts(stages, tmp_path), tmp_path / "model")
    assert AutoConfig.from_pretrained(tmp_path / "model").tie_word_embeddings
    assert not (tmp_path / "model" / INDEX_FILE).exists()
    assert torch.equal(loaded_scores(tmp_path / "model", plan), stage_scores(stages, plan))


def test_weights_gathered_elsewhere_are_written(tmp_path: Path) -> None:
    plan = blueprint("llama")
    (stage,) = build(plan, [range(4)])
    zeros = {name: torch.zeros_like(value) for name, value in stage.model.state_dict().items()}
    write_part(stage, tmp_path / "part", tensors=zeros)
    merge([tmp_path / "part"], tmp_path / "model")
    assert loaded_scores(tmp_path / "model", plan).abs().max() == 0


def test_companions_pass_through(tmp_path: Path) -> None:
    companions = [tmp_path / name for name in ("tokenizer.json", "generation_config.json")]
    for path in companions:
        path.write_text(f'{{"from": "{path.name}"}}')
    parts = write_parts(build(blueprint("llama"), split_layers(4, 2)), tmp_path)
    merge(parts, tmp_path / "model", companions=companions)
    for path in companions:
        assert (tmp_path / "model" / path.name).read_text() == path.read_text()


def test_a_new_export_replaces_the_old_one_whole(tmp_path: Path) -> None:
    plan = blueprint("llama")
    many = write_parts(build(plan, split_layers(4, 4)), tmp_path)
    merge(many, tmp_path / "model")
    (tmp_path / "model" / "leftover").write_text("old")
    stages = build(plan, split_layers(4, 2))
    merge(write_parts(stages, tmp_path), tmp_path / "model")
    assert not (tmp_path / "model" / "leftover").exists()
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_failed_export_leaves_the_old_one(tmp_path: Path) -> None:
    parts = write_parts(build(blueprint("llama"), split_layers(4, 2)), tmp_path)
    merge(parts, tmp_path / "model")
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    with pytest.raises(UserError, match="cannot be written"):
        merge(parts, tmp_path / "model", companions=[tmp_path / "nowhere.json"])
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_parts_must_make_one_whole_model(tmp_path: Path) -> None:
    first, middle, last = write_parts(build(blueprint("llama"), split_layers(4, 3)), tmp_path)
    model = tmp_path / "model"
    with pytest.raises(UserError, match="at least one part"):
        merge([], model)
    with pytest.raises(UserError, match=r"hold the layers \[0, 1, 3\] of 4"):
        merge([first, last], model)
    with pytest.raises(UserError, match="hold the layers"):
        merge([middle, first], model)
    with pytest.raises(UserError, match="hold the layers"):
        merge([first, first, middle, last], model)
    with pytest.raises(UserError, match="no part of a model"):
        merge([first, middle, tmp_path / "nowhere"], model)
    other = tmp_path / "other"
    other.mkdir()
    (stranger,) = write_parts(build(blueprint("llama", rms_norm_eps=0.5), [range(3, 4)]), other)
    with pytest.raises(UserError, match="different models"):
        merge([first, middle, stranger], model)
    assert not model.exists()


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    first, last = write_parts(build(blueprint("llama"), split_layers(4, 2)), tmp_path)
    shutil.copyfile(first / "model.safetensors", last / "model-extra.safetensors")
    with pytest.raises(UserError, match="in more than one part"):
        merge([first, last], tmp_path / "model")
