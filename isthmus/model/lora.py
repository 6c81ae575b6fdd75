"""Low-rank adapters in a stage's own layers, through peft: the model's weights stay, the adapters learn."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from isthmus.errors import UserError, import_extra
from isthmus.job.sections import LoraSpec
from isthmus.model.heads import Head
from isthmus.model.random import CPU, generators_kept, seed_from, seed_generators

ADAPTER_FILE: Final = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE: Final = "adapter_config.json"
_NAME: Final = "default"
_BASE: Final = ".base_layer"
# What peft puts before the names of the model that it wraps.
_WRAPPED: Final = "base_model.model."
# Where experts are one tensor, peft takes these names for theirs, also in dense layers and shared experts.
_EXPERT_NAMES: Final = (".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")
_TASKS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "causal-lm": "CAUSAL_LM",
        "sequence-classification": "SEQ_CLS",
        "token-classification": "TOKEN_CLS",
        "question-answering": "QUESTION_ANS",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of one stage, beside parameters that started fresh and so learn as well."""

    spec: LoraSpec
    config: Any
    """peft's own, as it is exported."""
    fresh_names: frozenset[str]
    is_transposed: bool
    """Whether weights are laid out as inputs by outputs, as GPT-2 has them."""

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write what was trained, as peft reads it; weights are by their names in the model."""
        tensors = {
            _WRAPPED + name.replace(f".{_NAME}.", "."): tensor.detach().contiguous()
            for name, tensor in weights.items()
            if ".lora_" in name or name in self.fresh_names
        }
        save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
        self.config.save_pretrained(folder)

    def merged(self, weights: Mapping[str, Tensor], scratch: Path) -> dict[str, Tensor]:
        """The weights as if the model had been trained itself, under its own names.

        What is merged is mapped from files in `scratch`, so that memory holds one such tensor at a time.
        """
        return {
            name.replace(f"{_BASE}.", "."): self._merge(name, tensor, weights, scratch)
            for name, tensor in weights.items()
            if ".lora_" not in name
        }

    def _merge(self, name: str, tensor: Tensor, weights: Mapping[str, Tensor], scratch: Path) -> Tensor:
        module, is_adapted, _ = name.partition(f"{_BASE}.weight")
        if not is_adapted:
            return tensor
        down, up = (weights[f"{module}.lora_{half}.{_NAME}.weight"].float() for half in ("A", "B"))
        change = up @ down * (self.spec.alpha / self.spec.r)
        mapped: Tensor = torch.from_file(
            str(scratch / name), shared=True, size=tensor.numel(), dtype=tensor.dtype
        )
        return mapped.view(tensor.shape).copy_(tensor.float() + (change.T if self.is_transposed else change))


def add_adapters(
    model: PreTrainedModel,
    spec: LoraSpec,
    *,
    layer_paths: Sequence[str],
    head: Head,
    has_experts: bool,
    fresh_names: Iterable[str],
    seed: int,
) -> Adapters:
    """Put adapters into these layers, and let nothing else learn but what started fresh."""
    peft = import_extra("peft", extra="lora", what="[model.lora]")
    targets = _targets(model, spec, layer_paths, has_experts=has_experts)
    is_transposed = any(isinstance(model.get_submodule(target), Conv1D) for target in targets)
    shared = {"r": spec.r, "lora_alpha": spec.alpha, "fan_in_fan_out": is_transposed}
    with generators_kept(CPU):
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, **shared), model)
        for target in targets:
            module: Any = model.get_submodule(target)
            if not hasattr(module, "reset_lora_parameters"):
                raise UserError(
                    f"peft gives {target} of {type(model).__name__} no adapter: its experts have that name",
                    hint="leave model.lora.targets out, or name modules of attention",
                )
            seed_generators(seed_from("adapter", seed, target), CPU)
            module.reset_lora_parameters(_NAME, init_lora_weights=True)
    fresh = frozenset(fresh_names)
    for name in fresh:
        model.get_parameter(name).requires_grad_()
    exported = peft.LoraConfig(
        target_modules=sorted(spec.targets or {_within_layer(one, layer_paths) for one in targets}),
        modules_to_save=sorted({_top(model, name) for name in fresh}) or None,
        task_type=_TASKS.get(head.name),
        base_model_name_or_path=model.config.name_or_path,
        inference_mode=True,
        **shared,
    )
    return Adapters(spec=spec, config=exported, fresh_names=fresh, is_transposed=is_transposed)


def _targets(
    model: PreTrainedModel, spec: LoraSpec, layer_paths: Sequence[str], *, has_experts: bool
) -> list[str]:
    """The full names of the modules that get an adapter; every name that the job gives must be one."""
    linear = [
        f"{path}.{name}"
        for path in layer_paths
        for name, module in model.get_submodule(path).named_modules()
        if type(module) in (nn.Linear, Conv1D)  # some routers are subclasses that return tuples
    ]
    if spec.targets is None:
        return [name for name in linear if not (has_experts and name.endswith(_EXPERT_NAMES))]
    for target in spec.targets:
        if not any(name.endswith(f".{target}") for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise UserError(
                f"model.lora.targets has {target!r}, which is no linear module of {type(model).__name__}",
                hint=f"its layers have {', '.join(known)}" if known else "its layers have none",
            )
    return [name for name in linear if name.endswith(tuple(f".{target}" for target in spec.targets))]


def _within_layer(name: str, layer_paths: Sequence[str]) -> str:
    (path,) = (path for path in layer_paths if name.startswith(f"{path}."))
    return name.removeprefix(f"{path}.")


def _top(model: PreTrainedModel, name: str) -> str:
    """The module that a fresh parameter belongs to: the head, or a part of the base model."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == model.base_model_prefix else 1])
