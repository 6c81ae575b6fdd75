"""A model that was trained with bottlenecks predicts from its folder what its stages predict."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.job.codec import BottleneckSpec, Init
from isthmus.job.codec_steps import Anchor
from isthmus.job.sections import LoraSpec
from isthmus.model import bottleneck
from isthmus.model.blueprint import Blueprint, pretrained_blueprint
from isthmus.model.export import describe_exported, load_exported, merge, write_part
from isthmus.model.heads import HEADS
from isthmus.model.modeling_bottleneck import BottleneckModel
from isthmus.model.stage import Batch, Stage, StageInput
from tests.model.cases import CONFIGS, blueprint, exported_loss, language_head, make_batch
from tests.model.test_bottleneck_stages import SPEC, build_cut, learn, warm_up
from tests.model.test_weights import save_model

CPU = torch.device("cpu")


def export(stages: Sequence[Stage], folder: Path) -> tuple[str, ...]:
    parts = [folder / f"part-{index}" for index in range(len(stages))]
    for stage, part in zip(stages, parts, strict=True):
        write_part(stage, part)
    return merge(parts, folder / "model")


def trained(plan: Blueprint, num_stages: int, spec: BottleneckSpec = SPEC) -> list[Stage]:
    stages = build_cut(plan, num_stages, spec)
    learn(stages, plan, range(8))
    return stages


def loss_of(stages: Sequence[Stage], batches: Sequence[Batch]) -> float:
    """Per target, in evaluation, with nothing coded between the stages."""
    total = 0.0
    for batch in batches:
        crossing: Tensor | None = None
        for stage in stages:
            with torch.no_grad():
                output = stage.eval()(StageInput(batch=batch, crossing=crossing))
            crossing = output.crossing
        total += float(output.loss)
    return total / sum(batch.num_targets for batch in batches)


def held_out(plan: Blueprint) -> list[Batch]:
    return [make_batch(plan.head, seed=seed) for seed in (50, 51)]


@pytest.mark.parametrize("model_type", CONFIGS)
def test_the_export_has_the_loss_of_its_stages(model_type: str, tmp_path: Path) -> None:
    plan = blueprint(model_type)
    stages = trained(plan, 3)
    export(stages, tmp_path)
    found = exported_loss(tmp_path / "model", head=plan.head, batches=held_out(plan))
    assert found == pytest.approx(loss_of(stages, held_out(plan)), rel=1e-5)
    # Without its bottlenecks it would predict something else.
    model = load_exported(tmp_path / "model", plan.head)
    bare = type(model.inner)(model.inner.config)
    bare.load_state_dict(model.inner.state_dict())
    bare.eval()
    batch = held_out(plan)[0]
    with torch.no_grad():
        scores = plan.head.scores(bare(**batch.arguments()))
    assert batch.labels is not None
    bare_loss = float(plan.head.loss(scores, batch.labels)) / batch.num_targets
    assert abs(bare_loss - loss_of(stages, [batch])) > 1e-3


@pytest.mark.parametrize(
    "spec", [BottleneckSpec(rank=6, anchor=Anchor.NONE), BottleneckSpec(rank=3, init=Init.RANDOM)]
)
def test_every_kind_of_anchor(spec: BottleneckSpec, tmp_path: Path) -> None:
    plan = blueprint("llama")
    stages = trained(plan, 2, spec)
    export(stages, tmp_path)
    found = exported_loss(tmp_path / "model", head=plan.head, batches=held_out(plan))
    assert found == pytest.approx(loss_of(stages, held_out(plan)), rel=1e-5)


def test_anchors_of_a_large_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bottleneck, "_MAX_ENTRIES", 200)
    plan = blueprint("llama")
    stages = trained(plan, 2, BottleneckSpec(rank=4))
    assert stages[0].down is not None
    assert stages[0].down.anchors.codes is not None
    export(stages, tmp_path)
    found = exported_loss(tmp_path / "model", head=plan.head, batches=held_out(plan))
    assert found == pytest.approx(loss_of(stages, held_out(plan)), rel=1e-5)


def test_other_heads_and_bfloat16(tmp_path: Path) -> None:
    plan = blueprint("bert", HEADS["sequence-classification"])
    stages = trained(plan, 2)
    export(stages, tmp_path)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = loss_of(stages, held_out(plan))
    found = exported_loss(tmp_path / "model", head=plan.head, batches=held_out(plan), autocast=torch.bfloat16)
    assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
def test_transformers_loads_it_by_the_code_in_its_folder(tmp_path: Path) -> None:
    """In a process that knows nothing of Isthmus."""
    plan = blueprint("llama")
    stages = trained(plan, 3)
    export(stages, tmp_path)
    batch = make_batch(plan.head, lengths=(9, 9))
    model = load_exported(tmp_path / "model", plan.head)
    with torch.no_grad():
        expected = model(input_ids=batch.ids).logits
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True)
assert not any(name == "isthmus" or name.startswith("isthmus.") for name in sys.modules)
ids = torch.tensor({batch.ids.tolist()})
torch.save(model(input_ids=ids).logits.detach(), {str(tmp_path / "scores")!r})
both = [model.generate(ids[:1, :3], max_new_tokens=4, do_sample=False, use_cache=c) for c in (True, False)]
assert torch.equal(*both) and both[0].shape == (1, 7)
model.save_pretrained({str(tmp_path / "again")!r})
again = AutoModelForCausalLM.from_pretrained({str(tmp_path / "again")!r}, trust_remote_code=True)
assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
"""
    environment = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, timeout=120)
    torch.testing.assert_close(torch.load(tmp_path / "scores"), expected)


