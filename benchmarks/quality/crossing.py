"""A cut within one autograd graph: both ends of its codecs in one process."""

from typing import Any

import torch
from torch import Tensor

from isthmus.codec import CodecEnd, Key


def cross(
    x: Tensor,
    *,
    sending: CodecEnd,
    receiving: CodecEnd,
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
    """Forward: decode(encode(x)). Backward: decode_gradient(encode_gradient(g)).

    Between clouds coders run on threads of their own, where no autocast reaches them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        sending: CodecEnd,
        receiving: CodecEnd,
        key: Key,
        ids_N: Tensor | None,
        keeps: bool,
    ) -> Tensor:
        ctx.sending, ctx.receiving, ctx.key = sending, receiving, key
        with torch.autocast(x_ND.device.type, enabled=False):
            payload = sending.encode(x_ND, key=key, ids_N=ids_N, keeps=keeps, learns=keeps)
            arrived = receiving.decode(payload, key=key, num_rows=len(x_ND), ids_N=ids_N, keeps=keeps)
        # An autograd function must not hand out a view of what it was given, which raw bytes are.
        return arrived.to(x_ND.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (g_ND,) = grads
        with torch.autocast(g_ND.device.type, enabled=False):
            payload = ctx.receiving.encode_gradient(g_ND, key=ctx.key)
            arrived = ctx.sending.decode_gradient(payload, key=ctx.key, num_rows=len(g_ND))
        return arrived.to(g_ND.dtype), None, None, None, None, None
