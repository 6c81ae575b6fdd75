"""What a run refuses and needs no torch to see, planning refuses too, in the same words."""

import json
from pathlib import Path

import pytest

from isthmus.errors import IsthmusError, UserError
from isthmus.job import ModelSpec
from isthmus.plan.models import read_model
from isthmus.plan.planner import plan
from isthmus.train.data.tokenizer import read_limits
from isthmus.train.runs import check_job
from tests.plan.jobs import two_clouds

PIPELINE = "strategy.kind=pipeline"
REFUSED = {
    "bottleneck": ("link.0.boundary=bottleneck(4096)", "is no bottleneck where hidden states are 2048 wide"),
    "warm-up": ("link.0.boundary=bottleneck(8)", "begins after 100 steps, but the run has 100"),
    "heads": ("model.config.num_attention_heads=7", "no multiple of 7 attention heads"),
    "key-value heads": ("model.config.num_key_value_heads=3", "no multiple of 3 key-value heads"),
    "odd heads": ("model.config.head_dim=7", "cannot turn in pairs"),
    "text for a number": ("model.config.hidden_size='2048'", "hidden_size of the model's configuration is"),
    "text for a flag": ("model.config.tie_word_embeddings='yes'", "not true or false"),
    "positions": ("model.config.max_position_embeddings=512", "longer than the model's 512 positions"),
    "head": ("data.task=masked-lm", "llama has no head for masked-lm"),
    "frozen": ("model.frozen_layers=13", "13 layers cannot be frozen in a model of 12"),
    "micro-batches": ("strategy.microbatches=7", "cannot be divided into 7 micro-batches"),
    "layers": ("strategy.layers=[6, 7]", "strategy.layers adds up to 13"),
    "stages": ("strategy.max_in_flight=[1, 2, 3]", "3 entries for 2 stages"),
    "batch": ("train.batch_tokens=1000", "no whole number of sequences"),
    "frozen bottleneck": ("strategy.layers=[6, 6]", "all layers below it are frozen"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_planning_and_running_refuse_in_the_same_words(change: str, words: str, tmp_path: Path) -> None:
    more = ("model.frozen_layers=6", "link.0.boundary=bottleneck(8)") if "6, 6" in change else ()
    job = two_clouds(PIPELINE, *more, change)
    with pytest.raises(IsthmusError) as planning:
        plan(job, is_quick=True)
    with pytest.raises(IsthmusError) as running:
        check_job(job, tokenizer_folder=tmp_path)
    assert words in str(planning.value)
    assert (str(running.value), running.value.hint) == (str(planning.value), planning.value.hint)


def test_experts_for_a_token_are_among_all() -> None:
    mixed = ("model.config.model_type=mixtral", "model.config.num_local_experts=4")
    with pytest.raises(IsthmusError, match="5 experts for each token are more than all 4"):
        plan(two_clouds(*mixed, "model.config.num_experts_per_tok=5"))


def test_quantised_weights_are_not_trained(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = two_clouds(PIPELINE)
    job = job.model_copy(update={"model": ModelSpec(source=str(tmp_path))})
    with pytest.raises(IsthmusError, match="holds quantised weights"):
        plan(job)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "roberta", "olmo2"])
def test_positions_are_those_of_the_data(model_type: str) -> None:
    limits = read_limits(ModelSpec(config={"model_type": model_type}))
    task = "masked-lm" if "bert" in model_type else "causal-lm"
    model = read_model(two_clouds(f"data.task={task}"), {"model_type": model_type})
    assert model.max_length == limits.max_length(pad_id=0)


def test_more_sequences_than_are_tried_as_micro_batches_have_a_sentence_too() -> None:
    tight = ("cloud.east.memory=4.2 GiB", "cloud.west.memory=4.2 GiB", "train.batch_tokens=16777216")
    with pytest.raises(UserError, match="nothing fits") as caught:
        plan(two_clouds("strategy.kind=pipeline", *tight))
    assert "would do" in (caught.value.hint or "")
