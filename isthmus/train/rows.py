"""Rows of tokens: what crosses a cut has one for each token that is no padding."""

from collections.abc import Collection

import torch
from torch import Tensor

from isthmus.errors import FrameError


def mask_of(ids_BT: Tensor, mask_BT: Tensor | None, *, keeps_padding: bool) -> Tensor:
    """1 for what counts as a token, 0 for padding; where that is kept, all counts."""
    return torch.ones_like(ids_BT) if mask_BT is None or keeps_padding else mask_BT


def valid_rows(mask_BT: Tensor | None, *, without: Collection[int] = ()) -> Tensor | None:
    """The numbers of the rows that cross, on the host; None where all do.

    Sequences in `without` do not cross; a mask is needed to leave them out.
    """
    if mask_BT is None or (not without and bool(mask_BT.all())):
        return None
    crosses = mask_BT.bool()
    if without:
        crosses = crosses.clone()
        crosses[list(without)] = False
    return crosses.flatten().nonzero().squeeze(1)


def drop_padding(x_BTD: Tensor, index_N: Tensor | None) -> Tensor:
    """The rows that cross, of shape (rows, width); a view where all do."""
    rows = x_BTD.flatten(0, -2)
    return rows if index_N is None else rows[index_N.to(rows.device)]


def restore_padding(rows_ND: Tensor, index_N: Tensor | None, *, shape: tuple[int, ...]) -> Tensor:
    """The rows at their places among zeros; a view where all crossed."""
    num_rows = torch.Size(shape[:-1]).numel() if index_N is None else len(index_N)
    if tuple(rows_ND.shape) != (num_rows, shape[-1]):
        raise FrameError(f"what crossed has shape {tuple(rows_ND.shape)}, which does not fit {shape}")
    if index_N is None:
        return rows_ND.view(shape)
    whole = rows_ND.new_zeros(shape)
    whole.flatten(0, -2)[index_N.to(rows_ND.device)] = rows_ND
    return whole
