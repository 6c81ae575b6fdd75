"""Encoder–decoders over links train to the bit like one process, with one stage of each and with more."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.errors import FrameError, UserError
from isthmus.job.codec import HiddenSpec, MemorySpec
from isthmus.model.blueprint import Blueprint, fresh_blueprint, pretrained_blueprint
from isthmus.model.cut import Passage
from isthmus.model.encoder_decoder import split_stacks
from isthmus.model.export import load_exported, merge, write_part
from isthmus.model.heads import HEADS, IGNORED
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch, StageInput
from isthmus.plan.job_facts import check_stacks
from isthmus.train.integers import said_before
from isthmus.train.pipeline import PipelineConfig, _read_microbatch
from tests.model.cases import PAD, SEED, VOCABULARY_SIZE, exported_loss
from tests.train.chain import SCHEDULE, WEIGHT_DECAY, Chain, Given, chain, config
from tests.train.reference import assert_same, parameters_of, train_alone
from tests.train.resuming import keep_all, take_up
from tests.train.test_codecs import cut, in_one_graph
from tests.train.test_exactness import alone

NUM_STEPS = 3
SPLIT = (range(2), range(2, 4))
CPU = torch.device("cpu")
TRANSLATION = HEADS["translation"]
_COMMON = {
    "vocab_size": VOCABULARY_SIZE,
    "d_model": 16,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "decoder_start_token_id": PAD,
}
_T5 = {
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "d_kv": 8,
    "d_ff": 24,
    "dropout_rate": 0.2,
}
_BART = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "dropout": 0.2,
    "attention_dropout": 0.2,
}
CONFIGS = {"t5": _T5, "mt5": _T5, "bart": _BART, "mbart": _BART, "marian": _BART, "pegasus": _BART}
FAMILIES = [
    "t5",
    "bart",
    *(pytest.param(one, marks=pytest.mark.slow) for one in CONFIGS if one not in ("t5", "bart")),
]


def translator(model_type: str, **changes: Any) -> Blueprint:
    values = {"model_type": model_type, **_COMMON, **CONFIGS[model_type], **changes}
    return fresh_blueprint(values, head=TRANSLATION)


def padded(lengths: tuple[int, ...], fill: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, VOCABULARY_SIZE, mask.shape, generator=generator)
    return ids.masked_fill(mask == 0, fill), mask


def pairs(seed: int) -> Batch:
    """Sources and targets of different lengths, both padded."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask = padded(((9, 4, 6), (5, 8, 2))[seed % 2], PAD, generator)
    labels, _ = padded(((3, 7, 5), (6, 1, 4))[seed % 2], IGNORED, generator)
    return Batch(ids=ids, mask=mask, labels=labels, num_targets=TRANSLATION.num_targets(labels))


STEPS = [[pairs(10 * step + number) for number in range(2)] for step in range(NUM_STEPS)]


def of_layers(*layers: int, **changes: Any) -> PipelineConfig:
    agreed = config(len(layers), 2, num_steps=NUM_STEPS, **changes)
    return replace(agreed, layers=layers, num_encoder_layers=2)


def trained(plan: Blueprint, agreed: PipelineConfig, **options: Any) -> Chain:
    with chain(plan, agreed, **options) as found:
        found.run(Given(STEPS, STEPS[0]))
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_encoder_and_decoder_equal_one_process(model_type: str) -> None:
    plan = translator(model_type)
    found = trained(plan, of_layers(2, 2), recompute=model_type == "bart")
    expected, losses = alone(plan, STEPS)
    assert_same(parameters_of(found.stages), expected)
    assert [one.loss for one in found.records[0].steps] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("layers", [(3, 1), (1, 1, 1, 1)])
def test_several_stages_of_encoder_or_decoder_equal_one_process(layers: tuple[int, ...]) -> None:
    plan = translator("bart")
    found = trained(plan, of_layers(*layers))
    assert_same(parameters_of(found.stages), alone(plan, STEPS)[0])


