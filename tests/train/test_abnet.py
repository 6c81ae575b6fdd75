"""Two encoders that adapters join: over links as in one process, to the bit, and loaded without us."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from isthmus.errors import UserError
from isthmus.job.sections import ABNetSpec, ModelSpec
from isthmus.model.blueprint import Blueprint, joined_blueprint
from isthmus.model.cut import Passage
from isthmus.model.encoder_decoder import check_learns, is_adapter
from isthmus.model.export import load_exported, merge, write_part
from isthmus.model.load import build_stage
from isthmus.model.stage import StageInput
from tests.model.cases import PAD, SEED, VOCABULARY_SIZE, exported_loss
from tests.train.chain import SCHEDULE, WEIGHT_DECAY, Given, chain
from tests.train.reference import assert_same, parameters_of, train_alone
from tests.train.resuming import keep_all, take_up
from tests.train.test_encoder_decoder import (
    NUM_STEPS,
    SPLIT,
    STEPS,
    TRANSLATION,
    of_layers,
    pairs,
    trained,
)

IDS = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 2}
_BERT = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.2,
}


def encoder(model_type: str = "bert", **changes: Any) -> dict[str, Any]:
    more = {"embedding_size": 12} if model_type == "electra" else {}
    return {"model_type": model_type, **_BERT, **more, **changes}


def joined(
    first: str = "bert", second: str = "bert", *, model: dict[str, Any] | None = None, **abnet: Any
) -> Blueprint:
    spec = ABNetSpec(**{"adapter_width": 6, "decoder_config": encoder(second), **abnet})
    return joined_blueprint(
        ModelSpec(config=model or encoder(first), abnet=spec), spec, values=IDS, head=TRANSLATION
    )


def alone(plan: Blueprint, steps: Any, *, num_frozen_layers: int = 0) -> dict[str, torch.Tensor]:
    stage = build_stage(plan, range(plan.num_layers), seed=SEED, num_frozen_layers=num_frozen_layers)
    rates = [SCHEDULE.at(step) for step in range(NUM_STEPS)]
    train_alone(stage, steps, seed=11, learning_rates=rates, weight_decay=WEIGHT_DECAY, max_norm=0.5)
    found: dict[str, torch.Tensor] = parameters_of([stage])
    return found


@pytest.mark.parametrize(
    ("types", "layers", "recompute"),
    [
        (("bert", "bert"), (2, 2), False),
        (("roberta", "electra"), (2, 2), True),
        (("electra", "xlm-roberta"), (1, 1, 2), False),
        (("bert", "roberta"), (2, 1, 1), False),
        (("bert", "bert"), (1, 3), False),
        (("bert", "bert"), (1, 1, 1, 1), True),
    ],
)
def test_joined_encoders_equal_one_process(
    types: tuple[str, str], layers: tuple[int, ...], recompute: bool
) -> None:
    plan = joined(*types)
    found = trained(plan, of_layers(*layers), recompute=recompute)
    expected = alone(plan, STEPS)
    assert_same(parameters_of(found.stages), expected)
    start = parameters_of([build_stage(plan, range(4), seed=SEED)])
    assert start.keys() == expected.keys()
    moved = {name for name in expected if not torch.equal(start[name], expected[name])}
    assert {name for name in moved if "adapter" in name}
    assert all(map(is_adapter, moved))


def test_all_weights_are_trained_where_nothing_is_frozen() -> None:
    plan = joined(frozen=False, decoder_adapters=(1,), encoder_adapters=())
    found = trained(plan, of_layers(2, 2))
    expected = alone(plan, STEPS)
    assert_same(parameters_of(found.stages), expected)
    assert any("attention.self" in name for stage in found.stages for name in stage.parameters_by_name())
    assert not any("encoder.encoder.layer.0.adapter" in name for name in expected)


def test_a_resumed_run_ends_with_the_same_weights() -> None:
    plan, agreed = joined(), of_layers(1, 2, 1)
    with chain(plan, agreed) as found:
        kept = keep_all(found)
        found.run(Given(STEPS))
    with chain(plan, agreed) as resumed:
        resumed.run(Given(STEPS), first_step=2, states=take_up(resumed, kept, 2))
    assert_same(parameters_of(resumed.stages), alone(plan, STEPS))


def test_a_frozen_encoder_sends_each_sequence_once_and_gets_nothing_back() -> None:
    plan = joined()
    agreed = of_layers(2, 2, first_trained=1, cache_bytes=10**6)
    again = [STEPS[0]] * NUM_STEPS
    with chain(plan, agreed, num_frozen_layers=2) as found:
        found.run(Given(again))
    assert not found.stages[0].is_trained
    assert_same(parameters_of(found.stages), alone(plan, again, num_frozen_layers=2))
    assert not [span for span in found.records[0].spans if span.kind == "transfer"]
    sizes = [span.num_bytes or 0 for span in found.records[1].spans if span.kind == "transfer"]
    assert max(sizes[2:]) < min(sizes[:2]) / 2


def test_no_token_of_a_translation_sees_those_behind_it() -> None:
    model: Any = build_stage(joined(), range(4), seed=SEED).eval()
    model._seam.passage = Passage(arrived=None, rng_key=None)
    batch = pairs(3)
    said = torch.randint(3, VOCABULARY_SIZE, (3, 6))
    other = said.clone()
    other[:, 4:] = 5
    with torch.no_grad():
        scores = [
            model.model(batch.ids, attention_mask=batch.mask, decoder_input_ids=one).logits
            for one in (said, other)
        ]
    assert torch.equal(scores[0][:, :4], scores[1][:, :4])
    assert not torch.equal(scores[0][:, 4:], scores[1][:, 4:])


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_from_a_memory_is_that_of_the_whole_model(num_beams: int) -> None:
    plan, batch = joined("bert", "roberta"), pairs(3)
    front, back = (build_stage(plan, layers, seed=SEED).eval() for layers in SPLIT)
    whole: Any = build_stage(plan, range(4), seed=SEED).eval()
    with torch.no_grad():
        memory = front(StageInput(batch=batch)).crossing
    said = back.generate(memory, batch.mask, max_new_tokens=6, num_beams=num_beams)
    whole._seam.passage = Passage(arrived=None, rng_key=None)
    options = {"max_new_tokens": 6, "num_beams": num_beams, "do_sample": False}
    assert torch.equal(said, whole.model.generate(batch.ids, attention_mask=batch.mask, **options))
    # What it has said is scored as in training, without a cache.
    if num_beams == 1:
        with torch.no_grad():
            again = whole.model(batch.ids, attention_mask=batch.mask, decoder_input_ids=said).logits
        assert torch.equal(again[:, 0].argmax(-1), said[:, 1])


_LOAD = """
import sys, torch
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids = torch.arange(3, 9)[None]
torch.save(model(ids, labels=ids).logits.detach(), sys.argv[2])
assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[0] == 1
assert not any(name.startswith("isthmus") for name in sys.modules)
"""


@pytest.mark.slow
def test_the_exported_model_is_loaded_with_its_code_and_without_us(tmp_path: Path) -> None:
    plan = joined("bert", "electra")
    stages = [build_stage(plan, layers, seed=SEED).eval() for layers in SPLIT]
    for number, stage in enumerate(stages):
        write_part(stage, tmp_path / str(number))
    merge([tmp_path / "0", tmp_path / "1"], tmp_path / "model")
    batch = pairs(3)
    with torch.no_grad():
        memory = stages[0](StageInput(batch=batch)).crossing
        loss = stages[1](StageInput(batch=batch, crossing=memory)).loss
    assert loss is not None
    found = exported_loss(tmp_path / "model", head=TRANSLATION, batches=[batch])
    assert found == pytest.approx(float(loss) / batch.num_targets, rel=1e-5)
    scores = tmp_path / "scores.pt"
    subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path / "model"), str(scores)],
        check=True,
        cwd=tmp_path,
        env={"PATH": "", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )
    model = load_exported(tmp_path / "model", TRANSLATION)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(torch.load(scores), model(ids, labels=ids).logits)


def test_pretrained_encoders_keep_their_weights(tmp_path: Path) -> None:
    from transformers import AutoConfig

    plan = joined("bert", "roberta")
    for number, (name, auto) in enumerate((("one", AutoModelForMaskedLM), ("two", AutoModel))):
        config = AutoConfig.for_model(**encoder(("bert", "roberta")[number]))
        auto.from_config(config).save_pretrained(tmp_path / name)
    spec = ABNetSpec(decoder=str(tmp_path / "two"), adapter_width=6)
    model = ModelSpec(source=str(tmp_path / "one"), abnet=spec)
    found = joined_blueprint(model, spec, values=IDS, head=TRANSLATION)
    assert found.layout == plan.layout
    for layers in SPLIT:
        stage: Any = build_stage(found, layers, seed=SEED)
        is_decoder = layers.start > 0
        own: Any = AutoModel.from_pretrained(tmp_path / ("two" if is_decoder else "one"))
        stack = stage.model.model.decoder if is_decoder else stage.model.model.encoder
        words = own.embeddings.word_embeddings.weight
        assert torch.equal(stack.embeddings.word_embeddings.weight, words)
        for mine, theirs in zip(stack.encoder.layer, own.encoder.layer, strict=True):
            assert_same(dict(mine.layer.named_parameters()), dict(theirs.named_parameters()))
        if is_decoder:
            assert torch.equal(stage.model.lm_head.weight, words)
            assert not stage.model.lm_head.weight.requires_grad


@pytest.mark.parametrize(
    ("first", "abnet", "reason"),
    [
        ({"model_type": "gpt2"}, {}, "gpt2 cannot be joined"),
        (encoder(hidden_size=32), {}, "have 32 and 16 as hidden_size"),
        (encoder(vocab_size=50), {}, "as vocab_size"),
        (encoder(), {"encoder_adapters": (2,)}, "names layer 2, and the encoder has 2"),
        (encoder(), {"decoder_adapters": ()}, "never sees what it translates"),
    ],
)
def test_encoders_that_cannot_be_joined_are_refused(
    first: dict[str, Any], abnet: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        joined(model=first, **abnet)
    assert caught.value.hint


def test_mistakes_of_the_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="pretrained"):
        ModelSpec(source="bert", abnet=ABNetSpec(decoder_config=encoder()))
    with pytest.raises(ValueError, match="fresh"):
        ModelSpec(config=encoder(), abnet=ABNetSpec(decoder="bert"))
    plan = joined(encoder_adapters=(1,))
    check_learns(plan.config, [range(2), range(2, 4)], num_frozen=0)
    check_learns(plan.config, [range(1), range(1, 2), range(2, 4)], num_frozen=2)
    with pytest.raises(UserError, match="none of the layers 0 to 0 has an adapter"):
        check_learns(plan.config, [range(1), range(1, 4)], num_frozen=0)