def test_nobody_loads_it_without_its_bottlenecks_unawares(tmp_path: Path) -> None:
    plan = blueprint("llama")
    (note,) = export(trained(plan, 3), tmp_path)
    assert note.startswith(f"the exported model has {SPEC} before layer 2 and {SPEC} before layer 3:")
    assert "trust_remote_code=True" in note
    with pytest.raises(ValueError, match="custom code"):
        plan.head.auto_class.from_pretrained(tmp_path / "model", trust_remote_code=False)


def test_tokens_as_embeddings_are_refused(tmp_path: Path) -> None:
    plan = blueprint("llama")
    export(trained(plan, 2), tmp_path)
    model = load_exported(tmp_path / "model", plan.head)
    with pytest.raises(ValueError, match="needs input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 16))


def test_the_index_names_all_weights(tmp_path: Path) -> None:
    plan = blueprint("mixtral")
    export(trained(plan, 2), tmp_path)
    folder = tmp_path / "model"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}
    assert "inner.model.layers.2.block_sparse_moe.experts.1.w3.weight" in index["weight_map"]
    assert "boundaries.2.tokens.weight" in index["weight_map"]
    _, report = BottleneckModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_a_bottleneck_that_never_began_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    plan = blueprint("llama")
    assert export(build_cut(plan, 2), tmp_path) == ()
    assert plan.head.auto_class.from_pretrained(tmp_path / "model").config.model_type == "llama"


@pytest.mark.parametrize("merges", [True, False])
def test_adapters_hold_no_bottleneck_but_merged_weights_do(merges: bool, tmp_path: Path) -> None:
    save_model("llama", tmp_path / "origin")
    plan = pretrained_blueprint(str(tmp_path / "origin"), head=language_head("llama"))
    stages = build_cut(plan, 2, lora=LoraSpec(merge=merges))
    warm_up(stages, plan)
    if not merges:
        with pytest.raises(UserError, match="adapters alone cannot hold bottleneck") as refused:
            export(stages, tmp_path)
        assert "merge = true" in str(refused.value.hint)
        return
    export(stages, tmp_path)
    found = exported_loss(tmp_path / "model", head=plan.head, batches=held_out(plan))
    assert found == pytest.approx(loss_of(stages, held_out(plan)), rel=1e-5)


def test_what_the_end_of_a_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = blueprint("llama")
    stages = trained(plan, 2)
    export(stages, tmp_path)

    def say(folder: Path, batches: list[Batch]) -> str | None:
        return describe_exported(
            folder,
            head=plan.head,
            batches=iter(batches),
            device=CPU,
            autocast=None,
            trust_remote_code=False,
        )

    loss = loss_of(stages, held_out(plan))
    assert say(tmp_path / "model", held_out(plan)) == (
        f"the exported model has a validation loss of {loss:.4f}, without codecs"
    )
    assert say(tmp_path / "model", []) is None
    assert "adapter" in str(say(tmp_path, held_out(plan)))
    monkeypatch.setattr("isthmus.model.export._free_bytes", lambda _: 1000)
    assert "does not fit" in str(say(tmp_path / "model", held_out(plan)))
