"""A cut inside one process: what crosses is coded and decoded in the graph, as it would be between clouds."""

from typing import Any

import torch
from torch import Tensor

from isthmus.codec.base import Key
from isthmus.codec.ends import ReceivingEnd, SendingEnd


def cross(
    x: Tensor,
    *,
    sending: SendingEnd,
    receiving: ReceivingEnd,
    key: Key,
    ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """What arrives of x, of shape (batch, tokens, width) or (rows, width); gradients cross back the same way.

    Rows where the mask is 0 stay behind and arrive as zeros. Nothing is kept where no gradient is wanted.
    """
    keeps = torch.is_grad_enabled() and x.requires_grad
    rows = x.flatten(0, -2) if mask is None else x[mask.bool()]
    ids_N = None if ids is None else (ids.flatten() if mask is None else ids[mask.bool()])
    arrived: Tensor = _Crossing.apply(rows, sending, receiving, key, ids_N, keeps)  # type: ignore[no-untyped-call]
    if mask is None:
        return arrived.view(x.shape)
    return arrived.new_zeros(x.shape).index_put((mask.bool(),), arrived)


class _Crossing(torch.autograd.Function):
    """Forward: decode(encode(x)). Backward: decode_gradient(encode_gradient(g))."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        sending: SendingEnd,
        receiving: ReceivingEnd,
        key: Key,
        ids_N: Tensor | None,
        keeps: bool,
    ) -> Tensor:
        """What the receiving end decodes."""
        ctx.ends = (sending, receiving)
        ctx.key = key
        with _plain_arithmetic(x_ND):
            payload = sending.encode(x_ND, key=key, ids_N=ids_N, keeps=keeps, learns=keeps)
            arrived = receiving.decode(payload, key=key, num_rows=x_ND.shape[0], ids_N=ids_N, keeps=keeps)
        # An autograd function must not hand out a view of what it was given, which raw bytes are.
        return arrived.to(x_ND.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """What the sending end decodes."""
        (g_ND,) = grads
        sending, receiving = ctx.ends
        with _plain_arithmetic(g_ND):
            payload = receiving.encode_gradient(g_ND, key=ctx.key)
            arrived = sending.decode_gradient(payload, key=ctx.key, num_rows=g_ND.shape[0])
        return arrived.to(g_ND.dtype), None, None, None, None, None


def _plain_arithmetic(like: Tensor) -> torch.autocast:
    """Between clouds coders run on threads of their own, where no autocast reaches them."""
    return torch.autocast(like.device.type, enabled=False)
