"""The same layers in plain PyTorch and transformers: no scheduler, no links, no stage."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModel


class PlainLoop:
    """A training step as a user of transformers would write it: micro-batches in turn, then the update."""

    def __init__(self, config: dict[str, Any], device: torch.device, *, is_sharded: bool) -> None:
        values = dict(config)
        made = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device(device):
            self.model: Any = AutoModel.from_config(made)
        # The measured stage has none: the norm belongs to the stage behind it.
        self.model.norm = nn.Identity()
        self._autocast = None if is_sharded else torch.bfloat16
        self._device = device
        if is_sharded:
            _shard(self.model, device)
        self._adamw = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=device.type != "cpu"
        )
        self.model.train()

    def compile(self, *, backend: str = "inductor") -> None:
        """Compile each layer by itself, as the stage does."""
        for layer in self.model.layers:
            layer.compile(backend=backend)

    def step(self, batches: list[Tensor], gradient: Tensor) -> None:
        """Train on micro-batches of ids, with one gradient for the hidden states of each."""
        for number, ids in enumerate(batches):
            if isinstance(self.model, FSDPModule):
                is_last = number == len(batches) - 1
                self.model.set_requires_gradient_sync(is_last)
                self.model.set_is_last_backward(is_last)
                self.model.set_reshard_after_backward(is_last)
            on_device = ids.to(self._device)
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast is not None):
                hidden = self.model(input_ids=on_device, use_cache=False).last_hidden_state
            torch.autograd.backward(hidden, gradient.to(hidden.dtype))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)


def _shard(model: Any, device: torch.device) -> None:
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "reshard_after_forward": False,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
