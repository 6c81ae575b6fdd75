"""A cut within a layer equals the same factorised model in one graph, to the bit, and is exported."""

from pathlib import Path

import pytest
import torch

from isthmus.errors import FieldError, UserError
from isthmus.job.codec import parse_boundary
from isthmus.model.export import load_exported, merge, write_part
from isthmus.model.feed_forward import FeedForwardDown, FeedForwardUp
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.random import RngKey
from isthmus.model.stage import StageInput
from tests.model.cases import SEED, blueprint, scores_of
from tests.train.chain import Given, chain, config, make_stages
from tests.train.reference import assert_same, parameters_of
from tests.train.resuming import keep_all, take_up
from tests.train.test_codecs import cut, in_one_graph
from tests.train.test_exactness import batches

SVD = "bottleneck(5, init=ffn-svd, anchor=none, warmup=1)"
DATA = "bottleneck(5, init=ffn-data, warmup=2)"
CLASSIFIED = HEADS["sequence-classification"]


@pytest.mark.parametrize(
    ("model_type", "boundary"), [("bert", SVD), ("electra", DATA), ("roberta", SVD), ("roberta", DATA)]
)
def test_a_cut_within_a_layer_equals_one_graph(model_type: str, boundary: str) -> None:
    plan = blueprint(model_type, CLASSIFIED)
    steps = batches(plan, 2)
    cuts = [cut("rotate | int8", "rotate | int8", boundary=boundary)]
    agreed = config(2, 2, cuts=cuts)
    expected, losses = in_one_graph(plan, agreed, cuts, steps)
    with chain(plan, agreed) as found:
        kept = keep_all(found)
        found.run(Given(steps))
    assert_same(parameters_of(found.stages), expected)
    assert [one.loss for one in found.records[0].steps] == pytest.approx(losses, rel=1e-6)
    for step in (1, 3):
        with chain(plan, agreed) as resumed:
            resumed.run(Given(steps), first_step=step, states=take_up(resumed, kept, step))
        assert_same(parameters_of(resumed.stages), expected)


def test_the_warm_up_runs_the_layer_as_it_is() -> None:
    plan = blueprint("bert", CLASSIFIED)
    (batch,) = batches(plan, 1, num_steps=1)[0]
    key = RngKey(seed=1, step=0, microbatch=0)
    whole = build_stage(plan, range(4), seed=SEED).eval()
    front, back = (
        one.eval() for one in make_stages(plan, config(2, 1, cuts=[cut("raw", "raw", boundary=SVD)]))
    )
    with torch.no_grad():
        given = front(StageInput(batch=batch, rng_key=key, is_warming_up=True)).crossing
        loss = back(StageInput(batch=batch, crossing=given, rng_key=key, is_warming_up=True)).loss
        expected = whole(StageInput(batch=batch, rng_key=key)).loss
    torch.testing.assert_close(loss, expected)


def test_the_parts_of_a_decomposition_are_those_of_the_matrix() -> None:
    plan = blueprint("bert", CLASSIFIED)
    front, back = make_stages(plan, config(2, 1, cuts=[cut("raw", "raw", boundary=SVD)]))
    down, up = front.down, back.up
    assert isinstance(down, FeedForwardDown)
    assert isinstance(up, FeedForwardUp)
    up.begin(down.begin())
    assert up.core is not None
    assert up.rise is not None
    inner = build_stage(plan, range(4), seed=SEED).model.get_parameter(
        "bert.encoder.layer.1.intermediate.dense.weight"
    )
    left, values, right = torch.linalg.svd(inner.detach(), full_matrices=False)
    expected = left[:, :5] * values[:5] @ right[:5]
    torch.testing.assert_close(up.rise @ up.core @ down.weight, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("boundary", [SVD, DATA])
def test_the_exported_model_gives_the_scores_of_the_stages(boundary: str, tmp_path: Path) -> None:
    plan = blueprint("bert", CLASSIFIED)
    steps = batches(plan, 2)
    with chain(plan, config(2, 2, cuts=[cut("raw", "raw", boundary=boundary)])) as found:
        found.run(Given(steps))
    for number, stage in enumerate(found.stages):
        write_part(stage, tmp_path / str(number))
    (note,) = merge([tmp_path / "0", tmp_path / "1"], tmp_path / "model")
    assert "trust_remote_code" in note
    batch, model = steps[0][0], load_exported(tmp_path / "model", CLASSIFIED)
    front, back = (stage.eval() for stage in found.stages)
    with torch.no_grad():
        crossing = front(StageInput(batch=batch)).crossing
        expected = scores_of(back, StageInput(batch=batch, crossing=crossing))
        scores = model(**batch.arguments()).logits
        without = model.inner.bert.encoder.layer[1].attention._forward_hooks
        without.clear()
        dense = model.inner.bert.encoder.layer[1].intermediate.dense._forward_hooks
        dense.clear()
        other = model(**batch.arguments()).logits
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert (other - expected).abs().max() > 1e-3


def test_what_cannot_be_parted_is_refused() -> None:
    agreed = config(2, 1, cuts=[cut("raw", "raw", boundary=SVD)])
    with pytest.raises(UserError, match="layers of BERT's shape, which gpt2 does not have"):
        make_stages(blueprint("gpt2"), agreed)
    with pytest.raises(UserError, match="a rank over that of a matrix of 4 × 16"):
        make_stages(blueprint("bert", CLASSIFIED, intermediate_size=4), agreed)
    with pytest.raises(FieldError, match="has no anchors"):
        parse_boundary("bottleneck(5, init=ffn-svd)")
    with pytest.raises(FieldError, match="warmup is 0"):
        parse_boundary("bottleneck(5, init=ffn-svd, anchor=none, warmup=0)")