@pytest.mark.parametrize(
    ("layers", "boundaries", "codecs"),
    [
        ((2, 2), ("hidden",), ("rotate | int4", "rotate | int4(stochastic)")),
        ((2, 2), ("bottleneck(5, warmup=2)",), ("rotate | int8", "rotate | int8")),
        ((1, 3), ("subspace",), ("subspace(6, anchor=tokens, every=2) | int4", "int4(stochastic)")),
    ],
)
def test_codecs_and_bottlenecks_on_the_memory(
    layers: tuple[int, ...], boundaries: tuple[str, ...], codecs: tuple[str, str]
) -> None:
    plan = translator("marian")
    cuts = [cut(*codecs, boundary="hidden" if one == "subspace" else one) for one in boundaries]
    agreed = of_layers(*layers, cuts=cuts)
    expected, losses = in_one_graph(plan, agreed, cuts, STEPS)
    found = trained(plan, agreed)
    assert_same(parameters_of(found.stages), expected)
    assert [one.loss for one in found.records[0].steps] == pytest.approx(losses, rel=1e-6)


def test_coded_states_of_a_decoder_leave_the_memory_as_it_is() -> None:
    """What is coded is the states, by the tokens before them; the memory crosses beside them uncoded."""
    plan = translator("bart")
    cuts = [cut("raw", "raw"), cut("subspace(6, anchor=tokens, every=2) | int8", "rotate | int8")]
    found = trained(plan, of_layers(2, 1, 1, cuts=cuts))
    losses = alone(plan, STEPS)[1]
    assert [one.loss for one in found.records[0].steps] == pytest.approx(losses, rel=0.02)


def test_a_resumed_run_ends_with_the_same_weights() -> None:
    plan, agreed = translator("bart"), of_layers(1, 2, 1)
    with chain(plan, agreed) as found:
        kept = keep_all(found)
        found.run(Given(STEPS))
    with chain(plan, agreed) as resumed:
        resumed.run(Given(STEPS), first_step=2, states=take_up(resumed, kept, 2))
    assert_same(parameters_of(resumed.stages), alone(plan, STEPS)[0])


def test_a_frozen_encoder_sends_each_sequence_once_and_gets_nothing_back() -> None:
    plan = translator("bart")
    agreed = of_layers(2, 2, first_trained=1, cache_bytes=10**6)
    again = [STEPS[0]] * NUM_STEPS
    with chain(plan, agreed, num_frozen_layers=2) as found:
        found.run(Given(again))
    stage = build_stage(plan, range(4), seed=SEED, untie=True, num_frozen_layers=2)
    assert not any(one.requires_grad for one in stage.model.get_encoder().parameters())
    rates = [SCHEDULE.at(step) for step in range(NUM_STEPS)]
    train_alone(stage, again, seed=11, learning_rates=rates, weight_decay=WEIGHT_DECAY, max_norm=0.5)
    assert_same(parameters_of(found.stages), parameters_of([stage]))
    sizes = [span.num_bytes or 0 for span in found.records[1].spans if span.kind == "transfer"]
    assert len(sizes) == 2 * NUM_STEPS
    assert max(sizes[2:]) < min(sizes[:2]) / 2


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_exported_model_is_an_ordinary_one(model_type: str, tmp_path: Path) -> None:
    plan = translator(model_type)
    stages = [build_stage(plan, layers, seed=SEED).eval() for layers in (range(2), range(2, 4))]
    for number, stage in enumerate(stages):
        write_part(stage, tmp_path / str(number))
    assert merge([tmp_path / "0", tmp_path / "1"], tmp_path / "model") == ()
    batch = pairs(3)
    with torch.no_grad():
        memory = stages[0](StageInput(batch=batch)).crossing
        loss = stages[1](StageInput(batch=batch, crossing=memory)).loss
    assert loss is not None
    found = exported_loss(tmp_path / "model", head=TRANSLATION, batches=[batch])
    assert found == pytest.approx(float(loss) / batch.num_targets, rel=1e-5)
    again = pretrained_blueprint(str(tmp_path / "model"), head=TRANSLATION)
    whole = build_stage(again, range(4), seed=SEED, untie=True)
    assert_same(parameters_of([whole]), parameters_of(stages))


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("model_type", ["t5", "bart", "marian"])
def test_generation_from_a_memory_is_that_of_the_whole_model(model_type: str, num_beams: int) -> None:
    plan, batch = translator(model_type), pairs(3)
    front, back = (build_stage(plan, layers, seed=SEED, untie=True).eval() for layers in SPLIT)
    whole: Any = build_stage(plan, range(4), seed=SEED, untie=True).eval()
    with torch.no_grad():
        memory = front(StageInput(batch=batch)).crossing
        output = back(StageInput(batch=batch, crossing=memory, keeps_scores=True))
        kept = whole(StageInput(batch=batch, keeps_scores=True)).memory
    assert torch.equal(output.memory, kept)
    said = [
        stage.generate(output.memory, batch.mask, max_new_tokens=6, num_beams=num_beams)
        for stage in (back, whole)
    ]
    assert torch.equal(*said)
    # transformers' own way, from the ids, without our stand-ins.
    whole._seam.passage = Passage(arrived=None, rng_key=None)
    expected = whole.model.generate(
        batch.ids, attention_mask=batch.mask, max_new_tokens=6, num_beams=num_beams, do_sample=False
    )
    assert torch.equal(said[0], expected)


