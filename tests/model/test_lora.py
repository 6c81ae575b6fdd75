"""Adapters in a cut model, and what peft and transformers make of what was exported."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from isthmus.errors import UserError
from isthmus.job.sections import LoraSpec
from isthmus.model.blueprint import Blueprint, pretrained_blueprint, split_layers
from isthmus.model.export import merge, write_part
from isthmus.model.heads import HEADS
from isthmus.model.stage import Stage
from tests.model.cases import NUM_LABELS, assert_identical, build, language_head, make_batch, run_pass
from tests.model.test_export import loaded_scores, stage_scores, write_parts
from tests.model.test_weights import save_model
from tests.model.tiny import tiny_blueprint

LORA = LoraSpec(r=2, alpha=8.0)


def pretrained(model_type: str, folder: Path, head: str | None = None) -> Blueprint:
    save_model(model_type, folder, tie_word_embeddings=False)
    chosen = HEADS[head] if head else language_head(model_type)
    num_labels = None if chosen.name.endswith("lm") else NUM_LABELS
    return pretrained_blueprint(str(folder), head=chosen, num_labels=num_labels)


def learn(stages: Sequence[Stage], plan: Blueprint, *, num_steps: int = 3) -> None:
    """Let the adapters take some steps, so that they say something."""
    optimizers = [torch.optim.SGD(stage.parameters_by_name().values(), lr=0.5) for stage in stages]
    for step in range(num_steps):
        run_pass(stages, make_batch(plan.head, seed=step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def base_values(stages: Sequence[Stage]) -> dict[str, Tensor]:
    return {
        name.replace(".base_layer.", "."): one.detach().clone()
        for stage in stages
        for name, one in stage.model.named_parameters()
        if not one.requires_grad
    }


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama4_text", "mixtral"])
def test_models_with_experts_are_adapted_as_peft_reads_it_back(model_type: str, tmp_path: Path) -> None:
    plan = tiny_blueprint(model_type)
    # The first stage has dense layers alone, where the family has some.
    stages = build(plan, [range(1), range(1, plan.num_layers)], lora=LORA)
    learn(stages, plan)
    names = {name for stage in stages for name in stage.parameters_by_name()}
    assert all("self_attn" in name for name in names)
    for number, stage in enumerate(stages):
        write_part(stage, tmp_path / f"part{number}")
    merge([tmp_path / "part0", tmp_path / "part1"], tmp_path / "model")
    base = plan.model_class(plan.config)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "model"))
    trained = {
        f"base_model.model.{name}": one.detach()
        for stage in stages
        for name, one in stage.parameters_by_name().items()
    }
    found = {name: one.detach() for name, one in loaded.named_parameters() if ".lora_" in name}
    assert_identical(found, trained)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert"])
def test_only_adapters_learn_and_no_cut_changes_them(model_type: str, tmp_path: Path) -> None:
    plan = pretrained(model_type, tmp_path)
    trained = []
    for num_stages in (1, 3):
        stages = build(plan, split_layers(plan.num_layers, num_stages), lora=LORA, recompute=num_stages == 3)
        learn(stages, plan)
        names = [name for stage in stages for name in stage.parameters_by_name()]
        assert names
        assert all(".lora_" in name for name in names)
        assert_identical(base_values(stages), base_values(build(plan, [range(plan.num_layers)], lora=LORA)))
        trained.append({n: p.detach() for stage in stages for n, p in stage.parameters_by_name().items()})
    assert_identical(trained[1], trained[0])
    assert all(value.any() for value in trained[0].values())


@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        ("llama", None),
        ("qwen3", None),
        ("gpt2", None),
        ("roberta", "sequence-classification"),
        ("electra", "question-answering"),
    ],
)
def test_peft_loads_the_joined_adapter(model_type: str, head: str | None, tmp_path: Path) -> None:
    plan = pretrained(model_type, tmp_path / "base", head)
    stages = build(plan, split_layers(plan.num_layers, 2), lora=LORA)
    learn(stages, plan)
    folder = tmp_path / "model"
    merge(write_parts(stages, tmp_path), folder)
    assert not list(folder.glob("model*.safetensors"))
    torch.manual_seed(3)
    base = plan.head.auto_class.from_pretrained(tmp_path / "base", num_labels=plan.config.num_labels)
    batch = make_batch(plan.head)
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    with torch.no_grad():
        scores = plan.head.scores(model(input_ids=batch.ids, attention_mask=batch.mask))
    assert torch.allclose(scores, stage_scores(stages, plan), atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_merged_weights_need_no_peft_and_the_adapter_lies_beside(model_type: str, tmp_path: Path) -> None:
    plan = pretrained(model_type, tmp_path / "base")
    stages = build(plan, split_layers(plan.num_layers, 2), lora=LORA.model_copy(update={"merge": True}))
    untrained = stage_scores(stages, plan)
    for stage in stages:
        stage.train()
    learn(stages, plan)
    folder = tmp_path / "model"
    merge(write_parts(stages, tmp_path), folder)
    expected = stage_scores(stages, plan)
    assert torch.allclose(loaded_scores(folder, plan), expected, atol=1e-5)
    assert not torch.allclose(untrained, expected, atol=1e-3)
    assert {path.name for path in (folder / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_merged_weights_lie_in_files_and_the_stage_keeps_its_own(tmp_path: Path) -> None:
    plan = pretrained("llama", tmp_path / "base")
    (stage,) = build(plan, [range(plan.num_layers)], lora=LORA)
    learn([stage], plan)
    before = base_values([stage])
    assert stage.adapters is not None
    merged = stage.adapters.merged(stage.model.state_dict(), tmp_path)
    adapted = {name for name, one in merged.items() if one.untyped_storage().filename is not None}
    assert adapted == {name for name, one in before.items() if not torch.equal(merged[name], one)}
    assert_identical(base_values([stage]), before)


def test_a_checkpoint_holds_adapters_by_name_and_only_named_modules_have_them(tmp_path: Path) -> None:
    plan = pretrained("llama", tmp_path)
    lora = LoraSpec(r=2, targets=("q_proj", "mlp.down_proj"))
    (stage,) = build(plan, [range(1, 3)], lora=lora)
    names = set(stage.parameters_by_name())
    assert names == {
        f"model.layers.{layer}.{module}.lora_{half}.default.weight"
        for layer in (1, 2)
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for half in "AB"
    }
    assert names < stage.tensors_by_name().keys()


def test_a_target_that_no_layer_has_is_named(tmp_path: Path) -> None:
    plan = pretrained("gpt2", tmp_path)
    with pytest.raises(UserError, match="'q_proj', which is no linear module of GPT2LMHeadModel") as caught:
        build(plan, [range(2)], lora=LoraSpec(targets=("q_proj",)))
    assert caught.value.hint == "its layers have c_attn, c_fc, c_proj"


def test_a_part_without_weights_and_without_adapters_is_none(tmp_path: Path) -> None:
    plan = pretrained("llama", tmp_path / "base")
    (stage,) = build(plan, [range(4)], lora=LORA)
    write_part(stage, tmp_path / "part")
    (tmp_path / "part" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"hold the layers \[\] of 4"):
        merge([tmp_path / "part"], tmp_path / "model")
