"""Models for tests of plans: estimated from their sizes, or measured."""

import functools
import json
from typing import Any

from isthmus.job.sections import LoraSpec
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.costs import MeasuredModel, Training
from isthmus.model.heads import HEADS
from isthmus.plan.costs import ModelCosts, Task, Workload
from isthmus.plan.models import EstimatedModel, estimated_model

LLAMA_7B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def estimated(*, num_frozen: int = 0, lora: LoraSpec | None = None, **changes: object) -> EstimatedModel:
    """A Llama of 7 billion parameters, or another model of the same keys."""
    return estimated_model(
        {**LLAMA_7B, **changes},
        task=Task.CAUSAL_LM,
        num_frozen=num_frozen,
        lora=lora,
        has_positions=False,
    )


def measured(
    config: dict[str, Any],
    workload: Workload,
    *,
    task: Task = Task.CAUSAL_LM,
    num_frozen: int = 0,
    lora: LoraSpec | None = None,
) -> ModelCosts:
    """The costs of a model as fake tensors show them."""
    return _measured(json.dumps(config), workload, task, num_frozen, lora)


@functools.cache
def _measured(
    config: str, workload: Workload, task: Task, num_frozen: int, lora: LoraSpec | None
) -> ModelCosts:
    blueprint = fresh_blueprint(json.loads(config), head=HEADS[task.value])
    training = Training(num_frozen_layers=num_frozen, lora=lora)
    return MeasuredModel(blueprint, training, has_bfloat16=False).costs(workload)
