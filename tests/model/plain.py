"""A pass through a model as transformers builds it, without a line of ours in it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from isthmus.model.blueprint import Blueprint
from isthmus.model.random import RngKey, generators_kept
from isthmus.model.stage import Batch
from tests.model.cases import RNG_KEY, Pass

CPU = torch.device("cpu")


def plain_model(plan: Blueprint, values: dict[str, Tensor]) -> PreTrainedModel:
    """The model as transformers builds it, without a line of ours in it, untied."""
    config = copy.deepcopy(plan.config)
    config.tie_word_embeddings = False
    model: PreTrainedModel = plan.model_class(config)
    model.load_state_dict(values, strict=False)
    model.train()
    return model


def seed_layers(model: PreTrainedModel, path: str, rng_key: RngKey) -> None:
    def seeding(place: str) -> Callable[..., None]:
        def seed(_module: nn.Module, _args: object) -> None:
            rng_key.seed_place(place, CPU)

        return seed

    for index, layer in enumerate(model.base_model.get_submodule(path).children()):
        layer.register_forward_pre_hook(seeding(f"layer {index}"))


def plain_pass(plan: Blueprint, batch: Batch, values: dict[str, Tensor]) -> Pass:
    model = plain_model(plan, values)
    seed_layers(model, plan.family.layers, RNG_KEY)
    assert batch.labels is not None
    extra: dict[str, Any] = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
    with generators_kept(CPU):
        RNG_KEY.seed_place("embedding", CPU)
        output = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, **extra)
        loss = plan.head.loss(plan.head.scores(output), batch.labels)
    torch.autograd.backward(loss, torch.full_like(loss, 1 / batch.num_targets))
    grads = {name: p.grad for name, p in model.named_parameters()}
    return Pass(loss=loss.detach(), grads=grads, balance=0.0)
