"""What the sender of a low-rank crossing has observed of hidden states, and the axes that it fits to them.

A trained bottleneck starts from these figures, and the codec `subspace`, a bottleneck that is not trained, is
fitted to them again and again.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

# An id's mean is drawn to the mean of all by so many tokens: one that came once is not taken at its word.
_PRIOR_TOKENS: Final = 1.0
# Hidden states drift while a model learns, so only this many of the latest count.
_TOKENS_PER_ID: Final = 256.0
_TOKENS_PER_DIMENSION: Final = 64.0
# Beyond it sums over tokens would not be finite.
_MAX_SQUARED_NORM: Final = 1e30
_NUM_SPARE_AXES: Final = 8
_NUM_ITERATIONS: Final = 4

AllReduce = Callable[[Tensor], None]
"""Sums a tensor over all ranks of a cloud, in place; all of them call it, in one order."""


class TokenMeans(nn.Module):
    """Sums by token id, for the first `num_rows` ids that come: of a large vocabulary, the frequent ones."""

    row_of_V: Tensor
    weight_K: Tensor
    sum_KD: Tensor
    num_K: Tensor

    def __init__(self, *, vocabulary_size: int, num_rows: int, width: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        # The last row is of no id: those that have none are counted there, and their sum stays zero.
        self.register_buffer("row_of_V", torch.full((vocabulary_size,), num_rows))
        self.register_buffer("weight_K", torch.zeros(num_rows + 1))
        self.register_buffer("sum_KD", torch.zeros(num_rows + 1, width))
        self.register_buffer("num_K", torch.zeros(num_rows + 1))

    def add(self, h_ND: Tensor, ids_N: Tensor, weights_N: Tensor) -> None:
        """Count hidden states in, and give ids that are new a row while there are any."""
        self._give_rows(ids_N, weights_N)
        rows_N = self.row_of_V[ids_N]
        self.num_K.index_add_(0, rows_N, weights_N)
        weights_N = weights_N * (rows_N < self._num_rows)
        self.weight_K.index_add_(0, rows_N, weights_N)
        self.sum_KD.index_add_(0, rows_N, h_ND * weights_N[:, None])
        keep_N = _keep(self.weight_K[rows_N], _TOKENS_PER_ID)
        # An id that comes several times writes the same values each time.
        self.sum_KD[rows_N] = self.sum_KD[rows_N] * keep_N[:, None]
        self.weight_K[rows_N] = self.weight_K[rows_N] * keep_N

    def weight_of(self, ids_N: Tensor) -> Tensor:
        """How many tokens of each id count."""
        return self.weight_K[self.row_of_V[ids_N]]

    def deviations_of(self, ids_N: Tensor, mean_D: Tensor) -> Tensor:
        """How far the mean of each id lies from the mean of all; of shape (ids, width)."""
        rows_N = self.row_of_V[ids_N]
        return _deviations(self.sum_KD[rows_N], self.weight_K[rows_N], mean_D)

    def covariance(self, mean_D: Tensor) -> Tensor:
        """How the means of ids vary around the mean of all, each as often as it came."""
        off_KD = _deviations(self.sum_KD, self.weight_K, mean_D)
        return (off_KD * self.num_K[:, None]).T @ off_KD / self.num_K.sum().clamp(min=1.0)

    def pool(self, all_reduce: AllReduce) -> None:
        """Count in what all ranks have seen; where rows are too few, the most frequent ids get them."""
        num_V = torch.where(self.row_of_V < self._num_rows, self.num_K[self.row_of_V], 0.0)
        num_all = self.num_K.sum()
        for one in (num_V, num_all):
            all_reduce(one)
        ids_N = num_V.argsort(descending=True, stable=True)[: min(self._num_rows, int((num_V > 0).sum()))]
        for one in (self.weight_K, self.sum_KD):
            own_N = one[self.row_of_V[ids_N]]
            one.zero_()[: len(ids_N)] = own_N
            all_reduce(one)
        self.num_K.zero_()[: len(ids_N)] = num_V[ids_N]
        self.num_K[-1] = num_all - num_V[ids_N].sum()
        self.row_of_V.fill_(self._num_rows)[ids_N] = torch.arange(len(ids_N), device=ids_N.device)

    def _give_rows(self, ids_N: Tensor, weights_N: Tensor) -> None:
        came_V = torch.zeros_like(self.row_of_V).index_add_(0, ids_N, (weights_N > 0).to(self.row_of_V.dtype))
        is_new_V = (came_V > 0) & (self.row_of_V == self._num_rows)
        num_given = (self.row_of_V < self._num_rows).sum()
        next_V = (num_given + is_new_V.cumsum(0) - 1).clamp(max=self._num_rows)
        self.row_of_V.copy_(torch.where(is_new_V, next_V, self.row_of_V))


class Observed(nn.Module):
    """The mean of hidden states, and their scatter around what both ends will know of them beforehand."""

    weight: Tensor
    mean_D: Tensor
    scatter_weight: Tensor
    scatter_DD: Tensor
    spread: Tensor

    def __init__(self, *, width: int, tokens: TokenMeans | None) -> None:
        super().__init__()
        self._max_weight = _TOKENS_PER_DIMENSION * width
        self.tokens = tokens
        self.register_buffer("weight", torch.zeros(()))
        self.register_buffer("mean_D", torch.zeros(width))
        self.register_buffer("scatter_weight", torch.zeros(()))
        self.register_buffer("scatter_DD", torch.zeros(width, width))
        self.register_buffer("spread", torch.zeros(()))

    @torch.no_grad()
    def add(
        self,
        h_BTD: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor | None = None,
        *,
        known_ND: Tensor | None = None,
    ) -> None:
        """Count in the hidden states of a micro-batch, less its padding and rows that are not finite.

        The scatter is taken around what is known of each row, where that is given, else around the means so
        far.
        """
        h_ND = h_BTD.detach().float().flatten(0, -2)
        ids_N = ids_BT.flatten()
        is_usable_N = h_ND.square().sum(-1) < _MAX_SQUARED_NORM
        weights_N = is_usable_N.float()
        if mask_BT is not None:
            weights_N = weights_N * (mask_BT.flatten() != 0)
        h_ND = torch.where(is_usable_N[:, None], h_ND, 0.0)
        with torch.autocast(h_ND.device.type, enabled=False):
            self._add_mean(h_ND, weights_N)
            if self.tokens is not None:
                self.tokens.add(h_ND, ids_N, weights_N)
            off_ND = self._surprise(h_ND, ids_N) if known_ND is None else h_ND - known_ND
            self._add_scatter(off_ND, h_ND, weights_N)

    @torch.no_grad()
    def pool(self, all_reduce: AllReduce) -> None:
        """Count in what all ranks have seen; all of them have the same then, and none observes any more."""
        own_D, sum_D = self.mean_D.clone(), self.mean_D * self.weight
        for one in (sum_D, self.weight):
            all_reduce(one)
        self.mean_D.copy_(sum_D / self.weight.clamp(min=1.0))
        off_D = own_D - self.mean_D
        self.spread.add_(self.scatter_weight * off_D.square().sum())
        if self.tokens is None:
            # By token id, a surprise is measured from the mean of its id, wherever that of all lies.
            self.scatter_DD.add_(self.scatter_weight * off_D.outer(off_D))
        else:
            self.tokens.pool(all_reduce)
        for one in (self.spread, self.scatter_DD, self.scatter_weight):
            all_reduce(one)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been counted in."""
        return float(self.weight) == 0

    def fade(self, share: Tensor | float) -> None:
        """Let the scatter so far count for this share of what it did."""
        for one in (self.scatter_DD, self.spread, self.scatter_weight):
            one.mul_(share)

    def covariance(self) -> Tensor:
        """How hidden states vary around what is known beforehand."""
        return self.scatter_DD / self.scatter_weight.clamp(min=1.0)

    def variance(self) -> Tensor:
        """How far hidden states lie from the mean of all, squared."""
        return self.spread / self.scatter_weight.clamp(min=1.0)

    def _add_mean(self, h_ND: Tensor, weights_N: Tensor) -> None:
        added = weights_N.sum()
        self.weight.add_(added)
        off_D = ((h_ND - self.mean_D) * weights_N[:, None]).sum(0)
        self.mean_D.add_(off_D / self.weight.clamp(min=1.0))
        self.weight.mul_(_keep(self.weight, self._max_weight))

    def _add_scatter(self, x_ND: Tensor, h_ND: Tensor, weights_N: Tensor) -> None:
        self.scatter_DD.addmm_((x_ND * weights_N[:, None]).T, x_ND)
        self.spread.add_(((h_ND - self.mean_D).square().sum(-1) * weights_N).sum())
        self.scatter_weight.add_(weights_N.sum())
        self.fade(_keep(self.scatter_weight, self._max_weight))

    def _surprise(self, h_ND: Tensor, ids_N: Tensor) -> Tensor:
        """Hidden states less what all others say of them: a token's own part of its id's mean is taken out.

        Otherwise ids that came once would seem to be foreseen.
        """
        off_ND = h_ND - self.mean_D
        if self.tokens is None:
            return off_ND
        num_N = self.tokens.weight_of(ids_N)
        factor_N = (num_N + _PRIOR_TOKENS) / (num_N + _PRIOR_TOKENS - (num_N > 0).float())
        return (off_ND - self.tokens.deviations_of(ids_N, self.mean_D)) * factor_N[:, None]


