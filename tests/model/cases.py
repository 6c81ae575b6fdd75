"""Tiny models of every tested family, batches for every head, and a pass through stages by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.model.blueprint import Blueprint, fresh_blueprint
from isthmus.model.export import load_exported, loss_of
from isthmus.model.heads import HEADS, IGNORED, Head
from isthmus.model.load import build_stage
from isthmus.model.random import RngKey
from isthmus.model.stage import Batch, Stage, StageInput

VOCABULARY_SIZE = 53
NUM_LABELS = 3
PAD, SEED = 1, 5
RNG_KEY = RngKey(seed=7, step=3, microbatch=2)

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
GATED = {"intermediate_size": 24, "num_key_value_heads": 1, "num_hidden_layers": 3, "attention_dropout": 0.2}
ENCODER = {
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**GATED, "num_hidden_layers": 4},
    "qwen2": {**GATED, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {**GATED, "head_dim": 8, "tie_word_embeddings": True},
    "mistral": {**GATED, "sliding_window": 3},
    "gemma": {**GATED, "head_dim": 8},
    "phi3": {**GATED, "resid_pdrop": 0.2},
    "gpt_neox": {
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "hidden_dropout": 0.2,
        "attention_dropout": 0.2,
        "classifier_dropout": 0.2,
    },
    "mixtral": {**GATED, "num_local_experts": 3},
    "gpt2": {
        "num_hidden_layers": 4,
        "n_positions": 32,
        "attn_pdrop": 0.2,
        "embd_pdrop": 0.2,
        "resid_pdrop": 0.2,
    },
    "bert": {**ENCODER, "num_hidden_layers": 4},
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
    "electra": {**ENCODER, "embedding_size": 8},
}
ENCODERS = {"bert", "roberta", "xlm-roberta", "electra"}
LACKING = {("gemma", "question-answering"), ("phi3", "question-answering")}
TASKS = tuple(name for name in HEADS if name != "translation")
CASES = [
    (model_type, head)
    for model_type in CONFIGS
    for head in TASKS
    if head != ("causal-lm" if model_type in ENCODERS else "masked-lm") and (model_type, head) not in LACKING
]


def language_head(model_type: str) -> Head:
    return HEADS["masked-lm" if model_type in ENCODERS else "causal-lm"]


def blueprint(model_type: str, head: Head | None = None, **changes: Any) -> Blueprint:
    head = head or language_head(model_type)
    num_labels = None if head.name.endswith("lm") else NUM_LABELS
    values = {"model_type": model_type, **COMMON, **CONFIGS[model_type], **changes}
    return fresh_blueprint(values, head=head, num_labels=num_labels)


def make_batch(head: Head, *, lengths: Sequence[int] = (9, 4, 6), seed: int = 0) -> Batch:
    """Sequences of several lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, VOCABULARY_SIZE, shape, generator=generator).masked_fill(mask == 0, PAD)
    labels = _labels(head, ids, mask, generator)
    return Batch(ids=ids, mask=mask, labels=labels, num_targets=head.num_targets(labels))


def _labels(head: Head, ids: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    def classes(*shape: int) -> Tensor:
        return torch.randint(0, NUM_LABELS, shape, generator=generator)

    match head.name:
        case "causal-lm":
            return ids.masked_fill(mask == 0, IGNORED)
        case "masked-lm":
            hidden = torch.rand(ids.shape, generator=generator) < 0.4
            return ids.masked_fill(~hidden | (mask == 0), IGNORED)
        case "sequence-classification":
            return classes(len(ids))
        case "token-classification":
            return classes(*ids.shape).masked_fill(mask == 0, IGNORED)
        case _:
            return classes(len(ids), 2)


def build(plan: Blueprint, cuts: Sequence[range], **options: Any) -> list[Stage]:
    return [build_stage(plan, layers, seed=SEED, **options) for layers in cuts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What training on one micro-batch gave."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    balance: float


def run_pass(
    stages: Sequence[Stage],
    batch: Batch,
    *,
    rng_key: RngKey = RNG_KEY,
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Pass:
    """Forward through all stages, detached at each cut, then backward with the gradients handed back.

    `place` is where what crosses lies in memory.
    """
    crossings: list[Tensor | None] = [None]
    outputs = []
    for stage in stages:
        output = stage(StageInput(batch=batch, crossing=crossings[-1], rng_key=rng_key))
        outputs.append(output)
        if output.crossing is not None:
            crossings.append(place(output.crossing.detach()).requires_grad_())
    grad = None
    for output, crossing in zip(reversed(outputs), reversed(crossings), strict=True):
        output.backward(grad=grad, loss_weight=1 / max(batch.num_targets, 1))
        grad = None if crossing is None or crossing.grad is None else place(crossing.grad)
    assert outputs[-1].loss is not None
    return Pass(
        loss=outputs[-1].loss.detach(),
        grads={name: p.grad for stage in stages for name, p in stage.model.named_parameters()},
        balance=sum(float(output.balance.detach()) for output in outputs if output.balance is not None),
    )


def parameters(stages: Sequence[Stage]) -> dict[str, Tensor]:
    return {name: p.detach() for stage in stages for name, p in stage.model.named_parameters()}


def assert_identical(
    found: dict[str, Tensor] | dict[str, Tensor | None],
    expected: dict[str, Tensor] | dict[str, Tensor | None],
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        assert (value is None) == (other is None), name
        assert value is None or other is None or torch.equal(value, other), name


def scores_of(stage: Stage, inputs: StageInput) -> Tensor:
    """The scores, classes last, from which the last stage makes its loss."""
    found: list[Tensor] = []

    def note(_model: Any, _args: Any, output: Any) -> None:
        found.append(stage.head.scores(output))

    handle = stage.model.register_forward_hook(note)
    try:
        stage(inputs)
    finally:
        handle.remove()
    return found[0]


def exported_loss(
    folder: Path,
    *,
    head: Head,
    batches: Sequence[Batch],
    autocast: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> float:
    """The loss per target of the model in a folder."""
    model = load_exported(folder, head, trust_remote_code=trust_remote_code)
    return loss_of(model, head, batches, autocast=autocast)
