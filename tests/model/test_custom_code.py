"""Code that a model's folder brings runs only where the job says so, and nobody is asked."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from isthmus.errors import UserError
from isthmus.model.blueprint import pretrained_blueprint, split_layers
from isthmus.model.export import merge
from isthmus.model.heads import HEADS
from tests.model.cases import COMMON, GATED, build, exported_loss, make_batch
from tests.model.test_export import write_parts

CAUSAL = HEADS["causal-lm"]
CODE = """
import os
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

Path(os.environ["CODE_RAN"]).touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the code makes when it runs; whoever is asked fails."""

    def ask(question: str = "") -> str:
        raise AssertionError(f"asked: {question}")

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setenv("CODE_RAN", str(tmp_path / "ran"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return tmp_path / "ran"


def save_own(folder: Path) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**COMMON, **GATED))
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    values |= {"model_type": "own", "auto_map": auto_map, "architectures": ["OwnModel"]}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "own.py").write_text(CODE)


def test_it_is_not_run_unasked(tmp_path: Path, ran: Path) -> None:
    save_own(tmp_path / "own")
    with pytest.raises(UserError, match="brings Python code of its own") as refused:
        pretrained_blueprint(str(tmp_path / "own"), head=CAUSAL)
    assert "model.trust_remote_code = true" in str(refused.value.hint)
    assert not ran.exists()


def test_code_for_a_type_that_transformers_has_is_left_aside(tmp_path: Path, ran: Path) -> None:
    save_own(tmp_path / "own")
    values = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps({**values, "model_type": "llama"}))
    plan = pretrained_blueprint(str(tmp_path / "own"), head=CAUSAL)
    assert plan.model_class is LlamaForCausalLM
    assert not plan.brings_code
    build(plan, split_layers(3, 2))
    assert not ran.exists()


def test_trusted_code_is_cut_and_exported(tmp_path: Path, ran: Path) -> None:
    save_own(tmp_path / "own")
    plan = pretrained_blueprint(str(tmp_path / "own"), head=CAUSAL, trust_remote_code=True)
    assert ran.exists()
    assert plan.brings_code
    assert plan.model_class.__name__ == "OwnModel"
    assert not plan.mixes_tokens
    merge(write_parts(build(plan, split_layers(3, 2)), tmp_path), tmp_path / "model")
    batches = [make_batch(CAUSAL)]
    original = LlamaForCausalLM.from_pretrained(
        tmp_path / "own", config=LlamaConfig(**COMMON, **GATED)
    ).eval()
    assert batches[0].labels is not None
    with torch.no_grad():
        scores = original(**batches[0].arguments()).logits
    expected = float(CAUSAL.loss(scores, batches[0].labels)) / batches[0].num_targets
    found = exported_loss(
        tmp_path / "model",
        head=CAUSAL,
        batches=batches,
        trust_remote_code=True,
    )
    assert found == pytest.approx(expected, rel=1e-6)