def principal_axes(covariance_DD: Tensor, *, rank: int) -> Tensor:
    """Orthonormal directions of most variance, the first one first; of shape (width, rank)."""
    # On the host: not every accelerator decomposes matrices, and this happens once in a run.
    axes_DD: Tensor = torch.linalg.eigh(covariance_DD.to("cpu", torch.float64)).eigenvectors
    return axes_DD.flip(-1)[:, :rank].to(covariance_DD)


def refined_axes(covariance_DD: Tensor, *, rank: int, start_DR: Tensor | None) -> Tensor:
    """The same directions by subspace iteration from those of last time.

    Takes width² × rank operations instead of width³, so it may happen often.
    """
    width = len(covariance_DD)
    generator = torch.Generator().manual_seed(width)
    axes_DQ = torch.randn(width, min(rank + _NUM_SPARE_AXES, width), generator=generator)
    axes_DQ = axes_DQ.to(covariance_DD)
    if start_DR is not None:
        axes_DQ[:, : start_DR.shape[1]] = start_DR
    for _ in range(_NUM_ITERATIONS):
        axes_DQ = torch.linalg.qr(covariance_DD @ axes_DQ).Q
    turn_QQ = torch.linalg.eigh(axes_DQ.T @ covariance_DD @ axes_DQ).eigenvectors
    axes_DR: Tensor = axes_DQ @ turn_QQ.flip(1)[:, :rank]
    return axes_DR


def _deviations(sum_KD: Tensor, weight_K: Tensor, mean_D: Tensor) -> Tensor:
    return (sum_KD - weight_K[:, None] * mean_D) / (weight_K[:, None] + _PRIOR_TOKENS)


def _keep(weight: Tensor, most: float) -> Tensor:
    """The share of old tokens that still count, where no more than so many may."""
    return most / weight.clamp(min=most)
