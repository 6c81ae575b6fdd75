"""Every type of model that transformers has is cut without a trace, or refused with the reason."""

import re

import pytest
import torch

from isthmus.errors import UserError
from isthmus.model.blueprint import split_layers
from isthmus.model.encoder_decoder import MODEL_TYPES
from isthmus.model.modeling_abnet import ABNetConfig
from tests.model.cases import assert_identical, build, make_batch, parameters, run_pass
from tests.model.plain import plain_pass
from tests.model.tiny import tiny_blueprint, types_with_a_head

# By what the refusal says; all other types are cut.
REFUSED = {
    "do not run once each": "albert",
    "no initial value": "apertus data2vec-text ernie4_5_moe openai-gpt",
    "needs more of its layers than hidden states": "bamba deberta deberta-v2 glm_moe_dsa rwkv xlstm zaya",
    "it is an encoder with a decoder": (
        "bigbird_pegasus blenderbot blenderbot-small led musicgen musicgen_melody mvp plbart prophetnet "
        "t5gemma t5gemma2 umt5 whisper"
    ),
    "of a kind that cannot be cut": (
        "encoder-decoder fsmt longt5 m2m_100 nllb-moe pegasus_x seamless_m4t seamless_m4t_v2 "
        "switch_transformers"
    ),
    "is no encoder–decoder": "voxtral_realtime",
    "is an encoder, in which": "bert-generation",
    "needs more than token ids": "big_bird bros layoutlmv3 perceiver xmod",
    "reads the values of its inputs": (
        "biogpt canine convbert ibert lilt longformer luke megatron-bert nystromformer rembert roformer "
        "splinter squeezebert tapas"
    ),
    "several lists of layers": "blt flaubert funnel hrm_text lxmert xlm",
    "cannot be used": (
        "cohere_compass cohere_compass_text dbrx fun_asr_nano gemma4_assistant layoutlmv2 neomme "
        "qwen4_exp qwen4_exp_text reformer zamba"
    ),
    "its layers get more than hidden states": "cpmant gemma3n gemma3n_text mpnet zamba2",
    "padding changes what its": "fnet yoso",
    "changes its embeddings in place": "ctrl",
    "more than one vector for each token": "deepseek_v4 hy_v4 xlnet",
    "only together with its other parts": "emu3 mllama",
    "looks into its layers": "falcon_h1",
    "it needs the hidden states of another": "gemma4_unified_assistant",
}
# `tests/train/test_encoder_decoder.py` cuts and trains these; the text part of Florence 2 is a BART.
TRANSLATORS = {*MODEL_TYPES, "florence2", ABNetConfig.model_type}
REASONS = {model_type: reason for reason, types in REFUSED.items() for model_type in types.split()}
QUICK = [
    "bert",
    "bloom",
    "camembert",
    "distilbert",
    "falcon",
    "gemma3",
    "gemma4",
    "gpt2",
    "gptj",
    "llama",
    "llama4",
    "mamba",
    "mistral3",
    "mixtral",
    "modernbert",
    "nemotron",
    "nomic_bert",
    "opt",
    "persimmon",
    "qwen3_5",
    "stablelm",
]
MAX_PARAMETERS = 30_000_000


def check_cut(model_type: str) -> None:
    plan = tiny_blueprint(model_type)
    assert sum(plan.layout.owned_by(range(plan.num_layers)).values()) < MAX_PARAMETERS
    values = parameters(build(plan, [range(plan.num_layers)], untie=True))
    found = run_pass(build(plan, split_layers(plan.num_layers, 2), untie=True), make_batch(plan.head))
    expected = plain_pass(plan, make_batch(plan.head), values)
    assert torch.equal(found.loss, expected.loss)
    assert_identical(found.grads, expected.grads)


def cut_in_two(model_type: str) -> None:
    plan = tiny_blueprint(model_type)
    build(plan, split_layers(plan.num_layers, 2))


def check_refused(model_type: str) -> None:
    with pytest.raises(UserError, match=REASONS[model_type]) as caught:
        cut_in_two(model_type)
    names_class = re.search(r"[A-Z]\w+(Config|For[A-Z]\w+|HeadModel)\b", caught.value.message)
    assert names_class or model_type in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("model_type", QUICK)
def test_a_model_is_cut_into_two_without_a_trace(model_type: str) -> None:
    check_cut(model_type)


@pytest.mark.parametrize("model_type", ["albert", "blt", "blenderbot", "canine", "cpmant", "rwkv", "zaya"])
def test_a_model_that_cannot_be_cut_is_refused_by_its_class(model_type: str) -> None:
    check_refused(model_type)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(16))
def test_every_type_is_cut_without_a_trace_or_refused_with_the_reason(part: int) -> None:
    # To know all types takes seconds, in which nothing but this test is interested.
    for model_type in sorted({*types_with_a_head()} - TRANSLATORS)[part::16]:
        print(model_type)  # noqa: T201 is shown where the test fails
        (check_refused if model_type in REASONS else check_cut)(model_type)
