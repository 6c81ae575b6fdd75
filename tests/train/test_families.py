"""Families that transformers lets be cut train over a wire like their uncut selves, with padded sequences."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.model.blueprint import Blueprint, pretrained_blueprint
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.stage import Batch
from tests.model.cases import SEED, make_batch
from tests.model.tiny import heads_of, tiny_blueprint, types_with_a_head
from tests.train.chain import Given, chain, config
from tests.train.reference import assert_same, parameters_of
from tests.train.test_exactness import alone

NUM_STEPS = 3
LENGTHS = ((9, 4, 1), (3, 7, 5))


def padded_steps(plan: Blueprint) -> list[list[Batch]]:
    return [
        [make_batch(plan.head, lengths=one, seed=10 * step + number) for number, one in enumerate(LENGTHS)]
        for step in range(NUM_STEPS)
    ]


def assert_trains_like_the_uncut_model(plan: Blueprint, *, keeps_padding: bool | None = None) -> None:
    steps = padded_steps(plan)
    expected, _ = alone(plan, steps)
    keeps = plan.mixes_tokens if keeps_padding is None else keeps_padding
    with chain(plan, config(2, len(LENGTHS), num_steps=NUM_STEPS, keeps_padding=keeps)) as found:
        found.run(Given(steps))
    assert_same(parameters_of(found.stages), expected)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "qwen3_moe"])
def test_experts_with_padding(model_type: str) -> None:
    assert_trains_like_the_uncut_model(tiny_blueprint(model_type))


def test_padding_that_is_left_out_changes_a_model_with_experts() -> None:
    with pytest.raises(AssertionError):
        assert_trains_like_the_uncut_model(tiny_blueprint("doge"), keeps_padding=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_every_family(tmp_path: Path) -> None:
    # Encoder–decoders have batches of their own, and tests of their own.
    types = [name for name in types_with_a_head() if HEADS["translation"] not in heads_of(name)]
    outcomes = {model_type: outcome(model_type, tmp_path / model_type) for model_type in types}
    assert {name: one for name, one in outcomes.items() if one.startswith("different")} == {}
    assert sum(one == "same" for one in outcomes.values()) > 130, outcomes


def outcome(model_type: str, folder: Path) -> str:
    try:
        assert_trains_like_the_uncut_model(fresh_or_saved(model_type, folder))
    except UserError as error:
        return f"refused: {error}"
    except (AssertionError, RuntimeError) as error:
        return f"different: {error}"
    return "same"


def fresh_or_saved(model_type: str, folder: Path) -> Blueprint:
    """A tiny model; one that has no values of its own on the meta device comes from a folder."""
    plan = tiny_blueprint(model_type)
    try:
        build_stage(plan, range(plan.num_layers), seed=SEED)
    except UserError:
        torch.manual_seed(1)
        model: PreTrainedModel = plan.model_class(plan.config)
        model.save_pretrained(folder)
        return pretrained_blueprint(str(folder), head=plan.head)
    return plan
