"""Finds out whether a model sorts the tokens of a batch by their values, as routers of experts do.

A router sorts padding too, so the rows that an expert computes together depend on padding. Such a model
trains like the uncut one only if padding crosses a cut with all the rest.

The model runs on the meta device, where tensors have no values, and is watched for integers that are made of
hidden states and then used. So the answer follows from the model's code and configuration alone: it costs no
memory, and is the same on every machine.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from isthmus.model.cut import first_input
from isthmus.model.families import Family
from isthmus.model.transformers_calls import expect_no_padding, one_sequence_a_row

_BATCH_SHAPE: Final = (2, 4)


def sorts_tokens(model: PreTrainedModel, family: Family) -> bool:
    """Whether rows of a batch are chosen by their values; the model is on the meta device, and used up."""
    watch = _Watch()

    def follow(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch.follow(first_input(args, kwargs))

    expect_no_padding(model)
    for layer in model.base_model.get_submodule(family.layers).children():
        layer.register_forward_pre_hook(follow, with_kwargs=True)
    ids = torch.zeros(_BATCH_SHAPE, dtype=torch.long, device="meta")
    try:
        with watch, one_sequence_a_row(True), torch.no_grad():
            model.base_model(input_ids=ids, use_cache=False)
    except (_IntegersUsed, RuntimeError):
        # The RuntimeError of a model that asks for values, which the meta device has not.
        return True
    return False


class _IntegersUsed(Exception):
    """Ends a run that has shown what it was for."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is computed from hidden states, and raises `_IntegersUsed` where integers of it are used.

    Integers that nobody uses decide nothing: `max` gives some beside the values that it is called for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By their memory, which views share; the tensors are kept, so that no other gets the same memory.
        self._followed: dict[int, Tensor] = {}

    def follow(self, tensor: Tensor) -> None:
        """Follow all that is computed from this tensor."""
        self._followed[_memory(tensor)] = tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        followed = [one for one in _tensors([args, kwargs]) if _memory(one) in self._followed]
        if any(_is_integer(one) for one in followed):
            raise _IntegersUsed
        output = func(*args, **(kwargs or {}))
        if followed:
            for one in _tensors(output):
                self.follow(one)
        return output


def _tensors(values: Any) -> Iterator[Tensor]:
    return (one for one in tree_leaves(values) if isinstance(one, Tensor))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