def test_a_bottleneck_on_the_memory_is_exported_and_generates(tmp_path: Path) -> None:
    plan = translator("bart")
    cuts = [cut("raw", "raw", boundary="bottleneck(5, warmup=2)")]
    agreed = of_layers(2, 2, cuts=cuts, evaluate_every=3, num_validation_microbatches=2)
    found = trained(plan, agreed)
    for number, stage in enumerate(found.stages):
        write_part(stage, tmp_path / str(number))
    merge([tmp_path / "0", tmp_path / "1"], tmp_path / "model")
    model = load_exported(tmp_path / "model", TRANSLATION)
    assert model.generate(pairs(3).ids, max_new_tokens=4, do_sample=False).shape[0] == 3
    evaluated = found.records[0].evaluations[-1].loss
    again = exported_loss(tmp_path / "model", head=TRANSLATION, batches=STEPS[0])
    assert again == pytest.approx(evaluated, rel=1e-4)


def test_stages_are_split_at_the_memory() -> None:
    decoder = translator("bart", encoder_layers=6, decoder_layers=2).family.decoder
    assert decoder is not None
    assert split_stacks(decoder, 8, 2, None) == (6, 2)
    assert split_stacks(decoder, 8, 3, None) == (3, 3, 2)
    assert split_stacks(decoder, 8, 3, 0) == (6, 1, 1)
    with pytest.raises(UserError, match="cannot be 9 stages"):
        split_stacks(decoder, 8, 9, None)


@pytest.mark.parametrize(
    ("values", "task", "reason"),
    [
        ({"model_type": "gpt2"}, "translation", "gpt2 is no encoder–decoder"),
        ({"model_type": "t5"}, "causal-lm", "trained for translation"),
        ({"model_type": "led"}, "translation", "cannot be cut"),
        ({"model_type": "bart", "encoder_layerdrop": 0.1}, "translation", "leaves out whole layers"),
    ],
)
def test_models_that_do_not_translate_are_refused(values: dict[str, Any], task: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        fresh_blueprint(values, head=HEADS[task])
    assert caught.value.hint


@pytest.mark.parametrize(
    ("layers", "options", "reason"),
    [
        ((1, 3), {}, "T5 cannot be cut before layer 1"),
        ((2, 2), {"num_frozen": 3}, "3 layers cannot be frozen in an encoder"),
        ((4, 4), {"boundaries": [MemorySpec()], "is_joined": False}, '"memory" lies behind layer 3'),
    ],
)
def test_cuts_that_no_stage_can_make_are_refused(
    layers: tuple[int, int], options: dict[str, Any], reason: str
) -> None:
    stages = [range(layers[0]), range(layers[0], sum(layers))]
    given = {"boundaries": [HiddenSpec()], "num_encoder_layers": 2, "is_joined": True, "num_frozen": 0}
    with pytest.raises(UserError, match=reason):
        check_stacks(stages, **{**given, **options})


def test_what_a_peer_sends_without_its_target_or_with_another_memory_is_refused() -> None:
    batch = pairs(0)
    assert batch.labels is not None
    given = {"ids": batch.ids, "targets": torch.tensor([1, 1]), "labels": batch.labels}
    assert torch.equal(said_before(given)[:, 1:], batch.labels[:, :-1].clamp(min=0))
    with pytest.raises(FrameError, match="without the target"):
        said_before({"ids": batch.ids})
    with pytest.raises(FrameError, match="memory does not fit its ids"):
        _read_microbatch({**given, "memory": torch.zeros(3, 8, 16)})
