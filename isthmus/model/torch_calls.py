"""Counts what kernels compute and allocate, and lets fake tensors of the CPU do what an accelerator would.

All private parts of torch that the package calls stand here, those of training at the end; `isthmus.model`
checks their names when it is imported. Tested with torch 2.11 to 2.13.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(slots=True)
class PartCount:
    """What one part does in one direction; bytes are live bytes of the whole pass."""

    start_bytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0
    flops: float = 0.0
    float32_flops: float = 0.0
    moved_bytes: float = 0.0
    num_kernels: int = 0


class CostLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes, operations and kernels, by the part and the direction that run."""

    def __init__(self, *, on_accelerator: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self._on_accelerator = on_accelerator
        self._storages: dict[int, int] = {}
        self._count = PartCount()

    def enter(self, count: PartCount) -> None:
        """Count for another part from now on."""
        self._count.end_bytes = self.live_bytes
        count.start_bytes = count.peak_bytes = self.live_bytes
        self._count = count

    def add_flops(self, flops: float, *, is_wide: bool) -> None:
        """Count operations that no kernel of torch shows."""
        if is_wide:
            self._count.float32_flops += flops
        else:
            self._count.flops += flops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return output
        made = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        for tensor in made:
            self._note(tensor)
        if self._on_accelerator and func.overloadpacket is torch.ops.aten._softmax_backward_data:
            # There it multiplies gradient and result into a tensor of its own.
            extra_bytes = self.live_bytes + sum(tensor.nbytes for tensor in made)
            self._count.peak_bytes = max(self._count.peak_bytes, extra_bytes)
        if not _is_view(func):
            self._count_kernel(func, args, kwargs or {}, output, made)
        return output

    def _count_kernel(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, made: list[Tensor]
    ) -> None:
        self._count.num_kernels += 1
        read = [one for one in tree_leaves([args, kwargs]) if isinstance(one, Tensor)]
        count_flops = flop_registry.get(func.overloadpacket)
        if count_flops is None:
            self._count.moved_bytes += sum(one.nbytes for one in (*read, *made))
        else:
            is_wide = any(one.dtype == torch.float32 for one in read)
            self.add_flops(count_flops(*args, **kwargs, out_val=output), is_wide=is_wide)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # what all views of one memory have in common
        if key in self._storages:
            return
        self._storages[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self._count.peak_bytes = max(self._count.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)


# They allocate, or change only how a tensor is seen, and start no kernel.
_NO_KERNELS: Final = frozenset({"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty"})


def on_gradient(tensor: Tensor, tell: Callable[[], None]) -> None:
    """Call something when the gradient of a tensor is there, if it will have one."""
    if tensor.requires_grad:
        tensor.register_hook(lambda _: tell())  # type: ignore[no-untyped-call]


def _is_view(func: Any) -> bool:
    if func.overloadpacket.__name__ in _NO_KERNELS:
        return True
    returned = [one.alias_info for one in func._schema.returns]
    return any(one is not None and not one.is_write for one in returned)


class _Attention(torch.autograd.Function):
    """Fused attention as accelerators have it: it keeps its inputs, its output and a number for each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, width = query.shape
        # It lies in memory as the queries do.
        output = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
        if value.shape[-1] != width:
            output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        log_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums, mask)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del gradients
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


# What autocast computes in float32 on CUDA devices, by torch's documentation, as far as models use it.
_WIDE_NAMES: Final = ["softmax", "log_softmax", "pow", "exp", "log", "rsqrt", "cumsum", "sum", "norm"]
_WIDE_OPERATIONS: Final = frozenset(
    {
        *(getattr(place, name) for name in _WIDE_NAMES for place in (torch, Tensor)),
        Tensor.__pow__,
        torch.layer_norm,
        functional.layer_norm,
        functional.group_norm,
        functional.normalize,
        functional.softmax,
        functional.log_softmax,
        functional.softplus,
        functional.cross_entropy,
        functional.mse_loss,
    }
)


class _GroupedProduct(torch.autograd.Function):
    """The product of each expert with its own rows: fake tensors have it in bfloat16 alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.rows_like, ctx.weight_like = rows.shape, weight.shape
        needs_rows, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None)
        return rows.new_empty(rows.shape[0], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needs_rows, needs_weight = ctx.needs_input_grad
        return (
            gradients[0].new_empty(ctx.rows_like) if needs_rows else None,
            gradients[0].new_empty(ctx.weight_like) if needs_weight else None,
        )


class Emulation(TorchFunctionMode):
    """Lets fake tensors of the CPU do what fake tensors cannot, or those of a CUDA device would.

    The rows of experts are multiplied in any precision. On an accelerator attention is fused, also with
    dropout; dropout keeps a mask of one byte per element; under autocast norms, softmax and powers are
    computed in float32.
    """

    def __init__(self, ledger: CostLedger, *, on_accelerator: bool) -> None:
        super().__init__()
        self._ledger = ledger
        self._on_accelerator = on_accelerator

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function that emulates wherever it runs, also where a backward pass runs it again."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (functional.grouped_mm, torch._grouped_mm):
            return self._grouped_product(*args[:2])
        if func is torch.rand and args == ([],):
            # BART and its kin ask, for each layer, whether to leave it out, which no stage does.
            return 1.0
        if not self._on_accelerator:
            return func(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _WIDE_OPERATIONS and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(one) for one in args)
            kwargs = {name: _widened(one) for name, one in kwargs.items()}
        return func(*args, **kwargs)

    def _grouped_product(self, rows: Tensor, weight: Tensor) -> Tensor:
        flops = 2.0 * rows.numel() * weight.shape[-1]
        output: Tensor = _GroupedProduct.apply(rows, weight)  # type: ignore[no-untyped-call]
        return self._counted(output, flops, backward_ratio=2, is_wide=rows.dtype == torch.float32)

    def _counted(self, output: Tensor, flops: float, *, backward_ratio: float, is_wide: bool) -> Tensor:
        """Count the operations of a pass and, when its gradient is there, of its backward."""
        self._ledger.add_flops(flops, is_wide=is_wide)
        on_gradient(output, lambda: self._ledger.add_flops(backward_ratio * flops, is_wide=is_wide))
        return output

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (one.to(torch.get_autocast_dtype("cpu")) for one in (query, key, value))
        is_wide = query.dtype == torch.float32
        if is_wide and enable_gqa and query.shape[1] != key.shape[1]:
            # No fused kernel takes groups of heads in float32.
            spelled_out: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
            )
            return spelled_out[0]
        # A causal mask halves the products; a backward pass recomputes one and has four more.
        share = 0.5 if is_causal and attn_mask is None else 1.0
        flops = 4.0 * share * query.numel() * key.shape[-2]
        output: Tensor = _Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        return self._counted(output, flops, backward_ratio=2.5, is_wide=is_wide)


def _dropout(hidden: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    del inplace
    return torch.native_dropout(hidden, p, True)[0] if training and p > 0 else hidden


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value


# Private calls of training.


def scale_all(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors in place, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def prepare_shards(stage: nn.Module) -> None:
    """Let the whole stage be FSDP2's root, before one of its layers runs or is gathered by itself."""
    _shard_state(stage)._lazy_init()


def shard_groups(stage: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters that are gathered and reduced together."""
    for state in _shard_state(stage)._state_ctx.all_states:
        several = getattr(state, "_fsdp_param_groups", None)
        yield from several if several is not None else filter(None, [state._fsdp_param_group])


def reduce_shards(stage: nn.Module) -> None:
    """Reduce the gradients that backwards without synchronisation have left, on all ranks."""
    for group in shard_groups(stage):
        _fill_gaps(group)
        group.post_backward()
    _shard_state(stage)._root_post_backward_final_callback()


def _fill_gaps(group: Any) -> None:
    """Give zero gradients to parameters that no micro-batch of this rank has used."""
    for one in group.fsdp_params:
        parameter = one.unsharded_param
        is_empty = one.unsharded_accumulated_grad is None and parameter.grad is None
        if is_empty and parameter.requires_grad:
            # As backwards leave theirs: in the type that is reduced, which all of a group must share.
            if one.reduce_dtype is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                one.unsharded_accumulated_grad = torch.zeros_like(parameter, dtype=one.reduce_dtype)


def _shard_state(stage: nn.Module) -> Any:
    return fully_shard.state(stage)  # type: ignore[attr-defined]
